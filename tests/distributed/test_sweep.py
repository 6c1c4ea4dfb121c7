"""Sweeps: which runs a file asks for, mistakes before the first starts, failures, a stop in the middle, the tables."""

import asyncio
import itertools
import os
import signal
import statistics
import sys
from pathlib import Path

import pytest

from config import TitaniteError, from_dict, load_config
from run.folder import record_exit
from run.run import run_and_leave
from tests.harness import prepare_fork
from tests.runs import content, how_it_ended, read
from tests.unit.test_metrics_page import row, write_run
from tools.study import Run, name_values, share_devices, train_all
from tools.sweep import main, read_sweep, write_results
from train import train

SMALL_RUN = """
[model]
flavor = "tiny"
n_layers = 1
[data]
datasets = ["{dataset}"]
[training]
steps = {steps}
seq_len = 32
local_batch_size = 2
param_dtype = "float32"
[lr_scheduler]
warmup_steps = 1
[validation]
interval = 100
max_samples = 4
[checkpoint]
interval = 4
[metrics]
log_interval = 1
tensorboard = false
"""
SWEEP = """
base = "base.toml"
folder = "{folder}/runs"
"""


def write_study(folder, dataset, text, steps=4):
    (folder / "base.toml").write_text(SMALL_RUN.format(dataset=dataset, steps=steps))
    file = folder / "lab.toml"
    file.write_text(SWEEP.format(folder=folder) + text)
    return file


def test_the_runs_of_a_sweep(tmp_path, dataset):
    text = """training.seq_len = 64
    [grid]
    run.seed = [3, 4]
    optimizer.lr = [0.001, 0.5]
    [[zip]]
    model.dim = [32, 64]
    optimizer.groups = [[], [{pattern = "*norm*", lr = 2}]]
    """
    folder, chains = read_sweep(write_study(tmp_path, dataset, text))
    runs = [run for (run,) in chains]
    assert folder == tmp_path / "runs"
    shapes = ["model.dim=32,optimizer.groups=-", "model.dim=64,optimizer.groups=-pattern-norm-lr-2-"]
    choices = itertools.product((3, 4), ("0.001", "0.5"), shapes)
    assert [run.name for run in runs] == [f"run.seed={seed},optimizer.lr={lr},{shape}" for seed, lr, shape in choices]
    last = runs[-1].config
    assert (last.training.seq_len, last.training.steps, last.optimizer.lr, last.run.seed) == (64, 4, 0.5, 4)
    assert (last.model.dim, last.optimizer.groups[0].lr) == (64, 2.0)
    assert last.run.folder == f"{tmp_path}/runs/{runs[-1].name}"


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[grids]\noptimizer.lr = [1.0]", r"lab.toml: \[grids\]"),
        ("[grid]\noptimizer.lrr = [1.0]", r"optimizer.lrr: .*optimizer.lr\?"),
        ("[grid]\noptimizer.lr = 1.0", "optimizer.lr = 1.0"),
        ("[grid]\noptimizer.lr = []", "optimizer.lr = "),
        ('[grid]\nvalidation.sample_prompt = "abc"', "validation.sample_prompt = 'abc'"),
        ("[grid]\nrun.seed = [0]\n[[zip]]\nrun.seed = [1]", "run.seed: .*twice"),
        ("[grid]\nrun.folder = ['a']", "run.folder"),
        ("[grid]\nlr = [1.0]", "lr: .*optimizer.lr"),
        ("[grid]\noptimizer.lr = [1.0, 1.0]", "lr=1.0: .*folder"),
        ("[grid]\ntraining.global_batch_size = [2, 3]", "global_batch_size=3: training.global_batch_size = 3"),
        ("[grid]\nparallelism.tp = [1, 2]", "tp=2: .*world size"),
        ("[grid]\ndata.datasets = [['nowhere']]", "datasets=-nowhere-: .*nowhere"),
        ("[[zip]]\noptimizer.lr = [1.0]\nrun.seed = [1, 2]", "optimizer.lr, run.seed"),
        ("optimizer.lr = 1.0", "lab.toml: .*grid"),
    ],
)
def test_a_mistake_is_found_before_any_run_starts(tmp_path, dataset, text, named):
    file = write_study(tmp_path, dataset, text)
    with pytest.raises(TitaniteError, match=named):
        main([str(file)])
    assert not (tmp_path / "runs").exists()


class Forked:
    """A run in a forked process, as asyncio has a child."""

    def __init__(self, file, log):
        prepare_fork()
        self.pid = os.fork()
        if not self.pid:
            try:
                sys.stderr = open(log.name, "a")  # noqa: SIM115  # pytest's own is not this process's
                run_and_leave(lambda: train(load_config([file])))
            finally:
                os._exit(1)

    async def wait(self):
        while True:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                return os.waitstatus_to_exitcode(status)
            await asyncio.sleep(0.05)


async def start_forked(script, file, stdout, **options):
    return Forked(file, stdout)


@pytest.fixture
def forked(monkeypatch):
    monkeypatch.setattr("asyncio.create_subprocess_exec", start_forked)


def test_a_failure_stops_no_other_run_and_is_tried_again(tmp_path, dataset, forked, capsys):
    file = write_study(tmp_path, dataset, "[grid]\noptimizer.lr = [1e30, 0.01, 0.001]")
    runs = tmp_path / "runs"
    assert main([str(file), "--dry-run"]) == 0
    assert not runs.exists()
    assert main([str(file), "--at-once=2"]) == 1
    said = capsys.readouterr().out
    log = runs / "optimizer.lr=1e+30.log"
    assert f"optimizer.lr=1e+30: ended with exit code 2, its output: {log}" in said
    assert "not finished: optimizer.lr=1e+30: step 2: loss" in said
    assert "step 2: loss" in log.read_text()
    assert "finished: 2 of 3 runs" in said
    good = [runs / f"optimizer.lr={rate}" for rate in (0.01, 0.001)]
    assert [how_it_ended(folder)["kind"] for folder in good] == ["finished", "finished"]
    before = [content(folder) for folder in good]
    assert main([str(file)]) == 1
    assert len(read(log.with_suffix(""), "starts.jsonl")) == 2
    assert [content(folder) for folder in good] == before
    moved = tmp_path / "moved.toml"
    moved.write_text(file.read_text().replace("/runs", "/moved"))
    runs.rename(tmp_path / "moved")
    assert main([str(moved), "--dry-run"]) == 0, "the folder may be moved"
    other = tmp_path / "other.toml"
    other.write_text(moved.read_text() + "\n[optimizer]\nbeta1 = 0.5")
    with pytest.raises(TitaniteError, match=r"lr=1e.30: .*optimizer.beta1"):
        main([str(other)])
    (tmp_path / "base.toml").write_text(SMALL_RUN.format(dataset=tmp_path / "gone", steps=4))
    assert main([str(moved), "--page"]) == 1, "the page needs no data"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_stopped_sweep_lets_its_run_save(tmp_path, dataset, monkeypatch, number):
    """By Ctrl-C it waits for that. The run is a script in its place, which tells through a pipe what happens to it."""
    file = write_study(tmp_path, dataset, "[grid]\nrun.seed = [0]")
    script = tmp_path / "run_llama_train.sh"
    script.write_text(
        f"""#!/bin/bash
        exec >{tmp_path}/told
        trap 'kill $!; sleep 0.5; echo saved; exit' TERM  # which takes a while
        sleep 20 >/dev/null &
        read <{tmp_path}/started
        echo $1 processes $NGPU
        wait"""
    )
    script.chmod(0o755)
    for pipe in ("told", "started"):
        os.mkfifo(tmp_path / pipe)
    monkeypatch.chdir(tmp_path)
    start = asyncio.create_subprocess_exec

    async def start_and_tell(*words, **options):
        child = await start(*words, **options)
        Path("started").write_text("\n")
        return child

    monkeypatch.setattr("asyncio.create_subprocess_exec", start_and_tell)
    prepare_fork()
    pid = os.fork()
    if not pid:
        try:
            signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it for what it starts by &
            main([str(file), "--processes=2"])
        finally:
            os._exit(1)
    with (tmp_path / "told").open() as told:
        assert told.readline() == f"{tmp_path}/runs/run.seed=0.toml processes 2\n"
        os.kill(pid, number)
        os.waitpid(pid, 0)
        os.set_blocking(told.fileno(), number == signal.SIGKILL)
        assert told.read() == "saved\n"


def test_the_tables_of_a_sweep(tmp_path, capsys):
    """Of runs recorded by hand: rate, seed, their end and the loss of every 10 steps."""
    recorded = [
        (0.1, 0, "finished", [4.0, 3.0]),
        (0.1, 1, "finished", [5.0, 4.0]),
        (0.2, 0, "finished", [5.5, 4.5, 2.5]),
        (0.2, 1, "failed", [9.0]),
        (0.3, 0, "finished", []),
    ]
    runs = [Run({"run.seed": 9}, from_dict({"run": {"folder": str(tmp_path / "new")}}))]
    for rate, seed, kind, losses in recorded:
        values = {"optimizer.lr": rate, "run.seed": seed}
        runs.append(Run(values, from_dict({"run": {"folder": str(tmp_path / name_values(values))}})))
        lines = [row(10 * number, loss=loss, step_seconds=1.0) for number, loss in enumerate(losses, start=1)]
        write_run(runs[-1].folder, lines or [""], runs[-1].config)
        record_exit(runs[-1].folder, {"kind": kind, "cause": "CUDA error"})
    write_results(tmp_path, runs)
    printed = capsys.readouterr().out
    lines = [line.split() for line in printed.partition("By loss")[2].splitlines()[2:4]]
    deviation = f"{statistics.stdev([3.0, 4.0]):.5g}"
    assert lines == [["optimizer.lr=0.2", "1", "–", "2.5"], ["optimizer.lr=0.1", "2", deviation, "3.5"]]
    missing = [line.split()[:2] for line in printed.partition("Not finished")[2].splitlines()[2:4]]
    assert missing == [["new", "no"], ["optimizer.lr=0.2,run.seed=1", "CUDA"]]
    assert "Not finished" in (tmp_path / "sweep.html").read_text()


def test_runs_at_once_share_devices_and_threads(monkeypatch):
    monkeypatch.setattr("torch.accelerator.device_count", lambda: 4)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(16))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    places = share_devices(at_once=2, world_size=2)
    assert [place["CUDA_VISIBLE_DEVICES"] for place in places] == ["4,5", "6,7"]
    assert [(place["NGPU"], place["OMP_NUM_THREADS"]) for place in places] == [("2", "4")] * 2
    places = share_devices(at_once=8, world_size=1)
    assert [place["CUDA_VISIBLE_DEVICES"] for place in places] == ["4", "5", "6", "7"] * 2


def test_what_begins_from_a_run_that_failed_is_not_started(tmp_path, monkeypatch):
    """A trunk without its end, and one that finishes: the branch of the second alone starts."""
    started = []

    async def end_at_once(run, place):
        started.append(run.name)
        if run.name != "bad":
            run.folder.mkdir(parents=True)
            record_exit(run.folder, {"kind": "finished"})

    monkeypatch.setattr("tools.study.train_run", end_at_once)
    names = (("bad", "bad-branch"), ("good", "good-branch"))
    chains = [[Run({}, from_dict({"run": {"folder": str(tmp_path / name)}})) for name in pair] for pair in names]
    asyncio.run(train_all(chains, at_once=1, world_size=1))
    assert started == ["bad", "good", "good-branch"]
