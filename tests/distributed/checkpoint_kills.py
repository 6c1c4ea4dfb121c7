"""SIGKILL at random moments of saves, and the proof that what is left is whole: for disk and S3.

KILLS=200 python -m pytest tests/distributed/test_checkpoint_kills.py
"""

import os
import random
import signal
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist

from tests.distributed.checkpoint_runs import Run
from tests.harness import run_ranks

KILLS = int(os.environ.get("KILLS", "12"))


def survive_kills(url, kills, mode):
    """Kill one or both of two saving ranks `kills` times; after each, load. Returns the number of kills amid a save.

    Asserts that every load succeeds, of a step not older than the last one that was reported as saved, and that
    every tensor it brings is of that step.
    """
    rng, amid = random.Random(0), 0
    for number in range(kills):
        with tempfile.TemporaryDirectory() as folder:
            progress = Path(folder) / "progress"
            progress.touch()
            launcher = os.fork() or _launch(url, mode, folder)
            while "saved" not in progress.read_text():
                assert os.waitpid(launcher, os.WNOHANG) == (0, 0), (Path(folder) / "error").read_text()
                time.sleep(0.005)
            time.sleep(rng.uniform(0, 0.15))
            ranks = [int((Path(folder) / f"pid{rank}").read_text()) for rank in range(2)]
            for rank in rng.choice([ranks, ranks[:1], ranks[1:]]):
                os.kill(rank, signal.SIGKILL)
            lines = progress.read_text().split()
            time.sleep(0.02)
            for rank in ranks:
                with suppress(ProcessLookupError):
                    os.kill(rank, signal.SIGKILL)
            os.waitpid(launcher, 0)
        amid += lines[-2].startswith("begin")
        run = Run(url, seed=number)
        run.checkpoint.load()
        step = run.data.samples
        reported = max(int(step) for event, step in zip(lines[::2], lines[1::2], strict=True) if event == "saved")
        assert step >= reported
        state = {name: value for name, value in run.everything().items() if isinstance(value, torch.Tensor)}
        assert [name for name, value in state.items() if name != "random" and not (value == step).all()] == []
    return amid


def _launch(url, mode, folder):
    """The process above two ranks that save; never returns."""
    try:
        run_ranks(2, save_forever, url, mode, folder)
    except AssertionError as error:
        (Path(folder) / "error").write_text(str(error))
    finally:
        os._exit(0)


def save_forever(url, mode, folder):
    """Save, as fast as it goes, states that are filled with the number of their step."""
    (Path(folder) / f"pid{dist.get_rank()}").write_text(str(os.getpid()))
    run = Run(url, sharded=True, interval=1, keep=2, mode=mode)
    step = run.checkpoint.load()
    if not run.optimizer.state:
        run.step()
    with open(Path(folder) / "progress", "a") as log:
        while True:
            step += 1
            fill(run, step)
            if dist.get_rank() == 0:
                log.write(f"begin {step}\n")
                log.flush()
            run.checkpoint.save(step)
            run.checkpoint.wait()
            if dist.get_rank() == 0:
                log.write(f"saved {step}\n")
                log.flush()


def fill(run, step):
    """Every number of the state becomes `step`."""
    run.data.samples = step
    with torch.no_grad():
        for parameter in run.model.parameters():
            parameter.fill_(step)
            for value in run.optimizer.state[parameter].values():
                value.fill_(step)
