"""What the compiler makes of a block: one graph for all layers, and no more kernels than it takes."""

import os
import re
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, fx, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from torch._functorch import config as compiler
from torch._inductor import config as inductor
from torch._inductor import metrics
from torch._inductor.async_compile import AsyncCompile

from config import ActivationCheckpoint, Float8
from float8.convert import convert_to_float8
from models.init import init_weights
from models.llama.model import Llama, LlamaConfig, rope_cos_sin
from parallel.activation_checkpoint import apply_activation_checkpoint, guide_compiler
from tests.harness import run_ranks

FLAVOR = LlamaConfig(dim=64, n_layers=4, n_heads=4, n_kv_heads=2, hidden_dim=128, vocab_size=64)


def count() -> tuple[int, int]:
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


def test_all_layers_share_one_graph_of_few_kernels() -> None:
    ((graphs, kernels),) = run_ranks(1, count)
    assert graphs == 1
    # Two norms with the residual, rotary embeddings of q and k, SwiGLU, casts of seven weights; their backwards.
    assert 10 < kernels <= 60


def kept_bytes(float8: Float8, checkpointing: ActivationCheckpoint, S: int) -> float:
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
    cos, sin = rope_cos_sin(model.config, torch.arange(S)[None])
    x = torch.randn(B, S, D, dtype=torch.bfloat16, requires_grad=True)
    weights = {tuple(p.shape) for p in block.parameters() if p.ndim == 2}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
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


def test_activations_kept_for_the_backward() -> None:
    """In bfloat16: q, k, v and attention's result, what goes into the norms and comes out of them (2 bytes each, k and
    v a quarter), three results of the feed-forward, each 3.5 times as wide: 34. In float8 what only matmuls read is
    made again from the rest, or kept in one byte: at most 24. Beside them a float32 number per head and norm."""
    ((bfloat16,), (tensorwise,), (rowwise,)) = (
        run_ranks(
            1, kept_bytes, Float8(enable=enable, recipe=recipe, filter="all", fsdp_all_gather="off"), KEEP_ALL, 64
        )
        for enable, recipe in ((False, "tensorwise"), (True, "tensorwise"), (True, "rowwise"))
    )
    assert 34 <= bfloat16 < 34.5
    assert tensorwise < 24.5
    assert rowwise < 24.5


KEEP_ALL = ActivationCheckpoint(mode="none")


def keeps_the_residual_stream(mode: str) -> tuple[bool, bool]:
    """Whether a compiled block keeps for its backward the sum after attention, and what was added there."""
    model = Llama(FLAVOR)
    init_weights(model, torch.device("cpu"), seed=0)
    block = model.layers["0"]
    cos, sin = rope_cos_sin(FLAVOR, torch.arange(32)[None])
    x = torch.randn(2, 32, FLAVOR.dim, requires_grad=True)
    added = block.attention(block.attention_norm(x), cos, sin, None, None, None).detach()
    kept: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor.detach().clone())
        return tensor

    guide_compiler()
    apply_activation_checkpoint(block, ActivationCheckpoint(mode=mode))
    block.compile(backend="aot_eager_decomp_partition", fullgraph=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        block(x, cos, sin, None)
    alike = [tensor.reshape(x.shape) for tensor in kept if tensor.numel() == x.numel()]
    found = (any(torch.allclose(tensor, wanted, atol=1e-5) for tensor in alike) for wanted in (x + added, added))
    return next(found), next(found)


@pytest.mark.parametrize("mode", ["none", "selective"])
def test_a_block_keeps_the_sum_not_what_was_added(mode: str) -> None:
    assert run_ranks(1, keeps_the_residual_stream, mode) == [(True, False)]


def readers_of_scales() -> list[set[str]]:
    """What reads each scale of float8, recipe rowwise, in the graph of forward and backward."""
    joint: list[fx.Graph] = []
    guide_compiler()
    guide = compiler.joint_custom_pass

    def look(module: fx.GraphModule, inputs: Any) -> fx.GraphModule:
        module = guide(module, inputs)
        joint.append(module.graph)
        return module

    model = Llama(LlamaConfig(dim=128, n_layers=1, n_heads=4, n_kv_heads=2, hidden_dim=256, vocab_size=64))
    convert_to_float8(model, Float8(enable=True, recipe="rowwise", filter="all"))
    init_weights(model, torch.device("cpu"), seed=0)
    feed_forward = torch.compile(model.layers["0"].feed_forward, backend="aot_eager_decomp_partition", fullgraph=True)
    with mock.patch.object(compiler, "joint_custom_pass", look):
        feed_forward(torch.randn(64, 128, dtype=torch.bfloat16, requires_grad=True))

    def rounded(scale: fx.Node) -> fx.Node:
        to_a_power = [user for user in scale.users if re.search("log2|floor|exp2", str(user.target))]
        return rounded(to_a_power[0]) if to_a_power else scale

    in_float64 = [node for node in joint[0].nodes if getattr(node.meta.get("val"), "dtype", None) == torch.float64]
    scales = [rounded(user) for node in in_float64 for user in node.users if user not in in_float64]
    return [{str(user.target) for user in scale.users} for scale in scales]


def test_a_scale_of_float8_is_kept_from_being_computed_again() -> None:
    (readers,) = run_ranks(1, readers_of_scales)
    assert len(readers) > 6
    assert all(targets == {"aten.as_strided.default"} for targets in readers)


def test_a_memory_budget_is_a_share_of_the_activations_alone() -> None:
    """Few tokens: copies of the weights in bfloat16, which the compiler would keep as well, are larger than all that
    depends on the tokens. Down to 0.7 the budget is met by what is cheap to compute again."""
    budget = ActivationCheckpoint(mode="budget", memory_budget=0.8)
    (whole,), (share,) = (run_ranks(1, kept_bytes, Float8(), mode, 32) for mode in (KEEP_ALL, budget))
    assert share < 0.8 * whole


def forwards_of_attention(memory_budget: float) -> int:
    """How often a compiled block's forward and backward together compute attention."""
    B, S, D = 2, 128, 256
    model = Llama(LlamaConfig(dim=D, n_layers=1, n_heads=8, n_kv_heads=2, hidden_dim=7 * D // 2, vocab_size=8))
    init_weights(model, torch.device("cpu"), seed=0)
    block = model.layers["0"]
    guide_compiler()
    apply_activation_checkpoint(block, ActivationCheckpoint(mode="budget", memory_budget=memory_budget))
    block.compile(backend="aot_eager_decomp_partition", fullgraph=True)
    cos, sin = rope_cos_sin(model.config, torch.arange(S)[None])
    x = torch.randn(B, S, D, requires_grad=True)

    block(x, cos, sin, None).sum().backward()  # to compile it computes with shapes, which counts as well
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        block(x, cos, sin, None).sum().backward()
    name = "aten::_scaled_dot_product_flash_attention_for_cpu"
    return sum(event.name == name for event in profile.events() or [])


def test_no_memory_budget_recomputes_attention() -> None:
    """The CPU's operator is one of those that the compiler by itself would compute again, as cuDNN's is."""
    assert [run_ranks(1, forwards_of_attention, budget) for budget in (0.9, 0.3)] == [[1], [1]]


def compile_with_cache(folder: Path, guided: bool = True) -> tuple[int, int]:
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


def test_a_second_start_compiles_nothing(tmp_path: Path) -> None:
    """But does not take graphs that were made without the guide."""
    (unguided,) = run_ranks(1, compile_with_cache, tmp_path, False)
    (first,) = run_ranks(1, compile_with_cache, tmp_path)
    assert unguided == first == (0, 1)
    assert run_ranks(1, compile_with_cache, tmp_path) == [(1, 0)]
