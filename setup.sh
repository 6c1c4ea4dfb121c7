#!/usr/bin/env bash
# Makes .venv with the pinned dependencies; does nothing when it is up to date.
#   ./setup.sh        what training needs
#   ./setup.sh test   also what the tests need
# PYTHON picks the interpreter for a new .venv (default python3, at least 3.10).
set -euo pipefail
cd "$(dirname "$(readlink -f "$0")")"

python=${PYTHON:-python3}
files=(requirements.txt)
case $* in
  "") ;;
  test) files+=(requirements-tuning.txt requirements-eval.txt requirements-test.txt requirements-triton.txt requirements-cluster.txt) ;;
  *) echo "error: $*: must be nothing, or test" >&2; exit 2 ;;
esac

works() { .venv/bin/python -c 'import pip' 2>/dev/null; }  # not if cut off half-made, or if its Python is gone
installed() { cmp -s "$1" ".venv/.installed-$1"; }
up_to_date() {
  works || return 1
  for file in "${files[@]}"; do installed "$file" || return 1; done
}
if up_to_date; then exit; fi
if compgen -G '.venv/.installed-*' >/dev/null && ! works; then  # others may be using it, where it works
  .venv/bin/python -c 'import pip' || true  # says why, as where PYTHONHOME is set
  echo "error: .venv does not work here: its Python, or pip, is gone or cannot be reached; rm -rf .venv to build it again" >&2
  exit 1
fi

mkdir -p .cache
exec 9>>.cache/setup.lock
flock 9 2>/dev/null || true  # of two first starts at once one installs, and the other waits for it

if ! works; then
  command -v "$python" >/dev/null || { echo "error: $python not found; Python 3.10 or newer is needed (set PYTHON)" >&2; exit 1; }
  "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
    { echo "error: $("$python" --version) is too old; Python 3.10 or newer is needed (set PYTHON)" >&2; exit 1; }
  echo "setup: making .venv"
  "$python" -m venv --clear .venv
fi
for file in "${files[@]}"; do
  if ! installed "$file"; then
    echo "setup: installing $file"
    options=()
    if [ "$file" = requirements-triton.txt ]; then options=(--upgrade --target .venv/triton); fi
    # The first import compiles what it needs, a small part of all, unless Python may not store that.
    if [ -z "${PYTHONDONTWRITEBYTECODE:-}" ]; then options+=(--no-compile); fi
    .venv/bin/python -m pip install --quiet --disable-pip-version-check "${options[@]}" -r "$file"
    cp "$file" ".venv/.installed-$file"
  fi
done
