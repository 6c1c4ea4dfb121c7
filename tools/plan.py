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
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Literal

from config import Config, ConfigError, check_effects, load_config, parse_schedule
from models import build_model, find_model, settle_model
from parallel.fsdp import needs_fsdp
from run.run import run_and_leave
from tools.plan_count import DEFAULT_VOCAB_SIZE, HIDDEN_BYTES, Case, check, count
from tools.plan_tally import Counts, Matmul, Message
from tools.plan_time import DEVICES, GIB, Cluster, estimate

RESERVED = {False: 1.03, True: 1.25}  # memory that torch reserves / allocated: of a rank alone; with FSDP2
MODES: tuple[Literal["none", "selective", "full"], ...] = ("none", "selective", "full")
DEGREES = (1, 2, 4, 8)
LONG = 2**15  # tokens of a sequence, from which on a sweep splits it
SHOWN = 4  # layouts of a sweep


def plan(configs: Sequence[Config], world_size: int, cluster: Cluster) -> list[dict[str, Any]]:
    """The plans of these runs, as plain values. Raises ConfigError for a run that is impossible."""
    cases = [Case(config, world_size) for config in configs]
    for case in cases:
        check(*case)
    counts = count(cases)
    return [_plan_one(case, counts[case], cluster) for case in cases]


def reserved(counts: Counts, case: Case) -> float:
    """Bytes that torch reserves on a device."""
    dims = case.dims
    return counts["peak"] * RESERVED[needs_fsdp(case.config, dims.dp * dims.copies // dims.islands)]


def _plan_one(case: Case, counts: Counts, cluster: Cluster) -> dict[str, Any]:
    """The plan of a run from its counts."""
    config, _ = case
    device = cluster.device
    model: Any = build_model(*find_model(config.model, DEFAULT_VOCAB_SIZE))
    parameters = sum(parameter.numel() for parameter in model.parameters())
    speed = estimate(counts, config, case.dims, cluster)
    speed["mfu"] = speed["tokens_per_second"] * model.flops_per_token(config.training.max_seq_len) / device.flops
    memory = {name: counts[name] / GIB for name in ("weights", "optimizer", "peak")}
    memory["reserved"] = reserved(counts, case) / GIB
    memory["device"] = device.memory_bytes / GIB
    sequences = config.training.local_batch_size * case.dims.dp * case.microbatches
    tokens_per_step = config.training.max_seq_len * sequences
    return {
        "layout": str(case.dims),
        "mode": config.activation_checkpoint.mode,
        "local_batch_size": config.training.local_batch_size,
        "parameters": parameters,
        "tokens_per_step": tokens_per_step,
        "tokens": tokens_per_step * config.training.steps,
        "days": speed["step_seconds"] * config.training.steps / 86400,
        "memory_gib": memory,
        "fits": memory["reserved"] <= memory["device"],
        "traffic": {key: size for key, size in counts.items() if isinstance(key, Message)},
        "speed": speed,
        "fitted_to": device.fitted_to,
        "checkpoint_bytes": round(4 * parameters * (1 + counts["optimizer"] / counts["weights"])),
    }


# -- the sweep


def sweep(config: Config, world_size: int, cluster: Cluster) -> list[dict[str, Any]]:
    """Plans of the fastest layouts that fit, each with its fastest mode and batch, the fastest first.

    Rough counts of all say which are planned.
    """
    shared = count_modes(config, world_size)
    ranked = []
    for tried in possible_configs(config, world_size):
        case = Case(tried, world_size)
        rough = split(shared[tried.activation_checkpoint.mode], case)
        if reserved(rough, case) <= cluster.device.memory_bytes:
            speed = estimate(rough, tried, case.dims, cluster)["tokens_per_second"]
            ranked.append((speed, tried))
    ranked.sort(key=lambda pair: -pair[0])
    fastest: dict[Any, Config] = {}  # of each layout
    for _, tried in ranked:
        fastest.setdefault(tried.parallelism, tried)
    plans = plan(list(fastest.values())[:SHOWN], world_size, cluster)
    fitting = [found for found in plans if found["fits"]]
    if not fitting:
        raise ConfigError("no layout, mode and batch of the sweep fits; plan one of your own without --sweep")
    return sorted(fitting, key=lambda found: -found["speed"]["tokens_per_second"])


def count_modes(config: Config, world_size: int) -> dict[str, Counts]:
    """What a step of one sequence counts in each mode, if FSDP2 splits it over all ranks."""
    plain = replace(config.parallelism, tp=1, pp=1, cp=1, dp_shard=-1)
    training = replace(config.training, local_batch_size=1, global_batch_size=0)
    cases = {}
    for mode in MODES:
        checkpointing = replace(config.activation_checkpoint, mode=mode)
        tried = replace(config, parallelism=plain, training=training, activation_checkpoint=checkpointing)
        cases[mode] = Case(tried, world_size)
    counts = count(list(cases.values()))
    return {mode: counts[case] for mode, case in cases.items()}


def possible_configs(config: Config, world_size: int) -> Iterator[Config]:
    """All layouts, modes and batches of a sweep that train.py would take."""
    context = [config.parallelism.cp]
    if config.training.max_seq_len >= LONG:
        context = list(DEGREES)
    for tp, pp, cp, mode, times in itertools.product(DEGREES, DEGREES, context, MODES, (1, 2, 4)):
        layout = replace(config.parallelism, tp=tp, pp=pp, cp=cp, dp_shard=-1)
        batch = times
        if pp > 1:
            batch *= layout.pp_microbatch_size * pp
        checkpointing = replace(config.activation_checkpoint, mode=mode)
        training = replace(config.training, local_batch_size=batch)
        tried = replace(config, parallelism=layout, activation_checkpoint=checkpointing, training=training)
        with suppress(ConfigError):  # the world, the batch or the model does not divide so
            check(tried, world_size)
            yield tried


def split(counts: Counts, case: Case) -> Counts:
    """What a rank would count in a layout, roughly, from `counts` of one sequence that FSDP2 splits over all ranks.

    Layers, hidden states, heads and weights are split evenly, and so are both ends of the model.
    """
    dims = case.dims
    training = case.config.training
    sequences = training.local_batch_size * case.microbatches
    parts = dims.tp * dims.cp * dims.pp
    rough: Counts = Counter()
    for key, amount in counts.items():
        if isinstance(key, Matmul):
            rows = key.rows * training.local_batch_size // dims.cp
            narrow = key._replace(rows=rows, columns=max(1, key.columns // dims.tp))
            rough[narrow] += max(1, amount * case.microbatches // dims.pp)
        elif isinstance(key, Message):
            rough[key] = amount * case.microbatches // (dims.tp * dims.pp)
        elif key in ("attention", "moved"):
            rough[key] = amount * sequences // parts
        else:
            rough[key] = amount
    states = 2 * counts["weights"] + counts["optimizer"]
    held = training.local_batch_size
    gathered = 0
    if dims.pp > 1:  # a stage's weights stay gathered
        held = min(held, case.config.parallelism.pp_microbatch_size * dims.pp)
        gathered = counts["weights"] // 2 * case.world_size // dims.dp_replicate // (dims.tp * dims.pp)
    rough["peak"] = states + gathered + max(0, counts["peak"] - states) * held // parts
    hidden = sequences * training.max_seq_len * case.flavor.dim * HIDDEN_BYTES // dims.cp
    layers = case.flavor.n_layers // dims.pp
    if dims.tp > 1:
        rough[Message("tp", "all_gather")] = 9 * layers * hidden  # half of them are reduce-scatters, of the same bytes
    if dims.cp > 1:
        rough[Message("cp", "all_gather")] = 3 * layers * hidden  # keys and values, as if there were half as many
    if dims.pp > 1:
        rough[Message("pp", "send")] = 2 * hidden
    return rough


# -- the command


def plan_text(found: Mapping[str, Any]) -> str:
    """A plan as text."""
    held = found["memory_gib"]
    speed = found["speed"]
    memory = [f"  {cause:<14}{held[cause]:>9.2f}" for cause in ("weights", "optimizer", "peak", "reserved")]
    traffic = [f"  {axis:<14}{kind:<16}{size / GIB:>9.3f} GiB" for (axis, kind), size in found["traffic"].items()]
    parts = ("matmul", "attention", "pointwise", "optimizer", "intra_node", "inter_node", "bubble", "idle")
    trust = "unfitted: no run of today's software on this device is known"
    if found["fitted_to"]:
        trust = f"fitted to {found['fitted_to']}"
    fits = "fits"
    if not found["fits"]:
        fits = "DOES NOT FIT"
    lines = [
        f"{found['parameters']:,} parameters; {found['layout']}; {found['tokens_per_step']:,} tokens per step",
        "\nmemory of a rank, GiB  [counted on the real step; reserved: estimated]",
        *memory,
        f"  of {held['device']:.1f}: {fits}",
        "\ntraffic per step of a rank, whole tensors  [counted on the real step]",
        *traffic,
        f"\nspeed  [modelled on the counts; {trust}]",
        f"  {_rates(found)}; MFU {100 * speed['mfu']:.1f} % of bfloat16's peak",
        f"  {speed['step_seconds']:.3f} s per step: " + ", ".join(f"{name} {speed[name]:.3f}" for name in parts),
        f"  {found['days']:,.1f} days for {found['tokens'] / 1e9:,.1f} G tokens",
        f"\na checkpoint: {found['checkpoint_bytes'] / GIB:,.1f} GiB  [counted]",
    ]
    return "\n".join(lines)


def _rates(found: Mapping[str, Any]) -> str:
    speed = found["speed"]
    unfitted = " (unfitted)"
    if found["fitted_to"]:
        unfitted = ""
    rate = f"{speed['tokens_per_second']:,.0f} tokens/s/device{unfitted}"
    return f"{rate}, from {speed['low']:,.0f} to {speed['high']:,.0f}"


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
    add("--sweep", action="store_true", help="rank the layouts that fit")
    options, rest = parser.parse_known_args(argv)
    for name in ("world_size", "gpus_per_node", "bandwidth"):
        value = getattr(options, name)
        if value is not None and not 0 < value < math.inf:
            raise ConfigError(f"--{name.replace('_', '-')} = {value}: must be above 0")
    device = DEVICES[options.device]
    if options.bandwidth:
        device = device._replace(network_bandwidth=1e9 * options.bandwidth)
    config = settle_model(load_config(rest))
    check_effects(config)
    if config.float8.enable and device.float8_flops is None:
        raise ConfigError(f"float8.enable = true: {options.device} has no float8 matmul")
    if config.training.epochs:
        raise ConfigError(f"training.epochs = {config.training.epochs:g}: depends on the data; plan training.steps")
    _, batch = parse_schedule(config.training.global_batch_size)[-1]
    last = replace(config.training, seq_len=config.training.max_seq_len, global_batch_size=batch)
    if last != config.training:
        print("planned as if all steps had the last batch and the longest sequences", file=sys.stderr)
    return options, replace(config, training=last), Cluster(device, options.gpus_per_node)


def main(argv: Sequence[str]) -> None:
    """Print the plan or the layouts. Raises TitaniteError."""
    options, config, cluster = parse(argv)
    if options.sweep:
        for found in sweep(config, options.world_size, cluster):
            what = f"{found['layout']}, {found['mode']}, local_batch_size {found['local_batch_size']}"
            print(f"{_rates(found)}  {found['memory_gib']['reserved']:.1f} GiB  {what}")
        return
    [found] = plan([config], options.world_size, cluster)
    print(plan_text(found))


if __name__ == "__main__":
    run_and_leave(lambda: main(sys.argv[1:]))
