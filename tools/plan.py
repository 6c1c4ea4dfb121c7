"""Plan a run for any cluster on a laptop: its memory, traffic, speed, checkpoints and failures.

    python -m tools.plan --config train_configs/llama3_8b.toml --world-size 64 --device h100
    python -m tools.plan --config train_configs/llama3_70b.toml --world-size 256 --sweep
    python -m tools.plan --config train_configs/llama3_8b.toml --world-size 64 --dry-run

Weights are counted on the model, built on the meta device. The rest are formulas for Llamas (docs/plan.md), which tests
compare with counts of the real step. `--dry-run` makes that count for a config of any model: it runs one step of
train.py on fake ranks and fake tensors, with everything but data, checkpoints and kernels. No data is needed.
"""

import argparse
import dataclasses
import itertools
import json
import math
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Literal, NamedTuple

from config import Config, ConfigError, load_config
from data.ledger import grad_accum_steps
from float8.convert import check_float8, convert_to_float8
from loss import loss_chunks
from metrics import find_hook
from models import ModelSpec, build_model, find_model
from parallel.mesh import ParallelDims
from run.run import run_and_leave
from tools.devices import DEVICES, GIB
from tools.plan_costs import DEFAULT_VOCAB_SIZE, Work, traffic
from tools.plan_memory import Memory, memory, reserved
from tools.plan_time import Cluster, estimate

# Errors against published runs and against counts, from benchmarks/results/plan.json and plan_counts.json.
KNOWN_BY = {
    "parameters": "counted on the real module",
    "memory": "modelled, reserved too; within 5 % of a count of the real step, except as docs/plan.md says",
    "traffic": "modelled; equal to a count of the real step, except as docs/plan.md says",
    "speed": "modelled; errors against published runs in docs/plan.md",
    "checkpoint": "size exact; times from --storage-bandwidth",
    "failures": "Young's and Daly's formulas, from --mttf-hours",
}
OF_THE_FORMULAS = ("device", "gpus_per_node", "bandwidth", "tokens", "mttf_hours", "storage_bandwidth")  # options
MODES: tuple[Literal["none", "selective", "full"], ...] = ("none", "selective", "full")


class Options(NamedTuple):
    """The planner's settings beside the config."""

    world_size: int
    cluster: Cluster
    tokens: float
    mttf_hours: float
    storage_bandwidth: float


def plan(config: Config, options: Options) -> dict[str, Any]:
    """The whole plan of a run, as plain values. Raises ConfigError for a run that is impossible, or no Llama's."""
    return plan_work(build_work(config, _check(config, options.world_size)), options)


def build_work(config: Config, dims: ParallelDims) -> Work:
    """The run as the formulas take it, with counts from the model itself. Raises ConfigError for other than a Llama."""
    spec, flavor = _find_model(config)
    model = build_model(spec, flavor)
    converted = convert_to_float8(model, config.float8, dims.tp, dims.shards)[0] if config.float8.enable else []
    return Work(
        shape=flavor,
        config=config,
        dims=dims,
        float8_layers=frozenset(name.rpartition(".")[2] for name in converted),
        compiled_loss=config.compile.enable,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        flops_per_token=model.flops_per_token(config.training.seq_len),  # type: ignore[operator]
    )


def plan_work(work: Work, options: Options) -> dict[str, Any]:
    """The plan by the formulas, as plain values."""
    config, dims = work.config, work.dims
    stages = [dataclasses.replace(work, stage=stage) for stage in range(dims.pp)]
    fullest = max(stages, key=lambda stage: memory(stage).peak)
    held, speed, device = memory(fullest), estimate(stages[-1], options.cluster), options.cluster.device
    mfu = speed.tokens_per_second * work.flops_per_token / device.flops  # as in metrics.py
    step_tokens = work.accumulation * config.training.local_batch_size * dims.dp * config.training.seq_len
    tokens = options.tokens or config.training.steps * step_tokens
    outer = 4 if dims.islands > 1 else 0  # the outer optimizer's momentum
    state_bytes = work.parameters * (4 + 2 * work.moment_bytes + outer)
    sizes = {**held._asdict(), "allocated": held.peak, "reserved": reserved(held), "device": device.memory_bytes}
    return {
        "world_size": options.world_size,
        "layout": str(dims),
        "parameters": work.parameters,
        "flops_per_token": work.flops_per_token,
        "tokens_per_step": step_tokens,
        "memory_gib": {name: size / GIB for name, size in sizes.items()},
        "stage": fullest.stage,
        "fits": reserved(held) <= device.memory_bytes,
        "traffic": [item._asdict() for item in traffic(stages[-1])],
        "speed": speed._asdict() | {"mfu": mfu, "bound": speed.bound},
        "tokens": tokens,
        "days": tokens / (speed.tokens_per_second * options.world_size) / 86400,
        "checkpoint": _checkpoint(state_bytes, tokens, speed.tokens_per_second * options.world_size, options),
        "known_by": KNOWN_BY,
    }


def _find_model(config: Config) -> tuple[ModelSpec, Any]:
    """The model family and its flavor. Raises ConfigError for other than a Llama, which the formulas are for."""
    spec, flavor = find_model(config.model, 0)
    if config.model.name != "llama":
        raise ConfigError(
            f"model.name = {config.model.name!r}: the formulas are for Llama only; add --dry-run to count its step"
        )
    return spec, flavor if flavor.vocab_size else dataclasses.replace(flavor, vocab_size=DEFAULT_VOCAB_SIZE)


def _check(config: Config, world_size: int) -> ParallelDims:
    """The layout. Raises ConfigError if train.py would refuse it."""
    spec, flavor = _find_model(config)
    dims = ParallelDims.from_config(config.parallelism, world_size)
    # async_tp needs a GPU to run, but not for a plan.
    parallelism = dataclasses.replace(config.parallelism, async_tp=False)
    spec.check_parallelism(flavor, dataclasses.replace(config, parallelism=parallelism))
    check_float8(config, here=False)
    loss_chunks(config)
    grad_accum_steps(config.training, dims.dp)
    return dims


def _checkpoint(size: int, tokens: float, tokens_per_second: float, options: Options) -> dict[str, float]:
    """Size and time of a checkpoint, failures of the run, and the interval that loses least time to both.

    Young 1974: sqrt(2 C M) for a checkpoint of C seconds and M seconds between failures. Daly 2006 adds terms of C / M.
    The run's mean time to failure is that of a node divided by the number of nodes.
    """
    seconds = size / options.storage_bandwidth
    nodes = math.ceil(options.world_size / options.cluster.gpus_per_node)
    mttf = 3600 * options.mttf_hours / nodes
    ratio = seconds / (2 * mttf)
    daly = math.sqrt(2 * seconds * mttf) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - seconds if ratio < 1 else mttf
    return {
        "gib": size / GIB,
        "write_seconds": seconds,
        "failures": tokens / tokens_per_second / mttf,
        "interval_seconds_young": math.sqrt(2 * seconds * mttf),
        "interval_seconds_daly": daly,
        "lost_pct": 100 * (seconds / daly + daly / (2 * mttf)),
    }


def sweep(config: Config, options: Options) -> list[dict[str, Any]]:
    """Plans of all layouts, batch sizes and checkpointing modes that fit, the fastest first.

    The number of replicas is the config's, or one per node. A global batch size in the config stays as it is.
    """
    plans = []
    degrees = [2**i for i in range(6)]
    base = build_work(config, ParallelDims(1, 1))
    for tp, pp, cp, mode, batch in itertools.product(
        degrees[:4], degrees[:5], degrees[:4], MODES, sorted({config.training.local_batch_size, *degrees[:5]})
    ):
        on_node = options.world_size // (options.cluster.gpus_per_node * pp)
        for replicas in sorted({config.parallelism.dp_replicate, max(1, on_node)}):
            layout = dataclasses.replace(config.parallelism, tp=tp, pp=pp, cp=cp, dp_replicate=replicas, dp_shard=-1)
            changed = dataclasses.replace(
                config,
                parallelism=layout,
                activation_checkpoint=dataclasses.replace(config.activation_checkpoint, mode=mode),
                training=dataclasses.replace(config.training, local_batch_size=batch),
            )
            try:
                dims = _check(changed, options.world_size)
            except ConfigError:
                continue  # the world, the batch or the model does not divide so
            work = dataclasses.replace(base, config=changed, dims=dims)
            found = plan_work(work, options)
            if found["fits"]:
                plans.append({"mode": mode, "local_batch_size": batch, **found})
    return sorted(plans, key=lambda found: -found["speed"]["tokens_per_second"])


def plan_text(found: dict[str, Any]) -> str:
    """A plan as text."""
    held, speed, saved = found["memory_gib"], found["speed"], found["checkpoint"]
    waits = ("matmul", "pointwise", "intra_node", "inter_node", "bubble")
    known = found["known_by"]
    lines = [
        f"{found['parameters']:,} parameters, world size {found['world_size']}: {found['layout']}",
        f"{found['tokens_per_step']:,} tokens per step, {found['flops_per_token'] / 1e9:.1f} GFLOP per token",
        "",
        f"memory per rank, GiB  [{known['memory']}]",
        *(f"  {cause:<14}{held[cause]:>9.2f}" for cause in (*Memory._fields, "allocated")),
        f"  {'reserved':<14}{held['reserved']:>9.2f}  of {held['device']:.1f}: "
        + ("fits" if found["fits"] else "DOES NOT FIT"),
        "",
        f"traffic per step and rank, whole tensors  [{known['traffic']}]",
        *_traffic_lines(found["traffic"]),
        "",
        f"speed  [{known['speed']}]",
        f"  {speed['tokens_per_second']:,.0f} tokens/s/device, MFU {100 * speed['mfu']:.1f} %; bound: {speed['bound']}",
        f"  {speed['step_seconds']:.3f} s per step: " + ", ".join(f"{name} {speed[name]:.3f}" for name in waits),
        f"  {found['tokens'] / 1e9:,.1f} G tokens in {found['days']:,.1f} days",
        "",
        f"checkpoints  [{known['checkpoint']}; {known['failures']}]",
        f"  {saved['gib']:,.1f} GiB, written in {saved['write_seconds']:,.0f} s",
        f"  {saved['failures']:.1f} failures expected; cheapest interval {saved['interval_seconds_daly'] / 60:.0f} min "
        f"(Daly; Young {saved['interval_seconds_young'] / 60:.0f}), {saved['lost_pct']:.1f} % of the time lost",
    ]
    return "\n".join(lines)


def sweep_text(plans: list[dict[str, Any]]) -> str:
    """The fastest layouts as text."""
    lines = [f"layouts that fit: {len(plans)}; the fastest:"]
    for found in plans[:20]:
        rate, gib = found["speed"]["tokens_per_second"], found["memory_gib"]["reserved"]
        settings = f"{found['layout']}, {found['mode']}, local_batch_size {found['local_batch_size']}"
        lines.append(f"  {rate:>8,.0f} tokens/s/device  {gib:>6.1f} GiB  {settings}")
    return "\n".join(lines)


def _traffic_lines(rows: list[dict[str, Any]]) -> list[str]:
    return [f"  {x['axis']:<14}{x['kind']:<16}{x['calls']:>7} calls {x['bytes'] / GIB:>10.3f} GiB" for x in rows]


def run_dry(config: Config, world_size: int, rank: int) -> dict[str, Any]:
    """Count one real step; the result as plain values."""
    from tools.dry_run import dry_run  # here: it loads train.py and all that needs

    counted = dry_run(config, world_size, rank)
    return {
        "rank": rank,
        "memory_gib": {name: getattr(counted, name) / GIB for name in ("weights", "optimizer", "peak")},
        "matmul_tflop": counted.matmul_flops / 1e12,
        "traffic": [item._asdict() for item in counted.traffic],
        "known_by": "counted on one step of train.py with fake ranks and tensors; kernels are the CPU's, not fused",
    }


def dry_text(counted: dict[str, Any]) -> str:
    """A dry run as text."""
    head = f"one step of train.py ran as rank {counted['rank']}  [{counted['known_by']}]"
    held = "  " + ", ".join(f"{name} {value:.2f} GiB" for name, value in counted["memory_gib"].items())
    held += f"; {counted['matmul_tflop']:,.2f} TFLOP in matmuls, without attention's"
    return "\n".join([head, held, *_traffic_lines(counted["traffic"])])


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, Config, Options]:
    """Parse the planner's own options and, from all others, the config. Raises ConfigError."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.plan", description="plan a run for any cluster", allow_abbrev=False,
        epilog="other options are the config's: --config=FILE --section.field=value",
    )  # fmt: skip
    parser.add_argument("--world-size", type=int, required=True, help="ranks")
    parser.add_argument("--device", choices=sorted(DEVICES), default="h100")
    parser.add_argument("--gpus-per-node", type=int, default=8)
    parser.add_argument("--bandwidth", type=_positive, help="network per device and direction, 1e9 bytes/s")
    parser.add_argument("--tokens", type=_positive, default=0.0, help="token budget; else the config's steps")
    parser.add_argument("--mttf-hours", type=_positive, default=20_000.0, help="mean time to failure of a node")
    parser.add_argument("--storage-bandwidth", type=_positive, default=10.0, help="of all ranks together, 1e9 bytes/s")
    parser.add_argument("--json", action="store_true", help="print JSON")
    modes = parser.add_mutually_exclusive_group()
    modes.add_argument("--sweep", action="store_true", help="rank the layouts that fit")
    modes.add_argument("--dry-run", action="store_true", help="run and count one real step on fake ranks")
    parser.add_argument("--rank", type=int, help="the rank to count with --dry-run (default 0)")
    arguments, rest = parser.parse_known_args(argv)
    # Which options were given: argparse keeps values that exist, here None, instead of its defaults.
    said, _ = parser.parse_known_args(argv, argparse.Namespace(**dict.fromkeys(OF_THE_FORMULAS)))
    for name in OF_THE_FORMULAS:
        if arguments.dry_run and (value := getattr(said, name)) is not None:
            raise ConfigError(f"--{name.replace('_', '-')} = {value}: is for the formulas, not for --dry-run")
    if arguments.rank is not None and not arguments.dry_run:
        raise ConfigError(f"--rank = {arguments.rank}: is for --dry-run; the formulas take the fullest rank")
    for name in ("world_size", "gpus_per_node"):
        if getattr(arguments, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')} = {getattr(arguments, name)}: must be at least 1")
    if not 0 <= (arguments.rank or 0) < arguments.world_size:
        raise ConfigError(f"--rank = {arguments.rank}: must be from 0 to {arguments.world_size - 1}")
    device = DEVICES[arguments.device]
    bandwidth = 1e9 * arguments.bandwidth if arguments.bandwidth else device.network_bandwidth
    cluster = Cluster(device, arguments.gpus_per_node, bandwidth)
    storage = 1e9 * arguments.storage_bandwidth
    options = Options(arguments.world_size, cluster, arguments.tokens, arguments.mttf_hours, storage)
    config = load_config(rest)
    find_hook(config.metrics.hook)
    if config.float8.enable and device.float8_flops is None and not config.float8.emulate:
        raise ConfigError(f"float8.enable = true: {arguments.device} has no float8 matmul")
    return arguments, config, options


def _positive(text: str) -> float:
    value = float(text)
    if not (math.isfinite(value) and value > 0):
        raise argparse.ArgumentTypeError(f"{text}: must be above 0")
    return value


def main(argv: Sequence[str]) -> None:
    """Print the plan, the layouts or the dry run. Raises TitaniteError."""
    arguments, config, options = parse(argv)
    found: Any
    text: Callable[[Any], str]
    if arguments.sweep:
        found, text = sweep(config, options), sweep_text
    elif arguments.dry_run:
        found, text = run_dry(config, arguments.world_size, arguments.rank or 0), dry_text
    else:
        found, text = plan(config, options), plan_text
    with suppress(BrokenPipeError):  # a reader that stops early, such as `| head`
        print(json.dumps(found, indent=1) if arguments.json else text(found))


if __name__ == "__main__":
    run_and_leave(lambda: main(sys.argv[1:]))  # fake ranks cannot leave their process group
