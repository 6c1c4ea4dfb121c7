"""How long a step takes, from its counts (tools.plan_count) and the device's rates.

Kernels run one after another: matmuls and attention at a share of the peak, the others at a share of the memory's
bandwidth. FSDP2's messages run beside them, and the longer of the two counts. Tensor and context parallelism's run
between them and count in full. docs/plan.md explains it, benchmarks/plan.py shows its errors.
"""

from types import MappingProxyType
from typing import NamedTuple

from config import Config
from data.ledger import build_phases
from parallel.mesh import ParallelDims
from parallel.pipeline import stages_of_rank
from tools.plan_count import DryRun
from tools.plan_tally import Matmul

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
    matmul_share: float = 0.77
    float8_share: float = 0.83
    attention_share: float = 0.46
    flash_share: float = 0.24
    memory_share: float = 0.75
    fitted_to: str = ""  # the runs to which the shares are fitted; none: they are h200's
    # The range in which a run should lie, of the tokens per second planned.
    low: float = 0.75
    high: float = 1.3


# h100-96gb is the H100 of Meta's Grand Teton: more and slower memory (set as near to its sheet as h100's), 500 W.
# FlashAttention-2 reaches up to 225 of 312 TFLOP/s on an A100 (Dao 2023), less for short sequences.
# The known runs of b200 and mi300x, all of one week, give their shares: one factor on h200's, and one for float8.
# With h200's shares they would be about twice as fast, up to `high`.
DEVICES = MappingProxyType(
    {
        "a100": Device(312e12, None, 79.1 * GIB, 2.04e12, 300e9, 25e9, 400, 0.8, 0.7, 0.6, 0.6),
        "h100": Device(989e12, 1979e12, 79.1 * GIB, 3.35e12, 450e9, 50e9, 700),
        "h100-96gb": Device(
            989e12, 1979e12, 95.0 * GIB, 2.4e12, 450e9, 50e9, 500, 0.6, 0.5, 0.41, 0.24,
            fitted_to="torchtitan's of 2025", low=0.84, high=1.1,
        ),
        "h200": Device(
            989e12, 1979e12, 139.8 * GIB, 4.8e12, 450e9, 50e9, 700,
            fitted_to="this project's", low=0.84, high=1.1,
        ),
        "b200": Device(
            2250e12, 4500e12, 178.3 * GIB, 8e12, 900e9, 50e9, 1000, 0.302, 0.262, 0.181, 0.094, 0.294,
            fitted_to="three of 2025-08 on power-limited GPUs", low=0.84, high=2.6,
        ),
        "mi300x": Device(
            1307e12, 2614e12, 191.7 * GIB, 5.3e12, 448e9, 50e9, 750, 0.384, 0.277, 0.229, 0.12, 0.374,
            fitted_to="three of 2025-08", low=0.84, high=2.2,
        ),
    }
)  # fmt: skip

# Fitted, like the devices' shares, on the rows that benchmarks/plan.py marks.
# The part of the memory's share that kernels with casts to float8 reach; that of the last is a guess.
CAST_SHARES = {"tensorwise": 0.85, "rowwise": 0.58, "rowwise_with_gw_hp": 0.72}
MATMUL_SHOWS = 0.5  # of what a matmul reads and writes, not hidden by its operations
NETWORK_SHARE = 0.75  # of a link's or the network's bandwidth, for a collective
CALL_SECONDS = 20e-6  # of a collective between kernels, beside what its bytes take
CONTENTION = 0.5  # of a collective's time, lost by kernels beside it: it takes some of their cores and bandwidth
IDLE = 0.008  # of the step
BYTES = {"float8": 1, "bfloat16": 2, "float32": 4}  # of a number


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
    device = cluster.device
    kernels = kernel_seconds(counted, config, dims, cluster)
    beside, between = message_seconds(counted, config, dims, cluster)
    sending = sum(beside.values())
    slowed = 1 + CONTENTION * min(1.0, sending / sum(kernels.values()))
    kernels = {name: taken * slowed for name, taken in kernels.items()}
    working = sum(kernels.values()) + sum(between.values())
    slowest = max(beside, key=lambda where: beside[where])
    between[slowest] += max(0.0, sending - working)
    made_once = counted.optimizer
    optimizer = (counted.moved["update"] - made_once) / (device.memory_bandwidth * device.memory_share)
    bubble = (sum(kernels.values()) + sum(between.values())) * bubble_share(config, dims)
    seconds = {**kernels, "optimizer": optimizer, **between, "bubble": bubble}
    seconds["idle"] = IDLE * sum(seconds.values())
    step = sum(seconds.values())
    tokens = build_phases(config.training, dims.dp)[-1].tokens_per_step
    rate = tokens / step / (dims.dp * dims.cp * dims.tp * dims.pp)
    ends = {"low": device.low * rate, "high": device.high * rate}
    return {"step_seconds": step, **seconds, "tokens_per_second": rate, **ends}


def kernel_seconds(counted: DryRun, config: Config, dims: ParallelDims, cluster: Cluster) -> dict[str, float]:
    """Seconds of matmuls, attention and all other kernels, as if nothing ran beside them."""
    device, float8 = cluster.device, config.float8
    matmul = sum(calls * matmul_seconds(matmul, device) for matmul, calls in counted.matmuls.items())
    # A ring, and flex attention's masks, have torch's own kernels, not the device's fastest.
    own = cluster.flash or dims.cp > 1 or config.data.mask_documents
    share = device.flash_share if own else device.attention_share
    bandwidth = device.memory_bandwidth * device.memory_share
    if float8.enable:
        bandwidth *= CAST_SHARES[float8.recipe]
    attention = counted.attention / (device.flops * share)
    return {"matmul": matmul, "attention": attention, "pointwise": counted.moved["step"] / bandwidth}


def matmul_seconds(matmul: Matmul, device: Device) -> float:
    """Seconds of a matmul: its operations, and part of what it reads and writes, which counts if it is narrow."""
    peaks = {
        "float8": (device.float8_flops or device.flops) * device.float8_share,
        "float32": device.flops * device.matmul_share / 15,  # without tensor cores
    }
    size = BYTES.get(matmul.kind, 2)
    operands = matmul.rows * matmul.inner + matmul.inner * matmul.columns
    moved = operands * size + matmul.rows * matmul.columns * max(size, 2)
    computing = matmul.flops / peaks.get(matmul.kind, device.flops * device.matmul_share)
    return computing + MATMUL_SHOWS * moved / (device.memory_bandwidth * device.memory_share)


def message_seconds(
    counted: DryRun, config: Config, dims: ParallelDims, cluster: Cluster
) -> tuple[dict[str, float], dict[str, float]]:
    """Seconds of the messages that run beside the kernels, and of those between them: in a node, across nodes."""
    parallelism = config.parallelism
    beside = {"intra_node": 0.0, "inter_node": 0.0}
    between = dict(beside)
    for (axis, kind), (calls, size) in counted.sent.items():
        axis = "tp" if axis == "world" and dims.tp == dims.dp * dims.copies else axis
        ranks, rate, crosses = _link(axis, dims, parallelism.reshard_group_size, cluster)
        where = "inter_node" if crosses else "intra_node"
        wait = sent_bytes(kind, size, ranks) / (rate * NETWORK_SHARE)
        if axis in ("tp", "cp", "pp") or kind == "send":
            between[where] += wait + CALL_SECONDS * calls
        elif axis == "dp_replicate" and dims.islands > 1:
            beside[where] += wait / parallelism.local_steps
        else:
            beside[where] += wait
    return beside, between


def bubble_share(config: Config, dims: ParallelDims) -> float:
    """The time in which a rank of the pipeline waits for others, over that of a step's work."""
    if dims.pp == 1:
        return 0.0
    pieces = len(stages_of_rank(0, config.parallelism))
    microbatches = config.training.local_batch_size // config.parallelism.pp_microbatch_size
    return (dims.pp - 1) / (pieces * microbatches)


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
