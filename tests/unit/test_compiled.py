"""What the compiler makes of a block: one graph for all layers, and no more kernels than it takes."""

import os
from unittest import mock

import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from torch._inductor import config as inductor
from torch._inductor import metrics
from torch._inductor.async_compile import AsyncCompile

from config import ActivationCheckpoint, Float8
from float8.convert import convert_to_float8
from models.llama.model import Llama, LlamaConfig, rope_cos_sin
from models.weights import init_weights
from parallel.activation_checkpoint import apply_activation_checkpoint, guide_compiler
from tests.harness import run_ranks

FLAVOR = LlamaConfig(dim=64, n_layers=4, n_heads=4, n_kv_heads=2, hidden_dim=128, vocab_size=64)


def count():
    """Graphs compiled for four layers, and kernels generated for the forward and backward of a block, but not built."""
    model = Llama(FLAVOR)
    init_weights(model, torch.device("cpu"), seed=0)
    model.compute_dtype = torch.bfloat16
    counter = CompileCounterWithBackend("inductor")
    guide_compiler()
    metrics.reset()
    for block in model.layers.values():
        block.compile(backend=counter, fullgraph=True)
    unbuilt = mock.patch.object(AsyncCompile, "cpp_pybinding", return_value=lambda *tensors: None)
    with unbuilt, inductor.patch({"force_disable_caches": True, "cpp.vec_isa_ok": True}):
        for _ in range(2):
            model(torch.zeros(2, 32, dtype=torch.int64)).float().sum().backward()
    return counter.frame_count, metrics.generated_kernel_count


def test_all_layers_share_one_graph_of_few_kernels():
    ((graphs, kernels),) = run_ranks(1, count)
    assert graphs == 1
    # Two norms with the residual, rotary embeddings of q and k, SwiGLU, casts of seven weights; their backwards.
    assert 10 < kernels <= 60


def kept_bytes(float8, checkpointing, S):
    """Bytes that a compiled block's forward keeps for its backward, per token and dim; without weights."""
    B, D = 2, 256
    model = Llama(LlamaConfig(dim=D, n_layers=1, n_heads=8, n_kv_heads=2, hidden_dim=7 * D // 2, vocab_size=8))
    model.compute_dtype = torch.bfloat16
    if float8.enable:
        convert_to_float8(model, float8)
    init_weights(model, torch.device("cpu"), seed=0)
    block = model.layers["0"]
    guide_compiler()
    apply_activation_checkpoint(block, checkpointing)
    # Partitions as inductor does, builds no kernels.
    block.compile(backend="aot_eager_decomp_partition", fullgraph=True)
    cos, sin = rope_cos_sin(model.config.rope(0), torch.arange(S)[None])
    x = torch.randn(B, S, D, dtype=torch.bfloat16, requires_grad=True)
    weights = {tuple(p.shape) for p in block.parameters() if p.ndim == 2}
    kept = {}

    def pack(tensor):
        # One rank has no FSDP, so a bfloat16 copy of each weight is kept, too.
        if tuple(tensor.shape) not in weights and tuple(tensor.shape[::-1]) not in weights:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    for given in (cos, sin, *block.parameters()):
        pack(given.detach())
    given_storages = set(kept)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        block(x, cos, sin, None)
    return sum(size for storage, size in kept.items() if storage not in given_storages) / (B * S * D)


def test_activations_kept_for_the_backward():
    """In bfloat16: q, k, v and attention's result, what goes into the norms and comes out of them (2 bytes each, k and
    v a quarter), three results of the feed-forward, each 3.5 times as wide: 34. In float8 what only matmuls read is
    made again from the rest, or kept in one byte: at most 24. Beside them a float32 number per head and norm."""
    (bfloat16,) = run_ranks(1, kept_bytes, Float8(), KEEP_ALL, 64)
    assert 34 <= bfloat16 < 34.5
    float8 = Float8(enable=True, recipe="rowwise", filter="all", fsdp_all_gather="off")
    (kept,) = run_ranks(1, kept_bytes, float8, KEEP_ALL, 64)
    assert kept < 24.5


KEEP_ALL = ActivationCheckpoint(mode="none")


def compile_with_cache(folder, guided=True):
    """Graphs found in the compiler's cache, and graphs compiled, for a layer with recomputation."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)
    counters.clear()
    if guided:
        guide_compiler()
    block = nn.Linear(64, 64, bias=False)  # no kernel to build
    apply_activation_checkpoint(block, ActivationCheckpoint(mode="budget"))
    block.compile(fullgraph=True)
    block(torch.randn(2, 64, requires_grad=True)).sum().backward()
    cache = counters["aot_autograd"]
    return cache["autograd_cache_hit"], cache["autograd_cache_miss"]


def test_a_second_start_compiles_nothing(tmp_path):
    """But does not take graphs that were made without the guide."""
    (unguided,) = run_ranks(1, compile_with_cache, tmp_path, False)
    (first,) = run_ranks(1, compile_with_cache, tmp_path)
    assert unguided == first == (0, 1)
    assert run_ranks(1, compile_with_cache, tmp_path) == [(1, 0)]
