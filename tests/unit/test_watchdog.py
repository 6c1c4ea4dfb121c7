"""Verdicts of the watchdog by what the ranks say of themselves; exits, crash loops and run folders of a job."""

import _thread
import dataclasses
import errno
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import weakref
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist

import run.watchdog
from config import Config, ConfigError, Run, TitaniteError, Training
from run.exits import HUNG, Exit, read_exit, record_exit, run_and_leave
from run.failures import Timing, find_slow
from run.folder import CrashLoopError, choose_run_folder, read_starts, record_progress, record_start
from run.processes import LaunchEnvironment, identify, launch_environment
from run.watchdog import Beat, Verdict, Watchdog, judge

WAITING = Beat(9, "a", 1, 50, "forward/backward", 7, 100.0, 60.0, True, "all_reduce")


def beats(*changes: dict[str, object]) -> list[Beat]:
    return [WAITING._replace(**change) for change in changes]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("others", "silent", "named", "said"),
    [
        ([{}, {"ticks": 49, "section": "data", "waiting": False}, {}], set(), [1], "stuck, the others wait"),
        ([{}, {}, {"waiting": False}], set(), [2], "while the others wait in a collective"),
        ([{}, {}, {}], {1}, [1], "does not run"),
        ([{}, {"ticks": 49}, {}], {2}, [2], "does not run"),
        (
            [{}, {}, {}],
            set(),
            [],
            "all ranks wait, perhaps for the network; none stands out; the stack of rank 0: all_reduce",
        ),
        ([{"waiting": False}] * 3, set(), [], "busy in forward/backward, nearly as long as they may; none"),
        ([{"waiting": False}], set(), [0], "rank 0 (a) is stuck; its stack: all_reduce"),
    ],
)
def test_the_one_that_holds_up_the_others_is_named(
    others: list[dict[str, object]], silent: set[int], named: list[int], said: str
) -> None:
    verdict = judge(beats(*others), silent)
    assert verdict is not None
    assert verdict.ranks == named
    assert said in verdict.text


def test_no_verdict_while_anyone_moves_or_may_take_longer() -> None:
    assert judge(beats({}, {"idle_seconds": 40.0}), set()) is None
    assert judge(beats({}, {"ticks": 49, "section": "checkpoint", "limit_seconds": 1800.0}), set()) is None
    assert judge(beats({}, {"idle_seconds": 40.0}), {1}) is not None, "what a silent rank said last counts no more"
    saving = {"section": "checkpoint", "limit_seconds": 1800.0}
    assert judge(beats(saving, saving), {1}) is None
    assert judge(beats(saving, saving), {1}, gone=True) is not None, "a thread is never silent for so long"


@pytest.mark.parametrize(("slept", "entered", "idle"), [(1.0, False, 5.0), (500.0, False, 5.0), (500.0, True, 0.0)])
def test_time_in_which_the_process_was_frozen_is_no_hang(
    slept: float, entered: bool, idle: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr("run.watchdog.time.monotonic", lambda: now[0])
    watchdog = Watchdog(tmp_path, LaunchEnvironment(rank=0, local_rank=0, world_size=1), Config())
    now[0] += 4.0

    def wait(seconds: float) -> bool:
        now[0] += slept
        if entered:  # the main thread was the first to go on
            watchdog.enter("optimizer")
        return False

    monkeypatch.setattr(watchdog._closed, "wait", wait)
    assert not watchdog._wait()
    assert now[0] - watchdog._entered == idle


@pytest.mark.parametrize(
    ("section", "counts"),
    [("init", True), ("end", True), ("checkpoint", True), ("load", True), ("forward/backward", False)],
)
def test_bytes_of_a_checkpoint_and_initial_weights_are_progress_of_who_waits_for_them(
    tmp_path: Path, section: str, counts: bool
) -> None:
    watchdog = Watchdog(tmp_path, LaunchEnvironment(rank=0, local_rank=0, world_size=1), Config())
    watchdog.enter(section)
    watchdog._entered, ticks = 0.0, watchdog._ticks
    watchdog.alive()
    assert (watchdog._entered > 0.0) == counts
    assert watchdog._ticks == ticks, "the ranks move different numbers of pieces"


@pytest.mark.parametrize(
    ("device", "section", "waiting"),
    [
        ("cpu", "forward/backward", False),
        ("cuda", "data", False),
        ("cuda", "forward/backward", True),
        ("cuda", "optimizer", True),
        ("cuda", "checkpoint", False),
    ],
)
def test_whose_accelerators_queue_is_full_may_wait_for_others_wherever_it_is(
    device: str, section: str, waiting: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hang inside NCCL stops each host where its queue is full: none of them must be named for that."""
    monkeypatch.setattr("run.watchdog.device_type", lambda: device)
    watchdog = Watchdog(tmp_path, LaunchEnvironment(rank=0, local_rank=0, world_size=2), Config())
    watchdog._store = dist.HashStore()
    watchdog.enter(section)
    watchdog._publish()
    beat = Beat(*json.loads(watchdog._store.get("watchdog/0")))
    assert (beat.ticks, beat.section, beat.waiting) == (1, section, waiting)


def test_the_stack_of_a_backward_in_torchs_own_thread_is_shown() -> None:
    """As on CUDA, where the thread that calls backward only waits, in C++; as in a lock, which has no frame either."""
    in_hook, in_backward, hook_over, backward_over = (_thread.allocate_lock() for _ in range(4))
    for lock in (in_hook, in_backward, hook_over, backward_over):
        lock.acquire()
    main, stacks = threading.get_ident(), []

    def post_backward_hook() -> None:
        in_hook.release()
        hook_over.acquire()

    def _engine_run_backward() -> None:
        in_backward.release()
        backward_over.acquire()

    def watch() -> None:
        in_hook.acquire()
        in_backward.acquire()
        stacks.append([frame.name for frame in run.watchdog._stack_of(main)])
        hook_over.release()
        backward_over.release()

    _thread.start_new_thread(post_backward_hook, ())
    watching = threading.Thread(target=watch)
    watching.start()
    _engine_run_backward()
    watching.join()
    assert stacks[0][-3:] == [
        test_the_stack_of_a_backward_in_torchs_own_thread_is_shown.__name__,
        "_engine_run_backward",
        "post_backward_hook",
    ]


@pytest.mark.parametrize("name", ["forward", "_engine_run_backward"])
def test_a_look_at_a_stack_keeps_nothing_of_it_alive(name: str) -> None:
    """Frames hold their locals, such as activations, and `train.py` seldom collects what only a cycle holds."""

    main, seen = threading.get_ident(), _thread.allocate_lock()
    seen.acquire()

    def watch() -> None:
        run.watchdog._stack_of(main)
        seen.release()

    def compute() -> weakref.ref[torch.Tensor]:
        activation = torch.zeros(1)
        _thread.start_new_thread(watch, ())
        seen.acquire()
        return weakref.ref(activation)

    compute.__code__ = compute.__code__.replace(co_name=name)
    gc.disable()
    try:
        assert compute()() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("name", ["RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_MAX_RESTARTS"])
def test_a_variable_of_torchrun_that_is_no_number_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "abc")
    with pytest.raises(ConfigError, match=f"{name} = 'abc': must be a whole number"):
        launch_environment()


def test_what_torchrun_says_of_a_rank_and_its_job(monkeypatch: pytest.MonkeyPatch) -> None:
    said = {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "a job"}
    said |= {"TORCHELASTIC_MAX_RESTARTS": "3", "TORCHELASTIC_RESTART_COUNT": "1", "MASTER_ADDR": "host"}
    said |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_PORT": "29500", "TITANITE_LAUNCHER": "7-8"}
    for name in said:
        monkeypatch.delenv(name, raising=False)
    assert launch_environment() == LaunchEnvironment(0, 0, 1)
    for name, value in said.items():
        monkeypatch.setenv(name, value)
    assert launch_environment() == LaunchEnvironment(3, 1, 4, "a job", 2, ("host", 29500), 2, "7-8", 3)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "4")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    job = f"{socket.gethostname()}-{identify(os.getppid())}"
    assert launch_environment()[3:5] == (job, 0)


def test_srun_must_start_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of its tasks would be a run of its own; torchrun, which it starts on every node, says who the ranks are."""
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    for tasks in ("1", "2"):
        monkeypatch.setenv("SLURM_STEP_NUM_TASKS", tasks)
        with pytest.raises(ConfigError, match="SLURM_STEP_NUM_TASKS = 2: srun") if tasks == "2" else nullcontext():
            launch_environment()
    monkeypatch.setenv("WORLD_SIZE", "2")
    launch_environment()


def test_the_ranks_beside_one_are_those_of_its_torchrun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": 21, "LOCAL_RANK": 5, "WORLD_SIZE": 32, "LOCAL_WORLD_SIZE": 8}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    assert Watchdog(tmp_path, launch_environment(), Config())._neighbours == range(16, 24)


@pytest.mark.parametrize(("world_size", "every"), [(1, 1), (16, 1), (17, 2), (4096, 256)])
def test_few_ranks_of_a_large_job_watch(tmp_path: Path, world_size: int, every: int) -> None:
    places = [LaunchEnvironment(rank=rank, local_rank=0, world_size=world_size) for rank in range(world_size)]
    watching = [place.rank for place in places if Watchdog(tmp_path, place, Config())._watches]
    assert watching == list(range(0, world_size, every))


def test_the_beats_of_any_ranks_are_read_also_of_none(tmp_path: Path) -> None:
    """Where nobody stands out, a verdict names no rank."""
    watchdog = Watchdog(tmp_path, LaunchEnvironment(rank=1, local_rank=1, world_size=4), Config())
    watchdog._store = dist.TCPStore("127.0.0.1", 0, None, True)
    watchdog._main = threading.get_ident()
    watchdog._publish()
    assert watchdog._read_beats([]) == {}
    assert watchdog._read_beats([1])[1].pid == os.getpid()


@pytest.mark.parametrize("folder_hangs", [False, True])
def test_every_rank_says_the_verdict_and_ends_also_where_the_folder_hangs(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], folder_hangs: bool
) -> None:
    """The run's folder may be on the disk of a machine whose ranks did not find the verdict."""
    watchdog = Watchdog(tmp_path, LaunchEnvironment(rank=1, local_rank=1, world_size=4), Config())
    pid = os.fork()
    if not pid:
        try:
            watchdog._store = dist.TCPStore("127.0.0.1", 0, None, True)
            if folder_hangs:
                run.watchdog.SAYING_SECONDS = 0.1
                run.watchdog.record_exit = lambda *_: threading.Event().wait()
            watchdog._store.set("watchdog/verdict", json.dumps(Verdict([], "hung: all ranks wait", "data", 7)))
            with patch.multiple(watchdog, _publish=Mock(), _wait=Mock(side_effect=[False, True])):
                watchdog._run()
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == HUNG
    assert "hung: all ranks wait" in capfd.readouterr().err
    if not folder_hangs:
        record = read_exit(tmp_path)
        assert record is not None
        assert (record["kind"], record["rank"], record["section"], record["step"]) == ("hung", None, "data", 7)


def test_of_the_stuck_ranks_those_on_this_machine_are_killed(tmp_path: Path) -> None:
    here, elsewhere = (subprocess.Popen(["cat"], stdin=subprocess.PIPE) for _ in range(2))
    place = LaunchEnvironment(rank=1, local_rank=1, world_size=4, local_world_size=2)
    pid = os.fork()
    if not pid:
        try:
            watchdog = Watchdog(tmp_path, place, Config())
            watchdog._store = dist.TCPStore("127.0.0.1", 0, None, True)
            for rank, stuck in enumerate((here.pid, os.getpid(), elsewhere.pid)):
                watchdog._store.set(f"watchdog/{rank}", json.dumps(WAITING._replace(pid=stuck)))
            watchdog._obey(Verdict([0, 1, 2], "hung: rank 0, 1, 2", "data", 7))
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == HUNG
    assert here.wait(timeout=60) == -signal.SIGKILL
    assert elsewhere.poll() is None
    elsewhere.kill()
    elsewhere.wait()


@pytest.mark.parametrize(
    ("rank", "section", "idle", "looks"),
    [
        (0, "data", 0.3, False),
        (0, "data", 0.5, True),
        (0, "checkpoint", 0.5, True),  # which itself may last longer
        (1, "data", 0.5, False),
    ],
)
def test_a_watching_rank_without_progress_looks_at_the_others(
    rank: int, section: str, idle: float, looks: bool, tmp_path: Path
) -> None:
    watchdog = Watchdog(tmp_path, LaunchEnvironment(rank=rank, local_rank=0, world_size=17), Config())
    watchdog.enter(section)
    watchdog._entered -= idle * watchdog.limit_seconds
    watchdog._store, watch = dist.HashStore(), Mock()
    publish = Mock(side_effect=[RuntimeError("the store is away"), None])
    with patch.multiple(watchdog, _watch=watch, _publish=publish, _wait=Mock(side_effect=[False, False, True])):
        watchdog._run()
    assert watch.called == looks


@pytest.mark.parametrize(
    ("section", "silent", "frozen", "named"),
    [
        ("data", 0.2, False, None),
        ("data", 0.4, False, [1]),
        ("data", 0.4, True, None),
        ("checkpoint", 0.4, False, None),
        ("checkpoint", 0.9, False, [1]),  # while rank 0 is allowed more time
    ],
)
def test_a_rank_whose_beats_have_stopped_is_named(
    section: str, silent: float, frozen: bool, named: list[int] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a time in which the whole job was frozen, rank 0 may look before rank 1 has published another beat."""
    now = [100.0]
    monkeypatch.setattr("run.watchdog.time.monotonic", lambda: now[0])
    watchdog = Watchdog(tmp_path, LaunchEnvironment(rank=0, local_rank=0, world_size=2), Config())
    watchdog._store, obey = dist.HashStore(), Mock()
    monkeypatch.setattr(watchdog, "_obey", obey)
    watchdog.enter(section)
    own = WAITING._replace(idle_seconds=watchdog.limit_seconds, limit_seconds=watchdog._limit())
    watchdog._store.set("watchdog/0", json.dumps(own))
    watchdog._store.set("watchdog/1", json.dumps(WAITING._replace(idle_seconds=0.0)))

    def wait(_: float) -> bool:
        now[0] += silent * watchdog.limit_seconds
        watchdog._store.set("watchdog/0", json.dumps(own._replace(number=10)))
        return False

    monkeypatch.setattr(watchdog._closed, "wait", wait)
    watchdog._watch()
    watchdog._wait() if frozen else wait(1.0)
    watchdog._watch()
    assert [call.args[0].ranks for call in obey.mock_calls] == ([] if named is None else [named])
    if named:  # and if another rank was faster
        first = Verdict([], "hung: all ranks wait", "data", 7)
        watchdog._store.set("watchdog/verdict", json.dumps(first))
        watchdog._watch()
        obey.assert_called_with(first)


@pytest.mark.parametrize("gone", [False, True])
def test_a_rank_ends_whose_torchrun_was_gone_before_it_looked(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], gone: bool
) -> None:
    torchrun = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
    place = LaunchEnvironment(rank=0, local_rank=0, world_size=1, launcher=identify(torchrun.pid))
    if gone:
        torchrun.kill()
        torchrun.wait()
    pid = os.fork()
    if not pid:
        try:
            watchdog = Watchdog(tmp_path, place, Config())
            watchdog._main, watchdog._store = threading.main_thread().ident, dist.TCPStore("127.0.0.1", 0, None, True)
            watchdog._publish = lambda: os._exit(0)  # it goes on
            watchdog._run()
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == (HUNG if gone else 0)
    assert ("torchrun is gone" in capfd.readouterr().err) is gone
    torchrun.kill()
    torchrun.wait()


@pytest.mark.parametrize("said", [False, True])
def test_a_rank_that_does_not_watch_finds_what_was_lost_elsewhere_unless_it_was_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: bool
) -> None:
    monkeypatch.setattr(run.watchdog, "LOST_SECONDS", 0.1)
    place = LaunchEnvironment(rank=3, local_rank=1, world_size=32, local_world_size=2)
    watchdog = Watchdog(tmp_path, place, Config())
    assert not watchdog._watches
    watchdog._thread = threading.current_thread()
    watchdog._store = dist.TCPStore("127.0.0.1", 0, None, True)
    here = WAITING._replace(host=watchdog._host, pid=os.getpid())
    for rank in range(32):
        beat = here if rank != 20 else WAITING._replace(host="another")
        watchdog._store.set(f"watchdog/{rank}", json.dumps(beat))
    if said:
        (tmp_path / "exit.json").touch()
    assert watchdog._find_lost() == ([] if said else [20])


def test_a_dead_neighbour_is_found_by_a_rank_that_does_not_watch(tmp_path: Path) -> None:
    place = LaunchEnvironment(rank=3, local_rank=1, world_size=32, local_world_size=3)
    watchdog = Watchdog(tmp_path, place, Config())
    watchdog._thread = threading.current_thread()
    watchdog._store = dist.TCPStore("127.0.0.1", 0, None, True)
    dead = subprocess.Popen(["true"])
    while Path(f"/proc/{dead.pid}/stat").read_text().rpartition(") ")[2][0] != "Z":
        pass
    for rank, pid in ((2, os.getpid()), (3, os.getpid()), (4, dead.pid)):
        watchdog._store.set(f"watchdog/{rank}", json.dumps(WAITING._replace(host=watchdog._host, pid=pid)))
    assert watchdog._find_lost() == [4]
    dead.wait()


def test_if_the_store_is_lost_so_is_rank_0(tmp_path: Path) -> None:
    """The torchrun of its node kept the store."""
    kept = dist.TCPStore("127.0.0.1", 0, None, True)
    watchdogs = []
    for rank in (0, 1):
        kept.set(f"watchdog/{rank}", json.dumps(WAITING))
        watchdogs.append(Watchdog(tmp_path, LaunchEnvironment(rank, local_rank=0, world_size=2), Config()))
        watchdogs[rank]._thread = threading.current_thread()
        watchdogs[rank]._store = dist.TCPStore("127.0.0.1", kept.port)
    del kept
    assert watchdogs[1]._find_lost() == [0]
    assert watchdogs[0]._find_lost() == []  # it runs, whatever became of its torchrun


@pytest.mark.parametrize(
    ("ended", "code", "said"),
    [
        (None, 0, ""),
        (RuntimeError("broken"), 1, "RuntimeError: broken\n"),
        (SystemExit(), 0, ""),
        (SystemExit(3), 3, ""),
        (SystemExit("no"), 1, "no\n"),
        (KeyboardInterrupt(), 130, ""),
        (ConfigError("no"), 2, "error: no\n"),
    ],
)
def test_a_process_ends_with_its_exit_code_and_waits_for_no_thread(
    ended: BaseException | None, code: int, said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    def main() -> None:
        threading.Thread(target=threading.Event().wait).start()
        if ended:
            raise ended

    pid = os.fork()
    if not pid:
        run_and_leave(main)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == code
    error = capfd.readouterr().err
    assert error.endswith(said)
    assert bool(error) == bool(said)
    assert ("Traceback" in error) == isinstance(ended, RuntimeError)


@pytest.mark.parametrize("nobody_reads", [False, True])
def test_a_run_that_ended_well_has_exit_code_0_without_a_standard_output(nobody_reads: bool) -> None:
    def main() -> None:
        print("done")

    pid = os.fork()
    if not pid:
        sys.stdout = None  # as Python has it where fd 1 was closed
        if nobody_reads:
            reader, writer = os.pipe()
            os.close(reader)
            sys.stdout = os.fdopen(writer, "w")
        run_and_leave(main)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def exit_of(kind: str, cause: str = "rank 1 was lost", last: int | None = 30) -> Exit:
    return Exit(kind, cause, 1, "data", 37, last, "torchrun starts the job again")


@pytest.mark.parametrize("links", [True, False])
def test_the_first_who_knows_the_cause_writes_it(
    links: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if not links:  # as on FAT
        monkeypatch.setattr("os.link", Mock(side_effect=PermissionError(errno.EPERM, "Operation not permitted")))
    assert record_exit(tmp_path, exit_of("lost"))
    assert not record_exit(tmp_path, exit_of("failed", "a consequence"))
    record = read_exit(tmp_path)
    assert record is not None
    assert (record["cause"], record["steps_repeated"], record["tokens_lost"]) == ("rank 1 was lost", 7, 0)
    assert [file.name for file in tmp_path.iterdir()] == ["exit.json"]
    assert capsys.readouterr().err == ""
    line = exit_of("lost").line()
    for part in ("rank 1", "data of step 37", "checkpoint step 30", "steps to repeat: 7", "torchrun starts"):
        assert part in line


@pytest.mark.parametrize(("last", "steps", "repeated"), [(37, 100, 0), (None, 100, 37), (None, 37, 0)])
def test_a_run_that_stops_repeats_what_it_has_not_saved(
    tmp_path: Path, last: int | None, steps: int, repeated: int
) -> None:
    watchdog = Watchdog(tmp_path, LaunchEnvironment(rank=0, local_rank=0, world_size=1), Config())
    watchdog.resumed(last or 0)
    watchdog.close(37, steps, "SIGTERM")
    record = read_exit(tmp_path)
    assert record is not None
    assert (record["kind"], record["steps_repeated"]) == ("finished" if steps == 37 else "stopped", repeated)


def test_a_full_disk_leaves_no_half_written_exit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("os.fsync", Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
    assert record_exit(tmp_path, exit_of("lost")), "its line must still be printed"
    assert not list(tmp_path.iterdir())
    assert "No space left" in capsys.readouterr().err


def test_the_end_of_a_run_can_be_read_by_those_who_can_read_its_other_files(tmp_path: Path) -> None:
    before = os.umask(0o002)
    try:
        record_exit(tmp_path, exit_of("lost"))
        (tmp_path / "other").touch()
    finally:
        os.umask(before)
    assert (tmp_path / "exit.json").stat().st_mode == (tmp_path / "other").stat().st_mode


def test_a_start_that_ends_before_it_has_read_a_checkpoint_does_not_say_that_there_is_none() -> None:
    line = exit_of("lost", last=None)._replace(section="load", step=0).line()
    assert line == "exit: rank 1 was lost (rank 1, load, before any step); next: torchrun starts the job again"


def raise_in_collective(error: Exception) -> None:
    """Raise `error` as if by code of torch.distributed."""
    code = "def fail(error):\n    raise error"
    scope: dict[str, Any] = {}
    exec(compile(code, "/site-packages/torch/distributed/tensor/x.py", "exec"), scope)
    scope["fail"](error)


def test_only_what_tells_of_a_connection_counts_as_a_lost_rank(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    alone = LaunchEnvironment(rank=3, local_rank=3, world_size=4)
    closed = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:544] Connection closed by peer"
    for error, kind, rank in (
        (RuntimeError("The size of tensor a (3) must match the size of tensor b (4)"), "failed", 3),
        (RuntimeError(closed), "lost", None),
        (TitaniteError("a shard is damaged"), "error", 3),
        (TitaniteError("loss nan", agreed=True), "error", None),
    ):
        with pytest.raises(type(error)), Watchdog(tmp_path, alone, Config()):
            raise_in_collective(error)
        record = read_exit(tmp_path)
        (tmp_path / "exit.json").unlink()
        assert record is not None
        assert (record["kind"], record["rank"]) == (kind, rank)
        assert ("exit: " in capsys.readouterr().err) == (kind != "error"), "train.py's main prints errors"


def test_memory_that_runs_out_is_blamed_on_nobody_else(tmp_path: Path) -> None:
    alone = LaunchEnvironment(rank=3, local_rank=3, world_size=4)
    message = "CUDA out of memory. Tried to allocate 2 GiB.\nand more"

    watchdog = Watchdog(tmp_path, alone, Config())
    watchdog.enter("forward/backward", step=7)
    with pytest.raises(torch.OutOfMemoryError), watchdog:
        raise_in_collective(torch.OutOfMemoryError(message))
    record = read_exit(tmp_path)
    assert record is not None
    assert (record["kind"], record["rank"], record["step"]) == ("failed", 3, 7)
    assert record["cause"].startswith(
        "CUDA out of memory. Tried to allocate 2 GiB.; a smaller training.local_batch_size"
    )


def start(config: Config, job: str, kind: str = "lost") -> Path:
    """One start of a job that ends so."""
    folder = choose_run_folder(config, {}, job)
    record_start(folder, config, {}, 2, job)
    record_exit(folder, exit_of(kind))
    return folder


def test_restarts_of_a_job_share_a_folder_until_it_is_done(tmp_path: Path) -> None:
    config = Config(run=Run(outputs=str(tmp_path)))
    first = start(config, "job-1")
    assert start(config, "job-1") == first
    assert start(config, "job-2") != first
    assert start(config, "") not in (first, start(config, ""))
    assert read_starts(first)[1]["after"]["cause"] == "rank 1 was lost"
    assert start(config, "job-1", "finished") == first
    assert start(config, "job-1", "finished") == first, "asked to stop in its last moments, and queued again"
    longer = dataclasses.replace(config, training=Training(steps=500))
    assert start(longer, "job-1") != first
    with pytest.raises(ConfigError, match=r"job 'job-2' began .* another model: .*give a new run a new --rdzv-id"):
        choose_run_folder(config, {"dim": 3}, "job-2")


def test_restarts_without_progress_are_refused(tmp_path: Path) -> None:
    config = Config(run=Run(outputs=str(tmp_path)))
    folder = start(config, "job-1")
    for _ in range(3):
        start(config, "job-1")
    record_progress(folder)
    for kind in ("lost", "stopped", "lost", "stopped", "finished", "lost", "lost"):
        start(config, "job-1", kind)
    (folder / "exit.json").unlink()
    for world_size in range(3, 9):  # nodes that join one after another
        record_start(folder, config, {}, world_size, "job-1")
    (folder / "exit.json").write_text('{"kind": "lost", "cause": "rank 1 was lost"}')
    with pytest.raises(CrashLoopError, match=r"starts of this job in a row .*: 4, .* the last one: rank 1 was lost"):
        start(config, "job-1")
    by_hand = dataclasses.replace(config, run=Run(folder=str(folder)))
    assert start(by_hand, "job-3") == folder, "a new job is a person's, who has mended it"


def test_slow_ranks_are_named_and_noise_is_not() -> None:
    usual = Timing("a", 0.1, 0.001)
    assert find_slow([usual, usual._replace(compute_seconds=0.14), usual, usual._replace(data_seconds=0.02)]) == {}
    slow = find_slow([usual, usual, usual._replace(host="b", compute_seconds=0.2)])
    assert list(slow) == [(2, "compute_seconds")]
    assert "rank 2 (b) needed 200.0 ms" in slow[2, "compute_seconds"]
    assert list(find_slow([usual._replace(data_seconds=0.5), usual])) == [(0, "data_seconds")]
