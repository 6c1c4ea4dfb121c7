"""What ranks send in a step, the ring's sums, the split loss, and counts of trained tokens."""

import dataclasses
from collections import defaultdict
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from config import Config
from layer_norms import layer_of
from loss import IGNORED, count_trained
from parallel.context import local_indices, ring_attention
from parallel.mesh import ParallelDims
from parallel.tensor import vocab_parallel_cross_entropy
from tests.harness import run_ranks
from tests.parity import CPU, FLAVOR, config_for, losses_of, opened
from tools.same import start_in_layout, steps_of, whole


def count_calls(collective: str, config: Config, batches: int) -> int:
    """Of a step of some batches."""
    with mock.patch.object(dist, collective, side_effect=getattr(dist, collective)) as counted:
        losses_of(config, 1, batches)
    return counted.call_count


@pytest.mark.parametrize(
    ("world_size", "collective", "config"),
    [
        (4, "all_to_all_single", config_for(1, 2, pp=2, pp_microbatch_size=2, reduce_scatter="all_to_all")),
        (2, "all_to_all_single", config_for(1, 2, sync_every_microbatch=False, reduce_scatter="all_to_all")),
        (4, "all_reduce", config_for(2, 2)),
    ],
)
def test_ranks_sum_gradients_once_a_step(world_size: int, collective: str, config: Config) -> None:
    one_batch, two_batches = (run_ranks(world_size, count_calls, collective, config, n) for n in (1, 2))
    assert min(one_batch) > 1
    assert max(two_batches) == max(one_batch)


def test_norms_of_layers_take_one_collective() -> None:
    config = config_for(1, 2)
    without = dataclasses.replace(config, metrics=dataclasses.replace(config.metrics, per_layer=False))
    counts = [run_ranks(2, count_calls, "all_reduce", each, 1)[0] for each in (config, without)]
    assert counts[0] == counts[1] + 1


def norms_of_layers(config: Config) -> list[tuple[float, float]]:
    """By layer: the norm of its gradients as a metric, and in float64 of the whole gradients."""
    given = opened(replace_norm(config), 1, 1)
    trainer = start_in_layout(given, CPU)
    trainer.compute_gradients(next(steps_of(given, trainer.dims, dist.get_rank())), measure=True)
    squares: dict[str, float] = defaultdict(float)
    for name, weight in trainer.parts[0].named_parameters():
        assert weight.grad is not None
        squares[layer_of(name)] += whole(weight.grad).double().square().sum().item()
    norms = trainer.update()
    return [(norms[f"grad_norm/{layer}"].item(), square**0.5) for layer, square in squares.items()]


def replace_norm(config: Config) -> Config:
    return dataclasses.replace(config, training=dataclasses.replace(config.training, max_norm=0.0))


def test_norms_of_layers_are_of_whole_gradients() -> None:
    for ranks, config in ((2, config_for(2, 1)), (4, config_for(1, 2, tp=2))):
        for found in run_ranks(ranks, norms_of_layers, config):
            assert len(found) == FLAVOR.n_layers + 3
            for norm, exact in found:
                assert norm == pytest.approx(exact, rel=1e-5)


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
