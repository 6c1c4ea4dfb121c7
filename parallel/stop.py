"""Stopping between two steps, on all ranks at the same one."""

import os
import signal
from datetime import timedelta
from pathlib import Path
from types import FrameType

import torch
import torch.distributed as dist

from config import TitaniteError
from parallel.comm import LaunchEnvironment, tell_launcher

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
OF_A_NODE = ("SIGTERM", "SIGHUP")  # which is taken from the run; the others are a person's word to the whole run


class StopRequest:
    """SIGTERM, Ctrl-C, a terminal that is closed, SIGUSR1 (Slurm's warning) or a file `stop` in the run's folder.

    All ranks agree on it. Afterwards `elsewhere` says that only other nodes are taken from the run, which is to go on.

    Each step casts a vote and reads the one cast a step before, on the host and in a gloo group of its own: so
    nobody waits, neither for the device nor for a slower rank, and all ranks stop at the same step.
    Signals are caught inside `with`; what was ignored before, as SIGHUP is under nohup, stays so. A second Ctrl-C
    raises KeyboardInterrupt.
    """

    def __init__(self, run_folder: Path, environment: LaunchEnvironment, timeout_seconds: int):
        self.file = run_folder / "stop"
        self.asked_by, self.elsewhere = "", False
        self.node = environment.rank - environment.local_rank  # by its first rank
        self.group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_seconds))
        self.vote = torch.zeros(1, dtype=torch.int32)
        self.under_way: dist.Work | None = None

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if name == self.asked_by == "SIGINT":
            raise KeyboardInterrupt
        if not self.asked_by or name not in OF_A_NODE:  # what a person asked of the whole run stays asked
            self.asked_by = name

    def agreed(self) -> bool:
        """Whether any rank had been asked to stop by the step before; the same on all ranks. Collective."""
        if self.under_way is not None:
            self.under_way.wait()
        stop = bool(self.vote.item())
        if dist.get_rank() == 0 and self.file.exists():
            self.asked_by = str(self.file)
        self.vote.fill_(int(bool(self.asked_by)))
        self.under_way = dist.all_reduce(self.vote, dist.ReduceOp.MAX, group=self.group, async_op=True)
        return stop

    def __enter__(self) -> "StopRequest":
        self.before = {number: signal.getsignal(number) for number in SIGNALS}
        for number, handler in self.before.items():
            if handler != signal.SIG_IGN:
                signal.signal(number, self._on_signal)
        tell_launcher(None)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        """Leave signals as they were; remove the `stop` file, which has been obeyed."""
        if isinstance(error, Exception) and not isinstance(error, TitaniteError) and self.asked_by == "SIGTERM":
            # torchrun ends all ranks by SIGTERM when one has failed, and a collective with that one fails in turn.
            # Why is for the other to say: a second traceback would bury it.
            os._exit(128 + signal.SIGTERM)
        if error is None:
            if self.under_way is not None:
                self.under_way.wait()
            asked = torch.zeros(dist.get_world_size() + 1, dtype=torch.int32)  # each node by its first rank; the run
            if self.asked_by:
                asked[self.node if self.asked_by in OF_A_NODE else -1] = 1
            dist.all_reduce(asked, dist.ReduceOp.MAX, group=self.group)
            self.elsewhere = bool(asked.any()) and not asked[[self.node, -1]].any()
            if dist.get_rank() == 0:
                self.file.unlink(missing_ok=True)
        for number, handler in self.before.items():
            signal.signal(number, handler)
