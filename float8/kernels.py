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

COPY = tl.constexpr(0)
NORM = tl.constexpr(1)
GATE = tl.constexpr(2)
GATE_GRAD = tl.constexpr(3)
SOURCES = {"copy": COPY, "norm": NORM, "gate": GATE, "gate_grad": GATE_GRAD}
TENSOR = tl.constexpr(0)
ROW = tl.constexpr(1)
BLOCK = tl.constexpr(2)
SQUARE = tl.constexpr(3)
RECIPES = {"tensorwise": TENSOR, "rowwise": ROW, "blockwise": BLOCK, "squares": SQUARE}
E4M3_MAX = tl.constexpr(448.0)
E5M2_MAX = tl.constexpr(57344.0)
SMALLEST = tl.constexpr(9.999999960041972e-13)  # 1e-12 in float32: below it torchao counts a maximum as 1e-12


@triton.jit
def _tiles(a_ptr, b_ptr, c_ptr, row0, rows, cols, M, N, SOURCE: tl.constexpr):
    """The tiles of a source, float32 [BM, BN]; the second and third only of GATE_GRAD. Outside of [M, N] they are 0."""
    here = (row0 + rows < M)[:, None] & (cols < N)[None, :]
    start = row0.to(tl.int64) * N  # a whole tensor may have more values than int32 counts
    offsets = rows[:, None] * N + cols[None, :]
    a = tl.load(a_ptr + start + offsets, mask=here, other=0.0).to(tl.float32)
    first = a
    if SOURCE == NORM:
        rstd = tl.load(b_ptr + row0 + rows, mask=row0 + rows < M, other=0.0)
        first = a * rstd[:, None] * tl.load(c_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)[None, :]
    if SOURCE == GATE or SOURCE == GATE_GRAD:  # noqa: SIM109
        b = tl.load(b_ptr + start + offsets, mask=here, other=0.0).to(tl.float32)
        sigmoid = 1 / (1 + tl.exp(-a))
        first = a * sigmoid * b
    second, third = first, first
    if SOURCE == GATE_GRAD:
        c = tl.load(c_ptr + start + offsets, mask=here, other=0.0).to(tl.float32)
        first = c * b * sigmoid * (1 + a * (1 - sigmoid))
        second = c * a * sigmoid
    dtype = a_ptr.dtype.element_ty
    return first.to(dtype), second.to(dtype), third.to(dtype)


@triton.jit
def maxima_kernel(
    a_ptr, b_ptr, c_ptr, maxima_ptr, M, N, SOURCE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr
):  # fmt: skip
    """Raise maxima [outputs, M + N], of the rows followed by the columns, by those of a tile."""
    row0 = tl.program_id(0) * BM
    rows = tl.arange(0, BM)
    cols = tl.program_id(1) * BN + tl.arange(0, BN)
    tiles = _tiles(a_ptr, b_ptr, c_ptr, row0, rows, cols, M, N, SOURCE)
    for i in tl.static_range(3 if SOURCE == GATE_GRAD else 1):
        size = tl.abs(tiles[i].to(tl.float32))
        place = maxima_ptr + i * (M + N)
        tl.atomic_max(place + row0 + rows, tl.max(size, axis=1), mask=row0 + rows < M)
        tl.atomic_max(place + M + cols, tl.max(size, axis=0), mask=cols < N)


@triton.jit
def _scale(maximum, RECIPE: tl.constexpr, E5M2: tl.constexpr):
    """The factor by which values with this maximum fill float8's range, and its inverse, to the bit as torchao's.

    Powers of two are found without a division, which would cost more than all casts: 448 is 1.75 x 2^8.
    """
    if RECIPE == TENSOR:
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
def _bytes(tile, scale, E5M2: tl.constexpr):
    """float8 as bytes. The cast saturates and keeps NaN; a clamp before it might not, and transposed miscompiles."""
    return (tile.to(tl.float32) * scale).to(tl.float8e5 if E5M2 else tl.float8e4nv).to(tl.uint8, bitcast=True)


@triton.jit
def _store_rows(
    tile, maximum, data_ptr, scales_ptr, row0, rows, col0, cols, M, N,
    RECIPE: tl.constexpr, E5M2: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Cast a tile [BM, BN] with its `maximum`, one or [BM], into rows [M, N] at (row0, col0); store its scales, too.

    For the columns the caller swaps all that belongs to rows and columns, and gives the transposed tile.
    """
    scale, inverse = _scale(maximum, RECIPE, E5M2)
    inside = row0 + rows < M
    if RECIPE == TENSOR:
        tl.store(scales_ptr, inverse, mask=row0 + col0 == 0)
    elif RECIPE == SQUARE:
        tl.store(scales_ptr + row0 // BN * (N // BN) + col0 // BN, inverse)
    else:
        place = scales_ptr + row0 + rows + (col0 // BN * M if RECIPE == BLOCK else 0)
        tl.store(place, inverse, mask=inside & ((col0 + 0 * rows == 0) | (RECIPE == BLOCK)))
        scale = scale[:, None]
    here = inside[:, None] & (col0 + cols < N)[None, :]
    place = data_ptr + row0.to(tl.int64) * N + col0 + rows[:, None] * N + cols[None, :]
    tl.store(place, _bytes(tile, scale, E5M2), mask=here)


@triton.jit
def cast_kernel(
    a_ptr, b_ptr, c_ptr, maxima_ptr, rows_ptr, row_scales_ptr, columns_ptr, column_scales_ptr,
    M, N, row_scales, column_scales,
    SOURCE: tl.constexpr, RECIPE: tl.constexpr, E5M2: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """rows [outputs, M, N] and columns [outputs, N, M] as bytes; `row_scales` and `column_scales` of each output."""
    row0 = tl.program_id(0) * BM
    rows = tl.arange(0, BM)
    col0 = tl.program_id(1) * BN
    cols = tl.arange(0, BN)
    tiles = _tiles(a_ptr, b_ptr, c_ptr, row0, rows, col0 + cols, M, N, SOURCE)
    for i in tl.static_range(3 if SOURCE == GATE_GRAD else 1):
        if i == 2 and RECIPE == BLOCK:  # read again, from the nearest cache: kept, it would not fit into registers
            tl.debug_barrier()
            tiles = _tiles(a_ptr, b_ptr, c_ptr, row0, rows, col0 + cols, M, N, GATE)
        size = tl.abs(tiles[i].to(tl.float32))
        start = tl.cast(M, tl.int64) * N * i
        if RECIPE == TENSOR:
            of_rows = tl.load(maxima_ptr + i)
            of_columns = of_rows
        elif RECIPE == SQUARE:
            of_rows = tl.max(size)
            of_columns = of_rows
        elif RECIPE == BLOCK:
            of_rows = tl.max(size, axis=1)
            of_columns = tl.max(size, axis=0)
        else:
            lines = maxima_ptr + i * (M + N)
            of_rows = tl.load(lines + row0 + rows, mask=row0 + rows < M, other=0.0)
            of_columns = tl.load(lines + M + col0 + cols, mask=col0 + cols < N, other=0.0)
        if ROWS and i < 2:
            _store_rows(
                tiles[i], of_rows, rows_ptr + start, row_scales_ptr + i * row_scales,
                row0, rows, col0, cols, M, N, RECIPE, E5M2 and i < 2, BN,
            )  # fmt: skip
        if COLUMNS:
            _store_rows(
                tl.trans(tiles[i]), of_columns, columns_ptr + start, column_scales_ptr + i * column_scales,
                col0, cols, row0, rows, N, M, RECIPE, E5M2 and i < 2, BM,
            )  # fmt: skip


def tile_shape(source: str, recipe: str, collects: bool = False) -> tuple[int, int, int]:
    """Rows and columns of a tile, and warps: the most that fits into registers (benchmarks.float8_kernels)."""
    if recipe in ("blockwise", "squares"):
        return 128, 128, 8
    warps = 16 if (source, recipe) == ("gate_grad", "rowwise") else 8
    return (32, 256, warps) if collects else (64, 128, warps)


def _launch(kernel: Any, shape: tuple[int, int, int], tensors: list[Tensor], *arguments: Any) -> None:
    M, N = tensors[0].shape
    BM, BN, warps = shape
    three = tensors + tensors[:1] * (3 - len(tensors))
    grid = (triton.cdiv(M, BM), triton.cdiv(N, BN))
    kernel[grid](*three, *arguments, BM=BM, BN=BN, num_warps=warps)


@casts.line_maxima.register_kernel("cuda")
def line_maxima(source: str, tensors: list[Tensor]) -> Tensor:
    maxima = casts.empty_maxima(source, tensors).zero_()
    M, N = tensors[0].shape
    _launch(maxima_kernel, tile_shape(source, "rowwise", True), tensors, maxima, M, N, SOURCES[source])
    return maxima


@casts.to_float8.register_kernel("cuda")
def to_float8(
    source: str, recipe: str, tensors: list[Tensor], maxima: Tensor, e5m2: bool, rows: bool, columns: bool
) -> list[Tensor]:
    found = casts.empty(source, recipe, tensors, maxima, e5m2, rows, columns)
    sizes = [scales.numel() // max(len(scales), 1) for scales in found[1::2]]  # of each output
    constants = SOURCES[source], RECIPES[recipe], e5m2, rows, columns
    _launch(cast_kernel, tile_shape(source, recipe), tensors, maxima, *found, *tensors[0].shape, *sizes, *constants)
    return found
