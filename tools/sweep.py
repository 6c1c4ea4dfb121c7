"""Train a sweep: one config with lists of values, as a grid, side by side, and with several seeds.

    python -m tools.sweep rates.toml [--at-once N | --slurm] [--dry-run]

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

import csv
import itertools
import math
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from config import ConfigError, TitaniteError, command_line, file_errors
from tools.compare import Charts, Table, is_loss, read_run, write_page
from tools.study import (
    Run,
    build_config,
    build_parser,
    conduct,
    flatten,
    name_values,
    read_study,
    report_failures,
)

KEYS = ("base", "folder", "seeds", "set", "grid", "zip")
SEED = "run.seed"
AMOUNTS = ("steps", "tokens", "seconds")  # of training, at which runs are compared


# -- which runs


def read_sweep(file: Path) -> tuple[Path, list[Run]]:
    """(folder, runs) of a sweep's file. Raises ConfigError."""
    study = read_study(file, KEYS)
    folder = Path(study.get("folder", f"outputs/{file.stem}"))
    common = flatten(study.get("set", {}), f"{file}: [set]")
    runs = []
    for values in _combinations(study, file):
        for key in values:
            if key in common:
                raise ConfigError(f"{file}: {key}: is in [set] and varied: name it once")
        name = name_values(values)
        config = build_config(file.parent / study["base"], folder / name, common | values)
        runs.append(Run(name, values, config))
    return folder, runs


def _combinations(study: Mapping[str, Any], file: Path) -> list[dict[str, Any]]:
    """The values of each run: every combination of the grid, of the columns of each `zip`, and of the seeds."""
    axes: list[list[dict[str, Any]]] = []
    for key, values in _lists(study.get("grid", {}), f"{file}: [grid]"):
        axes.append([{key: value} for value in values])
    zipped = study.get("zip", [])
    if not isinstance(zipped, list):
        zipped = [zipped]
    for table in zipped:
        columns = dict(_lists(table, f"{file}: [[zip]]"))
        lengths = {key: len(values) for key, values in columns.items()}
        if len(set(lengths.values())) > 1:
            raise ConfigError(f"{file}: [[zip]]: must be lists of one length, not {lengths}")
        axes.append([dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)])
    if "seeds" in study:
        axes.append([{SEED: seed} for _, seeds in _lists({SEED: study["seeds"]}, f"{file}: seeds") for seed in seeds])
    keys = [key for axis in axes for key in axis[0]]
    for key in keys:
        if keys.count(key) > 1:
            raise ConfigError(f"{file}: {key}: is varied twice: name it once")
    if not keys:
        raise ConfigError(f"{file}: varies nothing: needs [grid], [[zip]] or seeds")
    combined = []
    for choice in itertools.product(*axes):
        combined.append({key: value for part in choice for key, value in part.items()})
    return combined


def _lists(table: Any, place: str) -> Iterator[tuple[str, list[Any]]]:
    for key, values in flatten(table, place).items():
        if not isinstance(values, list) or not values:
            raise ConfigError(f"{place}: {key} = {values!r}: must be a list of values")
        yield key, values


# -- what came of them


@dataclass(frozen=True)
class Result:
    """A run that has logged a loss, and how far it has come."""

    run: Run
    charts: Charts
    field: str  # the loss that counts
    steps: float
    tokens: float
    seconds: float

    @property
    def loss(self) -> float:
        """Its last loss."""
        return self.charts[self.field][-1][-1]

    def loss_at(self, amount: str, value: float) -> float:
        """The loss after so many steps, tokens or seconds, on the line between the two measured around it."""
        column = AMOUNTS.index(amount)
        points = np.array(self.charts[self.field])
        scale = 3600.0 if amount == "seconds" else 1.0
        return float(np.interp(value, points[:, column] * scale, points[:, -1]))


def read_results(runs: Sequence[Run]) -> list[Result]:
    """The results of those runs that have logged the loss that counts: of validation, if all finished ones have that.

    Raises TitaniteError if there is none.
    """
    found = [(run, read_run(run.folder)[0]) for run in runs]
    found = [(run, charts) for run, charts in found if "loss" in charts]
    if not found:
        raise TitaniteError("no run of the study has logged a loss yet")
    done = [charts for run, charts in found if run.finished] or [charts for _, charts in found]
    field = "loss"
    if all("validation_loss" in charts for charts in done):
        field = "validation_loss"
    results = []
    for run, charts in found:
        if field in charts:
            steps, tokens, hours = max(points[-1][:3] for points in charts.values())
            results.append(Result(run, charts, field, steps, tokens, 3600 * hours))
    return results


def group_seeds(results: Sequence[Result]) -> list[list[Result]]:
    """The runs that differ by nothing but the seed, finished ones first, then by their mean loss."""
    groups: dict[str, list[Result]] = {}
    for result in results:
        values = {key: value for key, value in result.run.values.items() if key != SEED}
        groups.setdefault(name_values(values), []).append(result)

    def rank(group: list[Result]) -> tuple[bool, float]:
        return not all(result.run.finished for result in group), mean_loss(group)[0]

    return sorted(groups.values(), key=rank)


def mean_loss(group: Sequence[Result]) -> tuple[float, float | None]:
    """The mean and the standard deviation (of a sample) of the last loss over seeds; None of one run."""
    losses = [result.loss for result in counted(group)]
    return statistics.fmean(losses), statistics.stdev(losses) if len(losses) > 1 else None


def counted(results: Sequence[Result]) -> Sequence[Result]:
    """Those that are finished, or all if none is."""
    return [result for result in results if result.run.finished] or results


def tabulate(results: Sequence[Result], runs: Sequence[Run]) -> list[Table]:
    """The tables of the page: the groups by their loss; which is the best at equal steps, tokens and seconds."""
    keys = [key for key in runs[0].values if key != SEED]
    reached = {}
    for amount in AMOUNTS:
        reached[amount] = min(getattr(result, amount) for result in counted(results))
    titles = ["at the end"]
    for amount, value in reached.items():
        titles.append(f"at {value:,.0f} {amount}" if value >= 10 else f"at {value:.2g} {amount}")
    rows = []
    best: dict[str, tuple[float, str]] = {}
    for group in group_seeds(results):
        mean, deviation = mean_loss(group)
        losses = [mean, *(_mean_at(group, amount, value) for amount, value in reached.items())]
        name = name_values({key: group[0].run.values[key] for key in keys}) or "all"
        for title, loss in zip(titles, losses, strict=True):
            if loss is not None:
                best[title] = min(best.get(title, (math.inf, "")), (loss, name))
        done = sum(result.run.finished for result in group)
        asked = sum(name_values({key: run.values[key] for key in keys}) == name for run in runs) or len(group)
        values = [str(group[0].run.values[key]) for key in keys]
        rows.append([*values, f"{done} of {asked}", mean, deviation, *losses[1:]])
    field = results[0].field
    note = "± is the standard deviation over seeds. The last three columns compare after equal amounts: as many as the "
    note += "finished run that came least far has, on the line between the two losses measured around them."
    return [
        Table("By final loss", [*keys, "finished", field, "± of seeds", *titles[1:]], rows, note),
        Table("The best", ["", "values", field], [[title, name, loss] for title, (loss, name) in best.items()]),
    ]


def _mean_at(group: Sequence[Result], amount: str, value: float) -> float | None:
    """The mean loss of a group after so many steps, tokens or seconds; None if a run has not come that far."""
    own = counted(group)
    if any(getattr(result, amount) < value for result in own):
        return None
    return statistics.fmean(result.loss_at(amount, value) for result in own)


def write_csv(output: Path, runs: Sequence[Run], results: Sequence[Result]) -> None:
    """A row for each run: values, state, amounts of training and last losses."""
    by_name = {result.run.name: result for result in results}
    fields = sorted({field for result in results for field in result.charts if is_loss(field)})
    with file_errors(output), output.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["run", *runs[0].values, "state", *AMOUNTS, *fields])
        for run in runs:
            row = [run.name, *run.values.values(), run.state]
            if run.name in by_name:
                result = by_name[run.name]
                row += [result.steps, result.tokens, round(result.seconds, 3)]
                row += [result.charts[field][-1][-1] if field in result.charts else "" for field in fields]
            writer.writerow(row)


def write_results(folder: Path, runs: Sequence[Run]) -> list[Table]:
    """Write page and CSV of what is there. Returns the tables. Raises TitaniteError."""
    results = read_results(runs)
    tables = tabulate(results, runs)
    groups = [[result.run.folder for result in group] for group in group_seeds(results)]
    folders = [path for group in groups for path in group]
    folders += [run.folder for run in runs if run.state != "not begun"]
    write_page(folders, folder / "sweep.html", f"Sweep {folder.name}", groups, tables)
    write_csv(folder / "sweep.csv", runs, results)
    print(f"{folder / 'sweep.csv'}: a row for each run")
    return tables


def main(argv: Sequence[str]) -> int:
    """The command line. Returns the exit code. Raises TitaniteError."""
    arguments = build_parser("sweep", __doc__ or "").parse_args(argv)
    folder, runs = read_sweep(arguments.file)
    failed = conduct(arguments, folder, runs)
    if failed is None:
        return 0
    tables = write_results(folder, runs)
    for table in tables:
        print(f"\n{table.text()}")
    return report_failures(runs, failed)


if __name__ == "__main__":
    with command_line():
        sys.exit(main(sys.argv[1:]))
