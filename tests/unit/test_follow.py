"""The follower of a run on small runs, with a harness whose score is made of the exported weights' bytes."""

import argparse
import hashlib
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from checkpoint.loading import locate
from checkpoint.manifest import MANIFEST, step_of
from config import TitaniteError
from storage.records import read_records
from tests.corpus import write_dataset
from tests.runs import SMALL, content, launch
from tools import evaluate as module
from tools.compare import read_charts
from tools.evaluate import follow
from tools.hf import export_model

HARNESS = """
import hashlib, json, os, pathlib, signal, sys
words = dict(word.split("=", 1) for word in sys.argv[1:] if "=" in word)
model = pathlib.Path(words["--model_args"].split("=")[1].split(",")[0])
results = pathlib.Path(words["--output_path"])
tests = pathlib.Path(__file__).parent
results.mkdir()
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
    """Settings of a run of 3 steps with a checkpoint of each."""
    documents = [[[*range(first, first + 30), 0] for first in range(1, 900, 30)]]
    dataset = write_dataset(tmp_path_factory.mktemp("data"), documents)
    own = ["--training.steps=3", "--training.seq_len=16", "--training.global_batch_size=2", "--checkpoint.interval=1"]
    return [*SMALL, *own, f"--data.datasets={dataset}", "--validation.enable=false"]


@pytest.fixture(scope="module")
def whole_run(settings, tmp_path_factory):
    """A run that has ended."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    launch(1, folder, settings)
    return folder


@pytest.fixture
def harness(tmp_path, monkeypatch):
    """The stand-in for lm-eval."""
    file = tmp_path / "harness.py"
    file.write_text(HARNESS)

    def start_harness(words, preexec_fn):
        return subprocess.run([sys.executable, file, *words], preexec_fn=preexec_fn)

    monkeypatch.setattr(module, "subprocess", SimpleNamespace(run=start_harness))


@pytest.fixture
def run(whole_run, tmp_path, harness):
    """The same run, moved, so that a test may change it, beside the harness that evaluates it."""
    return Path(shutil.copytree(whole_run, tmp_path / "run"))


def followed(run, *options, output_path=None):
    """Follow the run to its end. Returns the rows."""
    names = {"place": str(run), "output_path": output_path, "tasks": "t", "dtype": "float32", "tokenizer": ""}
    follow(argparse.Namespace(**names), options)
    return read_records(Path(output_path or run / "scores") / "scores.jsonl")


def score_of(run, step, folder):
    export_model(f"{run}@{step}", folder / f"own-{step}", dtype="float32")
    digest = hashlib.sha256((folder / f"own-{step}" / "model.safetensors").read_bytes()).hexdigest()
    return int(digest, 16) % 10**6


def test_a_run_that_has_ended_is_evaluated_to_its_end_and_not_touched(run, tmp_path):
    before = content(run)
    rows = followed(run)
    assert {path: data for path, data in content(run).items() if path.relative_to(run).parts[0] != "scores"} == before
    assert [row["step"] for row in rows] == [1, 2, 3]
    scores = [score_of(run, step, tmp_path) for step in (1, 2, 3)]
    assert [row["scores/t/acc"] for row in rows] == scores
    assert [key for key in rows[0] if key.startswith("scores/")] == ["scores/t/acc"], "neither parts nor infinity"
    assert followed(run) == rows, "once each"
    other = str(run / "scores-2")
    assert len(followed(run, output_path=other)) == 3
    assert len(followed(run, "--num_fewshot=5", output_path=other)) == 6
    drawn = read_charts(run)["scores/t/acc"][::3]
    assert [(step, tokens, score) for step, tokens, _, score in drawn] == [
        (step, 32 * step, score) for step, score in zip((1, 2, 3), scores, strict=True)
    ]


def test_a_follower_that_failed_or_was_killed_goes_on(run, tmp_path):
    """Its harness ends with it."""
    (tmp_path / "kill").touch()
    os.mkfifo(tmp_path / "alive")
    pid = os.fork()
    if not pid:
        try:
            followed(run)
        finally:
            os._exit(1)
    assert (tmp_path / "alive").read_bytes() == b"", "it ends with the last process that has it open"
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    (tmp_path / "fail").touch()
    with pytest.raises(TitaniteError, match=r"step-00000001-.*exit code 1"):
        followed(run)
    (tmp_path / "fail").unlink()
    assert [row["step"] for row in followed(run)] == [1, 2, 3]


def test_a_checkpoint_that_is_removed_meanwhile_is_skipped(run, monkeypatch, caplog):
    """The last one, just before its export; then there is nothing in its place."""
    removed = max(name for _, name in locate(run))
    read = module.open_checkpoint

    def read_and_remove(store, name):
        opened = read(store, name)
        if name == removed:
            shutil.rmtree(run / "checkpoints" / name)
        return opened

    monkeypatch.setattr(module, "open_checkpoint", read_and_remove)
    assert [row["step"] for row in followed(run)] == [1, 2]
    assert f"{removed}: skipped" in caplog.text


def test_it_follows_a_run_until_no_start_is_to_come(run, monkeypatch):
    """Of one start after another; the last checkpoint and the run's end come right after a look."""
    last = run / "checkpoints" / max(name for _, name in locate(run)) / MANIFEST
    end = run / "exit.json"
    late = {last: last.read_bytes(), end: end.read_bytes()}
    for path in late:
        path.unlink()
    looks = []
    waits = []
    look = module.committed

    def look_and_end(store):
        names = list(look(store))
        looks.append(sorted(step_of(name) for name in names))
        if len(waits) == 2:
            for path, data in late.items():
                path.write_bytes(data)
        return names

    def wait(seconds):
        waits.append(seconds)
        assert len(waits) < 4
        if len(waits) == 1:
            end.write_text('{"kind": "lost", "start_again": true}')

    monkeypatch.setattr(module, "committed", look_and_end)
    monkeypatch.setattr(module, "time", SimpleNamespace(sleep=wait))
    assert [row["step"] for row in followed(run)] == [1, 2, 3]
    assert looks == [[1, 2], [1, 2], [1, 2], [1, 2, 3]]


def test_a_run_or_folder_that_cannot_be_followed_is_named(run, monkeypatch):
    with pytest.raises(TitaniteError, match=f"--follow {run.with_name('rum')}: .*{run}"):
        followed(run.with_name("rum"))
    monkeypatch.setattr(module, "hold", lambda path: "77" * (path.parent.name == "scores"))
    with pytest.raises(TitaniteError, match=r"process 77 .*--output_path"):
        followed(run)
