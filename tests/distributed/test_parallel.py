"""TP, CP and PP, alone and together with data parallelism, against a plain loop in one process."""

import re
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from config import Config
from loss import IGNORED, count_trained
from parallel.context import local_indices, ring_attention
from parallel.mesh import ParallelDims
from parallel.tensor import vocab_parallel_cross_entropy
from tests.harness import run_ranks
from tests.parity import GLOBAL_BATCH, STEPS, close, config_for, our_run, plain_run
from tests.parity_ranks import Case, start_ranks

DEEP = 6  # layers where stages are many
LAYOUTS: dict[str, dict[str, Any]] = {
    "TP 2": {"tp": 2},
    "CP 2": {"cp": 2},
    "CP 2, ring": {"cp": 2, "cp_method": "ring"},
    "PP 2": {"pp": 2, "local_batch_size": GLOBAL_BATCH, "pp_microbatch_size": 2},
    "FSDP 2 x TP 2": {"dp_shard": 2, "tp": 2},
    "FSDP 2 x CP 2": {"dp_shard": 2, "cp": 2},
    "FSDP 2 x PP 2": {"dp_shard": 2, "pp": 2, "pp_microbatch_size": 2},
    "CP 4, ring": {"cp": 4, "cp_method": "ring"},
    "CP 2, loss in chunks": {"cp": 2, "loss_chunks": 5},
    "HSDP 2 x 2 x TP 2": {"dp_replicate": 2, "dp_shard": 2, "tp": 2},
    "FSDP 2 x TP 2 x PP 2": {"dp_shard": 2, "tp": 2, "pp": 2, "pp_microbatch_size": 2},
}
# Layouts that are seen alone; COMPILED and BFLOAT16 have the others.
EAGER = ("PP 2", "FSDP 2 x CP 2", "CP 4, ring", "CP 2, loss in chunks", "HSDP 2 x 2 x TP 2", "FSDP 2 x TP 2 x PP 2")
# Layout → the mode of activation checkpointing: each kind of layout meets each mode, eager or compiled.
COMPILED = {"CP 2": "none", "CP 2, ring": "selective", "FSDP 2 x TP 2": "full", "FSDP 2 x PP 2": "selective"}
BFLOAT16 = {
    "CP 2": "selective",
    "CP 2, ring": "full",
    "FSDP 2 x TP 2": "selective",
    "FSDP 2 x PP 2": "full",
}


@pytest.mark.parametrize(
    "layout",
    [{}, {"dp_shard": 2, "loss_chunks": 4, "compile": "aot_eager"}, {"tp": 2}, {"cp": 2, "loss_chunks": 2}],
    ids=["plain", "compiled chunks, FSDP 2", "TP 2", "chunks, CP 2"],
)
def test_z_loss(layout: dict[str, Any]) -> None:
    """It is trained and logged, and is no part of the loss that is logged or validated."""
    ranks = 2 if layout else 1
    expected = plain_run(STEPS, z_loss=0.01)
    assert expected["weights"]["output.weight"].norm() < 0.999 * plain_run(STEPS)["weights"]["output.weight"].norm()
    for result in run_ranks(ranks, our_run, build_config(**layout, z_loss=0.01), STEPS, 1):
        close(result, expected)
        plain = expected["z_losses"]
        wanted = {1: plain[1], 2: plain[2], 4: plain[3], 5: plain[5]}
        assert {row["step"]: row["z_loss"] for row in result["rows"]} == pytest.approx(wanted, rel=1e-5)


def build_config(dp_replicate: int = 1, dp_shard: int = 1, **options: Any) -> Config:
    return config_for(dp_replicate, dp_shard, **options)


def compare_forked(
    config: Config, expected: dict[str, Any], accumulation: int = 1, tolerances: Any = (1e-6, 1e-5), **model: Any
) -> None:
    """A run against a plain loop's. `tolerances`: of losses and of gradients; every parameter has one on some rank."""
    settings, seen = config.parallelism, set[str]()
    world_size = prod((settings.dp_replicate, settings.dp_shard, settings.cp, settings.tp, settings.pp))
    for result in run_ranks(world_size, partial(our_run, **model), config, STEPS, accumulation):
        close(result, expected, *tolerances)
        seen |= result["grads"].keys()
    assert seen == expected["grads"].keys()


@pytest.mark.parametrize("layout", EAGER)
def test_equals_a_plain_loop(layout: str) -> None:
    compare_forked(build_config(**LAYOUTS[layout]), plain_run(STEPS))


@pytest.mark.parametrize("layout", COMPILED)
def test_compiled(layout: str) -> None:
    config = build_config(compile="aot_eager", mode=COMPILED[layout], **LAYOUTS[layout])
    compare_forked(config, plain_run(STEPS))


@pytest.mark.parametrize("layout", BFLOAT16)
def test_in_bfloat16(layout: str) -> None:
    """Ranks that share a sequence or a matmul round in other places than a process alone; a pipeline does not."""
    config = build_config(param_dtype="bfloat16", mode=BFLOAT16[layout], **LAYOUTS[layout])
    is_pipeline = config.parallelism.pp > 1
    expected = plain_run(STEPS, dtype=torch.bfloat16, pieces=8 if is_pipeline else 1)
    compare_forked(config, expected, tolerances=(3e-5, 1e-7) if is_pipeline else (1.5e-4, 0.02))


def test_under_torchrun_no_rank_gets_advice_for_developers_of_torch(tmp_path: Path) -> None:
    cases = {name: Case(build_config(**LAYOUTS[name])) for name in ("TP 2", "PP 2")}
    ranks, log = start_ranks(2, cases, {"": plain_run(STEPS)}, tmp_path)
    for rank in ranks:
        assert list(rank) == list(cases), log[-5000:]
        assert not any(seen["error"] for seen in rank.values()), rank
    assert not re.findall(r"^(?:.*Warning: |(?:\[rank\d+\]:)?W\d{4} ).*", log, re.MULTILINE)  # not C++'s, "[W"


@pytest.mark.parametrize(
    "axes", [{"dp_replicate": 2, "pp": 2, "pp_microbatch_size": 2}, {"tp": 2}, {"dp_replicate": 2, "cp": 2}], ids=str
)
def test_accumulation(axes: dict[str, int]) -> None:
    compare_forked(build_config(local_batch_size=4, **axes), plain_run(STEPS), accumulation=2)


@pytest.mark.parametrize("schedule", ["1F1B", "Interleaved1F1B"])
def test_a_pipeline_of_shards_accumulates_in_float32(schedule: str) -> None:
    """Over microbatches and two batches, after the last of which alone ranks sum.

    1F1B keeps the weights gathered until then. In bfloat16.
    """
    config = config_for(1, 2, pp=2, pp_schedule=schedule, local_batch_size=GLOBAL_BATCH // 4, param_dtype="bfloat16")
    expected = plain_run(STEPS, dtype=torch.bfloat16, pieces=GLOBAL_BATCH, n_layers=DEEP)
    compare_forked(config, expected, accumulation=2, tolerances=(3e-5, 1e-7), n_layers=DEEP)


def errors_of_the_ring(positive: bool) -> dict[str, float]:
    """Of results and gradients in bfloat16, against float64: how many times those of its rounding.

    Eight query heads share a key head. If values and the result's gradients are `positive`, sums lose nothing else.
    """
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    generator = torch.Generator().manual_seed(0)
    q, k, v, grad = (torch.randn(1, heads, 128, 16, generator=generator) for heads in (16, 2, 2, 16))
    if positive:
        v, grad = v.abs(), grad.abs()
    own = local_indices(128, mesh)
    given = [x.bfloat16()[:, :, own].requires_grad_() for x in (q, k, v)]
    out, _ = ring_attention(*given, mesh.get_group().group_name)
    out.backward(grad.bfloat16()[:, :, own])
    whole = [x.bfloat16().double().requires_grad_() for x in (q, k, v)]
    expected = F.scaled_dot_product_attention(*whole, is_causal=True, enable_gqa=True)
    expected.backward(grad.bfloat16().double())
    errors = {"out": in_roundings(out, expected[:, :, own])}
    for name, ours, exact in zip(("dq", "dk", "dv"), given, whole, strict=True):
        assert exact.grad is not None
        errors[name] = in_roundings(ours.grad, exact.grad[:, :, own])
    return errors


def in_roundings(found: Tensor, exact: Tensor) -> float:
    return ((found - exact).norm() / (exact.bfloat16() - exact).norm()).item()


def test_the_ring_adds_up_in_float32() -> None:
    """Partial results, gradients of queries, and of the keys and values over ranks and over query heads."""
    for errors in run_ranks(4, errors_of_the_ring, True):
        assert errors["out"] < 1.35  # found: 1.25
        assert errors["dv"] < 1.08  # 1.04
    for errors in run_ranks(4, errors_of_the_ring, False):
        assert errors["dq"] < 2.15  # 1.99
        assert errors["dk"] < 1.95  # 1.83


def loss_of_split_logits(size: float) -> None:
    """In bfloat16. With a `size` of 200 exp() overflows, as in a loss that has spiked. No float32 logits are kept."""
    mesh = init_device_mesh("cpu", (2,))
    generator = torch.Generator().manual_seed(0)
    logits = (size * torch.randn(2, 8, 64, generator=generator)).bfloat16()
    labels = torch.randint(0, 64, (2, 8), generator=generator)
    labels[0, :3] = IGNORED
    whole, own = logits.double().requires_grad_(), logits.chunk(2, dim=-1)[mesh.get_local_rank()].requires_grad_()
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):  # type: ignore[func-returns-value]
        loss = vocab_parallel_cross_entropy(own, labels, mesh, IGNORED)
    assert {x.dtype for x in kept if x.numel() >= own.numel()} == {torch.bfloat16}
    expected = F.cross_entropy(whole.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")
    torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=0)
    third = torch.tensor(1 / 3)  # which bfloat16 has not
    (expected * third).backward()
    (loss * third).backward()
    assert whole.grad is not None
    exact = whole.grad.chunk(2, dim=-1)[mesh.get_local_rank()]
    assert (own.grad - exact).norm() < 1.05 * (exact.bfloat16() - exact).norm(), "only rounded to bfloat16"


@pytest.mark.parametrize("size", [1.0, 200.0])
def test_the_loss_of_logits_split_by_vocabulary(size: float) -> None:
    run_ranks(2, loss_of_split_logits, size)


# Layout → trained tokens by rank, if data-parallel rank r has r + 1 of them in a microbatch and 10 in another.
TRAINED = {
    ParallelDims(2, 2, cp=2): [10 + 40] * 8,
    ParallelDims(2, 4, islands=2): [10 + 40] * 4 + [26 + 40] * 4,
    ParallelDims(2, 2, pp=2, islands=2): [3 + 20, 3 + 20, 7 + 20, 7 + 20] * 2,
}


def trained_of_rank() -> list[int]:
    found = []
    for dims in TRAINED:
        labels = torch.full((2, 1, 10), IGNORED)
        labels[0, 0, : dims.dp_rank(dist.get_rank()) + 1] = 1
        labels[1] = 2
        found.append(int(count_trained(labels, dims, torch.device("cpu"))))
    return found


def test_trained_tokens_are_those_of_the_ranks_that_update_together() -> None:
    of_ranks = run_ranks(8, trained_of_rank)
    assert [list(found) for found in zip(*of_ranks, strict=True)] == list(TRAINED.values())


def test_tied_embeddings_split_by_vocabulary() -> None:
    config = config_for(1, 1, tp=2, local_batch_size=GLOBAL_BATCH)
    compare_forked(config, plain_run(STEPS, tie_embeddings=True), tie_embeddings=True)


@pytest.mark.parametrize("axes", [{"cp": 2, "tp": 2}, {"pp": 2, "pp_microbatch_size": 2}])
def test_documents(axes: dict[str, int]) -> None:
    """Positions restart and attention ends at documents, wherever the ranks' parts of a sequence begin."""
    config = config_for(1, 1, documents=True, local_batch_size=GLOBAL_BATCH, **axes)
    compare_forked(config, plain_run(STEPS, documents=True))


@pytest.mark.skipif(torch.__version__.startswith("2.12."), reason="torch 2.12 cannot: it is refused there")
def test_the_compiler_keeps_to_a_memory_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """With DTensors in its graphs; the backend is inductor's partitioner without its kernels."""
    monkeypatch.setattr("models.llama.parallelize.check_activation_checkpoint", lambda config: None)
    backend = "aot_eager_decomp_partition"
    config = config_for(1, 1, backend, mode="budget", tp=2, local_batch_size=GLOBAL_BATCH)
    compare_forked(config, plain_run(STEPS), tolerances=(1e-5, 1e-4))
