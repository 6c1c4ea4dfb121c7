"""Counts of a real step of train.py for any number of ranks, on one CPU: fake ranks, fake tensors, the same code.

Only what is outside a step is replaced: data, checkpoints, the other ranks, and the compiler's kernels. The model, its
sharding, its graphs, loss, clipping, optimizer and metrics are those of a run. Fake tensors have shapes but no memory,
and torch's fake backend answers every collective at once.

Few layers stand for all, since they repeat. What a step computes, moves and sends is a straight line in their number,
and so is what it holds at any place, seen from the beginning or the end of a forward or backward. Two counts give the
line. A third has to lie on it, or all layers are counted. Likewise two and three microbatches stand for many.
"""

import contextlib
import gc
import itertools
import math
import multiprocessing
import os
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.backends import registry
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import _disable_current_modes

import metrics
import run.run
import train
from config import Compile, Config, Failures, Metrics, Profiling
from data.ledger import grad_accum_steps
from data.loader import Batch
from float8.convert import check_float8, convert_to_float8
from loss import loss_chunks
from models import build_model, find_model
from parallel.mesh import ParallelDims
from parallel.pipeline import stages_of_rank
from run import failures
from run.processes import LaunchEnvironment
from tools.plan_tally import Matmul, Tally

DEFAULT_VOCAB_SIZE = 4096  # for a flavor that takes its tokenizer's: that of the default run
FEW_MICROBATCHES = (2, 3)  # the first, the last, and one between
Point = tuple[int, int]  # layers, microbatches of a step


class Case(NamedTuple):
    """A run, as a rank of one pipeline stage has it. `eager_loss`: the loss is not compiled, even if the blocks are."""

    config: Config
    world_size: int
    stage: int = 0
    eager_loss: bool = False

    @property
    def dims(self) -> ParallelDims:
        """The layout."""
        return ParallelDims.from_config(self.config.parallelism, self.world_size)

    @property
    def goal(self) -> Point:
        """Layers and microbatches of the run itself."""
        layers = find_model(self.config.model, DEFAULT_VOCAB_SIZE)[1].n_layers
        return layers, grad_accum_steps(self.config.training, self.dims.dp)


class DryRun(NamedTuple):
    """What one rank computed, moved, sent and held in a step: numbers, and collections of them.

    `memory` are the bytes held after each operation up to the optimizer's step, in lists that begin and end with each
    forward and backward; `updating` are the most from there on.
    """

    sent: dict[tuple[str, str], list[int]]  # (axis, kind) → number of collectives, bytes of the whole tensors
    matmuls: dict[Matmul, int]  # how many of each, also recomputed ones
    attention: int  # operations
    moved: dict[str, int]  # "step", "update" → bytes that all else reads and writes, fused where compiled
    weights: int
    optimizer: int
    memory: list[list[int]]
    updating: int
    on_host: bool  # with `cpu_offload` weights and states are on the host, which runs the optimizer

    @property
    def flops(self) -> dict[str, int]:
        """Type of the operands → operations of matmuls; "attention"."""
        found = {"attention": self.attention}
        for matmul, calls in self.matmuls.items():
            found[matmul.kind] = found.get(matmul.kind, 0) + calls * matmul.flops
        return found

    @property
    def peak(self) -> int:
        """Most bytes held on the device in a step that finds the optimizer's states allocated."""
        before = max(map(max, self.memory))
        return before - self.weights if self.on_host else max(before + self.optimizer, self.updating)


def check(config: Config, world_size: int) -> None:
    """Raise ConfigError if train.py would refuse the run, wherever it is to run."""
    spec, flavor = find_model(config.model, DEFAULT_VOCAB_SIZE)
    loss_chunks(config)
    check_float8(config, here=False)
    _ = Case(config, world_size).goal  # the layout and the batch
    spec.check_parallelism(flavor, config)


def dry_run(case: Case, point: Point) -> DryRun:
    """Run one step of train.py with the layers and microbatches of `point`, as a rank of the case's stage, and count.

    It starts a process group of fake ranks, so call it once per process. Raises what a run with these settings raises,
    above all ConfigError.
    """
    gc.freeze()  # otherwise a collection walks through, and so copies, all objects of the parent
    torch._logging.set_logs(dynamo=50)
    torch.compiler.reset()  # otherwise sizes that the parent compiled for are dynamic here
    check(case.config, case.world_size)
    n_layers, microbatches = point
    step = CountedStep(microbatches)
    with (
        warnings.catch_warnings(),
        tempfile.TemporaryDirectory() as folder,
        _replaced(_stand_ins_of_torch(step.tally)),
        _replaced(_stand_ins_of_the_run(case, step, folder)),
        step.modes,
    ):
        warnings.simplefilter("ignore")
        register_optimizer_step_pre_hook(step.begin_update)
        train.train(_one_step(case, n_layers, microbatches, folder), after_step=step.end)
    tally = step.tally
    return DryRun(
        tally.sent,
        dict(tally.matmuls),
        tally.attention,
        dict(tally.moved),
        step.weights,
        step.optimizer,
        step.before,
        updating=max(map(max, tally.memory)),
        on_host=case.config.parallelism.cpu_offload,
    )


class CountedStep:
    """A step of train.py under a tally. The loop calls its methods where a part of the step begins or ends."""

    def __init__(self, microbatches: int):
        self.microbatches = microbatches
        self.tally = Tally()
        self.modes = contextlib.ExitStack()  # fake tensors and the tally, once there is a model
        self.weights = 0  # bytes
        self.optimizer = 0  # bytes
        self.before: list[list[int]] = []  # the tally's memory up to the update
        self._states: Any = {}
        self._init_weights = train.init_weights

    def init_weights(self, model: nn.Module, *args: Any) -> None:
        """In place of `train.init_weights`: from here on tensors are fake, and counted."""
        if not self.weights:
            self.modes.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
            self.modes.enter_context(self.tally.counting())
        self._init_weights(model, *args)
        self.weights = self.tally.live

    def load_zeros(self, config: Config, *_: Any, **__: Any) -> Any:
        """In place of `DataLoader`: one whose batches are zeros."""
        shape = config.training.local_batch_size, config.training.seq_len

        def next_step() -> list[Batch]:
            self.tally.begin_step()
            tokens, labels, positions = (torch.zeros(shape, dtype=torch.int64) for _ in range(3))
            batch = Batch(tokens, labels, positions if config.data.mask_documents else None)
            return [batch] * self.microbatches

        return mock.Mock(
            next_step=next_step,
            settle=lambda config: config,
            vocab_size=min(config.model.vocab_size or DEFAULT_VOCAB_SIZE, DEFAULT_VOCAB_SIZE),
            tokens_per_step=config.training.global_batch_size * config.training.seq_len,
            tokens_seen=0,
            wait_seconds=0.0,
        )

    def begin_update(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """What is counted from here on belongs to the optimizer."""
        self.before = self.tally.memory
        # Clipping, weight after weight, has no one place where layers are added.
        self.before[-1] = [max(self.before[-1])]
        self.tally.memory = [[self.tally.live]]
        self.tally.part = "update"
        self._states = optimizer.state

    def end(self, step: int) -> None:
        """Measure the optimizer's states."""
        for state in self._states.values():
            for x in state.values():
                if isinstance(x, Tensor):
                    own = x.to_local() if isinstance(x, DTensor) else x
                    self.optimizer += own.untyped_storage().nbytes()


StandIn = tuple[Any, str, Any]  # whose attribute, its name, what takes its place


@contextlib.contextmanager
def _replaced(stand_ins: Sequence[StandIn]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for owner, name, stand_in in stand_ins:
            # Of PipelineStage those that only some versions of torch have.
            stack.enter_context(mock.patch.object(owner, name, stand_in, create=owner is PipelineStage))
        yield


def _stand_ins_of_torch(tally: Tally) -> list[StandIn]:
    """What torch does with other ranks, with values, and with a GPU's kernels."""
    attention = F.scaled_dot_product_attention
    # DTensor propagates global shapes by fake tensors that no rank holds: not to be counted.
    propagate = _disable_current_modes()(ShardingPropagator._propagate_tensor_meta_non_cached)
    vote = mock.Mock(item=lambda: 1)  # of the stages of a pipeline, on whether all know their shapes; ours do

    def attend(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, **kwargs: Any) -> Tensor:
        """A GPU's kernels get a mask in blocks, and leave out what it hides: about half, as if it were causal."""
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            return attention(q, k, v, **kwargs | {"is_causal": True})
        return attention(q, k, v, attn_mask, **kwargs)

    return [
        (ShardingPropagator, "_propagate_tensor_meta_non_cached", propagate),
        (registry, "_COMPILER_FNS", {**registry._COMPILER_FNS, "aot_eager": tally.backend}),
        (F, "scaled_dot_product_attention", attend),
        (dist, "new_group", mock.Mock(return_value=None)),  # gloo's and the watchdog's, which nothing here uses
        (PipelineStage, "_warmup_forward_vote", mock.Mock()),
        (PipelineStage, "_warmup_backward_result", mock.Mock(return_value=vote)),
    ]


def _stand_ins_of_the_run(case: Case, step: CountedStep, folder: str) -> list[StandIn]:
    """What a run does outside its steps: its start, data and checkpoints, and what it asks of other ranks."""
    rank = case.stage * case.world_size // case.dims.pp
    build_loss = train.build_loss
    no_stop = contextlib.nullcontext(mock.Mock(agreed=lambda: False, asked_by=""))

    def start_fake_ranks(*_: Any) -> torch.device:
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=case.world_size)
        return torch.device("cpu")

    def build_eager_loss(_: Compile, *rest: Any) -> Any:
        return build_loss(Compile(), *rest)

    return [
        (train, "launch_environment", lambda: LaunchEnvironment(rank, 0, case.world_size)),
        (train, "check_start", lambda *_: None),  # it asks for data and a device; `check` has done the rest
        (train, "init_weights", step.init_weights),
        (train, "build_loss", build_eager_loss if case.eager_loss else build_loss),
        (train, "DataLoader", step.load_zeros),
        (train, "CheckpointManager", lambda *_, **__: mock.Mock(load=lambda: 0)),
        (run.run, "init_distributed", start_fake_ranks),
        (run.run, "from_rank_0", lambda _: (Path(folder), mock.Mock(), {})),  # a start, and no settings changed
        (run.run, "StopRequest", lambda *_: no_stop),
        # A hook of the watchdog may not return anything.
        (run.run, "Watchdog", lambda *_, **__: mock.MagicMock(enter=lambda *_, **__: None)),
        (failures, "from_rank_0", lambda _: []),  # no steps to skip
        (metrics.MetricsLogger, "check_finite", mock.MagicMock()),  # fake tensors have no values
    ]


def _one_step(case: Case, n_layers: int, microbatches: int, folder: str) -> Config:
    """The case's config for one silent step of this size that neither reads nor writes anything of the user's."""
    config = case.config
    sequences = microbatches * config.training.local_batch_size * case.dims.dp
    asked = config.training.param_dtype
    dtype: Literal["bfloat16", "float32"] = "bfloat16" if asked == "auto" else asked  # which would ask this machine
    return replace(
        config,
        run=replace(config.run, folder="", outputs=folder),
        model=replace(config.model, n_layers=n_layers),
        training=replace(config.training, steps=1, global_batch_size=sequences, param_dtype=dtype),
        lr_scheduler=replace(config.lr_scheduler, warmup_steps=0),  # one step has no room for it
        compile=replace(config.compile, backend="aot_eager"),  # where the tally's is
        checkpoint=replace(config.checkpoint, enable=False),
        validation=replace(config.validation, enable=False, sample_tokens=0),
        profiling=Profiling(),
        failures=Failures(),  # fake tensors have no values to judge
        metrics=Metrics(log_ranks=(), tensorboard=False),
    )


def run_all(jobs: Sequence[tuple[Case, Point]]) -> dict[tuple[Case, Point], DryRun]:
    """Dry runs in parallel, each in a process of its own: forked, since imports take longer than small runs."""
    jobs = list(dict.fromkeys(jobs))
    with multiprocessing.get_context("fork").Pool(len(os.sched_getaffinity(0)), maxtasksperchild=1) as pool:
        return dict(zip(jobs, pool.starmap(dry_run, jobs, chunksize=1), strict=True))


def count(cases: Sequence[Case], sure: bool = True) -> list[DryRun]:
    """What each case counts in a step; if not `sure`, without the third count.

    Raises what a run with these settings raises, above all ConfigError.
    """
    asked = [(case, points(case, sure)) for case in cases]
    found = run_all([(case, point) for case, some in asked for point in some])
    lines = [extend({point: found[case, point] for point in some}, case.goal) for case, some in asked]
    found |= run_all([(case, case.goal) for case, line in zip(cases, lines, strict=True) if line is None])
    return [line or found[case, case.goal] for case, line in zip(cases, lines, strict=True)]


def points(case: Case, sure: bool) -> list[Point]:
    """The numbers of layers and microbatches to count: two of each, or all there are, and a third of layers."""
    layers, microbatches = case.goal
    step = _period(case)
    parallelism = case.config.parallelism
    least = 2 * step if parallelism.pp > 1 else 2 * step + 1
    first = least + (layers - least) % step
    few = [first, first + step, first + 2 * step] if first + 2 * step < layers else [layers]
    batches = FEW_MICROBATCHES if microbatches > FEW_MICROBATCHES[-1] else (microbatches,)
    found = list(itertools.product(few[:2], batches))
    if sure and len(few) > 2:
        found.append((few[2], batches[0]))
    return found


def _period(case: Case) -> int:
    """After how many layers a model, its checkpointing and its pipeline repeat. As many as there are if they do not."""
    config = case.config
    dims = case.dims
    spec, flavor = find_model(config.model, DEFAULT_VOCAB_SIZE)
    model = build_model(spec, flavor)
    if config.float8.enable:
        convert_to_float8(model, config.float8, dims.tp, dims.shards)
    period = _period_of_layers(model, flavor.n_layers)
    stages = dims.pp * len(stages_of_rank(0, config.parallelism)) if dims.pp > 1 else 1
    checkpointing = config.activation_checkpoint
    if checkpointing.mode != "none":
        period = math.lcm(period, checkpointing.every_n_layers)
    return period * stages


def _period_of_layers(model: nn.Module, n_layers: int) -> int:
    """After how many layers of a model the same come again."""
    kinds = []
    for module in model.modules():
        if isinstance(module, nn.ModuleDict | nn.ModuleList) and len(module) == n_layers:
            for layer in module.children():
                shapes = [tuple(weight.shape) for weight in layer.parameters()]
                kinds.append(f"{layer} {shapes}")
            break
    for period in range(1, len(kinds)):
        if kinds[period:] == kinds[:-period]:
            return period
    return n_layers


def extend(counts: dict[Point, DryRun], end: Point) -> DryRun | None:
    """The count at `end`, from those at `points`. None if the third one does not lie on the line of two."""
    layers, batches = (sorted({point[axis] for point in counts}) for axis in (0, 1))

    def at(n_layers: int, batch: int) -> DryRun:
        steps = (n_layers - layers[0]) // (layers[1] - layers[0]) if len(layers) > 1 else 0
        return _line(counts[layers[0], batch], counts[layers[min(1, steps)], batch], steps)

    if len(layers) > 2:
        expected, third = at(layers[2], batches[0]), counts[layers[2], batches[0]]
        if expected[:4] != third[:4] or not math.isclose(expected.peak, third.peak, rel_tol=1e-3):
            return None  # sent, matmuls, attention, moved or held
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
