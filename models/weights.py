"""What must be brought up to date whenever the weights have changed."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from config import Config
from float8.fsdp import build_cast, precompute_scales
from parallel.fsdp import keeps_copies


def build_refresh(parts: list[nn.Module], config: Config) -> Callable[[], None]:
    """A function to call whenever the weights have changed: after a load, an optimizer step, a meeting of islands.

    FSDP2 casts weights to float8 by the scales that it last found, and a rank alone computes with the copies that it
    last made: neither looks at the weights again.
    """
    cast = build_cast(getattr(torch, config.training.param_dtype), config.compile)

    def refresh() -> None:
        precompute_scales(parts, config)
        for part in parts:
            if not isinstance(part, FSDPModule) and keeps_copies(config):
                refresh_copies(part, cast)

    return refresh


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
