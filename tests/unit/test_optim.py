"""Optimizer, schedule, clipping and loss, each against a computation of its own."""

import copy
from itertools import pairwise
from typing import get_args, get_type_hints
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from config import Compile, LRScheduler, Optimizer
from loss import IGNORED, build_chunked_loss, build_loss, cross_entropy
from models.llama.model import Output
from optim import (
    allocate_state,
    build_optimizer,
    learning_rate,
    set_learning_rate,
)

ONE_RANK = mock.Mock(cp=mock.Mock(size=lambda: 1))  # a mesh of it


@pytest.mark.parametrize(("state_dtype", "compile"), [("float32", False), ("bfloat16", True)])
def test_adamw_follows_its_formula_and_spares_norms_and_biases(state_dtype, compile):
    """In float64, by hand. Means in bfloat16 are rounded after each step, which itself takes them whole."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 16), nn.RMSNorm(16))
    settings = Optimizer(weight_decay=0.5, beta1=0.8, beta2=0.9, eps=0.1, state_dtype=state_dtype)
    optimizer = build_optimizer([model], settings, Compile(enable=compile, backend="aot_eager"))
    dtype = getattr(torch, state_dtype)
    start = {n: p.detach().double().clone() for n, p in model.named_parameters()}
    expected = dict(start)
    m = {n: torch.zeros_like(p) for n, p in start.items()}
    v = copy.deepcopy(m)
    for step in range(1, 11):
        lr = 0.01 / step
        set_learning_rate(optimizer, lr)
        model(torch.randn(8, 32)).square().sum().backward()
        for name, p in model.named_parameters():
            grad = p.grad.double()
            new_m = 0.8 * m[name] + 0.2 * grad
            new_v = 0.9 * v[name] + 0.1 * grad**2
            m[name] = new_m.to(dtype).double()
            v[name] = new_v.to(dtype).double()
            decay = 0.5 if name == "0.weight" else 0.0
            update = (new_m / (1 - 0.8**step)) / ((new_v / (1 - 0.9**step)).sqrt() + 0.1)
            expected[name] = expected[name] * (1 - lr * decay) - lr * update
        optimizer.step()
        optimizer.zero_grad()
    for name, p in model.named_parameters():
        assert optimizer.state[p]["exp_avg"].dtype == optimizer.state[p]["exp_avg_sq"].dtype == dtype
        error = (p.detach() - expected[name]).norm() / (start[name] - expected[name]).norm()
        assert error < 1e-4, (name, error)


@pytest.mark.parametrize(
    ("schedule", "warmup", "decay"),
    [  # of 10 steps
        (LRScheduler(warmup_steps=20, decay_fraction=0.2), 9, 1),  # 20 : 2
        (LRScheduler(warmup_steps=6, decay_fraction=0.6), 5, 5),
        (LRScheduler(warmup_steps=2000, decay_fraction=0.0), 10, 0),
        (LRScheduler(schedule="cosine", warmup_steps=20), 10, 0),
        (LRScheduler(warmup_steps=7, decay_fraction=0.29), 7, 3),  # fits; 10 x 0.29 is rounded
    ],
)
def test_a_short_trial_warms_up_and_decays_in_proportion(schedule, warmup, decay):
    rates = [learning_rate(step, 10, 2.0, schedule) for step in range(1, 11)]
    rising = [2.0 * step / warmup for step in range(1, warmup + 1)]
    falling = [2.0 * (0.1 + 0.9 * (decay - step) / decay) for step in range(1, decay + 1)]
    assert rates == pytest.approx(rising + falling)


@pytest.mark.parametrize("decay", get_args(get_type_hints(LRScheduler)["decay"]))
def test_wsd_holds_and_ends_at_its_minimum(decay):
    schedule = LRScheduler(decay=decay, warmup_steps=10, decay_steps=40, min_lr_factor=0.25)
    rates = [learning_rate(step, 100, 2.0, schedule) for step in range(1, 101)]
    assert rates[9:60] == [2.0] * 51
    assert all(before > after for before, after in pairwise(rates[59:]))
    halfway = {"linear": 0.5, "sqrt": 1 - 0.5**0.5, "cosine": 0.5}[decay]
    assert (rates[79], rates[-1]) == pytest.approx((0.5 + 1.5 * halfway, 0.5))


def test_cosine_schedule_is_torchs_after_the_warmup():
    schedule = LRScheduler(schedule="cosine", warmup_steps=10, min_lr_factor=0.1)
    parameter = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=2.0)
    reference = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=90, eta_min=0.2)
    for step in range(10, 101):
        assert learning_rate(step, 100, 2.0, schedule) == pytest.approx(reference.get_last_lr()[0], abs=1e-12)
        optimizer.step()
        reference.step()


@pytest.mark.parametrize("compile", [False, True])
def test_loss_is_summed_over_trained_tokens_in_float32(compile):
    torch.manual_seed(0)
    logits = (4 * torch.randn(2, 6, 11)).bfloat16()
    labels = torch.randint(0, 11, (2, 6))
    labels[0, :3] = IGNORED
    loss, z = build_loss(Compile(enable=compile, backend="aot_eager"), z_loss=0.01)(logits, labels)
    exact = logits.double().flatten(0, 1)
    expected = F.cross_entropy(exact, labels.flatten(), ignore_index=IGNORED, reduction="sum")
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    log_sums = logits.double()[labels != IGNORED].exp().sum(-1).log()
    assert z.item() == pytest.approx(0.01 * log_sums.square().sum().item(), rel=1e-6)
    assert cross_entropy(logits, torch.full_like(labels, IGNORED)).item() == 0


@pytest.mark.parametrize("compile", [False, True])
def test_the_chunked_loss_sums_and_scales_in_float32(compile):
    """The gradients of each chunk are in bfloat16, as are the matmuls."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(1, 64, 16).bfloat16().requires_grad_(), torch.randn(32, 16).requires_grad_()
    labels = torch.randint(0, 32, (1, 64))
    loss = build_chunked_loss(Compile(enable=compile, backend="aot_eager"), ONE_RANK, chunks=8)
    expected_hidden = []
    expected_weight = torch.zeros(32, 16)
    for piece, label in zip(hidden[0].detach().split(8), labels[0].split(8), strict=True):
        h, low = piece.requires_grad_(), weight.detach().bfloat16().requires_grad_()
        F.cross_entropy(F.linear(h, low).float(), label, reduction="sum").backward()
        assert h.grad is not None
        assert low.grad is not None
        expected_hidden.append(h.grad.float())
        expected_weight += low.grad
    for factor in (torch.tensor(1.0), torch.tensor(1 / 3)):
        gradients = torch.autograd.grad(loss(labels, Output.compute, hidden, weight) * factor, (hidden, weight))
        assert torch.equal(gradients[0][0], (torch.cat(expected_hidden) * factor).bfloat16())
        assert torch.equal(gradients[1], expected_weight * factor)


def test_the_state_of_an_optimizer_of_a_fork_is_made_by_a_step_that_changes_nothing():
    weight = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    allocate_state(optimizer)
    assert torch.equal(weight, torch.ones(3))
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert torch.equal(optimizer.state[weight]["momentum_buffer"], torch.zeros(3))
