"""Scales of weights that FSDP2 gathers in float8."""

from torch import nn

from config import Config, precomputes_scales


def precompute_scales(parts: list[nn.Module], config: Config) -> None:
    """Compute the scales of all float8 weights, by one all-reduce a part; nothing to do where none is used.

    Call it whenever the weights have changed, which is after an optimizer step and after a load: FSDP2 casts by the
    scales it last found, without looking at the weights again.
    """
    if not precomputes_scales(config):
        return
    from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

    for part in parts:
        precompute_float8_dynamic_scale_for_fsdp(part)
