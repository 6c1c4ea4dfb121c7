"""Several ranks on one GPU, against plain loops there: every parallelism by CUDA's kernels and NCCL.

NCCL refuses two ranks on a device only while they name the same host; with names of their own it connects them by
sockets. So this proves what is computed and says nothing about its speed. On a machine without a GPU the same runs on
CPU with gloo, to find mistakes before a GPU is at hand:

TEST_GPU=1 python -m pytest tests/gpu/test_ranks.py
"""

import os
from functools import cache
from math import prod
from typing import Any

import pytest
import torch

from config import Config, Float8
from tests.parity import GLOBAL_BATCH, STEPS, config_for, plain_run
from tests.parity_ranks import Case, start_ranks

pytestmark = pytest.mark.skipif(
    os.environ.get("TEST_GPU") != "1", reason="needs TEST_GPU=1, and a CUDA GPU to say more"
)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PP = {"pp": 2, "local_batch_size": GLOBAL_BATCH, "pp_microbatch_size": 2}
# Tolerances of losses and gradients. In bfloat16 ranks that share a sequence or a matmul round in other places.
EXACT, ROUNDED = (5e-6, 2e-4), (5e-4, 0.03)


def float32(tolerances: tuple[float, float] = EXACT, expected: str = "float32", **layout: Any) -> Case:
    config = config_for(layout.pop("dp_replicate", 1), layout.pop("dp_shard", 1), **layout)
    return Case(config, expected, tolerances)


def bfloat16(tolerances: tuple[float, float] = ROUNDED, expected: str = "bfloat16", **layout: Any) -> Case:
    return float32(tolerances, expected, param_dtype="bfloat16", **layout)


def in_float8(**layout: Any) -> Case:
    return bfloat16((5e-3, 0.5), float8=Float8(enable=True, filter="all"), **layout)


CASES = {
    "FSDP 2": float32(dp_shard=2),
    "FSDP 2, compiled": float32(dp_shard=2, compile="inductor"),
    "FSDP 2, own reduce-scatter": float32(dp_shard=2, reduce_scatter="all_to_all"),
    "FSDP 2, weights on the host": float32(dp_shard=2, cpu_offload=True, expected="host"),
    "FSDP 2, bfloat16": bfloat16(dp_shard=2, expected="bfloat16, halves"),
    "FSDP 2, float8": in_float8(dp_shard=2),
    "FSDP 2, float8, compiled": in_float8(dp_shard=2, compile="inductor"),
    "DDP 2": float32(dp_replicate=2),
    "DDP 2, loss in chunks": float32(dp_replicate=2, loss_chunks=5),
    "TP 2": float32(tp=2),
    "TP 2, compiled, bfloat16": bfloat16(tp=2, compile="inductor"),
    "TP 2, float8": in_float8(tp=2),
    "CP 2": float32(cp=2),
    "CP 2, bfloat16": bfloat16(cp=2),
    "CP 2, documents": float32(cp=2, documents=True, expected="documents"),
    "CP 2, ring": bfloat16(cp=2, cp_method="ring"),
    "CP 2, loss in chunks": float32(cp=2, loss_chunks=5),
    "PP 2": float32(**PP),
    "PP 2, bfloat16": bfloat16(**PP),
    "HSDP 2 x 2": float32(dp_replicate=2, dp_shard=2),
    "FSDP 2 x TP 2": float32(dp_shard=2, tp=2),
    "FSDP 2 x CP 2, ring": bfloat16(dp_shard=2, cp=2, cp_method="ring"),
    "FSDP 2 x PP 2": float32(dp_shard=2, pp=2, pp_microbatch_size=2),
    "CP 2 x TP 2": float32(cp=2, tp=2),
}


def world_size(config: Config) -> int:
    settings = config.parallelism
    return prod((settings.dp_replicate, settings.dp_shard, settings.cp, settings.tp, settings.pp))


@pytest.fixture(scope="module")
def plain() -> dict[str, dict[str, Any]]:
    runs = {
        "float32": plain_run(STEPS, device=DEVICE),
        "host": plain_run(STEPS, device=DEVICE, home="cpu"),  # whose random numbers are others
        "documents": plain_run(STEPS, documents=True, device=DEVICE),
        "bfloat16": plain_run(STEPS, dtype=torch.bfloat16, device=DEVICE),
        "bfloat16, halves": plain_run(STEPS, dtype=torch.bfloat16, pieces=2, device=DEVICE),
    }
    return torch.utils._pytree.tree_map(lambda x: x.cpu() if isinstance(x, torch.Tensor) else x, runs)


@pytest.fixture(scope="module")
def outcomes(plain: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Any:
    @cache
    def run_cases(size: int) -> tuple[list[dict[str, Any]], str]:
        cases = {name: case for name, case in CASES.items() if world_size(case.config) == size}
        return start_ranks(size, cases, plain, tmp_path_factory.mktemp(f"ranks{size}"), "--one-device")

    return run_cases


@pytest.mark.parametrize("name", CASES)
def test_equals_a_plain_loop(name: str, plain: dict[str, Any], outcomes: Any) -> None:
    ranks, log = outcomes(world_size(CASES[name].config))
    for rank in ranks:
        assert name in rank, f"no result: {log[-3000:]}"
        assert not rank[name]["error"], rank[name]["error"]
    seen = {parameter for rank in ranks for parameter in rank[name]["gradients"]}
    assert seen == plain["float32"]["grads"].keys()
