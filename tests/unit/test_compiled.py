"""What the compiler makes of a block: one graph for all layers, and no more kernels than it takes."""

import os
from pathlib import Path

import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from torch._inductor import metrics

from config import ActivationCheckpoint
from models.init import init_weights
from models.llama.model import Llama, LlamaConfig
from parallel.activation_checkpoint import apply_activation_checkpoint
from tests.harness import run_ranks

FLAVOR = LlamaConfig(dim=64, n_layers=4, n_heads=4, n_kv_heads=2, hidden_dim=128, vocab_size=64)


def count(mode: str) -> tuple[int, int]:
    """Graphs compiled for four layers, and kernels generated for the forward and backward of a block."""
    model = Llama(FLAVOR)
    init_weights(model, torch.device("cpu"), seed=0)
    model.compute_dtype = torch.bfloat16
    counter = CompileCounterWithBackend("inductor")
    metrics.reset()
    for block in model.layers.values():
        apply_activation_checkpoint(block, ActivationCheckpoint(mode=mode))
        block.compile(backend=counter, fullgraph=True)
    for _ in range(2):
        model(torch.zeros(2, 32, dtype=torch.int64)).float().sum().backward()
    return counter.frame_count, metrics.generated_kernel_count


def test_all_layers_share_one_graph_of_few_kernels() -> None:
    ((graphs, kernels),) = run_ranks(1, count, "none")
    assert graphs == 1
    # Two norms with the residual, rotary embeddings of q and k, SwiGLU, casts of seven weights; their backwards.
    assert kernels <= KERNELS_OF_A_BLOCK


KERNELS_OF_A_BLOCK = 60


def compile_with_cache(folder: Path) -> tuple[int, int]:
    """Graphs found in the compiler's cache, and graphs compiled."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)
    counters.clear()
    count("none")
    cache = counters["aot_autograd"]
    return cache["autograd_cache_hit"], cache["autograd_cache_miss"]


def test_a_second_start_compiles_nothing(tmp_path: Path) -> None:
    ((_, compiled),) = run_ranks(1, compile_with_cache, tmp_path)
    assert compiled
    assert run_ranks(1, compile_with_cache, tmp_path) == [(compiled, 0)]
