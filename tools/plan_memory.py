"""The bytes that a rank holds in a Llama's training step, by cause. Formulas only.

docs/plan.md explains them; tests compare them with a count of the real step (tools/dry_run.py).
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from loss import loss_chunks
from tools.plan_costs import (
    Weight,
    Work,
    block_weights,
    gathered_bytes,
    groups,
    kept_whole,
    local_parameters,
    padded,
)

ALLOCATOR = 1.23  # reserved / allocated, fitted on rows of benchmarks/plan.py


class Memory(NamedTuple):
    """Bytes on one rank, by cause, at the moment when it holds most."""

    weights: int
    gradients: int
    optimizer: int
    activations: int  # kept for backward, by all blocks and microbatches in flight
    working: int  # the block being computed, or the logits and their loss
    gathered: int  # whole weights, and gradients being summed; on a single rank, cast weights

    @property
    def peak(self) -> int:
        """The sum of all."""
        return sum(self)


def kept_by_block(work: Work, block: int = 0) -> int:
    """Bytes that a block keeps from forward to backward for one microbatch, in the config's checkpointing mode."""
    mode, everything = work.config.activation_checkpoint.mode, _everything(work, work.config.compile.enable)
    if mode == "none" or block % work.config.activation_checkpoint.every_n_layers:
        return everything
    if mode == "budget":
        share = work.config.activation_checkpoint.memory_budget
        if share == 0:
            return _block_input(work)
        kept = _block_input(work) + _attention(work)  # outside the budget
        return min(everything, round(kept + share * (everything - _block_input(work))))
    return _block_input(work) if mode == "full" else _selected(work)


def _kept(work: Work, blocks: list[int]) -> int:
    """Bytes that these blocks keep."""
    checkpointed = sum(block % work.config.activation_checkpoint.every_n_layers == 0 for block in blocks)
    return checkpointed * kept_by_block(work) + (len(blocks) - checkpointed) * kept_by_block(work, 1)


def _block_input(work: Work) -> int:
    return work.tokens * work.shape.dim * work.param_bytes // work.dims.tp


def _attention(work: Work) -> int:
    """Bytes of attention's result and log-sum-exp."""
    s, t = work.shape, work.dims.tp
    return work.tokens * s.n_heads * (s.head_dim * work.param_bytes + 4) // t


def _everything(work: Work, fused: bool) -> int:
    """Bytes that autograd keeps of a block: inputs of norms and matmuls, q, k, v, and all parts of SwiGLU."""
    s, t = work.shape, work.dims.tp
    heads, kv = s.n_heads * s.head_dim / t, 2 * s.n_kv_heads * s.head_dim / t
    if work.config.parallelism.cp_method == "allgather":
        kv *= work.dims.cp
    # The norms' results are gathered for the matmuls under TP. The compiler recomputes one of SwiGLU's four parts.
    elements = 2 * s.dim + 2 * heads + kv + (3 if work.config.compile.enable else 4) * s.hidden_dim / t
    return round(work.tokens * (work.param_bytes * elements + 2 * _norm(work, fused) / t + 4 * s.n_heads / t))


def _norm(work: Work, fused: bool) -> int:
    """Bytes that a norm keeps per token: its input; unfused, input and quotient in float32."""
    return work.shape.dim * (8 if work.unfused_norm and not fused else work.param_bytes)


def _selected(work: Work) -> int:
    """Bytes that mode `selective` keeps: block input, attention with log-sum-exp, and the matmuls wk, wo, w3."""
    s, t = work.shape, work.dims.tp
    elements = s.dim / t + (s.n_heads + s.n_kv_heads) * s.head_dim / t + s.hidden_dim / t
    elements += s.dim / t if work.config.compile.enable else s.dim  # compiled, the sum after attention, not wo's result
    return round(work.tokens * (work.param_bytes * elements + 4 * s.n_heads / t))


def loss_bytes(work: Work) -> int:
    """The most bytes that the loss holds per microbatch: float32 logits, log-softmax and gradients; compiled, 2 + 2.

    With tp: the logits as they came, float32 probabilities and gradients, 2 + 4 + 2.
    """
    split = work.dims.tp > 1 and not work.compiled_loss
    per_logit = 4 if work.compiled_loss else (8 if split else 12)
    if work.dims.pp > 1 and not split:
        per_logit += 2  # the schedule keeps the stage's result
    chunks = loss_chunks(work.config)
    # In chunks, gradients are ready at once: the output's sum in float32 and one chunk's, and the hidden states'.
    ready = work.shape.dim * (6 * work.shape.vocab_size + work.param_bytes * work.tokens) if chunks > 1 else 0
    return per_logit * work.tokens * work.shape.vocab_size // work.dims.tp // chunks + ready


def in_flight(work: Work) -> float:
    """How many microbatches' activations a rank keeps at once, each of all its layers."""
    p, v = work.dims.pp, work.stages_per_rank
    if p == 1:
        return 1
    if work.zero_bubble:  # also what waits for the gradients of weights
        return p
    if v == 1:
        return min(p - work.stage, work.microbatches)
    chunks = (v - 1) * p + 2 * (p - work.stage - 1) + 1
    return min(chunks, v * work.microbatches) / v


Moment = tuple[int, int, int, int]  # gradients, activations, working, gathered


def memory(work: Work) -> Memory:
    """What a rank holds at the worst moment of a step.

    Candidates are the backwards of the loss, the last two blocks, the first, the embedding, and zero bubble's of
    weights; in the first microbatch, when most are in flight, and in a later one, which finds gradients.
    """
    numbers = 0 if work.config.parallelism.cpu_offload else local_parameters(work)
    # Islands also have the outer optimizer's momentum and the weights of the last meeting.
    optimizer = numbers * (2 * work.moment_bytes + (8 if work.dims.islands > 1 else 0))
    last, first = work.layers - 1, work.layers - work.layers // work.stages_per_rank
    tried: list[Moment] = []
    for later in (False, True)[: work.microbatches]:
        tried += [_in_block(work, i, later) for i in {last, max(last - 1, first), first}]
        tried += [_in_loss(work, later)] if work.is_last else []
        tried += [_in_embedding(work, later)] if work.is_first else []
        tried += [_in_weights(work, later)] if work.zero_bubble else []
    gradients, activations, working, gathered = max(tried, key=sum)
    return Memory(4 * numbers, gradients, optimizer, activations, working, gathered)


def _in_loss(work: Work, later: bool) -> Moment:
    """The backward of the loss, which holds its own bytes and the last norm's input and result."""
    every = groups(work)
    working = loss_bytes(work) + work.tokens * (
        _norm(work, fused=False) // work.dims.tp + work.shape.dim * work.param_bytes
    )
    gathered = _gathered(work, None)
    if loss_chunks(work.config) > 1 and work.shards > 1:  # part of the forward, which keeps its last message
        gathered += gathered_bytes(work, every[-1])
    activations = _activations(work, later) + work.stage * _waiting(work)
    return _gradients(work, every) if later else 0, activations, working, gathered


def _in_block(work: Work, i: int, later: bool) -> Moment:
    """The backward of the rank's block number `i`, recomputed if the config says so."""
    every, tied, s, t = groups(work), work.shape.tie_embeddings, work.shape, work.dims.tp
    place = i + (tied or work.is_first)
    gradients = _gradients(work, every if later else every[place + 1 :])
    if tied:  # the gradient from the output waits for that from the embedding
        gradients += every[0][0].size * (4 if work.alone else work.param_bytes)
    done = 0 if work.zero_bubble else _kept(work, work.blocks[i + 1 :])
    # Without tensor parallelism the compiler makes one graph of a backward and the forward that it repeats.
    one_graph = work.config.activation_checkpoint.mode == "full" and work.recomputes(work.blocks[i]) and t == 1
    fused = work.config.compile.enable and not one_graph
    again = _everything(work, fused) - kept_by_block(work, work.blocks[i])
    # Gradients of the block's result, of w2, and two as wide as SwiGLU. The schedule keeps the last stage's result.
    numbers = work.tokens * (s.dim + 2 * s.hidden_dim) + s.dim * s.hidden_dim
    if work.dims.pp > 1 and work.is_last:
        numbers += work.tokens * s.vocab_size
    working = again + work.param_bytes * numbers // t
    if work.zero_bubble and work.is_last:
        working += 4 * work.tokens * s.vocab_size // t  # the log-softmax, whose graph is not freed yet
    activations = _activations(work, later) + (work.stage + 1) * _waiting(work) - done
    return gradients, activations, working, _gathered(work, place)


def _in_weights(work: Work, later: bool) -> Moment:
    """Zero bubble's gradients of weights, for the rank's last piece of the model, whose blocks are recomputed.

    This backward uses only the inputs of a block's matmuls. All else of the block stays to the end.
    """
    every, s = groups(work), work.shape
    gradients = _gradients(work, every) if later else 0
    used = work.tokens * work.param_bytes * (2 * s.dim + (s.n_heads * s.head_dim + s.hidden_dim) // work.dims.tp)
    again = [_everything(work, False) - kept_by_block(work, i) for i in _last_piece(work) if work.recomputes(i)]
    mine = every[-len(_last_piece(work)) - work.is_last :]  # added to the sums once all are there
    made = work.param_bytes * sum(weight.size for group in mine for weight in group)
    working = max(made, sum(again) - used * max(0, len(again) - 1))
    activations = _activations(work, later) + (work.stage + 1) * _waiting(work)
    return gradients, activations, working, _gathered(work, 0)


def _waiting(work: Work) -> int:
    """Bytes that zero bubble keeps for the gradients of weights, per microbatch in the rank's last piece of the model.

    The gradients of what matmuls and norms returned and of the piece's input; what the last norm and the output keep.
    """
    if not work.zero_bubble:
        return 0
    s, t, b = work.shape, work.dims.tp, work.param_bytes
    norm = (4 if work.unfused_norm else b) * s.dim // t
    block = b * (2 * s.dim + ((s.n_heads + 2 * s.n_kv_heads) * s.head_dim + 2 * s.hidden_dim) // t) + 2 * norm
    head = b * (s.vocab_size // t + s.dim) + norm + _norm(work, fused=False) // t if work.is_last else 0
    return work.tokens * (len(_last_piece(work)) * block + head + b * s.dim // t)


def _last_piece(work: Work) -> range:
    """The blocks of the rank's last piece of the model."""
    return work.pieces[work.stage :: work.dims.pp][-1]


def _in_embedding(work: Work, later: bool) -> Moment:
    """The backward of the embedding: its gradient, then the sum; if tied, also the output's gradient and their sum."""
    every, late = groups(work), _sums_late(work)
    size = every[0][0].size
    one = (4 if work.alone else work.param_bytes) * size
    made = 3 * one if work.shape.tie_embeddings else one
    kept = _activations(work, later) - _kept(work, work.blocks[: work.layers // work.stages_per_rank])
    in_backward = _gradients(work, every if later or late else every[1:]), kept, made, _gathered(work, 0)
    if late or work.alone:
        return in_backward
    in_sum = _gradients(work, every), kept, one + work.reduce_bytes * size, 0  # for which FSDP2 frees all whole weights
    return max(in_backward, in_sum, key=sum)


def _activations(work: Work, later: bool) -> int:
    """Bytes that the microbatches in flight keep and, in a pipeline, the buffers of all transfers of a batch."""
    flying = min(in_flight(work), max(1, work.microbatches - 1)) if later else in_flight(work)
    kept, hidden = _kept(work, work.blocks), _block_input(work)
    # A stage's input is in such a buffer. Its result is kept as well.
    kept += hidden * (work.is_first - work.is_last)
    buffers = 2 * work.stages_per_rank - work.is_first - work.is_last
    return round(flying * kept) + buffers * hidden * (work.microbatches // work.accumulation)


def _sums_late(work: Work) -> bool:
    """Whether gradients stay whole until a step's last microbatch and are summed then, as always in a pipeline."""
    return work.sums < work.microbatches


def _gradients(work: Work, some: list[list[Weight]]) -> int:
    """Bytes of the gradients of some groups."""
    if _sums_late(work):
        return work.reduce_bytes * _sum(lambda group: sum(w.size for w in group), some)
    if work.config.parallelism.cpu_offload:
        return 0
    return 4 * _sum(lambda group: sum(padded(w, work.shards) for w in group) // work.shards, some)


def _sum(size: Callable[[list[Weight]], int], some: list[list[Weight]]) -> int:
    """The sum of `size` over groups, computed once for the same object, as blocks are."""
    sizes = {key: size(group) for key, group in {id(group): group for group in some}.items()}
    return sum(sizes[id(group)] for group in some)


def _gathered(work: Work, place: int | None) -> int:
    """Bytes of whole weights and of gradients being summed, in the backward of group `place`; None: of the loss."""
    every, parallelism = groups(work), work.config.parallelism
    if work.alone:  # nothing is gathered, but cast weights wait for their backward unless their block is recomputed
        head = every[0 if work.shape.tie_embeddings else -1]
        if work.keeps_copies:
            tied = _cast_bytes(work, head) if work.shape.tie_embeddings and place is None else 0
            return _sum(partial(_copied_bytes, work), every) + tied
        waiting, now = (work.blocks, head) if place is None else (work.blocks[: max(0, place - 1)], every[place])
        one, used = _cast_bytes(work, block_weights(work)), _cast_bytes(work, now) if place != 0 else 0
        return one * sum(not work.recomputes(block) for block in waiting) + used
    # In the loss the last group is there. Only in the backward of a block are groups gathered ahead.
    ahead = max(1, parallelism.prefetch_layers) if place is not None else 0
    place = len(every) - 1 if place is None else place
    # FSDP2 keeps some groups whole, the others only while in use.
    kept = kept_whole(work)
    whole = {place, *(group for group in kept if group < place or work.dims.pp > 1)}
    whole |= set(range(max(0, place - ahead), place))
    gathered = partial(gathered_bytes, work)
    held = _sum(gathered, [every[group] for group in whole])
    if parallelism.reshard_group_size:  # before its backward a group is kept as a reshard group's shards
        others = [every[group] for group in range(place) if group not in kept]
        held += _sum(gathered, others) // parallelism.reshard_group_size
    summed = [] if _sums_late(work) else every[place + 1 : place + 2]
    return held + work.reduce_bytes * sum(weight.size for group in summed for weight in group)


def _copied_bytes(work: Work, group: list[Weight]) -> int:
    """Bytes of the copies that a rank alone keeps of a group's matmul weights."""
    matmuls = [weight for weight in group if weight.columns and weight.name != "tok_embeddings"]
    low = [weight for weight in matmuls if weight.name in work.float8_gathered]
    return sum(weight.size for weight in low) + _cast_bytes(work, [w for w in matmuls if w not in low])


def _cast_bytes(work: Work, group: list[Weight]) -> int:
    """Bytes of a group's weights cast to `param_dtype`; 0 if no cast is needed."""
    return work.param_bytes * sum(weight.size for weight in group) if work.param_bytes < 4 else 0


def reserved(memory: Memory) -> float:
    """Bytes that the allocator reserves for `memory`, partly unused. nvidia-smi shows still more."""
    return ALLOCATOR * memory.peak
