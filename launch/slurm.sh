#!/bin/bash
# A run on a Slurm cluster: one torchrun on every node, started again where it stopped when it was preempted or failed.
#
#   sbatch --nodes=4 launch/slurm.sh --config=train_configs/llama3_8b.toml
#
# Edit the lines below for your cluster; options of sbatch override them. Submit it from the project's folder, which all
# nodes must see, and in which ./setup.sh has run.
#SBATCH --job-name=titanite
##SBATCH --account=ACCOUNT
##SBATCH --partition=PARTITION
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=slurm-%j.log
# Two minutes before the time is up, the ranks are asked to save and stop.
#SBATCH --signal=TERM@120
set -euo pipefail

# What your cluster needs. The settings of srun for pyxis, and a command that starts apptainer, run everything on the
# nodes in a container; VENV is an environment other than .venv, or /usr, there.
SRUN_OPTIONS=${SRUN_OPTIONS:-}  # --container-image=IMAGE --container-mounts=$PWD --container-workdir=$PWD
CONTAINER=${CONTAINER:-}        # apptainer exec --nv --bind $PWD IMAGE
export VENV=${VENV:-.venv}
prepare_node() {  # on every node, before the ranks
  :
  # module load cuda
  # export NCCL_SOCKET_IFNAME=ib0 NCCL_IB_HCA=mlx5
  # rsync --archive /shared/datasets/web /local/   # then train with --data.datasets=/local/web
}

export NPROC_PER_NODE=${NPROC_PER_NODE:-${SLURM_GPUS_ON_NODE:-1}}  # processes on a node
export MAX_RESTARTS=${MAX_RESTARTS:-100}                           # the run itself ends restarts without progress
export PREFLIGHT=${PREFLIGHT:-}                                    # arguments of tools.preflight: checks the nodes first
settings=("$@")
folders=()
is_finished() { grep -qs '"kind": "finished"' "$RUN_FOLDER/exit.json"; }
if [ "${STUDY_RUNS:-}" ]; then  # of tools.sweep --slurm: this task's line has the folders of its runs
  IFS=$'\t' read -ra folders < <(sed -n "${SLURM_ARRAY_TASK_ID}p" "$STUDY_RUNS")
  for RUN_FOLDER in "${folders[@]}"; do
    is_finished || break
  done
  if is_finished; then exit; fi
  set -- "--config=$RUN_FOLDER.toml" "$@"
fi
# Of an array, this task alone. The job's id names the run, so that a requeued job resumes it; with the cluster's, since
# two clusters may share a file system.
job=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_}${SLURM_ARRAY_TASK_ID:-$SLURM_JOB_ID}
export RUN_FOLDER=${RUN_FOLDER:-outputs/$SLURM_CLUSTER_NAME-$job}

# Where a node is reached (NodeAddr), which need not be its name. No address: the job fails, rather than try localhost.
addresses=()
for host in $(scontrol show hostnames "$SLURM_JOB_NODELIST"); do
  address=$(scontrol show node "$host" | sed -n 's/.*NodeAddr=\([^ ]*\).*/\1/p')
  addresses+=("${address:?scontrol names no address of node $host}")
done
export ADDRESSES=${addresses[*]} RENDEZVOUS=${addresses[0]}:${PORT:-$((20000 + SLURM_JOB_ID % 20000))} CONTAINER
export -f prepare_node

last_start() { cat "$RUN_FOLDER/.started" 2>/dev/null || true; }
before=$(last_start)
trap : TERM  # the ranks are asked as well; this shell waits for them, as those on the nodes do
code=0
# shellcheck disable=SC2086  # both are lists of words
srun --kill-on-bad-exit=1 --export=ALL $SRUN_OPTIONS bash -c '
  read -ra addresses <<<"$ADDRESSES"
  [ "$SLURM_NODEID" = 0 ] && is_host=true || is_host=false
  torchrun=(--nnodes="$SLURM_NNODES" --nproc-per-node="$NPROC_PER_NODE" --rdzv-backend=c10d
    --rdzv-endpoint="$RENDEZVOUS" --rdzv-conf="is_host=$is_host" --local-addr="${addresses[SLURM_NODEID]}")
  prepare_node || exit
  if [ "$PREFLIGHT" ]; then
    $CONTAINER "$VENV/bin/python" -m run.torchrun --rdzv-id="$SLURM_JOB_ID-preflight" "${torchrun[@]}" \
      -m tools.preflight $PREFLIGHT || exit
  fi
  $CONTAINER launch/node.sh "$RUN_FOLDER" --rdzv-id="$SLURM_JOB_ID" --max-restarts="$MAX_RESTARTS" "${torchrun[@]}" \
    train.py "$@"
' titanite "$@" || code=$?

# srun returns the highest exit code of launch/node.sh: 100 where a node gives up, 75 to start the job again; 137 or 143
# if Slurm ended a node before it could say that. A job that ends by itself before Slurm takes its nodes would count as
# failed, so it asks to be queued again; not when it was cancelled.
asks_again() {
  case $code in 75) return ;; 137 | 143) ;; *) return 1 ;; esac
  [ "$(last_start)" != "$before" ] || return 1
  [ ! -s "$RUN_FOLDER/exit.json" ] || grep -q '"start_again": true' "$RUN_FOLDER/exit.json"
}
if asks_again && [[ $(scontrol show job "$job") = *JobState=RUNNING* ]]; then
  scontrol requeue "$job"
fi
if [[ ${folders[*]} && $RUN_FOLDER != "${folders[-1]}" ]] && is_finished; then
  exec bash "$0" "${settings[@]}"  # the next one
fi
exit $code
