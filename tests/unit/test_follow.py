"""The follower of a run on small runs, with a harness whose score is made of the exported weights' bytes."""

import argparse
import hashlib
import os
import re
import shutil
import signal
import sys
import time
from pathlib import Path
from statistics import mean, stdev
from types import SimpleNamespace

import pytest

from checkpoint.loading import locate
from checkpoint.manifest import MANIFEST, step_of
from config import TitaniteError
from run.folder import hold
from storage.records import read_records
from tests.corpus import write_dataset
from tests.runs import SMALL, content, launch
from tools import follow as module
from tools.compare import read_charts
from tools.follow import follow
from tools.hf import export_model

HARNESS = """
import hashlib, json, os, pathlib, signal, sys
model, tests, results = map(pathlib.Path, (sys.argv[1], sys.argv[2], sys.argv[3].partition("=")[2]))
if (tests / "kill").exists():
    (tests / "kill").unlink()
    alive = open(tests / "alive", "wb")
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
    signal.alarm(20)
    os.kill(os.getppid(), signal.SIGKILL)
    signal.sigwait([signal.SIGALRM])
    alive.write(b"still there")
if (tests / "fail").exists():
    sys.exit("out of memory")
digits = int(hashlib.sha256((model / "model.safetensors").read_bytes()).hexdigest(), 16) % 10**6
figures = {"alias": "t", "acc,none": digits, "acc_stderr,none": 0.5, "ppl,strict": float("inf")}
found = {"results": {"t": figures, "t_part": figures}, "group_subtasks": {"t": ["t_part"], "t_part": []}}
(results / "results_1.json").write_text(json.dumps(found))
"""


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    """Settings of a run of 4 steps with a checkpoint of each."""
    documents = [[[*range(first, first + 30), 0] for first in range(1, 900, 30)]]
    dataset = write_dataset(tmp_path_factory.mktemp("data"), documents)
    own = ["--training.steps=4", "--training.seq_len=16", "--training.global_batch_size=2", "--checkpoint.interval=1"]
    return [*SMALL, *own, f"--data.datasets={dataset}", "--validation.enable=false", "--metrics.log_interval=1"]


@pytest.fixture(scope="module")
def whole_run(settings, tmp_path_factory):
    """A run that has ended."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    launch(1, folder, settings)
    return folder


@pytest.fixture
def run(whole_run, tmp_path):
    """The same run, moved, so that a test may change it."""
    return Path(shutil.copytree(whole_run, tmp_path / "run"))


def followed(run, asked="t", **options):
    """Follow the run to its end. Returns the rows."""
    harness = run.parent / "harness.py"
    harness.write_text(HARNESS)
    names = {"place": str(run), "output_path": None, "poll_seconds": 0.01}
    arguments = argparse.Namespace(**names | {"dtype": "float32", "tokenizer": ""} | options)
    follow(arguments, asked, lambda folder: [sys.executable, str(harness), str(folder), str(run.parent)])
    return read_records(run / "scores" / "scores.jsonl")


def score_of(run, step, folder):
    export_model(f"{run}@{step}", folder / f"own-{step}", dtype="float32")
    digest = hashlib.sha256((folder / f"own-{step}" / "model.safetensors").read_bytes()).hexdigest()
    return int(digest, 16) % 10**6


def test_a_name_without_a_run_is_said(run, caplog, monkeypatch):
    class Waited(Exception):
        pass

    def wait(seconds):
        raise Waited

    monkeypatch.setattr(module, "time", SimpleNamespace(sleep=wait))
    with pytest.raises(Waited):
        followed(run.with_name("rum"))
    assert f"did you mean {run}" in caplog.text


def test_a_run_that_has_ended_is_evaluated_to_its_end_and_not_touched(run, tmp_path, monkeypatch, caplog):
    before = content(run)
    monkeypatch.setattr(module, "RECENT", 3)
    with caplog.at_level("INFO"):
        rows = followed(run)
    assert {path: data for path, data in content(run).items() if path.relative_to(run).parts[0] != "scores"} == before
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    scores = [score_of(run, step, tmp_path) for step in (1, 2, 3, 4)]
    assert [row["scores/t/acc"] for row in rows] == scores
    assert [key for key in rows[0] if key.startswith("scores/")] == ["scores/t/acc"], "neither parts nor infinity"
    line = f"step 4  t/acc {scores[3]:.4f}  last 3: {mean(scores[1:]):.4f} ± {stdev(scores[1:]):.4f}"
    assert line in caplog.messages
    assert followed(run) == rows, "once each"
    assert len(followed(run, asked="t 5-shot")) == 8
    charts = read_charts(run)
    assert [point[:2] for point in charts["scores/t/acc"][::2]] == [(step, 32 * step) for step in (1, 2, 3, 4)]
    assert [value for *_, value in charts["scores/t/acc"][::2]] == scores


KILLS = {
    "exporting": lambda patch: patch.setattr("tools.hf.compare_logits", die),
    "evaluated": lambda patch: patch.setattr(module, "report", die),
    "reported": lambda patch: patch.setattr(module, "shutil", SimpleNamespace(rmtree=die_if_reported)),
    "evaluating": lambda patch: None,
}


def die(*arguments, **more):
    os.kill(os.getpid(), signal.SIGKILL)


def die_if_reported(folder, **more):
    if folder.name == "exported":
        die()


@pytest.mark.parametrize("moment", KILLS)
def test_a_follower_that_was_killed_goes_on(run, tmp_path, moment, monkeypatch):
    """Its harness ends with it."""
    expected = score_of(run, 1, tmp_path)
    if moment == "evaluating":
        (tmp_path / "kill").touch()
        os.mkfifo(tmp_path / "alive")
    pid = os.fork()
    if not pid:
        try:
            KILLS[moment](monkeypatch)
            followed(run)
        finally:
            os._exit(1)
    if moment == "evaluating":
        assert (tmp_path / "alive").read_bytes() == b""  # ends with the last process that has it open
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    rows = followed(run)
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert rows[0]["scores/t/acc"] == expected
    assert [*(run / "scores").glob("exported*")] == []


@pytest.mark.parametrize(("step", "during"), [(2, False), (2, True), (4, True)])
def test_a_checkpoint_that_was_removed_is_skipped(run, step, during, monkeypatch, caplog):
    removed = sorted(name for _, name in locate(run))[step - 1]
    read = module.open_checkpoint

    def read_and_remove(store, name):
        opened = read(store, name)
        if name == removed:
            shutil.rmtree(run / "checkpoints" / name)
        return opened

    if during:
        monkeypatch.setattr(module, "open_checkpoint", read_and_remove)
    else:
        shutil.rmtree(run / "checkpoints" / removed)
    assert [row["step"] for row in followed(run)] == [other for other in (1, 2, 3, 4) if other != step]
    own = [record for record in caplog.records if record.name == module.__name__]
    warnings = [record.getMessage() for record in own if record.levelname == "WARNING"]
    assert len(warnings) == during, "of one that was gone before, nothing is left to know it by"
    for line in warnings:
        assert re.fullmatch(rf"{removed}: skipped, since it was removed or is damaged: .*{removed}/.*: missing", line)


def test_what_is_committed_between_a_look_and_the_end_is_evaluated(run, monkeypatch):
    """A first look finds the last checkpoint uncommitted; the manifest and the run's end come right after it."""
    last = max(name for _, name in locate(run))
    late = {run / "exit.json": b"", run / "checkpoints" / last / MANIFEST: b""}
    for path in late:
        late[path] = path.read_bytes()
        path.unlink()
    look = module.committed
    found = []

    def look_and_end(store):
        names = list(look(store))
        found.append(sorted(step_of(name) for name in names))
        for path, data in late.items():
            path.write_bytes(data)
        return names

    monkeypatch.setattr(module, "committed", look_and_end)
    assert [row["step"] for row in followed(run)] == [1, 2, 3, 4]
    assert found == [[1, 2, 3], [1, 2, 3, 4]]


def test_it_waits_for_a_run_and_its_checkpoints(settings, tmp_path, monkeypatch):
    """A run of one start after another, in a folder that is not there at first, with only two checkpoints kept."""
    run = tmp_path / "run"
    ends = ["", '{"kind": "lost", "start_again": true}', '{"kind": "stopped", "start_again": true}', "", ""]
    seen = []

    def start_again():
        assert {path.name for path in tmp_path.iterdir()} <= {"run", "harness.py"}
        seen.append([row["step"] for row in read_records(run / "scores" / "scores.jsonl")])
        last = len(seen)
        more = [f"--training.steps={last}", "--checkpoint.keep=2"]
        launch(1, run, [*settings, *more])
        if last < 5:
            (run / "exit.json").write_text(ends[last])
        if last == 3:
            (run / "exit.json").unlink()  # all ranks were killed

    clock = SimpleNamespace(time=time.time, sleep=lambda seconds: start_again())
    monkeypatch.setattr(module, "time", clock)
    assert [row["step"] for row in followed(run)] == [1, 2, 3, 4, 5]
    assert seen == [[], [1], [1, 2], [1, 2, 3], [1, 2, 3, 4]]


def test_after_a_failure_of_the_harness_it_goes_on(run):
    (run.parent / "fail").touch()
    with pytest.raises(TitaniteError, match=r"step-00000001-.*/lm-eval.log: lm-eval ended with exit code 1; start"):
        followed(run)
    (log,) = (run / "scores").glob("step-*/lm-eval.log")
    assert "out of memory" in log.read_text()
    (run.parent / "fail").unlink()
    assert len(followed(run)) == 4


def test_two_followers_do_not_add_scores_to_one_folder(run):
    (run / "scores").mkdir()
    asked, told = os.pipe()
    pid = os.fork()
    if not pid:
        hold(run / "scores" / ".following")
        os.write(told, b".")
        signal.pause()
    os.read(asked, 1)
    with pytest.raises(TitaniteError, match=f"process {pid} adds scores there already"):
        followed(run)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert len(followed(run, output_path=str(run / "scores-2"))) == 0
    assert len(read_records(run / "scores-2" / "scores.jsonl")) == 4
