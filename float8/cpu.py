"""Float8 matmuls on CPU, for trials and tests.

torch's own take only tensorwise scales (2.11). On a CPU with AMX torch (2.13) gives two e4m3 factors to oneDNN, which
has only slow reference code for them if the AMX tiles take no float8: 512 x 512 x 1024 took 22 s on Intel's Sapphire
Rapids, and 0.01 s as torch computes it on other CPUs. `scaled_mm` computes it so on all CPUs.
"""

import functools
import warnings

import torch
from torch import Tensor
from torch.library import Library


@functools.cache  # once per process
def replace_matmul() -> Library:
    """Make torch._scaled_mm use `scaled_mm` on CPU while the returned library lives: for good, since it is cached."""
    library = Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that a kernel is replaced
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
    """torch._scaled_mm, summed in float32. Returns (M, N).

    Scales have one element, or shapes (M, 1) and (1, N).

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
