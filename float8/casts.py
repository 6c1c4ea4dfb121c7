"""Casts to float8 in both layouts that matmuls take, as operators that torch.compile keeps whole.

Here they are plain torch; float8/kernels.py has them for CUDA. A source says what is cast:
    copy        x                      norm     of x, 1 / RMS and weight their product
    gate        silu(g) * u            gate_grad  of g, u and a gradient those of g and u, and silu(g) * u for `columns`
Shapes: M rows (tokens, or outputs of a weight), N columns. Scales are what to multiply float8 by.
    tensorwise  one, []                rowwise  powers of two, [M, 1]
"""

from collections.abc import Sequence
from itertools import zip_longest
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Cast(NamedTuple):
    """A matrix [M, N] in float8, and transposed: what matmuls sum along N and along M. Empty if not asked for."""

    rows: Tensor  # [M, N]
    row_scales: Tensor
    columns: Tensor  # [N, M]
    column_scales: Tensor


def cast(
    source: str, recipe: str, tensors: list[Tensor], gradient: bool = False, rows: bool = True, columns: bool = True
) -> list[Cast]:
    """The outputs of a source: one, of "gate_grad" three. With "tensorwise" a `gradient` gets e5m2, all else e4m3.

    The maxima for one scale are plain torch: of the rows and then of all, so that the compiler finds them in the kernel
    that makes a tensor, if it makes that one.
    """
    e5m2 = gradient and recipe == "tensorwise"
    maxima = tensors[0].new_empty(0, dtype=torch.float32)
    if recipe == "tensorwise":
        values = source_values(source, tensors)
        maxima = torch.stack([x.abs().amax(-1).amax() for x in values]).float()
    found = to_float8(source, recipe, tensors, maxima, e5m2, rows, columns)
    outputs = []
    for i, (row_data, row_scales, column_data, column_scales) in enumerate(
        zip_longest(*found, fillvalue=maxima.new_empty(0))
    ):
        dtype = _output_dtype(i, e5m2)
        outputs.append(Cast(row_data.view(dtype), row_scales, column_data.view(dtype), column_scales))
    return outputs


def _output_dtype(output: int, e5m2: bool) -> torch.dtype:
    """Of "gate_grad" the third output is no gradient."""
    return torch.float8_e5m2 if e5m2 and output < 2 else torch.float8_e4m3fn


def multiply(a: Sequence[Tensor], b: Sequence[Tensor], dtype: torch.dtype, fast: bool) -> Tensor:
    """a [M, K] times the transposed of b [N, K], each with its scales. `fast`: a GPU sums in fewer bits."""
    a_values, a_scales = a
    b_values, b_scales = b
    if b_scales.dim():
        b_scales = b_scales.t()
    return torch._scaled_mm(a_values, b_values.t(), a_scales, b_scales, out_dtype=dtype, use_fast_accum=fast)


@torch.library.custom_op("titanite::to_float8", mutates_args=(), device_types="cpu")
def to_float8(
    source: str, recipe: str, tensors: list[Tensor], maxima: Tensor, e5m2: bool, rows: bool, columns: bool
) -> list[Tensor]:
    """rows [outputs, M, N] as bytes, their scales, columns [outputs, N, M], theirs; none of what is not asked for.

    The `maxima` are of the whole outputs, for "tensorwise" alone.
    """
    found = empty(source, recipe, tensors, maxima, e5m2, rows, columns)
    for i, values in enumerate(source_values(source, tensors)):
        dtype = _output_dtype(i, e5m2)
        for laid_out, data, scales in ((values, *found[:2]), (values.t(), *found[2:])):
            if i < len(data):
                quantized, scales[i] = _quantize(recipe, laid_out, maxima[i : i + 1], dtype)
                data[i] = quantized.view(torch.uint8)
    return found


@to_float8.register_fake
def empty(
    source: str, recipe: str, tensors: list[Tensor], maxima: Tensor, e5m2: bool, rows: bool, columns: bool
) -> list[Tensor]:
    """What `to_float8` returns, unfilled."""
    x = tensors[0]
    M, N = x.shape
    row_outputs, column_outputs = (2, 3) if source == "gate_grad" else (1, 1)
    return [
        *_empty_layout(recipe, x, rows * row_outputs, M, N),
        *_empty_layout(recipe, x, columns * column_outputs, N, M),
    ]


def _empty_layout(recipe: str, x: Tensor, outputs: int, m: int, n: int) -> tuple[Tensor, Tensor]:
    """Bytes [outputs, m, n] and their scales, on the device of x."""
    shape = (m, 1) if recipe == "rowwise" else ()
    scales = x.new_empty(outputs, *shape, dtype=torch.float32)
    return x.new_empty(outputs, m, n, dtype=torch.uint8), scales


def source_values(source: str, tensors: list[Tensor]) -> list[Tensor]:
    """What a source casts, [M, N] each, rounded to the type of its first tensor."""
    a, *others = [tensor.float() for tensor in tensors]
    values = [a]
    if source == "norm":
        rstd, weight = others
        values = [a * rstd[:, None] * weight]
    elif source == "gate":
        values = [F.silu(a) * others[0]]
    elif source == "gate_grad":
        u, grad = others
        sigmoid = a.sigmoid()
        values = [grad * u * sigmoid * (1 + a * (1 - sigmoid)), grad * a * sigmoid, a * sigmoid * u]
    return [value.to(tensors[0].dtype) for value in values]


def _quantize(recipe: str, values: Tensor, maxima: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Values [M, N] in float8, and what to multiply them by; torchao's arithmetic, in float64."""
    values = values.float()
    largest = torch.finfo(dtype).max
    if recipe == "rowwise":
        maxima = values.abs().amax(1, keepdim=True)
    scale = (largest / maxima.double().clamp(min=1e-12)).float()
    if recipe == "rowwise":  # down to a power of two
        scale = (scale.view(torch.int32) & 0x7F800000).view(torch.float32)
    return (values * scale).clamp(-largest, largest).to(dtype), 1 / scale
