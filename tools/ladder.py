"""Train a ladder: one model in several sizes, a fit of loss against FLOPs, and how well it predicts the largest size.

    python -m tools.ladder ladder.toml [--at-once N | --slurm=OPTIONS] [--dry-run]

    base = "train_configs/default.toml"      # relative to this file
    folder = "outputs/ladder"                # default: outputs/ and this file's name
    multiples = [5, 10, 20]                  # tokens per parameter
    decay = 0.1                              # share of a run's steps over which its rate decays
    [set]                                    # for all runs
    validation.max_samples = 0
    [rule]
    parameters = 108e6                       # N0. A model of N parameters, without the embedding, has
    batch = 327_680                          # tokens a step: these times (N / N0)^batch_power
    rate = 2.35e-3                           # peak rate: this times (N / N0)^rate_power
    warmup = 1                               # tokens of the warm-up: this times N
    batch_power = 0.667                      # 2 / 3 if left out
    rate_power = -0.333                      # -1 / 3 if left out
    sequences = 8                            # by which the batch must divide; if left out: training.local_batch_size
    [sizes.small]
    model.dim = 512
    [sizes.large]
    model.dim = 1024

Each size has one run at a constant rate after its warm-up, the trunk, and a branch from it that decays at each
multiple. Started again, it trains what is not finished. At the end it writes ladder.html, ladder.csv and ladder.json.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from config import Config, ConfigError, command_line
from data.shards import open_dataset
from models import build_model, find_model
from storage.records import write_atomically
from tools.compare import Table, read_run, write_page
from tools.study import Run, Study, build_parser, conduct, report, write_csv

NEEDED = ("parameters", "batch", "rate", "warmup")  # of the rule
DEFAULTS = {"batch_power": 2 / 3, "rate_power": -1 / 3, "sequences": 0}  # powers of OLMo-core, by Porian et al. 2024
RULED = ("training.steps", "training.epochs", "training.global_batch_size", "optimizer.lr", "lr_scheduler.warmup_steps")
FEWEST_SIZES = 4  # one to predict, and three for the two unknowns that all multiples share
EXPONENTS = np.geomspace(0.005, 2.0, 2000)  # tried for the fit
Point = dict[str, Any]  # a decayed run: what the rule gave, then its loss and the fits'


# -- which runs


def read_ladder(file: Path) -> tuple[Study, list[Run], list[Point]]:
    """A ladder's file, its runs, the longest first, and the points of the decayed ones, the largest last.

    Raises ConfigError.
    """
    study = Study(file, ("multiples", "decay", "rule", "sizes"))
    rule = DEFAULTS | study.values.get("rule", {})
    multiples = study.values.get("multiples") or [0]
    decay = study.values.get("decay", 0.2)
    sizes = study.values.get("sizes", {})
    wrong = set(rule) != {*NEEDED, *DEFAULTS}
    if wrong or min(rule[key] for key in NEEDED) <= 0 or rule["sequences"] < 0:
        raise ConfigError(f"{file}: [rule]: must have {', '.join(NEEDED)}, above 0, and may have {', '.join(DEFAULTS)}")
    if multiples[0] <= 0 or any(multiple % multiples[0] for multiple in multiples) or not 0 < decay < 1:
        raise ConfigError(f"{file}: needs a decay between 0 and 1, and multiples, each one of the first")
    if len(sizes) < FEWEST_SIZES:
        raise ConfigError(f"{file}: [sizes]: has {len(sizes)}; to fit some and predict one takes {FEWEST_SIZES}")
    trunks = []
    rungs = []
    for size, values in sizes.items():
        trunk, branches = plan_size(study, size, study.settings("sizes", values), rule, multiples, decay)
        trunks.append(trunk)
        rungs += branches
    trunks.sort(key=lambda run: run.config.optimizer.lr)  # the largest first, so that none is waited for in the end
    rungs.sort(key=lambda rung: (rung[1]["parameters"], rung[1]["multiple"]))
    return study, [*trunks, *(run for run, _ in reversed(rungs))], [point for _, point in rungs]


def plan_size(
    study: Study, size: str, own: Mapping[str, Any], rule: Mapping[str, float], multiples: Sequence[float], decay: float
) -> tuple[Run, list[tuple[Run, Point]]]:
    """The trunk of a size, and its branches with their points. Raises ConfigError."""
    for key in RULED:
        if key in own or key in study.common:
            raise ConfigError(f"{study.file}: sizes.{size}: {key}: follows from [rule], multiples and decay")
    config = study.run({}, own).config
    point = {"size": size, **apply_rule(config, rule)}
    sequences = point["batch"] // config.training.max_seq_len
    local = max(part for part in range(1, config.training.local_batch_size + 1) if sequences % part == 0)
    # The trunk keeps a checkpoint at the first fork and at each of its multiples.
    first = (1 - decay) * multiples[0] * point["parameters"] / point["batch"]
    saves = max(1, round(first / config.checkpoint.interval))
    interval = max(1, round(first / saves))
    first = saves * interval
    end = round(first / (1 - decay))
    if not point["warmup_steps"] <= first < end:
        raise ConfigError(
            f"sizes.{size}: too short: warms up to step {point['warmup_steps']}, decays from {first} to {end}"
        )
    settings = {
        **own,
        "training.epochs": 0,
        "training.local_batch_size": local,
        "training.global_batch_size": sequences,
        "optimizer.lr": point["rate"],
        "lr_scheduler.schedule": "wsd",
        "lr_scheduler.warmup_steps": point["warmup_steps"],
        "checkpoint.interval": interval,
        "checkpoint.keep_every": first,
    }
    last = round(first * multiples[-1] / multiples[0])
    trunk = study.run({"size": size}, settings | {"training.steps": last, "lr_scheduler.decay_fraction": 0.0})
    branches = []
    for multiple in multiples:
        fork = round(first * multiple / multiples[0])
        steps = round(fork / (1 - decay))
        settings["training.steps"] = steps
        settings["lr_scheduler.decay_steps"] = steps - fork
        settings["checkpoint.branch_from"] = f"{trunk.folder}@{fork}"
        run = study.run({"size": size, "multiple": multiple}, settings, trunk.name)
        tokens = steps * point["batch"]
        amounts = {"multiple": multiple, "tokens": tokens, "flops": tokens * point["flops_per_token"]}
        branches.append((run, point | amounts))
    return trunk, branches


def apply_rule(config: Config, rule: Mapping[str, float]) -> Point:
    """What the rule gives a config's model, which is counted. Raises TitaniteError."""
    spec, flavor = find_model(config.model, open_dataset(config.data.datasets[0]).vocab_size)
    model: Any = build_model(spec, flavor)
    parameters = 0
    for module in model.modules():
        if not isinstance(module, nn.Embedding):
            parameters += sum(parameter.numel() for parameter in module.parameters(recurse=False))
    growth = parameters / rule["parameters"]
    training = config.training
    wanted = rule["batch"] * growth ** rule["batch_power"] / training.max_seq_len
    # Whole microbatches, or a smaller one.
    unit = int(rule["sequences"]) or min(training.local_batch_size, max(1, round(wanted)))
    batch = unit * max(1, round(wanted / unit)) * training.max_seq_len
    return {
        "parameters": parameters,
        "batch": batch,
        "rate": rule["rate"] * growth ** rule["rate_power"],
        "warmup_steps": max(1, round(rule["warmup"] * parameters / batch)),
        "flops_per_token": model.flops_per_token(training.max_seq_len),
    }


# -- the fit


def fit_losses(points: Sequence[Point]) -> dict[str, Any]:
    """Fit loss = limit + factor[multiple] x FLOPs^-exponent by least squares of the relative error.

    Multiples share limit and exponent. So it is if loss is the sum of a limit, a power of parameters and one of tokens
    (Hoffmann et al. 2022) with nearly the same exponent. For each exponent the rest is linear; the limit is at least 0.
    """
    multiples = sorted({point["multiple"] for point in points})
    losses = np.array([point["loss"] for point in points])
    flops = np.array([point["flops"] for point in points])
    belongs = np.array([[point["multiple"] == multiple for multiple in multiples] for point in points])
    found = []
    for exponent in EXPONENTS:
        powers = belongs * (flops[:, None] / flops.max()) ** -exponent
        for limits in (np.ones((len(points), 1)), np.zeros((len(points), 1))):
            columns = np.hstack([limits, powers]) / losses[:, None]
            solution = np.linalg.lstsq(columns, np.ones(len(points)), rcond=None)[0]
            if solution[0] >= 0:
                found.append((np.sum((columns @ solution - 1) ** 2), exponent, *solution))
    _, exponent, limit, *factors = map(float, min(found))
    factors = [factor * float(flops.max()) ** exponent for factor in factors]
    return {"limit": limit, "exponent": exponent, "factors": dict(zip(multiples, factors, strict=True))}


def fitted_loss(fit: Mapping[str, Any], point: Point) -> float:
    """The loss that a fit says."""
    return fit["limit"] + fit["factors"][point["multiple"]] * point["flops"] ** -fit["exponent"]


# -- what came of it


def write_results(study: Study, runs: Sequence[Run], points: list[Point]) -> None:
    """Write page, CSV and JSON, and print the table, once all runs are finished. Raises TitaniteError."""
    folders = {(run.values["size"], run.values.get("multiple")): run.folder for run in runs}
    for point in points:
        charts, _ = read_run(folders[point["size"], point["multiple"]])
        point["loss"] = charts["validation_loss"][-1][-1]
    largest = points[-1]["size"]
    fits = {"all": fit_losses(points), "others": fit_losses([point for point in points if point["size"] != largest])}
    for point in points:
        point["residual_percent"] = 100 * (point["loss"] / fitted_loss(fits["all"], point) - 1)
        if point["size"] == largest:
            point["predicted"] = fitted_loss(fits["others"], point)
            point["off_percent"] = 100 * (point["predicted"] / point["loss"] - 1)
    write_csv(study.folder / "ladder.csv", points)
    write_atomically(study.folder / "ladder.json", json.dumps({"fits": fits, "points": points}, indent=1).encode())
    constants = {name: f"{fit['limit']:.4g} + A x FLOPs^-{fit['exponent']:.4g}" for name, fit in fits.items()}
    note = f"Loss by the fit: {constants['all']}, by that without the largest size, which predicts it: "
    note += f"{constants['others']}; A by multiple, the tokens per parameter. parameters: without the embedding."
    head = [key for key in points[-1] if key != "flops_per_token"]
    table = Table("Ladder", head, [[point.get(key, "–") for key in head] for point in points], note)
    groups = {run.folder: run.values["size"] for run in runs}
    figure = {"points": points, "fit": fits["others"]}
    write_page(list(groups), study.folder / "ladder.html", f"Ladder {study.folder.name}", groups, [table], figure)
    print(f"\n{table.text()}\n{note}")


def main(argv: Sequence[str]) -> int:
    """The command line. Returns the exit code. Raises TitaniteError."""
    options = build_parser("ladder", __doc__ or "").parse_args(argv)
    study, runs, points = read_ladder(options.file)
    failed = conduct(options, study.folder, runs)
    if failed is None:
        return 0
    if all(run.finished for run in runs):
        write_results(study, runs, points)
    return report(runs, failed)


if __name__ == "__main__":
    with command_line():
        sys.exit(main(sys.argv[1:]))
