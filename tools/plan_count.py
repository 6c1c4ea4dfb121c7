"""Counts of a step with all layers, from dry runs with few.

Layers repeat. So what a step computes, moves and sends is a straight line in their number, and so is what it holds at
any place, seen from the beginning or the end of a forward or backward. Two counts give the line. A third has to lie on
it, or all layers are counted. Likewise two and three microbatches stand for many.
"""

import dataclasses
import gc
import itertools
import math
import multiprocessing
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from config import Config
from data.ledger import grad_accum_steps
from float8.convert import convert_to_float8
from models import build_model, find_model
from parallel.mesh import ParallelDims
from parallel.pipeline import stages_of_rank
from tools.dry_run import DEFAULT_VOCAB_SIZE, DryRun, dry_run

FEW_MICROBATCHES = (2, 3)  # the first, the last, and one between
Point = tuple[int, int]  # layers, microbatches of a step


class Case(NamedTuple):
    """A run, as a rank of one pipeline stage has it. `eager_loss`: the loss is not compiled, even if the blocks are."""

    config: Config
    world_size: int
    stage: int = 0
    eager_loss: bool = False


def count(cases: Sequence[Case], sure: bool = True) -> list[DryRun]:
    """What each case counts in a step; if not `sure`, without the third count.

    Raises what a run with these settings raises, above all ConfigError.
    """
    asked = [(case, goal(case), points(case, sure)) for case in cases]
    found = run_all([(case, point) for case, _, some in asked for point in some])
    lines = [extend({point: found[case, point] for point in some}, end) for case, end, some in asked]
    found |= run_all([(case, end) for (case, end, _), line in zip(asked, lines, strict=True) if line is None])
    return [line or found[case, end] for (case, end, _), line in zip(asked, lines, strict=True)]


def run_all(jobs: Sequence[tuple[Case, Point]]) -> dict[tuple[Case, Point], DryRun]:
    """Dry runs in parallel, each in a process of its own: forked, since imports take longer than small runs."""
    jobs = list(dict.fromkeys(jobs))
    with multiprocessing.get_context("fork").Pool(len(os.sched_getaffinity(0)), maxtasksperchild=1) as pool:
        return dict(zip(jobs, pool.starmap(_run, jobs, chunksize=1), strict=True))


def _run(case: Case, point: Point) -> DryRun:
    gc.freeze()  # otherwise a collection walks through, and so copies, all objects of the parent
    torch._logging.set_logs(dynamo=50)
    config, dims = case.config, ParallelDims.from_config(case.config.parallelism, case.world_size)
    sequences = point[1] * config.training.local_batch_size * dims.dp
    model = dataclasses.replace(config.model, n_layers=point[0])
    training = dataclasses.replace(config.training, global_batch_size=sequences)
    few = dataclasses.replace(config, model=model, training=training)
    return dry_run(few, case.world_size, case.stage * case.world_size // dims.pp, case.eager_loss)


def goal(case: Case) -> Point:
    """Layers and microbatches of the run itself."""
    config, dims = case.config, ParallelDims.from_config(case.config.parallelism, case.world_size)
    return find_model(config.model, DEFAULT_VOCAB_SIZE)[1].n_layers, grad_accum_steps(config.training, dims.dp)


def points(case: Case, sure: bool) -> list[Point]:
    """The numbers of layers and microbatches to count: two of each, or all there are, and a third of layers."""
    (layers, microbatches), step, parallelism = goal(case), _period(case), case.config.parallelism
    least = 2 * step if parallelism.pp > 1 else 2 * step + 1 + parallelism.prefetch_layers
    first = least + (layers - least) % step
    few = [first, first + step, first + 2 * step] if first + 2 * step < layers else [layers]
    batches = FEW_MICROBATCHES if microbatches > FEW_MICROBATCHES[-1] else (microbatches,)
    return [*itertools.product(few[:2], batches), *((n, batches[0]) for n in few[2:] if sure)]


def _period(case: Case) -> int:
    """After how many layers a model, its checkpointing and its pipeline repeat. As many as there are if they do not."""
    config, dims = case.config, ParallelDims.from_config(case.config.parallelism, case.world_size)
    spec, flavor = find_model(config.model, DEFAULT_VOCAB_SIZE)
    model = build_model(spec, flavor)
    if config.float8.enable:
        convert_to_float8(model, config.float8, dims.tp, dims.shards)
    containers = (module for module in model.modules() if isinstance(module, nn.ModuleDict | nn.ModuleList))
    layers = next((list(module.children()) for module in containers if len(module) == flavor.n_layers), [])
    kinds = [repr(layer) + str([tuple(weight.shape) for weight in layer.parameters()]) for layer in layers]
    period = next((n for n in range(1, len(kinds)) if kinds[n:] == kinds[:-n]), flavor.n_layers)
    checkpointing = config.activation_checkpoint
    stages = dims.pp * len(stages_of_rank(0, config.parallelism)) if dims.pp > 1 else 1
    return math.lcm(period, 1 if checkpointing.mode == "none" else checkpointing.every_n_layers) * stages


def extend(counts: dict[Point, DryRun], end: Point) -> DryRun | None:
    """The count at `end`, from those at `points`. None if the third one does not lie on the line of two."""
    layers, batches = (sorted({point[axis] for point in counts}) for axis in (0, 1))

    def at(n_layers: int, batch: int) -> DryRun:
        steps = (n_layers - layers[0]) // (layers[1] - layers[0]) if len(layers) > 1 else 0
        return _line(counts[layers[0], batch], counts[layers[min(1, steps)], batch], steps)

    if len(layers) > 2:
        expected, third = at(layers[2], batches[0]), counts[layers[2], batches[0]]
        if expected[:3] != third[:3] or not math.isclose(expected.peak, third.peak, rel_tol=1e-3):
            return None  # sent, flops, moved or held
    return _line(at(end[0], batches[0]), at(end[0], batches[-1]), end[1] - batches[0])


def _line(low: Any, high: Any, steps: int) -> Any:
    """The value `steps` steps from `low`, on the line through `high`, one step away. Lists meet at both ends."""
    if isinstance(low, dict):
        return {key: _line(low.get(key, 0), high.get(key, 0), steps) for key in low | high}
    if isinstance(low, DryRun):
        return DryRun(*(_line(a, b, steps) for a, b in zip(low, high, strict=True)))
    if isinstance(low, list):  # what more layers or microbatches add is in the middle of a part, or is the last part
        front = len(low) // 2 if isinstance(low[0], int) else max(0, 2 * len(low) - len(high))
        ends = high[:front] + high[len(high) - len(low) + front :]
        return [_line(a, b, steps) for a, b in zip(low, ends, strict=True)]
    return low + (high - low) * steps
