"""The small modules beside train.py: run folder, metrics, mesh, launcher."""

import importlib
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from config import (
    Comm,
    Config,
    ConfigError,
    Metrics,
    Model,
    Parallelism,
    Profiling,
    Training,
)
from metrics import MetricsLogger, configure_logging, find_hook, peak_flops
from models import find_model
from parallel.mesh import ParallelDims
from profiling import profile
from run.processes import LaunchEnvironment, init_distributed
from tests.harness import run_ranks
from tools.processes import processes

ROOT = Path(__file__).parents[2]


def test_each_start_leaves_a_trace_of_its_own_or_says_that_it_has_none(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    for steps_done, steps in ((0, 4), (5, 4), (9, 1), (9, 0), (0, 0), (0, 1)):  # four end before theirs could begin
        with profile(Profiling(trace=True, trace_start=3, trace_steps=1), tmp_path, 0, steps_done) as enter_step:
            for _ in range(steps + 1):
                enter_step()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "trace-step3-rank0.json.gz",
        "trace-step7-rank0.json.gz",
    ]
    told = [line.partition("to begin with ")[2].partition(",")[0] for line in caplog.messages if "no trace" in line]
    assert told == ["step 11", "step 11", "step 3", "step 3"]


def log_on(log_ranks: tuple[int, ...]) -> None:
    rank = dist.get_rank()
    configure_logging(log_ranks, rank)
    for name in ("ours", "botocore.credentials"):
        logging.getLogger(name).warning(f"{name} goes on")
        logging.getLogger(name).error(f"{name} fails")


@pytest.mark.parametrize(("log_ranks", "prefixes"), [((1,), ("", "")), ((0, 1), ("[rank 0] ", "[rank 1] "))])
def test_progress_is_logged_by_the_chosen_ranks_and_errors_by_all(
    log_ranks: tuple[int, ...], prefixes: tuple[str, str], capfd: pytest.CaptureFixture[str]
) -> None:
    run_ranks(2, log_on, log_ranks)
    expected = []
    for rank, prefix in enumerate(prefixes):
        said = ["ours goes on"] * (rank in log_ranks) + ["ours fails", "botocore.credentials fails"]
        expected += [prefix + line for line in said]
    assert sorted(line.partition(" ")[2] for line in capfd.readouterr().err.splitlines()) == sorted(expected)


def build_metrics(config: Config, folder: Path, rank: int = 0, first_step: int = 0, **options: Any) -> MetricsLogger:
    options = {"flops_per_token": 1, "tokens_per_step": 1000} | options
    return MetricsLogger(config, folder, rank, torch.device("cpu"), first_step, **options)


def log(metrics: MetricsLogger, step: int, loss: float = 1.0) -> None:
    """A trained step, and its row."""
    metrics.add(step, torch.tensor(loss), torch.tensor(0.5), lr=1e-3, data_wait_seconds=0.0)
    metrics.log(step, tokens=step)


def test_metrics_rows_hold_the_rates_of_the_interval(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("metrics.time.perf_counter", lambda: now[0])
    metrics = build_metrics(Config(), tmp_path, flops_per_token=50)
    metrics.peak = 1e6
    now[0] = 200.0
    metrics.restart_clock()
    for step in (1, 2):
        now[0] += 4.0
        metrics.add(step, torch.tensor(1.5 + step), torch.tensor(0.5), lr=1e-3, data_wait_seconds=1.0)
    metrics.log(2, tokens=4000)
    metrics.log_validation(2, {"": 3.25}, tokens=4000)
    metrics.log_validation(2, {"web": 3.0, "code": 2.0}, tokens=4000)
    metrics.close()
    row, validation, named = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert row["tps"] == 2000 / 8
    assert row["mfu"] == pytest.approx(50 * 250 / 1e6)
    assert row["tflops"] == pytest.approx(50 * 250 / 1e12)
    assert row["data_wait_pct"] == 25
    assert (row["step_seconds"], row["interval_steps"]) == (4, 2)
    assert (row["loss"], row["validation_loss"], row["tokens"]) == (3.5, None, 4000)
    assert (validation["validation_loss"], validation["loss"], validation["mfu"]) == (3.25, None, None)
    assert row.keys() == validation.keys()
    assert (named["validation_loss/web"], named["validation_loss/code"], named["validation_loss"]) == (3.0, 2.0, None)


def test_tensorboard_shows_each_step_once_after_a_resume(tmp_path: Path) -> None:
    for first_step, steps in ((0, (1, 2, 3, 4, 5, 6)), (3, (4, 5, 6, 7)), (5, (7,))):  # the first start crashed
        metrics = build_metrics(Config(), tmp_path, first_step=first_step)
        if first_step == 5:
            metrics.log_skipped(6, tokens=6)
        for step in steps:
            log(metrics, step, loss=first_step + step)
        metrics.close()
    shown = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in shown.Scalars("loss")] == [
        *[(1, 1.0), (2, 2.0), (3, 3.0), (4, 7.0), (5, 8.0)],
        (7, 12.0),
    ]
    assert [event.step for event in shown.Scalars("skipped")] == [6]


@pytest.mark.parametrize(("name", "peak"), [("NVIDIA H100 80GB HBM3", 989e12), ("Some new GPU", None)])
def test_peaks_are_known_or_unknown(name: str, peak: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert peak_flops(torch.device("cuda", 0)) == peak
    assert peak_flops(torch.device("cpu")) is None


@pytest.mark.parametrize(
    ("dp_replicate", "dp_shard", "expected"), [(1, -1, (1, 8)), (2, -1, (2, 4)), (4, 2, (4, 2)), (8, 1, (8, 1))]
)
def test_degrees(dp_replicate: int, dp_shard: int, expected: tuple[int, int]) -> None:
    dims = ParallelDims.from_config(Parallelism(dp_replicate=dp_replicate, dp_shard=dp_shard), 8)
    assert (dims.dp_replicate, dims.dp_shard) == expected
    assert [dims.dp_rank(rank) for rank in range(8)] == list(range(8))


@pytest.mark.parametrize(
    ("devices", "global_batch_size", "layout", "expected"),
    [
        (5, 48, {}, 3),
        (7, 0, {"tp": 2}, 6),
        (8, 16, {"tp": 2}, 4),
        (2, 0, {"tp": 4}, 2),
        (8, 0, {"dp_replicate": 2, "dp_shard": 2}, 4),
    ],
)
def test_a_run_gets_as_many_processes_as_can_share_it(
    devices: int, global_batch_size: int, layout: dict[str, int], expected: int
) -> None:
    training = Training(local_batch_size=8, global_batch_size=global_batch_size)
    assert processes(Config(training=training, parallelism=Parallelism(**layout)), devices) == expected


def test_vocabularies() -> None:
    assert find_model(Model(), 1000)[1].vocab_size == 1024
    assert find_model(Model(vocab_size=1000), 1000)[1].vocab_size == 1000
    assert find_model(Model(flavor="8B"), 1000)[1].vocab_size == 128_256
    with pytest.raises(ConfigError, match=r"model.flavor = '8B': 128256 rows .* 200000"):
        find_model(Model(flavor="8B"), 200_000)
    with pytest.raises(ConfigError, match="did you mean debug"):
        find_model(Model(flavor="debgu"), 100)


def test_a_hook_is_given_every_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_tracker.py").write_text("rows = []\nlog = rows.append\n")
    monkeypatch.syspath_prepend(tmp_path)
    hooked = Config(metrics=Metrics(hook="my_tracker:log", tensorboard=False))
    for rank in (0, 1):
        metrics = build_metrics(hooked, tmp_path, rank)
        log(metrics, 1)
        metrics.log_validation(1, {"": 3.25}, tokens=40)
        metrics.close()
    written = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert importlib.import_module("my_tracker").rows == written
    assert len(written) == 2
    assert not (tmp_path / "tensorboard").exists()
    for name, said in {
        "my_tracker": "package.module:function",
        ".my_tracker:log": "package.module:function",
        "my_tracker:lag": "lag",
        "no_such:f": "no_such",
    }.items():
        with pytest.raises(ConfigError, match=said):
            find_hook(name)


@pytest.mark.parametrize(
    ("environment", "variables", "said"),
    [
        (LaunchEnvironment(4, 4, 8), {}, "a cuda device of its own, but local rank 4 sees 4; see torchrun's --nproc"),
        (LaunchEnvironment(0, 0, 2), {}, "WORLD_SIZE = 2: needs MASTER_ADDR and MASTER_PORT"),
        (LaunchEnvironment(0, 0, 1), {"SLURM_STEP_NUM_TASKS": "8"}, "= 8: srun has started that many processes"),
    ],
)
def test_ranks_that_cannot_train_together_say_why(
    environment: LaunchEnvironment, variables: dict[str, str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("run.processes.device_type", lambda: "cuda")
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 4)
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda index: None)
    monkeypatch.setattr(dist, "get_default_backend_for_device", lambda kind: "nccl")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=said):
        init_distributed(environment, Comm())
