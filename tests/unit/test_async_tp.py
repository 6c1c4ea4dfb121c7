"""Async tensor parallelism without a GPU: which collectives of a block torch's compiler joins with matmuls."""

import copy
import sys
from collections import Counter
from subprocess import run
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.fx_passes.micro_pipeline_tp import micro_pipeline_tp_pass
from torch.distributed._symmetric_memory import _test_mode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

from models.llama.model import Block, LlamaConfig, rope_cos_sin
from models.llama.parallelize import BLOCK_PLAN

FLAVOR = LlamaConfig(dim=256, n_layers=1, n_heads=4, n_kv_heads=4, hidden_dim=512, vocab_size=128)


def joined(graph: torch.fx.Graph) -> list[int]:
    """All-gathers and reduce-scatters that the compiler's pass joins with matmuls, as in a build with NCCL."""
    changed = copy.deepcopy(graph)
    with _test_mode(), mock.patch("torch.distributed.is_nccl_available", return_value=True):
        micro_pipeline_tp_pass(changed)
    counted = Counter(str(node.target) for node in changed.nodes)
    kinds = ("fused_all_gather_matmul", "fused_matmul_reduce_scatter")
    return [counted[f"symm_mem.{kind}.default"] for kind in kinds]


def main() -> None:
    """Print what is joined in a block's forward and in its backward, as one of two ranks whose group is a fake."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    block = Block(FLAVOR).bfloat16()
    parallelize_module(block, init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)), dict(BLOCK_PLAN))

    def look(module: torch.fx.GraphModule, _: Any) -> Any:
        print(*joined(module.graph))
        return module

    block.compile(backend=aot_autograd(fw_compiler=look), fullgraph=True)
    x = torch.randn(128, FLAVOR.dim, dtype=torch.bfloat16, requires_grad=True)
    cos, sin = rope_cos_sin(FLAVOR, torch.arange(128).expand(2, -1))
    block(x, cos, sin).sum().backward()


def test_the_compiler_joins_a_blocks_collectives_with_its_matmuls() -> None:
    """Not the backward's reduce-scatters, each of a sum of several matmuls."""
    ended = run([sys.executable, "-m", "tests.unit.test_async_tp"], capture_output=True, text=True)
    assert ended.stdout.split() == ["2", "2", "2", "0"], ended.stderr


if __name__ == "__main__":
    main()
