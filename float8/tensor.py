"""Tensor parallelism that gathers activations in float8.

torchao's parallel styles cast to float8 before they gather: half the bytes travel, and several matmuls share one cast.
They need one scale for the whole tensor, so they are only for the tensorwise recipe.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
)

from config import Float8
from float8.convert import ONE_SCALE, own_kernels


def gathers_activations(float8: Float8) -> bool:
    """Whether tensor parallelism gathers the inputs of the converted layers in float8."""
    return float8.enable and float8.recipe == ONE_SCALE and not own_kernels(float8)


def float8_plan(module: nn.Module, plan: Mapping[str, ParallelStyle], device_type: str) -> dict[str, ParallelStyle]:
    """`plan` with torchao's float8 styles for the converted layers of `module`.

    A gathered input is cast once for all layers that read it. It stays in high precision unless all of them are
    converted and have the plain style ColwiseParallel; a model's own styles are kept.
    """
    from torchao.float8.float8_linear import Float8Linear
    from torchao.float8.float8_tensor_parallel import (
        Float8ColwiseParallel,
        Float8RowwiseParallel,
        PrepareFloat8ModuleInput,
    )

    if device_type == "cpu":
        _gather_as_bytes()
    converted = {name for name, part in module.named_modules() if isinstance(part, Float8Linear)}
    changed = dict(plan)
    for name, style in plan.items():
        if type(style) is RowwiseParallel and name in converted:
            changed[name] = Float8RowwiseParallel(
                output_layouts=style.output_layouts[0], use_local_output=style.use_local_output
            )
        if type(style) is not PrepareModuleInput:
            continue
        inside = {layer: own for layer, own in plan.items() if layer.startswith(f"{name}.")}
        readers = {
            layer: own for layer, own in inside.items() if not isinstance(own, (RowwiseParallel, SequenceParallel))
        }
        if any(type(own) is not ColwiseParallel or layer not in converted for layer, own in readers.items()):
            continue
        changed[name] = PrepareFloat8ModuleInput(
            input_layouts=style.input_layouts, desired_input_layouts=style.desired_input_layouts
        )
        for layer, own in readers.items():
            assert isinstance(own, ColwiseParallel)
            changed[layer] = Float8ColwiseParallel(
                output_layouts=own.output_layouts[0], use_local_output=own.use_local_output
            )
    return changed


def _gather_as_bytes() -> None:
    """Send float8 as bytes, since gloo cannot send float8. Replaces torchao's handlers of two operators."""
    from torchao.float8.float8_ops import FLOAT8_OPS_TABLE
    from torchao.float8.float8_training_tensor import Float8TrainingTensor

    def carry(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Any:
        x, *rest = args
        sent = x._data.contiguous().view(torch.uint8)
        data = operator(sent, *rest, **(kwargs or {})).view(x._data.dtype)
        return Float8TrainingTensor(data, x._scale, x._orig_dtype, x._linear_mm_config, x._gemm_input_role)

    functional = torch.ops._c10d_functional
    for operator in (functional.all_gather_into_tensor.default, functional.wait_tensor.default):
        FLOAT8_OPS_TABLE[operator] = carry
