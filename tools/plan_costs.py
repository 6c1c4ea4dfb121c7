"""What a Llama's step costs a rank, by formulas only: weights, floating-point operations, bytes sent.

docs/plan.md explains them; tests compare each with a count of the real step (tools/dry_run.py).

Letters: T tokens of a microbatch on a rank   D dim   F hidden_dim   N query heads   K key/value heads   H head_dim
V vocabulary   t = tp. The "bytes" of a tensor are those of the whole tensor that a group works on, not a rank's part.
"""

import dataclasses
import functools
import itertools
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

from config import Config
from data.place import grad_accum_steps
from float8.convert import gathers_float8
from float8.fsdp import precomputes_scales
from float8.tensor import gathers_activations
from models.weights import keeps_copies
from parallel.fsdp import needs_fsdp
from parallel.mesh import ParallelDims
from parallel.pipeline import layers_of_stages

DEFAULT_VOCAB_SIZE = 4096  # for a flavor that takes its tokenizer's: that of the default run
# Layers that tensor parallelism splits by columns, grouped by the gathered input they read; and those split by rows.
READERS = (frozenset({"wq", "wk", "wv"}), frozenset({"w1", "w3"}))
BY_ROWS = frozenset({"wo", "w2"})


class Traffic(NamedTuple):
    """Collectives of one kind on one axis, in one rank's step. `bytes` are those of the whole tensors."""

    axis: str
    kind: str
    calls: int
    bytes: int


class Weight(NamedTuple):
    """A rank's part of a weight after tensor parallelism, before FSDP2 shards its rows."""

    name: str
    rows: int
    columns: int  # 0: a vector

    @property
    def size(self) -> int:
        """How many numbers it has."""
        return self.rows * max(1, self.columns)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """A run as the formulas see it, on the ranks of one stage of the pipeline.

    `shape` is a flavor (dim, n_layers, ...). `float8_layers` names the converted linear layers. `compiled_loss` is
    separate from config.compile since others compile only one of the two. `unfused_norm`: the device has no kernel for
    RMSNorm, as the CPU, so autograd keeps its parts. `parameters` and `flops_per_token` are the whole model's counts.
    """

    shape: Any
    config: Config
    dims: ParallelDims
    float8_layers: frozenset[str] = frozenset()
    compiled_loss: bool = False
    unfused_norm: bool = False
    stage: int = 0
    parameters: int = 0
    flops_per_token: int = 0

    @property
    def microbatch(self) -> int:
        """Sequences that a rank computes at once."""
        parallelism, training = self.config.parallelism, self.config.training
        return parallelism.pp_microbatch_size if self.dims.pp > 1 else training.local_batch_size

    @property
    def tokens(self) -> int:
        """T."""
        return self.microbatch * self.config.training.seq_len // self.dims.cp

    @property
    def accumulation(self) -> int:
        """Batches of local_batch_size sequences in a step."""
        return grad_accum_steps(self.config.training, self.dims.dp)

    @property
    def microbatches(self) -> int:
        """Microbatches in a step."""
        return self.accumulation * (self.config.training.local_batch_size // self.microbatch)

    @property
    def param_bytes(self) -> int:
        """Bytes of a number in the type that blocks compute in."""
        return 2 if self.config.training.param_dtype == "bfloat16" else 4

    @property
    def reduce_bytes(self) -> int:
        """Bytes of a number of gradients while they are summed."""
        return 2 if self.config.training.reduce_dtype == "bfloat16" else 4

    @property
    def moment_bytes(self) -> int:
        """Bytes of a number of each of AdamW's two moments."""
        return 2 if self.config.optimizer.state_dtype == "bfloat16" else 4

    @property
    def stages_per_rank(self) -> int:
        """Pieces of the model on a rank."""
        one = self.dims.pp == 1 or self.config.parallelism.pp_schedule == "1F1B"
        return 1 if one else self.config.parallelism.pp_stages_per_rank

    @property
    def is_first(self) -> bool:
        """Whether the rank holds the embedding."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """Whether the rank computes the loss."""
        return self.stage == self.dims.pp - 1

    @functools.cached_property
    def blocks(self) -> list[int]:
        """Numbers of the rank's blocks, in all its pieces of the model."""
        return [block for piece in self.pieces[self.stage :: self.dims.pp] for block in piece]

    @property
    def layers(self) -> int:
        """How many blocks the rank holds."""
        return len(self.blocks)

    @functools.cached_property
    def pieces(self) -> list[range]:
        """Numbers of the blocks of each piece of the model, which the ranks of a pipeline get in turn."""
        return layers_of_stages(self.shape.n_layers, self.dims.pp * self.stages_per_rank)

    @property
    def zero_bubble(self) -> bool:
        """Whether backward computes the gradients of inputs first and those of weights later."""
        return self.dims.pp > 1 and "ZeroBubble" in self.config.parallelism.pp_schedule

    def splits(self, block: int) -> bool:
        """Whether zero bubble splits a block's backward so. The model's first piece has no gradient of an input."""
        return self.zero_bubble and block not in self.pieces[0]

    @functools.cached_property
    def recomputed_share(self) -> float:
        """How often a block repeats its forward in backward, as the model's mean, without the compiler's choices."""
        return sum(map(self.recomputes, range(self.shape.n_layers))) / self.shape.n_layers

    def recomputes(self, block: int) -> int:
        """How often this block repeats its forward."""
        checkpoint = self.config.activation_checkpoint
        if checkpoint.mode not in ("full", "selective") or block % checkpoint.every_n_layers:
            return 0
        return 1 + self.splits(block)  # for its input's gradient, and again for its weights'

    @functools.cached_property
    def recomputed(self) -> int:
        """How often all the rank's blocks together repeat their forward."""
        return sum(map(self.recomputes, self.blocks))

    @property
    def keys_go_again(self) -> bool:
        """Whether a block that repeats its forward gets other ranks' keys again: not if it keeps the ring's result."""
        return self.config.parallelism.cp_method != "ring" or self.config.activation_checkpoint.mode == "full"

    @property
    def shards(self) -> int:
        """Ranks over which weights are sharded."""
        return self.dims.shards

    @functools.cached_property
    def float8_gathered(self) -> frozenset[str]:
        """The `float8_layers` whose weights FSDP2 gathers in float8, as float8.convert chooses them."""
        rows = {w.name: w.rows * (1 if w.name in BY_ROWS else self.dims.tp) for group in groups(self) for w in group}
        even = {name for name, whole in rows.items() if whole % (self.dims.tp * self.shards) == 0}
        return self.float8_layers & even if gathers_float8(self.config.float8) else frozenset()

    @property
    def alone(self) -> bool:
        """Whether a rank trains without FSDP2."""
        return not needs_fsdp(self.config, self.dims.dp * self.dims.copies // self.dims.islands)

    @property
    def keeps_copies(self) -> bool:
        """Whether a rank alone casts its weights once per step."""
        return self.alone and keeps_copies(self.config)

    @property
    def batches(self) -> int:
        """How often weights are gathered in a step: 1F1B keeps them to the step's end, other pipelines for a batch."""
        if self.dims.pp > 1:
            return 1 if self.config.parallelism.pp_schedule == "1F1B" else self.accumulation
        return self.microbatches

    @property
    def sums(self) -> int:
        """How often gradients are summed over shards in a step. A rank alone puts it off only with `cpu_offload`."""
        parallelism = self.config.parallelism
        alone = self.dims.dp * self.dims.cp == self.dims.islands and not parallelism.cpu_offload
        every = (parallelism.sync_every_microbatch or alone) and self.dims.pp == 1
        return self.microbatches if every else 1


# ---------------------------------------------------------------- weights


def block_weights(work: Work) -> list[Weight]:
    """The weights of one block, as one rank has them."""
    s, t = work.shape, work.dims.tp
    q, kv, f = s.n_heads * s.head_dim // t, s.n_kv_heads * s.head_dim // t, s.hidden_dim // t
    return [
        Weight("attention_norm", s.dim, 0),
        Weight("wq", q, s.dim),
        Weight("wk", kv, s.dim),
        Weight("wv", kv, s.dim),
        Weight("wo", s.dim, q),
        Weight("ffn_norm", s.dim, 0),
        Weight("w1", f, s.dim),
        Weight("w2", s.dim, f),
        Weight("w3", f, s.dim),
    ]


def groups(work: Work) -> list[list[Weight]]:
    """The rank's weights, by the groups that are gathered together, in order of use."""
    s = work.shape
    table = Weight("tok_embeddings", s.vocab_size // work.dims.tp, s.dim)
    output, norm = table._replace(name="output"), Weight("norm", s.dim, 0)
    blocks = [block_weights(work)] * work.layers
    if s.tie_embeddings:
        return [[table, norm], *blocks]
    first = [[table]] if work.is_first else []
    last = [[norm, output]] if work.is_last else []
    return [*first, *blocks, *last]


def kept_whole(work: Work) -> set[int]:
    """Which groups stay gathered from forward to backward. In a pipeline these are all groups.

    Else they are the last, which backward uses first, and the root with its tied weights.
    """
    n_groups = len(groups(work))
    if work.dims.pp > 1 or not work.config.parallelism.reshard_after_forward:
        return set(range(n_groups))
    return {0, n_groups - 1} if work.shape.tie_embeddings else {n_groups - 1}


def gathers(work: Work, group: int) -> tuple[int, int]:
    """How often a group's weights are gathered in a step: (over all shards, over the shards of a reshard group)."""
    parallelism = work.config.parallelism
    if group in kept_whole(work):
        once = not parallelism.sync_every_microbatch and not parallelism.reshard_after_forward
        return (1 if once else work.batches), 0
    within = work.batches if parallelism.reshard_group_size else 0
    return 2 * work.batches - within, within


def padded(weight: Weight, ranks: int) -> int:
    """Numbers in `weight` with its rows padded to a multiple of the ranks that share them."""
    return -(-weight.rows // ranks) * ranks * max(1, weight.columns)


def gathered_bytes(work: Work, group: list[Weight]) -> int:
    """Bytes of a group's weights in the types in which they are gathered."""
    in_float8 = work.float8_gathered
    return sum(padded(weight, work.shards) * (1 if weight.name in in_float8 else work.param_bytes) for weight in group)


def local_parameters(work: Work) -> int:
    """Numbers of weights that a rank keeps between steps, with padding."""
    return sum(padded(weight, work.shards) // work.shards for group in groups(work) for weight in group)


# ---------------------------------------------------------------- traffic


Message = tuple[str, str, int, int]  # axis, kind, bytes of the whole tensor, how often in a step


def traffic(work: Work) -> list[Traffic]:
    """All collectives and sends in one rank's step. With islands, in a step after which they meet.

    Small ones are included, except those on the host: votes to stop, and checkpoints'.
    """
    dims = work.dims
    ranks = {"world": dims.dp * dims.copies, "dp_replicate": dims.dp_replicate, "dp_shard_cp": dims.shards}
    ranks |= {"cp": dims.cp, "tp": dims.tp, "pp": dims.pp}
    ranks["reshard_group"] = work.config.parallelism.reshard_group_size
    calls: Counter[tuple[str, str]] = Counter()
    total: Counter[tuple[str, str]] = Counter()
    causes = (_loss_messages, _fsdp_messages, _island_messages, _tensor_messages, _context_messages, _pipeline_messages)
    for axis, kind, size, times in itertools.chain.from_iterable(cause(work) for cause in causes):
        if times and (ranks[axis] > 1 or axis == "world"):
            key = ("world" if ranks[axis] == ranks["world"] else axis), kind
            calls[key] += times
            total[key] += times * size
    return [Traffic(*key, calls[key], total[key]) for key in sorted(calls)]


def _loss_messages(work: Work) -> Iterator[Message]:
    yield "world", "all_reduce", 8 * work.dims.islands, 1  # tokens of the step
    yield "world", "all_reduce", 4, 1  # its loss


def _fsdp_messages(work: Work) -> Iterator[Message]:
    all_groups, ranks, reduce_bytes = groups(work), work.shards, work.reduce_bytes
    summing = "all_to_all" if work.config.parallelism.reduce_scatter == "all_to_all" else "reduce_scatter"
    n_weights, n_scales = sum(map(len, all_groups)), 0
    for i, group in enumerate(all_groups):
        numbers = sum(padded(weight, ranks) for weight in group)
        everywhere, within = gathers(work, i)
        gathered = gathered_bytes(work, group)
        yield "dp_shard_cp", "all_gather", gathered, everywhere
        yield "reshard_group", "all_gather", gathered, within
        yield "dp_shard_cp", summing, numbers * reduce_bytes, work.sums
        yield "dp_replicate", "all_reduce", numbers * reduce_bytes // ranks, int(work.dims.islands == 1)
        in_float8 = sum(weight.name in work.float8_gathered for weight in group)
        if not precomputes_scales(work.config):
            yield "dp_shard_cp", "all_reduce", 4, everywhere * in_float8
        n_scales += in_float8
    yield "dp_shard_cp", "all_reduce", 4 * n_weights, 1  # norms of the gradients
    yield "tp", "all_reduce", 4 * n_weights, 1
    if n_scales and precomputes_scales(work.config):  # one message per piece of the model
        for axis in ("dp_shard_cp", "tp"):
            yield axis, "all_reduce", 4 * n_scales, 1
            yield axis, "all_reduce", 0, work.stages_per_rank - 1


def _island_messages(work: Work) -> Iterator[Message]:
    """A meeting of islands: a message for each weight's change and each of its two moments. Each step: the norm."""
    if work.dims.islands == 1:
        return
    for weight in itertools.chain(*groups(work)):
        numbers = padded(weight, work.shards) // work.shards
        yield "dp_replicate", "all_reduce", 4 * numbers, 1
        yield "dp_replicate", "all_reduce", work.moment_bytes * numbers, 2
    yield "dp_replicate", "all_reduce", 4, 1


def _tensor_messages(work: Work) -> Iterator[Message]:
    """Megatron-LM's with sequence parallelism: attention and feed-forward each gather and scatter hidden states."""
    m, hidden = work.microbatches, work.tokens * work.shape.dim * work.param_bytes
    # A checkpointed block repeats its forward only up to the last result that backward needs, without the last scatter.
    # A graph compiled inside the checkpoint runs to its end. One that keeps the sum after attention scatters nothing.
    again, compiled = work.recomputed, work.config.compile.enable
    scatters = {"full": 2, "selective": 0}.get(work.config.activation_checkpoint.mode, 1) if compiled else 1
    forward, backward = float8_gathers(work)
    in_float8 = forward * (work.layers + again) + backward * work.layers
    yield "tp", "all_gather", hidden, m * (4 * work.layers + 2 * again + work.is_first + work.is_last - in_float8)
    yield "tp", "all_gather", hidden // work.param_bytes, m * in_float8
    yield "tp", "reduce_scatter", hidden, m * (4 * work.layers + scatters * again + work.is_first + work.is_last)
    # The gradients of norms are summed, since each rank has seen a part of the tokens.
    norms = 2 * work.layers + work.is_last
    calls, number_bytes = (1, work.reduce_bytes) if work.dims.pp > 1 else (m, work.param_bytes)
    yield "tp", "all_reduce", work.shape.dim * number_bytes, calls * norms
    if work.is_last:  # the loss: each token's largest logit, then its sum and the label's logit
        yield "tp", "all_reduce", 4 * work.tokens, m
        yield "tp", "all_reduce", 8 * work.tokens, m
    yield "tp", "all_reduce", 8, m * forward * (work.layers + again)  # the scales of what is gathered in float8
    split = sum(map(work.splits, work.blocks))
    for name in work.float8_layers:
        layers, repeated, twice = work.layers, again, split
        if name == "output":
            layers, repeated, twice = work.is_last, 0, work.is_last and work.zero_bubble
        of_forward, of_gradient, of_backward = _maxima(work, name)
        # torchao's backward computes both gradients, with their operands' scales, whichever is asked for.
        by_times = ((layers + repeated, of_forward), (layers, of_gradient), (layers + twice, of_backward))
        for times, several in by_times:
            for numbers in several:
                yield "tp", "all_reduce", 8 * numbers, m * times


def float8_gathers(work: Work) -> tuple[int, int]:
    """How many of a block's two gathers over tp are in float8: (in forward, in backward)."""
    if not gathers_activations(work.config.float8):
        return 0, 0
    return sum(readers <= work.float8_layers for readers in READERS), len(BY_ROWS & work.float8_layers)


def _maxima(work: Work, name: str) -> tuple[list[int], list[int], list[int]]:
    """How many largest values, in float64, each all-reduce over tp finds for a float8 layer.

    Lists of these: (in its forward, of the gradient before its backward, in its backward). The parts of an operand that
    tp splits share a scale. For eager mode; the compiler may merge or repeat some.
    """
    recipe, by_rows = work.config.float8.recipe, name in BY_ROWS
    if recipe == "tensorwise":
        weight = [] if name in work.float8_gathered else [1]
        gathers = gathers_activations(work.config.float8)
        if by_rows:  # its input; in backward the gathered gradient, or the input again
            return [*weight, 1], [1] * gathers, weight if gathers else [*weight, 1]
        once = gathers and any(name in r and r <= work.float8_layers for r in READERS)
        return weight, [1] * once, weight if once else [*weight, 1, 1]  # the gradient: once, or for each matmul
    # A scale per row, shared if tp splits what the matmul sums over. In backward a recipe may use one scale per weight.
    single = recipe == "rowwise_with_gw_hp"
    if by_rows:
        return [work.tokens, work.shape.dim], [], [1] if single else []
    return [], [], [work.tokens, 1 if single else work.shape.dim]


def _context_messages(work: Work) -> Iterator[Message]:
    """Keys and values, in one message, are gathered, their gradients summed and scattered; or sent round a ring."""
    s, c, m = work.shape, work.dims.cp, work.microbatches
    numbers = work.tokens * s.n_kv_heads * s.head_dim // work.dims.tp  # of this rank's keys
    again = work.recomputed if work.keys_go_again else 0
    if work.config.parallelism.cp_method == "allgather":
        yield "cp", "all_gather", 2 * numbers * c * work.param_bytes, m * (work.layers + again)
        yield "cp", "reduce_scatter", 2 * numbers * c * work.param_bytes, m * work.layers
    else:  # in backward their float32 gradients travel too, a full turn
        yield "cp", "send", 2 * numbers * work.param_bytes, (c - 1) * m * (2 * work.layers + again)
        yield "cp", "send", 2 * numbers * 4, c * m * work.layers


def _pipeline_messages(work: Work) -> Iterator[Message]:
    """Each piece sends hidden states to the next piece and gradients to the one before, both on other ranks."""
    hidden = work.tokens * work.shape.dim * work.param_bytes // work.dims.tp
    sends = 2 * work.stages_per_rank - work.is_first - work.is_last
    yield "pp", "send", hidden, sends * work.microbatches
    yield "pp", "all_reduce", 4, 1  # of the gradient's norm


def sent_bytes(kind: str, size: float, ranks: int, gloo: bool = False) -> float:
    """Bytes that each of `ranks` ranks sends for a ring collective on a tensor of `size` bytes.

    gloo's reduce-scatter is an all-reduce, after which each rank keeps its piece.
    """
    twice = kind == "all_reduce" or (gloo and kind == "reduce_scatter")
    return size * (2 if twice else 1) * (ranks - 1) / ranks


# ---------------------------------------------------------------- operations


class Flops(NamedTuple):
    """Floating-point operations of a rank for one microbatch."""

    matmul: float  # in param_dtype
    float8: float
    attention: float  # the causal half


def block_flops(work: Work, share: float) -> tuple[Flops, Flops]:
    """Operations of one block: (forward, backward with recomputation). It recomputes `share` times."""
    s, t, tokens = work.shape, work.dims.tp, work.tokens
    matmuls = {weight.name: 2.0 * tokens * weight.size for weight in block_weights(work) if weight.columns}
    attention = 2.0 * tokens * work.config.training.seq_len * s.n_heads * s.head_dim / t
    mode = work.config.activation_checkpoint.mode
    # Recomputation in mode `full` leaves out w2, whose result no backward reads. Exceptions: a graph compiled with
    # tensor parallelism runs to its end, and eager float8 keeps w2's operands only once w2 is done.
    to_its_end = t > 1 if work.config.compile.enable else "w2" in work.float8_layers
    unread = frozenset() if to_its_end else frozenset({"w2"})
    eager = frozenset() if work.config.compile.enable else work.float8_layers
    recomputed = {"full": frozenset(matmuls) - unread, "selective": frozenset({"wq", "wv", "w1"}) | ({"w2"} & eager)}
    again = recomputed.get(mode, frozenset())
    in_float8 = frozenset() if work.config.float8.emulate else work.float8_layers

    def total(times: dict[str, float], attentions: float) -> Flops:
        by = {name: times[name] * flops for name, flops in matmuls.items()}
        float8 = sum(flops for name, flops in by.items() if name in in_float8)
        return Flops(sum(by.values()) - float8, float8, attentions * attention)

    # torchao's backward computes both gradients, whichever is asked for.
    in_vain = 2 * sum(map(work.splits, work.blocks)) / work.layers
    backward = {name: 2 + in_vain * (name in work.float8_layers) + share * (name in again) for name in matmuls}
    return total(dict.fromkeys(matmuls, 1.0), 1), total(backward, 2.5 + share * (mode == "full"))


def head_flops(work: Work) -> float:
    """Operations of the output's matmul, forward and backward. In float8 zero bubble does the backward twice."""
    times = 3 + 2 * (work.zero_bubble and "output" in work.float8_layers)
    return times * 2.0 * work.tokens * work.shape.dim * work.shape.vocab_size / work.dims.tp
