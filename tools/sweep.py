"""Train a sweep: one config with lists of values, as a grid, side by side, and with several seeds.

    python -m tools.sweep rates.toml [--at-once N | --slurm=OPTIONS] [--dry-run]

    base = "train_configs/debug.toml"        # relative to this file
    folder = "outputs/rates"                 # default: outputs/ and this file's name
    seeds = [0, 1, 2]
    [set]                                    # for all runs
    training.steps = 200
    [grid]                                   # every combination
    optimizer.lr = [1e-3, 2e-3, 4e-3]
    [[zip]]                                  # the first values together, the second ones, ...
    model.dim = [128, 256]
    model.n_layers = [4, 6]

Started again, it trains what is not finished. At the end it writes sweep.html and sweep.csv to the folder.
"""

import itertools
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from config import ConfigError, TitaniteError, command_line
from tools.compare import Table, is_loss, read_run, write_page
from tools.study import Run, Study, build_parser, conduct, name_values, report, write_csv

SEED = "run.seed"
AMOUNTS = ("steps", "tokens", "seconds")  # of training, at which runs are compared


# -- which runs


def read_sweep(file: Path) -> tuple[Study, list[Run]]:
    """A sweep's file, and its runs. Raises ConfigError."""
    study = Study(file, ("seeds", "grid", "zip"))
    axes = []
    for key, values in study.settings("grid", study.values.get("grid", {})).items():
        axes.append(_rows(study, {key: values}))
    for table in study.values.get("zip", []):
        axes.append(_rows(study, study.settings("zip", table)))
    if "seeds" in study.values:
        axes.append(_rows(study, {SEED: study.values["seeds"]}))
    keys = [*study.common, *(key for axis in axes for key in axis[0])]
    for key in keys:
        if keys.count(key) > 1:
            raise ConfigError(f"{file}: {key}: is set or varied twice: name it once")
    if not axes:
        raise ConfigError(f"{file}: varies nothing: needs [grid], [[zip]] or seeds")
    runs = []
    for choice in itertools.product(*axes):
        values = {key: value for row in choice for key, value in row.items()}
        runs.append(study.run(values, values))
    return study, runs


def _rows(study: Study, columns: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The first values of all columns, the second ones, and so on."""
    for key, values in columns.items():
        if not isinstance(values, list) or not values or len(values) != len(next(iter(columns.values()))):
            wanted = "a list of values, in [[zip]] as long as the others of its table"
            raise ConfigError(f"{study.file}: {key} = {values!r}: must be {wanted}")
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


# -- what came of them


class Result(NamedTuple):
    """A run that has logged the loss that counts."""

    run: Run
    losses: dict[str, float]  # name of a loss → its last value
    curve: np.ndarray  # points of the loss that counts: steps, tokens, seconds, loss

    @property
    def group(self) -> str:
        """The values that tell it from others than its seeds."""
        return name_values({key: value for key, value in self.run.values.items() if key != SEED}) or "all"


def read_results(runs: Sequence[Run]) -> tuple[str, list[Result]]:
    """The loss that counts, and who has it, best first: that of validation, if all finished runs have it.

    Raises TitaniteError if no run has a loss.
    """
    found = [(run, read_run(run.folder)[0]) for run in runs]
    done = [charts for run, charts in found if run.finished] or [charts for _, charts in found]
    field = "validation_loss" if all("validation_loss" in charts for charts in done) else "loss"
    results = []
    for run, charts in found:
        if field in charts:
            losses = {name: points[-1][-1] for name, points in charts.items() if is_loss(name)}
            results.append(Result(run, losses, np.array(charts[field]) * (1, 1, 3600, 1)))
    if not results:
        raise TitaniteError("no run of the study has logged a loss yet")
    return field, sorted(results, key=lambda result: (not result.run.finished, result.losses[field]))


def tabulate(field: str, results: Sequence[Result]) -> Table:
    """The table of the page: means over seeds, at the end and at equal steps, tokens and seconds.

    Of finished runs, or of all if none is. At what the one that came least far has, on the line between two points.
    """
    done = [result for result in results if result.run.finished] or results
    amounts = np.min([result.curve[-1, :3] for result in done], axis=0)
    groups: dict[str, list[list[float]]] = {}
    for result in done:
        at = [np.interp(amounts[i], result.curve[:, i], result.curve[:, -1]) for i in range(3)]
        groups.setdefault(result.group, []).append([result.losses[field], *at])
    means = {name: np.mean(losses, axis=0) for name, losses in groups.items()}
    best = np.min(list(means.values()), axis=0)
    rows = []
    for name, losses in sorted(groups.items(), key=lambda item: means[item[0]][0]):
        deviation = float(np.std(losses, axis=0, ddof=1)[0]) if len(losses) > 1 else "–"
        cells = [f"{loss:.4f}{' *' * bool(loss == low)}" for loss, low in zip(means[name], best, strict=True)]
        rows.append([name, len(losses), cells[0], deviation, *cells[1:]])
    columns = [f"at {amount:,.0f} {name}" for amount, name in zip(amounts, AMOUNTS, strict=True)]
    note = (
        "*: the best. ±: standard deviation over seeds. Compared at equal amounts: those of the shortest finished run."
    )
    return Table(f"By {field}", ["values", "runs", "at the end", "±", *columns], rows, note)


def write_results(folder: Path, runs: Sequence[Run]) -> None:
    """Write page and CSV of what is there, and print the table. Raises TitaniteError."""
    field, results = read_results(runs)
    found = {result.run.name: result for result in results}
    rows = []
    for run in runs:
        row = {"run": run.name, **run.values, "state": run.state}
        if run.name in found:
            row |= zip(AMOUNTS, found[run.name].curve[-1].tolist(), strict=False)
            row |= found[run.name].losses
        rows.append(row)
    write_csv(folder / "sweep.csv", rows)
    table = tabulate(field, results)
    groups = {result.run.folder: result.group for result in results}
    write_page(list(groups), folder / "sweep.html", f"Sweep {folder.name}", groups, [table])
    print(f"\n{table.text()}")


def main(argv: Sequence[str]) -> int:
    """The command line. Returns the exit code. Raises TitaniteError."""
    options = build_parser("sweep", __doc__ or "").parse_args(argv)
    study, runs = read_sweep(options.file)
    failed = conduct(options, study.folder, runs)
    if failed is None:
        return 0
    write_results(study.folder, runs)
    return report(runs, failed)


if __name__ == "__main__":
    with command_line():
        sys.exit(main(sys.argv[1:]))
