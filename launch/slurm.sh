#!/bin/bash
# A run on a Slurm cluster: one torchrun on every node, started again where it stopped when it was preempted or failed.
#
#   sbatch --nodes=4 launch/slurm.sh --config=train_configs/llama3_8b.toml
#
# Edit the lines below for your cluster; options of sbatch override them. To be submitted from the project's folder,
# which all nodes must see, and in which ./setup.sh has run.
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
# Seconds for the last checkpoint after SIGTERM; the partition's GraceTime or KillWait must allow as much.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-100}

# Where a node is reached (NodeAddr), which need not be its name. No address: the job fails, rather than try localhost.
address_of() { scontrol show node "$1" | sed -n 's/.*NodeAddr=\([^ ]*\).*/\1/p'; }
hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
address=$(address_of "${hosts%%$'\n'*}")
export RENDEZVOUS=${address:?scontrol names no address of node ${hosts%%$'\n'*}}:${PORT:-$((20000 + SLURM_JOB_ID % 20000))}
export -f address_of

# The job's id names the run, so that a requeued job resumes it; with the cluster's, since two may share a file system.
# srun returns the highest exit code, and where one node has failed --kill-on-bad-exit makes it 143 on the others: so each
# tells srun 256 less its own, by which the mistake on the one, 2, is above the stop of the others.
trap : TERM  # the ranks are asked as well; this shell waits for them, as those on the nodes do
code=0
srun --kill-on-bad-exit=1 --export=ALL bash -c '
  trap : TERM HUP USR1
  [ "$SLURM_NODEID" = 0 ] && is_host=true || is_host=false
  .venv/bin/python -m launch.torchrun \
    --nnodes="$SLURM_NNODES" --nproc-per-node="$NPROC_PER_NODE" --max-restarts="$MAX_RESTARTS" \
    --rdzv-id="slurm-$SLURM_CLUSTER_NAME-$SLURM_JOB_ID" --rdzv-backend=c10d --rdzv-endpoint="$RENDEZVOUS" \
    --rdzv-conf="is_host=$is_host" --local-addr="$(address_of "$SLURMD_NODENAME")" train.py "$@"
  exit $((256 - $?))
' titanite "$@" || code=$((256 - $?))

# 143, 138: asked to stop by SIGTERM or, with another --signal, SIGUSR1, as of preemption or the time limit, and saved;
# 75: to be tried again. A job that ends by itself before Slurm takes its nodes would count as failed, so it asks to be
# queued again; but not when it was cancelled. Of an array, this task alone.
job=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_}${SLURM_ARRAY_TASK_ID:-$SLURM_JOB_ID}
if [[ $code = 143 || $code = 138 || $code = 75 ]] && [[ $(scontrol show job "$job") = *JobState=RUNNING* ]]; then
  scontrol requeue "$job"
fi
exit "$code"
