"""Own casts to float8: plain torch against torchao, Triton's kernels against plain torch.

The kernels run in Triton's interpreter and are compiled for sm_90, both without a GPU. Triton comes with torch's builds
for CUDA and with requirements-triton.txt.
"""

from unittest import mock

import pytest
import torch
from torchao.float8.config import ScalingGranularity
from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic
from torchao.float8.float8_training_tensor import LinearMMConfig

from float8.casts import cast, source_values, to_float8
from tests.interpreter import WithTriton, load_kernels

RECIPES = ("tensorwise", "rowwise")
SOURCES = ("copy", "norm", "gate", "gate_grad")
SHAPE = (80, 144)


def operands(source, shape, gradient_scale=1.0):
    """A source's tensors in bfloat16, with a row of zeros, one that is 1000 times as large, and a tiny column."""
    x, u, grad = torch.randn(3, *shape, generator=torch.Generator().manual_seed(0))
    x[3] = 0
    x[5] *= 1000
    x[:, 7] *= 1e-6
    if source == "norm":
        rstd = torch.rsqrt(x.square().mean(-1) + 1e-5)
        return [x.bfloat16(), rstd, u[0].bfloat16()]
    tensors = {"copy": [x * gradient_scale], "gate": [x, u], "gate_grad": [x, u, grad * gradient_scale]}
    return [tensor.bfloat16() for tensor in tensors[source]]


# ---------------------------------------------------------------- plain torch


@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_bytes_and_scales_are_torchaos(recipe, gradient):
    rowwise = recipe == "rowwise"
    kind = ScalingGranularity.AXISWISE if rowwise else ScalingGranularity.TENSORWISE
    dtype = torch.float8_e5m2 if gradient and not rowwise else torch.float8_e4m3fn
    for size in (1.0, 1e-9, 1e-14):
        (x,) = operands("copy", SHAPE, size)
        (found,) = cast("copy", recipe, [x], gradient=gradient)
        layouts = (-1, found.rows, found.row_scales), (0, found.columns.t(), found.column_scales.t())
        for dim, values, scales in layouts:
            theirs = hp_tensor_to_float8_dynamic(
                x, dtype, LinearMMConfig(), scaling_granularity=kind, axiswise_dim=dim if rowwise else None,
                round_scales_to_power_of_2=rowwise,
            )  # fmt: skip
            assert values.dtype == dtype
            assert torch.equal(values.view(torch.uint8), theirs._data.view(torch.uint8))
            assert torch.equal(scales, theirs._scale.reciprocal())


# ---------------------------------------------------------------- Triton's kernels


@pytest.fixture(scope="module")
def interpreter():
    interpreter = WithTriton(interpret=True)
    yield interpreter
    interpreter.pool.shutdown()


def tensor_maxima(source, tensors):
    return torch.stack([values.float().abs().amax() for values in source_values(source, tensors)])


def compare(recipe, source, value):
    """What of a kernel's outputs differs from plain torch's. In the interpreter's process."""
    kernels = load_kernels()
    tensors = operands(source, SHAPE, 1e-4)
    tensors[0][9, 11] += value
    maxima = tensor_maxima(source, tensors)
    differing = []
    for e5m2 in {False, recipe == "tensorwise"}:
        expected = to_float8(source, recipe, tensors, maxima, e5m2, True, True)
        found = kernels.to_float8(source, recipe, tensors, maxima, e5m2, True, True)
        if value:  # where a maximum is NaN, only plain torch makes NaN of all that it scales
            both = (outputs[0].view(torch.float8_e4m3fn)[0, 9, 11] for outputs in (found, expected))
            return [name for name, x in zip(("kernel", "torch"), both, strict=True) if not x.float().isnan()]
        names = ("rows", "row scales", "columns", "column scales")
        differing += [name for name, *pair in zip(names, found, expected, strict=True) if not torch.equal(*pair)]
    return differing


@pytest.mark.parametrize("recipe", RECIPES)
def test_kernels_give_the_bytes_of_plain_torch(recipe, interpreter):
    for source in SOURCES:
        assert interpreter(compare, recipe, source, 0.0) == [], source
    for value in (float("nan"), float("inf")):
        assert interpreter(compare, recipe, "copy", value) == [], value


M, N = 2**17, 2**14 + 256  # more values than an int32 counts


def compare_last_tile(recipe):
    """What differs of the last tile of such large outputs. All else stays unwritten, and so takes no memory."""
    from triton.runtime import interpreter

    source = "gate_grad"
    kernels = load_kernels(("tl.program_id(0)", "(M // BM - 1)"), ("tl.program_id(1)", "(N // BN - 1)"))
    height, width, _ = kernels.tile_shape(source, recipe, recipe == "rowwise")  # its kernel of maxima has a wider one
    tensors = operands(source, (height, width))
    wholes = [torch.empty(M, N, dtype=torch.bfloat16) for _ in tensors]
    for whole, tensor in zip(wholes, tensors, strict=True):
        whole[-height:, -width:] = tensor
    maxima = tensor_maxima(source, tensors)
    with (
        mock.patch.object(kernels.triton, "cdiv", return_value=1),
        mock.patch.object(interpreter.GridExecutor, "_restore_args_dev"),  # copies back, and so touches all memory
    ):
        ours = kernels.to_float8(source, recipe, wholes, maxima, False, True, True)
    expected = to_float8(source, recipe, tensors, maxima, False, True, True)
    pairs = {
        "rows": (ours[0][:, -height:, -128:], expected[0][:, :, -128:]),
        "columns": (ours[2][:, -128:, -height:], expected[2][:, -128:]),
    }
    return [name for name, pair in pairs.items() if not torch.equal(*pair)]


@pytest.mark.parametrize("recipe", RECIPES)
def test_tensors_of_more_values_than_an_int32_counts(recipe, interpreter):
    assert interpreter(compare_last_tile, recipe) == []


def compile_kernel(source, recipe, maxima):
    """Bytes of a kernel for sm_90."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from float8 import kernels

    function = kernels.maxima_kernel if maxima else kernels.cast_kernel
    BM, BN, warps = kernels.tile_shape(source, recipe, maxima)
    constants = {"SOURCE": source, "RECIPE": recipe, "E5M2": recipe == "tensorwise", "ROWS": True}
    constants |= {"COLUMNS": source != "gate", "BM": BM, "BN": BN}
    kinds = {"maxima_ptr": "*fp32", "row_scales_ptr": "*fp32", "column_scales_ptr": "*fp32"}
    kinds |= {"rows_ptr": "*u8", "columns_ptr": "*u8", "a_ptr": "*bf16", "b_ptr": "*bf16", "c_ptr": "*bf16"}
    if source == "norm":
        kinds["b_ptr"] = "*fp32"
    names = function.arg_names
    signature = {name: "constexpr" if name in constants else kinds.get(name, "i32") for name in names}
    constexprs = {name: constants[name] for name in names if name in constants}
    ast_source = ASTSource(fn=function, signature=signature, constexprs=constexprs)
    compiled = triton.compile(ast_source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})
    return len(compiled.asm["cubin"])


HOPPER = [(source, recipe, False) for source in ("norm", "gate_grad") for recipe in RECIPES]
HOPPER += [(source, "rowwise", True) for source in ("norm", "gate_grad")]


def test_kernels_compile_for_hopper():
    call = WithTriton(interpret=False)
    for kernel in HOPPER:
        assert call(compile_kernel, *kernel)
    call.pool.shutdown()
