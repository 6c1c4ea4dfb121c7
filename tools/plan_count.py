"""Counts of a real step of train.py for any number of ranks, on one CPU: fake ranks, fake tensors, the same code.

Only what is outside a step is replaced: the run around it, data, checkpoints, the other ranks, and the compiler's
kernels. The model, its sharding, its graphs, loss, clipping and optimizer are those of a run. Fake tensors have shapes
but no memory, and torch's fake backend answers every collective at once.

The second of three microbatches and all further ones are alike, and so are layers: many follow from few.
"""

import contextlib
import gc
import multiprocessing
import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo import register_backend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import _disable_current_modes

import start
import train
import trainer
from config import Config
from data.ledger import build_phases
from data.loader import Batch
from float8.convert import check_float8
from loss import loss_chunks
from models import find_model
from parallel.mesh import ParallelDims
from parallel.pipeline import stages_of_rank
from run.processes import LaunchEnvironment
from tools.plan_tally import Matmul, Tally

DEFAULT_VOCAB_SIZE = 4096  # for a flavor that takes its tokenizer's: that of the default run
FEW_MICROBATCHES = 3  # the first, the last, and one that stands for all between them
FEW_LAYERS = (2, 3)  # of each stage


class Case(NamedTuple):
    """A run, as a rank of one pipeline stage has it."""

    config: Config
    world_size: int
    stage: int = 0

    @property
    def dims(self) -> ParallelDims:
        """The layout."""
        return ParallelDims.from_config(self.config.parallelism, self.world_size)

    @property
    def microbatches(self) -> int:
        """Microbatches of a step; of the last if the batch has a schedule."""
        return build_phases(self.config.training, self.dims.dp)[-1].shape.accumulation


class DryRun(NamedTuple):
    """What one rank computed, moved, sent and held in a step: numbers, and collections of them."""

    sent: dict[tuple[str, str], list[int]]  # (axis, kind) → number of collectives, bytes of the whole tensors
    matmuls: dict[Matmul, int]  # how many of each, also recomputed ones
    attention: int  # operations
    moved: dict[str, int]  # "step", "update" → bytes that all else reads and writes, fused where compiled
    weights: int
    optimizer: int
    peak: int  # most bytes held on the device in a step that finds the optimizer's states allocated

    @property
    def flops(self) -> dict[str, int]:
        """Type of the operands → operations of matmuls; "attention"."""
        found = {"attention": self.attention}
        for matmul, calls in self.matmuls.items():
            found[matmul.kind] = found.get(matmul.kind, 0) + calls * matmul.flops
        return found


def check(config: Config, world_size: int) -> None:
    """Raise ConfigError if train.py would refuse the run, wherever it is to run."""
    spec, flavor = find_model(config.model, DEFAULT_VOCAB_SIZE)
    loss_chunks(config)
    check_float8(config, here=False)
    _ = Case(config, world_size).microbatches  # the layout and the batch
    spec.check_parallelism(flavor, config)


def dry_run(case: Case, microbatches: int) -> DryRun:
    """`dry_runs` of one case."""
    [counted] = dry_runs([case], microbatches)
    return counted


def dry_runs(cases: Sequence[Case], microbatches: int, more: int = 0) -> list[DryRun]:
    """Run a step of train.py with `microbatches` for each case, as a rank of its stage, and count it.

    `more` microbatches, like the second, are added. The cases share what the first compiles, so they may only differ by
    their number of layers. It starts process groups of fake ranks, so call it once per process. Raises what a run with
    these settings raises, above all ConfigError.
    """
    gc.freeze()  # otherwise a collection walks through, and so copies, all objects of the parent
    torch._logging.set_logs(dynamo=50)
    torch.compiler.reset()  # otherwise sizes that the parent compiled for are dynamic here
    tally = Tally()
    register_backend(partial(tally.backend), name=BACKEND)
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    counts = []
    for case in cases:
        step = CountedStep(case, microbatches, tally, fake)
        _train_one_step(step)
        counts.append(step.result(more))
        dist.destroy_process_group()
        del step
        gc.collect()  # its model, before the next one is counted
    return counts


def _train_one_step(step: "CountedStep") -> None:
    case = step.case
    check(case.config, case.world_size)
    rank = case.stage * case.world_size // case.dims.pp
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=case.world_size)
    run = mock.MagicMock(
        device=torch.device("cpu"),
        mesh=case.dims.build_mesh("cpu"),
        config=step.config,
        folder=Path(),
        starting=False,
        asked_to_stop=lambda: False,
        forward_backward=step.forward_backward,
    )
    run.__enter__.return_value = run
    stand_ins = [
        *_stand_ins_of_torch(),
        (train, "launch_environment", lambda: LaunchEnvironment(rank, 0, case.world_size)),
        (start, "check_config", lambda *_: None),  # they ask for data and a device; `check` has done the rest
        (start, "check_opened", lambda *_: None),
        (start, "DataLoader", step.load_zeros),
        (train, "TrainingRun", lambda *_: run),
        (trainer, "init_weights", step.allocate),
        (train, "CheckpointManager", lambda *_, **__: mock.Mock(load=lambda: 0)),
        (train, "BadSteps", lambda *_: mock.Mock(skipped=())),
        (train, "MetricsLogger", mock.Mock()),
    ]
    update = register_optimizer_step_pre_hook(step.begin_update)
    with warnings.catch_warnings(), contextlib.ExitStack() as stack:
        stack.callback(update.remove)
        warnings.simplefilter("ignore")
        for owner, name, stand_in in stand_ins:
            # Of PipelineStage those that only some versions of torch have.
            stack.enter_context(mock.patch.object(owner, name, stand_in, create=owner is PipelineStage))
        stack.enter_context(step.modes)
        train.train(step.config, after_step=step.end)


BACKEND: Any = "tally"


class CountedStep:
    """A step of train.py under a tally. The loop calls its methods where a part of the step begins or ends."""

    def __init__(self, case: Case, microbatches: int, tally: Tally, fake: FakeTensorMode):
        self.case = case
        self.microbatches = microbatches
        self.config = _one_step(case, microbatches)
        self.tally = tally
        self.fake = fake
        self.modes = contextlib.ExitStack()  # fake tensors and the tally, once there is a model
        self.weights = 0  # bytes
        self.optimizer = 0  # bytes
        self.before = 0  # most bytes held up to the update
        self.amounts: list[Any] = []  # of the tally after each microbatch
        self._states: Any = {}

    def load_zeros(self, *_: Any, **__: Any) -> Any:
        """In place of `DataLoader`: one whose batches are zeros."""
        training = self.config.training
        return mock.Mock(
            next_step=self._next_step,
            settle=lambda config: config,
            seq_len=training.max_seq_len,
            vocab_size=min(self.config.model.vocab_size or DEFAULT_VOCAB_SIZE, DEFAULT_VOCAB_SIZE),
            tokens_per_step=training.global_batch_size * training.max_seq_len,
        )

    def _next_step(self) -> list[Batch]:
        self.tally.begin_step()
        shape = self.config.training.local_batch_size, self.config.training.max_seq_len
        tokens, labels, positions = (torch.zeros(shape, dtype=torch.int64) for _ in range(3))
        batch = Batch(tokens, labels, positions if self.config.data.mask_documents else None)
        return [batch] * self.microbatches

    def allocate(self, model: nn.Module, device: torch.device, *_: Any) -> None:
        """In place of `init_weights`: weights without values. From here on tensors are fake, and counted."""
        if not self.weights:
            self.modes.enter_context(self.fake)
            self.modes.enter_context(self.tally.counting())
        model.to_empty(device=device)
        self.weights = self.tally.live

    def forward_backward(self, compute: Any, batches: list[Batch], n_tokens: Tensor) -> list[Tensor]:
        """As TrainingRun's, without its watchdog."""
        losses = []
        for i, batch in enumerate(batches):
            losses.append(compute.forward_backward(*batch, n_tokens, i == len(batches) - 1))
            self.amounts.append(self.tally.amounts())
        return losses

    def begin_update(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """What is counted from here on belongs to the optimizer."""
        self.before = self.tally.peak
        self.tally.part = "update"
        self._states = optimizer.state

    def end(self, step: int) -> None:
        """Measure the optimizer's states."""
        for state in self._states.values():
            for x in state.values():
                if isinstance(x, Tensor):
                    own = x.to_local() if isinstance(x, DTensor) else x
                    self.optimizer += own.untyped_storage().nbytes()

    def result(self, more: int) -> DryRun:
        """The counts, with `more` microbatches like the second.

        With `cpu_offload` weights and states are on the host, which runs the optimizer.
        """
        tally = self.tally
        peak = max(self.before + self.optimizer, tally.peak)
        if self.config.parallelism.cpu_offload:
            peak = self.before - self.weights
        amounts = tally.amounts()
        if more:
            first, second, *_ = self.amounts
            amounts = _extend(amounts, first, second, more)
        return DryRun(*amounts, self.weights, self.optimizer, peak)


def _stand_ins_of_torch() -> list[tuple[Any, str, Any]]:
    """What torch does with other ranks, with values, and with a GPU's kernels: owner, attribute, what replaces it."""
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
        (F, "scaled_dot_product_attention", attend),
        (PipelineStage, "_warmup_forward_vote", mock.Mock()),
        (PipelineStage, "_warmup_backward_result", mock.Mock(return_value=vote)),
    ]


def _one_step(case: Case, microbatches: int) -> Config:
    """The case's config for one step of this size, silent, compiled by the tally, that asks nothing of this machine."""
    config = case.config
    training = config.training
    dtype: Literal["bfloat16", "float32"] = "bfloat16" if training.param_dtype == "auto" else training.param_dtype
    sequences = microbatches * training.local_batch_size * case.dims.dp
    return replace(
        config,
        training=replace(training, steps=1, global_batch_size=sequences, param_dtype=dtype),
        compile=replace(config.compile, backend=BACKEND),
        metrics=replace(config.metrics, log_ranks=()),
        validation=replace(config.validation, enable=False, sample_tokens=0),
    )


def count(cases: Sequence[Case], report: Callable[[], object] = lambda: None) -> dict[Case, DryRun]:
    """What each case counts in a step; calls `report` whenever one is there.

    Layers of a deep model are counted twice and three times per stage, and from there on as a line, on which they lie.
    Only Muon's exchange lies near one, since ranks share whole matrices. Dry runs run in parallel, the two of a case in
    one process, forked, since imports take longer than small runs. Raises what a run with these settings raises, above
    all ConfigError.
    """
    found = {}
    jobs = list(dict.fromkeys(cases))
    with multiprocessing.get_context("fork").Pool(len(os.sched_getaffinity(0)), maxtasksperchild=1) as pool:
        for case, counted in zip(jobs, pool.imap(_count_one, jobs), strict=True):
            found[case] = counted
            report()
    return found


def _count_one(case: Case) -> DryRun:
    """What a case counts, in a process of its own."""
    short = _with_few_layers(case)
    microbatches = min(case.microbatches, FEW_MICROBATCHES)
    counts = dry_runs(short, microbatches, case.microbatches - microbatches)
    numbers = [n_layers(each.config) for each in (*short, case)]
    steps = (numbers[-1] - numbers[-2]) // max(numbers[-2] - numbers[0], 1)
    return _with_windows(DryRun(*_extend(counts[-1], counts[0], counts[-1], steps)), case.config)


def _with_windows(counted: DryRun, config: Config) -> DryRun:
    """The counts with the pairs of a query and a key that the layers' windows leave of all causal ones."""
    flavor = find_model(config.model, DEFAULT_VOCAB_SIZE)[1]
    if not getattr(flavor, "windows", ()):  # also a model of another family than Llama's
        return counted
    S = config.training.max_seq_len
    windows = [min(flavor.window(layer) or S, S) for layer in range(flavor.n_layers)]
    seen = sum(window * (2 * S - window + 1) for window in windows)
    return counted._replace(attention=counted.attention * seen // (len(windows) * S * (S + 1)))


def n_layers(config: Config) -> int:
    """Layers of the run's model."""
    return find_model(config.model, DEFAULT_VOCAB_SIZE)[1].n_layers


def _with_few_layers(case: Case) -> list[Case]:
    """The case with layers for two and for three of each stage; itself if they are not shared out evenly."""
    config = case.config
    stages = config.parallelism.pp * len(stages_of_rank(0, config.parallelism))
    unit = stages * config.activation_checkpoint.every_n_layers
    if n_layers(config) % unit or n_layers(config) <= FEW_LAYERS[-1] * unit:
        return [case]
    shorter = [replace(config, model=replace(config.model, n_layers=times * unit)) for times in FEW_LAYERS]
    return [case._replace(config=few) for few in shorter]


def _extend(start: Any, low: Any, high: Any, steps: int) -> Any:
    """Numbers, `steps` steps further from `start`, each as large as that from `low` to `high`. 0 is any of zeros."""
    if isinstance(start, dict):
        return {key: _extend(value, low.get(key, 0), high.get(key, 0), steps) for key, value in start.items()}
    if isinstance(start, list | tuple):
        zeros = [0] * len(start)
        return [_extend(*each, steps) for each in zip(start, low or zeros, high or zeros, strict=True)]
    return start + (high - low) * steps
