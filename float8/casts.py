"""Casts to float8 in both layouts that matmuls take, as operators that torch.compile keeps whole.

Here they are plain torch; float8/kernels.py has them for CUDA. A source says what is cast:
    copy        x                      norm     of x, 1 / RMS and weight their product
    gate        silu(g) * u            gate_grad  of g, u and a gradient those of g and u, and silu(g) * u for `columns`
Shapes: M rows (tokens, or outputs of a weight), N columns. Scales are what to multiply float8 by.
    tensorwise  one, []                rowwise  powers of two, [M, 1]
    blockwise   of 1 x 128, [M, N / 128], column by column        squares  of 128 x 128, [M / 128, N / 128]
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 128


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
    elif recipe == "rowwise":
        maxima = line_maxima(source, tensors)
    found = to_float8(source, recipe, tensors, maxima, e5m2, rows, columns)
    outputs = []
    for i in range(max(len(found[0]), len(found[2]))):
        own = Cast(*(part[i] if i < len(part) else part for part in found))
        dtype = _output_dtype(i, e5m2)
        outputs.append(own._replace(rows=own.rows.view(dtype), columns=own.columns.view(dtype)))
    return outputs


def _output_dtype(output: int, e5m2: bool) -> torch.dtype:
    """Of "gate_grad" the third output is no gradient."""
    return torch.float8_e5m2 if e5m2 and output < 2 else torch.float8_e4m3fn


def multiply(a: Sequence[Tensor], b: Sequence[Tensor], dtype: torch.dtype, fast: bool) -> Tensor:
    """a [M, K] times the transposed of b [N, K], each with its scales. `fast`: a GPU sums in fewer bits.

    Raises ValueError for squares of b whose number along K is no multiple of 4, with which cuBLASLt is silently wrong.
    """
    values, scales = b
    if scales.dim():
        lines, blocks = scales.shape
        if lines < values.shape[0] and blocks % 4:
            raise ValueError(f"{tuple(values.shape)} in float8: {blocks} blocks along the sum, not a multiple of 4")
        scales = scales.t()
    rows = a[0].shape[0]
    a_values, a_scales = _rows_in_fours(*a)
    product = torch._scaled_mm(a_values, values.t(), a_scales, scales, out_dtype=dtype, use_fast_accum=fast)
    if a_values is a[0]:
        return product
    return product[:rows]


def _rows_in_fours(values: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Values [M, K] whose scales are of blocks, with zeros to a multiple of 4 rows, as cuBLASLt needs it.

    Only a forward without gradients, as of a sample's last token, has another number of rows.
    """
    missing = -values.shape[0] % 4
    if not missing or scales.dim() == 0 or scales.shape[1] == 1:
        return values, scales
    padded = F.pad(values.view(torch.uint8), (0, 0, 0, missing)).view(values.dtype)
    return padded, F.pad(scales.t(), (0, missing)).t()


@torch.library.custom_op("titanite::line_maxima", mutates_args=(), device_types="cpu")
def line_maxima(source: str, tensors: list[Tensor]) -> Tensor:
    """Largest absolute values [outputs, M + N] of the rows of a source, followed by those of the columns, float32."""
    sizes = [values.float().abs() for values in source_values(source, tensors)]
    return torch.stack([torch.cat((size.amax(1), size.amax(0))) for size in sizes])


@line_maxima.register_fake
def empty_maxima(source: str, tensors: list[Tensor]) -> Tensor:
    outputs = 3 if source == "gate_grad" else 1
    return tensors[0].new_empty(outputs, sum(tensors[0].shape), dtype=torch.float32)


@torch.library.custom_op("titanite::to_float8", mutates_args=(), device_types="cpu")
def to_float8(
    source: str, recipe: str, tensors: list[Tensor], maxima: Tensor, e5m2: bool, rows: bool, columns: bool
) -> list[Tensor]:
    """rows [outputs, M, N] as bytes, their scales, columns [outputs, N, M], theirs; none of what is not asked for."""
    found = empty(source, recipe, tensors, maxima, e5m2, rows, columns)
    row_data, row_scales, column_data, column_scales = found
    M, N = tensors[0].shape
    for i, values in enumerate(source_values(source, tensors)):
        dtype = _output_dtype(i, e5m2)
        own_maxima = maxima[i : i + 1].flatten()
        if i < len(row_data):
            quantized, row_scales[i] = _quantize(recipe, values, own_maxima[:M], dtype)
            row_data[i] = quantized.view(torch.uint8)
        if i < len(column_data):
            quantized, column_scales[i] = _quantize(recipe, values.t(), own_maxima[-N:], dtype)
            column_data[i] = quantized.view(torch.uint8)
    return found


@to_float8.register_fake
def empty(
    source: str, recipe: str, tensors: list[Tensor], maxima: Tensor, e5m2: bool, rows: bool, columns: bool
) -> list[Tensor]:
    """What `to_float8` returns, unfilled."""
    x = tensors[0]
    M, N = x.shape
    is_gate_grad = source == "gate_grad"
    row_outputs = (2 if is_gate_grad else 1) if rows else 0
    column_outputs = (3 if is_gate_grad else 1) if columns else 0
    return [*_empty_layout(recipe, x, row_outputs, M, N), *_empty_layout(recipe, x, column_outputs, N, M)]


def _empty_layout(recipe: str, x: Tensor, outputs: int, m: int, n: int) -> tuple[Tensor, Tensor]:
    """Bytes [outputs, m, n] and their scales, on the device of x."""
    blocks = -(-n // BLOCK)
    shapes = {"tensorwise": (), "rowwise": (m, 1), "blockwise": (blocks, m), "squares": (-(-m // BLOCK), blocks)}
    scales = x.new_empty(outputs, *shapes[recipe], dtype=torch.float32)
    if recipe == "blockwise":
        scales = scales.mT
    return x.new_empty(outputs, m, n, dtype=torch.uint8), scales


def source_values(source: str, tensors: list[Tensor]) -> list[Tensor]:
    """What a source casts, [M, N] each, rounded to the type of its first tensor."""
    a, *others = (tensor.float() for tensor in tensors)
    values = [a]
    if source == "norm":
        values = [a * others[0][:, None] * others[1]]
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
    if recipe == "squares":
        maxima = values.abs().unflatten(0, (-1, BLOCK)).unflatten(-1, (-1, BLOCK)).amax((1, 3))
    elif recipe == "blockwise":
        maxima = values.abs().unflatten(-1, (-1, BLOCK)).amax(-1)
    elif recipe == "rowwise":
        maxima = maxima[:, None]
    else:
        maxima = maxima[0]
    scale = (largest / maxima.double().clamp(min=1e-12)).float()
    if recipe != "tensorwise":  # down to a power of two
        scale = (scale.view(torch.int32) & 0x7F800000).view(torch.float32)
    spread = scale
    if recipe in ("blockwise", "squares"):
        spread = spread.repeat_interleave(BLOCK, 1)
    if recipe == "squares":
        spread = spread.repeat_interleave(BLOCK, 0)
    return (values * spread).clamp(-largest, largest).to(dtype), 1 / scale
