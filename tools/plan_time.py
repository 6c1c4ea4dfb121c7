"""How long a step takes, from its counts (tools.plan_count) and the device's rates.

Kernels run one after another: matmuls and attention at a share of the peak, the others at a share of the memory's
bandwidth. FSDP2's messages run beside them, and the longer of the two counts. Tensor and context parallelism's run
between them and count in full. docs/plan.md explains it, benchmarks/plan.py shows its errors.
"""

from types import MappingProxyType
from typing import NamedTuple

from config import Config
from data.ledger import grad_accum_steps
from parallel.mesh import ParallelDims
from parallel.pipeline import stages_of_rank
from tools.plan_count import DryRun

GIB = 2**30


class Device(NamedTuple):
    """One accelerator and its links. Rates are operations and bytes per second; links and network count one direction.

    Peaks and links are from the makers' data sheets, dense. `memory_bytes` is the "total capacity" in torch's
    out-of-memory errors, as users have posted them. What the driver and communication take of it is not known here.
    """

    flops: float
    float8_flops: float | None
    memory_bytes: float
    memory_bandwidth: float
    link_bandwidth: float
    network_bandwidth: float
    watts: int
    # Shares of the peaks: of matmuls, in bfloat16 and float8; of attention, by the fastest kernel that torch takes
    # there and by torch's own (FlashAttention-2); of the memory's bandwidth, for other kernels.
    matmul_share: float = 0.72
    float8_share: float = 0.7
    attention_share: float = 0.46
    flash_share: float = 0.24
    memory_share: float = 0.75
    fitted: bool = False  # the shares, to rows of this device


# h100-96gb is the H100 of Meta's Grand Teton: more and slower memory (set as near to its sheet as h100's), 500 W.
# FlashAttention-2 reaches up to 225 of 312 TFLOP/s on an A100 (Dao 2023), less for short sequences.
DEVICES = MappingProxyType(
    {
        "a100": Device(312e12, None, 79.1 * GIB, 2.04e12, 300e9, 25e9, 400, 0.77, 0.7, 0.6, 0.6),
        "h100": Device(989e12, 1979e12, 79.1 * GIB, 3.35e12, 450e9, 50e9, 700),
        "h100-96gb": Device(989e12, 1979e12, 95.0 * GIB, 2.4e12, 450e9, 50e9, 500, 0.55, 0.42, 0.41, 0.24, fitted=True),
        "h200": Device(989e12, 1979e12, 139.8 * GIB, 4.8e12, 450e9, 50e9, 700, fitted=True),
        "b200": Device(2250e12, 4500e12, 178.3 * GIB, 8e12, 900e9, 50e9, 1000),
        "mi300x": Device(1307e12, 2614e12, 191.7 * GIB, 5.3e12, 448e9, 50e9, 750),
    }
)

# Fitted, like the devices' shares, on the rows that benchmarks/plan.py marks.
# Bytes per operation at the peak, which kernels with casts to float8 move at most: those of the last two are guesses.
CAST_RATES = {"tensorwise": 3.0e-3, "rowwise": 2.2e-3, "rowwise_with_gw_hp": 2.6e-3, "blockwise": 2.2e-3}
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


def estimate(counted: DryRun, config: Config, dims: ParallelDims, cluster: Cluster) -> dict[str, float]:
    """Seconds of a step, by what a rank waits for, and tokens per second and device with their range.

    As if all stages of the pipeline counted the same. Communication is what nothing hides.
    """
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
    seconds = {
        "matmul": matmul * slowed, "attention": attention * slowed, "pointwise": pointwise * slowed,
        "optimizer": optimizer, "intra_node": between[0], "inter_node": between[1], "bubble": bubble,
    }  # fmt: skip
    seconds["idle"] = IDLE * sum(seconds.values())
    step = sum(seconds.values())
    tokens = grad_accum_steps(training, dims.dp) * training.local_batch_size * training.seq_len
    rate = tokens / step / (dims.cp * dims.tp * dims.pp)
    low, high = RANGE[0] * rate, RANGE[1] * rate
    return {"step_seconds": step, **seconds, "tokens_per_second": rate, "low": low, "high": high}


def sent_bytes(kind: str, size: float, ranks: int) -> float:
    """Bytes that each of `ranks` ranks sends for a ring collective on a tensor of `size` bytes."""
    return size if kind == "send" else size * (2 if kind == "all_reduce" else 1) * (ranks - 1) / ranks


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
