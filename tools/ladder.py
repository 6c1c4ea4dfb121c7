"""Train a ladder: one model in several sizes, a fit of loss against FLOPs, and how well it predicts the largest size.

    python -m tools.ladder ladder.toml [--at-once N | --slurm] [--dry-run]

    base = "train_configs/default.toml"      # relative to this file
    folder = "outputs/ladder"                # default: outputs/ and this file's name
    multiples = [5, 10, 20]                  # tokens per parameter
    decay = 0.1                              # share of a run's steps over which the rate decays
    [set]                                    # for all runs
    validation.max_samples = 0
    [rule]                                   # N: the parameters without embeddings
    parameters = 108e6                       # the N at which batch and rate are:
    batch = 327_680                          # tokens of a step, which grow as N^batch_power (2/3)
    rate = 2.35e-3                           # which grows as N^rate_power (-1/3)
    warmup = 1                               # tokens of the warm-up per parameter
    [sizes.small]
    model.dim = 512
    [sizes.large]
    model.dim = 1024

Each size has one run at a constant rate after its warm-up, the trunk. A branch decays from it at each multiple. Started
again, the command trains what is not finished. At the end it writes ladder.html, ladder.csv and ladder.json.
"""

import csv
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from config import Config, ConfigError, TitaniteError, command_line, from_dict
from data.shards import open_dataset
from models import build_model, find_model
from tools.compare import Table, read_run, write_page
from tools.study import Run, build_config, build_parser, conduct, flatten, name_values, read_study, report_failures

KEYS = ("base", "folder", "multiples", "decay", "set", "rule", "sizes")
RULE = {"parameters": None, "batch": None, "rate": None, "warmup": None, "batch_power": 2 / 3, "rate_power": -1 / 3}
EXPONENTS = np.geomspace(0.005, 2.0, 2000)  # tried for the fit
FEWEST_SIZES = 4  # three for two unknowns that all share, and the one to predict


@dataclass(frozen=True)
class Rung:
    """A decayed run of a size: a point of the fit."""

    run: Run
    size: str
    parameters: int  # without embeddings
    multiple: float  # tokens per parameter asked for
    batch: int  # tokens of a step
    rate: float
    warmup_steps: int
    steps: int
    tokens: int
    flops: float


# -- which runs


def read_ladder(file: Path) -> tuple[Path, list[Run], list[Rung]]:
    """(folder, runs, rungs from the smallest size up) of a ladder's file. Raises ConfigError."""
    study = read_study(file, KEYS)
    rule = {**RULE, **study.get("rule", {})}
    for key, value in rule.items():
        if key not in RULE or type(value) not in (int, float):
            raise ConfigError(f"{file}: [rule]: {key} = {value}: must be numbers: {', '.join(RULE)}")
    multiples = sorted(set(study.get("multiples", [])))
    decay = study.get("decay", 0.2)
    if len(multiples) < 1 or multiples[0] <= 0 or not 0 < decay < 1:
        raise ConfigError(f"{file}: needs `multiples`, tokens per parameter, and a `decay` between 0 and 1")
    sizes = study.get("sizes", {})
    if len(sizes) < FEWEST_SIZES:
        raise ConfigError(f"{file}: [sizes]: {len(sizes)}: a fit and a size to predict need at least {FEWEST_SIZES}")
    folder = Path(study.get("folder", f"outputs/{file.stem}"))
    common = flatten(study.get("set", {}), f"{file}: [set]")
    base = file.parent / study["base"]
    rungs = []
    trunks = []
    for size, values in sizes.items():
        own = common | flatten(values, f"{file}: [sizes.{size}]")
        trunk, branches = _plan_size(size, base, folder, own, rule, multiples, decay)
        trunks.append(trunk)
        rungs += branches
    rungs.sort(key=lambda rung: (rung.parameters, rung.multiple))
    by_length = sorted(rungs, key=lambda rung: -rung.flops)  # the longest first: none is then waited for alone
    order = list(dict.fromkeys(rung.size for rung in by_length))
    trunks.sort(key=lambda run: order.index(run.values["size"]))
    return folder, trunks + [rung.run for rung in by_length], rungs


def _plan_size(
    size: str, base: Path, folder: Path, own: dict[str, Any], rule: dict[str, Any], multiples: list[float], decay: float
) -> tuple[Run, list[Rung]]:
    """The trunk of a size, and its branches."""
    config = build_config(base, folder / size, own)
    parameters, flops_per_token = measure(config)
    growth = parameters / rule["parameters"]
    seq_len = config.training.seq_len
    wanted = rule["batch"] * growth ** rule["batch_power"] / seq_len
    # The batch is whole microbatches, or one smaller microbatch.
    local = min(config.training.local_batch_size, max(1, round(wanted)))
    sequences = local * max(1, round(wanted / local))
    batch = sequences * seq_len
    rate = rule["rate"] * growth ** rule["rate_power"]
    warmup_steps = max(1, round(rule["warmup"] * parameters / batch))
    # Forks are multiples of one number of steps, after which checkpoints are kept.
    shares = [Fraction(str(multiple)) for multiple in multiples]
    unit = _greatest_common(shares)
    unit_steps = max(1, round((1 - decay) * float(unit) * parameters / batch))
    interval = max(n for n in range(1, config.checkpoint.interval + 1) if unit_steps % n == 0)
    settings = own | {
        "training.local_batch_size": local,
        "training.global_batch_size": sequences,
        "optimizer.lr": rate,
        "lr_scheduler.schedule": "wsd",
        "lr_scheduler.warmup_steps": warmup_steps,
        "checkpoint.interval": interval,
    }
    forks = [int(share / unit) * unit_steps for share in shares]
    if warmup_steps > forks[0]:
        raise ConfigError(f"sizes.{size}: {warmup_steps} steps of warm-up, but the first decay begins at {forks[0]}")
    trunk_settings = {
        "training.steps": forks[-1],
        "lr_scheduler.decay_fraction": 0.0,
        "checkpoint.keep_every": unit_steps,
    }
    values = {"size": size}
    name = name_values(values)
    trunk = Run(name, values, build_config(base, folder / name, settings | trunk_settings))
    rungs = []
    for multiple, fork in zip(multiples, forks, strict=True):
        steps = round(fork / (1 - decay))
        branch_settings = {
            "training.steps": steps,
            "lr_scheduler.decay_steps": steps - fork,
            "checkpoint.branch_from": f"{trunk.folder}@{fork}",
        }
        values = {"size": size, "multiple": multiple}
        name = name_values(values)
        run = Run(name, values, build_config(base, folder / name, settings | branch_settings), after=trunk.name)
        tokens = steps * batch
        rungs.append(
            Rung(run, size, parameters, multiple, batch, rate, warmup_steps, steps, tokens, tokens * flops_per_token)
        )
    return trunk, rungs


def _greatest_common(shares: Sequence[Fraction]) -> Fraction:
    """The largest number of which all are multiples."""
    common = shares[0]
    for share in shares:
        while share:
            common, share = share, common % share
    return common


def measure(config: Config) -> tuple[int, float]:
    """(parameters without those of a row per token, FLOPs per token) of a config's model. Raises TitaniteError."""
    vocab_size = open_dataset(config.data.datasets[0]).vocab_size
    spec, flavor = find_model(config.model, vocab_size)
    model: Any = build_model(spec, flavor)
    shapes = [parameter.shape for parameter in model.parameters()]
    counted = sum(shape.numel() for shape in shapes if shape[0] != flavor.vocab_size)
    return counted, model.flops_per_token(config.training.seq_len)


# -- the fit


@dataclass(frozen=True)
class Fit:
    """loss = limit + factors[multiple] x (FLOPs / unit)^-exponent."""

    limit: float
    factors: dict[float, float]
    exponent: float
    unit: float

    def loss(self, multiple: float, flops: float) -> float:
        """The loss that it says."""
        return self.limit + self.factors[multiple] * (flops / self.unit) ** -self.exponent


def fit_losses(multiples: Sequence[float], flops: Sequence[float], losses: Sequence[float]) -> Fit:
    """Fit by least squares of the relative error.

    All multiples share limit and exponent, and each has a factor: so it is if loss is a sum of powers of parameters and
    of tokens with one exponent (Hoffmann et al. 2022, whose two exponents differ by little). For each exponent the rest
    is linear. The limit is at least 0.
    """
    kinds = sorted(set(multiples))
    unit = float(np.exp(np.mean(np.log(flops))))
    target = np.array(losses)
    scaled = np.array(flops) / unit
    member = np.array([[multiple == kind for kind in kinds] for multiple in multiples], dtype=float)
    found = []
    for exponent in EXPONENTS:
        powers = member * (scaled**-exponent)[:, None]
        for columns in (np.column_stack([np.ones(len(target)), powers]), powers):
            weighted = columns / target[:, None]
            solution = np.linalg.lstsq(weighted, np.ones(len(target)), rcond=None)[0]
            error = float(np.sum((weighted @ solution - 1) ** 2))
            limit, *factors = [0.0, *solution][-len(kinds) - 1 :]
            if limit >= 0:
                found.append((error, float(exponent), float(limit), tuple(map(float, factors))))
    _, exponent, limit, factors = min(found)
    return Fit(limit, dict(zip(kinds, factors, strict=True)), exponent, unit)


# -- what came of it


def evaluate(rungs: Sequence[Rung]) -> dict[str, Any]:
    """The fits of all sizes and of all but the largest, as plain values. Raises TitaniteError if a loss is missing."""
    losses = [read_run(rung.run.folder)[0].get("validation_loss") for rung in rungs]
    missing = [rung.run.name for rung, points in zip(rungs, losses, strict=True) if not points or not rung.run.finished]
    if missing:
        raise TitaniteError(f"the fit needs all decayed runs; not finished: {', '.join(missing)}")
    rows = [(rung, points[-1][-1]) for rung, points in zip(rungs, losses, strict=True) if points]
    largest = rungs[-1].size

    def fit(some: Sequence[tuple[Rung, float]]) -> Fit:
        return fit_losses([r.multiple for r, _ in some], [r.flops for r, _ in some], [loss for _, loss in some])

    overall = fit(rows)
    smaller = fit([row for row in rows if row[0].size != largest])
    points = []
    for rung, loss in rows:
        point = {name: value for name, value in vars(rung).items() if name != "run"}
        fitted = overall.loss(rung.multiple, rung.flops)
        point |= {"loss": loss, "fitted": fitted, "residual_percent": 100 * (loss / fitted - 1)}
        if rung.size == largest:
            predicted = smaller.loss(rung.multiple, rung.flops)
            point |= {"predicted": predicted, "off_percent": 100 * (predicted / loss - 1)}
        points.append(point)
    return {"fit": asdict(overall), "fit_without_largest": asdict(smaller), "points": points}


def describe(fit: dict[str, Any]) -> str:
    """A fit in words."""
    factors = ", ".join(f"{factor:.4g} at {multiple:g}" for multiple, factor in fit["factors"].items())
    formula = "loss = E + A·(C / C0)^-α"
    return f"{formula}: E {fit['limit']:.4g}, α {fit['exponent']:.3g}, C0 {fit['unit']:.3g} FLOPs, A {factors} tokens per parameter"


def write_results(folder: Path, runs: Sequence[Run], rungs: Sequence[Rung]) -> list[Table]:
    """Write page, CSV and JSON. Returns the tables. Raises TitaniteError."""
    found = evaluate(rungs)
    points = found["points"]
    shown = ["size", "parameters", "multiple", "tokens", "flops", "loss"]
    predicted = [point for point in points if "predicted" in point]
    own = ["size", "parameters", "batch", "rate", "warmup_steps"]
    sizes = {point["size"]: [point[key] for key in own] for point in points}
    tables = [
        _table("The largest size, predicted from the others", [*shown, "predicted", "off_percent"], predicted,
               "off_percent: predicted / loss - 1. " + describe(found["fit_without_largest"])),
        _table("The fit of all sizes", [*shown, "fitted", "residual_percent"], points, describe(found["fit"])),
        Table("What the rule gave", own, list(sizes.values()), "parameters: without embeddings; batch: tokens of a step"),
    ]  # fmt: skip
    names = list(sizes)
    groups = [[run.folder for run in runs if run.values["size"] == name] for name in names]
    page = folder / "ladder.html"
    write_page([run.folder for run in runs], page, f"Ladder {folder.name}", groups, tables, [_figure(found, names)])
    (folder / "ladder.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    with (folder / "ladder.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(predicted[0]))
        writer.writeheader()
        writer.writerows(points)
    print(f"{folder / 'ladder.csv'}, {folder / 'ladder.json'}: every point, and the fits")
    return tables


def _table(title: str, head: Sequence[str], points: Sequence[dict[str, Any]], note: str) -> Table:
    return Table(title, head, [[point[key] for key in head] for point in points], note)


def _figure(found: dict[str, Any], names: list[str]) -> dict[str, Any]:
    """Loss against FLOPs: a dot for each run, a circle for a predicted one, a line for each multiple."""
    smaller = Fit(**found["fit_without_largest"])
    points = found["points"]
    dots = []
    for number, name in enumerate(names):
        own = [point for point in points if point["size"] == name]
        dots.append({"name": name, "group": number, "at": [[point["flops"], point["loss"]] for point in own]})
    own = [point for point in points if "predicted" in point]
    at = [[point["flops"], point["predicted"]] for point in own]
    dots.append({"name": "predicted", "group": len(names) - 1, "hollow": True, "at": at})
    lines = []
    for multiple in smaller.factors:
        ends = [point["flops"] for point in points if point["multiple"] == multiple]
        steps = np.geomspace(ends[0], ends[-1], 60).tolist()
        name = f"{multiple:g} tokens per parameter"
        lines.append({"name": name, "group": 8, "at": [[flops, smaller.loss(multiple, flops)] for flops in steps]})
    note = "Dashed: the fit without the largest size, one line for each multiple of tokens per parameter."
    return {"title": "loss against FLOPs", "points": dots, "lines": lines, "note": note}


def main(argv: Sequence[str]) -> int:
    """The command line. Returns the exit code. Raises TitaniteError."""
    arguments = build_parser("ladder", __doc__ or "").parse_args(argv)
    folder, runs, rungs = read_ladder(arguments.file)
    failed = conduct(arguments, folder, runs)
    if failed is None:
        return 0
    if all(rung.run.finished for rung in rungs):
        for table in write_results(folder, runs, rungs):
            print(f"\n{table.text()}\n{table.note}")
    return report_failures(runs, failed)


if __name__ == "__main__":
    with command_line():
        sys.exit(main(sys.argv[1:]))
