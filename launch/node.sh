#!/usr/bin/env bash
# The torchrun of one node, for the files in this folder and by hand. It exits with
#   0    the run is finished, or a person has stopped it
#   75   start the job again: it was taken, hung or lost, or its nodes did not meet
#   100  give up, see the log: a mistake, or starts that led nowhere
# The run itself refuses starts that make no progress (failures.restarts_without_progress), as long as --rdzv-id names
# the same job: the folder does. Here those are counted that torchrun ended before the run could record them.
#
#   launch/node.sh RUN_FOLDER [options of torchrun] train.py [settings]
set -uo pipefail

VENV=${VENV:-.venv}   # the environment with the packages
UNRECORDED_STARTS=3   # in a row, on one node; one more is the last

folder=$1
shift
# Otherwise a node that comes back after a restart would not find the others (torch 2.11 to 2.13).
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
export PET_RDZV_ID=${PET_RDZV_ID:-$(basename "$folder")}  # unless --rdzv-id says another
unset PYTHONSAFEPATH  # the project's modules are found by the folder

last_start() { cat "$folder/.started" 2>/dev/null; }
before=$(last_start)
superseded=$folder/.superseded.$(uname -n)  # written if another start takes the folder over, from another machine
unrecorded=$folder/.unrecorded.$(uname -n)
rm -f "$superseded"
child=
asked=
pass_on() { asked=1; kill -s "$1" "$child"; }
# Slurm itself sends its signals to all processes, and a terminal its own; elsewhere only this one gets them.
trap : INT
if [ "${SLURM_JOB_ID:-}" ]; then
  trap asked=1 TERM HUP USR1
else
  for name in TERM HUP USR1; do trap "pass_on $name" $name; done
fi
"$VENV/bin/python" -m run.torchrun "$@" --run.folder="$folder" &
child=$!
while kill -0 "$child" 2>/dev/null; do wait "$child"; done  # a signal ends a wait early
wait "$child"
code=$?

[ ! -e "$superseded" ] || exit 100  # exit.json is the other start's, and so is the run
[ $code != 2 ] || exit 100          # a mistake, which a line in the log explains
if [ "$(last_start)" = "$before" ]; then  # torchrun's own error, as when another node was lost before all had met
  if [ "$asked" ]; then exit 75; fi
  mkdir -p "$folder" && echo "torchrun ended with $code" >>"$unrecorded"
  starts=$(wc -l <"$unrecorded") && [ "$starts" -le $UNRECORDED_STARTS ] && exit 75
  echo "error: $starts starts in a row ended before the run began; to begin anew: rm $unrecorded" >&2
  exit 100
fi
rm -f "$unrecorded"
[ -s "$folder/exit.json" ] || exit 75  # none or empty: its writer was killed
case $(cat "$folder/exit.json") in
  *'"start_again": true'*) exit 75 ;;
  *'"kind": "finished"'* | *'"kind": "stopped"'*) exit 0 ;;
esac
exit 100
