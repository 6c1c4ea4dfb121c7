"""A thread on every rank that notices when the job hangs, says where, and ends it so that torchrun starts it again.

About once a second each rank's thread publishes a beat in the job's store: the section and step the rank is in, for how
long, and its Python stack. Nothing in the step waits for it. If a watching rank has made no progress for much of the
time it may take, its thread reads all ranks' beats. All ranks obey the first verdict.
"""

import contextlib
import json
import math
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist

from config import PATIENCE, Config, TitaniteError
from parallel.device import device_type
from run.exits import FILE, HUNG, Exit, record_exit
from run.failures import RolledBackError
from run.processes import LaunchEnvironment, process_state, runs

T = TypeVar("T")

SILENT = 0.3  # share of the limit: a rank whose thread has been silent for longer does not run
SAYING_SECONDS = 10.0  # most time to report a hang before a rank ends: the run's folder may be what hangs
LATE_SECONDS = 1.0  # by which the thread of a running process may oversleep
LOST_SECONDS = 3.0  # for a rank that lost a connection to look for the rank it lost
WATCHERS = 16  # ranks, spread over all, that read all beats: in a large job more would overload the store
FRAMES = 10
CHECKPOINTING = ("checkpoint", "load", "end")  # sections that may last checkpoint.timeout_seconds
QUEUEING = ("forward/backward", "optimizer", "validation")  # sections that queue kernels on an accelerator
LESS_MEMORY = (
    "a smaller training.local_batch_size or activation_checkpoint.mode = selective, full or budget needs less;"
    " python -m tools.plan says how much"
)


class Beat(NamedTuple):
    """What a rank last said about itself. Seconds are measured by its own clock, so clocks need not agree."""

    number: int  # of this beat
    host: str
    pid: int
    ticks: int  # sections entered so far: equal for ranks at the same place
    section: str
    step: int
    idle_seconds: float  # since it entered the section or last made progress in it
    limit_seconds: float  # it may be idle for this long
    waiting: bool  # in a collective, or maybe: an accelerator's full queue holds its host up anywhere
    stack: str  # innermost last


class Verdict(NamedTuple):
    """Which ranks hold up the job. No rank: none stands out."""

    ranks: list[int]
    text: str
    section: str
    step: int


def judge(beats: Sequence[Beat], silent: set[int], gone: bool = False) -> Verdict | None:
    """Who holds up the job, by the beats of all ranks; None while any rank moves or may take longer.

    `silent` are the ranks whose beats have stopped; with `gone`, for so long that moving ranks do not matter. Blamed
    are, in this order: ranks that do not run, ranks behind the others, ranks that are in no collective while others
    are, the only rank.
    """
    moving = [b for rank, b in enumerate(beats) if rank not in silent and b.idle_seconds < PATIENCE * b.limit_seconds]
    if moving and not gone:
        return None
    first = min(b.ticks for b in beats)
    behind = [rank for rank, b in enumerate(beats) if b.ticks == first]
    busy = [rank for rank, b in enumerate(beats) if not b.waiting]
    if silent:
        ranks, why = sorted(silent), "does not run (stopped, or its machine is gone)"
    elif len(behind) < len(beats):
        ranks, why = behind, "is stuck, the others wait for it"
    elif 0 < len(busy) < len(beats):
        ranks, why = busy, "is stuck while the others wait in a collective"
    elif len(beats) == 1:
        ranks, why = [0], "is stuck"
    else:
        doing = (
            f"are busy in {beats[0].section}, nearly as long as they may" if busy else "wait, perhaps for the network"
        )
        text = f"hung: all ranks {doing}; none stands out; the stack of rank 0: {beats[0].stack}"
        return Verdict([], text, beats[0].section, beats[0].step)
    beat = beats[ranks[0]]
    names = ", ".join(map(str, ranks))
    text = f"hung: rank {names} ({beat.host}) {why}; its stack: {beat.stack}"
    return Verdict(ranks, text, beat.section, beat.step)


class Watchdog:
    """Knows where this rank is, and what to say when the run ends. All ranks must build it together.

    It gives verdicts only under torchrun, which starts the job again. As a context, entered any number of times, it
    explains the exception that ends the run.
    """

    def __init__(self, folder: Path, environment: LaunchEnvironment, config: Config):
        self.folder, self.environment, self.config = folder, environment, config
        self.section, self.step = "start", 0
        self.last_checkpoint: int | None = None  # that this start has read or committed
        self.limit_seconds: float = config.comm.init_timeout_seconds
        self._ticks, self._entered, self._count = 0, time.monotonic(), 0
        self._main, self._host = threading.get_ident(), socket.gethostname()
        self._queueing = QUEUEING if device_type() != "cpu" else ()
        self._closed = threading.Event()
        self._last_seen: dict[int, tuple[int, float]] = {}  # rank → number of its last beat, when that came
        self._watches = environment.rank % math.ceil(environment.world_size / WATCHERS) == 0
        first = environment.rank - environment.local_rank
        self._neighbours = range(first, first + environment.local_world_size)
        self._thread: threading.Thread | None = None
        if environment.job:
            # Its own client: on the default one the thread would queue behind what the main thread waits for.
            self._store = dist.distributed_c10d._get_default_store().clone()  # type: ignore[attr-defined]
            self._publish()
            dist.barrier()
            self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
            self._thread.start()

    # ------------------------------------------------------------ what train.py says

    def enter(self, section: str, step: int | None = None) -> None:
        """Say that this rank begins a section, such as data, forward/backward, optimizer, validation or checkpoint."""
        self.section, self.step = section, self.step if step is None else step
        self._ticks += 1
        self._entered = time.monotonic()

    def alive(self) -> None:
        """Say that checkpoint bytes have moved, in any thread, or a weight got its initial values.

        It counts as progress while this rank does this or waits for it.
        """
        if self.section in (*CHECKPOINTING, "init"):
            self._entered = time.monotonic()

    def follow(self, items: Iterable[T], section: str) -> Iterator[T]:
        """Yield `items`; each one is progress in the section."""
        for item in items:
            self.enter(section)
            yield item

    def resumed(self, step: int) -> None:
        """Say that the run goes on after `step`; 0: it begins."""
        self.step, self.last_checkpoint = step, step or None

    def close(self, step: int, steps: int, stopped_by: str) -> None:
        """Record that the run has ended as it should, and stop watching."""
        self._closed.set()
        if self._thread:
            self._thread.join()
        if self.environment.rank == 0:
            kind = "finished" if step >= steps else "stopped"
            cause = "all steps done" if kind == "finished" else f"stopped by {stopped_by or 'another rank'}"
            action = "none" if kind == "finished" else f"resume with --run.folder={self.folder}"
            record_exit(self.folder, Exit(kind, cause, None, "end", step, self.last_checkpoint, action))

    # ------------------------------------------------------------ why the run ends

    def __enter__(self) -> "Watchdog":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not isinstance(error, Exception):
            return
        rank: int | None = self.environment.rank
        said = next(iter(str(error).splitlines()), type(error).__name__)
        if isinstance(error, RolledBackError):
            what, cause, rank = "rolled back", str(error), None
        elif isinstance(error, TitaniteError):
            what, cause, rank = "error", str(error), None if error.agreed else rank
        elif isinstance(error, torch.OutOfMemoryError):  # even in a collective: no other rank is to blame
            what, cause = "failed", f"{said}; {LESS_MEMORY}"
        elif isinstance(error, RuntimeError) and _in_collective(traceback.extract_tb(trace)[-FRAMES:]):
            lost = self._find_lost()
            cause = said
            if lost:
                names = ", ".join(map(str, lost))
                cause = f"rank {names} was lost (killed, stopped, out of memory, or its machine gone)"
            # Much of torch.distributed only computes: not all its errors mean a lost connection.
            disconnected = lost or isinstance(error, dist.DistError) or "gloo" in str(error)
            what, rank = ("lost", lost[0] if lost else None) if disconnected else ("failed", rank)
        else:
            what, cause = "failed", f"{type(error).__name__}: {error}".splitlines()[0]
        self._announce(what, cause, rank, self.section, self.step)

    def _announce(self, kind: str, cause: str, rank: int | None, section: str, step: int) -> None:
        if not self.folder.is_dir():  # nothing is written yet, or the folder is on another node
            return
        again = self.environment.restarts_left > 0
        action = "torchrun starts the job again" if again else f"start again with --run.folder={self.folder}"
        ended = Exit(kind, cause, rank, section, step, self.last_checkpoint, action)
        if record_exit(self.folder, ended) and kind != "error":  # train.py's main prints errors
            print(ended.line(), file=sys.stderr, flush=True)

    def _find_lost(self) -> list[int]:
        """The ranks that do not run: on this machine by their process, on others by their silence.

        A process that is only stopped is killed, since it would not notice the end of the job. In a large job most
        ranks look only at their own machine, unless by then no rank has said what was lost.
        """
        if self._thread is None:
            return []
        try:
            if not self._watches:  # watching ranks look at all first and say why; this one does if none of them did
                lost = self._wait_for_dead(self._read_beats(self._neighbours), 2 * LOST_SECONDS)
                if lost or (self.folder / FILE).exists():
                    return lost
            before = self._read_beats(range(self.environment.world_size))
            dead = self._wait_for_dead(before, LOST_SECONDS)
            after = self._read_beats(range(self.environment.world_size))
        except RuntimeError:  # the store is gone as well, with the torchrun of rank 0 and so with its ranks
            return [0] if self.environment.rank else []
        return dead or [r for r, beat in before.items() if beat.host != self._host and beat == after[r]]

    def _wait_for_dead(self, beats: dict[int, Beat], seconds: float) -> list[int]:
        """Wait up to `seconds` for ranks on this machine that do not run, and return them; kills those only stopped."""
        deadline = time.monotonic() + seconds
        dead: list[int] = []
        while not dead and time.monotonic() < deadline:
            time.sleep(0.05)
            states = {rank: process_state(beat.pid)[0] for rank, beat in beats.items() if beat.host == self._host}
            dead = [rank for rank, state in states.items() if state in ("", "Z", "T")]  # gone, a zombie, stopped
        for rank in dead:
            with contextlib.suppress(ProcessLookupError):
                os.kill(beats[rank].pid, signal.SIGKILL)
        return dead

    # ------------------------------------------------------------ the thread

    def _run(self) -> None:
        # torchrun may have ended before this thread began: then the parent is another process.
        parent, launcher = os.getppid(), self.environment.launcher
        while not self._wait():
            if os.getppid() != parent or (launcher and not runs(launcher)):
                # A rank without its torchrun would train on beside the job that replaces it.
                print(f"rank {self.environment.rank}: torchrun is gone, so this rank ends", file=sys.stderr, flush=True)
                os._exit(HUNG)
            try:
                self._publish()
                if self._store.check(["watchdog/verdict"]):
                    self._obey(Verdict(*json.loads(self._store.get("watchdog/verdict"))))
                idle_seconds = time.monotonic() - self._entered
                if self._watches and idle_seconds > PATIENCE / 2 * min(self._limit(), self.limit_seconds):
                    self._watch()
            except RuntimeError:
                continue  # the store is in the first torchrun: if that is gone, ours ends us

    def _wait(self) -> bool:
        """Wait for the next beat. Returns whether the run has ended. Time while the process was frozen is no hang."""
        before, pause = time.monotonic(), min(1.0, self._limit() / 10)
        closed = self._closed.wait(pause)
        if (late := time.monotonic() - before - pause) > LATE_SECONDS:
            self._entered = min(self._entered + late, time.monotonic())
            self._last_seen.clear()  # the others may have been frozen as well
        return closed

    def _limit(self) -> float:
        if self.section in CHECKPOINTING:
            return self.config.checkpoint.timeout_seconds
        return self.limit_seconds

    def _publish(self) -> None:
        self._count += 1
        stack = _stack_of(self._main)
        beat = Beat(
            number=self._count,
            host=self._host,
            pid=os.getpid(),
            ticks=self._ticks,
            section=self.section,
            step=self.step,
            idle_seconds=time.monotonic() - self._entered,
            limit_seconds=self._limit(),
            waiting=self.section in self._queueing or _in_collective(stack),
            stack=" > ".join(map(_short, stack)),
        )
        self._store.set(f"watchdog/{self.environment.rank}", json.dumps(beat))

    def _read_beats(self, ranks: Sequence[int]) -> dict[int, Beat]:
        # A request without keys breaks the connection.
        texts = self._store.multi_get([f"watchdog/{rank}" for rank in ranks]) if ranks else []
        return {rank: Beat(*json.loads(text)) for rank, text in zip(ranks, texts, strict=True)}

    def _watch(self) -> None:
        """Look at all ranks, and give and obey a verdict if there is one."""
        now, beats = time.monotonic(), self._read_beats(range(self.environment.world_size))
        for rank, beat in beats.items():
            if self._last_seen.get(rank, (0, 0.0))[0] != beat.number:
                self._last_seen[rank] = beat.number, now
        quiet = {rank: now - at for rank, (_, at) in self._last_seen.items()}
        # A save may take long, but this thread does nothing else and is never silent for long.
        gone = {rank for rank, seconds in quiet.items() if seconds > PATIENCE * self.limit_seconds}
        silent = gone or {rank for rank, seconds in quiet.items() if seconds > SILENT * self._limit()}
        verdict = judge(list(beats.values()), silent, bool(gone))
        if verdict is None:
            return
        first = self._store.compare_set("watchdog/verdict", "", json.dumps(verdict))
        self._obey(Verdict(*json.loads(first)))

    def _obey(self, verdict: Verdict) -> None:
        """Say why, kill the stuck ranks on this machine, which may not react to a signal, and end this rank.

        Every rank tries to write it down, since the run's folder may be on one machine's disk; the first there does.
        """
        stuck = verdict.ranks[0] if verdict.ranks else None
        said = ("hung", verdict.text, stuck, verdict.section, verdict.step)
        saying = threading.Thread(target=self._announce, args=said, daemon=True)
        saying.start()
        saying.join(SAYING_SECONDS)
        if saying.is_alive():
            print(verdict.text, file=sys.stderr, flush=True)
        beside = [rank for rank in verdict.ranks if rank in self._neighbours and rank != self.environment.rank]
        with contextlib.suppress(RuntimeError):  # the store is gone: torchrun will end them
            for beat in self._read_beats(beside).values():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(beat.pid, signal.SIGKILL)
        os._exit(HUNG)


# ---------------------------------------------------------------- stacks and processes


def _stack_of(thread: int) -> list[traceback.FrameSummary]:
    """The innermost frames of a thread, innermost last, or those of the backward that it waits for.

    An accelerator's backward runs in a thread of torch, whose stack does not begin in Python's `threading`.
    """
    others = sys._current_frames()
    stack = list(traceback.walk_stack(others.pop(thread)))
    others.pop(threading.get_ident(), None)  # its own frame holds `others`: a cycle would keep all stacks' tensors
    if stack[0][0].f_code.co_name == "_engine_run_backward":
        stacks = (list(traceback.walk_stack(frame)) for frame in others.values())
        backward = (other for other in stacks if other[-1][0].f_code.co_filename != threading.__file__)
        stack = next(backward, []) + stack
    return [
        traceback.FrameSummary(f.f_code.co_filename, line, f.f_code.co_name, lookup_line=False)
        for f, line in stack[FRAMES - 1 :: -1]
    ]


def _in_collective(frames: Iterable[traceback.FrameSummary]) -> bool:
    """Whether a stack is in torch's collectives, the vote of run.stop or the ring of parallel.context."""
    files = [frame.filename for frame in frames]
    return any(
        ("/torch/distributed/" in file and "/elastic/" not in file)
        or file.endswith(("run/stop.py", "parallel/context.py"))
        for file in files
    )


def _short(frame: traceback.FrameSummary) -> str:
    return f"{'/'.join(Path(frame.filename).parts[-2:])}:{frame.lineno} {frame.name}"
