"""The follower of a run on small runs, with a harness whose score is made of the exported weights' bytes."""

import argparse
import hashlib
import json
import os
import re
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import pytest

from checkpoint.loading import locate
from config import TitaniteError
from storage.records import read_records
from tests.corpus import write_dataset
from tests.runs import SMALL, content, launch
from tools import follow as module
from tools.compare import read_charts
from tools.follow import follow, has_ended
from tools.hf import export_model

HARNESS = """
import hashlib, json, os, pathlib, signal, sys
model, tests, results = map(pathlib.Path, (sys.argv[1], sys.argv[2], sys.argv[3].partition("=")[2]))
if (tests / "kill").exists():
    (tests / "kill").unlink()
    alive = open(tests / "alive", "wb")
    signal.alarm(60)
    os.kill(os.getppid(), signal.SIGKILL)
    signal.pause()
digits = int(hashlib.sha256((model / "model.safetensors").read_bytes()).hexdigest(), 16) % 10**6
figures = {"alias": "t", "acc,none": digits, "acc_stderr,none": 0.5, "ppl,strict": float("inf")}
found = {"results": {"t": figures, "t_part": figures}, "group_subtasks": {"t": ["t_part"], "t_part": []}}
(results / "results_1.json").write_text(json.dumps(found))
"""


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Settings of a run of 4 steps with a checkpoint of each."""
    documents = [[[*range(first, first + 30), 0] for first in range(1, 900, 30)]]
    dataset = write_dataset(tmp_path_factory.mktemp("data"), documents)
    own = ["--training.steps=4", "--training.seq_len=16", "--training.global_batch_size=2", "--checkpoint.interval=1"]
    return [*SMALL, *own, f"--data.datasets={dataset}", "--validation.enable=false", "--metrics.tensorboard=false"]


@pytest.fixture(scope="module")
def whole_run(words: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has ended."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    launch(1, folder, words)
    return folder


@pytest.fixture
def run(whole_run: Path, tmp_path: Path) -> Path:
    """The same run, moved, so that a test may change it."""
    return Path(shutil.copytree(whole_run, tmp_path / "run"))


def followed(run: Path, asked: str = "t", last: int = 3, **options: Any) -> list[dict[str, Any]]:
    """Follow the run to its end. Returns the rows."""
    harness = run.parent / "harness.py"
    harness.write_text(HARNESS)
    names = {"place": str(run), "output_path": None, "poll_seconds": 0.01, "last": last}
    arguments = argparse.Namespace(**names | {"dtype": "float32", "tokenizer": ""} | options)
    follow(arguments, asked, lambda folder: [sys.executable, str(harness), str(folder), str(run.parent)])
    return read_records(run / "scores" / "scores.jsonl")


def score_of(run: Path, step: int, folder: Path) -> int:
    export_model(f"{run}@{step}", folder / f"own-{step}", dtype="float32")
    digest = hashlib.sha256((folder / f"own-{step}" / "model.safetensors").read_bytes()).hexdigest()
    return int(digest, 16) % 10**6


def test_a_run_that_has_ended_is_evaluated_to_its_end_and_not_touched(
    run: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = content(run)
    with caplog.at_level("INFO"):
        rows = followed(run)
    assert {path: data for path, data in content(run).items() if path.relative_to(run).parts[0] != "scores"} == before
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    scores = [score_of(run, step, tmp_path) for step in (1, 2, 3, 4)]
    assert [row["scores/t/acc"] for row in rows] == scores
    assert [key for key in rows[0] if key.startswith("scores/")] == ["scores/t/acc", "scores/t/ppl,strict"]
    assert rows[0]["scores/t/ppl,strict"] is None, "not finite"
    spread = {"checkpoints": 3, "mean": pytest.approx(mean(scores[1:])), "std": pytest.approx(stdev(scores[1:]))}
    assert rows[3]["spread"] == {"scores/t/acc": spread}
    line = f"step 4  t/acc {scores[3]:.4f}  last 3: {mean(scores[1:]):.4f} ± {stdev(scores[1:]):.4f}"
    assert line in caplog.messages
    assert followed(run) == rows, "once each"
    assert len(followed(run, asked="t 5-shot")) == 8
    charts = read_charts(run)
    tokens = {row["step"]: row["tokens"] for row in read_records(run / "metrics.jsonl")}
    assert [point[:2] for point in charts["scores/t/acc"][::2]] == [(step, tokens[step]) for step in (1, 2, 3, 4)]
    assert [value for *_, value in charts["scores/t/acc"][::2]] == scores
