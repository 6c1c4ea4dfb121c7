#!/bin/bash
# A run on a Slurm cluster: one torchrun on every node, started again where it stopped when it was preempted or failed.
#
#   sbatch --nodes=4 launch/slurm.sh --config=train_configs/llama3_8b.toml
#
# Edit the lines below for your cluster; options of sbatch override them. Submit it from the project's folder, which all
# nodes must see, and in which ./setup.sh has run.
#SBATCH --job-name=titanite
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

export NPROC_PER_NODE=${NPROC_PER_NODE:-${SLURM_GPUS_ON_NODE:-1}}  # processes on a node
export MAX_RESTARTS=${MAX_RESTARTS:-100}                           # the run itself ends restarts without progress
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
address_of() { scontrol show node "$1" | sed -n 's/.*NodeAddr=\([^ ]*\).*/\1/p'; }
hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
address=$(address_of "${hosts%%$'\n'*}")
export RENDEZVOUS=${address:?scontrol names no address of node ${hosts%%$'\n'*}}:${PORT:-$((20000 + SLURM_JOB_ID % 20000))}
export -f address_of

last_start() { cat "$RUN_FOLDER/.started" 2>/dev/null || true; }
before=$(last_start)
trap : TERM  # the ranks are asked as well; this shell waits for them, as those on the nodes do
code=0
srun --kill-on-bad-exit=1 --export=ALL bash -c '
  [ "$SLURM_NODEID" = 0 ] && is_host=true || is_host=false
  launch/node.sh "$RUN_FOLDER" --nnodes="$SLURM_NNODES" --nproc-per-node="$NPROC_PER_NODE" \
    --max-restarts="$MAX_RESTARTS" --rdzv-id="$SLURM_JOB_ID" --rdzv-backend=c10d --rdzv-endpoint="$RENDEZVOUS" \
    --rdzv-conf="is_host=$is_host" --local-addr="$(address_of "$SLURMD_NODENAME")" train.py "$@"
' titanite "$@" || code=$?

asks_again() {  # as in node.sh
  [ "$(last_start)" != "$before" ] || return 1
  [ ! -s "$RUN_FOLDER/exit.json" ] || grep -q '"start_again": true' "$RUN_FOLDER/exit.json"
}
# srun returns the highest exit code: 100 where a node gives up, 75 to start the job again; 137 or 143 if Slurm ended a node
# that was slow to follow another. A job that ends by itself before Slurm takes its nodes would count as failed, so it asks
# to be queued again; not when it was cancelled.
if [[ $code = 75 || $code = 137 || $code = 143 ]] && asks_again &&
  [[ $(scontrol show job "$job") = *JobState=RUNNING* ]]; then
  scontrol requeue "$job"
fi
if [[ ${folders[*]} && $RUN_FOLDER != "${folders[-1]}" ]] && is_finished; then
  exec bash "$0" "${settings[@]}"  # the next one
fi
exit $code
