#!/usr/bin/env bash
# Sets up and runs everything that must pass: formatting, lint, types, tests. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$(readlink -f "$0")")"

case $PWD in *" "*) echo "error: $PWD: has a space in it, and torch compiles nothing for CPUs there: move it" >&2; exit 2 ;; esac
./setup.sh test
workers=$(($(nproc) + 1))  # some wait for processes; before the next line, which nproc would obey
export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false TORCHAO_FORCE_SKIP_LOADING_SO_FILES=1
unset PYTHONUNBUFFERED  # as most users have it: with it nobody sees what is lost in a buffer
export PYTHONPATH=$PWD/tests/startup${PYTHONPATH:+:$PYTHONPATH}
# One cache of compiled kernels for the whole suite.
export TORCHINDUCTOR_CACHE_DIR=${TORCHINDUCTOR_CACHE_DIR:-$PWD/.cache/inductor}

# A real S3 server for tests/s3: Ceph's gateway where it is installed, else moto's server.
export S3_TEST_SERVER=${S3_TEST_SERVER:-$(command -v radosgw >/dev/null && echo ceph || echo moto)}
echo "tests/s3 use $S3_TEST_SERVER"

.venv/bin/pre-commit validate-config
.venv/bin/ruff format --check .
.venv/bin/ruff check .
.venv/bin/mypy .
.venv/bin/python -m pytest -n "$workers" --dist=worksteal --durations=15 "$@"
if command -v nvidia-smi > /dev/null && [ $# = 0 ]; then TEST_GPU=1 .venv/bin/python -m pytest tests/gpu; fi
