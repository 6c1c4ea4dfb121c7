#!/usr/bin/env bash
# The torchrun of one node, for the files in this folder. What it exits with is decided by exit.json in the run's folder:
# 0: the run is finished, or a person has stopped it; 75: start the job again; 100: give up, see the log.
#
#   launch/node.sh RUN_FOLDER [options of torchrun] train.py [settings]
set -uo pipefail

folder=$1
shift
# Otherwise a node that comes back after a restart would not find the others (torch 2.11 to 2.13).
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
# Seconds for the last checkpoint after a request to stop.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-100}

before=$(cat "$folder/exit.json" 2>/dev/null)
# Slurm itself sends its signals to all processes; elsewhere only this one gets them.
child=
if [ "${SLURM_JOB_ID:-}" ]; then trap : TERM HUP USR1; else trap 'kill -TERM $child' TERM INT HUP USR1; fi
.venv/bin/python -m torch.distributed.run --signals-to-handle=SIGTERM,SIGINT,SIGQUIT,SIGHUP,SIGUSR1 \
  "$@" --run.folder="$folder" &
child=$!
while kill -0 "$child" 2>/dev/null; do wait "$child"; done

ended=$(cat "$folder/exit.json" 2>/dev/null)
[ "$ended" != "$before" ] || exit 100  # this start did not come as far as to write one: a mistake
case $ended in
  *'"start_again": true'*) exit 75 ;;
  *'"kind": "finished"'* | *'"kind": "stopped"'*) exit 0 ;;
esac
exit 100
