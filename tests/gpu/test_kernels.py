"""The float8 kernels and matmuls of a GPU, against plain torch and float64 on CPU. No queue times what fails here.

TEST_GPU=1 python -m pytest tests/gpu/test_kernels.py [-k rowwise]

Without a GPU the same runs by plain torch on both sides, to find mistakes before a GPU is at hand.
"""

import os

import pytest
import torch

from float8.casts import cast
from tests.unit.test_float8_kernels import SHAPE, SOURCES, operands
from tests.unit.test_float8_layers import build, check_block, gradients
from tests.unit.test_float8_numerics import check

pytestmark = pytest.mark.skipif(
    os.environ.get("TEST_GPU") != "1", reason="needs TEST_GPU=1, and a CUDA GPU to say more"
)
ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
RECIPES = ("tensorwise", "rowwise")
EXACT = ("copy", "norm")  # products of float32, which every device rounds alike; an exponential is not
# A byte may be the next one, 2^-3 of its value away in e4m3 and 2^-2 in e5m2, where an exponential's last bit differs.
LINE_TOLERANCE = 0.05


def layouts(recipe, source, gradient, device):
    """Rows and columns of each output, computed on a device. The third of "gate_grad" has columns alone."""
    tensors = [tensor.to(device) for tensor in operands(source, SHAPE, 1e-4)]
    found = []
    for output in cast(source, recipe, tensors, gradient):
        for values, scales in (output[:2], output[2:]):
            if values.dim() == 2:
                found.append((values.cpu(), scales.cpu()))
    return found


def lines_agree(found, expected):
    """Whether each row is that of plain torch, but for values whose last bit differed before the cast."""
    return bool(((found - expected).norm(dim=1) <= LINE_TOLERANCE * expected.norm(dim=1)).all())


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("recipe", RECIPES)
def test_casts(recipe, source):
    for gradient in (False, True):
        expected = layouts(recipe, source, gradient, "cpu")
        assert len(expected) == (5 if source == "gate_grad" else 2)
        for ours, plain in zip(layouts(recipe, source, gradient, DEVICE), expected, strict=True):
            assert ours[0].dtype == plain[0].dtype
            assert lines_agree(*(values.float() * scales for values, scales in (ours, plain)))
            if source in EXACT:
                assert torch.equal(ours[0].view(torch.uint8), plain[0].view(torch.uint8))
                assert torch.equal(ours[1], plain[1])


@pytest.mark.parametrize("recipe", ["own tensorwise", "own rowwise"])
def test_a_layers_three_matmuls(recipe):
    check(recipe, DEVICE)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_block(recipe):
    check_block(recipe, DEVICE, gradients(build(dtype=torch.float64)))
