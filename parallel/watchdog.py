"""A thread on every rank that notices when the job hangs, says where, and ends it so that torchrun starts it again.

Each rank's thread publishes a beat in the job's store every second or so: which section of which step the rank is in,
for how long, and its Python stack. Nothing in the step waits for it. When a rank that watches has made no progress for
most of the time that a collective may take, its thread reads the beats of all, and the first verdict is every rank's.
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
from parallel.comm import LaunchEnvironment, device_type, process_state, runs
from parallel.exits import FILE, HUNG, Exit, record_exit

T = TypeVar("T")

SILENT = 0.3  # of the limit: a rank whose thread has said nothing for so long does not run
SAYING_SECONDS = 10.0  # after which a rank ends without: the run's folder may be what hangs
LATE_SECONDS = 1.0  # that the thread of a process that runs may oversleep
LOST_SECONDS = 3.0  # in which a rank that lost its connection finds out to whom
WATCHERS = 16  # ranks, spread over all, that read all beats: in a large job all of them would ask too much of the store
FRAMES = 10
CHECKPOINTING = ("checkpoint", "load", "end")  # sections that may last checkpoint.timeout_seconds
QUEUEING = ("forward/backward", "optimizer", "validation")  # in which an accelerator is given kernels
LESS_MEMORY = (
    "a smaller training.local_batch_size or activation_checkpoint.mode = selective, full or budget needs less;"
    " python -m parallel.plan says how much"
)


class Beat(NamedTuple):
    """What a rank last said of itself. Seconds are by its own clock, so clocks need not agree."""

    number: int  # of the beat
    host: str
    pid: int
    ticks: int  # sections entered so far: the same on all ranks at the same place
    section: str
    step: int
    idle_seconds: float  # since it entered the section, or something has moved there
    limit_seconds: float  # that it may stay there
    waiting: bool  # in a collective, for others, or maybe so: an accelerator's full queue holds its host up anywhere
    stack: list[str]  # innermost last


class Verdict(NamedTuple):
    """Which ranks hold up the job. No rank: none stands out."""

    ranks: list[int]
    text: str
    section: str
    step: int


def judge(beats: Sequence[Beat], silent: set[int], gone: bool = False) -> Verdict | None:
    """Who holds up the job, by the beats of all ranks; None as long as anyone moves or may take longer.

    `silent` are the ranks whose beats have ceased; `gone`: for so long that it matters not what the others do.
    In this order: a rank that does not run at all, one that has not come as far as others, one that is not waiting in a
    collective while others are, the only one.
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
        doing = f"are busy in {beats[0].section}, nearly as long as they may" if busy else "wait: the network?"
        text = f"hung: all ranks {doing}; none stands out; the stack of rank 0: {_path(beats[0])}"
        return Verdict([], text, beats[0].section, beats[0].step)
    beat = beats[ranks[0]]
    names = ", ".join(map(str, ranks))
    text = f"hung: rank {names} ({beat.host}) {why}; its stack: {_path(beat)}"
    return Verdict(ranks, text, beat.section, beat.step)


def _path(beat: Beat) -> str:
    return " > ".join(beat.stack)


class Watchdog:
    """Knows where this rank is, and what to say when the run ends. Made by all ranks together.

    Verdicts are given only under torchrun, which starts the job again. As a context (also several times) it
    explains the exception that ends the run.
    """

    def __init__(self, folder: Path, environment: LaunchEnvironment, config: Config):
        self.folder, self.environment, self.config = folder, environment, config
        self.section, self.step = "start", 0
        self.last_checkpoint: int | None = None
        self.limit_seconds: float = config.comm.init_timeout_seconds
        self._ticks, self._entered, self._count = 0, time.monotonic(), 0
        self._main, self._host = threading.get_ident(), socket.gethostname()
        self._queueing = QUEUEING if device_type() != "cpu" else ()
        self._closed = threading.Event()
        self._last_seen: dict[int, tuple[int, float]] = {}  # rank → its count, when it changed
        self._watches = environment.rank % math.ceil(environment.world_size / WATCHERS) == 0
        first = environment.rank - environment.local_rank
        self._neighbours = range(first, first + environment.local_world_size)
        self._thread: threading.Thread | None = None
        if environment.job:
            # A client of its own: in the default one a thread would wait behind whatever the main thread waits for.
            self._store = dist.distributed_c10d._get_default_store().clone()  # type: ignore[attr-defined]
            self._publish()
            dist.barrier()
            self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
            self._thread.start()

    # ------------------------------------------------------------ what train.py says

    def enter(self, section: str, step: int | None = None) -> None:
        """This rank begins a section of the step: data, forward/backward, optimizer, validation, checkpoint."""
        self.section, self.step = section, self.step if step is None else step
        self._ticks += 1
        self._entered = time.monotonic()

    def alive(self) -> None:
        """Bytes of a checkpoint have moved, by any thread, or a weight has its initial values.

        Progress of a rank that does so or waits for that.
        """
        if self.section in (*CHECKPOINTING, "init"):
            self._entered = time.monotonic()

    def follow(self, items: Iterable[T], section: str) -> Iterator[T]:
        """`items`; fetching each one is progress within the section."""
        for item in items:
            self.enter(section)
            yield item

    def resumed(self, step: int) -> None:
        """The run goes on after `step`; 0: it begins."""
        self.step, self.last_checkpoint = step, step or None

    def saved(self, step: int) -> None:
        """A checkpoint of `step` is whole and safe."""
        self.last_checkpoint = step

    def close(self, step: int, steps: int, stopped_by: str) -> None:
        """The run has ended as it should: record it, and watch no more."""
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
        if isinstance(error, TitaniteError):
            what, cause, rank = "error", str(error), None if error.agreed else rank
        elif isinstance(error, torch.OutOfMemoryError):  # also inside a collective: nobody else is to blame
            what, cause = "failed", f"{said}; {LESS_MEMORY}"
        elif isinstance(error, RuntimeError) and _in_collective(traceback.extract_tb(trace)[-FRAMES:]):
            lost = self._find_lost()
            cause = said
            if lost:
                names = ", ".join(map(str, lost))
                cause = f"rank {names} was lost (killed, stopped, out of memory, or its machine gone)"
            # Much of torch.distributed computes: of what it raises, only some tells of a connection.
            disconnected = lost or isinstance(error, dist.DistError) or "gloo" in str(error)
            what, rank = ("lost", lost[0] if lost else None) if disconnected else ("failed", rank)
        else:
            what, cause = "failed", f"{type(error).__name__}: {error}".splitlines()[0]
        self._announce(what, cause, rank, self.section, self.step)

    def _announce(self, kind: str, cause: str, rank: int | None, section: str, step: int) -> None:
        if not self.folder.is_dir():  # nothing was written yet, or the folder is another node's
            return
        again = self.environment.restarts_left > 0
        action = "torchrun starts the job again" if again else f"start again with --run.folder={self.folder}"
        ended = Exit(kind, cause, rank, section, step, self.last_checkpoint, action)
        if record_exit(self.folder, ended) and kind != "error":  # which train.py's main prints
            print(ended.line(), file=sys.stderr, flush=True)

    def _find_lost(self) -> list[int]:
        """The ranks that do not run: on this machine by their process, on others by their silence.

        A process that is only stopped is killed: it would not hear that the job ends. In a large job most ranks look at
        their own machine only, unless nobody else has said by then what was lost.
        """
        if self._thread is None:
            return []
        try:
            if not self._watches:  # those that do look first, at all, and say why; if none has come here, this one does
                lost = self._wait_for_dead(self._read_beats(self._neighbours), 2 * LOST_SECONDS)
                if lost or (self.folder / FILE).exists():
                    return lost
            before = self._read_beats(range(self.environment.world_size))
            dead = self._wait_for_dead(before, LOST_SECONDS)
            after = self._read_beats(range(self.environment.world_size))
        except RuntimeError:  # the store is gone as well
            return []
        return dead or [r for r, beat in before.items() if beat.host != self._host and beat == after[r]]

    def _wait_for_dead(self, beats: dict[int, Beat], seconds: float) -> list[int]:
        """Those of the ranks that do not run on this machine, as soon as there are some; killed, if only stopped."""
        deadline = time.monotonic() + seconds
        dead: list[int] = []
        while not dead and time.monotonic() < deadline:
            time.sleep(0.05)
            dead = [rank for rank, beat in beats.items() if beat.host == self._host and not _is_running(beat.pid)]
        for rank in dead:
            with contextlib.suppress(ProcessLookupError):
                os.kill(beats[rank].pid, signal.SIGKILL)
        return dead

    # ------------------------------------------------------------ the thread

    def _run(self) -> None:
        # Before this thread began torchrun may have been gone already: then the parent is another.
        parent, launcher = os.getppid(), self.environment.launcher
        while not self._wait():
            if os.getppid() != parent or (launcher and not runs(launcher)):
                # Without its torchrun a rank would train on beside the job that takes its place.
                print(f"rank {self.environment.rank}: torchrun is gone, so this rank ends", file=sys.stderr, flush=True)
                os._exit(HUNG)
            try:
                self._publish()
                if self._store.check(["watchdog/verdict"]):
                    self._obey(Verdict(*json.loads(self._store.get("watchdog/verdict"))))
                if time.monotonic() - self._entered <= PATIENCE / 2 * min(self._limit(), self.limit_seconds):
                    self._last_seen.clear()
                elif self._watches:
                    self._watch()
            except RuntimeError:
                continue  # the store is with torchrun's first agent: if that is gone, ours will end us

    def _wait(self) -> bool:
        """Wait for the next beat; whether the run has ended. Time in which the process was frozen is no hang."""
        before, pause = time.monotonic(), min(1.0, self._limit() / 10)
        closed = self._closed.wait(pause)
        if (late := time.monotonic() - before - pause) > LATE_SECONDS:
            self._entered = min(self._entered + late, time.monotonic())
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
            stack=[_short(frame) for frame in stack],
        )
        self._store.set(f"watchdog/{self.environment.rank}", json.dumps(beat))

    def _read_beats(self, ranks: Sequence[int]) -> dict[int, Beat]:
        # A request for no key at all breaks the connection.
        texts = self._store.multi_get([f"watchdog/{rank}" for rank in ranks]) if ranks else []
        return {rank: Beat(*json.loads(text)) for rank, text in zip(ranks, texts, strict=True)}

    def _watch(self) -> None:
        """Look at all ranks; give the verdict if there is one."""
        now, beats = time.monotonic(), self._read_beats(range(self.environment.world_size))
        for rank, beat in beats.items():
            if self._last_seen.get(rank, (0, 0.0))[0] != beat.number:
                self._last_seen[rank] = beat.number, now
        quiet = {rank: now - at for rank, (_, at) in self._last_seen.items()}
        # A save may take long, but never does a thread that has nothing else to do keep silent for long.
        gone = {rank for rank, seconds in quiet.items() if seconds > PATIENCE * self.limit_seconds}
        silent = gone or {rank for rank, seconds in quiet.items() if seconds > SILENT * self._limit()}
        verdict = judge(list(beats.values()), silent, bool(gone))
        if verdict is None:
            return
        first = self._store.compare_set("watchdog/verdict", "", json.dumps(verdict))
        self._obey(Verdict(*json.loads(first)))

    def _obey(self, verdict: Verdict) -> None:
        """Say why, end the ranks beside this one that are stuck, which may not hear a signal, and this one.

        All do, since the run's folder may be on the disk of one machine: where it is, the first one writes it.
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

    An accelerator's backward has a thread of torch's own, whose stack does not begin in Python's `threading`.
    """
    others = sys._current_frames()
    stack = list(traceback.walk_stack(others.pop(thread)))
    if stack[0][0].f_code.co_name == "_engine_run_backward":
        stacks = (list(traceback.walk_stack(frame)) for frame in others.values())
        backward = (other for other in stacks if other[-1][0].f_code.co_filename != threading.__file__)
        stack = next(backward, []) + stack
    return [
        traceback.FrameSummary(f.f_code.co_filename, line, f.f_code.co_name, lookup_line=False)
        for f, line in stack[FRAMES - 1 :: -1]
    ]


def _in_collective(frames: Iterable[traceback.FrameSummary]) -> bool:
    """Whether a stack leads into torch's collectives, the vote of parallel.stop or the ring of parallel.context."""
    files = [frame.filename for frame in frames]
    return any(
        ("/torch/distributed/" in file and "/elastic/" not in file)
        or file.endswith(("parallel/stop.py", "parallel/context.py"))
        for file in files
    )


def _short(frame: traceback.FrameSummary) -> str:
    return f"{'/'.join(Path(frame.filename).parts[-2:])}:{frame.lineno} {frame.name}"


def _is_running(pid: int) -> bool:
    """Whether a process exists and has neither ended (a zombie has) nor been stopped."""
    return process_state(pid)[0] not in ("", "Z", "T")
