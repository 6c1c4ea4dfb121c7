"""Outputs and gradients of float8 layers against float64. Losses of small runs are no such check: they hide faults."""

import math

import pytest
import torch
from torch import nn

from config import Float8
from float8.convert import convert_to_float8

RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp", "own tensorwise", "own rowwise")  # own: kernels
GRADIENT_SCALES = (1.0, 1e-4, 1e-9)
TOKENS, IN, OUT = 256, 512, 1024

# Against exact arithmetic, dB, for y, dx, dw. Rounding to m bits of mantissa has a noise of about 2^-2m / 24 of the
# signal, or 31.6 dB for e4m3 and 25.5 dB for e5m2; a product has the noise of both factors; bfloat16 alone gives 55 dB.
FLOORS = {
    "tensorwise": (28.2, 24.3, 24.3),
    "rowwise": (28.2, 28.2, 28.2),
    "rowwise_with_gw_hp": (28.2, 28.2, 55.0),
}


def sqnr(exact, approximate):
    """Signal to quantization noise, dB."""
    exact, approximate = exact.double(), approximate.double()
    return 20 * math.log10(exact.norm() / max((exact - approximate).norm().item(), 1e-300))


def operands(gradient_scale):
    """x [TOKENS, IN], w [OUT, IN] and dy [TOKENS, OUT], normal, bfloat16; rows of unlike size."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(TOKENS, IN, generator=generator)
    w = torch.randn(OUT, IN, generator=generator) * 0.02
    dy = torch.randn(TOKENS, OUT, generator=generator) * gradient_scale
    return x.bfloat16(), w.bfloat16(), dy.bfloat16()


def exact(x, w, dy):
    """y, dx, dw in float64."""
    x, w, dy = x.double(), w.double(), dy.double()
    return x @ w.T, dy @ w, dy.T @ x


def build_linear(recipe, w):
    """A converted layer with the weight `w`, on its device."""
    model = nn.Sequential(nn.Linear(IN, OUT, bias=False, dtype=torch.bfloat16, device=w.device))
    kernels = "own" if recipe.startswith("own ") else "compiler"
    name = recipe.removeprefix("own ")
    convert_to_float8(model, Float8(enable=True, recipe=name, kernels=kernels, filter="all", fsdp_all_gather="off"))
    with torch.no_grad():
        model[0].weight.copy_(w)
    return model[0]


def check(recipe, device="cpu"):
    """Fails if anything the layer gives is further from float64 than rounding explains."""
    floors = FLOORS[recipe.removeprefix("own ")]
    for gradient_scale in GRADIENT_SCALES:
        x, w, dy = operands(gradient_scale)
        linear = build_linear(recipe, w.to(device))
        given = x.detach().to(device).requires_grad_()
        y = linear(given)
        found = (y.detach(), *torch.autograd.grad(y, (given, linear.weight), dy.to(device)))
        for name, result, truth, floor in zip(("y", "dx", "dw"), found, exact(x, w, dy), floors, strict=True):
            assert result.dtype == torch.bfloat16
            assert sqnr(truth, result.cpu()) >= floor, f"{name}, gradients of {gradient_scale}"


@pytest.mark.parametrize("recipe", RECIPES)
def test_within_the_floors(recipe):
    check(recipe)
