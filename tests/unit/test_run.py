"""The small modules beside train.py: run folder, metrics, mesh, launcher."""

import contextlib
import dataclasses
import errno
import importlib
import inspect
import json
import logging
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler

from config import (
    Comm,
    Config,
    ConfigError,
    Metrics,
    Model,
    Parallelism,
    Profiling,
    Run,
    TitaniteError,
    Training,
    load_config,
)
from data.ledger import Ledger, read_ledger
from data.order import Segment
from data.place import Place, StepShape
from launch.processes import processes
from launch.torchrun import launch
from metrics import MetricsLogger, configure_logging, find_hook, peak_flops, peak_memory_gib
from models import build_model, find_model
from parallel.mesh import ParallelDims
from profiling import check_profiling, profile
from run import folder as run_folder
from run.exits import Exit, record_exit
from run.folder import check_run_folder, choose_run_folder, read_starts, record_config, record_start, start_run
from run.processes import (
    LaunchEnvironment,
    allow_open_files,
    check_devices,
    init_distributed,
    meet,
    name_launcher,
    process_state,
    runs,
    tell_launcher,
)
from run.stop import StopRequest
from tests.harness import run_ranks
from tests.ports import free_port

ROOT = Path(__file__).parents[2]


def anything(folder: Path) -> None:
    """A check of the run's folder that refuses none."""


def test_new_runs_get_names_of_their_own(tmp_path: Path) -> None:
    config = Config(run=Run(outputs=str(tmp_path)))
    with ThreadPoolExecutor(8) as threads:  # as of an array of jobs, in the same second
        folders = list(threads.map(lambda _: choose_run_folder(config, {}), range(32)))
    assert len(set(folders)) == 32
    assert {folder.parent for folder in folders} == {tmp_path}
    assert choose_run_folder(Config(run=Run(folder="x/y")), {}) == Path("x/y")
    named = tmp_path / "of mine" / "run"
    assert start_run(Config(run=Run(folder=str(named))), {}, 1, "", [], anything)[0] == named


def test_a_place_where_no_folder_can_be_made_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "outputs").symlink_to(tmp_path / "not mounted")
    with pytest.raises(ConfigError, match=r"run\.outputs = .*outputs"):
        start_run(Config(run=Run(outputs=str(tmp_path / "outputs"))), {}, 1, "", [], anything)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"run\.folder = .*file/run.*: cannot be used: .*Not a directory"):
        start_run(Config(run=Run(folder=str(tmp_path / "file" / "run"))), {}, 1, "", [], anything)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(TitaniteError, match=r"cannot be used: .*No space left") as error:
        start_run(Config(run=Run(folder=str(tmp_path / "run"))), {}, 1, "", [], anything)
    assert not isinstance(error.value, ConfigError), "torchrun tries again: there may be room by then"

    def read_only(*_: object, **__: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(Path, "mkdir", read_only)
    with pytest.raises(ConfigError, match=r"run\.outputs = .*Read-only file system"):  # for good
        start_run(Config(run=Run(outputs=str(tmp_path / "new"))), {}, 1, "", [], anything)


@pytest.mark.parametrize(
    "file", ["data/rank-00008.jsonl", "profile/trace-step9-rank8.json.gz", "checkpoints/step-1", "exit.json"]
)
def test_a_node_with_a_disk_of_its_own_starts_again(tmp_path: Path, file: str) -> None:
    """Its ranks have left their part of the run there; what makes the folder a run's is on rank 0's node."""
    config, path = Config(run=Run(folder=str(tmp_path))), tmp_path / file
    path.parent.mkdir(exist_ok=True)
    path.touch()
    check_run_folder(config, {})
    path.rename(tmp_path / "something else")
    with pytest.raises(ConfigError, match="is not the folder of a run"):
        check_run_folder(config, {})


def test_a_node_with_a_disk_of_its_own_starts_again_after_a_kill_before_the_first_checkpoint(tmp_path: Path) -> None:
    """Where none of its ranks has a ledger, as with a pipeline over nodes, only the check for room has been there."""
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / ".probe-1").touch()
    config = Config(run=Run(folder=str(tmp_path)))
    check_run_folder(config, {})
    (tmp_path / "checkpoints" / "model.pt").touch()
    with pytest.raises(ConfigError, match="is not the folder of a run"):
        check_run_folder(config, {})


def test_starts_are_recorded_with_what_changed(tmp_path: Path) -> None:
    assert record_start(tmp_path, Config(), {"dim": 4}, world_size=2) == {}
    changed = record_start(tmp_path, Config(training=Training(steps=9)), {"dim": 4}, world_size=4)
    assert changed == {"training.steps": (Training().steps, 9)}
    before = load_config([f"--config={tmp_path / 'config.toml'}"])
    assert before == Config(), "the checkpoint may refuse what changed"
    record_config(tmp_path, Config(training=Training(steps=9)))
    assert record_start(tmp_path, Config(training=Training(steps=9)), {"dim": 4}, world_size=4) == {}
    starts = [json.loads(line) for line in (tmp_path / "starts.jsonl").read_text().splitlines()]
    assert [start["world_size"] for start in starts] == [2, 4, 4]
    assert starts[0]["packages"]["torch"] == torch.__version__
    assert starts[0]["git_commit"]


def test_the_name_of_a_run_is_made_once(tmp_path: Path) -> None:
    """A run folder that is moved brings it along; one of an older version has none."""
    record_start(tmp_path / "run", Config(), {}, 1)
    name = f"{socket.gethostname()}:{tmp_path}/run\n"
    assert (tmp_path / "run" / ".run_name").read_text() == name
    (tmp_path / "run").rename(tmp_path / "moved")
    record_start(tmp_path / "moved", Config(), {}, 1)
    assert (tmp_path / "moved" / ".run_name").read_text() == name
    (tmp_path / "moved" / ".run_name").unlink()
    record_start(tmp_path / "moved", Config(), {}, 1)
    assert (tmp_path / "moved" / ".run_name").read_text() == f"{socket.gethostname()}:{tmp_path}/moved\n"


def test_a_line_cut_by_a_kill_spoils_no_later_one(tmp_path: Path) -> None:
    for _ in range(3):
        record_start(tmp_path / "run", Config(), {}, world_size=2, job="job 1")
        file = tmp_path / "run" / "starts.jsonl"
        file.write_text(file.read_text() + '{"time": "cut')
    assert [start["world_size"] for start in read_starts(tmp_path / "run")] == [2, 2, 2]
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "starts.jsonl").touch()  # a full disk
    assert choose_run_folder(Config(run=Run(outputs=str(tmp_path))), {}, "job 1") == tmp_path / "run"


def test_a_damaged_record_of_another_run_stops_no_start(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name, damage in {"a": b"{\n", "b": b"\xff\n"}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "starts.jsonl").write_bytes(damage)
    config = Config(run=Run(outputs=str(tmp_path)))
    folder, _ = start_run(config, {}, 2, "job 1", [], anything)
    assert len(caplog.messages) == 2
    assert all(any(f"{tmp_path / name / 'starts.jsonl'}: " in line for line in caplog.messages) for name in "ab")
    assert start_run(config, {}, 2, "job 1", [], anything)[0] == folder
    start_run(Config(run=Run(folder=str(tmp_path / "a"))), {}, 2, "job 1", [], anything)


def test_a_folder_that_is_refused_is_left_as_it_is(tmp_path: Path) -> None:
    config = Config(run=Run(outputs=str(tmp_path)))
    folder, _ = start_run(config, {}, 1, "job 1", [], anything)

    def refuse(chosen: Path) -> None:
        raise ConfigError(f"not {chosen}")

    with pytest.raises(ConfigError, match=f"not {folder}"):
        start_run(config, {}, 1, "job 1", [anything, refuse], anything)
    assert len(read_starts(folder)) == 1
    with pytest.raises(ConfigError, match="not "):
        start_run(config, {}, 1, "job 2", [refuse], anything)
    assert list(tmp_path.iterdir()) == [folder], "nor is a new one left behind"
    (tmp_path / "made by hand").mkdir()
    with pytest.raises(ConfigError, match="not "):
        start_run(Config(run=Run(folder=str(tmp_path / "made by hand"))), {}, 1, "", [refuse], anything)
    assert (tmp_path / "made by hand").exists()


def test_a_rank_that_does_not_exist_is_refused() -> None:
    assert ParallelDims(dp_replicate=1, dp_shard=2).dp_rank(1) == 1
    with pytest.raises(ConfigError, match="RANK = 2: must be below WORLD_SIZE = 2"):
        ParallelDims(dp_replicate=1, dp_shard=2).dp_rank(2)


def test_a_folder_is_of_one_start_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_folder, "ENDING_SECONDS", 0.2)
    config = Config(run=Run(folder=str(tmp_path / "run")))
    code = (
        "import sys; from config import Config, Run; from run.folder import start_run\n"
        "start_run(Config(run=Run(folder=sys.argv[1])), {}, 1, '', [], lambda folder: None)\n"
        "print('started', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, config.run.folder]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout
        assert other.stdout.readline() == "started\n"
        with pytest.raises(
            TitaniteError, match=rf"run: a start .* still running here, process {other.pid}: .*stop"
        ) as error:
            start_run(config, {}, 1, "", [], anything)
        assert not isinstance(error.value, ConfigError), "torchrun tries again: it may be a rank that ends slowly"
        assert len(read_starts(tmp_path / "run")) == 1
        with monkeypatch.context() as elsewhere:  # of a machine that was lost, as far as can be told
            elsewhere.setattr(socket, "gethostname", lambda: "another")
            start_run(config, {}, 1, "", [], anything)
        other.kill()
        other.wait()
        start_run(config, {}, 1, "", [], anything)
    assert len(read_starts(tmp_path / "run")) == 3


def test_a_start_that_has_waited_looks_again_whose_folder_it_is(tmp_path: Path) -> None:
    """Both found no folder there; the other came first, and has ended."""
    config = Config(run=Run(folder=str(tmp_path / "run")))
    check_run_folder(config, {"dim": 2})
    start = "from run.folder import *; import sys; record_start(Path(sys.argv[1]), Config(), {'dim': 1}, 1)"
    subprocess.run([sys.executable, "-c", start, config.run.folder], cwd=ROOT, check=True)
    with pytest.raises(ConfigError, match="another model: dim is 1 there and 2 here"):
        start_run(config, {"dim": 2}, 1, "", [], anything)
    assert json.loads((tmp_path / "run" / "model.json").read_text()) == {"dim": 1}


@pytest.mark.parametrize("damage", [b"", b'{"kind": "fini', bytes(40)])
def test_a_damaged_record_of_the_exit_stops_no_start(tmp_path: Path, damage: bytes) -> None:
    config = Config(run=Run(outputs=str(tmp_path)))
    folder, _ = start_run(config, {}, 1, "job 1", [], anything)
    for _ in range(config.failures.restarts_without_progress):
        (folder / "exit.json").write_bytes(damage)
        assert start_run(config, {}, 1, "job 1", [], anything)[0] == folder
        assert "exit.json is damaged" in read_starts(folder)[-1]["after"]["cause"]
    (folder / "exit.json").write_bytes(damage)
    with pytest.raises(TitaniteError, match=r"in a row .*the last one: unknown, .*exit\.json is damaged"):
        start_run(config, {}, 1, "job 1", [], anything)


def test_whole_files_are_on_the_disk_before_they_have_their_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []

    def watch(owner: object, name: str) -> None:
        real = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *arguments: done.append(name) or real(*arguments))

    def fsync(descriptor: int) -> None:
        done.append("fsync" if os.fstat(descriptor).st_size else "fsync of what is still in this process")
        real_fsync(descriptor)

    for owner, name in ((Path, "replace"), (os, "link")):
        watch(owner, name)
    real_fsync = os.fsync
    monkeypatch.setattr(os, "fsync", fsync)
    record_start(tmp_path, Config(), {}, 1)
    record_exit(tmp_path, Exit("failed", "x", 0, "data", 1, None, "y"))
    assert done == [*3 * ["fsync", "replace"], "fsync", "link"]  # model.json, .run_name, config.toml; exit.json


def test_a_start_cut_while_it_is_recorded_spoils_no_later_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, identity = tmp_path / "run", {"dim": 2}
    config = Config(run=Run(folder=str(folder)))

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    for owner, name in ((Path, "replace"), (os, "link")):  # of config.toml and others; of exit.json
        with monkeypatch.context() as patched, contextlib.suppress(OSError):
            patched.setattr(owner, name, full)
            record_start(folder, config, identity, 1)
            record_exit(folder, Exit("failed", "x", 0, "data", 1, None, "y"))
        check_run_folder(config, identity)
        record_start(folder, config, identity, 1)
    assert not list(folder.glob(".exit-*"))
    (folder / "model.json").write_text("")
    with pytest.raises(ConfigError, match=r"model\.json: is damaged"):
        check_run_folder(config, identity)


def test_a_start_that_could_not_be_recorded_loses_nothing_of_the_one_before(tmp_path: Path) -> None:
    record_start(tmp_path, Config(), {}, 1, "job")
    (tmp_path / ".progress").touch()
    record_exit(tmp_path, Exit("failed", "the cause", 0, "data", 1, None, "y"))
    (tmp_path / ".model.json.tmp").mkdir()  # as a full disk: nothing can be written there
    with pytest.raises(IsADirectoryError):
        record_start(tmp_path, Config(), {}, 1, "job")
    (tmp_path / ".model.json.tmp").rmdir()
    for cause, count in (("the cause", 1), (None, 2)):
        record_start(tmp_path, Config(), {}, 1, "job")
        start = read_starts(tmp_path)[-1]
        assert (start["after"] and start["after"]["cause"], start["starts_since_checkpoint"]) == (cause, count)


def test_a_ledger_cut_by_a_kill_goes_on(tmp_path: Path) -> None:
    state = Place(0, 1, 0, Segment(("a",), (1.0,), (0,), 8), 0, {}).state({})
    for _ in range(2):
        ledger = Ledger(tmp_path, 0, StepShape(1, 1, 1), state, {})
        ledger.step(0, [], {})
        ledger.close()
        with open(tmp_path / "data" / "rank-00000.jsonl", "a") as file:
            file.write('{"first": 1, "cr')
    assert [step.first for step in read_ledger(tmp_path / "data" / "rank-00000.jsonl").steps] == [0, 0]


def test_a_node_that_cannot_write_to_the_runs_folder_says_so_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "data").touch()
    with pytest.raises(TitaniteError, match=r"/data/rank-00000\.jsonl: cannot be written: File exists"):
        Ledger(tmp_path, 0, StepShape(1, 1, 1), {}, {})


def test_a_folder_that_cannot_be_looked_at_is_named() -> None:
    with pytest.raises(ConfigError, match=r"run\.folder = 'a+': cannot be used: .*File name too long"):
        check_run_folder(Config(run=Run(folder=300 * "a")), {})


def test_another_models_run_is_not_resumed(tmp_path: Path) -> None:
    config = Config(run=Run(folder=str(tmp_path)))
    record_start(tmp_path, config, {"dim": 4, "n_layers": 2}, world_size=1)
    check_run_folder(config, {"dim": 4, "n_layers": 2})
    with pytest.raises(ConfigError, match="another model: n_layers is 2 there and 3 here"):
        check_run_folder(config, {"dim": 4, "n_layers": 3})
    check_run_folder(config, {"dim": 4, "n_layers": 2, "a_field_added_since": False})
    with pytest.raises(ConfigError, match="another model: a_field_added_since is None there and True here"):
        check_run_folder(config, {"dim": 4, "n_layers": 2, "a_field_added_since": True})
    check_run_folder(Config(run=Run(folder=str(tmp_path / "new"))), {})


def test_another_optimizers_run_is_not_resumed(tmp_path: Path) -> None:
    """One that this version does not know is another, too; a config that does not say it, or is damaged, is none."""
    folder = tmp_path / "run"
    config = Config(run=Run(folder=str(folder)))
    record_start(folder, config, {}, world_size=1, job="job 1")
    file = folder / "config.toml"
    recorded = file.read_text()
    for same in (recorded, recorded.replace('name = "adamw"\n', ""), "damaged"):
        file.write_text(same)
        check_run_folder(config, {})
    file.write_text(recorded.replace('"adamw"', '"lion"'))
    refused = rf"optimizer\.name = 'adamw': .* with 'lion', .*new run with checkpoint\.initial_load = '{folder}'"
    with pytest.raises(ConfigError, match=refused):
        check_run_folder(config, {})
    with pytest.raises(ConfigError, match=refused):
        start_run(Config(run=Run(outputs=str(tmp_path))), {}, 1, "job 1", [], anything)
    assert len(read_starts(folder)) == 1


def test_each_start_leaves_a_trace_of_its_own_or_says_that_it_has_none(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    for steps_done, steps in ((0, 4), (5, 4), (9, 1), (9, 0), (0, 0), (0, 1)):  # four end before theirs could begin
        with profile(Profiling(trace=True, trace_start=3, trace_steps=1), tmp_path, 0, steps_done) as enter_step:
            for step in range(steps + 1):
                enter_step(steps_done + step + 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "trace-step3-rank0.json.gz",
        "trace-step7-rank0.json.gz",
    ]
    told = [line.partition("to begin with ")[2].partition(",")[0] for line in caplog.messages if "no trace" in line]
    assert told == ["step 11", "step 11", "step 3", "step 3"]


@pytest.mark.parametrize(("status", "gib"), [("Name:\tpython\nVmHWM:\t 1572864 kB\n", 1.5), ("Name:\tpython\n", 0.5)])
def test_peak_memory_is_also_known_where_the_system_keeps_no_mark_of_it(tmp_path, monkeypatch, status, gib) -> None:
    (tmp_path / "status").write_text(status)
    monkeypatch.setattr("metrics.Path", lambda name: tmp_path / Path(name).name)
    monkeypatch.setattr(resource, "getrusage", lambda who: resource.struct_rusage((0, 0, 1 << 19, *[0] * 13)))
    assert peak_memory_gib(torch.device("cpu")) == gib


def test_a_process_that_may_not_be_looked_at_is_none_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """As another user's under hidepid=1."""

    def refuse(path: Path) -> str:
        raise PermissionError(1, "Operation not permitted", str(path))

    monkeypatch.setattr(Path, "read_text", refuse)
    assert not runs("1-100")


def test_a_memory_snapshot_needs_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"profiling\.memory_snapshot = true: needs CUDA"):
        check_profiling(Profiling(memory_snapshot=True))


def log_on(log_ranks: tuple[int, ...]) -> None:
    rank = dist.get_rank()
    configure_logging(log_ranks, rank, 2)
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
    return MetricsLogger(config, folder, rank, torch.device("cpu"), first_step=first_step, **options)


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


def test_a_run_too_long_for_a_date_logs_its_steps(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = Config(training=Training(steps=2**53), metrics=Metrics(tensorboard=False))
    metrics = build_metrics(config, tmp_path, flops_per_token=50)
    metrics.since -= 1.0
    with caplog.at_level("INFO"):
        log(metrics, 1, loss=3.5)
    metrics.close()
    assert caplog.text.rstrip().endswith("ETA unknown")


@pytest.mark.parametrize("full", ["metrics.jsonl", "data/rank-00000.jsonl", "profile/trace-step2-rank0.json.gz"])
def test_a_full_disk_is_one_line_that_names_the_file(tmp_path: Path, full: str) -> None:
    (tmp_path / full).parent.mkdir(exist_ok=True)
    (tmp_path / full).symlink_to("/dev/full")
    with pytest.raises(TitaniteError, match=f"^{tmp_path / full}: cannot be written: No space left on device$"):
        report(tmp_path)


def test_a_full_disk_ends_tensorboard_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").symlink_to("/dev/null")  # it would be the first to be full
    run_ranks(1, report_until_files_are_full, str(tmp_path), start_group=False)


def report_until_files_are_full(folder: str) -> None:
    limit = 300  # bytes: TensorBoard's file begins with 100, and more than 300 are written of a step
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    with pytest.raises(TitaniteError, match=f"^{folder}/tensorboard: cannot be written: File too large$"):
        report(Path(folder))


def report(run: Path) -> None:
    """Two steps, of which the second is traced."""
    ledger = Ledger(run, 0, StepShape(1, 1, 1), {"version": 3}, {})
    metrics = build_metrics(Config(), run)
    with profile(Profiling(trace=True, trace_start=2, trace_steps=1), run / "profile", 0, 0) as enter_step:
        for step in (1, 2):
            enter_step(step)
            ledger.step(step - 1, [], {})
            log(metrics, step)
        enter_step(3)
    metrics.close()
    ledger.close()


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


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA H200 NVL", 835e12),
        ("NVIDIA GB200", 2500e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("Some new GPU", None),
    ],
)
def test_peaks_are_known_or_unknown(name: str, peak: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert peak_flops(torch.device("cuda", 0)) == peak
    assert peak_flops(torch.device("cpu")) is None


@pytest.mark.parametrize(
    ("dp_replicate", "dp_shard", "world_size", "expected"),
    [(1, -1, 8, (1, 8)), (2, -1, 8, (2, 4)), (4, 2, 8, (4, 2)), (8, 1, 8, (8, 1)), (1, -1, 1, (1, 1))],
)
def test_degrees(dp_replicate: int, dp_shard: int, world_size: int, expected: tuple[int, int]) -> None:
    dims = ParallelDims.from_config(Parallelism(dp_replicate=dp_replicate, dp_shard=dp_shard), world_size)
    assert (dims.dp_replicate, dims.dp_shard) == expected
    assert dims.dp == world_size
    assert [dims.dp_rank(rank) for rank in range(world_size)] == list(range(world_size))


@pytest.mark.parametrize(("dp_replicate", "dp_shard"), [(3, -1), (2, 2), (1, 4), (1, 0), (16, -1)])
def test_impossible_degrees_are_printed_with_every_factor(dp_replicate: int, dp_shard: int) -> None:
    with pytest.raises(ConfigError, match="dp_shard") as error:
        ParallelDims.from_config(Parallelism(dp_replicate=dp_replicate, dp_shard=dp_shard), 8)
    assert dp_shard == 0 or (f"dp_replicate {dp_replicate}" in str(error.value) and "8" in str(error.value))


@pytest.mark.parametrize(
    ("devices", "global_batch_size", "layout", "expected"),
    [
        (8, 16, {}, 2),
        (1, 16, {}, 1),
        (5, 48, {}, 3),
        (8, 0, {}, 8),
        (7, 0, {"tp": 2}, 6),
        (8, 16, {"tp": 2}, 4),
        (7, 48, {"dp_replicate": 2}, 6),
        (2, 0, {"tp": 4}, 2),
        (8, 0, {"dp_shard": 4}, 4),
        (8, 0, {"dp_replicate": 2, "dp_shard": 2}, 4),
        (8, 0, {"dp_shard": 1, "tp": 2}, 2),
        (2, 0, {"dp_shard": 4}, 2),
    ],
)
def test_a_run_gets_as_many_processes_as_can_share_it(
    devices: int, global_batch_size: int, layout: dict[str, int], expected: int
) -> None:
    training = Training(local_batch_size=8, global_batch_size=global_batch_size)
    assert processes(Config(training=training, parallelism=Parallelism(**layout)), devices) == expected


def test_a_flavor_may_have_other_layers() -> None:
    assert find_model(Model(flavor="8B"), 1000)[1].n_layers == 32
    spec, flavor = find_model(Model(flavor="8B", n_layers=2), 1000)
    assert flavor == dataclasses.replace(spec.flavors["8B"], n_layers=2)
    assert len(list(build_model(spec, flavor).layers)) == 2  # type: ignore[arg-type]


def test_vocabularies() -> None:
    assert find_model(Model(), 1000)[1].vocab_size == 1024
    assert find_model(Model(vocab_size=1000), 1000)[1].vocab_size == 1000
    assert find_model(Model(flavor="8B"), 1000)[1].vocab_size == 128_256
    with pytest.raises(ConfigError, match=r"model.flavor = '8B': 128256 rows .* 200000"):
        find_model(Model(flavor="8B"), 200_000)
    with pytest.raises(ConfigError, match="did you mean debug"):
        find_model(Model(flavor="debgu"), 100)


@pytest.mark.parametrize(
    ("script", "code", "said"),
    [
        ("pass", 0, ""),
        ("import sys; sys.exit(2)", 2, ""),
        ("import sys; sys.exit(7)", 7, "error: rank 0 failed with exit code 7"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", 137, "error: rank 0 was killed by signal 9"),
    ],
)
def test_the_launcher_keeps_exit_codes_and_prints_no_traceback(
    script: str, code: int, said: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "script.py").write_text(script)
    assert launch(["--standalone", "--nproc-per-node=1", str(tmp_path / "script.py")]) == code
    output = capfd.readouterr().err
    assert said in output
    assert "Traceback" not in output


def test_a_port_that_another_program_has_is_one_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "script.py").write_text("pass")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        arguments = ["--nproc-per-node=1", "--master-addr=127.0.0.1", f"--master-port={port}"]
        assert launch([*arguments, str(tmp_path / "script.py")]) == 1
    output = capfd.readouterr().err
    assert "Traceback" not in output
    assert "error: rendezvous failed: " in output
    assert f"{port}" in output.splitlines()[-1]


def test_a_port_where_nobody_answers_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("pass")
    with socket.create_server(("127.0.0.1", 0)) as silent:  # connects whoever comes, by its backlog, and says nothing
        endpoint = f"127.0.0.1:{silent.getsockname()[1]}"
        arguments = ["--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}", str(tmp_path / "script.py")]
        code = f"from launch import torchrun\ntorchrun.ANSWER_SECONDS = 0.1\ntorchrun.launch({arguments})"
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1, done.stderr
    assert done.stderr.splitlines()[-1].startswith(
        f"error: rendezvous failed: what listens at {endpoint} is not a torchrun"
    )


def stopped_by(folder: Path, number: signal.Signals) -> tuple[list[bool], str]:
    """The votes of two steps after a signal, and what is said to have asked."""
    before = signal.getsignal(number)
    with StopRequest(folder, LaunchEnvironment(0, 0, 1), timeout_seconds=60) as stop:
        os.kill(os.getpid(), number)
        votes, asked_by = [stop.agreed(), stop.agreed()], stop.asked_by
        if number == signal.SIGINT:
            with pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), number)
    assert signal.getsignal(number) == before
    return votes, asked_by


def ignored(folder: Path) -> tuple[list[bool], str]:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    return stopped_by(folder, signal.SIGHUP)


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1"])
def test_a_signal_asks_for_a_stop_after_the_step(name: str, tmp_path: Path) -> None:
    assert run_ranks(1, stopped_by, tmp_path, signal.Signals[name]) == [([False, True], name)]


def goes_on(folder: Path, asked: dict[int, tuple[signal.Signals | str, ...]]) -> bool:
    """Of two ranks on each of two nodes: whether this one is to go on, once ranks were asked by signals or a file."""
    rank = dist.get_rank()
    with StopRequest(folder, LaunchEnvironment(rank, rank % 2, 4), timeout_seconds=60) as stop:
        for how in asked.get(rank, ()):
            if isinstance(how, str):
                (folder / how).touch()
            else:
                os.kill(os.getpid(), how)
        votes = [stop.agreed(), stop.agreed()]
    assert votes == [False, bool(asked)]
    return stop.elsewhere


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({2: (signal.SIGTERM,), 3: (signal.SIGTERM,)}, [True, True, False, False]),
        ({1: (signal.SIGHUP,)}, [False, False, True, True]),
        ({1: (signal.SIGTERM,), 3: (signal.SIGTERM,)}, [False] * 4),
        ({3: (signal.SIGUSR1,)}, [False] * 4),
        ({3: (signal.SIGINT,), 2: (signal.SIGTERM,)}, [False] * 4),
        ({3: (signal.SIGINT, signal.SIGTERM)}, [False] * 4),
        ({3: (signal.SIGTERM, signal.SIGINT)}, [False] * 4),
        ({0: ("stop",), 3: (signal.SIGTERM,)}, [False] * 4),
        ({}, [False] * 4),
    ],
)
def test_nodes_that_remain_go_on_without_those_that_are_taken(
    asked: dict[int, tuple[signal.Signals | str, ...]], expected: list[bool], tmp_path: Path
) -> None:
    assert run_ranks(4, goes_on, tmp_path, asked) == expected


def test_the_file_stop_ends_a_run_of_one_process_and_is_then_gone(tmp_path: Path) -> None:
    assert run_ranks(1, goes_on, tmp_path, {0: ("stop",)}) == [False]
    assert not list(tmp_path.iterdir())


def leave_by(error: Exception, folder: Path, asked_by: signal.Signals) -> str:
    """Leave the context by an error on rank 1 alone, which was asked to stop; the others wait for it elsewhere."""
    rank = dist.get_rank()
    stop = StopRequest(folder, LaunchEnvironment(rank, rank, 2), timeout_seconds=5)
    said = ""
    try:
        if rank == 1:
            with stop:
                os.kill(os.getpid(), asked_by)
                raise error
    except Exception as raised:
        said = str(raised)
    dist.barrier()
    return said


@pytest.mark.parametrize(
    ("error", "asked_by"), [(RuntimeError("broken"), signal.SIGUSR1), (ConfigError("wrong"), signal.SIGTERM)]
)
def test_a_rank_that_fails_waits_for_no_other(error: Exception, asked_by: signal.Signals, tmp_path: Path) -> None:
    assert run_ranks(2, leave_by, error, tmp_path, asked_by) == ["", str(error)]


def test_a_rank_that_torchrun_ends_since_another_failed_says_nothing(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"rank 1 ended with 143\n\(ended before it could say why\)"):
        run_ranks(2, leave_by, RuntimeError("Connection closed by peer"), tmp_path, signal.SIGTERM)


def test_under_nohup_a_closed_terminal_stops_nothing(tmp_path: Path) -> None:
    assert run_ranks(1, ignored, tmp_path) == [([False, False], "")]
    script = tmp_path / "rank.py"
    script.write_text(
        "import os, signal\n"
        "os.kill(os.getppid(), signal.SIGHUP)\n"
        "assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN\n"
    )
    command = ["nohup", sys.executable, "-m", "launch.torchrun", "--standalone", "--nproc-per-node=1", str(script)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_hook_is_given_every_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_tracker.py").write_text("rows = []\nlog = rows.append\nlevel = 3\n")
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
    (tmp_path / "popping.py").write_text("def log(row):\n    row.pop('step')\n")
    hooked = Config(metrics=Metrics(hook="popping:log"))
    metrics = build_metrics(hooked, tmp_path)
    log(metrics, 2)
    metrics.close()
    for name, said in {
        "my_tracker": "package.module:function",
        ".my_tracker:log": "package.module:function",
        "my_tracker:lag": "lag",
        "no_such:f": "no_such",
    }.items():
        with pytest.raises(ConfigError, match=said):
            find_hook(name)
    with pytest.raises(ConfigError, match="is a int, must be a function"):
        find_hook("my_tracker:level")


def test_ranks_of_a_start_agree_on_a_name_whatever_an_earlier_one_left() -> None:
    store = dist.HashStore()
    names = []
    for _ in range(2):  # the second finds all that the first left
        with ThreadPoolExecutor(3) as threads:
            names.append(set(threads.map(lambda rank: meet(store, rank, 3, timeout_seconds=60), range(3))))
    first, second = names
    assert len(first) == len(second) == 1
    assert first != second
    with pytest.raises(TimeoutError, match="rank 0: not all of 4 ranks came"):
        meet(store, 0, 4, timeout_seconds=0.1)


def test_ranks_with_devices_of_different_types_do_not_start() -> None:
    for kinds, said in (
        (("cpu", "cpu"), "None"),
        (("cuda", "cpu"), f"cpu on {socket.gethostname()}; cuda on {socket.gethostname()}; is"),
    ):
        store = dist.HashStore()

        def check(rank: int, store: dist.Store = store, kinds: tuple[str, ...] = kinds) -> str:
            try:
                return str(check_devices(store, rank, 2, kinds[rank]))
            except ConfigError as error:
                return str(error) if error.agreed else "by one rank only"

        with ThreadPoolExecutor(2) as threads:
            assert all(said in line for line in threads.map(check, range(2)))


@pytest.mark.parametrize("address", ["127.0.1.1", "::1", "", "203.0.113.7"])
def test_hosts_that_no_other_reaches_do_not_start(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By default Debian's hosts are 127.0.1.1 to themselves; a container's own name may be known to nobody, and that of
    a cloud's host be of an address that only its router has."""

    def resolve(*_: object, **__: object) -> list[object]:
        if not address:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0))]

    def bind(place: tuple[str, int]) -> None:
        if place[0] == "203.0.113.7":
            raise OSError(errno.EADDRNOTAVAIL, "Cannot assign requested address")

    def check(other: str) -> None:
        store = dist.HashStore()
        store.set("device/1", f"cpu {other} ")
        check_devices(store, 0, 2, "cpu")

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    monkeypatch.setattr(socket, "gethostname", lambda: "a")
    monkeypatch.setattr(socket, "socket", mock.MagicMock(**{"return_value.__enter__.return_value.bind": bind}))
    with pytest.raises(ConfigError, match=r"^a: the host's own name .* set GLOO_SOCKET_IFNAME"):
        check("b")
    check("a")
    address = "10.0.0.1"
    check("b")
    address = "127.0.1.1"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    check("b")


def test_a_node_with_fewer_devices_than_ranks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("run.processes.device_type", lambda: "cuda")
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 4)
    for local_rank, ranks in ((0, 8), (7, 8), (4, 1)):  # the last: without torchrun
        with pytest.raises(ConfigError, match=f"{ranks if ranks > 1 else 5} ranks see only 4;.*--nproc-per-node"):
            init_distributed(LaunchEnvironment(local_rank, local_rank, 8, local_world_size=ranks), Comm())


def test_a_rank_that_sees_its_own_device_alone_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """As by torchrun --virtual-local-rank, or by a script that sets CUDA_VISIBLE_DEVICES for each."""
    monkeypatch.setattr("run.processes.device_type", lambda: "cuda")
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    taken = mock.Mock(side_effect=InterruptedError)
    monkeypatch.setattr(torch.accelerator, "set_device_index", taken)
    with pytest.raises(InterruptedError):
        init_distributed(LaunchEnvironment(3, 0, 8, local_world_size=8), Comm())
    taken.assert_called_once_with(0)
    with pytest.raises(ConfigError, match="a cuda device of its own, but 2 ranks see only 1;"):
        init_distributed(LaunchEnvironment(1, 1, 2, local_world_size=2), Comm())


def test_files_that_may_be_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as the hard limit allows; where the ranks' connections need more the job does not start."""
    limits = [(1024, 4096)]
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _, pair: limits.append(pair))
    with pytest.raises(ConfigError, match=r"may open 4096 files, but with 1000 ranks each needs 5050.*ulimit -n"):
        init_distributed(LaunchEnvironment(0, 0, 1000), Comm())
    allow_open_files(800)
    assert limits[1:] == [(4096, 4096)]
    limits.append((1024, resource.RLIM_INFINITY))
    allow_open_files(1_000_000)


def test_ranks_that_torchrun_did_not_start_need_a_place_to_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.delenv("MASTER_PORT", raising=False)
    with pytest.raises(ConfigError, match="WORLD_SIZE = 2: needs MASTER_PORT, too; torchrun sets them all"):
        init_distributed(LaunchEnvironment(0, 0, 2), Comm())


def test_what_no_restart_can_mend_ends_torchrun(tmp_path: Path) -> None:
    script = tmp_path / "rank.py"
    script.write_text(
        "import sys, threading\n"
        "from run.processes import end_launcher\n"
        f"open({str(tmp_path / 'starts')!r}, 'a').write('x')\n"
        "end_launcher()\n"
        "threading.Event().wait()\n"
    )
    command = [sys.executable, "-m", "launch.torchrun", "--standalone", "--max-restarts=3", str(script)]
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    assert (tmp_path / "starts").read_text() == "x"


def test_ranks_that_wait_for_each_other_end_with_their_torchrun(tmp_path: Path) -> None:
    """One that waits, and one that would then ask a store that is gone."""
    script = tmp_path / "rank.py"
    script.write_text(
        "import os, threading, time\n"
        "from pathlib import Path\n"
        "from config import Comm\n"
        "from run.processes import end_with, init_distributed, launch_environment, runs\n"
        "environment = launch_environment()\n"
        "if environment.rank == 1: end_with(environment.launcher)\n"
        f"Path({str(tmp_path)!r}, f'{{os.getpid()}}.pid').touch()\n"
        "if environment.rank == 1: threading.Event().wait()\n"
        "while runs(environment.launcher): time.sleep(0.01)\n"
        "init_distributed(environment, Comm())\n"
    )
    command = [sys.executable, "-m", "launch.torchrun", "--standalone", "--nproc-per-node=2", str(script)]
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    torchrun = subprocess.Popen(command, cwd=ROOT, env=environment)
    deadline = time.monotonic() + 60
    while len(found := list(tmp_path.glob("*.pid"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    torchrun.kill()
    torchrun.wait()
    left = [int(file.stem) for file in found]
    while left and time.monotonic() < deadline:
        time.sleep(0.05)
        left = [rank for rank in left if process_state(rank)[0] not in ("", "Z")]
    for rank in left:
        os.kill(rank, signal.SIGKILL)
    assert (len(found), left) == (2, [])


def test_the_launcher_runs_by_a_python_that_was_built_for_an_old_libc(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """uv's and conda's have no os.memfd_create."""
    monkeypatch.delattr(os, "memfd_create")
    monkeypatch.setattr(os, "environ", dict(os.environ))
    file = name_launcher()
    tell_launcher(tmp_path)
    assert os.pread(file, 1000, 0) == os.fsencode(tmp_path)
    os.close(file)


def test_nodes_that_do_not_come_are_one_line(tmp_path: Path) -> None:
    words = ["--nnodes=2", "--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{free_port()}", "--local-addr=127.0.0.1"]
    words += ["--rdzv-id=job", "--rdzv-conf=join_timeout=1,is_host=true", "train.py"]
    command = [sys.executable, "-m", "launch.torchrun", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (done.stderr.splitlines()[-1].partition(":")[0], done.returncode) == ("error", 1)
    assert "Traceback" not in done.stderr


def test_nodes_whose_place_to_meet_is_lost_are_told_so_in_one_line(tmp_path: Path) -> None:
    script, killed = tmp_path / "rank.py", tmp_path / "killed"
    script.write_text(
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        f"killed = Path({str(killed)!r})\n"
        "if os.environ['RANK'] == '0':\n"
        "    os.kill(os.getppid(), signal.SIGKILL)\n"
        "    killed.touch()\n"
        "while not killed.exists(): pass\n"
        "sys.exit(1)\n"
    )
    command = [sys.executable, "-m", "launch.torchrun", "--nnodes=2", "--max-restarts=1", "--master-addr=127.0.0.1"]
    command += [f"--master-port={free_port()}"]
    nodes = [
        subprocess.Popen([*command, f"--node-rank={rank}", str(script)], cwd=ROOT, stderr=subprocess.PIPE, text=True)
        for rank in (0, 1)
    ]
    said = [node.communicate(timeout=120)[1] for node in nodes][1]
    assert nodes[1].returncode == 1
    assert said.splitlines()[-1].endswith("start the job again on all nodes, with its --rdzv-id or --run.folder"), said
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--nproc-per-node=two", "Unsupported nproc_per_node value: two"),
        ("--nproc-per-node=0", "--nproc-per-node must be at least 1"),
        ("--nnodes=1:2:3", 'nnodes=1:2:3 is not in "MIN:MAX" format'),
        ("--nnodes=2:1", "min_nodes must be > 0"),
        ("--rdzv-backend=nope", "The rendezvous backend 'nope' is not registered"),
    ],
)
def test_an_argument_of_torchrun_that_it_does_not_take_is_one_line(
    words: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert launch([words, "train.py"]) == 2
    assert capsys.readouterr().err.startswith(f"error: an argument of torchrun: {said}")


@pytest.mark.parametrize("trains", [False, True])
def test_a_start_that_is_asked_to_stop_before_it_trains_is_no_crash(trains: bool, tmp_path: Path) -> None:
    folder, script = tmp_path / "run", tmp_path / "rank.py"
    script.write_text(
        "import os, signal, time\n"
        "from pathlib import Path\n"
        "from config import Comm, Config, Run\n"
        "from run.processes import init_distributed, launch_environment\n"
        "from run.stop import StopRequest\n"
        "from run.folder import start_run\n"
        "environment = launch_environment()\n"
        "init_distributed(environment, Comm())\n"
        f"start_run(Config(run=Run(folder={str(folder)!r})), {{}}, 1, 'job', (), lambda folder: None)\n"
        f"stop = StopRequest(Path({str(folder)!r}), environment, 60)\n"
        f"if {trains}: stop.__enter__()\n"
        "os.kill(os.getppid(), signal.SIGTERM)\n"
        "while not stop.asked_by: time.sleep(0.01)\n"
    )
    command = [sys.executable, "-m", "launch.torchrun", "--standalone", str(script)]
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 128 + signal.SIGTERM, done.stderr
    record_start(folder, Config(), {}, 1, "job")
    last = read_starts(folder)[-1]
    if trains:  # then the ranks are to say it
        assert (last["after"], last["starts_since_checkpoint"]) == (None, 2)
    else:
        assert (last["after"]["kind"], last["starts_since_checkpoint"]) == ("stopped", 1)


def test_the_launcher_resets_what_torchrun_keeps() -> None:
    """Attributes of torch's own; if they were renamed, ours would do nothing."""
    made = inspect.getsource(DynamicRendezvousHandler.__init__)
    assert all(f"self.{name}" in made for name in ("_shared_tcp_store_server", "_bootstrap_store_info"))


UNKNOWN_NAME = ["unshare", "--uts", "--map-root-user", "sh", "-c", 'hostname no-such-host-at-all && exec "$@"', "sh"]


def test_one_machine_needs_no_name_that_resolves(tmp_path: Path) -> None:
    if not shutil.which("unshare") or subprocess.run([*UNKNOWN_NAME, "true"]).returncode != 0:
        pytest.skip("a process may not give itself another name here")
    script = tmp_path / "script.py"
    script.write_text("print('started')\n")
    command = [
        *UNKNOWN_NAME,
        sys.executable,
        "-m",
        "launch.torchrun",
        "--standalone",
        "--nproc-per-node=1",
        str(script),
    ]
    elsewhere = os.environ | {"PET_NNODES": "2"}  # as an operator of Kubernetes sets it
    command = [*UNKNOWN_NAME, *command]
    done = subprocess.run(command, cwd=ROOT, env=elsewhere, capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.returncode) == ("started\n", 0)
