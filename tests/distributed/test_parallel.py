"""What ranks send, keep and compute in a step: sums and norms of gradients, the ring, the split loss, recomputation."""

import dataclasses
from collections import Counter, defaultdict

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from loss import IGNORED
from norms import Norms, layer_of
from parallel.context import local_indices, ring_attention
from parallel.fsdp import AllToAllReduceScatter
from parallel.mesh import ParallelDims
from parallel.tensor import vocab_parallel_cross_entropy
from tests.harness import run_ranks
from tests.parity import CPU, FLAVOR, config_for, losses_of, opened
from tools.same import SEQ_LEN, SEQUENCES, VOCAB_SIZE, start_in_layout, steps_of, whole


def norms_of_layers(config):
    """By layer: the norm of its gradients as a metric, and in float64 of the whole gradients."""
    given = opened(replace_norm(config), 1, 1)
    trainer = start_in_layout(given, CPU)
    trainer.compute_gradients(next(steps_of(given, trainer.dims, dist.get_rank())), measure=True)
    squares = defaultdict(float)
    for name, weight in trainer.parts[0].named_parameters():
        assert weight.grad is not None
        squares[layer_of(name)] += whole(weight.grad).double().square().sum().item()
    norms = trainer.update()
    return [(norms[f"grad_norm/{layer}"].item(), square**0.5) for layer, square in squares.items()]


def replace_norm(config):
    return dataclasses.replace(config, training=dataclasses.replace(config.training, max_norm=0.0))


def test_norms_of_layers_are_of_whole_gradients():
    for ranks, config in ((2, config_for(2, 1)), (4, config_for(1, 2, tp=2))):
        for found in run_ranks(ranks, norms_of_layers, config):
            assert len(found) == FLAVOR.n_layers + 3
            for norm, exact in found:
                assert norm == pytest.approx(exact, rel=1e-5)


def errors_of_the_ring(positive):
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


def in_roundings(found, exact):
    return ((found - exact).norm() / (exact.bfloat16() - exact).norm()).item()


def test_the_ring_adds_up_in_float32():
    """Partial results, gradients of queries, and of the keys and values over ranks and over query heads."""
    for errors in run_ranks(4, errors_of_the_ring, True):
        assert errors["out"] < 1.35  # found: 1.25
        assert errors["dv"] < 1.08  # 1.04
    for errors in run_ranks(4, errors_of_the_ring, False):
        assert errors["dq"] < 2.15  # 1.99
        assert errors["dk"] < 1.95  # 1.83


def loss_of_split_logits(size):
    """In bfloat16. With a `size` of 200 exp() overflows, as in a loss that has spiked. No float32 logits are kept."""
    mesh = init_device_mesh("cpu", (2,))
    generator = torch.Generator().manual_seed(0)
    logits = (size * torch.randn(2, 8, 64, generator=generator)).bfloat16()
    labels = torch.randint(0, 64, (2, 8), generator=generator)
    labels[0, :3] = IGNORED
    whole, own = logits.double().requires_grad_(), logits.chunk(2, dim=-1)[mesh.get_local_rank()].requires_grad_()
    kept = []
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
def test_the_loss_of_logits_split_by_vocabulary(size):
    run_ranks(2, loss_of_split_logits, size)


def scattered():
    own = torch.empty(1024, dtype=torch.bfloat16)
    AllToAllReduceScatter()(
        own, gradients_of(dist.get_rank()).flatten(), dist.distributed_c10d._get_default_group(), None
    )
    return own


def gradients_of(rank):
    return torch.randn(4, 1024, generator=torch.Generator().manual_seed(rank)).bfloat16()


def test_the_own_reduce_scatter_rounds_a_sum_once():
    sums = sum(gradients_of(rank).double() for rank in range(4))
    assert isinstance(sums, torch.Tensor)
    assert torch.equal(torch.stack(run_ranks(4, scattered)), sums.bfloat16())


def norms_of_layouts(max_norm):
    """(the norm, that in float64, that in float64 of the clipped gradients) of large gradients in several layouts."""
    whole = 1e-3 * torch.randn(2049, 4096, generator=torch.Generator().manual_seed(0))  # uneven over the ranks
    found = []
    for sizes, placements in (
        ({"dp_replicate": 1, "dp_shard": 4}, [Shard(0)]),
        ({"dp_replicate": 2, "dp_shard": 2}, [Replicate(), Shard(0)]),
        ({"dp_replicate": 1, "dp_shard": 2, "pp": 2}, [Shard(0)]),  # each stage of a pipeline has such a weight
    ):
        dims = ParallelDims(**sizes)
        mesh = dims.build_mesh("cpu")
        weight = nn.Parameter(distribute_tensor(whole, mesh.fsdp, placements, src_data_rank=None))
        weight.grad = weight.detach().clone()
        norms = Norms(["output"], [nn.ParameterDict({"output": weight})], mesh, dims, CPU)
        norm = norms.clip(max_norm).item()
        clipped = weight.grad.full_tensor().double().norm()
        found.append((norm, whole.double().norm().item() * dims.pp**0.5, clipped.item() * dims.pp**0.5))
    return found


def test_the_gradient_norm_is_right_to_a_millionth_in_every_layout():
    for found in run_ranks(4, norms_of_layouts, 0.25):
        for norm, exact, clipped in found:
            assert norm == pytest.approx(exact, rel=1e-6)
            assert clipped == pytest.approx(0.25, rel=5e-6)  # torch divides by norm + 1e-6


class CountOps(TorchDispatchMode):
    """Counts what is really computed, recomputation included; and the most rows of anything as wide as logits."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()
        self.widths = []  # columns of each matmul's result
        self.logits = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.counts[func.overloadpacket.__name__] += 1
        if func is torch.ops.aten.mm.default:
            self.widths.append(result.shape[-1])
        if isinstance(result, torch.Tensor) and result.ndim and result.shape[-1] == VOCAB_SIZE:
            self.logits = max(self.logits, result.numel() // VOCAB_SIZE)
        return result


def most_logits(loss_chunks):
    with CountOps() as ops:
        losses_of(config_for(1, 1, loss_chunks=loss_chunks), 1)
    return ops.logits


def test_only_a_chunk_of_the_logits_exists_at_a_time():
    assert run_ranks(1, most_logits, 1) == [SEQUENCES * SEQ_LEN]
    assert run_ranks(1, most_logits, 4) == [SEQUENCES * SEQ_LEN // 4]


def run_counted(mode):
    """Loss of one step, the bytes autograd keeps for backward, widths of matmuls, attention forwards computed."""
    kept = {}

    def pack(x):
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with CountOps() as ops, torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        (loss,) = losses_of(config_for(1, 1, mode=mode), 1)
    attention = sum(n for name, n in ops.counts.items() if "attention" in name and "backward" not in name)
    return loss, sum(kept.values()), ops.widths, attention


def test_activation_checkpointing_keeps_less_recomputes_what_it_says_and_changes_nothing():
    (none,), (selective,), (full,) = (run_ranks(1, run_counted, mode) for mode in ("none", "selective", "full"))
    assert none[0] == selective[0] == full[0]
    assert full[1] < 0.5 * none[1]
    matmuls = 6 * FLAVOR.n_layers  # of the blocks' forward; w2, the seventh and last, no backward needs again
    assert len(full[2]) - len(none[2]) == matmuls
    assert len(selective[2]) - len(none[2]) == matmuls / 2
    again = [64, 32, 112]  # wq, wv, w1; not wk, wo, w3
    found = [again == selective[2][i : i + 3] for i in range(len(selective[2]))]
    assert sum(found) == FLAVOR.n_layers
    assert full[3] - none[3] == FLAVOR.n_layers
    assert selective[3] == none[3], "selective keeps attention"
