"""Whole float8 runs of train.py: on by one line, resumed bit for bit, to and from bfloat16."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torchao.float8  # noqa: F401  (once, not in every forked rank)

from config import Checkpoint, ConfigError, Failures, Float8, load_config
from tests.corpus import write_dataset
from tests.harness import run_ranks
from tests.parity import config_for, our_run
from train import train

SMALL = (
    "--model.flavor=tiny",  # larger ones take long in bfloat16 on a CPU without AVX-512
    "--training.seq_len=32",
    "--training.local_batch_size=2",
    "--training.global_batch_size=8",
    "--training.steps=4",
    "--lr_scheduler.warmup_steps=1",
    "--metrics.log_interval=1",
    "--metrics.tensorboard=false",
    "--validation.enable=false",
    "--checkpoint.interval=2",
    "--checkpoint.keep=0",
    "--model.vocab_size=128",
)
FLOAT8 = ("--float8.enable", "--float8.filter=all")


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    documents = [[1 + (i * j) % 90 for j in range(60)] + [0] for i in range(60)]
    return write_dataset(tmp_path_factory.mktemp("data") / "set", [documents], vocab_size=100)


class Stop(Exception):
    """Ends a run between two steps."""


def run(arguments: list[str], stop_after: int = 0) -> None:
    def after_step(step: int) -> None:
        if step == stop_after:
            raise Stop

    try:
        train(load_config(arguments), after_step)
    except Stop:
        return


def losses(folder: Path) -> list[float]:
    rows: list[dict[str, Any]] = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return list({row["step"]: row["loss"] for row in rows}.values())


def launch(world_size: int, folder: Path, dataset: Path, *arguments: str, stop_after: int = 0) -> list[float]:
    words = [*SMALL, f"--data.datasets={dataset}", f"--run.folder={folder}", *arguments]
    run_ranks(world_size, run, words, stop_after, start_group=False)
    return losses(folder)


@pytest.fixture(scope="module")
def straight(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return launch(2, tmp_path_factory.mktemp("straight") / "run", dataset, *FLOAT8)


def test_resumed_bit_for_bit(straight: list[float], dataset: Path, tmp_path: Path) -> None:
    launch(2, tmp_path / "run", dataset, *FLOAT8, stop_after=3)
    assert launch(2, tmp_path / "run", dataset, *FLOAT8, "--float8.precompute_scale=off") == straight


def test_scales_computed_ahead_are_those_of_the_weights_after_a_rollback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that torchao computes with each weight's gather give the same bits. The fifth step is bad, once."""
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "1")
    found = []
    for precompute in ("auto", "off"):
        config = replace(
            config_for(1, 2),
            float8=Float8(enable=True, filter="all", precompute_scale=precompute),  # type: ignore[arg-type]
            failures=Failures(on_bad_step="rollback"),
            checkpoint=Checkpoint(interval=3),
        )
        for bad_step in (5, 0):
            start = partial(our_run, folder=tmp_path / precompute, bad_step=bad_step)
            ranks = run_ranks(2, start, config, 8, 1)
        found.append([rank["losses"] for rank in ranks])
    assert sorted(found[0][0]) == [1, 2, 4, 6, 8]
    assert found[0] == found[1]


def test_from_bf16_to_float8_and_back(straight: list[float], dataset: Path, tmp_path: Path) -> None:
    plain = launch(2, tmp_path / "plain", dataset)
    for name, before, after in (("to float8", (), FLOAT8), ("to bf16", FLOAT8, ())):
        launch(2, tmp_path / name, dataset, *before, stop_after=2)
        first, second = (straight, plain) if before else (plain, straight)
        mixed = launch(2, tmp_path / name, dataset, *after)
        assert mixed[:2] == first[:2]
        assert mixed[2:] == pytest.approx(second[2:], rel=2e-3)
        assert mixed[2:] not in (first[2:], second[2:])


def test_refused_before_a_folder_is_made(dataset: Path, tmp_path: Path) -> None:
    words = [*SMALL, f"--data.datasets={dataset}", f"--run.folder={tmp_path / 'run'}", "--float8.enable"]
    with pytest.raises(ConfigError, match=r'set float8.filter = "all"'):
        train(load_config(words))
    assert not (tmp_path / "run").exists()
