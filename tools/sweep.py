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

Started again, it trains what is not finished. At the end it writes sweep.html to the folder.
"""

import itertools
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from config import ConfigError, command_line
from tools.compare import Table, read_run, write_page
from tools.study import Chain, Run, Study, conduct, dotted, name_values


def read_sweep(file: Path) -> tuple[Path, list[Chain]]:
    """A sweep's folder and its runs, each for itself. Raises ConfigError."""
    study = Study(file, ("grid", "zip"))
    tables = [{key: values} for key, values in dotted(study.values.get("grid", {})).items()]
    tables += [dotted(table) for table in study.values.get("zip", [])]
    if not tables:
        raise ConfigError(f"{file}: varies nothing: needs [grid] or [[zip]]")
    keys = list(itertools.chain(*tables))
    for key in keys:
        if keys.count(key) > 1:
            raise ConfigError(f"{file}: {key}: varies twice; name it once in [grid] or [[zip]]")
    chains: list[Chain] = []
    for choice in itertools.product(*map(_rows, tables)):
        values = dict(itertools.chain(*choice))
        chains.append([study.run(values, values)])
    return study.folder, chains


def _rows(columns: Mapping[str, Any]) -> list[list[tuple[str, Any]]]:
    """(key, value) of the first values of all columns, of the second ones, and so on."""
    for key, values in columns.items():
        if not isinstance(values, list) or not values:
            raise ConfigError(f"{key} = {values!r}: needs a list of values")
    lengths = {len(values) for values in columns.values()}
    if len(lengths) > 1:
        raise ConfigError(f"{', '.join(columns)}: need lists of one length")
    return [list(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def write_results(folder: Path, runs: Sequence[Run]) -> None:
    """Write the page of what is there, and print its tables. Raises TitaniteError.

    The loss that counts is that of validation, if there is one.
    """
    shown = []
    for run in runs:
        varied = {key: value for key, value in run.values.items() if key != "run.seed"}
        shown.append(read_run(run.folder, run.name, name_values(varied) or "all"))
    field = "loss"
    if any("validation_loss" in own.charts for own in shown):
        field = "validation_loss"
    missing = []
    losses: dict[str, list[float]] = {}  # by group, of finished runs
    for run, own in zip(runs, shown, strict=True):
        if not run.finished:
            missing.append([run.name, run.end["cause"]])
        elif field in own.charts:
            losses.setdefault(own.group, []).append(own.charts[field][-1][-1])
    tables = []
    if losses:
        tables.append(tabulate(field, losses))
    if missing:
        tables.append(Table("Not finished", ["run", "why"], missing, "Not in the means."))
    write_page(shown, folder / "sweep.html", f"Sweep {folder.name}", tables)
    for table in tables:
        print(f"\n{table.text()}")


def tabulate(field: str, groups: Mapping[str, Sequence[float]]) -> Table:
    """The last losses of groups of runs: mean and deviation over seeds, the best first."""
    rows: list[list[Any]] = []
    for name, losses in groups.items():
        deviation: Any = "–"
        if len(losses) > 1:
            deviation = stdev(losses)
        rows.append([name, len(losses), deviation, fmean(losses)])
    rows.sort(key=lambda row: row[3])
    note = "Of finished runs; ±: standard deviation over seeds. A lead that is not larger says nothing."
    return Table(f"By {field}", ["values", "runs", "±", "at the end"], rows, note)


def main(argv: Sequence[str]) -> int:
    """The command line. Returns the exit code. Raises TitaniteError."""
    return conduct("sweep", __doc__ or "", argv, read_sweep, write_results)


if __name__ == "__main__":
    with command_line():
        sys.exit(main(sys.argv[1:]))
