"""The fastest layouts of a run that fit: ranked by formulas on a few counts, then counted one by one.

What layouts share is counted once per mode of activation checkpointing, on a step of one sequence that only FSDP2
splits. From there on rough formulas give a rank's work, traffic and memory in any layout. They choose what is counted.
"""

import itertools
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any, Literal

from tqdm import tqdm

from config import Config, ConfigError
from models import find_model
from tools.plan_count import DEFAULT_VOCAB_SIZE, Case, DryRun, check, count
from tools.plan_time import Cluster, estimate

MODES: tuple[Literal["none", "selective", "full"], ...] = ("none", "selective", "full")
DEGREES = (1, 2, 4, 8)
LONG = 2**15  # tokens of a sequence, from which on it may be split
SHOWN = 4
COUNTED = 12  # most that are counted, to find some that fit
PER_LAYOUT = 2  # most of one layout: others may be nearly as fast
HIDDEN_BYTES = 2  # of a number in bfloat16


def find_layouts(config: Config, world_size: int, cluster: Cluster, room: float) -> Iterator[list[Config]]:
    """Configs that may be the fastest, a few at a time, the most promising first. `room`: bytes for a rank's peak."""
    counts = count_modes(config, world_size)
    ranked = []
    for tried in possible_configs(config, world_size, cluster):
        case = Case(tried, world_size)
        counted = transform(counts[tried.activation_checkpoint.mode], case)
        if counted.peak < room:
            speed = estimate(counted, tried, case.dims, cluster)["tokens_per_second"]
            ranked.append((speed, tried))
    ranked.sort(key=lambda pair: -pair[0])
    taken: dict[Any, int] = {}
    chosen = []
    for _, tried in ranked:
        taken[tried.parallelism] = taken.get(tried.parallelism, 0) + 1
        if taken[tried.parallelism] <= PER_LAYOUT:
            chosen.append(tried)
    for first in range(0, COUNTED, SHOWN):
        yield chosen[first : first + SHOWN]


def count_modes(config: Config, world_size: int) -> dict[str, DryRun]:
    """What a step of one sequence counts in each mode, if FSDP2 splits it over all ranks."""
    plain = replace(config.parallelism, tp=1, pp=1, cp=1, dp_replicate=1, dp_shard=-1, local_steps=0)
    cases = {}
    for mode in MODES:
        training = replace(config.training, local_batch_size=1, global_batch_size=world_size)
        checkpointing = replace(config.activation_checkpoint, mode=mode)
        tried = replace(config, parallelism=plain, training=training, activation_checkpoint=checkpointing)
        cases[mode] = Case(tried, world_size)
    counts = count_with_progress(list(cases.values()), "what all layouts share")
    return {mode: counts[case] for mode, case in cases.items()}


def count_with_progress(cases: list[Case], what: str) -> dict[Case, DryRun]:
    """`count`, with a line on stderr."""
    with tqdm(total=len(set(cases)), desc=f"counting {what}", file=sys.stderr, leave=False, mininterval=1) as bar:
        return count(cases, bar.update)


def possible_configs(config: Config, world_size: int, cluster: Cluster) -> Iterator[Config]:
    """All layouts, modes and batches that train.py would take."""
    context = [config.parallelism.cp]
    if config.training.max_seq_len >= LONG:
        context = list(DEGREES)
    for tp, pp, cp in itertools.product(DEGREES, DEGREES, context):
        nodes = max(1, world_size // (cluster.gpus_per_node * pp))
        for replicas in sorted({config.parallelism.dp_replicate, nodes}):
            layout = replace(config.parallelism, tp=tp, pp=pp, cp=cp, dp_replicate=replicas, dp_shard=-1)
            smallest = 1
            if pp > 1:
                smallest = layout.pp_microbatch_size * pp
            for mode, times in itertools.product(MODES, (1, 2, 4)):
                checkpointing = replace(config.activation_checkpoint, mode=mode)
                training = replace(config.training, local_batch_size=times * smallest)
                tried = replace(config, parallelism=layout, activation_checkpoint=checkpointing, training=training)
                with suppress(ConfigError):  # the world, the batch or the model does not divide so
                    check(tried, world_size)
                    yield tried


def transform(counted: DryRun, case: Case) -> DryRun:
    """What a rank would count in a layout, from `counted` of one sequence that FSDP2 splits over all ranks.

    Layers, hidden states, heads and weights are split evenly. As if ends of the model were spread over a pipeline.
    """
    config, dims = case.config, case.dims
    local = config.training.local_batch_size
    sequences = local * case.microbatches
    split = dims.tp * dims.cp * dims.pp
    matmuls: dict[Any, int] = {}
    for matmul, calls in counted.matmuls.items():
        narrow = matmul._replace(rows=matmul.rows * local // dims.cp, columns=max(1, matmul.columns // dims.tp))
        matmuls[narrow] = matmuls.get(narrow, 0) + max(1, calls * case.microbatches // dims.pp)
    states = case.world_size / (dims.tp * dims.pp * dims.shards)  # of a rank, by those that were counted
    weights = round(counted.weights * states)
    optimizer = round(counted.optimizer * states)
    moved = {"step": counted.moved["step"] * sequences // split, "update": round(counted.moved["update"] * states)}
    activations = max(0, counted.peak - 2 * counted.weights - counted.optimizer)
    held = local
    if dims.pp > 1:
        held = min(local, config.parallelism.pp_microbatch_size * dims.pp)
    peak = 2 * weights + optimizer + activations * held // split
    attention = counted.attention * sequences // split
    return DryRun(_sent(counted, case), matmuls, attention, moved, weights, optimizer, peak)


def _sent(counted: DryRun, case: Case) -> dict[tuple[str, str], list[int]]:
    """Collectives of a step: axis and kind → calls, bytes of whole tensors."""
    config, dims = case.config, case.dims
    training = config.training
    flavor = find_model(config.model, DEFAULT_VOCAB_SIZE)[1]
    layers = flavor.n_layers * case.microbatches // dims.pp
    hidden = training.local_batch_size * training.max_seq_len * flavor.dim * HIDDEN_BYTES // dims.cp
    sent: dict[tuple[str, str], list[int]] = {}

    def add(axis: str, kind: str, calls: int, size: int) -> None:
        before = sent.get((axis, kind), [0, 0])
        sent[axis, kind] = [before[0] + calls, before[1] + calls * size]

    for (_, kind), (calls, size) in counted.sent.items():
        if kind in ("all_gather", "reduce_scatter"):
            whole = size * case.microbatches // (dims.tp * dims.pp)
            sent["dp_shard_cp", kind] = [calls * case.microbatches // dims.pp, whole]
    if dims.dp_replicate > 1:
        gradients = 4 * counted.weights * case.world_size // (4 * dims.tp * dims.pp * dims.shards)
        add("dp_replicate", "all_reduce", 1, gradients)
    recomputed = int(config.activation_checkpoint.mode == "full")
    if dims.tp > 1:
        add("tp", "all_gather", (4 + 2 * recomputed) * layers, hidden)
        add("tp", "reduce_scatter", (4 + recomputed) * layers, hidden)
    if dims.cp > 1:
        keys = 2 * hidden * flavor.n_kv_heads * dims.cp // (flavor.n_heads * dims.tp)
        add("cp", "all_gather", (2 + recomputed) * layers, keys)
        add("cp", "reduce_scatter", layers, keys)
    if dims.pp > 1:
        add("pp", "send", 2 * case.microbatches, hidden)
    return sent
