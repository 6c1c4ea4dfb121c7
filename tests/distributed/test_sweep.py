"""Sweeps: which runs a file asks for, mistakes before the first starts, failures, a stop in the middle, the tables."""

import contextlib
import csv
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest

from config import TitaniteError, from_dict, load_config
from run.folder import record_exit
from run.run import run_and_leave
from storage.records import read_records
from tests.harness import prepare_fork
from tests.runs import content, how_it_ended, read, validated
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
interval = 4
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
    folder, chains, _ = read_sweep(write_study(tmp_path, dataset, text))
    runs = [run for (run,) in chains]
    assert folder == tmp_path / "runs"
    wide = "dim=64,groups=pattern-norm-lr-2"
    assert [run.name for run in runs] == [
        f"seed={seed},lr={lr},{shape}"
        for seed in (3, 4)
        for lr in ("0.001", "0.5")
        for shape in ("dim=32,groups=", wide)
    ]
    last = runs[-1].config
    assert (last.training.seq_len, last.training.steps, last.optimizer.lr, last.run.seed) == (64, 4, 0.5, 4)
    assert (last.model.dim, last.optimizer.groups[0].lr) == (64, 2.0)
    assert last.run.folder == f"{tmp_path}/runs/{runs[-1].name}"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[grids]\noptimizer.lr = [1.0]", r"lab.toml: \[grids\]: must be a section"),
        ("[grid]\noptimizer.lrr = [1.0]", r"optimizer.lrr: unknown key; did you mean optimizer.lr"),
        ("[grid]\noptimizer.lr = [1.0, 'x']", 'optimizer.lr = "x": must be a number'),
        ("[grid]\noptimizer.lr = 1.0", "optimizer.lr = 1.0: needs a list"),
        ("[grid]\noptimizer.lr = []", "optimizer.lr = .*needs a list"),
        ('[grid]\nvalidation.sample_prompt = "abc"', "validation.sample_prompt = 'abc': needs a list"),
        ("[grid]\nrun.seed = [0]\n[[zip]]\nrun.seed = [1]", "run.seed: varies twice"),
        ("[grid]\nlr = [1.0]", "lr: must be a setting, as optimizer.lr without quotes"),
        ("[grid]\noptimizer.lr = [1.0, 1.0]", "lr=1.0: two runs would have this folder"),
        ("[grid]\nmodel.n_kv_heads = [2, 3]", "n_kv_heads=3: model.flavor = 'tiny' with .*n_kv_heads = 3"),
        ("[grid]\nmodel.dimm = [32]", "model.dimm: unknown key; did you mean model.dim"),
        ("[grid]\ntraining.global_batch_size = [2, 3]", "global_batch_size=3: training.global_batch_size = 3"),
        (
            "checkpoint.enable = false\n[grid]\nvalidation.average = [3]",
            "average=3: .*needs checkpoint.enable",
        ),
        ("[grid]\nparallelism.tp = [1, 2]", "tp=2: .*world size"),
        ("[grid]\ndata.datasets = [['nowhere']]", "datasets=nowhere: .*nowhere"),
        ("[[zip]]\noptimizer.lr = [1.0]\nrun.seed = [1, 2]", "optimizer.lr, run.seed: need lists of one length"),
        ("optimizer.lr = 1.0", "varies nothing"),
    ],
)
def test_a_mistake_is_found_before_any_run_starts(tmp_path, dataset, text, message):
    file = write_study(tmp_path, dataset, text)
    with pytest.raises(TitaniteError, match=message):
        main([str(file)])
    assert not (tmp_path / "runs").exists()


class Forked:
    """A run in a forked process, with what a study asks of a Popen. `after_step`: called there after each step."""

    after_step = staticmethod(lambda step: None)

    def __init__(self, run, world_size, place):
        self.returncode = None
        prepare_fork()
        self.pid = os.fork()
        if not self.pid:
            try:
                sys.stderr = run.beside(".log").open("a")  # pytest's own is not this process's
                run_and_leave(lambda: train(load_config([str(run.beside(".toml"))]), self.after_step))
            finally:
                os._exit(1)

    def poll(self):
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        if pid:
            self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self):
        os.waitpid(self.pid, 0)

    def terminate(self):
        os.kill(self.pid, signal.SIGTERM)


@pytest.fixture
def forked(monkeypatch):
    monkeypatch.setattr("tools.study.start", Forked)


def test_a_failure_stops_no_other_run_and_is_tried_again(tmp_path, dataset, forked, capsys):
    file = write_study(tmp_path, dataset, "[grid]\noptimizer.lr = [1e30, 0.01, 0.001]")
    assert main([str(file), "--dry-run"]) == 0
    assert not (tmp_path / "runs").exists()
    assert main([str(file), "--at-once=2"]) == 1
    said = capsys.readouterr().out
    log = tmp_path / "runs" / "lr=1e+30.log"
    assert "lr=1e+30: ended with exit code 2" in said
    assert f"not finished: lr=1e+30, its output: {log}; " in said
    assert "step 2: loss" in log.read_text()
    assert "finished: 2 of 3 runs" in said
    good = [tmp_path / "runs" / name for name in ("lr=0.01", "lr=0.001")]
    assert [how_it_ended(folder)["kind"] for folder in good] == ["finished", "finished"]
    with (tmp_path / "runs" / "sweep.csv").open() as table:
        rows = {line["run"]: line for line in csv.DictReader(table)}
    for folder in good:
        line = rows[folder.name]
        assert (line["finished"], line["steps"]) == ("True", "4")
        assert float(line["validation_loss"]) == validated(folder)[4]
    assert rows["lr=1e+30"]["finished"] == "False"
    before = [content(folder) for folder in good]
    assert main([str(file)]) == 1
    assert len(read(log.with_suffix(""), "starts.jsonl")) == 2
    assert [content(folder) for folder in good] == before
    (tmp_path / "runs").rename(tmp_path / "moved")
    moved = Path(shutil.copyfile(file, tmp_path / "moved.toml"))
    moved.write_text(file.read_text().replace("/runs", "/moved"))
    assert main([str(moved), "--dry-run"]) == 0, "the folder may be moved"
    (tmp_path / "moved").rename(tmp_path / "runs")
    shutil.move(dataset, dataset.with_name("gone"))
    try:
        assert main([str(file), "--page"]) == 1, "the page needs no data"
    finally:
        shutil.move(dataset.with_name("gone"), dataset)
    page = (tmp_path / "runs" / "sweep.html").read_text()
    assert "Not finished" in page
    file.write_text(file.read_text() + "\n[optimizer]\nbeta1 = 0.5")
    with pytest.raises(TitaniteError, match=r"lr=1e.30: began with other values of optimizer.beta1: name another"):
        main([str(file)])


def is_running(word):
    """Whether a process has this word in its command line."""
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has ended
            if word.encode() in file.read_bytes():
                return True
    return False


def stop_parent(step):
    if step == 3:
        os.kill(os.getppid(), signal.SIGINT)


@pytest.mark.parametrize("is_killed", [False, True])
def test_a_stopped_sweep_goes_on_where_it_was(tmp_path, dataset, forked, monkeypatch, is_killed):
    """By Ctrl-C, or killed while a run trains by run_llama_train.sh."""
    file = write_study(tmp_path, dataset, "[grid]\nrun.seed = [0]", steps=150)
    folder = tmp_path / "runs" / "seed=0"
    if is_killed:
        command = [sys.executable, "-m", "tools.sweep", str(file)]
        with subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"}) as sweep:
            while len(read_records(folder / "metrics.jsonl")) < 3:
                assert sweep.poll() is None
                time.sleep(0.05)
            sweep.kill()
        while is_running(f"{folder}.toml"):
            time.sleep(0.05)
    else:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it for what it starts by &
        monkeypatch.setattr(Forked, "after_step", staticmethod(stop_parent))
        with pytest.raises(KeyboardInterrupt):
            main([str(file)])
        monkeypatch.undo()
        monkeypatch.setattr("tools.study.start", Forked)
    assert how_it_ended(folder)["kind"] == "stopped"
    assert main([str(file)]) == 0
    assert [start["after"] and start["after"]["kind"] for start in read(folder, "starts.jsonl")] == [None, "stopped"]
    steps = [line["step"] for line in read(folder, "metrics.jsonl") if line["loss"] is not None]
    assert steps == list(range(1, 151)), "no step was trained twice"


def finished_run(folder, losses, lr, seed):
    """A run of 10 steps for each loss, recorded by hand."""
    values = {"optimizer.lr": lr, "run.seed": seed}
    name = name_values(values)
    config = from_dict({"run": {"folder": str(folder / name)}})
    lines = [row(10 * number, loss=loss, step_seconds=1.0) for number, loss in enumerate(losses, start=1)]
    write_run(folder / name, lines or [""], config)
    record_exit(folder / name, {"kind": "finished"})
    return Run(values, config)


def test_the_tables_of_a_sweep(tmp_path, capsys):
    runs = [
        finished_run(tmp_path, [4.0, 3.0], lr=0.1, seed=0),
        finished_run(tmp_path, [5.0, 4.0], lr=0.1, seed=1),
        finished_run(tmp_path, [5.5, 4.5, 2.5], lr=0.2, seed=0),
        finished_run(tmp_path, [9.0], lr=0.2, seed=1),
        finished_run(tmp_path, [], lr=0.3, seed=0),
    ]
    runs += [run._replace(config=from_dict({"run": {"folder": str(tmp_path / "new")}})) for run in runs[:1]]
    (runs[3].folder / "exit.json").write_text('{"kind": "error"}')
    write_results(tmp_path, runs)
    printed = capsys.readouterr().out
    lines = [line.split() for line in printed.partition("By loss")[2].splitlines()[2:4]]
    assert lines == [["lr=0.2", "1", "–", "2.5"], ["lr=0.1", "2", f"{statistics.stdev([3.0, 4.0]):.5g}", "3.5"]]
    assert "lr=0.2 leads lr=0.1 by 1, more than ±, 0.7071." in printed
    missing = [line.split() for line in printed.partition("Not finished")[2].splitlines()[2:4]]
    assert missing == [["lr=0.2,seed=1", "10", "error"], ["new", "0", "none", "recorded"]]
    with (tmp_path / "sweep.csv").open() as file:
        assert [line["loss"] for line in csv.DictReader(file)] == ["3.0", "4.0", "2.5", "9.0", "", ""]


def test_settings_of_one_last_part_are_named_whole():
    values = {"validation.interval": 5, "checkpoint.interval": 5, "run.seed": 0}
    assert name_values(values) == "validation.interval=5,checkpoint.interval=5,seed=0"


def test_runs_at_once_share_devices_and_threads(monkeypatch):
    monkeypatch.setattr("torch.accelerator.device_count", lambda: 4)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(16))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    places = share_devices(at_once=2, world_size=2)
    assert [place["CUDA_VISIBLE_DEVICES"] for place in places] == ["4,5", "6,7"]
    assert [place["OMP_NUM_THREADS"] for place in places] == ["4", "4"]
    places = share_devices(at_once=8, world_size=1)
    assert [place["CUDA_VISIBLE_DEVICES"] for place in places] == ["4", "5", "6", "7"] * 2


def test_what_begins_from_a_run_that_failed_is_not_started(tmp_path, monkeypatch):
    """A trunk without its end, and one that finishes: the branch of the second alone starts."""
    started = []

    class Ended:
        returncode = 0

        def __init__(self, run, *_):
            started.append(run.name)
            if run.name != "bad":
                run.folder.mkdir(parents=True)
                record_exit(run.folder, {"kind": "finished"})

        def poll(self):
            return 0

    monkeypatch.setattr("tools.study.start", Ended)
    names = (("bad", "bad-branch"), ("good", "good-branch"))
    chains = [[Run({}, from_dict({"run": {"folder": str(tmp_path / name)}})) for name in pair] for pair in names]
    train_all(chains, at_once=1, world_size=1)
    assert started == ["bad", "good", "good-branch"]
