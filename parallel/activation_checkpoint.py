"""Activation checkpointing: what a block keeps for backward and what it computes again."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._functorch import config as compiler
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import parallel.context  # noqa: F401  (registers the ring's operator)
from config import ActivationCheckpoint

aten = torch.ops.aten
# Dear to compute, cheap to keep. Names of attention on every device: the CPU's is its own op.
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
    """Replace `block.forward`, in place, by one that recomputes; names of parameters stay as they are.

    In mode `budget` the compiler does it, by a setting for the whole process: it solves for the cheapest recomputation
    that keeps the given share of the activations. It is told to keep attention, some of whose operators (cuDNN's, the
    CPU's, the ring's) torch 2.11 to 2.13 would take for cheap.
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
        # By this the compiler's cache knows the policies below; without it a second start would compile all again.
        context_fn.cache_hash = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()  # type: ignore[attr-defined]
    forward = block.forward

    # A function, not a partial: torch.compile has to find the checkpoint inside a frame.
    def checkpointed_forward(*args: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **options)

    block.forward = checkpointed_forward


def exempt_from_budget(compiled: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`compiled`, but not bound by mode `budget`, which is for blocks.

    The output layer's logits are nearly all that it keeps, so more than any share: they would be computed twice.
    """

    def call(*args: Tensor) -> Tensor:
        budget = compiler.activation_memory_budget
        compiler.activation_memory_budget = 1.0  # read when a call compiles
        try:
            return compiled(*args)
        finally:
            compiler.activation_memory_budget = budget

    return call


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
    """Keep attention; the compiler chooses among the rest.

    Not among copies of weights in the compute type, which are no activations, however many the compiler would keep.
    """

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if op is aten._to_copy.default and args[0].dtype == torch.float32 and args[0].ndim == 2:
            return CheckpointPolicy.MUST_RECOMPUTE
        return CheckpointPolicy.MUST_SAVE if op in ATTENTION_OPS else CheckpointPolicy.PREFER_SAVE

    return create_selective_checkpoint_contexts(policy)
