"""Activation checkpointing: what a block keeps for backward and what it computes again."""

import hashlib
import operator
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._dynamo import config as dynamo
from torch._functorch import config as compiler
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import parallel.context  # noqa: F401  (registers the ring's operator)
from config import ActivationCheckpoint, Config, ConfigError

aten = torch.ops.aten
GRAPHS_OF_BLOCKS = 64
OWN_HASH = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
# Expensive to compute, cheap to keep. Attention has another operator on each device.
ATTENTION_OPS = frozenset(
    {
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_cudnn_attention.default,
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        torch.ops.higher_order.flex_attention,
        torch.ops.titanite.ring_attention.default,
    }
)


def check_activation_checkpoint(config: Config) -> None:
    """Raises ConfigError for a budget without the compiler, which keeps to it."""
    by_inductor = config.compile.enable and config.compile.backend == "inductor"
    if config.activation_checkpoint.mode == "budget" and not by_inductor:
        needs = 'compile.enable = true and compile.backend = "inductor"'
        raise ConfigError(f'activation_checkpoint.mode = "budget": needs {needs}')


def apply_activation_checkpoint(block: nn.Module, settings: ActivationCheckpoint) -> None:
    """Replace `block.forward` in place by one that recomputes. Names of parameters do not change.

    In mode `budget` the compiler recomputes, by a setting for the whole process: it finds the cheapest recomputation
    that keeps the given share of the activations. It is told to keep attention, since torch 2.11 to 2.13 take some of
    its operators (cuDNN's, the CPU's, the ring's) for cheap.
    """
    compiler.activation_memory_budget = 1.0  # whatever an earlier model of this process had
    if settings.mode == "none":
        return
    if settings.mode == "budget":
        compiler.activation_memory_budget = settings.memory_budget
        if hasattr(compiler, "unsafe_treat_script_objects_as_zero_size"):  # torch 2.13 asks how large a mesh is
            compiler.unsafe_treat_script_objects_as_zero_size = True
    contexts = {"selective": _selective_contexts, "budget": _budget_contexts}
    options: dict[str, Any] = {}
    if settings.mode in contexts:
        context_fn: Any = contexts[settings.mode]
        # Tells the compiler's cache the policies below; without it a second start would compile everything again.
        context_fn.cache_hash = OWN_HASH
        options["context_fn"] = context_fn
    forward = block.forward

    # A function, not a partial: torch.compile has to find the checkpoint inside a frame.
    def checkpointed_forward(*args: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, **options)

    block.forward = checkpointed_forward


def guide_compiler() -> None:
    """Overrule choices of the compiler, for the whole process: what to compute again, and how many graphs to make.

    The compiler traces forward and backward of a block into one joint graph, and then decides what the forward keeps
    for the backward. Before it does, two functions here mark nodes of that graph. No value changes.
    """

    def overrule(joint: fx.GraphModule, _: Any) -> fx.GraphModule:
        _copy_in_backward(joint.graph)
        _settle_scales(joint.graph)
        return joint

    compiler.joint_custom_pass = overrule
    # A run would end at torch's limit of 8 where blocks differ, as by float8.skip: each kind has a graph for training,
    # one for validation and one for samples.
    dynamo.recompile_limit = max(dynamo.recompile_limit, GRAPHS_OF_BLOCKS)
    # The compiler's cache does not look at the pass, and would return graphs made without it, or by another.
    if OWN_HASH not in torch.compiler.config.cache_key_tag:
        torch.compiler.config.cache_key_tag += OWN_HASH


def _copy_in_backward(graph: fx.Graph) -> None:
    """Copy float8 weights in the backward, not in the forward.

    The matmul for an input's gradient reads the weight by columns, so a float8 one is copied for it. The compiler would
    do that in the forward and keep the copies of all layers, whole, for the backward, though FSDP2 frees the weights:
    56 GB for the feed-forwards of the 70B. It knows that weights cost nothing to keep, but looks for them at the wrong
    places once torchao's are taken apart into data and scale (torch 2.11 to 2.13).
    """
    for copy in graph.find_nodes(op="call_function", target=aten.clone.default):
        source = copy.args[0]
        while source.op != "placeholder" and len(source.all_input_nodes) == 1:  # a transposed weight, say
            (source,) = source.all_input_nodes
        dtype = getattr(source.meta.get("val"), "dtype", None)  # a size has none
        is_input = source.op == "placeholder"
        if is_input and dtype in (torch.float8_e4m3fn, torch.float8_e4m3fnuz):
            copy.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE


def _settle_scales(graph: fx.Graph) -> None:
    """Compute each scale of float8 once, where its maximum is found, not again in every thread that casts.

    torchao divides in float64, and recipe `rowwise` rounds to a power of two. The compiler takes that for cheap and
    repeats it in each kernel that reads the scale. It does not do so across an `as_strided`, here of the same shape
    and strides, which makes the scale a tensor in memory.
    """
    for cast in list(graph.nodes):
        if not _casts_to_scale(cast):
            continue
        scale = _after_rounding(cast)
        value = scale.meta["val"]
        sizes = (*value.shape, *value.stride())
        if not all(isinstance(size, int) for size in sizes):
            continue
        with graph.inserting_after(scale):
            settled = graph.call_function(aten.as_strided.default, (scale, value.shape, value.stride()))
        settled.meta |= scale.meta
        scale.replace_all_uses_with(settled, delete_user_cb=partial(operator.is_not, settled))


def _casts_to_scale(node: fx.Node) -> bool:
    """Whether a node casts float64 to float32, as only torchao's scales are."""
    if node.target not in (aten._to_copy.default, torch.ops.prims.convert_element_type.default):
        return False
    source = node.all_input_nodes[0]
    return source.meta["val"].dtype == torch.float64 and node.meta["val"].dtype == torch.float32


def _after_rounding(scale: fx.Node) -> fx.Node:
    """The last of the operators that round a scale to a power of two; the scale itself if there are none."""
    for rounding in (aten.log2.default, aten.floor.default, aten.exp2.default):
        for user in scale.users:
            if user.target is rounding:
                scale = user
                break
    return scale


def exempt_from_budget(compiled: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`compiled` without mode `budget`, which is for blocks.

    The logits are nearly all that the output layer keeps, so more than any share of it: they would be computed twice.
    """
    return compiler.patch("activation_memory_budget", 1.0)(compiled)  # read when a call compiles


def _selective_contexts() -> Any:
    """Keep attention and every second matmul, as torchtitan's selective mode does; recompute the rest.

    In a Llama these are wk, wo and w3. To begin with wq would end with w2, whose result no backward needs.
    """
    matmuls = {"forward": 0, "recompute": 0}

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        keep = op in ATTENTION_OPS
        if op in (aten.mm.default, aten.addmm.default, aten._scaled_mm.default):
            mode = "recompute" if context.is_recompute else "forward"
            matmuls[mode] += 1
            keep = matmuls[mode] % 2 == 0
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def _budget_contexts() -> Any:
    """Keep attention, never keep casts of weights to the compute type, and let the compiler choose among the rest.

    Such casts are no activations, but the compiler would keep them.
    """

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if op is aten._to_copy.default and args[0].dtype == torch.float32 and args[0].ndim == 2:
            return CheckpointPolicy.MUST_RECOMPUTE
        return CheckpointPolicy.MUST_SAVE if op in ATTENTION_OPS else CheckpointPolicy.PREFER_SAVE

    return create_selective_checkpoint_contexts(policy)
