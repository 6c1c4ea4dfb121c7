"""Lines of Python per room, against what a reader may be asked to carry.

python -m tools.size --check
"""

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
CORE = (
    "train.py config.py loss.py optim.py models/llama/model.py models/llama/parallelize.py parallel/mesh.py "
    "parallel/fsdp.py data/order.py data/loader.py checkpoint/manager.py"
)
ROOMS = {  # files and folders of a room → its budget in lines; ".": all but tests and benchmarks
    "train.py": 180,
    "config.py": 650,
    "loss.py optim.py muon.py metrics.py profiling.py validate.py generate.py": 1600,
    "models": 900,
    "parallel": 1000,
    "float8": 800,
    "data": 2100,
    "checkpoint": 1400,
    "storage.py": 350,
    "run launch": 1000,
    "tools": 2200,
    CORE: 2900,
    ".": 12000,
    "tests": 15000,
}


def count_lines(place: str) -> int:
    """Lines of a Python file, or of those in a folder."""
    paths = [ROOT / place] if place.endswith(".py") else (ROOT / place).rglob("*.py")
    counted = [path for path in paths if not any(part.startswith(".") for part in path.relative_to(ROOT).parts)]
    outside = count_lines("tests") + count_lines("benchmarks") if place == "." else 0
    return sum(len(path.read_bytes().splitlines()) for path in counted) - outside


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tools.size", description="Lines per room, against its budget.")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a room is over its budget")
    check, over = parser.parse_args().check, 0
    for room, budget in ROOMS.items():
        lines = sum(map(count_lines, room.split()))
        over += lines > budget
        print(f"{'core' if room == CORE else room:65} {lines:6,} of {budget:6,}{'   over' if lines > budget else ''}")
    sys.exit(int(check and over > 0))
