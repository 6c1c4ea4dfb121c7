"""Initial weights that do not depend on how the model is sharded."""

import hashlib
from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor


@torch.no_grad()
def init_weights(
    model: nn.Module, device: torch.device, seed: int, on_progress: Callable[[], None] = lambda: None
) -> None:
    """Move a model from the meta device to `device`, and fill it with initial weights.

    Each parameter has its own generator, seeded by `seed` and its name. Every rank draws the full value and keeps its
    shard, so the weights are the same for any world size and mesh (on one type of device).
    `model.init_weight(name, weight, generator)` fills one.
    `on_progress` is called after each parameter: on the host a large model takes many minutes.
    """
    model.to_empty(device=device)
    for name, parameter in model.named_parameters():
        full = torch.empty(parameter.shape, device=device, dtype=parameter.dtype)
        digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
        generator = torch.Generator(device).manual_seed(int.from_bytes(digest, "little") >> 1)
        model.init_weight(name, full, generator)  # type: ignore[operator]
        if isinstance(parameter, DTensor):
            # src_data_rank=None: send nothing, since every rank has the same full tensor.
            full = distribute_tensor(full, parameter.device_mesh, parameter.placements, src_data_rank=None)
        parameter.copy_(full)
        on_progress()
