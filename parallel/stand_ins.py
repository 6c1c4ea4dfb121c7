"""Code that stands in for a piece of the model or the loss is tried beside it, and refused if that was edited.

A fork edits `FeedForward.forward`, say, and trains with kernels that compute the SwiGLU of before. So at the start each
stand-in is compared with what it replaces on a few numbers, forward and backward. What an edit does only for other
numbers, or among several ranks, `python -m tools.same` shows.
"""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from config import ConfigError

TOLERANCE = 1e-4  # of float32, relative and absolute


def check_stand_in(
    what: str,
    edited: Callable[..., Tensor],
    stand_in: Callable[..., Tensor],
    tensors: Sequence[Tensor],
    name: str,
    instead: str,
) -> None:
    """Raises ConfigError if `edited` and `stand_in` compute other things of `tensors`, or have other gradients.

    `what` names the code that may have been edited, `name` the stand-in, `instead` the setting without it.
    """
    reason = "computes otherwise"
    try:
        found = _compute(edited, tensors)
    except Exception as error:  # whatever a fork's code may raise
        found = []
        reason = f"cannot be tried ({type(error).__name__}: {error})"
    expected = _compute(stand_in, tensors)
    if len(found) != len(expected) or not all(map(_is_close, found, expected)):
        raise ConfigError(f"{what}: {name} stands in for it and {reason}: set {instead}, or edit {name} alike")


def _compute(function: Callable[..., Tensor], tensors: Sequence[Tensor]) -> list[Tensor]:
    """The result, and the gradients of all tensors of floating point."""
    with torch.enable_grad(), torch.random.fork_rng(devices=[]):
        given = [x.detach().clone().requires_grad_(x.is_floating_point()) for x in tensors]
        result = function(*given)
        factors = torch.linspace(0.5, 1.5, result.numel()).view_as(result)
        trained = [x for x in given if x.requires_grad]
        gradients = torch.autograd.grad((result * factors).sum(), trained)
        return [result.detach(), *(gradient.to_dense() for gradient in gradients)]


def _is_close(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.allclose(a, b, rtol=TOLERANCE, atol=TOLERANCE)


def numbers(*shape: int) -> Tensor:
    """Normal numbers, the same in each call."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def with_parts(module: nn.Module, **parts: Any) -> Any:
    """A copy of a module with other weights or modules under these names, and its hooks."""
    found = copy.copy(module)
    found._parameters = dict(module._parameters)
    found._modules = dict(module._modules)
    for name, part in parts.items():
        found._parameters.pop(name, None)
        found._modules.pop(name, None)
        if isinstance(part, nn.Module):
            found._modules[name] = part
        else:
            found.__dict__[name] = part  # a tensor whose gradient is asked for
    return found
