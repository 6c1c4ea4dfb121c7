"""What a reader of the code takes in, by room: statements, nodes of the syntax tree, and how dense they are.

python -m tools.size

Docstrings do not count. Lines can be saved by writing two thoughts into one, nodes cannot. Nodes a statement and the
counts per 1,000 statements say how much one statement holds: `:=`, values assigned to names side by side,
comprehensions, conditional expressions; and the share of lines over 100 characters.
"""

import argparse
import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
APART = ("tests", "benchmarks")  # rooms that do not count in the whole
LONG_LINE = 100
DENSE = (":=", "a, b = c, d", "comprehensions", "x if y else z")
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
HEADER = ("room", "lines", "statements", "nodes", "each", *DENSE, "long lines")


def sources() -> Iterator[tuple[str, Path]]:
    """(room, file) of each Python file; a file at the top is a room of its own."""
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT).parts
        if not any(part.startswith(".") for part in parts):
            yield parts[0], path


def measure(source: str) -> Counter[str]:
    """What a file holds, each under its name in HEADER."""
    tree = ast.parse(source)
    remove_docstrings(tree)
    found: Counter[str] = Counter()
    for node in ast.walk(tree):
        found["nodes"] += 1
        found["statements"] += isinstance(node, ast.stmt)
        found[":="] += isinstance(node, ast.NamedExpr)
        found["comprehensions"] += isinstance(node, COMPREHENSIONS)
        found["x if y else z"] += isinstance(node, ast.IfExp)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple):
            found["a, b = c, d"] += isinstance(node.targets[0], ast.Tuple)
    lines = source.splitlines()
    found["lines"] = len(lines)
    found["long lines"] = sum(len(line) > LONG_LINE for line in lines)
    return found


def remove_docstrings(tree: ast.AST) -> None:
    """Drop them from a syntax tree."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list) and body and is_text(body[0]):
            del body[0]


def is_text(statement: ast.AST) -> bool:
    """Whether a statement is a string by itself."""
    value = getattr(statement, "value", None)
    return isinstance(statement, ast.Expr) and isinstance(value, ast.Constant) and isinstance(value.value, str)


def row(room: str, found: Counter[str]) -> str:
    """A line of the table."""
    statements = max(found["statements"], 1)
    columns = [f"{found['lines']:,}", f"{statements:,}", f"{found['nodes']:,}", f"{found['nodes'] / statements:.1f}"]
    columns += [f"{1000 * found[name] / statements:.1f}" for name in DENSE]
    columns.append(f"{100 * found['long lines'] / max(found['lines'], 1):.1f} %")
    return line_of([room, *columns])


def line_of(columns: list[str]) -> str:
    """Columns as wide as their heads."""
    cells = [column.rjust(max(len(head), 10)) for column, head in zip(columns, HEADER, strict=True)]
    return "  ".join([columns[0].ljust(16), *cells[1:]])


def main() -> None:
    """Print the table."""
    summary = "Statements and nodes of the syntax tree, per room."
    argparse.ArgumentParser(prog="python -m tools.size", description=summary).parse_args()
    rooms: dict[str, Counter[str]] = {}
    whole: Counter[str] = Counter()
    for room, path in sources():
        found = measure(path.read_text(encoding="utf-8"))
        rooms.setdefault(room, Counter()).update(found)
        if room not in APART:
            whole.update(found)
    print(line_of(list(HEADER)))
    for room, found in sorted(rooms.items(), key=lambda pair: -pair[1]["nodes"]):
        print(row(room, found))
    print(row("whole", whole))
    print(f"whole: without {' and '.join(APART)}; a, b = c, d and the next three: per 1,000 statements")


if __name__ == "__main__":
    main()
