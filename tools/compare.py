"""Compare runs on one HTML page, which holds its own data: it needs no server and loads nothing.

python -m tools.compare outputs/A outputs/B --output compare.html
"""

import argparse
import json
import math
import sys
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from statistics import median
from typing import Any

from config import TitaniteError, command_line, tomllib
from records import output_file, read_records, write_output

MAX_POINTS = 4000  # per curve: longer ones keep every n-th row
TITLES = {
    "loss": "loss",
    "validation_loss": "validation loss",
    "tps": "tokens/s per device",
    "mfu": "MFU",
    "tflops": "TFLOP/s per device",
    "step_seconds": "seconds per step",
    "grad_norm": "gradient norm",
    "lr": "learning rate",
    "memory_gib": "memory, GiB",
    "data_wait_pct": "waiting for data, %",
}
AXES = ("step", "tokens", "hours")


def write_page(runs: Sequence[Path], output: Path) -> list[Path]:
    """Write the page that compares these runs, and return those on it, all that have logged a step.

    Raises TitaniteError.
    """
    names = dict(zip(runs, _names(runs), strict=True))
    logged = {run: tables for run in runs if (tables := read_charts(run))}
    if not logged:
        raise TitaniteError(f"{', '.join(map(str, runs))}: no step was logged yet, there is nothing to compare")
    found = sorted({chart for tables in logged.values() for chart in tables}, key=_place)
    summaries = {run: _summary(run, tables, found) for run, tables in logged.items()}
    data = {
        "runs": [
            {"name": names[run], "charts": {chart: _thinned(table) for chart, table in tables.items()}}
            for run, tables in logged.items()
        ],
        "charts": found,
        "titles": TITLES,
        "summary": {
            "columns": [column for column, _ in next(iter(summaries.values()))],
            "rows": [[names[run], *(value for _, value in summary)] for run, summary in summaries.items()],
        },
        "settings": differing_settings([read_settings(run) for run in logged]),
    }
    template = Path(__file__).with_name("compare.html").read_text(encoding="utf-8")
    text = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")  # cannot end the script
    write_output(output, template.replace('"DATA"', text))
    return list(logged)


def read_charts(folder: Path) -> dict[str, dict[str, list[Any]]]:
    """Chart → columns step, tokens, hours and value. Hours are the sum of the step times.

    If a step was trained again or left out later, its last row counts. Empty for a run that ended before its first
    step. Raises TitaniteError.
    """
    file = folder / "metrics.jsonl"
    if (folder / "model.json").is_file() and not file.exists():
        return {}
    with _readable(file):
        return _charts(file, file.read_text(encoding="utf-8").splitlines())


def _charts(file: Path, lines: Sequence[str]) -> dict[str, dict[str, list[Any]]]:
    """As `read_charts`, of the lines of `file`. Raises KeyError or TypeError if another program wrote them."""
    rows: list[dict[str, Any]] = []
    last = 0
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
        except ValueError as error:
            if number == len(lines):
                break  # cut off by a crash
            raise TitaniteError(f"{file}, line {number}: not JSON: {error}") from None
        if not _is_validation(row):
            if row["step"] <= last:  # a new start or a rollback went back to an earlier step
                rows = [kept for kept in rows if kept["step"] < row["step"]]
            last = row["step"]
        rows.append(row)
    validations = {row["step"]: row for row in rows if _is_validation(row)}
    skipped = {row["step"] for row in rows if row.get("skipped")}
    steps = {row["step"]: row for row in rows if row["step"] not in skipped and not _is_validation(row)}
    ends = list(steps)
    hours = list(accumulate(_interval_hours(steps, skipped)))
    charts: dict[str, dict[str, list[Any]]] = {}
    for row in (*steps.values(), *validations.values()):
        done = bisect_right(ends, row["step"])
        row["hours"] = hours[done - 1] if done else 0.0
        for key, value in row.items():
            if value is None or not (key in TITLES or key.startswith("validation_loss/")) or not math.isfinite(value):
                continue
            table = charts.setdefault(key, {name: [] for name in (*AXES, "value")})
            for name in AXES:
                table[name].append(row[name])
            table["value"].append(value)
    return charts


def _is_validation(row: Mapping[str, Any]) -> bool:
    return row["loss"] is None and not row.get("skipped")


def _interval_hours(steps: Mapping[int, Mapping[str, Any]], skipped: set[int]) -> Iterator[float]:
    """Yield for each row the hours since the row before.

    A row times its last `interval_steps` steps. Those before, up to a validation, a checkpoint or the end of a start,
    were not timed. They count as the faster of the two rows, since a start's first row may include compilation.
    """
    before, usual = 0, math.inf
    for step, row in steps.items():
        seconds = row["step_seconds"]
        trained = step - before - sum(before < left_out < step for left_out in skipped)
        timed = row.get("interval_steps") or trained  # runs of earlier versions do not say
        yield (timed * seconds + (trained - timed) * min(seconds, usual)) / 3600
        before, usual = step, seconds


def read_settings(folder: Path) -> dict[str, Any]:
    """Dotted key → value, of the run's config and of its last start. Raises TitaniteError."""
    file = folder / "config.toml"
    with _readable(file):
        sections = tomllib.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        settings = {f"{section}.{key}": value for section, fields in sections.items() for key, value in fields.items()}
    start = _last_start(folder)
    settings |= {key: start[key] for key in ("world_size", "git_commit", "python") if key in start}
    return settings | {f"package {name}": version for name, version in start.get("packages", {}).items()}


def differing_settings(runs: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """A row for each setting that differs between the runs: its key, then its value in each run."""
    keys = dict.fromkeys(key for run in runs for key in run if key != "run.folder")
    shown = {key: [json.dumps(run[key]) if key in run else "–" for run in runs] for key in keys}
    return [[key, *values] for key, values in shown.items() if len(set(values)) > 1]


def _summary(
    folder: Path, tables: Mapping[str, Mapping[str, list[Any]]], found: Sequence[str]
) -> list[tuple[str, float | None]]:
    """(column, value) of a run, with the validation losses among the charts `found` last. None: it has no value."""

    def last(chart: str, name: str = "value") -> float | None:
        return tables[chart][name][-1] if chart in tables else None

    def middle(chart: str) -> float | None:
        return median(tables[chart]["value"]) if chart in tables else None

    tps, devices = middle("tps"), _last_start(folder).get("world_size")
    return [
        ("steps", last("loss", "step")),
        ("tokens", last("loss", "tokens")),
        ("hours", last("loss", "hours")),
        ("loss", last("loss")),
        ("tokens/s per device", tps),
        ("devices", devices),
        ("tokens/s", tps * devices if tps and devices else None),
        ("MFU", middle("mfu")),
        ("memory GiB", max(tables["memory_gib"]["value"]) if "memory_gib" in tables else None),
        ("waiting for data %", middle("data_wait_pct")),
        *((chart.replace("_", " "), last(chart)) for chart in found if chart.startswith("validation_loss")),
    ]


def _last_start(folder: Path) -> dict[str, Any]:
    file = folder / "starts.jsonl"
    with _readable(file):
        return dict([{}, *read_records(file)][-1])


@contextmanager
def _readable(file: Path) -> Iterator[None]:
    """Raises TitaniteError, in one line, if a run's file is missing or damaged."""
    try:
        yield
    except OSError as error:
        raise TitaniteError(f"{file}: cannot be read, {error.strerror}; name folders of runs") from None
    except ValueError as error:
        raise TitaniteError(f"{file}: is damaged: {error}") from None
    except (KeyError, TypeError, AttributeError) as error:
        raise TitaniteError(f"{file}: is not as a run writes it: {type(error).__name__}: {error}") from None


def _thinned(table: Mapping[str, list[Any]]) -> dict[str, list[Any]]:
    """At most MAX_POINTS rows, evenly spaced, with the last one."""
    n = len(table["value"])
    stride = -(-n // MAX_POINTS)
    return {name: values[(n - 1) % stride :: stride] for name, values in table.items()}


def _names(folders: Sequence[Path]) -> list[str]:
    """The folders' last names, or their paths if two share one. Raises TitaniteError for a run named twice."""
    if len({folder.resolve() for folder in folders}) < len(folders):
        raise TitaniteError(f"{', '.join(map(str, folders))}: a run is named twice")
    names = [folder.resolve().name for folder in folders]
    return names if len(set(names)) == len(names) else [str(folder) for folder in folders]


def _place(chart: str) -> tuple[int, str]:
    return list(TITLES).index(chart if chart in TITLES else chart.partition("/")[0]), chart


def main(argv: Sequence[str]) -> None:
    """The command line. Raises TitaniteError."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.compare", description="A page of curves, throughput and settings of several runs."
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folder of a run")
    page = Path("compare.html")
    parser.add_argument("--output", type=output_file, default=page, help="the page (default %(default)s)")
    arguments = parser.parse_args(argv)
    compared = write_page(arguments.runs, arguments.output)
    for run in arguments.runs:
        if run not in compared:
            print(f"{run}: left out, it has logged no step", file=sys.stderr)
    print(f"{arguments.output}: open it in a browser; runs compared: {len(compared)}")


if __name__ == "__main__":
    with command_line():
        main(sys.argv[1:])
