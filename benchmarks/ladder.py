"""A ladder of four sizes of the default run's model: is the largest one's loss predicted by the others?

    python -m benchmarks.ladder [--quick] [--check] [--json=FILE]

Trains benchmarks/ladder.toml by tools.ladder, two runs at once on CPU. Goes on where it was cut; `minutes` are then
those of the last start. The page is outputs/ladder/ladder.html.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.report import add_row, build_parser, finish, prepare_once, require_cpu
from tools.ladder import main as train_ladder
from tools.ladder import read_ladder

LADDER = Path("benchmarks/ladder.toml")
QUICK = Path("outputs/ladder-quick.toml")
BAR_PERCENT = 2.0


def write_quick() -> None:
    """Write the same ladder with the fewest steps, whose prediction says nothing."""
    lines = LADDER.read_text(encoding="utf-8").splitlines()
    changed = {"base": f'"{Path("train_configs/default.toml").absolute()}"', "folder": '"outputs/ladder-quick"'}
    changed["multiples"] = "[0.1]"
    for number, line in enumerate(lines):
        key = line.partition(" = ")[0]
        if key in changed:
            lines[number] = f"{key} = {changed[key]}"
    QUICK.parent.mkdir(exist_ok=True)
    QUICK.write_text("\n".join(lines), encoding="utf-8")


def main() -> int:
    parser = build_parser(__doc__ or "")
    arguments = parser.parse_args()
    require_cpu(parser)
    prepare_once(Path("datasets/stdlib"))
    file = LADDER
    if arguments.quick:
        write_quick()
        file = QUICK
    begin = time.perf_counter()
    code = train_ladder([str(file), "--at-once=2"])
    if code:
        return code
    minutes = (time.perf_counter() - begin) / 60
    folder, *_ = read_ladder(file)
    found = json.loads((folder / "ladder.json").read_text(encoding="utf-8"))
    rows: list[dict[str, Any]] = []
    for point in found["points"]:
        row = {key: float(f"{value:.5g}") if isinstance(value, float) else value for key, value in point.items()}
        add_row(arguments, rows, row)
    largest = found["points"][-1]["size"]
    off = [point["off_percent"] for point in found["points"] if point["size"] == largest]
    worst = max(off, key=abs)
    add_row(arguments, rows, {"size": "all", "minutes": round(minutes, 1), "off_percent": round(worst, 3)})
    bar = f"the largest size: predicted {worst:+.2f} % off, at most {BAR_PERCENT:g} %"
    return finish(arguments, rows, [(bar, arguments.quick or abs(worst) <= BAR_PERCENT)])


if __name__ == "__main__":
    sys.exit(main())
