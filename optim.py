"""The optimizer, the learning rate and gradient clipping."""

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import config as settings


def build_optimizer(model: nn.Module, optimizer: settings.Optimizer) -> torch.optim.Optimizer:
    """AdamW (Loshchilov and Hutter 2019), one fused kernel per step; norms and biases are not decayed."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": optimizer.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    betas = (optimizer.beta1, optimizer.beta2)
    return torch.optim.AdamW(groups, lr=optimizer.lr, betas=betas, eps=optimizer.eps, fused=True)


def learning_rate(step: int, steps: int, peak: float, schedule: settings.LRScheduler) -> float:
    """The learning rate of a step, the first being 1.

    A pure function of the step, so that a checkpoint need not hold a schedule. Linear warm-up, then
    `wsd`: the peak, and a linear decay over the last `decay_fraction` of all steps (Hu et al. 2024, MiniCPM);
    `cosine`: half a cosine from the end of the warm-up to the last step (Loshchilov and Hutter 2017).
    """
    if step <= schedule.warmup_steps:
        return peak * step / schedule.warmup_steps
    if schedule.schedule == "wsd":
        decay_steps = max(1, round(schedule.decay_fraction * steps))
        share = min(1.0, (steps - step) / decay_steps)
    else:
        done = (step - schedule.warmup_steps) / max(1, steps - schedule.warmup_steps)
        share = 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
    return peak * (schedule.min_lr_factor + (1 - schedule.min_lr_factor) * share)


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """The same rate for every group."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def clip_grad_norm_(parameters: Iterable[Tensor], max_norm: float) -> Tensor:
    """Scale gradients in place to a total norm of at most `max_norm` (0: leave them); return the norm before.

    The norm is over all ranks and stays on the device. A norm that is not finite spreads into every
    gradient, on every rank alike, for the loop to find.
    """
    parameters = [p for p in parameters if p.grad is not None]
    norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    if max_norm > 0:
        nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return norm
