"""Lines of Python per room, against what a reader may be asked to carry.

python -m tools.size [--check]

Tests and benchmarks do not count into the whole. `--check` exits with 1 if a room is above its budget.
"""

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
# Room → (budget in lines, the files and folders in it).
ROOMS = {
    "train.py": (180, ("train.py",)),
    "config.py": (650, ("config.py",)),
    "loss, optim, metrics, profiling, validate, generate": (
        1250,
        ("loss.py", "optim.py", "metrics.py", "profiling.py", "validate.py", "generate.py"),
    ),
    "models/": (900, ("models",)),
    "parallel/": (1000, ("parallel",)),
    "float8/": (350, ("float8",)),
    "data/": (2100, ("data",)),
    "checkpoint/": (1400, ("checkpoint",)),
    "storage.py": (350, ("storage.py",)),
    "run/": (1000, ("run", "launch")),
    "tools/": (2200, ("tools",)),
    "core": (
        2600,
        (
            "train.py", "config.py", "loss.py", "optim.py", "models/llama/model.py", "models/llama/parallelize.py",
            "parallel/mesh.py", "parallel/fsdp.py", "data/order.py", "data/loader.py", "checkpoint/manager.py",
        ),
    ),
    "all but tests and benchmarks": (11000, (".",)),
    "tests/": (13000, ("tests",)),
}  # fmt: skip
OUTSIDE = frozenset({"tests", "benchmarks"})


def count_lines(places: tuple[str, ...]) -> int:
    """Lines of the Python files in these files and folders; those of tests and benchmarks only if named."""
    total = 0
    for place in (ROOT / name for name in places):
        files = [place] if place.is_file() else place.rglob("*.py")
        for file in files:
            parts = file.relative_to(ROOT).parts
            hidden = any(part.startswith(".") for part in parts)
            if not hidden and (place != ROOT or parts[0] not in OUTSIDE):
                total += len(file.read_bytes().splitlines())
    return total


def main(argv: list[str]) -> int:
    """The command line. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tools.size", description="Lines per room, against its budget.")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a room is above its budget")
    arguments = parser.parse_args(argv)
    over = 0
    for room, (budget, places) in ROOMS.items():
        lines = count_lines(places)
        over += lines > budget
        print(f"{room:52} {lines:6,} of {budget:6,}{'   over' if lines > budget else ''}")
    return int(arguments.check and over > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
