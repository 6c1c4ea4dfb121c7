"""Where each rank is, how it notices that it hangs, and what it says about the end of the run.

A thread on every rank ends it when its main thread stays in one place for too long, so that torchrun starts the job
again. It judges nothing but its own rank and those on the same machine that do not run. A rank that waits for ranks on
other machines in a collective is ended by the collective's own timeout.
"""

import contextlib
import logging
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from config import PATIENCE, Config, TitaniteError
from parallel.device import device_type
from run.failures import RolledBackError
from run.folder import record_exit
from run.processes import AGAIN, LaunchEnvironment, process_state
from storage import OutageError

T = TypeVar("T")
logger = logging.getLogger(__name__)

SILENT_SECONDS = 60.0  # of the first step, until a line says what takes so long
SAYING_SECONDS = 10.0  # most time to report a hang before a rank ends
LOST_SECONDS = 3.0  # for a rank that lost a connection to look for the rank it lost
CHECKPOINTING = ("checkpoint", "load", "end")  # sections that may last checkpoint.timeout_seconds
# Sections that queue kernels on an accelerator: when its queue is full, the host waits for other ranks anywhere.
QUEUEING = ("forward/backward", "optimizer", "validation")


class Watchdog:
    """Knows where this rank is, and says why the run ends. Ends nothing without torchrun. Collective to build."""

    def __init__(self, folder: Path, environment: LaunchEnvironment, config: Config):
        self.folder, self.environment, self.config = folder, environment, config
        self.section, self.part, self.step = "start", "", 0
        self.silence = threading.Timer(SILENT_SECONDS, self._say_where)  # runs during the first step
        self.last_checkpoint: int | None = None  # that this start has read or committed
        self.limit_seconds: float = config.comm.init_timeout_seconds
        self._entered, self._main = time.monotonic(), threading.get_ident()
        pids: list[Any] = [None] * environment.world_size
        dist.all_gather_object(pids, os.getpid())
        first = environment.rank - environment.local_rank
        self._pids = dict(list(enumerate(pids))[first : first + environment.local_world_size])  # of this torchrun
        self._closed = threading.Event()
        if environment.job:
            threading.Thread(target=self._run, name="watchdog", daemon=True).start()

    # ------------------------------------------------------------ where this rank is

    def enter(self, section: str, step: int | None = None, part: str = "") -> None:
        """Say that this rank begins a section, such as data, forward/backward, optimizer, validation or checkpoint."""
        self.section, self.part, self.step = section, part, self.step if step is None else step
        self._entered = time.monotonic()

    def alive(self) -> None:
        """Say that checkpoint bytes have moved, in any thread, or that a weight got its initial values."""
        if self.section in (*CHECKPOINTING, "init"):
            self._entered = time.monotonic()

    def follow(self, items: Iterable[T], section: str) -> Iterator[T]:
        """Yield `items`; each one is progress in the section."""
        for item in items:
            self.enter(section)
            yield item

    def _say_where(self) -> None:
        where = f"{self.section}{self.part}{', and the first step compiles' if self.config.compile.enable else ''}"
        stop = f"to stop: touch {self.folder}/stop (after this step), or Ctrl-C until it ends (at once)"
        logger.info(f"step {self.step}: {SILENT_SECONDS:g} s so far, now in {where}; {stop}")

    # ------------------------------------------------------------ why the run ends

    def explain(self, kind: Any, error: BaseException | None, trace: TracebackType | None) -> None:
        """Announce the exception that ends the run, as the exit of a context."""
        self._closed.set()
        self.silence.cancel()
        if not isinstance(error, Exception):
            return
        rank: int | None = self.environment.rank
        what, cause = "failed", next(iter(str(error).splitlines()), type(error).__name__)
        if isinstance(error, TitaniteError):
            what, cause = "rolled back" if isinstance(error, RolledBackError) else "error", str(error)
            rank = None if error.agreed else rank
        elif isinstance(error, torch.OutOfMemoryError):  # even in a collective: no other rank is to blame
            cause += "; a smaller training.local_batch_size or an activation_checkpoint.mode needs less: tools.plan"
        elif isinstance(error, RuntimeError) and _in_collective(traceback.extract_tb(trace)[-10:]):
            if found := self.find_lost(LOST_SECONDS):
                what, cause, rank = found
            elif isinstance(error, dist.DistError) or "gloo" in cause:  # much of torch.distributed only computes
                what, cause, rank = "lost", f"a rank on another machine was lost or hangs: {cause}", None
        else:
            cause = f"{type(error).__name__}: {cause}"
        again = what in ("lost", "hung", "rolled back") or isinstance(error, OutageError)
        self.announce(what, cause, rank, again=again)

    def announce(self, kind: str, cause: str, rank: int | None = None, again: bool = True) -> None:
        """Record why this start ends, and print it if nothing else does; `again`: a scheduler should start the next."""
        if not self.folder.is_dir():  # nothing is written yet, or the folder is on another node
            return
        orderly, last = kind in ("finished", "stopped"), self.last_checkpoint
        action = "none" if kind == "finished" else f"start again with --run.folder={self.folder}"
        if self.environment.restarts < self.environment.max_restarts and not orderly:
            action = "torchrun starts the job again"
        record = {"kind": kind, "cause": cause, "rank": rank, "section": self.section, "step": self.step}
        repeated = 0 if kind == "finished" else self.step - (last or 0)
        record |= {"last_checkpoint": last, "steps_repeated": repeated, "next_action": action, "start_again": again}
        if record_exit(self.folder, record) and kind != "error" and not orderly:  # run_and_leave prints errors
            where = f"{'' if rank is None else f'rank {rank}, '}{self.section} of step {self.step}"
            saved = "no checkpoint yet" if last is None else f"last checkpoint step {last}"
            print(f"exit: {cause} ({where}); {saved}; next: {action}", file=sys.stderr, flush=True)

    def find_lost(self, seconds: float) -> tuple[str, str, int | None] | None:
        """Kind, cause and rank of what ended here: a rank on this machine that does not run, None if all do.

        Kills one that is only stopped, since it would not notice the end of the job.
        """
        deadline = time.monotonic() + seconds
        while True:
            for rank, pid in self._pids.items():
                state = process_state(pid)[0]
                if state == "T":
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                    return "hung", f"hung: rank {rank} does not run, it was stopped", rank
                if state in ("", "Z"):  # gone, a zombie
                    return "lost", f"rank {rank} was lost (killed, or out of memory)", rank
            if time.monotonic() >= deadline:
                return None
            time.sleep(0.05)

    # ------------------------------------------------------------ the thread

    def _limit(self) -> float:
        return self.config.checkpoint.timeout_seconds if self.section in CHECKPOINTING else self.limit_seconds

    def _run(self) -> None:
        while not self._closed.wait(min(1.0, self._limit() / 10)):
            idle_seconds = time.monotonic() - self._entered
            found = self.find_lost(0) if idle_seconds > PATIENCE * self.limit_seconds else None
            if not found and idle_seconds > PATIENCE * self._limit():
                stack, rank = _stack_of(self._main), self.environment.rank
                short = (f"{'/'.join(Path(frame.filename).parts[-2:])}:{frame.lineno} {frame.name}" for frame in stack)
                where = " > ".join(short)
                if device_type() != "cpu" and self.section in QUEUEING:
                    waits = f"all ranks wait, perhaps for the network; the stack of rank {rank}: {where}"
                    found = "hung", f"hung: {waits}", None
                elif not _in_collective(stack):
                    found = "hung", f"hung: rank {rank} ({socket.gethostname()}) is stuck; its stack: {where}", rank
            if found:
                threading.Timer(SAYING_SECONDS, os._exit, [AGAIN]).start()  # the run's folder may be what hangs
                self.announce(*found)
                os._exit(AGAIN)


def _stack_of(thread: int) -> list[traceback.FrameSummary]:
    """The innermost frames of a thread, innermost last."""
    frames = traceback.walk_stack(sys._current_frames()[thread])
    return traceback.StackSummary.extract(frames, limit=10, lookup_lines=False)[::-1]


def _in_collective(frames: Iterable[traceback.FrameSummary]) -> bool:
    """Whether a stack is in torch's collectives, the vote of run.stop or the ring of parallel.context."""
    files = [frame.filename for frame in frames]
    return any(
        ("/torch/distributed/" in file and "/elastic/" not in file)
        or file.endswith(("run/stop.py", "parallel/context.py"))
        for file in files
    )
