"""Float8 matmuls on CPU, for trials and tests.

torch's own take tensorwise scales only (2.11). And on a CPU with AMX (2.13) two factors in e4m3 are oneDNN's, which has
nothing but its reference for them where the tiles take no float8: on Intel's Sapphire Rapids one of 512 x 512 x 1024
took 22 s, and what torch does on other CPUs 0.01 s. That is done here, on all of them.
"""

import functools
import warnings

import torch
from torch import Tensor
from torch.library import Library


@functools.cache  # once in a process
def replace_matmul() -> Library:
    """Have torch._scaled_mm of CPU tensors computed by `scaled_mm`, as long as the result lives: for good, cached."""
    library = Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a kernel is replaced is meant
        library.impl("_scaled_mm", scaled_mm, "CPU")
        library.impl("_scaled_mm.out", scaled_mm_out, "CPU")
    return library


def scaled_mm(
    a_MK: Tensor,
    b_KN: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias_N: Tensor | None = None,
    scale_result: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
) -> Tensor:
    """torch._scaled_mm, summed in float32: scales of one element, or (M, 1) and (1, N); returns (M, N).

    Raises NotImplementedError for a `scale_result`, which only float8 results need.
    """
    if scale_result is not None:
        raise NotImplementedError("scale_result")
    y_MN = (a_MK.float() * scale_a) @ (b_KN.float() * scale_b)
    if bias_N is not None:
        y_MN += bias_N
    return y_MN.to(out_dtype or a_MK.dtype)


def scaled_mm_out(*arguments: object, out: Tensor, **named: object) -> Tensor:
    return out.copy_(scaled_mm(*arguments, **named))  # type: ignore[arg-type]
