"""Weights in the type that blocks compute in, where one rank computes alone."""

from collections.abc import Callable

import torch
from torch import Tensor, nn


@torch.no_grad()
def refresh_copies(model: nn.Module, cast: Callable[[Tensor], Tensor]) -> None:
    """Let every linear layer of `model` compute with `cast(weight)`, till the next call.

    So a weight is cast once for all microbatches of a step, as FSDP2 does it for ranks that share weights, but without
    FSDP2's copies of gradients: that of the copy, in its type, is added to the weight's own as soon as it is there.
    """
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            weight = layer._parameters["weight"]
            assert weight is not None
            copy = cast(weight).requires_grad_(weight.requires_grad)
            if weight.requires_grad:
                copy.register_post_accumulate_grad_hook(_hand_over(weight))
            # Found as `layer.weight` before the parameter, which keeps its name for optimizer and checkpoints.
            layer.__dict__["weight"] = copy


def _hand_over(weight: Tensor) -> Callable[[Tensor], None]:
    def add(copy: Tensor) -> None:
        gradient, copy.grad = copy.grad, None
        assert gradient is not None
        weight.grad = gradient.to(weight.dtype) if weight.grad is None else weight.grad.add_(gradient)

    return add
