"""Weights in float8: their scales if FSDP2 gathers them, their cast if one rank trains alone."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from config import Compile, Config
from float8.convert import gathers_float8


def precompute_scales(parts: list[nn.Module], config: Config) -> None:
    """Compute the scales of all weights that FSDP2 gathers in float8, with one all-reduce per part.

    Call it whenever the weights have changed, after an optimizer step or a load: FSDP2 casts by the scales it last
    found and does not look at the weights again.
    """
    # On their way from the host weights would lose their scales (torch 2.13).
    if not gathers_float8(config.float8) or config.parallelism.cpu_offload:
        return
    from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

    for part in parts:
        precompute_float8_dynamic_scale_for_fsdp(part)


def build_cast(dtype: torch.dtype, compile: Compile) -> Callable[[Tensor], Tensor]:
    """Build FSDP2's cast of a weight before a gather: to float8 if torchao has wrapped it for that, else to `dtype`.

    It is compiled if the model is: eager, it reads and writes the whole weight five times.
    """

    def quantize(weight: Tensor, low: torch.dtype) -> tuple[Tensor, Tensor]:
        from torchao.float8.float8_utils import tensor_to_scale, to_fp8_saturated

        scale = tensor_to_scale(weight, low)
        return to_fp8_saturated(weight * scale, low), scale

    compiled = quantize
    if compile.enable:
        compiled = torch.compile(quantize, backend=compile.backend, dynamic=False)

    def cast(weight: Tensor) -> Tensor:
        if not is_traceable_wrapper_subclass(weight):
            return weight.detach().to(dtype)
        from torchao.float8.float8_training_tensor import Float8TrainingTensor, GemmInputRole

        data, scale = compiled(weight._tensor, weight._dtype)
        return Float8TrainingTensor(data, scale, dtype, weight._linear_mm_config, GemmInputRole.WEIGHT)

    return cast
