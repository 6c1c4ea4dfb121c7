"""Own casts to float8: plain torch against torchao and float64, Triton's kernels against plain torch.

The kernels run in Triton's interpreter and are compiled for sm_90, both without a GPU. Triton comes with torch's builds
for CUDA and with requirements-triton.txt.
"""

import re
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torchao.float8.config import ScalingGranularity
from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic
from torchao.float8.float8_training_tensor import LinearMMConfig

from float8.casts import Cast, cast, line_maxima, multiply, source_values, to_float8
from float8.cpu import replace_matmul
from tests.interpreter import WithTriton, load_kernels

RECIPES = ("tensorwise", "rowwise", "blockwise", "squares")
SOURCES = ("copy", "norm", "gate", "gate_grad")
SHAPE = {"tensorwise": (80, 144), "rowwise": (80, 144), "blockwise": (256, 384), "squares": (256, 384)}


def operands(source: str, shape: tuple[int, int], gradient_scale: float = 1.0) -> list[Tensor]:
    """A source's tensors in bfloat16, with a row of zeros, one that is 1000 times as large, and a tiny column."""
    generator = torch.Generator().manual_seed(0)
    x, u, grad = (torch.randn(shape, generator=generator) for _ in range(3))
    x[3], x[5], x[:, 7] = 0, x[5] * 1000, x[:, 7] * 1e-6
    x, u, grad = x.bfloat16(), u.bfloat16(), (grad * gradient_scale).bfloat16()
    if source == "copy":
        return [(x.float() * gradient_scale).bfloat16()]
    if source == "norm":
        rstd = torch.rsqrt(x.float().square().mean(-1) + 1e-5)
        return [x, rstd, torch.rand(shape[1], generator=generator).bfloat16()]
    return [x, u] if source == "gate" else [x, u, grad]


# ---------------------------------------------------------------- plain torch


def torchao_cast(x: Tensor, recipe: str, dtype: torch.dtype, dim: int) -> tuple[Tensor, Tensor]:
    """Bytes and scale of torchao's own cast, for a matmul that sums along `dim`."""
    rowwise = recipe == "rowwise"
    kind = ScalingGranularity.AXISWISE if rowwise else ScalingGranularity.TENSORWISE
    found = hp_tensor_to_float8_dynamic(
        x, dtype, LinearMMConfig(), scaling_granularity=kind, axiswise_dim=dim if rowwise else None,
        round_scales_to_power_of_2=rowwise,
    )  # fmt: skip
    return found._data.view(torch.uint8), found._scale


@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_bytes_and_scales_are_torchaos(recipe: str, gradient: bool) -> None:
    for scale in (1.0, 1e-9, 1e-14):
        (x,) = operands("copy", SHAPE[recipe], scale)
        (found,) = cast("copy", recipe, [x], gradient=gradient)
        dtype = torch.float8_e5m2 if gradient and recipe == "tensorwise" else torch.float8_e4m3fn
        rows, row_scales = torchao_cast(x, recipe, dtype, -1)
        columns, column_scales = torchao_cast(x, recipe, dtype, 0)
        assert found.rows.dtype == dtype
        assert torch.equal(found.rows.view(torch.uint8), rows)
        assert torch.equal(found.columns.view(torch.uint8), columns.t())
        assert torch.equal(found.row_scales, row_scales.reciprocal())
        assert torch.equal(
            found.column_scales, column_scales.reciprocal().t() if recipe == "rowwise" else found.row_scales
        )


def within_an_ulp(found: Tensor, exact: Tensor) -> bool:
    """Whether bfloat16 values are the exact ones, rounded, or their neighbours."""
    exponent = exact.abs().clamp(min=2.0**-126).log2().floor()
    return bool(((found.double() - exact).abs() <= 2.0 ** (exponent - 7)).all())


@pytest.mark.parametrize("source", SOURCES[1:])
def test_values_are_within_an_ulp_of_float64(source: str) -> None:
    tensors = operands(source, (80, 144), 1e-4)
    a, *others = (tensor.double().requires_grad_() for tensor in tensors)
    if source == "norm":
        exact = [torch.nn.functional.rms_norm(a, a.shape[1:], others[1], 1e-5)]
    else:
        product = torch.nn.functional.silu(a) * others[0]
        exact = [product]
    if source == "gate_grad":
        exact = [*torch.autograd.grad(product, (a, others[0]), others[1], retain_graph=True), product]
    for found, expected in zip(source_values(source, tensors), exact, strict=True):
        assert within_an_ulp(found, expected.detach())


def check_product(device: str, tokens: int, blocks: int, squares: bool) -> None:
    """y of x [tokens, K] and w [256, K] with K of some `blocks`, each as large as no other, against float32.

    With `squares` w has scales as a weight has them, otherwise as gradients and activations have them.
    """
    replace_matmul()  # that of CPUs, as every conversion does
    generator = torch.Generator().manual_seed(0)
    sizes = 2.0 ** torch.arange(blocks).repeat_interleave(128)
    x, w = (torch.randn(n, blocks * 128, generator=generator) for n in (tokens, 256))
    x, w = (x * sizes).bfloat16().to(device), (w / sizes).bfloat16().to(device)
    w[128:] *= 32
    (x8,) = cast("copy", "blockwise", [x], columns=False)
    (w8,) = cast("copy", "squares" if squares else "blockwise", [w], columns=False)
    found = multiply(x8[:2], w8[:2], torch.bfloat16, False)
    exact = dequantized(x8) @ dequantized(w8).t()
    assert (found.cpu().float() - exact).norm() < 0.01 * exact.norm()


def dequantized(cast: Cast) -> Tensor:
    """The rows of a cast in blocks, times their scales, in float32."""
    rows, scales = cast.rows.cpu().float(), cast.row_scales.cpu().contiguous()
    return rows * torch.kron(scales, torch.ones(rows.shape[0] // scales.shape[0], 128))


@pytest.mark.parametrize("blocks", [3, 4, 8])
def test_products_of_blocks(blocks: int) -> None:
    check_products("cpu", blocks)


def check_products(device: str, blocks: int) -> None:
    """Scales of 1 x 128 on both sides, as for a weight's gradient; of squares only fours, for any number of tokens."""
    check_product(device, 256, blocks, squares=False)
    if blocks % 4 == 0:
        for tokens in (1, 37, 256):
            check_product(device, tokens, blocks, squares=True)
    else:  # a GPU would be silently wrong
        with pytest.raises(ValueError, match=f"{blocks} blocks along the sum, not a multiple of 4"):
            check_product(device, 256, blocks, squares=True)


# ---------------------------------------------------------------- Triton's kernels


@pytest.fixture(scope="module")
def interpreter() -> Iterator[WithTriton]:
    interpreter = WithTriton(interpret=True)
    yield interpreter
    interpreter.pool.shutdown()


def agree(found: Tensor, expected: Tensor) -> bool:
    """Whether bytes or floats are equal, or floats both NaN."""
    return torch.equal(found, expected) or bool(((found == expected) | (found.isnan() & expected.isnan())).all())


def compare(recipe: str, source: str, value: float = 0.0) -> list[str]:
    """What of a kernel's outputs differs from plain torch's. In the interpreter's process."""
    kernels = load_kernels()
    tensors = operands(source, SHAPE[recipe], 1e-4)
    tensors[0][9, 11] += value
    maxima = torch.empty(0)
    differing = []
    if recipe == "tensorwise":
        maxima = torch.stack([values.float().abs().amax() for values in source_values(source, tensors)])
    elif recipe == "rowwise":
        maxima = line_maxima(source, tensors)
        differing = [] if value or agree(kernels.line_maxima(source, tensors), maxima) else ["maxima"]
    names = ("rows", "row scales", "columns", "column scales")
    for e5m2 in (False, True)[: 2 if recipe == "tensorwise" else 1]:
        expected = to_float8(source, recipe, tensors, maxima, e5m2, True, True)
        found = kernels.to_float8(source, recipe, tensors, maxima, e5m2, True, True)
        if value:  # where a maximum is NaN, only plain torch makes NaN of all that it scales
            found, expected = ([x[0].view(torch.float8_e4m3fn)[0, 9, 11].float()] for x in (found, expected))
            differing += [] if expected[0].isnan() else ["not NaN"]
        differing += [name for name, *pair in zip(names, found, expected, strict=False) if not agree(*pair)]
    return differing


@pytest.mark.parametrize("recipe", RECIPES)
def test_kernels_give_the_bytes_of_plain_torch(recipe: str, interpreter: WithTriton) -> None:
    for source in SOURCES:
        assert interpreter(compare, recipe, source) == [], source
    for value in (float("nan"), float("inf")):
        assert interpreter(compare, recipe, "copy", value) == [], value


M, N = 2**17, 2**14 + 256  # more values than an int32 counts


def compare_last_tile(recipe: str) -> list[str]:
    """What differs of the last tile of such large outputs. All else stays unwritten, and so takes no memory."""
    from triton.runtime import interpreter

    source = "copy" if recipe == "squares" else "gate_grad"
    last = [("tl.program_id(0)", "(M // BM - 1)"), ("tl.program_id(1)", "(N // BN - 1)")]
    kernels = load_kernels(*last)
    one_tile = mock.patch.object(kernels.triton, "cdiv", return_value=1)
    copies_back = mock.patch.object(interpreter.GridExecutor, "_restore_args_dev")  # and so touches all memory
    rows, columns, _ = kernels.tile_shape(source, recipe, recipe == "rowwise")
    tensors = operands(source, (rows, columns))
    wholes = [torch.empty(M, N, dtype=torch.bfloat16) for _ in tensors]
    for whole, tensor in zip(wholes, tensors, strict=True):
        whole[-rows:, -columns:] = tensor
    with one_tile, copies_back:
        if recipe == "rowwise":
            found = kernels.line_maxima(source, wholes)
            found = torch.cat((found[:, M - rows : M], found[:, -columns:]), dim=1)
            return [] if torch.equal(found, line_maxima(source, tensors)) else ["maxima"]
        maxima = torch.stack([values.float().abs().amax() for values in source_values(source, tensors)])
        ours = kernels.to_float8(source, recipe, wholes, maxima, False, True, True)
    expected = to_float8(source, recipe, tensors, maxima, False, True, True)
    pairs = {
        "rows": (ours[0][:, -rows:, -columns:], expected[0]),
        "columns": (ours[2][:, -columns:, -rows:], expected[2]),
    }
    if recipe != "tensorwise":  # its scale is written by the first tile
        pairs["row scales"] = ours[1][:, -expected[1].shape[1] :, -1:], expected[1]
        pairs["column scales"] = ours[3][:, -expected[3].shape[1] :, -1:], expected[3]
    return [name for name, pair in pairs.items() if not torch.equal(*pair)]


@pytest.mark.parametrize("recipe", RECIPES)
def test_tensors_of_more_values_than_an_int32_counts(recipe: str, interpreter: WithTriton) -> None:
    assert interpreter(compare_last_tile, recipe) == []


def compiled() -> list[dict[str, Any]]:
    from benchmarks.float8_kernels import inspect, kernels

    return [inspect(kernel) for kernel in kernels() if re.search("gate_grad|norm", kernel.name)]


def test_kernels_compile_for_hopper_with_wide_accesses_and_without_spills() -> None:
    call = WithTriton(interpret=False)
    rows = call(compiled)
    call.pool.shutdown()
    assert len(rows) >= 7
    for row in rows:
        assert row["spilled bytes"] == 0, row
        assert row["load bits"] == 128, row
