"""Muon: its update beside torch's, what it sends, resumes; groups of weights."""

import copy
from unittest import mock

import pytest
import tomllib
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from checkpoint.manager import CheckpointManager
from config import Optimizer, from_dict, load_config, to_toml
from muon import GroupedOptimizer, orthogonalize
from optim import build_groups, build_optimizer, set_learning_rate
from tests.harness import run_ranks
from tests.runs import column, final_weights, flat, launch, run


@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16"])
def test_a_run_in_bfloat16_trains_by_torchs_muon(state_dtype, monkeypatch):
    """To the bit. A momentum in bfloat16 is rounded after the update has read it."""
    monkeypatch.setattr("muon.BATCH_NUMBERS", 99)  # fewer than a matrix has
    torch.manual_seed(0)
    ours = nn.ModuleDict({"layers": nn.Sequential(nn.Linear(24, 40, bias=False), nn.Linear(40, 24, bias=False))})
    torchs = copy.deepcopy(ours)
    settings = Optimizer(name="muon", state_dtype=state_dtype, lr=0.1, beta2=0.9)
    optimizer = build_optimizer([ours], settings, param_dtype="bfloat16")
    reference = torch.optim.Muon(torchs.parameters(), weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    for step in range(1, 4):
        set_learning_rate(optimizer, 0.1 / step)
        set_learning_rate(reference, 0.1 / step)
        for model in (ours, torchs):
            generator = torch.Generator().manual_seed(step)
            for weight in list(model.parameters())[:step]:  # the second has no gradient in the first step
                weight.grad = torch.randn(weight.shape, generator=generator)
        optimizer.step()
        reference.step()
        for state in reference.state.values():
            state["momentum_buffer"].copy_(state["momentum_buffer"].to(getattr(torch, state_dtype)))
    for weight, expected in zip(ours.parameters(), torchs.parameters(), strict=True):
        assert torch.equal(weight, expected)
        assert optimizer.state[weight]["momentum_buffer"].dtype == getattr(torch, state_dtype)


def numbers_sent():
    """Numbers that this rank of two shards x two replicas sends to others in a step, and matrices that it computes."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    weights = [distribute_tensor(torch.randn(8, 6), mesh, [Replicate(), Shard(0)]) for _ in range(8)]
    model = nn.ModuleDict({"layers": nn.ParameterList(nn.Parameter(weight) for weight in weights)})
    for weight in model.parameters():
        weight.grad = torch.ones_like(weight)
    optimizer = build_optimizer([model], Optimizer(name="muon"))
    sent, me, send = 0, dist.get_rank(), dist.all_to_all_single

    def count(received, data, sizes, sent_sizes, **options):
        nonlocal sent
        sent += sum(sent_sizes) - sent_sizes[me]
        return send(received, data, sizes, sent_sizes, **options)

    with (
        mock.patch.object(dist, "all_to_all_single", count),
        mock.patch("muon.orthogonalize", side_effect=orthogonalize) as computed,
    ):
        optimizer.step()
    return sent, [len(call.args[0]) for call in computed.call_args_list]


def test_each_matrix_is_computed_once_and_its_parts_travel_once():
    """Of 8 matrices of 48 numbers each rank owns 2, and computes them together.

    To owners: half of each from the other shard, on one of the replicas. Back: half to each of the three others.
    """
    sent, computed = zip(*run_ranks(4, numbers_sent), strict=True)
    assert computed == ([2], [2], [2], [2])
    assert sum(sent) == 8 * (24 + 3 * 24)
    assert max(sent) == min(sent)


def resume_without_a_step(arguments):
    """train.py in this process, whose optimizer must not step while a checkpoint is loaded."""
    load = CheckpointManager.load

    def load_without_a_step(manager):
        with mock.patch.object(GroupedOptimizer, "step", side_effect=AssertionError("a step")):
            return load(manager)

    with mock.patch.object(CheckpointManager, "load", load_without_a_step):
        run(arguments)


def test_a_run_is_resumed_in_another_layout(small, tmp_path):
    slower = '--optimizer.groups=[{pattern = "*.w[qk].weight", lr = 0.5}]'
    words = [*small, "--optimizer.name=muon", slower]
    launch(2, tmp_path / "whole", words)
    launch(2, tmp_path / "cut", words, 7)
    with pytest.raises(AssertionError, match=r"another optimizer; set optimizer\.name and groups as"):
        launch(2, tmp_path / "cut", small)
    by_tp = [*words, "--parallelism.tp=2", "--training.local_batch_size=4"]
    launch(2, tmp_path / "cut", by_tp, function=resume_without_a_step)
    torch.testing.assert_close(column(tmp_path / "cut", "loss"), column(tmp_path / "whole", "loss"), rtol=1e-5, atol=0)


def test_islands_train_with_muon(small, tmp_path):
    """The matrices of an island of two ranks are owned among these."""
    apart = ["--parallelism.dp_replicate=2", "--parallelism.local_steps=3", "--checkpoint.interval=6"]
    launch(4, tmp_path, [*small, "--optimizer.name=muon", "--validation.interval=6", *apart])
    losses = column(tmp_path, "loss")
    assert losses[-1] < losses[0] - 0.1
    weights = flat(final_weights(tmp_path, tmp_path))
    assert any(name.endswith("momentum_buffer") and value.any() for name, value in weights.items())


GROUPS = '[{pattern = "*norm*", lr = 0.5}, {pattern = "layers.1.*", weight_decay = 0, betas = [0.8]}]'


def test_groups_are_chosen_by_the_first_pattern():
    config = load_config(["--optimizer.name=muon", "--optimizer.lr=0.1", f"--optimizer.groups={GROUPS}"])
    assert from_dict(tomllib.loads(to_toml(config))) == config
    expected = {  # kind, rate, decay, first beta
        "tok_embeddings.weight": ("adamw", 0.1, 0.1, 0.9),
        "layers.0.wq.weight": ("muon", 0.1, 0.1, 0.95),
        "layers.0.norm.weight": ("adamw", 0.05, 0.0, 0.9),
        "layers.1.wq.weight": ("muon", 0.1, 0.0, 0.8),
        "layers.1.norm.weight": ("adamw", 0.05, 0.0, 0.9),
        "output.weight": ("adamw", 0.1, 0.1, 0.9),
    }
    weights = {name: torch.zeros(4) if "norm" in name else torch.zeros(4, 4) for name in expected}
    groups = build_groups(weights.items(), config.optimizer, whole=True)
    for name, weight in weights.items():
        (group,) = (group for group in groups if any(weight is own for own in group["params"]))
        assert (group["kind"], group["lr"], group["weight_decay"], group["betas"][0]) == expected[name], name
    model = nn.ModuleDict({"norm": nn.RMSNorm(4), "other": nn.Linear(4, 4)})
    assert set_learning_rate(build_optimizer([model], config.optimizer), 0.4) == {"lr": 0.4, "lr/*norm*": 0.2}
