"""Activation checkpointing: what a block keeps for backward and what it computes again."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._functorch import config as compiler
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import parallel.context  # noqa: F401  (registers the ring's operator)
from config import ActivationCheckpoint

aten = torch.ops.aten
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


def apply_activation_checkpoint(block: nn.Module, settings: ActivationCheckpoint) -> None:
    """Replace `block.forward` in place by one that recomputes. Names of parameters do not change.

    In mode `budget` the compiler recomputes, by a setting for the whole process: it finds the cheapest recomputation
    that keeps the given share of the activations. It is told to keep attention, since torch 2.11 to 2.13 take some of
    its operators (cuDNN's, the CPU's, the ring's) for cheap.
    """
    if settings.mode == "none":
        return
    if settings.mode == "budget":
        compiler.activation_memory_budget = settings.memory_budget
        if hasattr(compiler, "unsafe_treat_script_objects_as_zero_size"):  # torch 2.13 asks how large a mesh is
            compiler.unsafe_treat_script_objects_as_zero_size = True
    contexts = {"selective": _selective_contexts, "budget": _budget_contexts}
    options: dict[str, Any] = {}
    if settings.mode in contexts:
        options["context_fn"] = context_fn = contexts[settings.mode]
        # Tells the compiler's cache the policies below; without it a second start would compile everything again.
        context_fn.cache_hash = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()  # type: ignore[attr-defined]
    forward = block.forward

    # A function, not a partial: torch.compile has to find the checkpoint inside a frame.
    def checkpointed_forward(*args: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **options)

    block.forward = checkpointed_forward


def guide_compiler() -> None:
    """Overrule two choices of the compiler, for the whole process, of what a forward keeps for its backward.

    Between attention and feed-forward it would keep the result of the matmul, not its sum with the residual stream,
    which takes as much memory and is what the backward needs. To sum again costs a fifth of what a block's own kernels
    read and write in the backward: each norm's kernel then reads tensors of both (torch 2.13, code for an H100).

    The matmul for an input's gradient reads the weight by columns, so a float8 one is copied for it. The compiler would
    do that in the forward and keep the copies of all layers, whole, for the backward, though FSDP2 frees the weights:
    56 GB for the feed-forwards of the 70B. It knows that weights cost nothing to keep, but looks for them at the wrong
    places once torchao's are taken apart into data and scale (torch 2.11 to 2.13).
    """
    compiler.joint_custom_pass = _overrule


def _overrule(joint: fx.GraphModule, _: Any) -> fx.GraphModule:
    sums = set(joint.graph.find_nodes(op="call_function", target=aten.add.Tensor))
    for term in {term for total in sums for term in total.all_input_nodes if term in sums}:
        undecided = term.meta.get("recompute") in (None, CheckpointPolicy.PREFER_SAVE)
        # A budget as small as to compute the matmul again would be exceeded; one of 0.6 keeps all matmuls' results.
        if undecided and term.meta.get("partitioner_tag") == "is_forward" and compiler.activation_memory_budget >= 0.6:
            term.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    for copy in joint.graph.find_nodes(op="call_function", target=aten.clone.default):
        source = copy.args[0]
        while source.op != "placeholder" and len(source.all_input_nodes) == 1:  # a transposed weight, say
            (source,) = source.all_input_nodes
        if source.op == "placeholder" and source.meta["val"].dtype in (torch.float8_e4m3fn, torch.float8_e4m3fnuz):
            copy.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
    return joint


def exempt_from_budget(compiled: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`compiled` without mode `budget`, which is for blocks.

    The logits are nearly all that the output layer keeps, so more than any share of it: they would be computed twice.
    """

    return compiler.patch("activation_memory_budget", 1.0)(compiled)  # read when a call compiles


def _selective_contexts() -> Any:
    """Keep attention and every second matmul, as torchtitan's selective mode does; recompute the rest."""
    matmuls = {"forward": 0, "recompute": 0}

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        keep = op in ATTENTION_OPS
        if op in (aten.mm.default, aten.addmm.default, aten._scaled_mm.default):
            mode = "recompute" if context.is_recompute else "forward"
            matmuls[mode] += 1
            keep = matmuls[mode] % 2 == 1
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
