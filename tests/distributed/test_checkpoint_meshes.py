"""The same names and values in every layout: replicas, tensor and pipeline parallel."""

import copy
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from checkpoint import CheckpointError
from checkpoint.lease import take_lease
from checkpoint.state import model_tensors, optimizer_tensors
from config import Checkpoint, Config
from optim import allocate_state
from tests.distributed.checkpoint_runs import Run, Tower, build_manager, full, same
from tests.harness import run_ranks


def plain(model):
    return [model]


def fsdp(model):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks.values():
        fully_shard(block, mesh=mesh)
    return [fully_shard(model, mesh=mesh)]


def hsdp(model):
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    return [fully_shard(model, mesh=mesh)]


def fsdp_and_tensor_parallel(model):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    return [fully_shard(_split(model, mesh["tp"]), mesh=mesh["dp_shard"])]


def pipeline_of_three_stages(model):
    """Rank 0 has the first block and the head, as two parts; rank 1 the second block."""
    stages = [copy.deepcopy(model) for _ in range(3)]
    del stages[0].blocks["1"], stages[0].head
    del stages[1].blocks["0"], stages[1].head
    del stages[2].blocks
    return [stages[0], stages[2]] if dist.get_rank() == 0 else [stages[1]]


def _split(model, mesh):
    plan = {
        "blocks.0.1": ColwiseParallel(output_layouts=Replicate()),
        "blocks.1.1": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }
    return parallelize_module(model, mesh, plan)


WAYS = [(fsdp, 3), (hsdp, 4), (fsdp_and_tensor_parallel, 4), (pipeline_of_three_stages, 2)]


def build(folder, parallelize, seed):
    torch.manual_seed(seed)
    model = Tower(rows=16)
    moments = {name: torch.randn_like(value) for name, value in model.named_parameters()}
    parts = parallelize(model)
    optimizer = torch.optim.AdamW([p for part in parts for p in part.parameters()])
    allocate_state(optimizer)
    for name, value in optimizer_tensors(parts, optimizer).items():
        parameter, _, key = name.rpartition(".")
        if key == "step":
            value.fill_(7)
            continue
        filled = moments[parameter] * (2 if key == "exp_avg_sq" else 1)
        if isinstance(value, DTensor):
            filled = torch.distributed.tensor.distribute_tensor(filled, value.device_mesh, value.placements)
        value.copy_(filled)
    return build_manager(Config(checkpoint=Checkpoint(folder=folder)), parts, optimizer)


def whole(manager):
    tensors = {**model_tensors(manager.model), **optimizer_tensors(manager.model, manager.optimizer)}
    return {name: full(value) for name, value in tensors.items()}


def write(folder, parallelize):
    manager = build(folder, parallelize, seed=0)
    manager.ranks.from_rank_0(partial(take_lease, manager.store, manager.start))
    manager.save(7)
    return whole(manager)


def read(folder, parallelize):
    manager = build(folder, parallelize, seed=1)
    assert manager.load() == 7
    return whole(manager)


@pytest.mark.parametrize(("parallelize", "world_size"), WAYS, ids=lambda value: getattr(value, "__name__", value))
def test_what_one_writes_another_reads(tmp_path, parallelize, world_size):
    """Each to plain and back: so each to each. Three ranks share the 16 rows of the head unevenly."""
    expected = run_ranks(1, write, str(tmp_path / "plain"), plain)[0]
    for tensors in run_ranks(world_size, read, str(tmp_path / "plain"), parallelize):
        assert tensors
        assert same(tensors, {name: expected[name] for name in tensors}) == []
    run_ranks(world_size, write, str(tmp_path / "other"), parallelize)
    assert same(run_ranks(1, read, str(tmp_path / "other"), plain)[0], expected) == []


def test_a_weight_may_have_its_first_gradient_after_a_save(tmp_path):
    """It has no state in the checkpoint, so it has none after a load, be it by a resume or a return within a start."""
    run = Run(tmp_path)
    run.model.head.bias.requires_grad_(False)
    run.train(0, 2)
    saved = run.everything()
    assert "head.bias.exp_avg" not in saved
    run.model.head.bias.requires_grad_(True)
    run.step()
    resumed = Run(tmp_path, seed=1)
    for loaded in (run, resumed):
        assert loaded.checkpoint.load() == 2
        assert same(loaded.everything(), saved) == []


def test_a_weight_with_part_of_its_state_is_refused(tmp_path):
    run = Run(tmp_path)
    run.checkpoint.load()
    run.step()
    del run.optimizer.state[run.model.head.bias]["exp_avg_sq"]
    run.checkpoint.save(1)
    with pytest.raises(CheckpointError, match=r"holds no head\.bias\.exp_avg_sq of the optimizer"):
        Run(tmp_path).checkpoint.load()


def test_state_that_differs_between_ranks_is_refused_before_anything_is_written(tmp_path):
    """A sum over own rows, plain or still to be added up, or no tensor."""
    run_ranks(2, keep_own_rows, str(tmp_path))
    assert list(tmp_path.iterdir()) == []


def keep_own_rows(folder):
    run = Run(folder, sharded=True)
    run.step()
    state = run.optimizer.state[run.model.blocks["0"][1].weight]
    mean = state["exp_avg"]
    for name, value in (("exp_avg_row", mean.to_local().sum(1)), ("exp_avg_column", mean.sum(0)), ("count", 1)):
        state[name] = value
        with pytest.raises(CheckpointError, match=rf"state blocks\.0\.1\.weight\.{name} must be a tensor and"):
            run.checkpoint.save(1)
        del state[name]
