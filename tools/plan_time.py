"""How long a Llama's training step takes, from its costs (plan_costs) and the device's rates (devices).

A simple model: a block's kernels run one after another, matmuls at a share of the peak, the others at the memory's
speed. FSDP2's communication runs beside them, and the longer of the two counts. Tensor and context parallelism's runs
between them and counts in full. docs/plan.md has the formulas, benchmarks/plan.py the errors.
"""

import math
from typing import NamedTuple

from tools.devices import Device
from tools.plan_costs import (
    Flops,
    Work,
    block_flops,
    block_weights,
    float8_gathers,
    gathered_bytes,
    gathers,
    head_flops,
    local_parameters,
    sent_bytes,
)

MEMORY_SHARE = 0.8  # of the memory's bandwidth, for a pointwise kernel
NETWORK_SHARE = 0.8  # of a link's or the network's bandwidth, for a collective
CONTENTION = 0.16  # of a collective's time, lost by kernels beside it: it takes some of their cores and bandwidth
ASYNC_TP_SHOWS = 0.5  # of tensor parallelism's communication, not hidden when the compiler overlaps it


class Cluster(NamedTuple):
    """The machines. `bandwidth` is the network's, in bytes per second, per device and direction."""

    device: Device
    gpus_per_node: int
    bandwidth: float


class Estimate(NamedTuple):
    """Seconds of a step, by what a rank waits for, and tokens per second and device."""

    step_seconds: float
    matmul: float  # attention included
    pointwise: float  # at the memory's speed; loss and optimizer included
    intra_node: float  # communication that nothing hides
    inter_node: float
    bubble: float
    tokens_per_second: float

    @property
    def bound(self) -> str:
        """What takes the most time of the step."""
        parts = {
            "compute": self.matmul,
            "memory": self.pointwise,
            "intra-node network": self.intra_node,
            "inter-node network": self.inter_node,
            "pipeline bubble": self.bubble,
        }
        return max(parts, key=lambda name: parts[name])


class _Link(NamedTuple):
    """How a group of ranks is connected: bytes per second for a rank's share, and whether it crosses nodes."""

    ranks: int
    bandwidth: float
    crosses: bool

    def seconds(self, kind: str, size: float) -> float:
        """Time of a ring collective on a tensor of `size` bytes."""
        return sent_bytes(kind, size, self.ranks) / (self.bandwidth * NETWORK_SHARE)


def _link(cluster: Cluster, ranks: int, stride: int) -> _Link:
    """The link of `ranks` ranks, `stride` apart. Those on one node pool their network bandwidth."""
    if ranks * stride <= cluster.gpus_per_node:
        return _Link(ranks, cluster.device.link_bandwidth, False)
    on_node = max(1, cluster.gpus_per_node // stride)
    return _Link(ranks, min(cluster.device.link_bandwidth, on_node * cluster.bandwidth), True)


def estimate(work: Work, cluster: Cluster) -> Estimate:
    """Estimate the step of the last stage, which is the slowest."""
    dims, device, m = work.dims, cluster.device, work.microbatches
    memory_rate = device.memory_bandwidth * MEMORY_SHARE
    # For a block and microbatch, as pairs (forward, backward):
    kernels = zip(block_flops(work, work.recomputed_share), _pointwise_bytes(work), strict=True)
    communication = zip(_beside_kernels(work, cluster), _between_kernels(work, cluster), strict=True)
    matmul = pointwise = shown = standing = 0.0
    for (flops, moved), (beside, between) in zip(kernels, communication, strict=True):
        computing, moving = _matmul_seconds(flops, device), moved / memory_rate
        slowed = 1 + CONTENTION * min(1.0, beside / (computing + moving))
        matmul += computing * slowed
        pointwise += moving * slowed
        standing += between
        shown += max(0.0, beside - (computing + moving) * slowed - between)
    layers = work.shape.n_layers / dims.pp
    head = head_flops(work) / (device.flops * device.matmul_share)
    loss = _loss_bytes_moved(work) / memory_rate
    optimizer = _optimizer_bytes(work) * local_parameters(work) / memory_rate
    matmul = m * (layers * matmul + head)
    pointwise = m * (layers * pointwise + loss) + optimizer

    shards, replicas = _shard_link(work, cluster), _replica_link(work, cluster)
    # Nothing hides the first gather and the last reduce-scatter, of embedding and output, which are the largest.
    ends = shards.seconds("reduce_scatter", work.reduce_bytes * work.shape.vocab_size * work.shape.dim / dims.tp)
    by_link = {True: 0.0, False: 0.0}  # whether it crosses nodes → seconds
    crosses = shards.crosses or (replicas.crosses and dims.islands == 1)  # meetings of islands are added below
    by_link[crosses] += m * layers * shown + work.sums * ends
    by_link[_link(cluster, dims.cp * dims.tp, 1).crosses] += m * layers * standing
    if dims.islands > 1:  # they stand still while they meet
        meeting = replicas.seconds("all_reduce", (4 + 2 * work.moment_bytes) * local_parameters(work))
        by_link[replicas.crosses] += meeting / work.config.parallelism.local_steps
    bubble = 0.0
    if dims.pp > 1:
        hidden = work.tokens * work.shape.dim * work.param_bytes / dims.tp
        stage = _link(cluster, dims.pp, dims.dp * dims.cp * dims.tp)
        by_link[stage.crosses] += 2 * m * work.stages_per_rank * hidden / (stage.bandwidth * NETWORK_SHARE)
        zero = 1 / 3 if "ZeroBubble" in work.config.parallelism.pp_schedule else 1.0
        busy = matmul + pointwise - optimizer + sum(by_link.values())
        bubble = busy * zero * (dims.pp - 1) / (work.stages_per_rank * m / work.accumulation)
    seconds = matmul + pointwise + sum(by_link.values()) + bubble
    tokens = work.accumulation * work.config.training.local_batch_size * work.config.training.seq_len
    rate = tokens / seconds / (dims.cp * dims.tp * dims.pp)
    return Estimate(seconds, matmul, pointwise, by_link[False], by_link[True], bubble, rate)


def _shard_link(work: Work, cluster: Cluster) -> _Link:
    return _link(cluster, work.shards, work.dims.tp)


def _replica_link(work: Work, cluster: Cluster) -> _Link:
    return _link(cluster, work.dims.dp_replicate, work.dims.tp * work.shards)


def _beside_kernels(work: Work, cluster: Cluster) -> tuple[float, float]:
    """Seconds of FSDP2's communication for a block and microbatch: (forward, backward).

    That is a gather in forward, and a gather, a reduce-scatter and an all-reduce in backward.
    """
    shards, block = _shard_link(work, cluster), block_weights(work)
    gathered, summed = gathered_bytes(work, block), work.reduce_bytes * sum(weight.size for weight in block)
    everywhere, within = gathers(work, 1)  # of a block
    ahead = min(everywhere, work.batches)
    gather = shards.seconds("all_gather", gathered)
    near = _link(cluster, max(1, work.config.parallelism.reshard_group_size), work.dims.tp)
    again = (everywhere - ahead) * gather + within * near.seconds("all_gather", gathered)
    scatter = work.sums * shards.seconds("reduce_scatter", summed)
    last = _replica_link(work, cluster).seconds("all_reduce", summed / work.shards) if work.dims.islands == 1 else 0.0
    return ahead * gather / work.microbatches, (again + scatter + last) / work.microbatches


def _matmul_seconds(flops: Flops, device: Device) -> float:
    seconds = flops.matmul / (device.flops * device.matmul_share)
    seconds += flops.attention / (device.flops * device.attention_share)
    if flops.float8:
        seconds += flops.float8 / ((device.float8_flops or math.nan) * device.matmul_share)
    return seconds


def _pointwise_bytes(work: Work) -> tuple[float, float]:
    """Bytes that a block's other kernels read and write: (forward, backward with recomputation).

    Eager, every operation of norms, residuals, rotary embedding and SwiGLU reads and writes. Compiled, each of these
    is fused to one pass. Float8 reads its inputs for the scale, then again to cast them.
    """
    s, t = work.shape, work.dims.tp
    heads = (s.n_heads + s.n_kv_heads) * s.head_dim / t
    if work.config.compile.enable:
        elements = 5 * s.dim / t + 2 * heads + 3 * s.hidden_dim / t
    else:
        elements = 10 * s.dim / t + 26 * heads + 5 * s.hidden_dim / t
    forward = work.param_bytes * work.tokens * elements
    backward = 2 * forward
    for weight in block_weights(work):
        if weight.name in work.float8_layers:
            forward += 5 * work.tokens * max(1, weight.columns)
            backward += 5 * work.tokens * (weight.rows + weight.columns)
    return forward, backward + work.recomputed_share * forward


def _loss_bytes_moved(work: Work) -> float:
    """Bytes to write and read logits: 10 per logit if fused, else all operations of float32 softmax and backward."""
    per_logit = 10 if work.compiled_loss else (60 if work.dims.tp > 1 else 38)
    return per_logit * work.tokens * work.shape.vocab_size / work.dims.tp


def _optimizer_bytes(work: Work) -> int:
    """Bytes that clipping and AdamW move per number: gradient read thrice and written once, weight, two moments.

    For moments in bfloat16 this is the compiled step; the eager one makes several passes.
    """
    return 4 * (3 + 1) + 2 * 4 + 2 * 2 * work.moment_bytes


def _between_kernels(work: Work, cluster: Cluster) -> tuple[float, float]:
    """Seconds of a block's tensor and context parallel communication: (forward, backward with recomputation)."""
    s, dims = work.shape, work.dims
    again = work.recomputed_share
    tensor = _link(cluster, dims.tp, 1).seconds("all_gather", work.tokens * s.dim * work.param_bytes)
    tensor *= ASYNC_TP_SHOWS if work.config.parallelism.async_tp else 1.0
    # A gather in float8 sends only one byte per number.
    saved_forward, saved_backward = ((1 - 1 / work.param_bytes) * count for count in float8_gathers(work))
    keys_and_values = 2 * work.tokens * dims.cp * s.n_kv_heads * s.head_dim * work.param_bytes / dims.tp
    context = _link(cluster, dims.cp, dims.tp).seconds("all_gather", keys_and_values)
    backward = (4 - saved_backward + (3 - saved_forward) * again) * tensor + (1 + again * work.keys_go_again) * context
    return (4 - saved_forward) * tensor + context, backward
