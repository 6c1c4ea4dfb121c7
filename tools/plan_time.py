"""How long a step takes, from its counts (tools.plan_count) and the device's rates.

Kernels run one after another: matmuls and attention at a share of the peak, the others at a share of the memory's
bandwidth. FSDP2's messages run beside them, and the longer of the two counts. Tensor and context parallelism's run
between them and count in full. docs/plan.md explains it, benchmarks/plan.py shows its errors.
"""

from types import MappingProxyType
from typing import NamedTuple

from config import Config
from parallel.mesh import ParallelDims
from parallel.pipeline import stages_of_rank
from tools.plan_tally import Counts, Message

GIB = 2**30


class Device(NamedTuple):
    """One accelerator and its links. Rates are operations and bytes per second; links and network count one direction.

    Peaks and links are from the makers' data sheets, dense. `memory_bytes` is the "total capacity" in torch's
    out-of-memory errors, as users have posted them. What the driver and communication take of it is not known here.
    """

    flops: float
    float8_flops: float  # 0: it has no float8 matmul
    memory_bytes: float
    memory_bandwidth: float
    link_bandwidth: float
    network_bandwidth: float
    # Shares of the peaks: of matmuls, in bfloat16 and float8; of attention, by the fastest kernel that torch takes
    # there and by torch's own (FlashAttention-2); of the memory's bandwidth, for other kernels.
    matmul_share: float = 0.77
    float8_share: float = 0.83
    attention_share: float = 0.46
    flash_share: float = 0.24
    memory_share: float = 0.7
    trust: str = "unfitted: no run of today's software on this device is known"  # the shares are h200's
    # The range in which a run should lie, of the tokens per second planned.
    low: float = 0.75
    high: float = 1.3


# h100-96gb is the H100 of Meta's Grand Teton: more and slower memory (set as near to its sheet as h100's).
# FlashAttention-2 reaches up to 225 of 312 TFLOP/s on an A100 (Dao 2023), less for short sequences.
# The known runs of b200 and mi300x, all of one week, give their shares: one factor on h200's, and one for float8.
# With h200's shares they would be about twice as fast, up to `high`.
DEVICES = MappingProxyType(
    {
        "a100": Device(312e12, 0, 79.1 * GIB, 2.04e12, 300e9, 25e9, 0.8, 0.7, 0.6, 0.6),
        "h100": Device(989e12, 1979e12, 79.1 * GIB, 3.35e12, 450e9, 50e9),
        "h100-96gb": Device(
            989e12, 1979e12, 95.0 * GIB, 2.4e12, 450e9, 50e9, 0.6, 0.5, 0.41, 0.24,
            trust="fitted to torchtitan's of 2025", low=0.84, high=1.1,
        ),
        "h200": Device(
            989e12, 1979e12, 139.8 * GIB, 4.8e12, 450e9, 50e9,
            trust="fitted to this project's", low=0.84, high=1.1,
        ),
        "b200": Device(
            2250e12, 4500e12, 178.3 * GIB, 8e12, 900e9, 50e9, 0.284, 0.246, 0.17, 0.088, 0.276,
            trust="fitted to three of 2025-08 on power-limited GPUs", low=0.84, high=2.7,
        ),
        "mi300x": Device(
            1307e12, 2614e12, 191.7 * GIB, 5.3e12, 448e9, 50e9, 0.369, 0.266, 0.22, 0.115, 0.359,
            trust="fitted to three of 2025-08", low=0.84, high=2.2,
        ),
    }
)  # fmt: skip

# Fitted, like the devices' shares, on the rows that benchmarks/plan.py marks.
# The part of the memory's share that kernels with casts to float8 reach; that of the last is a guess.
CAST_SHARES = {"tensorwise": 0.54, "rowwise": 0.44, "rowwise_with_gw_hp": 0.6}
MATMUL_SHOWS = 0.5  # of what a matmul reads and writes, not hidden by its operations
NETWORK_SHARE = 0.75  # of a link's or the network's bandwidth, for a collective
CONTENTION = 0.5  # of a collective's time, lost by kernels beside it: it takes some of their cores and bandwidth
IDLE = 0.008  # of the step


class Cluster(NamedTuple):
    """The machines."""

    device: Device
    gpus_per_node: int


def estimate(counts: Counts, config: Config, dims: ParallelDims, cluster: Cluster) -> dict[str, float]:
    """Seconds of a step, by what a rank waits for, as if all stages of the pipeline counted the same.

    Communication is what nothing hides.
    """
    device = cluster.device
    seconds = kernel_seconds(counts, config, dims, device)
    beside, between = message_seconds(counts, config, dims, cluster)
    slowed = 1 + CONTENTION * min(1.0, beside / sum(seconds.values()))
    seconds = {name: taken * slowed for name, taken in seconds.items()}
    working = sum(seconds.values()) + between
    seconds["communication"] = between + max(0.0, beside - working)
    seconds["bubble"] = sum(seconds.values()) * bubble_share(config, dims)
    seconds["optimizer"] = counts["update"] / (device.memory_bandwidth * device.memory_share)
    seconds["idle"] = IDLE * sum(seconds.values())
    return seconds


def kernel_seconds(counts: Counts, config: Config, dims: ParallelDims, device: Device) -> dict[str, float]:
    """Seconds of matmuls, attention and all other kernels, as if nothing ran beside them.

    Part of what a matmul reads and writes counts beside its operations, so it counts more if it is narrow.
    """
    bandwidth = device.memory_bandwidth * device.memory_share
    rate = device.flops * device.matmul_share
    matmul = counts["bfloat16"] / rate + 15 * counts["float32"] / rate  # float32 has no tensor cores
    matmul += MATMUL_SHOWS * counts["operands"] / bandwidth
    share = device.attention_share
    # A ring, and flex attention's masks, have torch's own kernels, not the device's fastest.
    if dims.cp > 1 or config.data.mask_documents:
        share = device.flash_share
    if config.float8.enable:
        matmul += counts["float8"] / (device.float8_flops * device.float8_share)
        bandwidth *= CAST_SHARES[config.float8.recipe]
    attention = counts["attention"] / (device.flops * share)
    return {"matmul": matmul, "attention": attention, "pointwise": counts["moved"] / bandwidth}


def message_seconds(counts: Counts, config: Config, dims: ParallelDims, cluster: Cluster) -> tuple[float, float]:
    """Seconds of the messages that run beside the kernels, and of those between them."""
    beside = between = 0.0
    for key, size in counts.items():
        if not isinstance(key, Message):
            continue
        axis = key.axis
        if axis == "world" and dims.dp == dims.cp == 1:
            axis = "tp"
        ranks, rate = _link(axis, dims, cluster)
        wait = sent_bytes(key.kind, size, ranks) / (rate * NETWORK_SHARE)
        if axis == "dp_replicate" and dims.islands > 1:
            wait /= config.parallelism.local_steps
        if axis in ("tp", "cp", "pp"):
            between += wait
        else:
            beside += wait
    return beside, between


def bubble_share(config: Config, dims: ParallelDims) -> float:
    """The time in which a rank of the pipeline waits for others, over that of a step's work."""
    pieces = len(stages_of_rank(0, config.parallelism))
    microbatches = config.training.local_batch_size // config.parallelism.pp_microbatch_size
    return (dims.pp - 1) / (pieces * microbatches)


def sent_bytes(kind: str, size: float, ranks: int) -> float:
    """Bytes that each of `ranks` ranks sends for a ring collective on a tensor of `size` bytes."""
    if kind == "send":
        return size
    if kind == "all_reduce":
        size *= 2
    return size * (ranks - 1) / ranks


def _link(axis: str, dims: ParallelDims, cluster: Cluster) -> tuple[int, float]:
    """The ranks of an axis, and bytes per second for a rank's share.

    Ranks of an axis on one node pool their network bandwidth.
    """
    stage = dims.dp * dims.cp * dims.tp
    ranks, stride = {
        "world": (stage, 1),  # all that share the counted layers
        "tp": (dims.tp, 1),
        "cp": (dims.cp, dims.tp),
        "dp_shard_cp": (dims.shards, dims.tp),
        "dp_replicate": (dims.dp_replicate, dims.shards * dims.tp),
        "pp": (dims.pp, stage),
    }[axis]
    device = cluster.device
    if ranks * stride <= cluster.gpus_per_node:
        return ranks, device.link_bandwidth
    on_node = max(1, cluster.gpus_per_node // stride)
    return ranks, min(device.link_bandwidth, on_node * device.network_bandwidth)
