"""The small modules beside train.py: run folder, metrics, mesh, launcher."""

import dataclasses
import importlib
import json
import logging
import sys
from fractions import Fraction
from unittest import mock

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
    load_config,
    to_toml,
)
from metrics import MetricsLogger, configure_logging, find_trackers, peak_flops
from models import MODELS, find_model, settle_model
from models.llama import FLAVORS
from models.llama.model import LlamaConfig
from run.processes import LaunchEnvironment, init_distributed
from run.profiling import profile
from storage.records import read_records
from tests.harness import run_ranks
from tools.processes import processes


def test_each_start_leaves_a_trace_of_its_own(tmp_path):
    for steps_done, steps in ((0, 4), (5, 4), (9, 1), (0, 1)):  # two end before theirs could begin
        with profile(Profiling(trace=True, trace_start=3, trace_steps=1), tmp_path, 0, steps_done) as enter_step:
            for _ in range(steps + 1):
                enter_step()
    assert {path.name for path in tmp_path.iterdir()} == {"trace-step3-rank0.json.gz", "trace-step7-rank0.json.gz"}


def log_on(log_ranks):
    configure_logging(log_ranks, dist.get_rank())
    for name in ("ours", "botocore.credentials"):
        logging.getLogger(name).warning(f"{name} goes on")
        logging.getLogger(name).error(f"{name} fails")


FAILS = ["ours fails", "botocore.credentials fails"]


def test_progress_is_logged_by_the_chosen_ranks_and_errors_by_all(capfd):
    run_ranks(2, log_on, (1,))
    lines = sorted(line.partition(" ")[2] for line in capfd.readouterr().err.splitlines())
    assert lines == sorted(["ours goes on", *FAILS, *FAILS])


def build_metrics(folder, rank=0, first_step=0, **settings):
    config = Config(metrics=Metrics(**{"tensorboard": False} | settings), training=Training(steps=1100))
    device = torch.device("cpu")
    return MetricsLogger(config, folder, rank, 2, device, first_step)


def add(metrics, step, loss=1.0, norm=0.5):
    """A trained step, which waited a second for its data."""
    figures = torch.tensor((loss, norm))
    metrics.add(step, *figures, rates={"lr": 1e-3}, tokens=2000, flops=2_000_000, data_wait_seconds=1.0)


def log(metrics, step, loss=1.0):
    """A trained step, and its row."""
    add(metrics, step, loss)
    metrics.log(step, tokens=step)


def test_rows_and_lines_hold_the_rates_of_the_interval(tmp_path, monkeypatch, caplog):
    now = [100.0]
    monkeypatch.setattr("metrics.time.perf_counter", lambda: now[0])
    monkeypatch.setattr("metrics.peak_memory_gib", lambda device: 0.5)
    caplog.set_level("INFO")
    metrics = build_metrics(tmp_path)
    metrics.peak = 1e6
    now[0] = 200.0
    metrics.restart_clock()
    for step in (1, 2):
        now[0] += 4.0
        add(metrics, step, loss=1.5 + step)
    metrics.log(2, tokens=4_000_000_000)
    metrics.log_validation(2, {"validation_loss/web": 3.0, "validation_loss/code": 2.0}, tokens=4000)
    metrics.close()
    row, validation = read_records(tmp_path / "metrics.jsonl")
    expected = {
        "tps": 2000 / 8,
        "mfu": pytest.approx(1000 * 250 / 1e6),
        "tflops": pytest.approx(1000 * 250 / 1e12),
        "data_wait_pct": 25,
        "step_seconds": 4,
        "interval_steps": 2,
        "loss": 3.0,
        "validation_loss": None,
        "tokens": 4_000_000_000,
    }
    assert {name: row[name] for name in expected} == expected
    assert (validation["validation_loss/web"], validation["validation_loss/code"], validation["loss"]) == (3, 2, None)
    rates = "500 tokens/s  4.00B seen  ETA 1:13:12  MFU 25%  data wait 25%  0.50 GiB"
    assert caplog.messages == [
        f"step    2/1100  loss 3.0000  norm 0.500  lr 1.0e-03  {rates}",
        "step    2/1100  validation loss/web 3.0000  validation loss/code 2.0000",
    ]


def test_the_loss_is_the_mean_of_the_trained_steps_since_the_last_line(tmp_path):
    """Over a checkpoint and a validation between, without the step that was left out, exactly."""
    metrics = build_metrics(tmp_path)
    log(metrics, 1, loss=9.0)
    losses = torch.tensor([0.1, 0.7, 3.3]).tolist()
    for step, loss in zip((2, 3, 5), losses, strict=True):
        add(metrics, step, loss, norm=loss)
        if step == 3:
            metrics.log_skipped(4, tokens=4)
            metrics.check_finite()
            metrics.log_validation(3, {"validation_loss": 3.25}, tokens=4)
    metrics.log(5, tokens=5)
    assert metrics.last["loss"] == float(sum(map(Fraction, losses)) / 3)
    assert metrics.last["grad_norm"] == losses[-1]


def test_tensorboard_shows_each_step_once_after_a_resume(tmp_path):
    for first_step, steps in ((0, (1, 2, 3, 4, 5, 6)), (3, (4, 5, 6, 7)), (5, (7,))):  # the first start crashed
        metrics = build_metrics(tmp_path, first_step=first_step, tensorboard=True)
        if first_step == 5:
            metrics.log_skipped(6, tokens=6)
        for step in steps:
            log(metrics, step, loss=first_step + step)
        metrics.log_validation(steps[-1], {"validation_loss": 3.0, "validation_loss/code": 2.0}, tokens=steps[-1])
        metrics.close()
    shown = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    losses = [(event.step, event.value) for event in shown.Scalars("train/loss")]
    assert losses == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 7.0), (5, 8.0), (7, 12.0)]
    assert [event.step for event in shown.Scalars("train/skipped")] == [6]
    assert {"train_speed/tps", "train/lr", "valid/loss", "valid/loss/code"} <= set(shown.Tags()["scalars"])
    assert b"warmup_steps = 20" in shown.Tensors("config/text_summary")[0].tensor_proto.string_val[0]


@pytest.mark.parametrize(("name", "peak"), [("NVIDIA H100 80GB HBM3", 989e12), ("Some new GPU", None)])
def test_peaks_are_known_or_unknown(name, peak, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert peak_flops(torch.device("cuda", 0)) == peak
    assert peak_flops(torch.device("cpu")) is None


@pytest.mark.parametrize(
    ("devices", "global_batch_size", "layout", "expected"),
    [
        (5, 48, {}, 3),
        (8, 16, {"tp": 2}, 4),
        (8, 0, {"dp_replicate": 2, "dp_shard": 2}, 4),
    ],
)
def test_a_run_gets_as_many_processes_as_can_share_it(devices, global_batch_size, layout, expected):
    training = Training(local_batch_size=8, global_batch_size=global_batch_size)
    assert processes(Config(training=training, parallelism=Parallelism(**layout)), devices) == expected


def test_vocabularies():
    assert find_model(Model(), 1000)[1].vocab_size == 1024
    assert find_model(Model(vocab_size=1000), 1000)[1].vocab_size == 1000
    assert find_model(Model(flavor="8B"), 1000)[1].vocab_size == 128_256
    with pytest.raises(
        ConfigError, match=r"model.vocab_size = 128256, of model.flavor = '8B': must be at least 200000"
    ):
        find_model(Model(flavor="8B"), 200_000)
    with pytest.raises(ConfigError, match="did you mean debug"):
        find_model(Model(flavor="debgu"), 100)


@pytest.mark.parametrize("name", ["8B_3.1", "smollm3_3B", "olmo2_7B", "granite3.3_2B"])
def test_the_shape_of_a_checkpoint_becomes_settings(name, tmp_path):
    """Those that it records give the same shape again, and what is typed beside them counts."""
    identity = {"name": "llama", **dataclasses.asdict(dataclasses.replace(FLAVORS[name], vocab_size=320))}
    (tmp_path / "model.json").write_text(json.dumps(identity))
    words = [f"--run.folder={tmp_path}", "--checkpoint.initial_load=gone"]
    settled = settle_model(load_config(words))
    (tmp_path / "config.toml").write_text(to_toml(settled))
    assert load_config([str(tmp_path / "config.toml")]) == settled
    assert {"name": "llama", **dataclasses.asdict(find_model(settled.model, 300)[1])} == identity
    assert settle_model(load_config([*words, "--model.norm_eps=0.5"])).model.norm_eps == 0.5
    (tmp_path / "model.json").write_text("{")
    with pytest.raises(ConfigError, match=r"model\.json: is damaged"):
        settle_model(load_config(words))


def test_a_field_of_a_model_that_is_no_setting_is_named(monkeypatch):
    forked = dataclasses.make_dataclass("Forked", [("sinks", int, 4)], bases=(LlamaConfig,), frozen=True, kw_only=True)
    flavor = forked(**dataclasses.asdict(FLAVORS["tiny"]))
    monkeypatch.setattr(
        "models.MODELS", {"llama": dataclasses.replace(MODELS["llama"], flavors={"tiny": flavor}, shape=forked)}
    )
    with pytest.raises(ConfigError, match=r"Forked\.sinks: is no setting yet; add it to the class Model in config\.py"):
        find_model(Model(flavor="tiny"), 100)


def test_a_hook_is_given_every_row(tmp_path, monkeypatch):
    (tmp_path / "my_tracker.py").write_text(
        "rows, others = [], []\nlog, start = rows.append, others.append\ndef close(): others.append('closed')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    for rank in (0, 1):
        metrics = build_metrics(tmp_path, rank, hook="my_tracker:log")
        log(metrics, 1)
        metrics.log_validation(1, {"validation_loss": 3.25}, tokens=40)
        metrics.close()
    tracker = importlib.import_module("my_tracker")
    assert tracker.rows == read_records(tmp_path / "metrics.jsonl")
    assert len(tracker.rows) == 2
    config, closed = tracker.others
    assert (config["run"]["folder"], config["metrics"]["hook"], closed) == (str(tmp_path), "my_tracker:log", "closed")
    assert not (tmp_path / "tensorboard").exists()


@pytest.mark.parametrize("hook", ["metrics", "metrics:lag", "no_such:f"])
def test_a_hook_that_does_not_exist_is_refused(hook):
    with pytest.raises(ConfigError, match=f"'{hook}': must be of the form package.module:function"):
        find_trackers(Config(metrics=Metrics(hook=hook)))


def test_a_tracker_in_trouble_ends_no_run(tmp_path, monkeypatch, caplog):
    """It raises or wants to exit. All is counted, and said at its beginning and end."""
    (tmp_path / "poor_tracker.py").write_text(
        "def start(config): raise ConnectionError('down')\n"
        "def log(row): row.pop('nothing') if row.pop('step') < 3 else exit(3)\n"
        "def close(): raise OSError('closed as well')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    metrics = build_metrics(tmp_path, hook="poor_tracker:log")
    for step in range(1, 7):
        log(metrics, step)
    metrics.close()
    begin, end = [line for line in caplog.messages if "poor_tracker:log" in line]
    assert "ConnectionError('down'); training goes on" in begin
    assert "calls failed: 8, the last by OSError('closed as well')" in end
    assert [row["step"] for row in read_records(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4, 5, 6]


def test_weights_and_biases_is_asked_for_and_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match="wandb_project = 'titanite': needs Weights & Biases: pip install wandb"):
        find_trackers(Config(metrics=Metrics(wandb_project="titanite")))


def test_weights_and_biases_gets_rows_and_config_and_a_resume_goes_on(tmp_path, monkeypatch):
    """By the package itself, offline; also steps trained again after a crash."""
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    with mock.patch.object(wandb.Run, "log", autospec=True) as called:
        for steps in ((1, 2), (2, 3)):
            metrics = build_metrics(tmp_path, wandb_project="titanite")
            for step in steps:
                log(metrics, step, loss=step + 0.5)
            metrics.close()
    runs, rows = zip(*(call.args for call in called.call_args_list), strict=True)
    assert len({run.id for run in runs}) == 1
    assert runs[-1].config["optimizer"]["lr"] == 3e-4
    assert [(row["step"], row["train/loss"]) for row in rows] == [(1, 1.5), (2, 2.5), (2, 2.5), (3, 3.5)]


@pytest.mark.parametrize(
    ("environment", "variables", "said"),
    [
        (LaunchEnvironment(4, 4, 8), {}, "a cuda device of its own, but local rank 4 sees 4; see torchrun's --nproc"),
        (LaunchEnvironment(0, 0, 1), {"SLURM_STEP_NUM_TASKS": "8"}, "= 8: srun has started that many processes"),
    ],
)
def test_ranks_that_cannot_train_together_say_why(environment, variables, said, monkeypatch):
    monkeypatch.setattr("run.processes.device_type", lambda: "cuda")
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 4)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=said):
        init_distributed(environment, Comm())
