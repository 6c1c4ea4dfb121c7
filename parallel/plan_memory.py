"""What a rank holds of a Llama's training step, in bytes, by cause. Formulas only.

docs/plan.md explains them; tests compare them with a count of the real step (parallel/plan_dry_run.py).
"""

from typing import NamedTuple

from config import loss_chunks
from parallel.plan_costs import Weight, Work, block_weights, gathered_bytes, groups, kept_whole, local_parameters

ALLOCATOR = 1.23  # reserved over allocated, fitted on rows of benchmarks/plan.py


class Memory(NamedTuple):
    """Bytes on one rank, by cause, when it holds most."""

    weights: int
    gradients: int
    optimizer: int
    activations: int  # kept for backward, by all blocks and microbatches in flight
    working: int  # the block being computed, or the logits and their loss
    gathered: int  # weights and gradients of the groups that are whole just then; of a rank alone, weights cast

    @property
    def peak(self) -> int:
        """Their sum."""
        return sum(self)


def kept_by_block(work: Work) -> int:
    """Bytes that a block keeps from its forward to its backward, for one microbatch, by its checkpointing mode."""
    mode, n = work.config.activation_checkpoint.mode, work.config.activation_checkpoint.every_n_layers
    everything = _everything(work)
    if mode == "none":
        return everything
    if mode == "budget":
        share = work.config.activation_checkpoint.memory_budget
        if share == 0:
            return _block_input(work)
        kept = _block_input(work) + _attention(work)  # which the budget does not include
        return min(everything, round(kept + share * (everything - _block_input(work))))
    kept = _block_input(work) if mode == "full" else _selected(work)
    return round((kept + (n - 1) * everything) / n)


def _block_input(work: Work) -> int:
    return work.tokens * work.shape.dim * work.param_bytes // work.dims.tp


def _attention(work: Work) -> int:
    """Attention's result and its log-sum-exp."""
    s, t = work.shape, work.dims.tp
    return work.tokens * s.n_heads * (s.head_dim * work.param_bytes + 4) // t


def _everything(work: Work) -> int:
    """What autograd keeps of a block: inputs of the norms and of the matmuls, q, k, v, and of SwiGLU all parts."""
    s, t = work.shape, work.dims.tp
    heads, kv = s.n_heads * s.head_dim / t, 2 * s.n_kv_heads * s.head_dim / t
    if work.config.parallelism.cp_method == "allgather":
        kv *= work.dims.cp
    # The norms' results, gathered for the matmuls under tensor parallel. The compiler recomputes one of SwiGLU's four.
    elements = 2 * s.dim + 2 * heads + kv + (3 if work.config.compile.enable else 4) * s.hidden_dim / t
    unfused = work.unfused_norm and not work.config.compile.enable
    norm = 8 * s.dim if unfused else work.param_bytes * s.dim  # float32 input and quotient, or the input alone
    return round(work.tokens * (work.param_bytes * elements + 2 * norm / t + 4 * s.n_heads / t))


def _selected(work: Work) -> int:
    """Block input, attention with its log-sum-exp, and the matmuls wq, wv, w1, w2."""
    s, t = work.shape, work.dims.tp
    elements = s.dim / t + (2 * s.n_heads + s.n_kv_heads) * s.head_dim / t + s.hidden_dim / t
    if not work.config.compile.enable:  # the compiler sees that nobody reads w2's
        elements += s.dim
    return round(work.tokens * (work.param_bytes * elements + 4 * s.n_heads / t))


def loss_bytes(work: Work) -> int:
    """The most that the loss holds, per microbatch: logits in float32, their log-softmax and gradients, or 2 + 2."""
    per_logit = 4 if work.compiled_loss else (16 if work.dims.tp > 1 else 12)
    if work.dims.pp > 1:
        per_logit += 2  # the schedule holds on to the stage's result
    chunks = loss_chunks(work.config)
    # In chunks, the gradients of the output's weight are summed up in float32 meanwhile; one chunk's are added.
    weight = 6 * work.shape.vocab_size * work.shape.dim if chunks > 1 else 0
    return per_logit * work.tokens * work.shape.vocab_size // work.dims.tp // chunks + weight


def in_flight(work: Work) -> float:
    """Microbatches whose activations a rank keeps at once, each of all its layers."""
    p, v = work.dims.pp, work.stages_per_rank
    if p == 1:
        return 1
    if v == 1:
        return min(p - work.stage, work.microbatches)
    chunks = (v - 1) * p + 2 * (p - work.stage - 1) + 1
    return min(chunks, v * work.microbatches) / v


def memory(work: Work) -> Memory:
    """What a rank holds at the worst moment of a step.

    Tried are: the backward of the loss, that of the last block, and that of the first block, when the activations of
    the others are gone and all gradients are there.
    """
    hidden = work.tokens * work.shape.dim * work.param_bytes
    swiglu = work.tokens * work.shape.hidden_dim * work.param_bytes // work.dims.tp
    numbers = 0 if work.config.parallelism.cpu_offload else local_parameters(work)
    # Islands: also the outer optimizer's momentum, and the weights of the last meeting.
    optimizer = numbers * (2 * work.moment_bytes + (8 if work.dims.islands > 1 else 0))
    pipeline = work.dims.pp > 1
    # A pipeline sums gradients over its ranks after the last microbatch, so until then they are whole.
    # So they are where they are summed once a step.
    late = pipeline or work.sums < work.batches
    gradients = work.reduce_bytes * sum(w.size for group in groups(work) for w in group) if late else 4 * numbers
    earlier = gradients if work.microbatches > 1 else 0

    per_microbatch = work.layers * kept_by_block(work)
    # In a pipeline the second microbatch's backward finds whole gradients; the first, the most in flight.
    first = round(in_flight(work) * per_microbatch)
    flying = min(in_flight(work), max(1, work.microbatches - 1)) if pipeline else 1
    blocks = round(flying * per_microbatch)
    others = blocks - per_microbatch + kept_by_block(work)

    # A block is computed again, then backward walks through it with two gradients as wide as SwiGLU.
    again = max(0, _everything(work) - kept_by_block(work)) + 2 * hidden + 2 * swiglu
    in_block, waiting, in_loss = _gathered(work)
    tried = [
        (0, first, again, in_block),
        (earlier, blocks, again, in_block + waiting),
        (gradients, others, again, in_block),
    ]
    if work.is_last:
        tried.append((earlier, blocks, loss_bytes(work) + 2 * hidden // work.dims.tp, in_loss))
    at, activations, working, gathered = max(tried, key=sum)
    return Memory(4 * numbers, at, optimizer, activations, working, gathered)


def _gathered(work: Work) -> tuple[int, int, int]:
    """Bytes of whole weights: while a block computes, its gradients included; of others that wait; during the loss."""
    all_groups, block = groups(work), block_weights(work)
    if work.alone:  # nothing is gathered, but weights that matmuls cast wait for their backward, unless recomputed
        head = all_groups[0 if work.shape.tie_embeddings else -1]
        in_head, one = (_cast_bytes(work, group) for group in (head, block))
        waiting = max(0, work.layers - work.recomputed - 1) * one
        return in_head + one, waiting, in_head + one + waiting
    # FSDP2 keeps some groups whole, and of the others two: in use and next. One block's gradients are on their way.
    held = sum(gathered_bytes(work, all_groups[i]) for i in kept_whole(work))
    one, numbers, parallelism = gathered_bytes(work, block), sum(w.size for w in block), work.config.parallelism
    if work.dims.pp > 1:
        return held + numbers * work.param_bytes, 0, held
    in_block = (2 + parallelism.prefetch_layers) * one + numbers * (work.param_bytes + work.reduce_bytes)
    # What waits for its backward: weights not freed after the forward, or freed down to a reshard group's share.
    if parallelism.reshard_group_size:
        waiting = work.layers * one // parallelism.reshard_group_size
        return in_block, waiting, held + waiting
    return in_block, 0 if parallelism.reshard_after_forward else work.layers * one, held


def _cast_bytes(work: Work, group: list[Weight]) -> int:
    """Bytes of a group's weights once they are cast to `param_dtype`, if they are."""
    return work.param_bytes * sum(weight.size for weight in group) if work.param_bytes < 4 else 0


def reserved(memory: Memory) -> float:
    """Bytes that the allocator holds for `memory`, of which it leaves a part unused; what nvidia-smi shows is more."""
    return ALLOCATOR * memory.peak
