"""What a reader of the code takes in, by room: statements, nodes of the syntax tree, and how dense they are.

python -m tools.size

Docstrings do not count. Lines can be saved by writing two thoughts into one, nodes cannot. `each`: nodes a statement.
The next columns count per 1,000 statements what makes one statement hold several thoughts.
"""

import argparse
import ast
import subprocess
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
APART = ("tests", "benchmarks")  # rooms that do not count in the whole
LONG_LINE = 100
DENSE: dict[str, Any] = {
    ":=": ast.NamedExpr,
    "comprehensions": (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp),
    "x if y else z": ast.IfExp,
    "*": ast.Starred,
}


def measure(source: str) -> Counter[str]:
    """What a file holds."""
    lines = source.splitlines()
    found = Counter(lines=len(lines), long=sum(len(line) > LONG_LINE for line in lines))
    for node in ast.walk(ast.parse(source)):
        found["nodes"] += 1
        found["statements"] += isinstance(node, ast.stmt)
        for name, kind in DENSE.items():
            found[name] += isinstance(node, kind)
        match node:
            case ast.Assign(targets=[ast.Tuple(), *_], value=ast.Tuple()):
                found["a, b = c, d"] += 1
        match getattr(node, "body", None):
            case [ast.Expr(value=ast.Constant(value=str())), *_]:
                found.update(nodes=-2, statements=-1)  # a docstring
    return found


def main() -> None:
    """Print the table."""
    summary = "Statements and nodes of the syntax tree, per room."
    argparse.ArgumentParser(prog="python -m tools.size", description=summary).parse_args()
    files = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    rooms: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for name in files.split():
        found = measure((ROOT / name).read_text(encoding="utf-8"))
        room = name.split("/")[0]
        rooms[room] += found
        if room not in APART:
            rooms["whole"] += found
    dense = (*DENSE, "a, b = c, d")
    print(f"{'room':16}{'lines':>8}{'statements':>12}{'nodes':>9}{'each':>7}", *dense, "long lines", sep="  ")
    for room, found in sorted(rooms.items(), key=lambda pair: pair[1]["nodes"]):
        statements = max(found["statements"], 1)
        counts = f"{room:16}{found['lines']:8,}{statements:12,}{found['nodes']:9,}{found['nodes'] / statements:7.1f}"
        rates = [f"{1000 * found[name] / statements:{len(name)}.1f}" for name in dense]
        print(counts, *rates, f"{found['long'] / max(found['lines'], 1):10.1%}", sep="  ")
    print(f"whole: without {' and '.join(APART)}")


if __name__ == "__main__":
    main()
