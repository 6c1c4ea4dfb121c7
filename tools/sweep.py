"""Train a sweep: one config with lists of values, as a grid, side by side, and with several seeds.

    python -m tools.sweep rates.toml [--at-once N | --slurm=OPTIONS] [--dry-run]

    base = "train_configs/debug.toml"        # relative to this file
    folder = "outputs/rates"                 # default: outputs/ and this file's name
    training.steps = 200                     # any setting, for all runs
    [grid]                                   # every combination
    optimizer.lr = [1e-3, 2e-3, 4e-3]
    run.seed = [0, 1, 2]                     # runs that differ by it alone are averaged
    [[zip]]                                  # the first values together, the second ones, ...
    model.dim = [128, 256]
    model.n_layers = [4, 6]

Started again, it trains what is not finished. At the end it writes sweep.html and sweep.csv to the folder.
"""

import itertools
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from config import ConfigError, command_line
from tools.compare import Table, is_loss, read_run, write_page
from tools.study import Plan, Run, Study, conduct, dotted, name_values, write_csv

SEED = "run.seed"


# -- which runs


def read_sweep(file: Path) -> Plan:
    """A sweep's folder, its runs, each for itself, and what writes its page. Raises ConfigError."""
    study = Study(file, ("grid", "zip"))
    tables = [{key: values} for key, values in dotted(study.values.get("grid", {})).items()]
    tables += [dotted(table) for table in study.values.get("zip", [])]
    keys = list(itertools.chain(*tables))
    for key in keys:
        if keys.count(key) > 1:
            raise ConfigError(f"{file}: {key}: varies twice; name it once in [grid] or [[zip]]")
    axes = [_rows(table) for table in tables]
    if not axes:
        raise ConfigError(f"{file}: varies nothing: needs [grid] or [[zip]]")
    runs = []
    for choice in itertools.product(*axes):
        values: dict[str, Any] = {}
        for row in choice:
            values |= row
        runs.append(study.run(values, values))
    return study.folder, [[run] for run in runs], partial(write_results, study.folder, runs)


def _rows(columns: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The first values of all columns, the second ones, and so on."""
    for key, values in columns.items():
        if not isinstance(values, list) or not values:
            raise ConfigError(f"{key} = {values!r}: needs a list of values")
    lengths = {len(values) for values in columns.values()}
    if len(lengths) > 1:
        raise ConfigError(f"{', '.join(columns)}: need lists of one length")
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


# -- what came of them


def group_of(run: Run) -> str:
    """The values that tell a run from others than its seeds."""
    return name_values({key: value for key, value in run.values.items() if key != SEED}) or "all"


def write_results(folder: Path, runs: Sequence[Run]) -> None:
    """Write page and CSV of what is there, and print the tables. Raises TitaniteError.

    The loss that counts is that of validation, if there is one.
    """
    shown = [read_run(run.folder, group_of(run)) for run in runs]
    field = "loss"
    if any("validation_loss" in own.charts for own in shown):
        field = "validation_loss"
    rows = []
    missing = []
    losses: dict[str, list[float]] = {}  # by group, of finished runs
    for run, own in zip(runs, shown, strict=True):
        row: dict[str, Any] = {"run": run.name, **run.values, "finished": run.finished}
        if "loss" in own.charts:
            row["steps"], row["tokens"], *_ = own.charts["loss"][-1]
        row |= {name: points[-1][-1] for name, points in own.charts.items() if is_loss(name)}
        if not run.finished:
            missing.append([run.name, row.get("steps", 0), run.end])
        elif field in row:
            losses.setdefault(own.group, []).append(row[field])
        rows.append(row)
    write_csv(folder / "sweep.csv", rows)
    tables = []
    if losses:
        tables.append(tabulate(field, losses))
    if missing:
        tables.append(Table("Not finished", ["run", "steps", "its end"], missing, "Not in the means."))
    write_page(shown, folder / "sweep.html", f"Sweep {folder.name}", tables)
    for table in tables:
        print(f"\n{table.text()}")


def tabulate(field: str, groups: Mapping[str, Sequence[float]]) -> Table:
    """The last losses of groups of runs: mean and deviation over seeds, the best first."""
    rows: list[list[Any]] = []
    for name, losses in groups.items():
        deviation = stdev(losses) if len(losses) > 1 else "–"
        rows.append([name, len(losses), deviation, fmean(losses)])
    rows.sort(key=lambda row: row[3])
    note = "Of finished runs; ±: standard deviation over seeds."
    if len(rows) > 1:
        note += f" {_lead(rows)}"
    return Table(f"By {field}", ["values", "runs", "±", "at the end"], rows, note)


def _lead(rows: Sequence[Sequence[Any]]) -> str:
    """How far the best of two rows or more leads, beside the spread over seeds of the first two."""
    first, second = rows[:2]
    lead = second[3] - first[3]
    text = f"{first[0]} leads {second[0]} by {lead:.4g}"
    spreads = [row[2] for row in (first, second) if row[1] > 1]
    if not spreads:
        return f"{text}, of one run each: how far seeds spread is not known."
    compared = "no more than"
    if lead > max(spreads):
        compared = "more than"
    return f"{text}, {compared} ±, {max(spreads):.4g}."


def main(argv: Sequence[str]) -> int:
    """The command line. Returns the exit code. Raises TitaniteError."""
    return conduct("sweep", __doc__ or "", argv, read_sweep)


if __name__ == "__main__":
    with command_line():
        sys.exit(main(sys.argv[1:]))
