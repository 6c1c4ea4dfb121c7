"""Lines of Python per room, against what a reader may be asked to carry.

python -m tools.size
"""

import argparse
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


def count_lines(places: tuple[str, ...]) -> int:
    """Lines of the Python files in these files and folders; those of tests and benchmarks only if named."""
    files = [
        file for name in places for file in ([ROOT / name] if (ROOT / name).is_file() else (ROOT / name).rglob("*.py"))
    ]
    paths = [file.relative_to(ROOT) for file in files]
    outside = () if places != (".",) else ("tests", "benchmarks")
    counted = [
        path for path in paths if path.parts[0] not in outside and not any(p.startswith(".") for p in path.parts)
    ]
    return sum(len((ROOT / path).read_bytes().splitlines()) for path in counted)


if __name__ == "__main__":
    argparse.ArgumentParser(prog="python -m tools.size", description="Lines per room, against its budget.").parse_args()
    for room, (budget, places) in ROOMS.items():
        lines = count_lines(places)
        print(f"{room:52} {lines:6,} of {budget:6,}{'   over' if lines > budget else ''}")
