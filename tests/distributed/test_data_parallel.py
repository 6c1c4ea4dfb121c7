"""Data parallelism, the loss in chunks and recomputation: norms, initial weights, what is kept and computed."""

from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement
from torch.utils._python_dispatch import TorchDispatchMode

from optim import clip_grad_norm_
from parallel.fsdp import AllToAllReduceScatter
from tests.harness import run_ranks
from tests.parity import FLAVOR, config_for, losses_of, trace_of
from tools.same import SEQ_LEN, SEQUENCES, VOCAB_SIZE


def scattered() -> torch.Tensor:
    own = torch.empty(1024, dtype=torch.bfloat16)
    AllToAllReduceScatter()(
        own, gradients_of(dist.get_rank()).flatten(), dist.distributed_c10d._get_default_group(), None
    )
    return own


def gradients_of(rank: int) -> torch.Tensor:
    return torch.randn(4, 1024, generator=torch.Generator().manual_seed(rank)).bfloat16()


def test_the_own_reduce_scatter_rounds_a_sum_once() -> None:
    sums = sum(gradients_of(rank).double() for rank in range(4))
    assert isinstance(sums, torch.Tensor)
    assert torch.equal(torch.stack(run_ranks(4, scattered)), sums.bfloat16())


def norms_of_layouts(max_norm: float) -> list[tuple[float, float, float]]:
    """(the norm, that in float64, that in float64 of the clipped gradients) of large gradients in several layouts."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stages", "shards"))
    flat = init_device_mesh("cpu", (2, 2))
    whole = 1e-3 * torch.randn(2049, 4096, generator=torch.Generator().manual_seed(0))  # uneven over the ranks
    layouts: list[tuple[DeviceMesh, list[Placement], DeviceMesh | None]] = [
        (flat, [Shard(0), Shard(1)], None),
        (flat, [Replicate(), Shard(0)], None),
        (mesh["shards"], [Shard(0)], mesh["stages"]),  # each stage of a pipeline has such a weight
    ]
    found = []
    for sharded_by, placements, pp in layouts:
        parameter = torch.nn.Parameter(distribute_tensor(whole, sharded_by, placements, src_data_rank=None))
        parameter.grad = parameter.detach().clone()
        stages = pp.size() if pp else 1
        norm = clip_grad_norm_([parameter], max_norm, pp).item()
        clipped = parameter.grad.full_tensor().double().norm()
        found.append((norm, whole.double().norm().item() * stages**0.5, clipped.item() * stages**0.5))
    return found


def test_the_gradient_norm_is_right_to_a_millionth_in_every_layout() -> None:
    for found in run_ranks(4, norms_of_layouts, 0.25):
        for norm, exact, clipped in found:
            assert norm == pytest.approx(exact, rel=1e-6)
            assert clipped == pytest.approx(0.25, rel=5e-6)  # torch divides by norm + 1e-6


def start_of(ranks: int) -> dict[str, torch.Tensor]:
    return trace_of(config_for(1, ranks), 0).start


def test_initial_weights_do_not_depend_on_the_sharding() -> None:
    """Three ranks share no weight evenly; tools.same compares the others'."""
    (expected,) = run_ranks(1, start_of, 1)
    for found in run_ranks(3, start_of, 3):
        assert all(torch.equal(weight, expected[name]) for name, weight in found.items())


class CountOps(TorchDispatchMode):
    """Counts what is really computed, recomputation included; and the most rows of anything as wide as logits."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.widths: list[int] = []  # columns of each matmul's result
        self.logits = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.counts[func.overloadpacket.__name__] += 1
        if func is torch.ops.aten.mm.default:
            self.widths.append(result.shape[-1])
        if isinstance(result, torch.Tensor) and result.ndim and result.shape[-1] == VOCAB_SIZE:
            self.logits = max(self.logits, result.numel() // VOCAB_SIZE)
        return result


def most_logits(loss_chunks: int) -> int:
    with CountOps() as ops:
        losses_of(config_for(1, 1, loss_chunks=loss_chunks), 1)
    return ops.logits


def test_only_a_chunk_of_the_logits_exists_at_a_time() -> None:
    assert run_ranks(1, most_logits, 1) == [SEQUENCES * SEQ_LEN]
    assert run_ranks(1, most_logits, 4) == [SEQUENCES * SEQ_LEN // 4]


def run_counted(mode: str) -> tuple[float, int, list[int], int]:
    """Loss of one step, the bytes autograd keeps for backward, widths of matmuls, attention forwards computed."""
    kept: dict[int, int] = {}

    def pack(x: torch.Tensor) -> torch.Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with CountOps() as ops, torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        (loss,) = losses_of(config_for(1, 1, mode=mode), 1)
    attention = sum(n for name, n in ops.counts.items() if "attention" in name and "backward" not in name)
    return loss, sum(kept.values()), ops.widths, attention


def test_activation_checkpointing_keeps_less_recomputes_what_it_says_and_changes_nothing() -> None:
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
