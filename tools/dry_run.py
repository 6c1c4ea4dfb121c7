"""One real step of train.py for any number of ranks, on one CPU: fake ranks, fake tensors, the same code.

Only what is outside a step is replaced: data, checkpoints, the other ranks, and the compiler's kernels. The model, its
sharding, its graphs, loss, clipping, optimizer and metrics are those of a run. Fake tensors have shapes but no memory,
and torch's fake backend answers every collective at once.
"""

import contextlib
import dataclasses
import math
import tempfile
import warnings
from pathlib import Path
from typing import Any, NamedTuple
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
from float8.convert import check_float8
from loss import loss_chunks
from models import find_model
from parallel.mesh import ParallelDims
from run import failures
from run.processes import LaunchEnvironment
from tools.plan_tally import Tally

DEFAULT_VOCAB_SIZE = 4096  # for a flavor that takes its tokenizer's: that of the default run


class DryRun(NamedTuple):
    """What one rank computed, moved, sent and held in a step: numbers, and collections of them.

    `memory` are the bytes held after each operation up to the optimizer's step, in lists that begin and end with each
    forward and backward; `updating` are the most from there on.
    """

    sent: dict[tuple[str, str], list[int]]  # (axis, kind) → number of collectives, bytes of the whole tensors
    flops: dict[str, int]  # type of the operands → operations of matmuls, also recomputed ones; "attention"
    moved: dict[str, int]  # "step", "update" → bytes that all else reads and writes, fused where compiled
    weights: int
    optimizer: int
    memory: list[list[int]]
    updating: int
    on_host: bool  # with `cpu_offload` weights and states are on the host, which runs the optimizer

    @property
    def peak(self) -> int:
        """Most bytes held on the device in a step that finds the optimizer's states allocated."""
        before = max(map(max, self.memory))
        return before - self.weights if self.on_host else max(before + self.optimizer, self.updating)


def check(config: Config, world_size: int) -> ParallelDims:
    """The layout. Raises ConfigError if train.py would refuse the run, wherever it is to run."""
    spec, flavor = find_model(config.model, DEFAULT_VOCAB_SIZE)
    dims = ParallelDims.from_config(config.parallelism, world_size)
    parallelism = dataclasses.replace(config.parallelism, async_tp=False)  # it needs a GPU
    spec.check_parallelism(flavor, dataclasses.replace(config, parallelism=parallelism))
    check_float8(config, here=False)
    loss_chunks(config)
    grad_accum_steps(config.training, dims.dp)
    return dims


def dry_run(config: Config, world_size: int, rank: int = 0, eager_loss: bool = False) -> DryRun:
    """Run one step of train.py as `rank` of `world_size`, and count. With `eager_loss` the loss is not compiled.

    It starts a process group of fake ranks, so call it once per process. Raises what a run with these settings raises,
    above all ConfigError.
    """
    dims = check(config, world_size)
    tally = Tally()
    weights = optimizer = 0
    before: list[list[int]] = []
    states: Any = {}

    def start_fake_ranks(*_: Any) -> torch.device:
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
        return torch.device("cpu")

    def begin_fake_tensors(model: nn.Module, *args: Any) -> None:
        nonlocal weights
        if not weights:
            modes.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
            modes.enter_context(tally.counting())
        init_weights(model, *args)
        weights = tally.live

    def begin_update(stepping: torch.optim.Optimizer, *_: Any) -> None:
        nonlocal before, states
        before, tally.memory, tally.part, states = tally.memory, [[tally.live]], "update", stepping.state
        before[-1] = [max(before[-1])]  # clipping, weight after weight, has no one place where layers are added

    def end_of_step(step: int) -> None:
        nonlocal optimizer
        kept = [x for state in states.values() for x in state.values() if isinstance(x, Tensor)]
        parts = (x.to_local() if isinstance(x, DTensor) else x for x in kept)
        optimizer = sum(x.untyped_storage().nbytes() for x in parts)

    def make_loss(compile: Compile, mesh: Any) -> Any:
        return build_loss(Compile() if eager_loss else compile, mesh)

    def attend(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, **kwargs: Any) -> Tensor:
        """A GPU's kernels get a mask in blocks, and leave out what it hides: about half, as if it were causal."""
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            return attention(q, k, v, **kwargs | {"is_causal": True})
        return attention(q, k, v, attn_mask, **kwargs)

    def zeros(config: Config, *_: Any, **__: Any) -> Any:
        """A stand-in for the data loader."""
        shape = config.training.local_batch_size, config.training.seq_len
        accumulation = grad_accum_steps(config.training, dims.dp)

        def next_step() -> list[Batch]:
            tally.begin_step()
            tokens, labels, positions = (torch.zeros(shape, dtype=torch.int64) for _ in range(3))
            return [Batch(tokens, labels, positions if config.data.mask_documents else None)] * accumulation

        words = min(config.model.vocab_size or DEFAULT_VOCAB_SIZE, DEFAULT_VOCAB_SIZE)
        tokens = accumulation * math.prod(shape) * dims.dp
        return mock.Mock(next_step=next_step, vocab_size=words, tokens_per_step=tokens, tokens_seen=0, wait_seconds=0.0)

    init_weights, build_loss, attention = train.init_weights, train.build_loss, F.scaled_dot_product_attention
    # DTensor propagates global shapes by fake tensors that no rank holds: not to be counted.
    propagate = _disable_current_modes()(ShardingPropagator._propagate_tensor_meta_non_cached)
    no_stop = contextlib.nullcontext(mock.Mock(agreed=lambda: False, asked_by=""))
    with (
        warnings.catch_warnings(),
        mock.patch.object(ShardingPropagator, "_propagate_tensor_meta_non_cached", propagate),
        mock.patch.dict(registry._COMPILER_FNS, aot_eager=tally.backend),
        mock.patch.object(F, "scaled_dot_product_attention", attend),
        mock.patch.object(dist, "new_group", return_value=None),
        mock.patch.object(failures, "from_rank_0", return_value=[]),  # no steps to skip
        # The stages of a pipeline vote on whether all know their shapes; ours do.
        mock.patch.object(PipelineStage, "_warmup_forward_vote", create=True),
        mock.patch.object(
            PipelineStage, "_warmup_backward_result", return_value=mock.Mock(item=lambda: 1), create=True
        ),
        tempfile.TemporaryDirectory() as folder,
        mock.patch.multiple(
            train,
            launch_environment=lambda: LaunchEnvironment(rank, 0, world_size),
            check_start=lambda *_: None,
            init_weights=begin_fake_tensors,
            build_loss=make_loss,
            DataLoader=zeros,
            CheckpointManager=lambda *_, **__: mock.Mock(load=lambda: 0),
        ),
        mock.patch.multiple(
            run.run,
            init_distributed=start_fake_ranks,
            from_rank_0=lambda start: (Path(folder), {}),  # a name, and no settings changed
            StopRequest=lambda *_: no_stop,
            Watchdog=lambda *_, **__: mock.MagicMock(enter=lambda *_: None),  # a hook may not return anything
        ),
        # Fake tensors have no values.
        mock.patch.object(metrics.MetricsLogger, "check_finite"),
        contextlib.ExitStack() as modes,
    ):
        warnings.simplefilter("ignore")
        register_optimizer_step_pre_hook(begin_update)
        train.train(_one_step(config, folder), after_step=end_of_step)
    on_host, flops, moved = config.parallelism.cpu_offload, dict(tally.flops), dict(tally.moved)
    return DryRun(tally.sent, flops, moved, weights, optimizer, before, max(map(max, tally.memory)), on_host)


def _one_step(config: Config, folder: str) -> Config:
    """`config` for one silent step that neither reads nor writes anything of the user's."""
    return dataclasses.replace(
        config,
        run=dataclasses.replace(config.run, folder="", outputs=folder),
        training=dataclasses.replace(config.training, steps=1),
        lr_scheduler=dataclasses.replace(config.lr_scheduler, warmup_steps=0),  # one step has no room for it
        compile=dataclasses.replace(config.compile, backend="aot_eager"),  # where the tally's is
        parallelism=dataclasses.replace(config.parallelism, async_tp=False),  # it needs the GPU's compiler
        checkpoint=dataclasses.replace(config.checkpoint, enable=False),
        validation=dataclasses.replace(config.validation, enable=False, sample_tokens=0),
        profiling=Profiling(),
        failures=Failures(),  # fake tensors have no values to judge
        metrics=Metrics(log_ranks=(), tensorboard=False),
    )
