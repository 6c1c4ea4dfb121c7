"""Float8 together with tensor, context and pipeline parallelism."""

from typing import Any

import pytest
import torch

from config import Config, Float8
from tests.distributed.test_float8_fsdp import Traffic
from tests.harness import run_ranks
from tests.parity import CPU, config_for, losses_of, opened, trace_of
from tools.same import Trace, train_plainly

LAYERS = 2
RECIPES = ["tensorwise", "rowwise", "rowwise_with_gw_hp", "own tensorwise", "own rowwise"]  # own: kernels
LAYOUTS: dict[str, dict[str, Any]] = {
    "TP 2": {"tp": 2},
    "TP 2, compiled": {"tp": 2, "compile": "aot_eager"},
    "FSDP 2 x TP 2, full": {"dp_shard": 2, "tp": 2, "mode": "full"},
    "CP 2": {"cp": 2},
    "PP 2": {"pp": 2, "pp_microbatch_size": 2},
}


def float8_config(recipe: str, tp_all_gather: str = "auto", dp_shard: int = 1, **options: Any) -> Config:
    kernels: Any = "own" if recipe.startswith("own ") else "compiler"
    name: Any = recipe.removeprefix("own ")
    float8 = Float8(enable=True, filter="all", recipe=name, kernels=kernels, tp_all_gather=tp_all_gather)
    return config_for(1, dp_shard, float8=float8, **options)


def float8_run(config: Config) -> Trace:
    return trace_of(config, 2, hidden_dim=128, n_layers=LAYERS)


def error(results: list[Trace], exact: Trace) -> float:
    """Relative error of the whole gradient, against float32."""
    grads: dict[str, torch.Tensor] = {}
    for result in results:
        grads |= result.gradients[0]
    assert grads.keys() == exact.gradients[0].keys()
    found = torch.cat([grads[name].flatten() for name in grads])
    whole = torch.cat([exact.gradients[0][name].flatten() for name in grads])
    return ((found - whole).norm() / whole.norm()).item()


@pytest.fixture(scope="module")
def exact() -> Trace:
    return run_ranks(1, plain_run)[0]  # type: ignore[no-any-return]


def plain_run() -> Trace:
    return train_plainly(opened(config_for(1, 1), 2, 1, hidden_dim=128, n_layers=LAYERS), CPU)


@pytest.fixture(scope="module")
def alone(exact: Trace) -> dict[str, float]:
    """The error of float8 itself, in one process."""
    return {recipe: error(run_ranks(1, float8_run, float8_config(recipe)), exact) for recipe in RECIPES}


# The third recipe is rowwise's forward with bfloat16's gradients of weights.
CASES = [("TP 2", recipe) for recipe in RECIPES]
CASES += [("TP 2, compiled", "tensorwise"), ("TP 2, compiled", "own tensorwise")]
CASES += [("FSDP 2 x TP 2, full", "tensorwise"), ("CP 2", "rowwise"), ("PP 2", "tensorwise")]


@pytest.mark.parametrize(("layout", "recipe"), CASES)
def test_sharing_the_work_adds_no_error(layout: str, recipe: str, exact: Trace, alone: dict[str, float]) -> None:
    config = float8_config(recipe, **LAYOUTS[layout])
    settings = config.parallelism
    world_size = settings.dp_shard * settings.cp * settings.tp * settings.pp
    results = run_ranks(world_size, float8_run, config)
    assert 0.9 * alone[recipe] < error(results, exact) < 1.1 * alone[recipe]
    tolerance = 5e-4 if recipe.startswith("own") else 2e-4  # own kernels: each rank has scales of its own
    for (loss,), (expected,) in zip(results[-1].losses, exact.losses, strict=True):
        assert loss == pytest.approx(expected, rel=tolerance)


def test_gathering_activations_in_float8_changes_no_bit() -> None:
    """The cast comes before the gather, with the scale of the whole tensor, so it is the same cast."""
    gathered, whole = (run_ranks(2, float8_run, float8_config("tensorwise", how, tp=2))[0] for how in ("auto", "off"))
    assert gathered.losses == whole.losses
    for name, grad in gathered.gradients[0].items():
        assert torch.equal(grad, whole.gradients[0][name]), name


def gathered_bytes(config: Config) -> list[int]:
    with Traffic() as counted:
        losses_of(config, 1, hidden_dim=128, n_layers=LAYERS)
    return counted.gathered_activations


def test_half_the_bytes_of_every_gather_in_a_block() -> None:
    configs = (float8_config("tensorwise", how, tp=2, param_dtype="bfloat16") for how in ("off", "auto"))
    before, after = (run_ranks(2, gathered_bytes, config)[0] for config in configs)
    assert len(before) == len(after)
    halved = [i for i in range(len(before)) if after[i] <= 0.505 * before[i]]
    # Per block: the inputs of attention and feed-forward, and in backward the gradients of their outputs.
    assert len(halved) == 4 * LAYERS
    assert all(after[i] == before[i] for i in range(len(before)) if i not in halved)
