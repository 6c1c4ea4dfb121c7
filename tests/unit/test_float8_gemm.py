"""The comparison of float8 with bfloat16 layer by layer, as far as it goes without a GPU."""

import torch
from torch import nn
from torch._dynamo.testing import CompileCounter
from torchao.float8.float8_linear import Float8Linear

from benchmarks.float8_gemm import RECIPES, SCALINGS, compiled, to_float8
from config import Float8
from float8.convert import build_linear_config
from tests.harness import run_ranks

SHAPES = [(64, 64), (32, 64), (128, 64), (64, 128)]


def graphs_of_layers() -> list[int]:
    """Graphs compiled for each layer, in the order in which they are measured."""
    graphs = []
    for n_out, n_in in SHAPES:
        plain = nn.Linear(n_in, n_out, bias=False, dtype=torch.bfloat16)
        for recipe in RECIPES:
            settings = build_linear_config(Float8(enable=True, recipe=recipe, fsdp_all_gather="off"))
            counter = CompileCounter()
            compiled(Float8Linear.from_float(plain, settings), counter)(torch.randn(16, n_in, dtype=torch.bfloat16))
            graphs.append(counter.frame_count)
    return graphs


def test_every_layer_is_compiled_however_many_were_before() -> None:
    assert run_ranks(1, graphs_of_layers) == [[1] * len(SHAPES) * len(RECIPES)]


def test_values_survive_every_scaling() -> None:
    torch.manual_seed(0)
    x = torch.randn(256, 384) * torch.logspace(-3, 3, 384)  # each tile needs a scale of its own
    for tile in {tile for tiles in SCALINGS.values() for tile in tiles}:
        x8, scales, rounded = to_float8(x, tile)
        rows, columns = tile[0] or 256, tile[1] or 384
        by_hand = x8.float() * scales.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
        assert torch.equal(rounded, by_hand)
        assert (rounded - x).norm() < 0.04 * x.norm()
        assert scales.t().is_contiguous() if rows == 1 else scales.is_contiguous()
