#!/usr/bin/env bash
# The torchrun of one node, for the files in this folder. What it exits with is decided by exit.json in the run's folder:
# 0: the run is finished, or a person has stopped it; 75: start the job again; 100: give up, see the log.
# A start whose ranks were killed before one could write exit.json asks for another. If nothing but that happens, the run
# itself refuses to start (failures.restarts_without_progress), as long as --rdzv-id names the same job: the folder does.
#
#   launch/node.sh RUN_FOLDER [options of torchrun] train.py [settings]
set -uo pipefail

folder=$1
shift
# Otherwise a node that comes back after a restart would not find the others (torch 2.11 to 2.13).
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
# Seconds for the last checkpoint after a request to stop.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-100}
export PET_RDZV_ID=${PET_RDZV_ID:-$(basename "$folder")}  # unless --rdzv-id says another

last_start() { cat "$folder/.started" 2>/dev/null; }
before=$(last_start)
superseded=$folder/.superseded.$(uname -n)  # written if another start takes the folder over, from another machine
rm -f "$superseded"
# Slurm itself sends its signals to all processes; elsewhere only this one gets them.
child=
if [ "${SLURM_JOB_ID:-}" ]; then trap : TERM HUP USR1; else trap 'kill -TERM $child' TERM INT HUP USR1; fi
.venv/bin/python -m torch.distributed.run --signals-to-handle=SIGTERM,SIGINT,SIGQUIT,SIGHUP,SIGUSR1 \
  "$@" --run.folder="$folder" &
child=$!
while kill -0 "$child" 2>/dev/null; do wait "$child"; done

[ ! -e "$superseded" ] || exit 100  # exit.json is the other start's, and so is the run
[ "$(last_start)" != "$before" ] || exit 100  # no start came as far as to be recorded: a mistake
[ -s "$folder/exit.json" ] || exit 75  # empty: its writer was killed
case $(cat "$folder/exit.json") in
  *'"start_again": true'*) exit 75 ;;
  *'"kind": "finished"'* | *'"kind": "stopped"'*) exit 0 ;;
esac
exit 100
