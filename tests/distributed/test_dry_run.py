"""Every config in train_configs/ takes one real step of train.py, on as many fake ranks as it is meant for.

All layers of a model being alike, two of them stand for more, but for 8B, whose step is whole.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import models
import train
from config import load_config
from models import find_model
from tests.harness import run_ranks
from tools.dry_run import DryRun, dry_run

ROOT = Path(__file__).parents[2]
WHOLE = ("debug", "tutorial", "llama3_8b")
WORLD_SIZES = {"debug": 2, "tutorial": 2, "llama3_8b": 64, "llama3_70b": 256, "llama3_405b": 128}
ELSE = 32
PARAMETERS = 8_030_261_248  # of 8B, as published


def keep_layers(monkeypatch: pytest.MonkeyPatch, n_layers: int, **other: int) -> None:
    """Cut all flavors down, for this test and the ranks it forks."""
    spec = models.MODELS["llama"]
    flavors = {
        name: replace(flavor, n_layers=min(n_layers, flavor.n_layers), **other) for name, flavor in spec.flavors.items()
    }
    monkeypatch.setattr(models, "MODELS", {"llama": replace(spec, flavors=flavors)})


def step(arguments: list[str], world_size: int, rank: int = 0) -> DryRun:
    """A dry run in a process of its own."""
    torch._logging.set_logs(dynamo=50)
    return dry_run(load_config(arguments), world_size, rank)


def run(world_size: int, *arguments: str, rank: int = 0) -> DryRun:
    return run_ranks(1, step, list(arguments), world_size, rank, start_group=False)[0]


@pytest.mark.parametrize("name", sorted(path.stem for path in (ROOT / "train_configs").glob("*.toml")))
def test_every_config_takes_a_step(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name not in WHOLE:
        keep_layers(monkeypatch, 2)
    file, world_size = f"--config={ROOT}/train_configs/{name}.toml", WORLD_SIZES.get(name, ELSE)
    counted = run(world_size, file)
    config = load_config([file])
    _, flavor = find_model(config.model, 4096)
    if name == "llama3_8b":
        share = 4 * PARAMETERS / world_size
        assert share <= counted.weights < 1.01 * share, "rows are filled up to a multiple of the ranks, not more"
    kinds = {item.kind for item in counted.traffic}
    assert kinds == {"all_gather", "reduce_scatter", "all_reduce"}
    assert counted.optimizer == pytest.approx(2 * counted.weights, rel=1e-3, abs=2**20)
    assert counted.peak > counted.weights + counted.optimizer
    blocks = flavor.n_layers
    assert sum(item.calls for item in counted.traffic if item.kind == "reduce_scatter") in (blocks + 1, blocks + 2)


LAYOUTS = {
    "1.8B, HSDP, float8": ("llama_1.8b", 64, ["--parallelism.dp_replicate=8", "--float8.enable=true"]),
    "1B, TP x CP": ("llama3_1b", 64, ["--parallelism.tp=4", "--parallelism.cp=2"]),
    "1B, ring": ("llama3_1b", 64, ["--parallelism.cp=4", "--parallelism.cp_method=ring"]),
    "70B, PP x TP, interleaved": (
        "llama3_70b",
        256,
        [
            "--parallelism.pp=8",
            "--parallelism.tp=4",
            "--parallelism.pp_schedule=Interleaved1F1B",
            "--training.local_batch_size=8",
            "--activation_checkpoint.mode=selective",
        ],
    ),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_for_a_large_world(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config, world_size, settings = LAYOUTS[name]
    keep_layers(monkeypatch, 16 if "PP" in name else 2)  # as many as there are stages
    counted = run(world_size, f"--config={ROOT}/train_configs/{config}.toml", *settings, rank=world_size - 1)
    assert counted.peak > counted.weights > 0


def broken_step(arguments: list[str]) -> Any:
    with mock.patch.object(train, "clip_grad_norm_", side_effect=RuntimeError("a broken step")):
        return step(arguments, 2)


@pytest.mark.parametrize(
    ("function", "settings", "message"),
    [
        (broken_step, [], "a broken step"),
        (step, ["--parallelism.tp=3"], "must multiply to the world size"),
        (step, ["--parallelism.dp_replicate=5"], "must multiply to the world size"),
    ],
)
def test_what_a_run_would_fail_on_fails_here(function: Any, settings: list[str], message: str) -> None:
    arguments = [f"--config={ROOT}/train_configs/debug.toml", *settings]
    with pytest.raises(AssertionError, match=message):
        run_ranks(1, function, arguments, *([2] if function is step else []), start_group=False)
