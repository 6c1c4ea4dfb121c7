"""One start of a run: its processes, folder, signals, watchdog, profiler, garbage collection and timeouts."""

import contextlib
import gc
import logging
import os
import shlex
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from checkpoint.loading import locate
from checkpoint.manifest import step_of
from config import Config, ConfigError, TitaniteError, value_text
from data.loader import Batch, DataLoader
from parallel.mesh import ParallelDims
from parallel.pipeline import Compute
from parallel.ranks import Ranks
from run.exits import AGAIN, EXPLAINED, MISTAKE, SHUTDOWN, shutdown_seconds
from run.failures import RolledBackError
from run.folder import note_start, record_config, resume_command, start_run
from run.processes import (
    LaunchEnvironment,
    from_rank_0,
    init_distributed,
    launch_environment,
    set_timeout,
    shut_down,
)
from run.profiling import profile
from run.stop import StopRequest
from run.watchdog import End, Watchdog
from storage import OutageError

logger = logging.getLogger(__name__)

GC_INTERVAL_STEPS = 50  # between two collections of garbage, on all ranks together
SPEAKER_TIMEOUT_SECONDS = 20  # for ranks to wait until they are ended, while local rank 0 says what is wrong


def run_and_leave(main: Callable[[], object]) -> NoReturn:
    """Run a rank's program and end the process. A mistake of the user is explained in one line, with exit code 2.

    Skips Python's normal exit, which sometimes aborts in a thread of gloo, or waits for ranks that are in a collective.
    """
    code: Any = 0
    try:
        main()
    except RolledBackError:
        dist.barrier()  # all have recorded why, before torchrun ends the others
        code = AGAIN
    except TitaniteError as error:
        code = _explain(error)
    except SystemExit as ended:
        code = ended.code
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
    except BaseException:
        traceback.print_exc()
        code = 1
    for stream in (sys.stdout, sys.stderr):
        if stream:  # None: closed from the start
            with contextlib.suppress(OSError):  # a closed pipe must not change the exit code
                stream.flush()
    os._exit(code or 0)


def _explain(error: TitaniteError) -> int:
    """Print what is wrong, and see to it that torchrun does not repeat what would fail again. Returns the exit code."""
    environment = launch_environment()
    running = dist.is_initialized()
    where = f" (rank {environment.rank})" if running and not error.agreed else ""
    if environment.local_rank > 0 and not where:
        # Local rank 0 prints the same. If this rank left first, torchrun would end it before that.
        time.sleep(SPEAKER_TIMEOUT_SECONDS)
    print(f"error{where}: {error}", file=sys.stderr, flush=True)
    if isinstance(error, OutageError):
        return 1
    recurs = not running or isinstance(error, ConfigError)
    may_restart = environment.restarts < environment.max_restarts
    explained = os.environ.get(EXPLAINED)
    if explained and (recurs or not may_restart):
        with contextlib.suppress(OSError):  # gone with a launcher that was killed
            Path(explained).touch()
    if recurs and may_restart and environment.local_rank == 0:
        os.kill(os.getppid(), signal.SIGQUIT)  # so that torchrun ends without a restart
    return MISTAKE


@dataclass
class TrainingRun:
    """Everything about one start except the training step. The loop calls `begin` and `end` once a step.

    `check` gets the folder on rank 0, before anything is written there, and returns the run's id. Raises TitaniteError.
    """

    config: Config
    environment: LaunchEnvironment
    dims: ParallelDims
    data: DataLoader
    identity: dict[str, Any]
    check: Callable[[Path], str]

    def __post_init__(self) -> None:
        config = self.config
        environment = self.environment
        self.starting = True  # until all is compiled and connected, by a first step
        self._computed = False  # whether this step was, or is one that a resume leaves out
        self._ranks = Ranks()  # this one alone, until the checkpoints' group exists
        self._contexts = contextlib.ExitStack()
        torch.manual_seed(config.run.seed)
        if config.run.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS needs it to be deterministic
        torch.use_deterministic_algorithms(config.run.deterministic)
        self._owns_group = not dist.is_initialized()
        self.device = init_distributed(environment, config.comm)
        self.data.check_ranks()
        self.mesh = self.dims.build_mesh(self.device.type)
        begin = partial(start_run, config, self.identity, environment, self.check, self.data.tokenizer.save)
        self.folder, self.this_start, changed = from_rank_0(begin)
        for key, (old, new) in changed.items():
            logger.info(f"resume: {key} was {value_text(old)}, is now {value_text(new)}")
        logger.info(f"run folder {self.folder}  {environment.world_size} x {self.device.type}  {self.dims}")
        self.stop = self._contexts.enter_context(StopRequest(self.folder, environment, self._announce_late))
        self.asked_to_stop = self.stop.agreed
        if environment.local_rank == 0:
            note_start(self.folder)  # before any rank can write exit.json: to build the watchdog all ranks meet
        self.watchdog = Watchdog(self.folder, environment, config, self.this_start.id)
        self._contexts.push(self.watchdog.explain)

    def __enter__(self) -> "TrainingRun":
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: TracebackType | None) -> None:
        gc.enable()
        self._contexts.__exit__(kind, error, trace)
        if self._owns_group and error is None:  # after an error other ranks may wait in a collective
            shut_down()

    def _announce_late(self) -> None:
        """Record a request to stop for which torchrun will not wait, before it kills this rank."""
        stop = self.stop
        late = f"the step takes longer than the {shutdown_seconds():g} s for which torchrun waits ({SHUTDOWN})"
        end = End("stopped", f"stopped by {stop.asked_by}, but {late}", None, stop.asks_again)
        self.watchdog.announce(self.watchdog.find_lost(0) or end)
        logger.warning(f"{end.cause}: what came after checkpoint {self.watchdog.last_checkpoint} is lost")

    def start_steps(self, step: int, ranks: Ranks) -> None:
        """Say that the loop begins after `step`. From here on a request to stop is answered after a step.

        `ranks` are those of the checkpoints, whose group has a timeout of its own.
        """
        config = self.config
        rank = self.environment.rank
        self._ranks = ranks
        self.watchdog.step = step
        self.watchdog.trains = True
        self.watchdog.last_checkpoint = step or None
        if rank == 0:
            record_config(self.folder, config)
        if self.dims.is_first_copy(rank):
            self.data.open_ledger(self.folder, self.this_start.id)
        self.stop.start(config.comm.init_timeout_seconds)
        self._trace = self._contexts.enter_context(profile(config.profiling, self.folder / "profile", rank, step))
        if config.compile.enable:
            file = shlex.quote(str(self.folder / "stop"))
            logger.info(f"the first step compiles, which may take minutes; to stop: touch {file}, or Ctrl-C twice")
        gc.disable()  # a collection on one rank stalls all the others, so all collect at the same steps

    def saved(self, step: int) -> None:
        """Note the checkpoint of a step, in any thread."""
        self.watchdog.last_checkpoint = step

    def forward_backward(self, compute: Compute, microbatches: Sequence[Batch], n_tokens: Tensor) -> list[Tensor]:
        """The losses of all microbatches of a step of `n_tokens`, after forward and backward."""
        self._computed = bool(microbatches)
        losses = []
        for number, batch in enumerate(microbatches, start=1):
            with self.watchdog.section("forward/backward"):
                losses.append(compute.forward_backward(*batch, n_tokens, number == len(microbatches)))
        return losses

    def begin(self, step: int) -> None:
        """Begin a step."""
        with self.watchdog.section("profile"):  # writes a trace, after its last step
            self._trace()
        self.watchdog.enter("training", step)

    def end(self, step: int) -> None:
        """End a step. Collective."""
        if self.starting and self._computed:
            self._end_start(self.config.comm.train_timeout_seconds)
        if step % GC_INTERVAL_STEPS == 0:
            gc.collect()

    def _end_start(self, timeout_seconds: int) -> None:
        """After the first computed step: shorter timeouts, less garbage to collect."""
        self.starting = False
        gc.collect()
        gc.freeze()  # all long-lived objects exist: later collections leave them out
        with self.watchdog.section("start"):
            dist.barrier()  # the shorter limit must not run while a rank still compiles
        set_timeout(timeout_seconds, apart=self._ranks.group)
        self.watchdog.limit_seconds = timeout_seconds

    def end_steps(self, step: int) -> None:
        """Say that the loop has ended after `step`."""
        self.watchdog.enter("end", step)
        self._trace()

    def close(self, step: int, summary: str, decay_start: int = 0) -> None:
        """Record that the run ended as it should, and say what to do with it.

        `decay_start`: the step after which the rate falls, to train on from before it.
        Exits with AGAIN if only other nodes were asked to stop.
        """
        steps = self.config.training.steps
        self._contexts.close()
        end = End("finished", "done", start_again=False)
        if step < steps:
            end = End("stopped", f"stopped by {self.stop.asked_by or 'another rank'}", None, self.stop.again)
        if self.environment.local_rank == 0:  # each node may have a disk of its own
            self.watchdog.announce(end)
        logger.info(f"{end.cause}: step {step} of {steps}, run folder {self.folder}")
        if step == steps:
            self._say_what_next(summary, decay_start)
        else:
            logger.info(f"  go on:       {self._resume}")
        dist.barrier()  # when a rank leaves with AGAIN, torchrun ends the others: let rank 0 record the end first
        if self.stop.elsewhere and step < steps:
            sys.exit(AGAIN)  # torchrun starts us again, with the nodes that remain

    @property
    def _resume(self) -> str:
        return resume_command(self.folder, self.environment.local_world_size)

    def _find_trunk(self, decay_start: int) -> int:
        """The step of the last checkpoint up to `decay_start`; 0 without one."""
        found = []
        if decay_start:
            with contextlib.suppress(TitaniteError):  # the run is done, whatever its store says now
                found = [step_of(name) for _, name in locate(self.folder)]
        return max([step for step in found if step <= decay_start], default=0)

    def _say_what_next(self, summary: str, decay_start: int) -> None:
        training = self.config.training
        more = f"steps={2 * training.steps}"
        if training.epochs:
            more = f"epochs={2 * training.epochs:g}"
        ask = f"--prompt {shlex.quote(self.config.validation.sample_prompt or 'Once')}"
        if self.data.is_chat:
            ask = "--chat"
        python = shlex.quote(os.path.relpath(sys.executable))
        folder = shlex.quote(str(self.folder))
        if summary:
            logger.info(f"  {summary}")
        logger.info(f"  curves:      {python} -m tools.compare {folder}")
        if self.config.checkpoint.enable:
            logger.info(f"  write text:  {python} generate.py {folder} {ask}")
            trunk = self._find_trunk(decay_start)
            train_on = resume_command(self.folder, self.environment.local_world_size, trunk)
            logger.info(f"  train on:    {train_on} --training.{more}")
