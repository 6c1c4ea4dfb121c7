"""TP, CP and PP, alone and together with data parallelism, against a plain loop in one process."""

from functools import partial
from math import prod
from typing import Any

import pytest
import torch

from config import Config
from tests.harness import run_ranks
from tests.parity import GLOBAL_BATCH, close, config_for, our_run, plain_run

STEPS = 4
PP = {"local_batch_size": GLOBAL_BATCH, "pp_microbatch_size": 2}
DEEP = 6  # layers where stages are many
NAMED: dict[str, dict[str, Any]] = {
    "TP 2": {"tp": 2},
    "CP 2": {"cp": 2},
    "CP 2, ring": {"cp": 2, "cp_method": "ring"},
    "PP 2": {"pp": 2, **PP},
    "FSDP 2": {"dp_shard": 2},
    "FSDP 2 x TP 2": {"dp_shard": 2, "tp": 2},
    "FSDP 2 x CP 2": {"dp_shard": 2, "cp": 2},
    "FSDP 2 x PP 2": {"dp_shard": 2, "pp": 2, "pp_microbatch_size": 2},
    "HSDP 2 x 2": {"dp_replicate": 2, "dp_shard": 2},
}
OTHERS: dict[str, dict[str, Any]] = {
    "CP 4, ring": {"cp": 4, "cp_method": "ring"},
    "CP 2 x TP 2": {"cp": 2, "tp": 2},
    "HSDP 2 x 2 x TP 2": {"dp_replicate": 2, "dp_shard": 2, "tp": 2},
    "HSDP 2 x 2 x CP 2, ring": {"dp_replicate": 2, "dp_shard": 2, "cp": 2, "cp_method": "ring"},
    "FSDP 2 x TP 2 x PP 2": {"dp_shard": 2, "tp": 2, "pp": 2, "pp_microbatch_size": 2},
}
MODES = [(compile, mode) for compile in ("", "aot_eager") for mode in ("none", "full", "selective")]


@pytest.fixture(scope="module")
def plain() -> dict[str, Any]:
    return plain_run(STEPS)


def build_config(dp_replicate: int = 1, dp_shard: int = 1, **options: Any) -> Config:
    return config_for(dp_replicate, dp_shard, **options)


def world_size(config: Config) -> int:
    settings = config.parallelism
    return prod((settings.dp_replicate, settings.dp_shard, settings.cp, settings.tp, settings.pp))


def compare(config: Config, expected: dict[str, Any], accumulation: int = 1, steps: int = STEPS, **model: Any) -> None:
    """Losses and norms of every step, gradients of the first, weights at the end if it is that of `expected`."""
    seen: set[str] = set()
    expected = expected | {"losses": expected["losses"][:steps], "norms": expected["norms"][:steps]}
    for result in run_ranks(world_size(config), partial(our_run, **model), config, steps, accumulation):
        close(result, expected, loss_tolerance=1e-6)
        for parameter, value in result["weights"].items():
            plain = expected["weights"][parameter]
            assert steps < STEPS or (value - plain).norm() < 1e-3 * plain.norm(), parameter
            assert torch.equal(result["init"][parameter], expected["init"][parameter]), parameter
        seen |= result["grads"].keys()
    assert seen == expected["grads"].keys(), "every parameter has a gradient on some rank"


@pytest.mark.parametrize("name", NAMED | OTHERS)
def test_equals_a_plain_loop(name: str, plain: dict[str, Any]) -> None:
    compare(build_config(**(NAMED | OTHERS)[name]), plain)


@pytest.mark.parametrize(("compile", "mode"), MODES[1:])
@pytest.mark.parametrize("name", NAMED)
def test_compiled_and_checkpointed(name: str, compile: str, mode: str, plain: dict[str, Any]) -> None:
    compare(build_config(compile=compile, mode=mode, **NAMED[name]), plain, steps=2)


@pytest.mark.parametrize("microbatch_size", [1, 4])
@pytest.mark.parametrize("schedule", ["Interleaved1F1B", "InterleavedZeroBubble"])
def test_schedules_of_many_stages(schedule: str, microbatch_size: int) -> None:
    config = config_for(1, 2, pp=2, pp_schedule=schedule, local_batch_size=8, pp_microbatch_size=microbatch_size)
    compare(config, plain_run(STEPS, n_layers=DEEP), n_layers=DEEP)


@pytest.mark.parametrize("axes", [{"pp": 2, "pp_microbatch_size": 2}, {"tp": 2}, {"cp": 2}])
def test_accumulation(axes: dict[str, int], plain: dict[str, Any]) -> None:
    compare(config_for(2, 1, local_batch_size=4, **axes), plain, accumulation=2)


def test_tied_embeddings_split_by_vocabulary() -> None:
    compare(config_for(1, 2, tp=2), plain_run(STEPS, tie_embeddings=True), tie_embeddings=True)


@pytest.mark.parametrize("axes", [{"cp": 2}, {"cp": 2, "tp": 2}, {"pp": 2, "pp_microbatch_size": 2}])
def test_documents(axes: dict[str, int]) -> None:
    """Positions restart and attention ends at documents, wherever the ranks' parts of a sequence begin."""
    config = config_for(1, 1, documents=True, local_batch_size=GLOBAL_BATCH, **axes)
    compare(config, plain_run(STEPS, documents=True))


def test_compiled_by_inductor() -> None:
    expected = plain_run(STEPS)
    config = config_for(1, 2, "inductor", tp=2)
    for result in run_ranks(4, our_run, config, STEPS, 1):
        close(result, expected, loss_tolerance=1e-5)


def test_offloaded_to_the_host(plain: dict[str, Any]) -> None:
    compare(config_for(1, 2, cpu_offload=True), plain)
