"""Outputs and gradients of float8 layers against float64, and a reference of our own.

The reference rounds to float8 in float64 arithmetic, from the definitions of the formats (Micikevicius et al. 2022) and
of torchao's recipes, and shares no code with them. Losses of small runs are no such check: they hide these faults.
"""

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from config import Float8
from float8.convert import convert_to_float8

RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp", "own tensorwise", "own rowwise")  # own: kernels
GRADIENT_SCALES = (1.0, 1e-4, 1e-9)
TOKENS, IN, OUT = 256, 512, 1024
E4M3, E5M2 = (3, -6, 448.0), (2, -14, 57344.0)  # bits of mantissa, smallest normal exponent, largest value

# Against exact arithmetic, dB, for y, dx, dw. Rounding to m bits of mantissa has a noise of about 2^-2m / 24 of the
# signal, or 31.6 dB for e4m3 and 25.5 dB for e5m2; a product has the noise of both factors; bfloat16 alone gives 55 dB.
FLOORS = {
    "tensorwise": (28.2, 24.3, 24.3),
    "rowwise": (28.2, 28.2, 28.2),
    "rowwise_with_gw_hp": (28.2, 28.2, 55.0),
}
# Rows and columns that share a scale, 0 for all of them: of x and dy along what is summed, of w forward and backward.
TILES = {
    "tensorwise": ((0, 0), (0, 0), (0, 0)),
    "rowwise": ((1, 0), (1, 0), (0, 1)),
    "rowwise_with_gw_hp": ((1, 0), (1, 0), (0, 0)),
}
REFERENCE_FLOOR = 55.0  # what is left against the reference is the rounding of the result to bfloat16


def sqnr(exact: Tensor, approximate: Tensor) -> float:
    """Signal to quantization noise, dB."""
    exact, approximate = exact.double(), approximate.double()
    return 20 * math.log10(exact.norm() / max((exact - approximate).norm().item(), 1e-300))


def operands(gradient_scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """x [TOKENS, IN], w [OUT, IN] and dy [TOKENS, OUT], normal, bfloat16; rows of unlike size."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(TOKENS, IN, generator=generator)
    w = torch.randn(OUT, IN, generator=generator) * 0.02
    dy = torch.randn(TOKENS, OUT, generator=generator) * gradient_scale
    return x.bfloat16(), w.bfloat16(), dy.bfloat16()


def exact(x: Tensor, w: Tensor, dy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """y, dx, dw in float64."""
    x, w, dy = x.double(), w.double(), dy.double()
    return x @ w.T, dy @ w, dy.T @ x


def rounded(format: tuple[int, int, float], power_of_2: bool, x: Tensor, tile: tuple[int, int]) -> Tensor:
    """`x` as float8 holds it with a scale for each tile, in float64."""
    mantissa_bits, min_exponent, largest = format
    rows, columns = (size or whole for size, whole in zip(tile, x.shape, strict=True))
    tiles = x.float().unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
    scale = (largest / tiles.double().abs().amax((1, 3), keepdim=True)).float()
    if power_of_2:
        scale = 2.0 ** scale.log2().floor()
    scaled = (tiles * scale).double()
    exponent = scaled.abs().clamp(min=2.0**min_exponent).log2().floor()
    step = 2.0 ** (exponent - mantissa_bits)
    held = ((scaled / step).round() * step).clamp(-largest, largest) / scale.double()  # round: ties to even
    return held.view(x.shape)


def reference(recipe: str, x: Tensor, w: Tensor, dy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """y, dx, dw by the recipe's roundings, all sums in float64."""
    tensorwise = recipe == "tensorwise"
    held = partial(rounded, E4M3, not tensorwise)
    held_gradient = partial(rounded, E5M2 if tensorwise else E4M3, not tensorwise)
    tile, forward, backward = TILES[recipe]
    y = held(x, tile) @ held(w, forward).T
    dx = held_gradient(dy, tile) @ held(w, backward)
    if recipe == "rowwise_with_gw_hp":
        return y, dx, dy.double().T @ x.double()
    across = (tile[1], tile[0])
    return y, dx, held_gradient(dy, across).T @ held(x, across)


def build_linear(recipe: str, w: Tensor) -> nn.Linear:
    """A converted layer with the weight `w`, on its device."""
    model = nn.Sequential(nn.Linear(IN, OUT, bias=False, dtype=torch.bfloat16, device=w.device))
    kernels: Any = "own" if recipe.startswith("own ") else "compiler"
    name: Any = recipe.removeprefix("own ")
    convert_to_float8(model, Float8(enable=True, recipe=name, kernels=kernels, filter="all", fsdp_all_gather="off"))
    with torch.no_grad():
        model[0].weight.copy_(w)
    return model[0]


def check(recipe: str, device: str = "cpu", reference_floor: float = REFERENCE_FLOOR) -> None:
    """Fails if anything the layer gives is further from float64, or from the reference, than rounding explains."""
    plain = recipe.removeprefix("own ")
    for gradient_scale in GRADIENT_SCALES:
        x, w, dy = operands(gradient_scale)
        linear = build_linear(recipe, w.to(device))
        given = x.detach().to(device).requires_grad_()
        y = linear(given)
        found = (y.detach(), *torch.autograd.grad(y, (given, linear.weight), dy.to(device)))
        columns = zip(("y", "dx", "dw"), found, exact(x, w, dy), reference(plain, x, w, dy), FLOORS[plain], strict=True)
        for name, result, truth, expected, floor in columns:
            where = f"{name}, gradients of {gradient_scale}"
            assert result.dtype == torch.bfloat16, where
            assert sqnr(truth, result.cpu()) >= floor, where
            assert sqnr(expected, result.cpu()) >= reference_floor, where


@pytest.mark.parametrize("recipe", RECIPES)
def test_within_the_floors_and_equal_to_the_reference(recipe: str) -> None:
    check(recipe)
