#!/usr/bin/env bash
# Makes .venv with the pinned dependencies; does nothing when it is up to date.
#   ./setup.sh        what training needs
#   ./setup.sh test   also what the tests need
# PYTHON picks the interpreter (default python3, at least 3.10).
set -euo pipefail
cd "$(dirname "$0")"

python=${PYTHON:-python3}
files=(requirements.txt)
[ "${1:-}" = test ] && files+=(requirements-eval.txt requirements-test.txt)

for file in "${files[@]}"; do
  stamp=.venv/.installed-$file
  if ! cmp -s "$file" "$stamp"; then
    if ! .venv/bin/python -m pip --version >/dev/null 2>&1; then  # none, or one that was cut off half-made
      command -v "$python" >/dev/null || { echo "error: $python not found; Python 3.10 or newer is needed (set PYTHON)" >&2; exit 1; }
      "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
        { echo "error: $("$python" --version) is too old; Python 3.10 or newer is needed (set PYTHON)" >&2; exit 1; }
      echo "setup: making .venv"
      "$python" -m venv --clear .venv
    fi
    echo "setup: installing $file"
    .venv/bin/python -m pip install --quiet --disable-pip-version-check -r "$file"
    cp "$file" "$stamp"
  fi
done
