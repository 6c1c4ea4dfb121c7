"""How long a step takes, from its counts (tools.dry_run) and the device's rates (tools.devices).

Kernels run one after another: matmuls and attention at a share of the peak, the others at a share of the memory's
bandwidth. FSDP2's messages run beside them, and the longer of the two counts. Tensor and context parallelism's run
between them and count in full. docs/plan.md explains it, benchmarks/plan.py shows its errors.
"""

from typing import NamedTuple

from config import Config
from data.ledger import grad_accum_steps
from parallel.mesh import ParallelDims
from parallel.pipeline import stages_of_rank
from tools.devices import Device
from tools.dry_run import DryRun

# Fitted, like the shares in tools/devices.py, on the rows that benchmarks/plan.py marks.
# Bytes per operation at the peak, which kernels with casts to float8 move at most: rowwise_with_gw_hp's is a guess.
CAST_RATES = {"tensorwise": 3.0e-3, "rowwise": 2.2e-3, "rowwise_with_gw_hp": 2.6e-3}
NETWORK_SHARE = 0.8  # of a link's or the network's bandwidth, for a collective
CALL_SECONDS = 20e-6  # of a collective between kernels, beside what its bytes take
CONTENTION = 0.5  # of a collective's time, lost by kernels beside it: it takes some of their cores and bandwidth
ASYNC_TP_SHOWS = 0.5  # of tensor parallelism's messages, not hidden when the compiler overlaps them
IDLE = 0.008  # of the step
RANGE = 0.84, 1.1  # of the tokens per second planned


class Cluster(NamedTuple):
    """The machines. `bandwidth` is the network's, in bytes per second, per device and direction."""

    device: Device
    gpus_per_node: int
    bandwidth: float
    flash: bool = False  # torch's own attention runs, not the device's fastest


class Estimate(NamedTuple):
    """Seconds of a step, by what a rank waits for, and tokens per second and device with their range."""

    step_seconds: float
    matmul: float
    attention: float
    pointwise: float  # at the memory's speed
    optimizer: float
    intra_node: float  # communication that nothing hides
    inter_node: float
    bubble: float
    idle: float
    tokens_per_second: float
    low: float
    high: float


def estimate(counted: DryRun, config: Config, dims: ParallelDims, cluster: Cluster) -> Estimate:
    """Estimate the step as if all stages of the pipeline counted the same."""
    device, parallelism, training = cluster.device, config.parallelism, config.training
    memory = device.memory_bandwidth * device.memory_share
    # A ring, and flex attention's masks, have torch's own kernels, not the device's fastest.
    own = cluster.flash or dims.cp > 1 or config.data.mask_documents
    rates = {
        "attention": device.flops * (device.flash_share if own else device.attention_share),
        "float8": (device.float8_flops or device.flops) * device.float8_share,
        "float32": device.flops * device.matmul_share / 15,  # without tensor cores
    }
    seconds = {kind: n / rates.get(kind, device.flops * device.matmul_share) for kind, n in counted.flops.items()}
    attention = seconds.pop("attention", 0.0)
    matmul = sum(seconds.values())
    optimizer = (counted.moved["update"] - counted.optimizer) / memory  # its states are made once
    casts = device.flops * CAST_RATES[config.float8.recipe] if config.float8.enable else memory
    pointwise = counted.moved["step"] / min(memory, casts)
    kernels = matmul + attention + pointwise
    beside, between = [0.0, 0.0], [0.0, 0.0]  # messages beside and between the kernels: within a node, across nodes
    for (axis, kind), (calls, size) in counted.sent.items():
        axis = "tp" if axis == "world" and dims.tp == dims.dp * dims.copies else axis
        ranks, rate, crosses = _link(axis, dims, parallelism.reshard_group_size, cluster)
        wait = sent_bytes(kind, size, ranks) / (rate * NETWORK_SHARE)
        if axis in ("tp", "cp", "pp") or kind == "send":
            hidden = axis == "tp" and parallelism.async_tp
            between[crosses] += (wait + CALL_SECONDS * calls) * (ASYNC_TP_SHOWS if hidden else 1.0)
        else:
            beside[crosses] += wait / (parallelism.local_steps if axis == "dp_replicate" and dims.islands > 1 else 1)
    slowed = 1 + CONTENTION * min(1.0, sum(beside) / kernels)
    between[beside[True] > beside[False]] += max(0.0, sum(beside) - kernels * slowed - sum(between))
    bubble, pieces = 0.0, len(stages_of_rank(0, parallelism))
    if dims.pp > 1:
        microbatches = training.local_batch_size // parallelism.pp_microbatch_size
        bubble = (kernels * slowed + sum(between)) * (dims.pp - 1) / (pieces * microbatches)
    parts = (matmul * slowed, attention * slowed, pointwise * slowed, optimizer, between[0], between[1], bubble)
    step = sum(parts) * (1 + IDLE)
    tokens = grad_accum_steps(training, dims.dp) * training.local_batch_size * training.seq_len
    rate = tokens / step / (dims.cp * dims.tp * dims.pp)
    return Estimate(step, *parts, step - sum(parts), rate, RANGE[0] * rate, RANGE[1] * rate)


def sent_bytes(kind: str, size: float, ranks: int, gloo: bool = False) -> float:
    """Bytes that each of `ranks` ranks sends for a ring collective on a tensor of `size` bytes.

    gloo's reduce-scatter is an all-reduce, after which each rank keeps its piece.
    """
    twice = kind == "all_reduce" or (gloo and kind == "reduce_scatter")
    return size if kind == "send" else size * (2 if twice else 1) * (ranks - 1) / ranks


def _link(axis: str, dims: ParallelDims, reshard_group: int, cluster: Cluster) -> tuple[int, float, bool]:
    """The ranks of an axis, bytes per second for a rank's share, and whether it crosses nodes.

    Ranks of an axis on one node pool their network bandwidth.
    """
    ranks, stride = {
        "tp": (dims.tp, 1),
        "cp": (dims.cp, dims.tp),
        "dp_shard_cp": (dims.shards, dims.tp),
        "reshard_group": (reshard_group, 1),
        "dp_replicate": (dims.dp_replicate, dims.shards * dims.tp),
        "pp": (dims.pp, dims.dp * dims.cp * dims.tp),
    }.get(axis, (dims.dp * dims.copies, 1))
    if ranks * stride <= cluster.gpus_per_node:
        return ranks, cluster.device.link_bandwidth, False
    on_node = max(1, cluster.gpus_per_node // stride)
    return ranks, min(cluster.device.link_bandwidth, on_node * cluster.bandwidth), True
