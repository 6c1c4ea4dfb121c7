"""Weights in float8: their scales if FSDP2 gathers them, their cast if one rank trains alone, their copies."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._functorch import config as compiler
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.checkpoint import CheckpointPolicy

from config import Compile, Config, precomputes_scales


def precompute_scales(parts: list[nn.Module], config: Config) -> None:
    """Compute the scales of all float8 weights with one all-reduce per part, if the config uses such scales.

    Call it whenever the weights have changed, after an optimizer step or a load: FSDP2 casts by the scales it last
    found and does not look at the weights again.
    """
    if not precomputes_scales(config):
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

    compiled = torch.compile(quantize, backend=compile.backend, dynamic=False) if compile.enable else quantize

    def cast(weight: Tensor) -> Tensor:
        if not is_traceable_wrapper_subclass(weight):
            return weight.detach().to(dtype)
        from torchao.float8.float8_training_tensor import Float8TrainingTensor, GemmInputRole

        data, scale = compiled(weight._tensor, weight._dtype)
        return Float8TrainingTensor(data, scale, dtype, weight._linear_mm_config, GemmInputRole.WEIGHT)

    return cast


def keep_no_copies() -> None:
    """Make the compiler copy weights in the backward, not in the forward. A setting for the whole process.

    The matmul for an input's gradient reads the weight by columns, so a float8 one is copied for it. The compiler would
    do that in the forward and keep the copies of all layers, whole, for the backward, though FSDP2 frees the weights:
    56 GB for the feed-forwards of the 70B. It knows that weights cost nothing to keep, but looks for them at the wrong
    places once torchao's are taken apart into data and scale (torch 2.11 to 2.13).
    """
    compiler.joint_custom_pass = _copy_in_backward


def _copy_in_backward(joint: fx.GraphModule, _: Any) -> fx.GraphModule:
    for copy in joint.graph.find_nodes(op="call_function", target=torch.ops.aten.clone.default):
        source = copy.args[0]
        while source.op != "placeholder" and len(source.all_input_nodes) == 1:  # a transposed weight, say
            (source,) = source.all_input_nodes
        if source.op == "placeholder" and source.meta["val"].dtype in (torch.float8_e4m3fn, torch.float8_e4m3fnuz):
            copy.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
    return joint
