"""The operators of float8/casts.py for CUDA: Triton kernels that cast to float8, fused with what makes the values.

Shapes and names:
    M rows   N columns   tile [BM, BN] of one program   rows: as they lie, [M, N]   columns: transposed, [N, M]
Values are rounded to the type of their input before they are cast, so that the bytes are those of an unfused cast.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from float8 import casts

E4M3_MAX = tl.constexpr(448.0)
E5M2_MAX = tl.constexpr(57344.0)
SMALLEST = tl.constexpr(9.999999960041972e-13)  # 1e-12 in float32: below it torchao counts a maximum as 1e-12


@triton.jit
def _tiles(a_ptr, b_ptr, c_ptr, rows, cols, M, N, SOURCE: tl.constexpr):
    """The tiles of a source at these rows and columns; the second and third only of "gate_grad". Outside they are 0."""
    here = (rows < M)[:, None] & (cols < N)[None, :]
    places = rows.to(tl.int64)[:, None] * N + cols[None, :]  # a tensor may have more values than int32 counts
    a = tl.load(a_ptr + places, mask=here, other=0.0).to(tl.float32)
    if SOURCE == "copy":
        first = a
    elif SOURCE == "norm":
        rstd = tl.load(b_ptr + rows, mask=rows < M, other=0.0)
        weight = tl.load(c_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)
        first = a * rstd[:, None] * weight[None, :]
    else:
        b = tl.load(b_ptr + places, mask=here, other=0.0).to(tl.float32)
        sigmoid = 1 / (1 + tl.exp(-a))
        first = a * sigmoid * b
    second, third = first, first
    if SOURCE == "gate_grad":
        c = tl.load(c_ptr + places, mask=here, other=0.0).to(tl.float32)
        first = c * b * sigmoid * (1 + a * (1 - sigmoid))
        second = c * a * sigmoid
    dtype = a_ptr.dtype.element_ty
    return first.to(dtype), second.to(dtype), third.to(dtype)


@triton.jit
def maxima_kernel(
    a_ptr, b_ptr, c_ptr, M, N, maxima_ptr, SOURCE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr
):  # fmt: skip
    """Raise maxima [outputs, M + N], of the rows followed by the columns, by those of a tile."""
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    cols = tl.program_id(1) * BN + tl.arange(0, BN)
    tiles = _tiles(a_ptr, b_ptr, c_ptr, rows, cols, M, N, SOURCE)
    for i in tl.static_range(3 if SOURCE == "gate_grad" else 1):
        size = tl.abs(tiles[i].to(tl.float32))
        lines_ptr = maxima_ptr + i * (M + N)
        tl.atomic_max(lines_ptr + rows, tl.max(size, axis=1), mask=rows < M)
        tl.atomic_max(lines_ptr + M + cols, tl.max(size, axis=0), mask=cols < N)


@triton.jit
def _scale(maximum, RECIPE: tl.constexpr, E5M2: tl.constexpr):
    """The factor by which values with this maximum fill float8's range, and its inverse, to the bit as torchao's.

    Powers of two are found without a division, which would cost more than all casts: 448 is 1.75 x 2^8.
    """
    if RECIPE == "tensorwise":
        largest: tl.constexpr = E5M2_MAX if E5M2 else E4M3_MAX
        scale = tl.where(maximum <= SMALLEST, largest * 1e12, tl.math.div_rn(largest, maximum))  # of NaN: NaN
        inverse = tl.math.div_rn(1.0, scale)
    else:
        bits = tl.maximum(maximum, SMALLEST).to(tl.int32, bitcast=True)
        exponent = (bits + 0x1FFFFF) & 0x7F800000  # one more for a mantissa over 1.75
        finite = bits < 0x7F800000  # otherwise all becomes NaN
        scale = tl.where(finite, ((262 - (exponent >> 23)) << 23).to(tl.float32, bitcast=True), 0.0)
        inverse = tl.where(finite, (((exponent >> 23) - 8) << 23).to(tl.float32, bitcast=True), float("inf"))
    return scale, inverse


@triton.jit
def _store_rows(
    tile, maximum, data_ptr, scales_ptr, row_block, col_block, rows, cols, M, N,
    RECIPE: tl.constexpr, E5M2: tl.constexpr,
):  # fmt: skip
    """Cast a tile with its `maximum`, one or of each row, into these rows and columns of [M, N]; store its scales, too.

    For the columns the caller swaps all that belongs to rows and columns, and gives the transposed tile. The cast
    saturates and keeps NaN; a clamp before it might not, and transposed miscompiles.
    """
    inside = rows < M
    scale, inverse = _scale(maximum, RECIPE, E5M2)
    if RECIPE == "tensorwise":
        tl.store(scales_ptr, inverse, mask=row_block + col_block == 0)
    else:
        tl.store(scales_ptr + rows, inverse, mask=inside & (col_block + 0 * rows == 0))
        scale = scale[:, None]
    data_ptr += row_block.to(tl.int64) * rows.shape[0] * N
    places = tl.arange(0, rows.shape[0])[:, None] * N + cols[None, :]
    quantized = (tile.to(tl.float32) * scale).to(tl.float8e5 if E5M2 else tl.float8e4nv)
    tl.store(data_ptr + places, quantized.to(tl.uint8, bitcast=True), mask=inside[:, None] & (cols < N)[None, :])


@triton.jit
def cast_kernel(
    a_ptr, b_ptr, c_ptr, M, N, maxima_ptr, rows_ptr, row_scales_ptr, columns_ptr, column_scales_ptr,
    row_scales, column_scales,
    RECIPE: tl.constexpr, E5M2: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, SOURCE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """rows [outputs, M, N] and columns [outputs, N, M] as bytes; `row_scales` and `column_scales` of each output."""
    row_block = tl.program_id(0)
    col_block = tl.program_id(1)
    rows = row_block * BM + tl.arange(0, BM)
    cols = col_block * BN + tl.arange(0, BN)
    tiles = _tiles(a_ptr, b_ptr, c_ptr, rows, cols, M, N, SOURCE)
    for i in tl.static_range(3 if SOURCE == "gate_grad" else 1):
        start = tl.cast(M, tl.int64) * N * i
        if RECIPE == "rowwise":
            lines_ptr = maxima_ptr + i * (M + N)
            of_rows = tl.load(lines_ptr + rows, mask=rows < M, other=0.0)
            of_columns = tl.load(lines_ptr + M + cols, mask=cols < N, other=0.0)
        else:
            of_rows = tl.load(maxima_ptr + i)
            of_columns = of_rows
        if ROWS and i < 2:
            _store_rows(
                tiles[i], of_rows, rows_ptr + start, row_scales_ptr + i * row_scales,
                row_block, col_block, rows, cols, M, N, RECIPE, E5M2 and i < 2,
            )  # fmt: skip
        if COLUMNS:
            _store_rows(
                tl.trans(tiles[i]), of_columns, columns_ptr + start, column_scales_ptr + i * column_scales,
                col_block, row_block, cols, rows, N, M, RECIPE, E5M2 and i < 2,
            )  # fmt: skip


def tile_shape(source: str, recipe: str, collects: bool = False) -> tuple[int, int, int]:
    """Rows and columns of a tile, and warps: the most that fits into registers, by ptxas for sm_90."""
    warps = 16 if (source, recipe) == ("gate_grad", "rowwise") else 8
    return (32, 256, warps) if collects else (64, 128, warps)


def _launch(kernel: Any, tile: tuple[int, int, int], source: str, tensors: list[Tensor], *arguments: Any) -> None:
    M, N = tensors[0].shape
    BM, BN, warps = tile
    grid = (triton.cdiv(M, BM), triton.cdiv(N, BN))
    a, b, c, *_ = tensors * 3  # those that the source does not have are not read
    kernel[grid](a, b, c, M, N, *arguments, SOURCE=source, BM=BM, BN=BN, num_warps=warps)


@casts.to_float8.register_kernel("cuda")
def to_float8(
    source: str, recipe: str, tensors: list[Tensor], maxima: Tensor, e5m2: bool, rows: bool, columns: bool
) -> list[Tensor]:
    found = casts.empty(source, recipe, tensors, maxima, e5m2, rows, columns)
    if recipe == "rowwise":
        maxima = maxima.new_zeros(3, sum(tensors[0].shape))
        _launch(maxima_kernel, tile_shape(source, recipe, collects=True), source, tensors, maxima)
    sizes = found[1].stride(0), found[3].stride(0)
    _launch(
        cast_kernel, tile_shape(source, recipe), source, tensors, maxima, *found, *sizes, recipe, e5m2, rows, columns
    )
    return found
