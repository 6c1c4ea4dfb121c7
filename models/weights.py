"""What must be brought up to date whenever the weights have changed."""

from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from config import Config
from float8.fsdp import build_cast, precompute_scales
from parallel.copies import refresh_copies
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
