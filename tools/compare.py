"""Compare runs on one HTML page, which holds its own data: it needs no server and loads nothing.

python -m tools.compare outputs/A outputs/B --output compare.html
"""

import argparse
import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from checkpoint.branch import read_parent
from config import TitaniteError, command_line, file_errors, flatten, recorded_config
from storage.records import output_file, read_records

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

    folder: Path
    group: str
    charts: Charts
    settings: dict[str, str]


def read_run(folder: Path, group: str) -> Shown:
    """Read a run; without charts if it has logged no step. Raises TitaniteError."""
    try:
        with file_errors():
            return Shown(folder, group, read_charts(folder), read_settings(folder))
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
    for run in runs:
        if not run.charts:
            print(f"{run.folder}: left out, no step was logged there")
    runs = [run for run in runs if run.charts]
    if not runs:
        raise TitaniteError("no run to compare")
    fields = dict.fromkeys(field for run in runs for field in run.charts)
    found = sorted(fields, key=lambda field: not is_loss(field))
    shown = []
    for name, run in zip(name_runs([run.folder for run in runs]), runs, strict=True):
        thinned = {field: _thinned(points) for field, points in run.charts.items()}
        shown.append({"name": name, "group": run.group, "summary": summarize(run.charts, found), "charts": thinned})
    data: dict[str, Any] = {"title": title, "runs": shown, "charts": found, "settings": differing_settings(runs)}
    data |= {"tables": [table._asdict() for table in tables], "ladder": ladder}
    template = Path(__file__).with_name("compare.html").read_text(encoding="utf-8")
    text = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")  # cannot end the script
    with file_errors(output):
        output.write_text(template.replace('"DATA"', text), encoding="utf-8")
    print(f"{output}: open it in a browser; runs compared: {len(runs)}")


def read_charts(folder: Path) -> Charts:
    """The charts of a run. If a step was trained again or left out, its last row counts.

    Hours are step times added up: each row times the `interval_steps` before it. Raises ValueError, KeyError or
    TypeError for rows that no run wrote.
    """
    rows: list[dict[str, Any]] = []
    last = 0
    for row in read_records(folder / "metrics.jsonl"):
        if row["loss"] is not None or row.get("skipped"):  # no validation
            if row["step"] <= last:  # a new start or a rollback went back to an earlier step
                rows = [kept for kept in rows if kept["step"] < row["step"]]
            last = row["step"]
        rows.append(row)
    charts: Charts = {}
    hours = 0.0
    for row in rows:
        hours += (row["step_seconds"] or 0) * (row["interval_steps"] or 0) / 3600
        for field, value in row.items():
            is_drawn = field not in NO_CURVE and "_norm/" not in field  # of layers: too many
            if is_drawn and value is not None and math.isfinite(value):
                charts.setdefault(field, []).append((row["step"], row["tokens"], hours, value))
    add_scores(charts, folder)
    return charts


def add_scores(charts: Charts, folder: Path) -> None:
    """Add the scores of `tools.follow`, at the tokens and hours on the line between the two rows around their step."""
    steps, tokens, hours, _ = np.array([(0, 0, 0, 0), *charts.get("loss", ())]).T
    rows = []
    for file in folder.glob("scores*/scores.jsonl"):
        rows += read_records(file)
    for row in sorted(rows, key=lambda row: row["step"]):
        step = row["step"]
        at = np.interp(step, steps, tokens), np.interp(step, steps, hours)
        for field in row:
            if field.startswith("scores/"):
                charts.setdefault(field, []).append((step, *at, row[field]))


def read_settings(folder: Path) -> dict[str, str]:
    """The settings of a run, and its commit and versions, each as of its last start."""
    starts = read_records(folder / "starts.jsonl")
    values: dict[str, Any] = {}
    for start in starts[-1:]:
        values |= {key: start[key] for key in ("world_size", "git_commit", "patch", "python") if key in start}
        values |= {f"package {name}": version for name, version in start["packages"].items()}
    config = recorded_config(folder)
    if config is not None:
        values |= flatten(config)
    return {key: json.dumps(value) for key, value in values.items()}


def differing_settings(runs: Sequence[Shown]) -> list[list[str]]:
    """A row for each setting that differs between the runs: its key, then its values by run."""
    rows = []
    for key in dict.fromkeys(key for run in runs for key in run.settings):
        texts = [run.settings.get(key, "–") for run in runs]
        if key != "run.folder" and len(set(texts)) > 1:
            rows.append([key, *texts])
    return rows


def summarize(charts: Charts, found: Sequence[str]) -> list[float | None]:
    """How far a run has come: step, tokens, hours; for each field of `found` the last loss or the median of others.

    None: the run does not have the field.
    """
    figures: list[float | None] = [*max(points[-1][:3] for points in charts.values())]
    for field in found:
        values = [point[-1] for point in charts.get(field, [])]
        if not values:
            figures.append(None)
        else:
            figures.append(values[-1] if is_loss(field) else median(values))
    return figures


def is_loss(field: str) -> bool:
    """Whether a field says what a run has learned, so that its last value counts, and its curve comes first."""
    return "loss" in field or field.startswith(("bits_per_byte", "scores/"))


def _thinned(points: Sequence[tuple[float, ...]]) -> Sequence[tuple[float, ...]]:
    """At most MAX_POINTS, evenly spaced, with the last one."""
    stride = math.ceil(len(points) / MAX_POINTS)
    return points[(len(points) - 1) % stride :: stride]


def name_runs(folders: Sequence[Path]) -> list[str]:
    """The folders' last names, or their paths if two share one; a branch also after its parent."""
    names = [folder.name for folder in folders]
    if len(set(names)) < len(names):
        names = [str(folder) for folder in folders]
    for number, folder in enumerate(folders):
        parent = read_parent(folder)
        if parent:
            names[number] += f" from {parent.place}@{parent.step}"
    return names


def main(argv: Sequence[str]) -> None:
    """The command line. Raises TitaniteError."""
    parser = argparse.ArgumentParser(prog="python -m tools.compare", description="Compare runs on an HTML page.")
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folder of a run")
    parser.add_argument("--output", type=output_file, default=Path("compare.html"), help="default %(default)s")
    arguments = parser.parse_args(argv)
    write_page([read_run(folder, str(folder)) for folder in arguments.runs], arguments.output)


if __name__ == "__main__":
    with command_line():
        main(sys.argv[1:])
