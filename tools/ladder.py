"""Train a ladder: one model in several sizes, a fit of loss against FLOPs, and how well it predicts the largest size.

    python -m tools.ladder ladder.toml [--at-once N | --slurm=OPTIONS] [--dry-run]

    base = "train_configs/default.toml"      # relative to this file
    folder = "outputs/ladder"                # default: outputs/ and this file's name
    multiples = [5, 10, 20]                  # tokens per parameter
    decay = 0.1                              # share of a run's steps over which its rate decays
    validation.max_samples = 0               # any setting, for all runs
    [rule]
    parameters = 108e6                       # N0. A model of N parameters, without the embedding, has
    batch = 327_680                          # tokens a step: these times (N / N0)^(2/3)
    rate = 2.35e-3                           # peak rate: this times (N / N0)^(-1/3)
    warmup = 1                               # tokens of the warm-up: this times N
    sequences = 8                            # the batch is a multiple of these: local_batch_size x data-parallel ranks
    [sizes.small]
    model.dim = 512
    [sizes.large]
    model.dim = 1024

Each size has one run at a constant rate after its warm-up, the trunk, and a branch from it that decays at each
multiple. Started again, it trains what is not finished. At the end it writes ladder.html and ladder.json.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta
from torch import nn

from config import AboveZero, Config, ConfigError, NonNegative, Positive, command_line
from data.shards import open_dataset
from models import build_model, find_model
from storage.records import write_atomically
from tools.compare import Shown, Table, read_run, write_page
from tools.study import Chain, Run, Study, conduct, dotted

BATCH_POWER = 2 / 3  # of OLMo-core, by Porian et al. 2024
RATE_POWER = -1 / 3
LIMITS = 1000  # tried for the fit
Point = dict[str, Any]  # a decayed run: its tokens and FLOPs, its loss, the fit's


# -- which runs


class Rule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a size has, from its parameters."""

    parameters: AboveZero
    batch: AboveZero
    rate: AboveZero
    warmup: NonNegative
    sequences: Positive


class Ladder(msgspec.Struct, frozen=True):
    """What the file of a ladder has beside settings."""

    rule: Rule
    multiples: Annotated[list[Positive | AboveZero], Meta(min_length=1)]
    sizes: Annotated[dict[str, Any], Meta(min_length=4)]  # one to predict; three for the two unknowns that all share
    decay: Annotated[float, Meta(gt=0, lt=1)] = 0.2


def read_ladder(file: Path) -> tuple[Path, list[Chain]]:
    """A ladder's folder and, for each size, its trunk and branches. Raises ConfigError."""
    study = Study(file, Ladder.__struct_fields__)
    try:
        ladder = msgspec.convert(study.values, Ladder)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{file}: {error}") from None
    multiples = ladder.multiples
    ratios = [multiple / multiples[0] for multiple in multiples]
    if ratios != sorted(set(ratios)) or any(abs(ratio - round(ratio)) > 1e-6 for ratio in ratios):
        raise ConfigError(f"{file}: multiples = {multiples}: must rise, and be multiples of the first")
    chains = [plan_size(study, size, dotted(values), ladder) for size, values in ladder.sizes.items()]
    chains.sort(key=lambda runs: runs[0].config.optimizer.lr)  # the largest first
    return study.folder, chains


def plan_size(study: Study, size: str, own: Mapping[str, Any], ladder: Ladder) -> Chain:
    """The trunk of a size, and its branches. Raises ConfigError."""
    if "training.steps" in own:
        raise ConfigError(f"[sizes.{size}] training.steps: the multiples give the steps")
    config = study.run({}, own).config
    rule = ladder.rule
    multiples = ladder.multiples
    parameters, _ = measure_model(config)
    growth = parameters / rule.parameters
    seq_len = config.training.max_seq_len
    units = rule.batch * growth**BATCH_POWER / seq_len / rule.sequences
    sequences = rule.sequences * max(1, round(units))
    sequences = own.get("training.global_batch_size", sequences)
    batch = sequences * seq_len
    # The trunk keeps a checkpoint at the first fork and at each of its multiples.
    first = (1 - ladder.decay) * multiples[0] * parameters / batch
    saves = max(1, round(first / config.checkpoint.interval))
    interval = max(1, round(first / saves))
    first = saves * interval
    settings = {
        "training.global_batch_size": sequences,
        "optimizer.lr": rule.rate * growth**RATE_POWER,
        "lr_scheduler.warmup_steps": max(1, round(rule.warmup * parameters / batch)),
        **own,
        "training.epochs": 0,
        "lr_scheduler.schedule": "wsd",
        "lr_scheduler.decay_fraction": 0.0,
        "checkpoint.interval": interval,
        "checkpoint.keep_every": first,
        "training.steps": round(first * multiples[-1] / multiples[0]),
    }
    trunk = study.run({"size": size}, settings)
    runs = [trunk]
    for multiple in multiples:
        fork = round(first * multiple / multiples[0])
        steps = max(fork + 1, round(fork / (1 - ladder.decay)))
        settings["training.steps"] = steps
        settings["lr_scheduler.decay_steps"] = steps - fork
        settings["checkpoint.branch_from"] = f"{trunk.folder}@{fork}"
        runs.append(study.run({"size": size, "multiple": multiple}, settings))
    return runs


def measure_model(config: Config) -> tuple[int, int]:
    """The parameters of a config's model without the embedding, and its FLOPs per token. Raises TitaniteError."""
    spec, flavor = find_model(config.model, open_dataset(config.data.datasets[0]).vocab_size)
    model: Any = build_model(spec, flavor)
    parameters = 0
    for module in model.modules():
        if not isinstance(module, nn.Embedding):
            parameters += sum(parameter.numel() for parameter in module.parameters(recurse=False))
    return parameters, model.flops_per_token(config.training.max_seq_len)


# -- the fit


def fit_losses(points: Sequence[Point]) -> dict[str, Any]:
    """Fit loss = limit + factor[multiple] x FLOPs^-exponent by least squares.

    Multiples share limit and exponent. So it is if loss is the sum of a limit, a power of parameters and one of tokens
    (Hoffmann et al. 2022) with nearly the same exponent. For each limit, from 0 on, logarithms make the rest linear.
    """
    multiples = sorted({point["multiple"] for point in points})
    losses = np.array([point["loss"] for point in points])
    flops = np.array([point["flops"] for point in points])
    belongs = np.equal.outer([point["multiple"] for point in points], multiples)
    columns = np.column_stack([-np.log(flops), belongs])
    found = []
    for limit in np.linspace(0, losses.min(), LIMITS, endpoint=False):
        solution = np.linalg.lstsq(columns, np.log(losses - limit), rcond=None)[0]
        fitted = limit + np.exp(columns @ solution)
        found.append((np.sum((fitted / losses - 1) ** 2), limit, *solution))
    _, limit, exponent, *logarithms = min(found)
    factors = np.exp(logarithms).tolist()
    return {"limit": limit, "exponent": exponent, "factors": dict(zip(multiples, factors, strict=True))}


def fitted_loss(fit: Mapping[str, Any], point: Point) -> float:
    """The loss that a fit says."""
    return fit["limit"] + fit["factors"][point["multiple"]] * point["flops"] ** -fit["exponent"]


# -- what came of it


def read_point(run: Run, shown: Shown) -> Point:
    """What a decayed run has come to."""
    parameters, flops_per_token = measure_model(run.config)
    _, tokens, _, loss = shown.charts["validation_loss"][-1]
    flops = tokens * flops_per_token
    return {**run.values, "parameters": parameters, "tokens": tokens, "flops": flops, "loss": loss}


def write_results(folder: Path, runs: Sequence[Run]) -> None:
    """Write page and JSON, and print the table, once all runs are finished. Raises TitaniteError.

    The largest size is predicted by the fit of all others.
    """
    if not all(run.finished for run in runs):
        return
    shown = [read_run(run.folder, run.name, run.values["size"]) for run in runs]
    points = [read_point(run, own) for run, own in zip(runs, shown, strict=True) if "multiple" in run.values]
    points.sort(key=lambda point: (point["parameters"], point["multiple"]))
    largest = points[-1]["size"]
    fit = fit_losses([point for point in points if point["size"] != largest])
    for point in points:
        point["fitted"] = fitted_loss(fit, point)
        point["off_percent"] = 100 * (point["fitted"] / point["loss"] - 1)
    figure = {"fit": fit, "points": points}
    write_atomically(folder / "ladder.json", json.dumps(figure, indent=1).encode())
    note = f"By the fit of all sizes but {largest}, which it predicts: {fit['limit']:.4g} + A x FLOPs^-"
    note += f"{fit['exponent']:.4g}, A by multiple, the tokens per parameter. parameters: without the embedding."
    table = Table("Ladder", list(points[-1]), [list(point.values()) for point in points], note)
    write_page(shown, folder / "ladder.html", f"Ladder {folder.name}", [table], figure)
    print(f"\n{table.text()}")


def main(argv: Sequence[str]) -> int:
    """The command line. Returns the exit code. Raises TitaniteError."""
    return conduct("ladder", __doc__ or "", argv, read_ladder, write_results)


if __name__ == "__main__":
    with command_line():
        sys.exit(main(sys.argv[1:]))
