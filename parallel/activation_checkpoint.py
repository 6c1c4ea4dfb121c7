"""Activation checkpointing: what a block keeps for backward and what it computes again."""

from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import config as settings
import parallel.context  # noqa: F401  (registers the ring's operator)

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


def apply_activation_checkpoint(block: nn.Module, settings: settings.ActivationCheckpoint) -> None:
    """Replace `block.forward`, in place, by one that recomputes; names of parameters stay as they are.

    In mode `budget` the compiler does it, by a setting for the whole process: it solves for the cheapest recomputation
    that keeps the given share of the activations.
    """
    if settings.mode == "none":
        return
    if settings.mode == "budget":
        compiler = torch._functorch.config
        compiler.activation_memory_budget = settings.memory_budget
        if hasattr(compiler, "unsafe_treat_script_objects_as_zero_size"):  # torch 2.13 asks how large a mesh is
            compiler.unsafe_treat_script_objects_as_zero_size = True
        return
    options: dict[str, Any] = {"context_fn": _selective_contexts} if settings.mode == "selective" else {}
    forward = block.forward

    # A function, not a partial: torch.compile has to find the checkpoint inside a frame.
    def checkpointed_forward(*args: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **options)

    block.forward = checkpointed_forward


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
