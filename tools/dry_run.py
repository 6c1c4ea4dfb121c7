"""One real step of train.py for any number of ranks, on one CPU: fake ranks, fake tensors, the same code.

Only what is outside a step is replaced: data, checkpoints, the other ranks. The model, its sharding and compilation,
loss, clipping, optimizer and metrics are those of a run. Fake tensors have shapes but no memory, and torch's fake
backend answers every collective at once. A dispatch mode counts the bytes that are sent and held.
"""

import contextlib
import dataclasses
import math
import tempfile
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

import metrics
import run.run
import train
from config import Config, Failures, Metrics, Profiling
from data.loader import Batch
from data.place import grad_accum_steps
from float8.convert import check_float8
from models import ModelSpec
from parallel.context import ring_attention, ring_attention_backward
from run import failures
from run.processes import LaunchEnvironment
from tools.plan_costs import DEFAULT_VOCAB_SIZE, Traffic

# Operator → (kind, which argument is the whole tensor, whose bytes count; -1: the result).
COLLECTIVES = {
    "_allgather_base_": ("all_gather", 0),
    "_reduce_scatter_base_": ("reduce_scatter", 1),
    "allreduce_": ("all_reduce", 0),
    "alltoall_base_": ("all_to_all", 1),
    "send": ("send", 0),
    "all_gather_into_tensor": ("all_gather", -1),
    "reduce_scatter_tensor": ("reduce_scatter", 0),
    "all_reduce": ("all_reduce", 0),
    "all_to_all_single": ("all_to_all", 0),
}
MATMULS = {"mm": 0, "bmm": 0, "addmm": 1, "_scaled_mm": 0}  # operator → the argument whose last dim is summed over
# Operator → the function that it runs.
RING = {
    torch.ops.titanite.ring_attention.default: ring_attention._init_fn,
    torch.ops.titanite.ring_attention_backward.default: ring_attention_backward._init_fn,
}


class DryRun(NamedTuple):
    """What one rank held and sent in a step, in bytes; without the weights and states on the host by `cpu_offload`."""

    traffic: list[Traffic]
    matmul_flops: int  # of all matmuls, also recomputed ones, without attention
    weights: int
    optimizer: int
    peak: int  # of a step that finds the optimizer's states allocated


class Tally(TorchDispatchMode):
    """Counts the bytes of every collective by axis, the bytes of all storages made since it began, and matmuls.

    It is an `infra` mode: torch.compile refuses to run under others.
    """

    supports_higher_order_operators = True

    @classmethod
    def is_infra_mode(cls) -> bool:
        return True

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[tuple[str, str]] = Counter()
        self.bytes: Counter[tuple[str, str]] = Counter()
        self.sizes: dict[int, int] = {}
        self.live = self.peak = self.flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # a DTensor, say: its inner tensors come next
        name = func.name().partition("::")[2].partition(".")[0]
        if func in RING:
            with self:  # one operator, inside which sends and memory must be counted
                result = RING[func](*args)
        else:
            result = func(*args, **(kwargs or {}))
        if name in COLLECTIVES and func.namespace in ("c10d", "_c10d_functional"):
            self._count_collective(name, args, result)
        if name in MATMULS:
            self.flops += 2 * result.numel() * args[MATMULS[name]].shape[-1]
        for x in tree_leaves(result):
            if isinstance(x, Tensor):
                self.count(x)
        return result

    def _count_collective(self, name: str, args: tuple[Any, ...], result: Any) -> None:
        kind, place = COLLECTIVES[name]
        tensors = tree_leaves(result if place < 0 else args[place])
        key = _axis_of(args), kind
        self.calls[key] += 1
        self.bytes[key] += sum(x.numel() * x.element_size() for x in tensors)

    def count(self, x: Tensor) -> None:
        """Count the memory of a tensor until it is freed."""
        if hasattr(x, "__tensor_flatten__"):
            for inner in (getattr(x, name) for name in x.__tensor_flatten__()[0]):
                if isinstance(inner, Tensor):
                    self.count(inner)
            return
        storage = x.untyped_storage()
        key = storage._cdata
        if key not in self.sizes:
            self.sizes[key] = 0
            weakref.finalize(storage, self._free, key)
        self._resize(key, storage.nbytes())

    def _resize(self, key: int, size: int) -> None:
        self.live += size - self.sizes[key]
        self.sizes[key] = size
        self.peak = max(self.peak, self.live)

    def _free(self, key: int) -> None:
        self.live -= self.sizes.pop(key)

    def begin_step(self) -> None:
        """Forget the collectives and matmuls before the step."""
        self.flops = 0
        self.calls.clear()
        self.bytes.clear()

    def traffic(self) -> list[Traffic]:
        """What was counted."""
        return [Traffic(*key, self.calls[key], self.bytes[key]) for key in sorted(self.calls)]

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        """Count inside, also resizes of storages, by which FSDP2 frees and regains gathered weights: no operators."""
        resize = torch.UntypedStorage.resize_

        def counted_resize(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            if storage._cdata in self.sizes:
                self._resize(storage._cdata, size)
            return result

        with mock.patch.object(torch.UntypedStorage, "resize_", counted_resize), self:
            yield


def dry_run(config: Config, world_size: int, rank: int = 0) -> DryRun:
    """Run one step of train.py as `rank` of `world_size`, and count.

    It starts a process group of fake ranks, so call it once per process. Raises what a run with these settings raises,
    above all ConfigError. If the config compiles, each block becomes one graph, but no kernels.
    """
    tally = Tally()
    weights = optimizer = early = before = others = 0

    def start_fake_ranks(*_: Any) -> torch.device:
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
        return torch.device("cpu")

    def begin_fake_tensors(model: nn.Module, *args: Any) -> None:
        nonlocal weights
        if not tally.live:
            modes.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        init_weights(model, *args)
        for parameter in model.parameters():
            tally.count(parameter.data)
        weights = tally.live

    def begin_count(*args: Any) -> Any:
        modes.enter_context(tally.counting())
        built = build_optimizer(*args)
        built.register_step_pre_hook(remember_peak)
        return built

    def no_checkpoints(*_: Any, **__: Any) -> Any:
        nonlocal early
        early = tally.live - weights  # optimizer state that already exists, such as an outer one's
        return _no_checkpoints()

    def remember_peak(stepping: torch.optim.Optimizer, *_: Any) -> None:
        nonlocal before, others
        before = tally.peak
        parameters = [p for group in stepping.param_groups for p in group["params"]]
        others = tally.live - weights - early - _storage_bytes([p.grad for p in parameters])  # pipeline buffers, say

    def end_of_step(step: int) -> None:
        nonlocal optimizer
        optimizer = tally.live - weights - others  # gradients are freed by now

    def check(
        _: Config, environment: LaunchEnvironment, data: Any, spec: ModelSpec, flavor: Any, identity: Any
    ) -> None:
        """Refuse what this model cannot be split into. The rest is for a run of all steps, where the GPU is."""
        parallelism = dataclasses.replace(config.parallelism, async_tp=False)
        spec.check_parallelism(flavor, dataclasses.replace(config, parallelism=parallelism))
        check_float8(config, here=False)

    init_weights, build_optimizer = train.init_weights, train.build_optimizer
    # DTensor propagates global shapes by fake tensors that no rank holds: not to be counted.
    propagate = _disable_current_modes()(ShardingPropagator._propagate_tensor_meta_non_cached)
    vote = mock.Mock(item=lambda: 1)
    with (
        warnings.catch_warnings(),
        mock.patch.object(ShardingPropagator, "_propagate_tensor_meta_non_cached", propagate),
        mock.patch.object(dist, "new_group", return_value=None),
        mock.patch.object(failures, "from_rank_0", return_value=[]),  # no steps to skip
        # The stages of a pipeline vote on whether all know their shapes; ours do.
        mock.patch.object(PipelineStage, "_warmup_forward_vote", create=True),
        mock.patch.object(PipelineStage, "_warmup_backward_result", return_value=vote, create=True),
        tempfile.TemporaryDirectory() as folder,
        mock.patch.multiple(
            train,
            launch_environment=lambda: LaunchEnvironment(rank, 0, world_size),
            check_start=check,
            init_weights=begin_fake_tensors,
            build_optimizer=begin_count,
            DataLoader=partial(_zeros, tally.begin_step),
            CheckpointManager=no_checkpoints,
        ),
        mock.patch.multiple(
            run.run,
            init_distributed=start_fake_ranks,
            from_rank_0=lambda start: (Path(folder), {}),  # a name, and no settings changed
            StopRequest=_no_stop,
            Watchdog=mock.MagicMock(),
        ),
        # Zeros for the figures of each step: fake tensors have no values.
        mock.patch.object(metrics, "fetch_finite", lambda waiting: [[0.0] * len(x) for x in waiting.values()]),
        contextlib.ExitStack() as modes,
    ):
        warnings.simplefilter("ignore")
        train.train(_one_step(config, Path(folder)), after_step=end_of_step)
    if config.parallelism.cpu_offload:  # the host holds weights and states, and runs the optimizer
        return DryRun(tally.traffic(), tally.flops, 0, 0, before - weights - early)
    return DryRun(tally.traffic(), tally.flops, weights, optimizer, max(before + optimizer - early, tally.peak))


def _storage_bytes(tensors: list[Any]) -> int:
    """Bytes of the rank's parts of `tensors`, which may share memory."""
    storages = [(x.to_local() if isinstance(x, DTensor) else x).untyped_storage() for x in tensors if x is not None]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


def _one_step(config: Config, folder: Path) -> Config:
    """`config` for one silent step that neither reads nor writes anything of the user's."""
    return dataclasses.replace(
        config,
        run=dataclasses.replace(config.run, folder="", outputs=str(folder)),
        training=dataclasses.replace(config.training, steps=1),
        lr_scheduler=dataclasses.replace(config.lr_scheduler, warmup_steps=0),  # one step has no room for it
        # inductor's kernels would touch memory, which fake tensors lack
        compile=dataclasses.replace(config.compile, backend="aot_eager"),
        parallelism=dataclasses.replace(config.parallelism, async_tp=False),  # it needs the GPU's compiler
        checkpoint=dataclasses.replace(config.checkpoint, enable=False),
        validation=dataclasses.replace(config.validation, enable=False, sample_tokens=0),
        profiling=Profiling(),
        failures=Failures(),  # fake tensors have no values to judge
        metrics=Metrics(log_ranks=(), tensorboard=False),
    )


def _axis_of(args: tuple[Any, ...]) -> str:
    """The mesh axis of the group among a collective's arguments; "world" if it has all ranks."""
    boxed = [argument for argument in args if isinstance(argument, torch.ScriptObject)]  # the group, then an operation
    group = dist.ProcessGroup.unbox(boxed[0]) if boxed else dist.distributed_c10d._resolve_process_group(args[-1])
    return group.group_desc.removeprefix("mesh_") if group.group_desc.startswith("mesh_") else "world"


def _zeros(before_step: Callable[[], None], config: Config, dp_rank: int, dp: int, **_: Any) -> Any:
    """A stand-in for the data loader that returns zeros."""
    shape = config.training.local_batch_size, config.training.seq_len
    accumulation = grad_accum_steps(config.training, dp)

    def next_step() -> list[Batch]:
        before_step()
        tokens, labels, positions = (torch.zeros(shape, dtype=torch.int64) for _ in range(3))
        batch = Batch(tokens, labels, positions if config.data.mask_documents else None)
        return [batch] * accumulation

    vocab_size = min(config.model.vocab_size or DEFAULT_VOCAB_SIZE, DEFAULT_VOCAB_SIZE)
    tokens = accumulation * math.prod(shape) * dp
    facts = {"vocab_size": vocab_size, "tokens_per_step": tokens, "tokens_seen": 0, "wait_seconds": 0.0}
    return mock.Mock(next_step=next_step, **facts)


def _no_checkpoints(*_: Any, **__: Any) -> Any:
    """A stand-in for CheckpointManager that finds no checkpoint and does nothing."""
    return mock.Mock(load=lambda: 0)


def _no_stop(*_: Any) -> Any:
    """A stand-in for StopRequest that is never asked to stop."""
    return contextlib.nullcontext(mock.Mock(agreed=lambda: False, asked_by=""))
