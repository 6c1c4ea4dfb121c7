"""How a Llama is split, checkpointed, compiled and sharded: one recipe, whose order matters."""

import copy
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
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
from torch.utils._python_dispatch import TorchDispatchMode

from config import Config, ConfigError
from float8.convert import convert_to_float8, own_kernels
from float8.tensor import float8_plan, gathers_activations
from models.llama.model import Llama, LlamaConfig, Mask
from parallel.activation_checkpoint import apply_activation_checkpoint, check_activation_checkpoint, guide_compiler
from parallel.context import build_gather, local_indices, ring_attention
from parallel.fsdp import apply_fsdp, needs_fsdp
from parallel.mesh import Mesh
from parallel.pipeline import check_pipeline, layers_of_stages, stages_of_rank
from parallel.stand_ins import check_stand_in, numbers
from parallel.tensor import VocabParallelEmbedding


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
            raise ConfigError(f"parallelism.tp = {settings.tp}: must divide {name} = {size}")
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
    if chunks > 1:
        _check_logits(model)
    if settings.tp > 1 and model.tok_embeddings is not None:
        VocabParallelEmbedding.check(model.tok_embeddings)
    if settings.cp > 1:
        for block in model.layers.values():
            _check_attention(block.attention, model, settings.cp_method)
    if own_kernels(config.float8):
        _check_own_kernels(model, config)


TRIED_TOKENS = torch.zeros(1, 16, dtype=torch.int64, device="meta")


class _Operators(TorchDispatchMode):
    """Remembers the names of all operators but those that only view."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view and func is not torch.ops.aten._unsafe_view.default:
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def _check_logits(model: Llama) -> None:
    """Refuse edits of the logits that the loss in chunks would miss, as it makes them by `_compute_logits` alone."""
    before_loss: list[str] = []
    others_trained = False

    def loss(compute: Any, hidden: Tensor, weight: Tensor) -> Tensor:
        nonlocal before_loss, others_trained
        logits = compute(hidden.detach(), weight.detach())
        before_loss = list(in_chunks.names)
        others_trained = logits.requires_grad
        return logits

    with torch.device("meta"), _Operators() as whole:  # also for tensors that a fork makes without a device
        model(TRIED_TOKENS)
    with torch.device("meta"), _Operators() as in_chunks:
        model(TRIED_TOKENS, loss=loss)
    if whole.names != before_loss or in_chunks.names != before_loss:
        raise ConfigError(
            f"{type(model).__name__}.forward: has other logits than _compute_logits, of which training.loss_chunks "
            "makes the loss: edit _compute_logits, or set training.loss_chunks = 1"
        )
    if others_trained:
        raise ConfigError(
            f"{type(model).__name__}._compute_logits: trains more than hidden states and weight, which "
            "training.loss_chunks would leave without gradients: set training.loss_chunks = 1"
        )


def _check_own_kernels(model: Llama, config: Config) -> None:
    """Try a forward with own kernels on the meta device: what reads a norm's result must take it in float8."""
    trial = copy.deepcopy(model)
    convert_to_float8(trial, config.float8, config.parallelism.tp)
    trial.compute_dtype = torch.bfloat16
    try:
        with torch.device("meta"):
            trial(TRIED_TOKENS)
    except (AttributeError, TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f'float8.kernels = "own": cannot compute this {type(model).__name__} ({error}); set it to "compiler"'
        ) from None


def _check_attention(layer: Any, model: Llama, cp_method: str) -> None:
    """Refuse attention that context parallelism would not reach, or that the ring does not compute."""
    calls = 0

    def attend(q: Tensor, *_: Any) -> Tensor:
        nonlocal calls
        calls += 1
        return q

    tried = copy.copy(layer)
    tried.attend = attend
    rope = torch.zeros(1, 16, 1, layer.head_dim, device="meta")
    where = f"{type(layer).__qualname__}.forward"
    try:
        with torch.device("meta"):
            tried(torch.zeros(1, 16, model.config.dim), rope, rope, None, None, None)
    except (AttributeError, TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(f"{where}: cannot be tried ({error}), so cp might miss it: set parallelism.cp = 1") from None
    if calls != 1:
        raise ConfigError(f"{where}: does not call self.attend once, through which cp gathers: set parallelism.cp = 1")
    if cp_method != "ring":
        return
    instead = 'parallelism.cp_method = "allgather"'
    if model.always_masks:
        raise ConfigError(f"causal_mask: was edited, and the ring has no mask: set {instead}")
    q, k = numbers(1, 4, 8, 16), numbers(1, 2, 8, 16)
    plain = partial(F.scaled_dot_product_attention, is_causal=True, enable_gqa=True)
    own = partial(layer.attend, mask=None)
    what = f"{type(layer).__qualname__}.attend"
    check_stand_in(what, own, plain, [q, k, k + 1], "parallel.context.ring_attention", instead)


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

    def attend_in_ring(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
        return ring_attention(q, k, v, group_name)[0]

    def attend_to_all(own: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
        return own(q, *gather(k, v), mask)

    for block in part.layers.values():
        layer: Any = block.attention
        layer.attend = attend_in_ring if method == "ring" else partial(attend_to_all, layer.attend)


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
