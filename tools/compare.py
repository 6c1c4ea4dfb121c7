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
    "step_seconds": "seconds per step",
    "grad_norm": "gradient norm",
    "lr": "learning rate",
    "memory_gib": "memory, GiB",
    "data_wait_pct": "waiting for data, %",
}
Charts = dict[str, dict[str, list[Any]]]  # chart → columns step, tokens, hours and value


def write_page(runs: Sequence[Path], output: Path) -> None:
    """Write the page that compares these runs, without those that have logged no step. Raises TitaniteError."""
    read = {folder.resolve(): read_run(folder) for folder in runs}
    for folder in [folder for folder, (charts, _) in read.items() if not charts]:
        print(f"{folder}: left out, no step was logged there")
        del read[folder]
    if not read:
        raise TitaniteError("no run to compare")
    names = name_runs(list(read))
    found = sorted({chart for charts, _ in read.values() for chart in charts})
    found.sort(key=lambda chart: list(TITLES).index(chart.partition("/")[0]))
    summaries = [summarize(charts, settings.get("world_size"), found) for charts, settings in read.values()]
    data = {
        "runs": [
            {"name": name, "charts": {chart: _thinned(table) for chart, table in charts.items()}}
            for name, (charts, _) in zip(names, read.values(), strict=True)
        ],
        "charts": found,
        "titles": TITLES,
        "summary": {
            "columns": list(summaries[0]),
            "rows": [[name, *summary.values()] for name, summary in zip(names, summaries, strict=True)],
        },
        "settings": differing_settings([settings for _, settings in read.values()]),
    }
    template = Path(__file__).with_name("compare.html").read_text(encoding="utf-8")
    text = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")  # cannot end the script
    write_output(output, template.replace('"DATA"', text))
    print(f"{output}: open it in a browser; runs compared: {len(read)}")


def read_run(folder: Path) -> tuple[Charts, dict[str, Any]]:
    """(charts, settings) of a run: those of its config and of its last start. Raises TitaniteError."""
    try:
        with file_errors():
            file, starts = folder / "config.toml", read_records(folder / "starts.jsonl")
            sections = tomllib.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
            settings = {f"{section}.{key}": value for section, keys in sections.items() for key, value in keys.items()}
            for start in starts[-1:]:
                settings |= {key: start[key] for key in ("world_size", "git_commit", "python") if key in start}
                settings |= {f"package {name}": version for name, version in start.get("packages", {}).items()}
            return read_charts(folder), settings
    except (ValueError, KeyError, TypeError) as error:
        raise TitaniteError(
            f"{folder}: its metrics.jsonl, starts.jsonl or config.toml is not as a run writes it: "
            f"{type(error).__name__}: {error}"
        ) from None


def read_charts(folder: Path) -> Charts:
    """The charts of a run. If a step was trained again or left out, its last row counts.

    Hours are step times added up: each row times the `interval_steps` before it. Raises ValueError, KeyError or
    TypeError for rows that no run wrote.
    """
    rows, last = list[dict[str, Any]](), 0
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
        for key, value in row.items():
            charted = key in TITLES or key.startswith("validation_loss/")
            if charted and value is not None and math.isfinite(value):
                table = charts.setdefault(key, {"step": [], "tokens": [], "hours": [], "value": []})
                for column, x in zip(table.values(), (row["step"], row["tokens"], hours, value), strict=True):
                    column.append(x)
    return charts


def differing_settings(runs: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """A row for each setting that differs between the runs: its key, then its value in each run."""
    keys = dict.fromkeys(key for run in runs for key in run if key != "run.folder")
    shown = {key: [json.dumps(run[key]) if key in run else "–" for run in runs] for key in keys}
    return [[key, *values] for key, values in shown.items() if len(set(values)) > 1]


def summarize(charts: Charts, devices: int | None, found: Sequence[str]) -> dict[str, float | None]:
    """Column → value of a run, with the losses among the charts `found`. None: it has no value."""
    tps, mfu, memory = (charts[name]["value"] if name in charts else None for name in ("tps", "mfu", "memory_gib"))
    longest = charts.get("loss", {})
    losses = [chart for chart in found if chart.partition("/")[0] in ("loss", "validation_loss")]
    return {
        **{name: longest[name][-1] if longest else None for name in ("step", "tokens", "hours")},
        "tokens/s": median(tps) * devices if tps and devices else None,
        "MFU": median(mfu) if mfu else None,
        "memory GiB": max(memory) if memory else None,
        **{chart.replace("_", " "): charts[chart]["value"][-1] if chart in charts else None for chart in losses},
    }


def _thinned(table: Mapping[str, list[Any]]) -> dict[str, list[Any]]:
    """At most MAX_POINTS rows, evenly spaced, with the last one."""
    stride = -(-(n := len(table["value"])) // MAX_POINTS)
    return {name: values[(n - 1) % stride :: stride] for name, values in table.items()}


def name_runs(folders: Sequence[Path]) -> list[str]:
    """The folders' last names, or their paths if two share one; a branch also after its parent."""
    last = [folder.name for folder in folders]
    names = last if len(set(last)) == len(last) else [str(folder) for folder in folders]
    parents = map(read_parent, folders)
    return [f"{name} from {at.place}@{at.step}" if at else name for name, at in zip(names, parents, strict=True)]


def main(argv: Sequence[str]) -> None:
    """The command line. Raises TitaniteError."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.compare", description="A page of curves, throughput and settings of several runs."
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folder of a run")
    parser.add_argument("--output", type=output_file, default=Path("compare.html"), help="default %(default)s")
    arguments = parser.parse_args(argv)
    write_page(arguments.runs, arguments.output)


if __name__ == "__main__":
    with command_line():
        main(sys.argv[1:])
