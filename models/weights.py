"""Initial weights that do not depend on how the model is sharded; copies and scales, to refresh after each change."""

import hashlib
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

from config import Config
from float8.convert import gathers_float8
from float8.fsdp import build_cast, precompute_scales
from parallel.gradients import build_add


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


def build_refresh(parts: list[nn.Module], config: Config) -> Callable[[], None]:
    """Build a function to call whenever the weights have changed: after an update, and after a load.

    Otherwise FSDP2 would cast weights to float8 by old scales, and a rank alone would compute with old copies.
    """
    cast = build_cast(getattr(torch, config.training.param_dtype), config.compile)
    add = build_add(config.compile)
    casts = config.training.param_dtype != "float32" or gathers_float8(config.float8)
    # A rank alone, without FSDP2, then casts its weights once a step, not at each use in each microbatch.
    keeps_copies = casts and (config.float8.enable or not config.parallelism.reshard_after_forward)

    def refresh() -> None:
        precompute_scales(parts, config)
        for part in parts:
            if keeps_copies and not isinstance(part, FSDPModule):
                refresh_copies(part, cast, add)

    return refresh


@torch.no_grad()
def refresh_copies(model: nn.Module, cast: Callable[[Tensor], Tensor], add: Callable[..., Tensor]) -> None:
    """Let every linear layer of `model` compute with `cast(weight)` until the next call.

    So a weight is cast once for all microbatches of a step, as by FSDP2 for ranks that share weights. Unlike FSDP2 it
    keeps no copies of gradients: `add` adds the copy's gradient, in its type, to the weight's as soon as it is there.
    """
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            weight = layer._parameters["weight"]
            assert weight is not None
            copy = cast(weight).requires_grad_(weight.requires_grad)
            if weight.requires_grad:
                copy.register_post_accumulate_grad_hook(partial(_hand_over, weight, add))
            # `layer.weight` finds this copy first. The parameter keeps its name for the optimizer and checkpoints.
            layer.__dict__["weight"] = copy


def _hand_over(weight: Tensor, add: Callable[..., Tensor], copy: Tensor) -> None:
    gradient = copy.grad
    copy.grad = None
    weight.grad = add(weight.grad, gradient, weight.dtype)
