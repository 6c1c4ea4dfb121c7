"""How a rank stops, hangs, fails and says why: run.stop, run.watchdog and run_and_leave."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from config import Config, ConfigError, TitaniteError
from run.failures import RolledBackError
from run.processes import LaunchEnvironment
from run.run import _explain, run_and_leave
from run.stop import StopRequest
from run.watchdog import End, Watchdog
from tests.harness import run_ranks
from tests.runs import how_it_ended

ROOT = Path(__file__).parents[2]


# ---------------------------------------------------------------- requests to stop


def votes(folder, asked):
    """Of two ranks on each node: the votes of two steps, whether only others leave, whether the job starts again."""
    rank = dist.get_rank()
    with StopRequest(folder, LaunchEnvironment(rank, rank % 2, dist.get_world_size())) as stop:
        stop.start(timeout_seconds=60)
        for how in asked.get(rank, ()):
            if isinstance(how, str):
                (folder / how).touch()
            else:
                os.kill(os.getpid(), how)
        voted = [stop.agreed(), stop.agreed()]
    return voted, stop.elsewhere, stop.again


@pytest.mark.parametrize(
    ("asked", "others", "again"),
    [
        ({2: (signal.SIGTERM,), 3: (signal.SIGTERM,)}, [0, 1], True),
        (dict.fromkeys(range(4), (signal.SIGTERM,)), [], True),
        ({3: (signal.SIGUSR1,)}, [], True),
        ({3: (signal.SIGTERM, signal.SIGINT)}, [], False),
        ({0: ("stop",), 3: (signal.SIGTERM,)}, [], False),
    ],
)
def test_ranks_agree_who_leaves_after_the_step_and_whether_the_job_starts_again(asked, others, again, tmp_path):
    """The scheduler starts a job again that it has ended itself, whichever of its ranks it told; not a person's."""
    found = run_ranks(4, votes, tmp_path, asked)
    assert found == [([False, True], rank in others, again) for rank in range(4)]
    assert not list(tmp_path.iterdir()), "the file is gone once it is obeyed"


def leave_by(error, folder, asked_by):
    """Leave the context by an error on rank 1 alone, which was asked to stop; the others wait for it elsewhere."""
    rank, said = dist.get_rank(), ""
    stop = StopRequest(folder, LaunchEnvironment(rank, rank, 2))
    stop.start(timeout_seconds=5)
    if rank == 1:
        with contextlib.suppress(type(error)), stop:
            os.kill(os.getpid(), asked_by)
            raise error
        said = "failed"
    dist.barrier()
    return said


def test_a_rank_that_fails_waits_for_no_other(tmp_path):
    for error, asked_by in ((RuntimeError("broken"), signal.SIGUSR1), (ConfigError("wrong"), signal.SIGTERM)):
        assert run_ranks(2, leave_by, error, tmp_path, asked_by) == ["", "failed"]


def test_a_rank_that_torchrun_ends_since_another_failed_says_nothing(tmp_path):
    with pytest.raises(AssertionError, match=r"rank 1 ended with 143\n\(ended before it could say why\)"):
        run_ranks(2, leave_by, RuntimeError("Connection closed by peer"), tmp_path, signal.SIGTERM)


# ---------------------------------------------------------------- why a run ends


def raise_in_collective(error):
    """Raise `error` as if by code of torch.distributed."""
    scope = {}
    exec(compile("def fail(error):\n    raise error", "/site-packages/torch/distributed/tensor/x.py", "exec"), scope)
    scope["fail"](error)


ENDS = [  # error, kind, rank, start_again (what a scheduler is told), cause
    (RuntimeError("The size of tensor a (3) must match"), "failed", 0, False, "RuntimeError: The size of tensor a"),
    (RuntimeError("[gloo/transport/tcp/pair.cc:544] Connection closed by peer"), "lost", None, True, "a rank on"),
    (TitaniteError("a shard is damaged"), "error", 0, False, "a shard is damaged"),
    (TitaniteError("loss nan", agreed=True), "error", None, False, "loss nan"),
    (torch.OutOfMemoryError("CUDA out of memory.\nand more"), "failed", 0, False, "CUDA out of memory.; a smaller"),
    (torch.AcceleratorError("CUDA error: out of memory\nand more"), "failed", 0, False, "CUDA error: out of memory; a"),
    (torch.AcceleratorError("CUDA error: an illegal\nand more"), "failed", 0, True, "AcceleratorError: CUDA error: an"),
    (KeyboardInterrupt(), "failed", 0, False, "KeyboardInterrupt"),
]


def explain_all(folder):
    """Each of the errors, and a consequence of it, in a folder of its own."""
    environment = LaunchEnvironment(rank=0, local_rank=0, world_size=1, max_restarts=1)
    for number, (error, *_) in enumerate(ENDS):
        (folder / str(number)).mkdir()
        watchdog = Watchdog(folder / str(number), environment, Config())
        watchdog.enter("training", step=7)
        watchdog.last_checkpoint = 5
        for raised in (error, ValueError("a consequence")):
            try:
                with watchdog.section("forward/backward"):
                    raise_in_collective(raised)
            except BaseException as caught:
                watchdog.explain(type(caught), caught, caught.__traceback__)


def test_the_first_who_knows_the_cause_writes_it(tmp_path, capfd, monkeypatch):
    """And prints it, unless run_and_leave does."""
    monkeypatch.setattr("run.watchdog.LOST_SECONDS", 0.0)
    run_ranks(1, explain_all, tmp_path)
    for number, (_, kind, rank, again, cause) in enumerate(ENDS):
        record = how_it_ended(tmp_path / str(number))
        assert (record["kind"], record["rank"], record["start_again"]) == (kind, rank, again)
        assert record["cause"].startswith(cause)
        assert (record["step"], record["last_checkpoint"]) == (7, 5)
    lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("exit: ")]
    assert len(lines) == sum(kind != "error" for _, kind, *_ in ENDS)
    for line in lines:
        assert "forward/backward of step 7); last checkpoint step 5; next: torchrun starts the job again" in line


def stop_by_hand(folder):
    rank = dist.get_rank()
    watchdog = Watchdog(folder, LaunchEnvironment(rank, rank, 2, local_world_size=2), Config())
    watchdog.announce(End("stopped", "by hand"))


def test_a_stopped_run_says_what_to_type_to_go_on(tmp_path):
    run_ranks(2, stop_by_hand, tmp_path)
    command = f"NGPU=2 ./run_llama_train.sh --resume {tmp_path}"
    assert how_it_ended(tmp_path)["next_action"] == f"go on with {command}"


def lose_the_other(folder):
    """The second of two ranks is killed, and the first waits for it in a collective."""
    rank = dist.get_rank()
    watchdog = Watchdog(folder, LaunchEnvironment(rank, rank, 2, local_world_size=2), Config())
    watchdog.enter("training", step=3)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RuntimeError) as caught:
        dist.barrier()
    watchdog.explain(RuntimeError, caught.value, caught.tb)


def test_a_rank_that_was_lost_in_a_collective_is_named(tmp_path):
    with pytest.raises(AssertionError, match="rank 1 ended with -9"):
        run_ranks(2, lose_the_other, tmp_path)
    record = how_it_ended(tmp_path)
    assert record["cause"].startswith("rank 1 was lost")
    assert (record["kind"], record["rank"], record["step"], record["start_again"]) == ("lost", 1, 3, True)


@pytest.mark.parametrize(
    ("ended", "code", "said"),
    [
        (None, 0, ""),
        (RuntimeError("broken"), 1, "RuntimeError: broken\n"),
        (KeyboardInterrupt(), 130, ""),
        (ConfigError("no"), 2, "error: no\n"),
        (RolledBackError("a bad step"), 75, ""),
    ],
)
def test_a_process_ends_with_its_exit_code_and_waits_for_no_thread(
    ended, code, said,
    capfd, monkeypatch,
):  # fmt: skip
    monkeypatch.setattr(dist, "barrier", lambda: None)

    def main():
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


# ---------------------------------------------------------------- torchrun


def ended_for_good(errors):
    """Whether this rank, after each error, tells torchrun to start no rank again."""
    os.environ["TORCHELASTIC_MAX_RESTARTS"] = "1"
    found = []
    for error in errors:
        with mock.patch("os.kill") as kill:
            _explain(error)
        found.append(kill.called)
    return found


def test_torchrun_does_not_repeat_what_would_fail_again():
    errors = [ConfigError("a setting", agreed=True), TitaniteError("a loss", agreed=True)]
    assert run_ranks(1, ended_for_good, errors) == [[True, False]]


WAITING = """
import os, threading
from config import Comm
from run.processes import init_distributed, launch_environment
init_distributed(launch_environment(), Comm())
os.write(1, b'began\\n')  # in one piece, beside the other rank's
threading.Event().wait()
"""


def test_ranks_end_with_their_torchrun(tmp_path):
    """One that is killed. Otherwise they would train on beside the job that replaces theirs."""
    (tmp_path / "rank.py").write_text(WAITING)
    words = ["--standalone", "--nproc-per-node=2", str(tmp_path / "rank.py")]
    process = subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", *words],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"},
        text=True,
        stdout=subprocess.PIPE,
    )
    assert process.stdout
    assert [process.stdout.readline() for _ in range(2)] == ["began\n"] * 2
    process.kill()
    assert process.stdout.read() == "", "the pipe is closed once all are gone"
