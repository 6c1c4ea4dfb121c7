"""Several ranks on one GPU, against plain loops there: every parallelism by CUDA's kernels and NCCL.

NCCL refuses two ranks on a device only while they name the same host; with names of their own it connects them by
sockets. So this proves what is computed and says nothing about its speed. On a machine without a GPU the same runs on
CPU with gloo, to find mistakes before a GPU is at hand:

TEST_GPU=1 python -m pytest tests/gpu/test_ranks.py [-k "2ranks and not compiled"]
"""

import os
import re
import shutil
from dataclasses import replace
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch

from config import Checkpoint, Config, Float8
from tests.parity import GLOBAL_BATCH, STEPS, config_for, plain_run
from tests.parity_ranks import Case, start_ranks

pytestmark = pytest.mark.skipif(
    os.environ.get("TEST_GPU") != "1", reason="needs TEST_GPU=1, and a CUDA GPU to say more"
)
ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
COMPILED = {"compile": "inductor" if ON_GPU else "aot_eager"}
PP = {"pp": 2, "local_batch_size": GLOBAL_BATCH, "pp_microbatch_size": 2}
DEEP = 4  # layers, for two stages on each of two ranks
TURNS = {"pp_schedule": "Interleaved1F1B", "n_layers": DEEP, "expected": "deep"}
# Fewer than 128 queries on a rank would take the kernel for decoding (torch 2.11 to 2.14), which no run trains with.
LONG = 512
DOCUMENTS = {"documents": True, "seq_len": LONG, "expected": "documents"}
MUON = {"optimizer": "muon", "expected": "muon"}
SAVES = Checkpoint(mode="async", interval=2, keep=0)
# Tolerances of losses and gradients. In bfloat16 ranks that share a sequence or a matmul round in other places.
EXACT, ROUNDED = (5e-6, 2e-4), (5e-4, 0.03)


def float32(tolerances: tuple[float, float] = EXACT, expected: str = "float32", **layout: Any) -> Case:
    n_layers = layout.pop("n_layers", 0)
    config = config_for(layout.pop("dp_replicate", 1), layout.pop("dp_shard", 1), **layout)
    return Case(config, expected, tolerances, n_layers)


def bfloat16(tolerances: tuple[float, float] = ROUNDED, expected: str = "bfloat16", **layout: Any) -> Case:
    return float32(tolerances, expected, param_dtype="bfloat16", **layout)


def in_float8(**layout: Any) -> Case:
    return bfloat16((5e-3, 0.5), float8=Float8(enable=True, filter="all"), **layout)


def with_muon(**layout: Any) -> Case:
    """On a GPU both compute the update in bfloat16."""
    return float32(ROUNDED if ON_GPU else EXACT, **MUON, **layout)


CASES = {
    "FSDP 2": float32(dp_shard=2),
    "FSDP 2, compiled": float32(dp_shard=2, **COMPILED),
    "FSDP 2, own reduce-scatter": float32(dp_shard=2, reduce_scatter="all_to_all"),
    "FSDP 2, weights on the host": float32(dp_shard=2, cpu_offload=True, expected="host"),
    "FSDP 2, bfloat16": bfloat16(dp_shard=2, expected="bfloat16, halves"),
    "FSDP 2, float8": in_float8(dp_shard=2),
    "FSDP 2, float8, compiled": in_float8(dp_shard=2, **COMPILED),
    "FSDP 2, Muon": with_muon(dp_shard=2),
    "DDP 2, loss in chunks": float32(dp_replicate=2, loss_chunks=5),
    "TP 2": float32(tp=2),
    "TP 2, compiled, bfloat16": bfloat16(tp=2, **COMPILED),
    "TP 2, float8": in_float8(tp=2),
    "TP 2, float8, compiled": in_float8(tp=2, **COMPILED),
    "TP 2, Muon": with_muon(tp=2),
    "CP 2, bfloat16": bfloat16(cp=2),
    "CP 2, documents, compiled": float32(cp=2, **DOCUMENTS, **COMPILED),
    "CP 2, documents, bfloat16": bfloat16(cp=2, **DOCUMENTS | {"expected": "documents, bfloat16"}),
    "CP 2, ring": bfloat16(cp=2, cp_method="ring"),
    "CP 2, ring, compiled": bfloat16(cp=2, cp_method="ring", **COMPILED),
    "CP 2, loss in chunks": float32(cp=2, loss_chunks=5),
    "PP 2, bfloat16": bfloat16(**PP),
    "PP 2, compiled": float32(**PP, **COMPILED),
    "PP 2, interleaved": float32(**PP, **TURNS),
    "HSDP 2 x 2": float32(dp_replicate=2, dp_shard=2),
    "HSDP 2 x 2, float8": in_float8(dp_replicate=2, dp_shard=2),
    "HSDP 2 x 2, Muon": with_muon(dp_replicate=2, dp_shard=2),
    "FSDP 2 x TP 2": float32(dp_shard=2, tp=2),
    "FSDP 2 x TP 2, float8": in_float8(dp_shard=2, tp=2),
    "FSDP 2 x CP 2, documents": float32(dp_shard=2, cp=2, **DOCUMENTS),
    "FSDP 2 x CP 2, ring": bfloat16(dp_shard=2, cp=2, cp_method="ring"),
    "FSDP 2 x PP 2, interleaved": float32(dp_shard=2, pp=2, pp_microbatch_size=2, **TURNS),
    "CP 2 x TP 2": float32(cp=2, tp=2),
    "TP 2 x PP 2": float32(tp=2, **PP),
}


def world_size(config: Config) -> int:
    settings = config.parallelism
    return prod((settings.dp_replicate, settings.dp_shard, settings.cp, settings.tp, settings.pp))


@pytest.fixture(scope="module")
def plain() -> dict[str, dict[str, Any]]:
    runs = {
        "float32": plain_run(STEPS, device=DEVICE),
        "host": plain_run(STEPS, device=DEVICE, home="cpu"),  # whose random numbers are others
        "deep": plain_run(STEPS, device=DEVICE, n_layers=DEEP),
        "muon": plain_run(STEPS, device=DEVICE, muon=True),
        "documents": plain_run(STEPS, documents=True, seq_len=LONG, device=DEVICE),
        "documents, bfloat16": plain_run(STEPS, documents=True, seq_len=LONG, dtype=torch.bfloat16, device=DEVICE),
        "bfloat16": plain_run(STEPS, dtype=torch.bfloat16, device=DEVICE),
        "bfloat16, halves": plain_run(STEPS, dtype=torch.bfloat16, pieces=2, device=DEVICE),
    }
    return torch.utils._pytree.tree_map(lambda x: x.cpu() if isinstance(x, torch.Tensor) else x, runs)


@pytest.fixture(scope="module")
def outcomes(plain: dict[str, Any], tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Any:
    """By world size, for one start of torchrun each: of the cases that this call of pytest has selected."""
    chosen = [item.callspec.params["name"] for item in request.session.items if hasattr(item, "callspec")]

    @cache
    def run_cases(size: int) -> tuple[list[dict[str, Any]], str]:
        cases = {name: case for name, case in CASES.items() if name in chosen and world_size(case.config) == size}
        return start(size, cases, plain, tmp_path_factory.mktemp(f"ranks{size}"))

    return run_cases


def start(size: int, cases: dict[str, Case], plain: dict[str, Any], folder: Path) -> tuple[list[dict[str, Any]], str]:
    """A rank that waits for ever costs the cases after it, not those before."""
    folder.mkdir(exist_ok=True)
    seconds = 60 + sum(20 if case.config.compile.enable else 5 for case in cases.values())
    seconds *= 1 if ON_GPU else 4
    return start_ranks(size, cases, plain, folder, "--one-device", timeout_seconds=seconds)


def check(name: str, case: Case, plain: dict[str, Any], ranks: list[dict[str, Any]], log: str) -> None:
    for rank in ranks:
        error = rank[name]["error"] if name in rank else f"no result\n{log[-10_000:]}"
        lines = [line for line in error.splitlines() if re.search(r"Error: .", line)]
        assert not error, f"{(lines or ['no result'])[-1]}\n{error}"  # pytest's summary has the first line
    seen = {parameter for rank in ranks for parameter in rank[name]["gradients"]}
    assert seen == plain[case.expected]["grads"].keys()


@pytest.mark.parametrize("name", CASES, ids=lambda name: f"{world_size(CASES[name].config)}ranks-{name}")
def test_equals_a_plain_loop(name: str, plain: dict[str, Any], outcomes: Any) -> None:
    check(name, CASES[name], plain, *outcomes(world_size(CASES[name].config)))


def test_two_ranks_save_behind_their_steps_and_four_go_on(plain: dict[str, Any], tmp_path: Path) -> None:
    """From the second of five steps, whose weights and moments were copied while the third was computed."""
    saves, loads = (
        case._replace(config=replace(case.config, checkpoint=SAVES), folder=str(tmp_path))
        for case in (float32(dp_shard=2), float32(dp_replicate=2, dp_shard=2))
    )
    check("", saves, plain, *start(2, {"": saves}, plain, tmp_path / "two"))
    _, *newer = sorted((tmp_path / "run" / "checkpoints").glob("step-*"))
    assert [int(path.name.split("-")[1]) for path in newer] == [4, 5]
    for path in newer:
        shutil.rmtree(path)
    check("", loads, plain, *start(4, {"": loads._replace(later=True)}, plain, tmp_path / "four"))
