"""Plan a run for any cluster on a laptop: its memory, traffic, speed, checkpoints and failures.

    python -m tools.plan --config train_configs/llama3_8b.toml --world-size 64 --device h100
    python -m tools.plan --config train_configs/llama3_70b.toml --world-size 256 --sweep

Memory, traffic and operations are counted on the real step of train.py (tools.plan_count), for any model and optimizer.
The speed is modelled on these counts (tools.plan_time). No data and no GPU are needed.
"""

import argparse
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from config import Config, ConfigError, load_config, parse_schedule
from models import build_model, find_model, settle_model
from parallel.fsdp import needs_fsdp
from run.run import run_and_leave
from tools.plan_count import DEFAULT_VOCAB_SIZE, Case, DryRun, check
from tools.plan_sweep import count_with_progress, find_layouts
from tools.plan_time import DEVICES, GIB, Cluster, estimate

RESERVED = {False: 1.03, True: 1.25}  # memory that torch reserves / allocated: of a rank alone; with FSDP2


def plan(configs: Sequence[Config], world_size: int, cluster: Cluster) -> list[dict[str, Any]]:
    """The plans of these runs, as plain values. Raises ConfigError for a run that is impossible."""
    runs = []
    for config in configs:
        check(config, world_size)
        stages = {0, config.parallelism.pp - 1}  # the fullest is the first, the slowest the last, with the loss
        runs.append([Case(config, world_size, stage) for stage in sorted(stages)])
    counts = count_with_progress([case for cases in runs for case in cases], "a step")
    return [_plan_one(cases, [counts[case] for case in cases], cluster) for cases in runs]


def _plan_one(cases: list[Case], counts: list[DryRun], cluster: Cluster) -> dict[str, Any]:
    """The plan of a run from its counts on the first and the last stage."""
    config = cases[0].config
    dims = cases[0].dims
    device = cluster.device
    fullest, held = max(zip(cases, counts, strict=True), key=lambda pair: pair[1].peak)
    speeds = [estimate(counted, config, dims, cluster) for counted in counts]
    speed = max(speeds, key=lambda speed: speed["step_seconds"])
    model: Any = build_model(*find_model(config.model, DEFAULT_VOCAB_SIZE))
    parameters = sum(parameter.numel() for parameter in model.parameters())
    speed["mfu"] = speed["tokens_per_second"] * model.flops_per_token(config.training.max_seq_len) / device.flops
    sharded = needs_fsdp(config, dims.dp * dims.copies // dims.islands)
    reserved = held.peak * RESERVED[sharded]
    memory = {"weights": held.weights, "optimizer": held.optimizer, "peak": held.peak, "reserved": reserved}
    memory["device"] = device.memory_bytes
    sequences = config.training.local_batch_size * dims.dp * cases[0].microbatches
    return {
        "layout": str(dims),
        "mode": config.activation_checkpoint.mode,
        "local_batch_size": config.training.local_batch_size,
        "parameters": parameters,
        "tokens_per_step": config.training.max_seq_len * sequences,
        "memory_gib": {name: size / GIB for name, size in memory.items()},
        "stage": fullest.stage,
        "fits": reserved <= device.memory_bytes,
        "traffic": [[*key, *sent] for key, sent in sorted(counts[-1].sent.items())],
        "tflop": {kind: flops / 1e12 for kind, flops in counts[-1].flops.items()},
        "speed": speed,
        "fitted_to": device.fitted_to,
        "checkpoint_bytes": round(4 * parameters * (1 + held.optimizer / held.weights)),
    }


def plan_run(planned: Mapping[str, Any], steps: int, options: argparse.Namespace) -> dict[str, float]:
    """Days of a run, time of a checkpoint, failures, and the interval that loses least time to both.

    That is sqrt(2 C M), for a checkpoint of C seconds and M seconds between failures (Young 1974). The run's mean time
    to failure is that of a node divided by the number of nodes.
    """
    tokens = options.tokens or steps * planned["tokens_per_step"]
    seconds = tokens / planned["speed"]["tokens_per_second"] / options.world_size
    write = planned["checkpoint_bytes"] / (1e9 * options.storage_bandwidth)
    mttf = 3600 * options.mttf_hours / math.ceil(options.world_size / options.gpus_per_node)
    interval = math.sqrt(2 * write * mttf)
    lost = write / interval + interval / (2 * mttf)
    found = {"tokens": tokens, "days": seconds / 86400, "write_seconds": write, "failures": seconds / mttf}
    return found | {"interval_seconds": interval, "lost_pct": 100 * lost}


def sweep(config: Config, world_size: int, cluster: Cluster) -> list[dict[str, Any]]:
    """Plans of the fastest layouts that fit, with their modes and batches, the fastest first."""
    fitting: list[dict[str, Any]] = []
    room = cluster.device.memory_bytes / RESERVED[True]
    for configs in find_layouts(config, world_size, cluster, room):
        if not fitting:
            fitting = [found for found in plan(configs, world_size, cluster) if found["fits"]]
    return sorted(fitting, key=lambda found: -found["speed"]["tokens_per_second"])


def plan_text(found: Mapping[str, Any]) -> str:
    """A plan as text."""
    held = found["memory_gib"]
    speed = found["speed"]
    run = found["run"]
    memory = [f"  {cause:<14}{held[cause]:>9.2f}" for cause in ("weights", "optimizer", "peak", "reserved")]
    row = "  {:<14}{:<16}{:>7} calls {:>10.3f} GiB"
    traffic = [row.format(axis, kind, calls, size / GIB) for axis, kind, calls, size in found["traffic"]]
    parts = ("matmul", "attention", "pointwise", "optimizer", "intra_node", "inter_node", "bubble", "idle")
    seconds = ", ".join(f"{name} {speed[name]:.3f}" for name in parts)
    trust = "unfitted: no run of today's software on this device is known"
    if found["fitted_to"]:
        trust = f"fitted to {found['fitted_to']}"
    peak = ""
    if "float8" in found["tflop"]:
        peak = " of bfloat16's peak, though matmuls are in float8"
    lines = [
        f"{found['parameters']:,} parameters; {found['layout']}; {found['tokens_per_step']:,} tokens per step",
        f"\nmemory of a rank of stage {found['stage']}, GiB  [counted on the real step; reserved: estimated]",
        *memory,
        f"  of {held['device']:.1f}: {'fits' if found['fits'] else 'DOES NOT FIT'}",
        "\ntraffic per step of a rank of the last stage, whole tensors  [counted on the real step]",
        *traffic,
        f"\nspeed  [modelled on the counts; {trust}]",
        f"  {_rates(found)}; MFU {100 * speed['mfu']:.1f} %{peak}",
        f"  {speed['step_seconds']:.3f} s per step: {seconds}",
        "  TFLOP: " + ", ".join(f"{kind} {value:,.2f}" for kind, value in found["tflop"].items()),
        f"  {run['tokens'] / 1e9:,.1f} G tokens in {run['days']:,.1f} days",
        "\ncheckpoints  [size counted; the rest from --storage-bandwidth and --mttf-hours]",
        f"  {found['checkpoint_bytes'] / GIB:,.1f} GiB, written in {run['write_seconds']:,.0f} s",
        f"  {run['failures']:.1f} failures expected; cheapest interval {run['interval_seconds'] / 60:.0f} min, "
        f"{run['lost_pct']:.1f} % of the time lost",
    ]
    return "\n".join(lines)


def _rates(found: Mapping[str, Any]) -> str:
    speed = found["speed"]
    rate, low, high = speed["tokens_per_second"], speed["low"], speed["high"]
    unfitted = "" if found["fitted_to"] else " (unfitted)"
    return f"{rate:,.0f} tokens/s/device{unfitted}, from {low:,.0f} to {high:,.0f}"


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, Config, Cluster]:
    """The planner's own options, the config, the cluster. Raises TitaniteError."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.plan", description="plan a run for any cluster", allow_abbrev=False,
        epilog="other options are the config's, --config=FILE --section.field=value, and any field of the model's "
        "flavor, such as --model.dim=5120",
    )  # fmt: skip
    add = parser.add_argument
    add("--world-size", type=int, required=True, help="ranks")
    add("--device", choices=sorted(DEVICES), default="h100", help="(default %(default)s)")
    add("--gpus-per-node", type=int, default=8, help="(default %(default)s)")
    add("--bandwidth", type=float, help="network per device and direction, 1e9 bytes/s (default: the device's)")
    add("--tokens", type=float, help="token budget (default: the config's steps)")
    add("--mttf-hours", type=float, default=20_000.0, help="mean time to failure of a node (default %(default)s)")
    add("--storage-bandwidth", type=float, default=10.0, help="of all ranks, 1e9 bytes/s (default %(default)s)")
    add("--flash-attention", action="store_true", help="torch's own attention, not the fastest")
    add("--json", action="store_true", help="print JSON")
    add("--sweep", action="store_true", help="rank the layouts that fit")
    options, rest = parser.parse_known_args(argv)
    for name in ("world_size", "gpus_per_node", "bandwidth", "tokens", "mttf_hours", "storage_bandwidth"):
        value = getattr(options, name)
        if value is not None and not 0 < value < math.inf:
            raise ConfigError(f"--{name.replace('_', '-')} = {value}: must be above 0")
    device = DEVICES[options.device]
    config = settle_model(load_config(rest))
    if config.float8.enable and device.float8_flops is None and not config.float8.emulate:
        raise ConfigError(f"float8.enable = true: {options.device} has no float8 matmul")
    if config.training.epochs and not options.tokens:
        raise ConfigError(f"training.epochs = {config.training.epochs:g}: depends on the data; say --tokens")
    _, batch = parse_schedule(config.training.global_batch_size)[-1]
    last = replace(config.training, seq_len=config.training.max_seq_len, global_batch_size=batch)
    if last != config.training:
        print("planned as if all steps had the last batch and the longest sequences", file=sys.stderr)
    config = replace(config, training=last)
    bandwidth = 1e9 * options.bandwidth if options.bandwidth else device.network_bandwidth
    cluster = Cluster(device, options.gpus_per_node, bandwidth, options.flash_attention)
    return options, config, cluster


def main(argv: Sequence[str]) -> None:
    """Print the plan or the layouts. Raises TitaniteError."""
    options, config, cluster = parse(argv)
    if options.sweep:
        plans = sweep(config, options.world_size, cluster)
    else:
        plans = plan([config], options.world_size, cluster)
    for found in plans:
        found["run"] = plan_run(found, config.training.steps, options)
    if options.json:
        print(json.dumps(plans if options.sweep else plans[0], indent=1))
    elif not options.sweep:
        print(plan_text(plans[0]))
    else:
        for found in plans:
            what = f"{found['layout']}, {found['mode']}, local_batch_size {found['local_batch_size']}"
            print(f"{_rates(found)}  {found['memory_gib']['reserved']:.1f} GiB  {what}")


if __name__ == "__main__":
    run_and_leave(lambda: main(sys.argv[1:]))
