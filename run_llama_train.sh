#!/usr/bin/env bash
# Trains a Llama: sets up on the first start, prepares the embedded data if the config uses it, runs torchrun.
#
#   ./run_llama_train.sh                                        a small Llama on Python's standard library
#   ./run_llama_train.sh --training.steps=100                   with any setting changed
#   ./run_llama_train.sh --data mytext/                         on your own text: folders, files or globs
#   ./run_llama_train.sh --resume outputs/NAME                  a run continued, by its own config
#   NGPU=8 ./run_llama_train.sh train_configs/llama3_8b.toml    another config
#   ./run_llama_train.sh --help                                 every setting; --help WORD: those about it
set -euo pipefail
here=$PWD
cd "$(dirname "$(readlink -f "$0")")"
unset PYTHONSAFEPATH  # the project's modules are found by the folder
# A path that is typed means the place where one stands, or the project's folder if nothing is there.
place() {
  if [[ $1 && $1 != /* && -e $here/$1 && ! $here -ef . ]]; then printf '%s/' "$here"; fi
  printf '%s\n' "$1"
}

# Default: train_configs/default.toml; for a branch what its trunk recorded.
CONFIG_FILE=${CONFIG_FILE:+$(place "$CONFIG_FILE")}
NGPU=${NGPU:-}           # processes; default: one for each GPU, as many as can share the batch, or 1 where there is none
MAX_RESTARTS=${MAX_RESTARTS:-0}  # how often torchrun may start the run again, as after a rollback to a checkpoint
LOG_RANK=${LOG_RANK:-}   # ranks that print progress, such as 0,1; default: 0

case $NGPU in 0* | *[!0-9]*) echo "error: NGPU=$NGPU: must be a number of processes, at least 1" >&2; exit 2 ;; esac
default=--config=${CONFIG_FILE:-train_configs/default.toml} help= datasets= own=() words=()
while [ $# -gt 0 ]; do
  case $1 in
    --data | --data=*)
      more=("${1#--data}") && more=("${more[@]#=}") && shift
      while [[ ${1:--} != -* && $1 != *.toml ]]; do more+=("$1"); shift; done
      for text in "${more[@]}"; do
        case $text in "") ;; /* | *://*) own+=("$text") ;; *) own+=("$here/$text") ;; esac
      done
      [ "${own[*]}" ] || { echo "error: --data: must name folders, files or globs of text" >&2; exit 2; } ;;
    --data.datasets*) datasets=1 words+=("$1") && shift ;;
    [!-]*.toml) default= words+=("$(place "$1")") && shift ;;
    --config=* | --resume=*) default= words+=("${1%%=*}=$(place "${1#*=}")") && shift ;;
    --config | --resume) default= words+=("$1" ${2+"$(place "$2")"}) && shift && shift $(($# > 0)) ;;
    --checkpoint.branch_from*) default=${CONFIG_FILE:+$default} words+=("$1") && shift ;;
    -h | --help) help=1 words+=("$1") && shift ;;
    *) words+=("$1") && shift ;;
  esac
done
if [ "${own[*]}" ] && [ "$datasets" ]; then echo "error: --data and --data.datasets: two sets of data" >&2; exit 2; fi
overrides=(${default:+"$default"} ${LOG_RANK:+--metrics.log_ranks="$LOG_RANK"} "${words[@]}")

./setup.sh
python=.venv/bin/python

settings=$($python -m config "${overrides[@]}")   # a mistake ends here, in one line
if [ "$help" ]; then printf '%s\n\n  --data TEXT ...  your own text, folders, files or globs, prepared first\n' "$settings"; exit; fi

has_device() {
  compgen -G '/dev/nvidia[0-9]*' >/dev/null || [ -e /dev/kfd ] || [ -e /dev/dri ] || [ -e /dev/accel ] || [ -e /dev/dxg ]
}
lacks_data() { grep -q '^datasets = .*"datasets/stdlib"' <<<"$settings" && [ ! -e datasets/stdlib/manifest.json ]; }
# It takes torch a second to be asked. Before data is prepared it also finds a batch that cannot be shared.
if [ "${own[*]}" ] || lacks_data || { [ -z "$NGPU" ] && has_device; }; then
  NGPU=$(NGPU=$NGPU $python -m tools.processes "${overrides[@]}")
fi
NGPU=${NGPU:-1}

if [ "${own[*]}" ]; then
  settings=$($python -m tools.own_text "${own[@]}")
  readarray -t more <<<"$settings"
  overrides+=("${more[@]}")
fi
if [ -z "${OMP_NUM_THREADS:-}" ]; then
  cores=$(nproc)
  export OMP_NUM_THREADS=$((cores > NGPU ? cores / NGPU : 1))
fi

if lacks_data; then
  mkdir -p datasets
  (
    flock 9 2>/dev/null || true  # of two first starts at once one prepares, and the other waits for it
    # Files cut to the length of a few samples: a batch of this small run then holds many of them, not part of one.
    [ -e datasets/stdlib/manifest.json ] ||
      $python -m data.prepare --source stdlib --max-characters --output datasets/stdlib
  ) 9>>datasets/.lock
fi

echo "starting: processes $NGPU, threads of each $OMP_NUM_THREADS" >&2
# Other nodes that the environment may speak of, and a name of this machine that nobody can look up, do not matter.
exec $python -m run.torchrun --standalone --nnodes=1 --local-addr=127.0.0.1 \
  --nproc-per-node="$NGPU" --max-restarts="$MAX_RESTARTS" train.py "${overrides[@]}"
