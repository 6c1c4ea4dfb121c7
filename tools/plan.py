"""Plan a run for any cluster on a laptop: its memory, traffic and speed.

    python -m tools.plan --config train_configs/llama3_8b.toml --world-size 64 --device h100
    python -m tools.plan --config train_configs/llama3_70b.toml --world-size 256 --sweep

Memory, traffic and operations are counted on the real step of train.py (tools.plan_count), for any model and optimizer.
The speed is modelled on these counts (tools.plan_time). No data and no GPU are needed.
"""

import argparse
import itertools
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from config import Config, ConfigError, check_effects, load_config
from loss import loss_chunks
from models import build_model, find_model, settle_model
from run.run import run_and_leave
from tools.plan_count import DEFAULT_VOCAB_SIZE, Case, check, count
from tools.plan_tally import Counts, Message
from tools.plan_time import DEVICES, GIB, Cluster, Device, estimate

DEGREES = (1, 2, 4, 8)
SHOWN = 6  # layouts of a sweep
# Mode → bytes that a layer keeps for its backward, of each token and number of its hidden state, roughly as counted:
# those that tp splits, and those of the matmuls' inputs, which it gathers.
KEPT: dict[Any, tuple[int, int]] = {"none": (30, 4), "selective": (10, 2), "full": (3, 0)}
SCORE_BYTES = 6  # of a token's score of a word, in the loss and its backward
RESERVED = {False: 1.03, True: 1.25}  # memory that torch reserves / allocated: of a rank alone; with FSDP2


class Plan(NamedTuple):
    """What a run needs, counted and estimated."""

    case: Case
    parameters: int
    counts: Counts
    reserved: float  # bytes of a device
    fits: bool
    seconds: dict[str, float]  # of a step, by what a rank waits for
    tokens_per_step: int
    rate: float  # tokens per second and device
    mfu: float  # of bfloat16's peak


def plan(cases: Sequence[Case], cluster: Cluster) -> list[Plan]:
    """The plans of these runs. Raises ConfigError for a run that is impossible."""
    for case in cases:
        check(*case)
    counts = count(cases)
    return [_plan_one(case, counts[case], cluster) for case in cases]


def _plan_one(case: Case, counts: Counts, cluster: Cluster) -> Plan:
    config = case.config
    dims = case.dims
    device = cluster.device
    model: Any = build_model(*find_model(config.model, DEFAULT_VOCAB_SIZE))
    seconds = estimate(counts, config, dims, cluster)
    tokens = config.training.max_seq_len * config.training.local_batch_size * dims.dp * case.microbatches
    rate = tokens / sum(seconds.values()) / case.world_size
    reserved = counts["peak"] * RESERVED[case.world_size > dims.islands]
    return Plan(
        case,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        counts=counts,
        reserved=reserved,
        fits=reserved <= device.memory_bytes,
        seconds=seconds,
        tokens_per_step=tokens,
        rate=rate,
        mfu=rate * model.flops_per_token(config.training.max_seq_len) / device.flops,
    )


# -- the sweep


def sweep(config: Config, world_size: int, cluster: Cluster) -> list[Plan]:
    """Plans of the layouts that split least: those that fit before the others, the fastest first.

    Each has the mode that recomputes least, and the largest batch, with which it should fit.
    """
    model = build_model(*find_model(config.model, DEFAULT_VOCAB_SIZE))
    parameters = sum(parameter.numel() for parameter in model.parameters())
    chosen: dict[Any, Case] = {}  # of each layout
    for case in possible_cases(config, world_size):
        if rough_bytes(case, parameters) <= cluster.device.memory_bytes:
            chosen.setdefault(case.config.parallelism, case)
    if not chosen:
        raise ConfigError("--sweep: no layout, mode and batch of it should fit; plan one of your own without it")
    plans = plan(list(chosen.values())[:SHOWN], cluster)
    return sorted(plans, key=lambda found: (not found.fits, -found.rate))


def possible_cases(config: Config, world_size: int) -> Iterator[Case]:
    """All layouts, modes and batches of a sweep that train.py would take, in the order in which they are tried."""
    layouts = sorted(itertools.product(DEGREES, DEGREES), key=math.prod)
    for (pp, tp), mode, times in itertools.product(layouts, KEPT, (4, 2, 1)):
        layout = replace(config.parallelism, tp=tp, pp=pp, dp_shard=-1)
        checkpointing = replace(config.activation_checkpoint, mode=mode)
        training = replace(config.training, local_batch_size=times * pp * layout.pp_microbatch_size)
        tried = replace(config, parallelism=layout, activation_checkpoint=checkpointing, training=training)
        with suppress(ConfigError):  # the world, the batch or the model does not divide so
            check(tried, world_size)
            yield Case(tried, world_size)


def rough_bytes(case: Case, parameters: int) -> float:
    """About what a rank needs.

    That is 16 bytes of state for each of its parameters, gathered weights, activations of its layers, and scores.
    """
    config = case.config
    dims = case.dims
    layers = case.flavor.n_layers / dims.pp
    sequences = config.training.local_batch_size
    gathered = 2.0 * 2  # bytes of each of a layer's weights: two layers in bfloat16
    if dims.pp > 1:
        sequences = min(sequences, config.parallelism.pp_microbatch_size * dims.pp)
        gathered = 6 * layers  # a pipeline's weights stay gathered, and its gradients whole
    weights = (16 * layers / dims.shards + gathered) * parameters / case.flavor.n_layers / dims.tp
    split, whole = KEPT[config.activation_checkpoint.mode]
    kept = (split / dims.tp + whole) * case.flavor.dim * layers
    scores = SCORE_BYTES * case.flavor.vocab_size / dims.tp / loss_chunks(config)
    tokens = sequences * config.training.max_seq_len / dims.cp
    return RESERVED[True] * (weights + tokens * (kept + scores))


# -- the command


def plan_text(found: Plan, device: Device) -> str:
    """A plan as text."""
    counts = found.counts
    steps = found.case.config.training.steps
    seconds = sum(found.seconds.values())
    memory = {name: counts[name] for name in ("weights", "optimizer", "peak")}
    traffic = {" ".join(key): size for key, size in counts.items() if isinstance(key, Message)}
    checkpoint = 4 * found.parameters * (1 + counts["optimizer"] / counts["weights"])
    lines = [
        f"{found.parameters:,} parameters; {found.case.dims}; {found.tokens_per_step:,} tokens per step",
        summarize(found, device),
        "\nmemory of a rank, GiB  [counted on the real step]",
        *_rows(memory, GIB),
        "\ntraffic per step of a rank, GiB of whole tensors  [counted on the real step]",
        *_rows(traffic, GIB),
        f"\nseconds of a step  [modelled on the counts; {device.trust}]",
        *_rows(found.seconds),
        f"  {seconds:.3f} s per step, {steps * seconds / 86400:,.1f} days for {steps:,} steps",
        f"  MFU {100 * found.mfu:.1f} % of bfloat16's peak",
        f"\na checkpoint: {checkpoint / GIB:,.1f} GiB  [counted]",
    ]
    return "\n".join(lines)


def _rows(values: Mapping[str, float], unit: int = 1) -> list[str]:
    return [f"  {name:<30}{value / unit:>9.3f}" for name, value in values.items()]


def summarize(found: Plan, device: Device) -> str:
    """Speed and memory of a plan in a line."""
    low = device.low * found.rate
    high = device.high * found.rate
    fits = "fits"
    if not found.fits:
        fits = "DOES NOT FIT"
    memory = f"{found.reserved / GIB:.1f} of {device.memory_bytes / GIB:.1f} GiB reserved, {fits}"
    return f"{found.rate:,.0f} tokens/s/device, from {low:,.0f} to {high:,.0f}; {memory}"


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, Config, Cluster]:
    """The planner's own options, the config, the cluster. Raises TitaniteError."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.plan", description="plan a run for any cluster", allow_abbrev=False,
        epilog="other options are the config's, --config=FILE --section.field=value, such as --model.dim=5120",
    )  # fmt: skip
    add = parser.add_argument
    add("--world-size", type=int, required=True, help="ranks")
    add("--device", choices=sorted(DEVICES), default="h100", help="(default %(default)s)")
    add("--gpus-per-node", type=int, default=8, help="(default %(default)s)")
    add("--bandwidth", type=float, help="network per device and direction, 1e9 bytes/s (default: the device's)")
    add("--sweep", action="store_true", help="rank the simplest layouts")
    options, rest = parser.parse_known_args(argv)
    device = DEVICES[options.device]
    if options.bandwidth is not None:
        device = device._replace(network_bandwidth=1e9 * options.bandwidth)
    for name in ("world_size", "gpus_per_node", "bandwidth"):
        value = getattr(options, name)
        if value is not None and not 0 < value < math.inf:
            raise ConfigError(f"--{name.replace('_', '-')} = {value}: must be above 0")
    config = settle_model(load_config(rest))
    check_effects(config)
    if config.float8.enable and not device.float8_flops:
        raise ConfigError(f"float8.enable = true: {options.device} has no float8 matmul")
    for section, name in (
        ("parallelism", "cpu_offload"),
        ("parallelism", "reshard_group_size"),
        ("training", "epochs"),
    ):
        value = getattr(getattr(config, section), name)
        if value:
            raise ConfigError(f"{section}.{name} = {value}: cannot be planned; plan the run without it")
    return options, config, Cluster(device, options.gpus_per_node)


def main(argv: Sequence[str]) -> None:
    """Print the plan or the layouts. Raises TitaniteError."""
    torch.set_num_threads(1)  # OpenMP's others would be missing in the processes that count, which are forked
    options, config, cluster = parse(argv)
    device = cluster.device
    if not options.sweep:
        [found] = plan([Case(config, options.world_size)], cluster)
        print(plan_text(found, device))
        return
    print(f"fastest first  [{device.trust}]")
    for found in sweep(config, options.world_size, cluster):
        tried = found.case.config
        choice = f"{tried.activation_checkpoint.mode}, local_batch_size {tried.training.local_batch_size}"
        print(f"{summarize(found, device)}: {found.case.dims}, {choice}")


if __name__ == "__main__":
    run_and_leave(lambda: main(sys.argv[1:]))
