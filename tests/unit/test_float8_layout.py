"""Shapes, strides and alignment of every float8 matmul of the 8B, as CUDA demands them, without a GPU.

CPUs take layouts that CUDA refuses, but a fake tensor on "cuda" is held to CUDA's rules.
"""

import dataclasses

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from torchao.float8.float8_training_tensor import Float8TrainingTensor

from config import Float8
from float8.convert import convert_to_float8
from loss import cross_entropy
from models.llama import FLAVORS
from models.llama.model import Llama

SEQ_LEN = 2048  # none of the models' dims, so that a shape tells which matmul it is


class AsOnCuda(TorchDispatchMode):
    """Repeats every float8 matmul on fake CUDA tensors of the same layout; remembers the shapes (M, K, N)."""

    def __init__(self):
        super().__init__()
        self.shapes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, Float8TrainingTensor) for kind in types):
            return NotImplemented  # first torchao's dispatch, which then calls the matmul
        kwargs = kwargs or {}
        if func is torch.ops.aten._scaled_mm.default:
            assert func(*tree_map(on_cuda, args), **tree_map(on_cuda, kwargs)).device.type == "cuda"
            self.shapes.append((*args[0].shape, args[1].shape[1]))
        return func(*args, **kwargs)


def on_cuda(x):
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda") if isinstance(x, torch.Tensor) else x


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp", "own tensorwise", "own rowwise"])
def test_every_matmul_has_a_layout_that_cuda_takes(recipe):
    options = {"recipe": recipe.removeprefix("own ")}
    if recipe.startswith("own "):
        options["kernels"] = "own"
    float8 = Float8(enable=True, fsdp_all_gather="off", **options)
    with FakeTensorMode():
        model = Llama(dataclasses.replace(FLAVORS["8B"], n_layers=1))
        model.compute_dtype = torch.bfloat16
    converted, _ = convert_to_float8(model, float8)
    assert len(converted) >= 5
    with model.norm.weight.fake_mode, AsOnCuda() as checked:
        tokens = torch.zeros(1, SEQ_LEN, dtype=torch.long)
        cross_entropy(model(tokens), tokens).backward()
    shapes = checked.shapes
    gemms = 2 if recipe == "rowwise_with_gw_hp" else 3  # weight gradients in bf16, or all of y, dx, dw
    assert len(shapes) == gemms * len(converted)
    for linear in converted:
        N, K = model.get_parameter(f"{linear}.weight").shape
        assert {(SEQ_LEN, K, N), (SEQ_LEN, N, K)} <= set(shapes)
        assert ((N, SEQ_LEN, K) in shapes) == (gemms == 3)
