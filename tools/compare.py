"""Compare runs on one HTML page, which holds its own data: it needs no server and loads nothing.

python -m tools.compare outputs/A outputs/B --output compare.html
"""

import argparse
import json
import math
import sys
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from config import TitaniteError, command_line, file_errors, tomllib
from storage.records import output_path, read_records

MAX_POINTS = 4000  # per curve: longer ones keep every n-th row
NO_CURVE = ("step", "tokens", "interval_steps", "skipped", "time")  # of a row: every other field is drawn
Charts = dict[str, list[tuple[float, ...]]]  # field of metrics.jsonl → (step, tokens, hours, value) of its rows


class Table(NamedTuple):
    """A table to show above the curves."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[Any]]
    note: str

    def text(self) -> str:
        """The table and its note for a terminal."""
        lines = [self.title]
        for row in (self.head, *self.rows):
            lines.append("  ".join(f"{_cell(value):<16}" for value in row).rstrip())
        return "\n".join([*lines, self.note])


def _cell(value: Any) -> str:
    return f"{value:.5g}" if isinstance(value, float) else str(value)


class Shown(NamedTuple):
    """A run as its files tell it. Runs of one group share a colour and can be drawn as their mean."""

    name: str
    group: str
    charts: Charts
    settings: dict[str, str]


def read_run(folder: Path, name: str, group: str) -> Shown:
    """Read a run; without charts if it has logged no step. Raises TitaniteError."""
    try:
        with file_errors():
            return Shown(name, group, read_charts(folder), read_settings(folder))
    except (ValueError, KeyError, TypeError) as error:
        files = "metrics.jsonl, starts.jsonl or config.toml"
        raise TitaniteError(f"{folder}: its {files} is not as a run writes it: {error!r}") from None


def write_page(
    runs: Sequence[Shown],
    output: Path,
    title: str = "Runs compared",
    tables: Sequence[Table] = (),
    ladder: Mapping[str, Any] | None = None,
) -> None:
    """Write the page that compares these runs, without those that have logged no step. Raises TitaniteError.

    `ladder`: points and fit of tools.ladder, drawn as loss against FLOPs.
    """
    shown = [run for run in runs if run.charts]
    unlogged = [run.name for run in runs if not run.charts]
    if unlogged:
        print(f"left out, no step was logged there: {', '.join(unlogged)}")
    if not shown:
        raise TitaniteError("no run to compare")
    fields = dict.fromkeys(chain(*(run.charts for run in shown)))
    data = {
        "title": title,
        "runs": [page_data(run) for run in shown],
        "charts": sorted(fields, key=lambda field: not is_loss(field)),
        "settings": differing_settings(shown),
        "tables": [table._asdict() for table in tables],
        "ladder": ladder,
    }
    template = Path(__file__).with_name("compare.html").read_text(encoding="utf-8")
    text = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")  # cannot end the script
    with file_errors(output):
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(template.replace('"DATA"', text), encoding="utf-8")
    print(f"{output}: open it in a browser; runs compared: {len(shown)}")


def page_data(run: Shown) -> dict[str, Any]:
    """What the page holds of a run: long curves thinned, and of each field the last loss or the median of others."""
    step, tokens, hours, _ = max(points[-1] for points in run.charts.values())
    summary = {"step": step, "tokens": tokens, "hours": hours}
    thinned = {}
    for field, points in run.charts.items():
        values = [point[-1] for point in points]
        summary[field] = median(values)
        if is_loss(field):
            summary[field] = values[-1]
        stride = math.ceil(len(points) / MAX_POINTS)
        thinned[field] = points[::-stride][::-1]  # with the last one
    return {"name": run.name, "group": run.group, "summary": summary, "charts": thinned}


def read_charts(folder: Path) -> Charts:
    """The charts of a run, with the scores of its checkpoints. If a step was trained again or left out, its last row
    counts.

    Hours are step times added up: each row times the `interval_steps` before it. A score has the tokens and hours of
    the row before. Raises ValueError, KeyError or TypeError for rows that no run wrote.
    """
    rows: list[dict[str, Any]] = []
    last = 0
    for row in read_records(folder / "metrics.jsonl"):
        if row["loss"] is not None or row.get("skipped"):  # no validation
            if row["step"] <= last:  # a new start or a rollback went back to an earlier step
                rows = [kept for kept in rows if kept["step"] < row["step"]]
            last = row["step"]
        rows.append(row)
    for file in folder.glob("scores*/scores.jsonl"):
        rows += read_records(file)
    rows.sort(key=lambda row: row["step"])
    charts: Charts = {}
    tokens = 0
    hours = 0.0
    for row in rows:
        tokens = row.get("tokens", tokens)
        hours += (row.get("step_seconds") or 0) * (row.get("interval_steps") or 0) / 3600
        for field, value in row.items():
            is_drawn = field not in NO_CURVE and "_norm/" not in field  # of layers: too many
            if is_drawn and isinstance(value, int | float) and math.isfinite(value):
                charts.setdefault(field, []).append((row["step"], tokens, hours, value))
    return charts


def read_settings(folder: Path) -> dict[str, str]:
    """The settings of a run, its commit and its packages, each as of its last start."""
    values: dict[str, Any] = {}
    for start in read_records(folder / "starts.jsonl")[-1:]:
        values |= {key: start[key] for key in ("world_size", "git_commit", "patch", "python")}
        values |= start["packages"]
    file = folder / "config.toml"
    if file.is_file():
        recorded = tomllib.loads(file.read_text(encoding="utf-8"))  # also what this version would refuse
        for section, entries in recorded.items():
            values |= {f"{section}.{name}": value for name, value in entries.items()}
    return {key: json.dumps(value) for key, value in values.items()}


def differing_settings(runs: Sequence[Shown]) -> list[list[str]]:
    """A row for each setting that differs between the runs: its key, then its values by run."""
    rows = []
    for key in dict.fromkeys(chain(*(run.settings for run in runs))):
        texts = [run.settings.get(key, "–") for run in runs]
        if key != "run.folder" and len(set(texts)) > 1:
            rows.append([key, *texts])
    return rows


def is_loss(field: str) -> bool:
    """Whether a field says what a run has learned, so that its last value counts, and its curve comes first."""
    return "loss" in field or field.startswith(("bits_per_byte", "scores/"))


def main(argv: Sequence[str]) -> None:
    """The command line. Raises TitaniteError."""
    parser = argparse.ArgumentParser(prog="python -m tools.compare", description="Compare runs on an HTML page.")
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folder of a run")
    parser.add_argument("--output", type=output_path, default=Path("compare.html"), help="default %(default)s")
    arguments = parser.parse_args(argv)
    write_page([read_run(folder, str(folder), str(folder)) for folder in arguments.runs], arguments.output)


if __name__ == "__main__":
    with command_line():
        main(sys.argv[1:])
