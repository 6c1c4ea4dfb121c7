"""Stopping between two steps, on all ranks after the same step."""

import logging
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from types import FrameType, MappingProxyType
from typing import Any

import torch
import torch.distributed as dist

from config import TitaniteError
from run.exits import SHUTDOWN, shutdown_seconds
from run.folder import STOP
from run.processes import LaunchEnvironment

logger = logging.getLogger(__name__)

# A signal → this rank's vote; the largest vote of all ranks counts. SIGTERM and SIGHUP take one node from the run. By
# SIGUSR1 a scheduler says that it ends the job and starts it again. SIGINT and the file `stop` come from a person.
A_NODE, A_JOB, A_PERSON = 1, 2, 3
LATE_SECONDS = 3.0  # before torchrun kills: time enough to write why
VOTES = MappingProxyType({"SIGTERM": A_NODE, "SIGHUP": A_NODE, "SIGUSR1": A_JOB, "SIGINT": A_PERSON})


class StopAtOnce(SystemExit):
    """Ends this rank at once. `again`: the scheduler should start the job again."""

    def __init__(self, signal_number: int, asked_by: str, again: bool):
        super().__init__(128 + signal_number)
        self.asked_by = asked_by
        self.again = again


class StopRequest:
    """A signal or a file `stop` in the run's folder, on which ranks agree. A second Ctrl-C raises StopAtOnce.

    Signals are caught inside `with`, except those ignored before, as SIGHUP is under nohup. Before `start` they raise
    StopAtOnce. Then each step casts a vote and reads that of the step before, on the host in a gloo group of its own:
    no rank waits for the device or for a slower rank. At the end `elsewhere` says that only other nodes were taken, so
    that the run should go on, and `again` that the scheduler should start the job again.

    `announce_late` is called in a thread of its own if a signal is not answered soon before torchrun kills this rank.
    """

    def __init__(
        self, run_folder: Path, environment: LaunchEnvironment, announce_late: Callable[[], None] = lambda: None
    ):
        self.file = run_folder / STOP
        self.environment = environment
        self.asked_by = ""
        self.elsewhere = False
        self.again = False
        self.vote = torch.zeros(1, dtype=torch.int32)
        self.group: dist.ProcessGroup | None = None
        self.under_way: dist.Work | None = None
        self.before: dict[signal.Signals, Any] = {}  # the handlers outside `with`
        self.late = threading.Timer(max(shutdown_seconds() - LATE_SECONDS, 0), announce_late)
        self.late.daemon = True
        self._votes_at: deque[float] = deque(maxlen=3)
        self._warns = bool(environment.job) and environment.rank == 0

    def start(self, timeout_seconds: int) -> None:
        """From here on a request to stop is answered after a step. Collective."""
        self.group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_seconds))

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        at_once = self.group is None or name == self.asked_by == "SIGINT"
        if VOTES[name] > self._vote():
            self.asked_by = name
        if not at_once and self.environment.job and not self.late.ident:
            self.late.start()
        if at_once:
            raise StopAtOnce(number, self.asked_by, self.asks_again)

    @property
    def asks_again(self) -> bool:
        """Whether the job is to be started again after what this rank was asked for."""
        return self._vote() < A_PERSON

    def _vote(self) -> int:
        return VOTES.get(self.asked_by, A_PERSON) if self.asked_by else 0

    def agreed(self) -> bool:
        """Whether any rank had been asked to stop by the previous call; the same on all ranks. Collective."""
        self._check_time()
        if self.under_way is not None:
            self.under_way.wait()
        stop = bool(self.vote.item())
        if self.environment.rank == 0 and self.file.exists():
            self.asked_by = str(self.file)
        self.vote.fill_(self._vote())
        self.under_way = dist.all_reduce(self.vote, dist.ReduceOp.MAX, group=self.group, async_op=True)
        return stop

    def _check_time(self) -> None:
        """Warn once if a request would have been answered too late. Two steps later one is, after a save that was due.

        The time of the first steps, in which blocks compile, does not count: there is nothing to lose.
        """
        self._votes_at.append(time.monotonic())
        if not self._warns or len(self._votes_at) < 3:
            return
        needed = self._votes_at[2] - self._votes_at[0]
        allowed = shutdown_seconds()
        if needed > allowed:
            self._warns = False
            logger.warning(
                f"two steps, and what was due at them, took {needed:.0f} s. A request to stop may take as long, and "
                f"torchrun kills ranks after {allowed:g} s: set {SHUTDOWN}={2 * needed:.0f} before the start"
            )

    def __enter__(self) -> "StopRequest":
        for name in VOTES:
            number = signal.Signals[name]
            if signal.getsignal(number) != signal.SIG_IGN:
                self.before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        """Restore the signals, set `elsewhere` and `again`, and remove the obeyed `stop` file."""
        self.late.cancel()
        if isinstance(error, Exception) and not isinstance(error, TitaniteError) and self.asked_by == "SIGTERM":
            # When a rank has failed, torchrun ends the others by SIGTERM, and their collectives fail in turn. Only the
            # first failure should be seen: a second traceback would bury it.
            os._exit(128 + signal.SIGTERM)
        if error is None and self.under_way is not None:
            self.under_way.wait()
            vote = self.vote.item()
            self.elsewhere = vote == A_NODE and not self.asked_by
            self.again = vote in (A_NODE, A_JOB)
            if self.environment.rank == 0:
                with suppress(OSError):  # the next start also tries
                    self.file.unlink(missing_ok=True)
        for number, handler in self.before.items():
            signal.signal(number, handler)
