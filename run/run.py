"""One start of a run: its processes, folder, signals, watchdog, profiler, garbage collection and timeouts."""

import contextlib
import functools
import gc
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from config import Config, ConfigError, TitaniteError
from data.loader import Batch, DataLoader
from parallel.device import bfloat16_is_slow
from parallel.mesh import ParallelDims
from parallel.pipeline import Step
from profiling import profile
from run.exits import AGAIN, SPEAKER_TIMEOUT_SECONDS
from run.failures import RolledBackError, Stragglers, check_replay
from run.folder import CrashLoopError, record_config, record_progress, start_run
from run.processes import (
    LaunchEnvironment,
    end_launcher,
    from_rank_0,
    init_distributed,
    set_timeout,
    shut_down,
)
from run.stop import StopRequest
from run.watchdog import Watchdog
from storage import OutageError

P = ParamSpec("P")
T = TypeVar("T")

logger = logging.getLogger(__name__)

ForwardBackward = Callable[[list[Batch], Tensor], list[Tensor]]  # (microbatches, tokens of the step) → their losses


def leave_no_process_group(train: Callable[P, T]) -> Callable[P, T]:
    """Let `train` end the process group that it began, once its tensors are gone, so that it can be called again.

    After an exception the group stays: other ranks may wait in a collective.
    """

    @functools.wraps(train)
    def train_and_leave(*args: P.args, **options: P.kwargs) -> T:
        begins = not dist.is_initialized()
        result = train(*args, **options)
        if begins:
            shut_down()
        return result

    return train_and_leave


@contextlib.contextmanager
def explained(environment: LaunchEnvironment) -> Iterator[None]:
    """Print an error that ends the run in one line, and end this rank with its exit code."""
    try:
        yield
    except RolledBackError:
        dist.barrier()  # all have recorded why, before torchrun ends the others
        os._exit(AGAIN)
    except TitaniteError as error:
        running = dist.is_initialized()
        if environment.local_rank > 0 and (error.agreed or not running):
            # Local rank 0 prints the same. If we left first, torchrun would end it before that.
            time.sleep(SPEAKER_TIMEOUT_SECONDS)
        where = f" (rank {environment.rank})" if running and not error.agreed else ""
        print(f"error{where}: {error}", file=sys.stderr, flush=True)
        is_outage = isinstance(error, OutageError)  # of a store: a restart may help
        would_recur = (not running or isinstance(error, (ConfigError, CrashLoopError))) and not is_outage
        if environment.local_rank == 0 and environment.restarts_left and would_recur:
            end_launcher()
        os._exit(1 if is_outage else 2)  # a normal exit would wait for ranks that are still in a collective


class Run:
    """What a start has beside the training itself. The loop calls `begin` and `end` once a step.

    As a context it starts the process group, chooses and records the run's folder, and explains the exception that ends
    the run. `checks` get the folder on rank 0, before anything is written there. Raises TitaniteError if the ranks or
    the folder do not fit.
    """

    def __init__(
        self,
        config: Config,
        environment: LaunchEnvironment,
        dims: ParallelDims,
        data: DataLoader,
        identity: dict[str, Any],
        checks: Sequence[Callable[[Path], None]],
    ):
        self.config, self.environment, self.dims, self.data = config, environment, dims, data
        self.identity, self.checks = identity, checks
        self.starting = True  # until this start has computed a step: everything is compiled and connected then
        self._computed = False
        self._contexts = contextlib.ExitStack()

    def __enter__(self) -> "Run":
        config, environment = self.config, self.environment
        torch.manual_seed(config.run.seed)
        if config.run.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS needs it to be deterministic
        torch.use_deterministic_algorithms(config.run.deterministic)
        self.device = init_distributed(environment, config.comm)
        self.data.check_ranks()
        self.mesh = self.dims.build_mesh(self.device.type)
        job, save = environment.job, self.data.tokenizer.save
        start = partial(start_run, config, self.identity, environment.world_size, job, self.checks, save)
        self.folder, changed = from_rank_0(start)
        for key, (old, new) in changed.items():
            logger.info(f"resume: {key} was {old!r}, is now {new!r}")
        logger.info(f"run folder {self.folder}  {environment.world_size} x {self.device.type}  {self.dims}")
        if config.training.param_dtype == "bfloat16" and bfloat16_is_slow(self.device):
            logger.info('bfloat16 is very slow on this CPU: training.param_dtype = "float32" is faster')
        self.watchdog = self._contexts.enter_context(Watchdog(self.folder, environment, config))
        self.stragglers: Stragglers | None = None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        gc.enable()
        self._contexts.__exit__(kind, error, trace)

    def start_steps(self, step: int, checkpoint_group: dist.ProcessGroup | None) -> None:
        """Say that the loop begins after `step`. From here on a request to stop is answered after a step."""
        config, rank = self.config, self.environment.rank
        self.watchdog.resumed(step)
        if rank == 0:
            record_config(self.folder, config)
        if self.dims.is_first_copy(rank):
            self.data.open_ledger(self.folder)
        if config.failures.straggler_interval:
            self.stragglers = Stragglers(self.device, config.comm.init_timeout_seconds)
        self.checkpoint_group = checkpoint_group
        self._contexts.pop_all()  # the watchdog, which must explain an error before the request to stop sees it
        timeout_seconds = config.comm.init_timeout_seconds
        self.stop = self._contexts.enter_context(StopRequest(self.folder, self.environment, timeout_seconds))
        self._contexts.enter_context(self.watchdog)
        self._trace = self._contexts.enter_context(profile(config.profiling, self.folder / "profile", rank, step))
        gc.disable()  # a collection on one rank stalls all the others, so all collect at the same steps

    def saved(self, step: int) -> None:
        """Note the checkpoint of a step, in any thread."""
        self.watchdog.last_checkpoint = step
        if self.environment.rank == 0:
            record_progress(self.folder)

    def enter_update(self, *_: Any) -> None:
        """Note that the optimizer begins: a hook of its step."""
        self.watchdog.enter("optimizer")

    def asked_to_stop(self) -> bool:
        """Whether the run is to end after this step; the same on all ranks. Collective."""
        return self.stop.agreed()

    def watch(self, compute: Step, parameters: Sequence[Tensor]) -> ForwardBackward:
        """The forward and backward of all microbatches of a step; now and then twice, to compare (failures.replay)."""

        def forward_backward(microbatches: list[Batch], n_tokens: Tensor) -> list[Tensor]:
            losses = []
            for i, batch in enumerate(microbatches):
                self.watchdog.enter("forward/backward")
                self._computed = True
                losses.append(compute.forward_backward(*batch, n_tokens, i == len(microbatches) - 1))
            return losses

        def replayed(microbatches: list[Batch], n_tokens: Tensor) -> list[Tensor]:
            losses = forward_backward(microbatches, n_tokens)
            if microbatches and self.watchdog.step % self.config.failures.replay_interval == 0:
                again = partial(forward_backward, microbatches, n_tokens)
                check_replay(self.watchdog.step, parameters, losses, again)
            return losses

        return replayed if self.config.failures.replay_interval else forward_backward

    def begin(self, step: int) -> None:
        """Begin a step."""
        self._trace(step)
        self.watchdog.enter("data", step)

    def end(self, step: int) -> None:
        """End a step. Collective."""
        failures, training, comm = self.config.failures, self.config.training, self.config.comm
        if self.stragglers and step % failures.straggler_interval == 0:
            self.stragglers.check(step, self.data.wait_seconds)
        if self.starting and self._computed:
            self.starting = False
            gc.collect()
            gc.freeze()  # all long-lived objects exist: later collections leave them out
            self.watchdog.enter("start")
            dist.barrier()  # the shorter limit must not run while a rank still compiles
            set_timeout(comm.train_timeout_seconds, apart=self.checkpoint_group)  # which has its own limit
            self.watchdog.limit_seconds = comm.train_timeout_seconds
        if step % training.gc_interval == 0:
            gc.collect()

    def end_steps(self, step: int) -> None:
        """Say that the loop has ended after `step`."""
        self._trace(step + 1)
        self.watchdog.enter("end", step)
        if step < self.config.training.steps:
            logger.info(f"stopped after step {step}: {self.stop.asked_by or 'another rank was asked'}")

    def close(self, step: int) -> None:
        """Record that the run ended as it should. Exits with AGAIN if only other nodes were asked to stop."""
        steps = self.config.training.steps
        self._contexts.close()
        self.watchdog.close(step, steps, self.stop.asked_by)
        logger.info(f"done: step {step} of {steps}, run folder {self.folder}")
        if step < steps:
            dist.barrier()  # when a rank leaves with 75, torchrun ends the others: let rank 0 record the end first
            if self.stop.elsewhere:
                sys.exit(AGAIN)  # torchrun starts us again, with the nodes that remain
