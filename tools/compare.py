"""Compare runs on one HTML page, which holds its own data: it needs no server and loads nothing.

python -m tools.compare outputs/A outputs/B --output compare.html
"""

import argparse
import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from checkpoint.branch import read_parent
from config import TitaniteError, command_line, file_errors, tomllib
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


def write_page(runs: Sequence[Path], output: Path) -> list[Path]:
    """Write the page that compares these runs, and return those on it, all that have logged a step.

    Raises TitaniteError.
    """
    names = dict(zip(runs, _names(runs), strict=True))
    logged = {run: tables for run in runs if (tables := read_charts(run))}
    if not logged:
        raise TitaniteError(f"{', '.join(map(str, runs))}: no step was logged there, so there is nothing to compare")
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
    """Chart → columns step, tokens, hours and value. If a step was trained again or left out, its last row counts.

    Hours are step times added up. A row times its last `interval_steps` steps. Those before, up to a validation, a
    checkpoint or the end of a start, were not timed. They count as the faster of the two rows, since a start's first
    row may include compilation. Raises TitaniteError.
    """
    with _readable(folder / "metrics.jsonl"):
        rows, last = list[dict[str, Any]](), 0
        for row in read_records(folder / "metrics.jsonl"):
            if row["loss"] is not None or row.get("skipped"):  # no validation
                if row["step"] <= last:  # a new start or a rollback went back to an earlier step
                    rows = [kept for kept in rows if kept["step"] < row["step"]]
                last = row["step"]
            rows.append(row)
        charts: dict[str, dict[str, list[Any]]] = {}
        parent, usual = read_parent(folder), math.inf  # step time of the last trained row
        hours, before = 0.0, parent.step if parent else 0  # up to that row, its step
        for row in rows:
            step, seconds = row["step"], row["step_seconds"]
            if row.get("skipped"):
                before += 1  # a step less that was trained since then
                continue
            if seconds is not None:
                timed = row.get("interval_steps") or step - before  # runs of earlier versions do not say
                hours += (timed * seconds + (step - before - timed) * min(seconds, usual)) / 3600
                before, usual = step, seconds
            for key, value in row.items():
                charted = key in TITLES or key.startswith("validation_loss/")
                if charted and value is not None and math.isfinite(value):
                    point = {"step": step, "tokens": row["tokens"], "hours": hours, "value": value}
                    table = charts.setdefault(key, {name: [] for name in point})
                    for name, x in point.items():
                        table[name].append(x)
    return charts


def read_settings(folder: Path) -> dict[str, Any]:
    """Dotted key → value, of the run's config and of its last start. Raises TitaniteError."""
    with _readable(file := folder / "config.toml"):
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
    memory = tables.get("memory_gib", {}).get("value")
    return [
        *((name, last("loss", name)) for name in ("step", "tokens", "hours")),
        ("loss", last("loss")),
        ("tokens/s per device", tps),
        ("devices", devices),
        ("tokens/s", tps * devices if tps and devices else None),
        ("MFU", middle("mfu")),
        ("memory GiB", max(memory) if memory else None),
        ("waiting for data %", middle("data_wait_pct")),
        *((chart.replace("_", " "), last(chart)) for chart in found if chart.startswith("validation_loss")),
    ]


def _last_start(folder: Path) -> dict[str, Any]:
    with _readable(folder / "starts.jsonl"):
        return dict([{}, *read_records(folder / "starts.jsonl")][-1])


@contextmanager
def _readable(file: Path) -> Iterator[None]:
    """Raises TitaniteError, in one line, if a run's file cannot be read or is not as a run writes it."""
    try:
        with file_errors():
            yield
    except (ValueError, KeyError, TypeError) as error:
        raise TitaniteError(f"{file}: is not as a run writes it: {type(error).__name__}: {error}") from None


def _thinned(table: Mapping[str, list[Any]]) -> dict[str, list[Any]]:
    """At most MAX_POINTS rows, evenly spaced, with the last one."""
    stride = -(-(n := len(table["value"])) // MAX_POINTS)
    return {name: values[(n - 1) % stride :: stride] for name, values in table.items()}


def _names(folders: Sequence[Path]) -> list[str]:
    """The folders' last names, or their paths if two share one. Raises TitaniteError for a run named twice."""
    if len({folder.resolve() for folder in folders}) < len(folders):
        raise TitaniteError(f"{', '.join(map(str, folders))}: a run is named twice")
    names = [folder.resolve().name for folder in folders]
    shown = names if len(set(names)) == len(names) else [str(folder) for folder in folders]
    parents = map(read_parent, folders)
    return [f"{name} from {at.place}@{at.step}" if at else name for name, at in zip(shown, parents, strict=True)]


def _place(chart: str) -> tuple[int, str]:
    return list(TITLES).index(chart if chart in TITLES else chart.partition("/")[0]), chart


def main(argv: Sequence[str]) -> None:
    """The command line. Raises TitaniteError."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.compare", description="A page of curves, throughput and settings of several runs."
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folder of a run")
    parser.add_argument("--output", type=output_file, default=Path("compare.html"), help="default %(default)s")
    arguments = parser.parse_args(argv)
    compared = write_page(arguments.runs, arguments.output)
    for run in arguments.runs:
        if run not in compared:
            print(f"{run}: left out, no step was logged there", file=sys.stderr)
    print(f"{arguments.output}: open it in a browser; runs compared: {len(compared)}")


if __name__ == "__main__":
    with command_line():
        main(sys.argv[1:])
