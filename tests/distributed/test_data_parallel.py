"""DDP, FSDP2 and HSDP against a plain loop in one process: initial weights, losses, gradients, weights."""

from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement
from torch.utils._python_dispatch import TorchDispatchMode

from config import ActivationCheckpoint, Config, Training
from models.init import init_weights
from models.llama.model import Llama
from optim import clip_grad_norm_
from parallel.fsdp import AllToAllReduceScatter
from tests.harness import run_ranks
from tests.parity import FLAVOR, GLOBAL_BATCH, SEED, SEQ_LEN, STEPS, VOCAB, close, config_for, our_run, plain_run

CASES = {
    "one process, loss in chunks": (config_for(1, 1, loss_chunks=4), 2),
    "one process, FSDP": (config_for(1, 1, cpu_offload=True), 4),
    "DDP 2, compiled, selective": (config_for(2, 1, compile="aot_eager", mode="selective"), 1),
    "FSDP 2, on the host": (config_for(1, 2, cpu_offload=True), 2),
    "FSDP 2, loss in chunks, compiled": (config_for(1, 2, compile="aot_eager", loss_chunks=3), 2),
    "FSDP 2, summed and gathered once": (
        config_for(1, 2, sync_every_microbatch=False, reshard_after_forward=False), 4
    ),
    "FSDP 4, full": (config_for(1, 4, mode="full"), 2),
    "FSDP 4, kept gathered in pairs": (config_for(1, 4, reshard_group_size=2), 2),
    "FSDP 4, prefetch, own reduce-scatter": (config_for(1, 4, prefetch_layers=2, reduce_scatter="all_to_all"), 2),
    "HSDP 2 x 2, selective": (config_for(2, 2, mode="selective"), 2),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_equals_a_plain_loop(name: str) -> None:
    config, accumulation = CASES[name]
    world_size = config.parallelism.dp_replicate * config.parallelism.dp_shard
    for result in run_ranks(world_size, our_run, config, STEPS, accumulation):
        close(result, plain_run(STEPS))


BFLOAT16: dict[str, tuple[Config, int, int, torch.dtype]] = {
    name: (config_for(*mesh, param_dtype="bfloat16", **options), accumulation, pieces, torch.float32)
    for name, mesh, options, accumulation, pieces in (
        ("one process, weights cast once", (1, 1), {"reshard_after_forward": False}, 4, 4),
        ("FSDP 2, summed once", (1, 2), {"sync_every_microbatch": False}, 2, 4),
        ("FSDP 2, own reduce-scatter", (1, 2), {"reduce_scatter": "all_to_all"}, 1, 2),
        ("HSDP 2 x 2", (2, 2), {}, 1, 4),
    )
}
IN_LOW = config_for(1, 2, param_dtype="bfloat16")
IN_LOW = replace(IN_LOW, training=replace(IN_LOW.training, reduce_dtype="bfloat16"))
BFLOAT16["FSDP 2, summed in bfloat16"] = IN_LOW, 1, 2, torch.bfloat16


@pytest.mark.parametrize("name", BFLOAT16)
def test_gradients_in_bfloat16_are_summed_in_the_type_that_is_asked_for(name: str) -> None:
    config, accumulation, pieces, sum_dtype = BFLOAT16[name]
    world_size = config.parallelism.dp_replicate * config.parallelism.dp_shard
    expected = plain_run(STEPS, dtype=torch.bfloat16, pieces=pieces, sum_dtype=sum_dtype)
    for result in run_ranks(world_size, our_run, config, STEPS, accumulation):
        if world_size == 1:  # which adds up the rows of its embedding in float32
            rows = "tok_embeddings.weight"
            assert (result["grads"][rows] - expected["grads"][rows]).norm() < 2**-8 * expected["grads"][rows].norm()
            result["grads"].pop(rows)
        close(result, expected, loss_tolerance=3e-5, grad_tolerance=1e-7)


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


def test_compiled_by_inductor() -> None:
    """Fused kernels round differently: 1e-5 over 5 steps is what is promised."""
    for result in run_ranks(2, our_run, config_for(1, 2, compile="inductor"), STEPS, 1):
        close(result, plain_run(STEPS), loss_tolerance=1e-5)


def test_tied_embeddings() -> None:
    config = config_for(1, 2, loss_chunks=4)
    for result in run_ranks(2, partial(our_run, tie_embeddings=True), config, STEPS, 2):
        close(result, plain_run(STEPS, tie_embeddings=True))
        assert "output.weight" not in result["weights"]


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


class LargestLogits(TorchDispatchMode):
    """Most rows of anything as wide as the vocabulary."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.ndim and result.shape[-1] == VOCAB:
            self.rows = max(self.rows, result.numel() // VOCAB)
        return result


def run_logits(config: Config) -> int:
    with LargestLogits() as logits:
        our_run(config, 1, 1)
    return logits.rows


def test_only_a_chunk_of_the_logits_exists_at_a_time() -> None:
    assert run_ranks(1, run_logits, config_for(1, 1)) == [GLOBAL_BATCH * SEQ_LEN]
    assert run_ranks(1, run_logits, config_for(1, 1, loss_chunks=4)) == [GLOBAL_BATCH * SEQ_LEN // 4]


def test_initial_weights_do_not_depend_on_the_sharding() -> None:
    """Three ranks share no weight evenly; `close` compares the others'."""
    model = Llama(FLAVOR)
    init_weights(model, torch.device("cpu"), seed=SEED)
    for result in run_ranks(3, our_run, config_for(1, 3), 1, 1):
        for name, parameter in model.named_parameters():
            assert torch.equal(result["init"][name], parameter), name


class CountOps(TorchDispatchMode):
    """Counts what is really computed, recomputation included."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def run_counted(mode: str, compile: str = "", **options: Any) -> tuple[float, int, int, int]:
    """Loss of one step, the bytes autograd keeps for backward, matmuls and attention forwards computed."""
    checkpointing = ActivationCheckpoint(mode=mode, **options)
    config = replace(config_for(1, 1, compile), activation_checkpoint=checkpointing)
    config = replace(config, training=Training(seq_len=SEQ_LEN))
    kept: dict[int, int] = {}

    def pack(x: torch.Tensor) -> torch.Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    ops = CountOps()  # under which nothing would be compiled
    with nullcontext() if compile else ops, torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        losses = our_run(config, 1, 1)["losses"]
    attention = sum(n for name, n in ops.counts.items() if "attention" in name and "backward" not in name)
    return losses[1], sum(kept.values()), ops.counts["mm"], attention


def test_activation_checkpointing_keeps_less_recomputes_what_it_says_and_changes_nothing() -> None:
    (none,), (selective,), (full,) = (run_ranks(1, run_counted, mode) for mode in ("none", "selective", "full"))
    assert none[0] == selective[0] == full[0]
    assert full[1] < 0.5 * none[1]
    matmuls = 6 * FLAVOR.n_layers  # of the blocks' forward; w2, the seventh and last, no backward needs again
    assert full[2] - none[2] == matmuls
    assert selective[2] - none[2] == matmuls / 2
    assert full[3] - none[3] == FLAVOR.n_layers
    assert selective[3] == none[3], "selective keeps attention"
