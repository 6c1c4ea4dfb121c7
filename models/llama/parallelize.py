"""How a Llama is split, checkpointed, compiled and sharded: one recipe, whose order matters."""

import copy
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from config import Config, ConfigError
from float8.tensor import float8_plan, gathers_activations
from models.llama.model import Llama, LlamaConfig, Mask, attention
from parallel.activation_checkpoint import apply_activation_checkpoint, check_activation_checkpoint, guide_compiler
from parallel.context import ATTENTION, build_gather, local_indices, ring_attention
from parallel.fsdp import apply_fsdp, needs_fsdp
from parallel.mesh import Mesh
from parallel.originals import check_forward, check_original
from parallel.pipeline import check_pipeline, layers_of_stages, stages_of_rank
from parallel.tensor import VocabParallelEmbedding

OUTPUT = "f9c13d2b755c"  # digest of the output layer that the loss in chunks knows, see parallel/originals.py


def apply_parallelism(
    model: Llama, mesh: Mesh, config: Config, block_plan: Mapping[str, ParallelStyle] | None = None
) -> list[nn.Module]:
    """Split and change `model` (on the meta device): PP → TP → CP → activation checkpointing → compile → FSDP2.

    Returns the parts this rank holds: its pipeline stages, or without a pipeline `model` itself. `block_plan` says how
    TP splits a block, by default `plan_of_block`: for blocks with more in them than Llama's.
    """
    parts = split_stages(model, mesh, config) if mesh.pp.size() > 1 else [model]
    for part in parts:
        if mesh.tp.size() > 1:
            apply_tensor_plans(part, block_plan or plan_of_block(part.config), mesh, config)
        if mesh.cp.size() > 1:
            apply_context_parallel(part, mesh, config.parallelism.cp_method)
        checkpoint_and_compile(part, mesh, config)
        if needs_fsdp(config, mesh.size()):
            apply_fsdp(part, fsdp_groups(part), mesh.fsdp, config)
        else:
            part.compute_dtype = getattr(torch, config.training.param_dtype)
    return list(parts)


def check_parallelism(flavor: LlamaConfig, config: Config) -> None:
    """Raises ConfigError if this Llama cannot be split as `config` asks."""
    settings = config.parallelism
    for name in ("n_heads", "n_kv_heads", "hidden_dim", "vocab_size"):
        size = getattr(flavor, name)
        if size % settings.tp:
            hint = "; without initial weights, model.vocab_size may be larger" * (name == "vocab_size")
            raise ConfigError(f"parallelism.tp = {settings.tp}: must divide {name} = {size}{hint}")
    pieces = settings.tp
    if settings.cp > 1:
        pieces *= 2 * settings.cp
    for seq_len in config.training.seq_lens:
        if seq_len % pieces:
            needed = f"must be a multiple of {pieces}, for parallelism.tp and cp"
            raise ConfigError(f"training.seq_len = {seq_len}: {needed}")
    if settings.cp > 1 and settings.cp_method == "ring" and config.data.mask_documents:
        raise ConfigError('parallelism.cp_method = "ring": cannot tell documents apart; set it to "allgather"')
    if settings.cp > 1 and settings.cp_method == "ring" and any(flavor.windows):
        raise ConfigError('parallelism.cp_method = "ring": has no windows, which the model has; set it to "allgather"')
    if settings.tp > 1 and flavor.qk_norm == "width":
        raise ConfigError(f"parallelism.tp = {settings.tp}: no rank has the whole width of q and k, which are normed")
    if settings.pp > 1 and flavor.tie_embeddings:
        raise ConfigError(f"parallelism.pp = {settings.pp}: the model has one weight as embedding and output")
    check_activation_checkpoint(config)
    check_pipeline(config, flavor.n_layers)


def check_replacements(model: Llama, config: Config, chunks: int) -> None:
    """Refuse edits of the model that a parallelism, or the loss in `chunks`, would ignore. Raises ConfigError."""
    settings = config.parallelism
    if chunks > 1 and model.output is not None:
        check_forward(model.output, {OUTPUT}, "loss.build_chunked_loss", "training.loss_chunks = 1")
    if settings.tp > 1 and model.tok_embeddings is not None:
        VocabParallelEmbedding.check(model.tok_embeddings)
    if settings.cp > 1:
        for block in model.layers.values():
            _check_attention(block.attention, settings.cp_method)


def _check_attention(layer: Any, cp_method: str) -> None:
    if cp_method == "ring":
        instead = 'parallelism.cp_method = "allgather"'
        check_original(layer.attend, {ATTENTION}, "parallel.context.ring_attention", instead)
    forward = type(layer).forward
    if "attend" not in forward.__code__.co_names:
        raise ConfigError(f"{forward.__qualname__}: does not call self.attend, through which cp gathers: set cp = 1")


# The matmuls of a block come in pairs, the first split by columns, the second by rows (Megatron-LM). So ranks
# communicate only before and after a pair. Between pairs each holds a part of the tokens of all sequences, [B * S, D]:
# a collective along the first dimension needs no copy.
BLOCK_PLAN: dict[str, ParallelStyle] = {
    "attention_norm": SequenceParallel(sequence_dim=0),
    "attention": PrepareModuleInput(input_layouts=(Shard(0),), desired_input_layouts=(Replicate(),)),
    "attention.wq": ColwiseParallel(),
    "attention.wk": ColwiseParallel(),
    "attention.wv": ColwiseParallel(),
    "attention.wo": RowwiseParallel(output_layouts=Shard(0)),
    "ffn_norm": SequenceParallel(sequence_dim=0),
    "feed_forward": PrepareModuleInput(input_layouts=(Shard(0),), desired_input_layouts=(Replicate(),)),
    "feed_forward.w1": ColwiseParallel(),
    "feed_forward.w3": ColwiseParallel(),
    "feed_forward.w2": RowwiseParallel(output_layouts=Shard(0)),
}
# Norms of heads, of which a rank has some, [B, S, heads, H].
QK_NORM_PLAN: dict[str, ParallelStyle] = {
    "attention.q_norm": SequenceParallel(sequence_dim=2, use_local_output=True),
    "attention.k_norm": SequenceParallel(sequence_dim=2, use_local_output=True),
}
# Norms whose result is added to the residual stream, a plain tensor.
NORM_AFTER_PLAN: dict[str, ParallelStyle] = {
    "attention_norm": SequenceParallel(sequence_dim=0, use_local_output=True),
    "ffn_norm": SequenceParallel(sequence_dim=0, use_local_output=True),
}


def plan_of_block(flavor: LlamaConfig) -> dict[str, ParallelStyle]:
    """BLOCK_PLAN, and what the options of `flavor` change in it."""
    plan = dict(BLOCK_PLAN)
    if flavor.qk_norm:
        plan |= QK_NORM_PLAN
    if flavor.norm_after:
        plan |= NORM_AFTER_PLAN
    return plan


# How it splits the layers outside the blocks: embedding and output by vocabulary, and with them the loss.
OUTER_PLAN: dict[str, ParallelStyle] = {
    "tok_embeddings": VocabParallelEmbedding(),
    "norm": SequenceParallel(sequence_dim=0),
    "output": ColwiseParallel(input_layouts=Shard(0), output_layouts=Shard(-1)),
}
ALL_TOKENS = PrepareModuleOutput(output_layouts=Shard(0), desired_output_layouts=Replicate(), use_local_output=False)


def apply_tensor_plans(part: Llama, block_plan: Mapping[str, ParallelStyle], mesh: Mesh, config: Config) -> None:
    """Split the blocks and the layers outside them over tp. Raises ConfigError for a weight that is in no plan."""
    frozen = {name for name, weight in part.named_parameters() if not weight.requires_grad}
    outer_plan = {name: style for name, style in OUTER_PLAN.items() if getattr(part, name) is not None}
    parallelize_module(part, mesh.tp, outer_plan)
    if part.config.tie_embeddings:  # the embedding is also the output, which needs all tokens
        parallelize_module(part, mesh.tp, {"norm": ALL_TOKENS})
    in_float8 = gathers_activations(config.float8)
    for block in part.layers.values():  # a plan per block, since float8 may have converted only some
        plan = float8_plan(block, block_plan, mesh.tp.device_type) if in_float8 else block_plan
        parallelize_module(block, mesh.tp, dict(plan))
    for name, weight in part.named_parameters():
        weight.requires_grad_(name not in frozen)  # torch has made new parameters, all of them trainable
        if not isinstance(weight, DTensor):
            raise ConfigError(
                f"parallelism.tp = {mesh.tp.size()}: {name} is in no plan, and each rank would train a copy of its "
                "own; add its module to the block_plan, or set tp = 1"
            )


def apply_context_parallel(part: Llama, mesh: Mesh, method: str) -> None:
    """Give this rank its part of every sequence, and its attention the keys and values of the others."""
    device = torch.device(mesh.cp.device_type)
    part.local_indices = partial(local_indices, mesh=mesh.cp, device=device)
    part.local_mask = method == "allgather"
    gather = build_gather(mesh.cp)
    group_name = mesh.cp.get_group().group_name

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
        if method == "ring":
            return ring_attention(q, k, v, group_name)[0]
        return attention(q, *gather(k, v), mask)

    for block in part.layers.values():
        block.attention.attend = attend  # type: ignore[union-attr]


def checkpoint_and_compile(part: Llama, mesh: Mesh, config: Config) -> None:
    """Apply activation checkpointing to every n-th block, and compile each block as one graph."""
    checkpointing, compile = config.activation_checkpoint, config.compile
    dynamic = None
    if len(config.training.seq_lens) > 1:
        dynamic = False  # a graph for each length is faster than one for all
    if compile.enable:
        guide_compiler()
    # The checkpoint goes inside the compiled graph, so that the compiler fuses the recomputation. But with TP and
    # `full` it goes outside: torch 2.13 fails to keep a mesh for the backward.
    compile_first = compile.enable and mesh.tp.size() > 1 and checkpointing.mode == "full"
    for i, block in part.layers.items():
        if compile_first:
            block.forward = torch.compile(block.forward, backend=compile.backend, fullgraph=True, dynamic=dynamic)
        if int(i) % checkpointing.every_n_layers == 0:
            apply_activation_checkpoint(block, checkpointing)
        if compile.enable and not compile_first:
            # Per block, so that all layers share one compiled graph and FSDP's hooks stay between the graphs.
            block.compile(backend=compile.backend, fullgraph=True, dynamic=dynamic)


def fsdp_groups(part: Llama) -> list[list[nn.Module]]:
    """The groups of modules that FSDP2 gathers together, in order of use. The root gathers the rest."""
    groups: list[list[nn.Module]] = [[block] for block in part.layers.values()]
    if part.config.tie_embeddings:  # the shared weight belongs to the root, gathered for the whole step
        return groups
    if part.tok_embeddings is not None:
        groups.insert(0, [part.tok_embeddings])
    if part.norm is not None and part.output is not None:
        groups.append([part.norm, part.output])
    return groups


def split_stages(model: Llama, mesh: Mesh, config: Config) -> list[Llama]:
    """The pipeline stages of this rank: copies of `model` (on the meta device), each with some of the layers.

    Raises ConfigError for a weight that more than one stage would train.
    """
    settings = config.parallelism
    for name, weight in model.named_parameters():
        if weight.requires_grad and not name.startswith(("tok_embeddings.", "layers.", "norm.", "output.")):
            raise ConfigError(f"parallelism.pp = {settings.pp}: each stage would train a {name} of its own; set pp = 1")
    own = stages_of_rank(mesh.pp.get_local_rank(), settings)
    layers = layers_of_stages(model.config.n_layers, mesh.pp.size() * len(own))
    parts = []
    for stage in own:
        part = copy.deepcopy(model)
        part.layers = nn.ModuleDict({str(i): part.layers[str(i)] for i in layers[stage]})
        if stage > 0:
            part.tok_embeddings = None
            part.seq_len = config.training.max_seq_len
        if stage < len(layers) - 1:
            part.norm = part.output = None
        parts.append(part)
    return parts
