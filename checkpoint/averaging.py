"""The mean of the weights in checkpoints."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from checkpoint.files import read_state
from checkpoint.manifest import Opened


@torch.no_grad()
def read_average(
    checkpoints: Sequence[Opened],
    factors: Sequence[float],
    tensors: Mapping[str, Tensor],
    on_progress: Callable[[], None] = lambda: None,
) -> None:
    """Fill weights, each or this rank's part, with the sum over checkpoints times their factors, one after another.

    Sums are in float64, of one weight at a time. Raises what `read_state` does; weights may then be filled in part.
    """
    for name, tensor in tensors.items():
        values = local_part(tensor)
        total = torch.zeros_like(values, dtype=torch.float64)
        for opened, factor in zip(checkpoints, factors, strict=True):
            read_state(opened, {"model": {name: tensor}}, on_progress)
            total.add_(values, alpha=factor)
        values.copy_(total)


def local_part(tensor: Tensor) -> Tensor:
    """What this rank has of a tensor, sharing memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
