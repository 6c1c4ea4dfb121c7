#!/usr/bin/env bash
# Sets up and runs everything that must pass: formatting, lint, types, tests. Arguments go to pytest.
#   ./run_tests.sh         all of it
#   ./run_tests.sh quick   within a minute on two cores: did an edit break anything basic?
#   ./run_tests.sh long    what takes minutes or Debian's packages: Slurm, pods, the tutorial, combined layouts, walks
set -euo pipefail
cd "$(dirname "$(readlink -f "$0")")"

case $PWD in *" "*) echo "error: $PWD: has a space in it, and torch compiles nothing for CPUs there: move it" >&2; exit 2 ;; esac
# A plain loop's numbers, resume, the order of the data, config, imports, a run's recorded losses.
quick=(
  tests/unit/{test_house.py,test_data_order.py,test_optim.py}
  tests/unit/test_config.py::test_{a_mistake_is_named,every_config_loads_and_names_a_flavor}
  tests/unit/test_data_loader.py::test_order_survives_every_change_between_two_steps
  "tests/unit/test_families.py::test_"{logits_and_gradients_equal_transformers,cached_decoding_gives_the_same_logits}"[llama3.1]"
  "tests/distributed/test_train.py::test_a_resumed_run_has_the_same_bits[FSDP 2]"
  tests/distributed/test_golden.py
)

./setup.sh test
cores=$(nproc)          # before the next line, which nproc would obey
workers=$((cores + 2))  # some wait for processes
export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false TORCHAO_FORCE_SKIP_LOADING_SO_FILES=1
unset PYTHONUNBUFFERED  # as most users have it: with it nobody sees what is lost in a buffer
export PYTHONPATH=$PWD/tests/startup${PYTHONPATH:+:$PYTHONPATH}
# One cache of compiled kernels for the whole suite.
export TORCHINDUCTOR_CACHE_DIR=${TORCHINDUCTOR_CACHE_DIR:-$PWD/.cache/inductor}

# A real S3 server for tests/s3: Ceph's gateway where it is installed, else moto's server.
export S3_TEST_SERVER=${S3_TEST_SERVER:-$(command -v radosgw >/dev/null && echo ceph || echo moto)}
echo "tests/s3 use $S3_TEST_SERVER"

if [ "${1:-}" = quick ]; then
  .venv/bin/python -m tools.same train_configs/debug.toml --data.datasets=[] --layouts "loss in chunks" "FSDP 2" "TP 2" "PP 2"
  exec .venv/bin/python -m pytest -n "$cores" --dist=worksteal "${quick[@]}" "${@:2}"
fi
if [ "${1:-}" = long ]; then
  packages=(slurmctld slurmd slurm-client munge buildah podman runc debootstrap catatonit iproute2)
  if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    missing=$(dpkg-query --show --showformat='${Package} ${db:Status-Status}\n' "${packages[@]}" 2>&1 | grep -cv ' installed$' || true)
    if [ "$missing" != 0 ]; then
      apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq --no-install-recommends "${packages[@]}"
    fi
  else
    echo "not root on Debian, so tests may be skipped that need: ${packages[*]}"
  fi
  WALKS=${WALKS:-20} .venv/bin/python -m pytest -n "$workers" --dist=worksteal tests/distributed/test_walks.py
  exec .venv/bin/python -m pytest -m long -rs --durations=15 "${@:2}"
fi
.venv/bin/pre-commit validate-config
.venv/bin/ruff format --check .
.venv/bin/ruff check .
.venv/bin/mypy .
.venv/bin/python -m pytest -n "$workers" --dist=worksteal --durations=15 "$@"
if command -v nvidia-smi > /dev/null && [ $# = 0 ]; then TEST_GPU=1 .venv/bin/python -m pytest tests/gpu; fi
