"""Where each rank is, how it notices that it hangs, and what it says about the end of the run.

A thread on every rank ends it when its main thread stays in one place for too long, or when a rank on the same machine
is gone, so that torchrun starts the job again. It judges no other rank. A rank that waits in a collective for ranks on
other machines is ended by the collective's own timeout.
"""

import contextlib
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
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from config import PATIENCE, Config, TitaniteError
from parallel.device import device_type
from run.exits import AGAIN
from run.failures import RolledBackError
from run.folder import record_exit, resume_command
from run.processes import LaunchEnvironment, process_state
from run.stop import StopAtOnce
from storage import OutageError

T = TypeVar("T")

POLL_SECONDS = 1.0  # between two looks of the thread
SAYING_SECONDS = 10.0  # most time to report a hang before a rank ends
LOST_SECONDS = 3.0  # for a rank that lost a connection to look for the rank it lost
OVERDUE = 1.2  # times a collective's timeout: NCCL has then not ended it, see run.processes.init_distributed
CHECKPOINTING = ("checkpoint", "load", "end")  # sections that may last checkpoint.timeout_seconds
# Sections that queue kernels on an accelerator: when its queue is full, the host waits for other ranks anywhere.
QUEUEING = ("training", "forward/backward", "optimizer", "validation", "sample")


class End(NamedTuple):
    """How a start ends."""

    kind: str
    cause: str
    rank: int | None = None  # that is to blame, if one is
    start_again: bool = True  # by a scheduler


class Watchdog:
    """Knows where this rank is, and says why the run ends. Ends nothing without torchrun. Collective to build."""

    def __init__(self, folder: Path, environment: LaunchEnvironment, config: Config, start_id: str = ""):
        self.folder = folder
        self.environment = environment
        self.config = config
        self.start_id = start_id
        self.step = 0
        self.trains = False  # whether the loop has begun
        self.current = "start"  # the innermost section
        self.left_by_error = ""  # the innermost section that an exception has just left
        self.last_checkpoint: int | None = None  # that this start has read or committed
        self.limit_seconds: float = config.comm.init_timeout_seconds
        self._entered = time.monotonic()
        self._main = threading.get_ident()
        pids: list[Any] = [None] * environment.world_size
        dist.all_gather_object(pids, os.getpid())
        first = environment.rank - environment.local_rank
        self._pids = {rank: pids[rank] for rank in range(first, first + environment.local_world_size)}
        self._closed = threading.Event()
        if environment.job:
            threading.Thread(target=self._run, name="watchdog", daemon=True).start()

    # ------------------------------------------------------------ where this rank is

    def enter(self, section: str, step: int) -> None:
        """Say that this rank goes on, outside of any other section, in `section` of a step."""
        self.step = step
        self._go_to(section)

    @contextlib.contextmanager
    def section(self, name: str) -> Iterator[None]:
        """What this rank does inside: data, forward/backward, optimizer, validation, sample, load or checkpoint.

        Sections nest. Afterwards this rank is again where it was before, and its time there starts again.
        """
        outer = self.current
        self._go_to(name)
        try:
            yield
            self.left_by_error = ""
        except BaseException:
            self.left_by_error = self.left_by_error or name
            raise
        finally:
            self.current = outer
            self._entered = time.monotonic()

    def _go_to(self, section: str) -> None:
        self.current = section
        self.left_by_error = ""
        self._entered = time.monotonic()

    def alive(self) -> None:
        """Say that something has moved: on the main thread anything, on another one bytes of a checkpoint.

        Those count only where the main thread waits for them: beside training they are no progress of its own.
        """
        if self.current in CHECKPOINTING or threading.get_ident() == self._main:
            self._entered = time.monotonic()

    def follow(self, items: Iterable[T]) -> Iterator[T]:
        """Yield `items`; each one is progress."""
        for item in items:
            self.alive()
            yield item

    # ------------------------------------------------------------ why the run ends

    def explain(self, kind: Any, error: BaseException | None, trace: TracebackType | None) -> None:
        """Announce the exception that ends the run, as the exit of a context."""
        self._closed.set()
        if error is not None:
            self.announce(self._end_by(error, trace))

    def _end_by(self, error: BaseException, trace: TracebackType | None) -> End:
        """How an exception ends this start."""
        rank = self.environment.rank
        if isinstance(error, RolledBackError):
            return End("rolled back", str(error))
        if isinstance(error, TitaniteError):
            return End("error", str(error), None if error.agreed else rank, isinstance(error, OutageError))
        if isinstance(error, StopAtOnce):
            when = "at once" if self.step else "before any step"
            # torchrun also asks when it has lost a rank.
            return self.find_lost(0) or End("stopped", f"stopped by {error.asked_by}, {when}", None, error.again)
        first_line = str(error).partition("\n")[0]
        of_device = isinstance(error, (torch.AcceleratorError, torch.OutOfMemoryError))
        if of_device and "out of memory" in first_line:  # even in a collective: no other rank is to blame
            less = "a smaller training.local_batch_size or an activation_checkpoint.mode needs less: tools.plan"
            return End("failed", f"{first_line}; {less}", rank, start_again=False)
        in_collective = isinstance(error, RuntimeError) and _in_collective(traceback.extract_tb(trace)[-10:])
        lost = self.find_lost(LOST_SECONDS) if of_device or in_collective else None
        if lost:
            return lost
        if in_collective and (isinstance(error, dist.DistError) or "gloo" in first_line):  # others only compute there
            return End("lost", f"a rank on another machine was lost or hangs: {first_line}")
        cause = f"{type(error).__name__}: {first_line}".removesuffix(": ")
        return End("failed", cause, rank, start_again=of_device)  # a device may work again, or another one may

    def announce(self, end: End) -> None:
        """Record why this start ends, and print it if nothing else does.

        Does nothing if a rank of this machine has recorded a cause: the first who writes knows best.
        """
        if not self.folder.is_dir():  # a person has removed it
            return
        orderly = end.kind in ("finished", "stopped")
        action = f"go on with {resume_command(self.folder, self.environment.local_world_size)}"
        if end.kind == "finished":
            action = "none"
        elif self.environment.restarts < self.environment.max_restarts and not orderly:
            action = "torchrun starts the job again"
        where = {
            "section": self.left_by_error or self.current,
            "step": self.step,
            "last_checkpoint": self.last_checkpoint,
            "next_action": action,
        }
        is_refused = end.kind == "error" and not (self.trains or end.start_again)
        is_first = record_exit(self.folder, end._asdict() | where, self.start_id, is_refused)
        if is_first and end.kind != "error" and not orderly:  # run_and_leave prints errors
            blamed = "" if end.rank is None else f"rank {end.rank}, "
            saved = (
                "no checkpoint yet" if self.last_checkpoint is None else f"last checkpoint step {self.last_checkpoint}"
            )
            place = f"{blamed}{where['section']} of step {self.step}"
            print(f"exit: {end.cause} ({place}); {saved}; next: {action}", file=sys.stderr, flush=True)

    def find_lost(self, seconds: float) -> End | None:
        """The end by a rank on this machine that does not run, found within `seconds`; None if all do."""
        deadline = time.monotonic() + seconds
        while True:
            found = self._find_lost(or_stopped=True)
            if found or time.monotonic() >= deadline:
                return found
            time.sleep(0.05)

    def _find_lost(self, or_stopped: bool) -> End | None:
        """The end by a rank on this machine that has ended or, if asked, was stopped.

        Kills one that was, since it would not notice the end of the job.
        """
        for rank, pid in self._pids.items():
            state, _ = process_state(pid)
            if state in ("", "Z"):  # nothing there, or a zombie
                return End("lost", f"rank {rank} was lost (killed, crashed, or out of memory)", rank)
            if state == "T" and or_stopped:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                return End("hung", f"hung: rank {rank} does not run, it was stopped", rank)
        return None

    # ------------------------------------------------------------ the thread

    def _limit(self) -> float:
        return self.config.checkpoint.timeout_seconds if self.current in CHECKPOINTING else self.limit_seconds

    def _run(self) -> None:
        while not self._closed.wait(min(POLL_SECONDS, self._limit() / 10)):
            end = self._look(time.monotonic() - self._entered)
            # A rank that ends as it should is gone only after the main thread of every other has closed this.
            if end and not self._closed.is_set():
                threading.Timer(SAYING_SECONDS, os._exit, [AGAIN]).start()  # the run's folder may be what hangs
                self.announce(end)
                os._exit(AGAIN)

    def _look(self, idle_seconds: float) -> End | None:
        """Why this rank must end, whose main thread has been in one place for `idle_seconds`; None: it goes on.

        Ranks that are gone are looked for at once: this main thread may wait for one in a kernel or a driver, where no
        exception and no signal reaches it. A rank that is stopped may be a person's debugging, so it has time.
        """
        limit = self._limit()
        found = self._find_lost(or_stopped=idle_seconds > PATIENCE * self.limit_seconds)
        if found or idle_seconds <= PATIENCE * limit:
            return found
        rank = self.environment.rank
        stack = _stack_of(self._main)
        calls = [f"{'/'.join(Path(frame.filename).parts[-2:])}:{frame.lineno} {frame.name}" for frame in stack]
        where = " > ".join(calls)
        waits = _in_collective(stack)
        overdue = waits and idle_seconds > OVERDUE * limit
        if device_type() != "cpu" and (self.current in QUEUEING or overdue):
            return End("hung", f"hung: all ranks wait, perhaps for the network; the stack of rank {rank}: {where}")
        if waits:
            return None
        return End("hung", f"hung: rank {rank} ({socket.gethostname()}) is stuck; its stack: {where}", rank)


def _stack_of(thread: int) -> list[traceback.FrameSummary]:
    """The innermost frames of a thread, innermost last."""
    frames = traceback.walk_stack(sys._current_frames()[thread])
    return traceback.StackSummary.extract(frames, limit=10, lookup_lines=False)[::-1]


def _in_collective(frames: Iterable[traceback.FrameSummary]) -> bool:
    """Whether a stack is in torch's collectives, the vote of run.stop or the ring of parallel.context."""
    for frame in frames:
        file = frame.filename
        if "/torch/distributed/" in file and "/elastic/" not in file:
            return True
        if file.endswith(("run/stop.py", "parallel/context.py")):
            return True
    return False
