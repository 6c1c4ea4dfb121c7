"""The queue of GPU measurements ends in time, keeps what it has and goes on from there.

Its processes are stood in for, and its clock stands still while they work. One row of each kind is rehearsed for real.
"""

import argparse
import json
import os
import select
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import gpu

# In place of benchmarks.gpu. `hangs` waits with a process of its own, as torchrun would, and tells both.
STAND_IN = """
import json, os, pathlib, signal, subprocess, sys
row = sys.argv[1].removeprefix("--row=")
if row == "hangs":
    child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    pathlib.Path("pids").write_text(f"{os.getpid()} {child.pid}")
    signal.pause()
if row == "crashes" and not pathlib.Path("mended").exists():
    raise RuntimeError("out of luck")
print(json.dumps({"measured": {"tokens/s": 1.5}}))
"""


class Queue:
    """A queue in a folder with a stand-in for the project."""

    def __init__(self, folder, monkeypatch):
        self.folder = folder
        self.now = 0.0
        (folder / "benchmarks").mkdir()
        (folder / "benchmarks" / "gpu.py").write_text(STAND_IN)
        (folder / "train.py").touch()
        os.mkfifo(folder / "pids")
        monkeypatch.setattr(gpu, "ROOT", folder)
        monkeypatch.setattr(gpu, "time", SimpleNamespace(monotonic=lambda: self.now))
        wait = subprocess.Popen.wait

        def wait_or_hang(child, timeout=None):
            if timeout is None or "--row=hangs" not in child.args:
                return wait(child)
            self.pids = (folder / "pids").read_text().split()
            self.now += timeout
            raise subprocess.TimeoutExpired(child.args, timeout)

        monkeypatch.setattr(subprocess.Popen, "wait", wait_or_hang)

    def work(self, estimates, monkeypatch, budget=60):
        """What a call measures, in order."""
        monkeypatch.setattr(gpu, "ESTIMATES", estimates)
        file = self.folder / "results.json"
        rows = json.loads(file.read_text())["rows"] if file.exists() else []
        before = list(rows)
        options = argparse.Namespace(budget_seconds=budget, rehearse=False, json=file)
        gpu.work(list(estimates), rows, options)
        return {row["row"]: row.get("failed", row.get("tokens/s")) for row in rows if row not in before}


@pytest.fixture
def queue(tmp_path, monkeypatch):
    return Queue(tmp_path, monkeypatch)


def test_failures_are_recorded_and_the_next_call_goes_on(queue, monkeypatch):
    estimates = {"crashes": 1, "long": 100, "short": 1}
    assert queue.work(estimates, monkeypatch) == {"crashes": "RuntimeError: out of luck", "short": 1.5}
    (queue.folder / "mended").touch()
    found = queue.work(estimates | {"new": 1}, monkeypatch)
    assert list(found.items()) == [("new", 1.5), ("crashes", 1.5)], "what failed comes last"
    assert queue.work(estimates, monkeypatch) == {}
    (queue.folder / "train.py").write_text("other code")
    assert list(queue.work(estimates, monkeypatch)) == ["crashes", "short"]


def test_what_takes_too_long_is_killed_with_its_processes(queue, monkeypatch):
    found = queue.work({"hangs": 1, "last": 1}, monkeypatch)
    assert "too long" in found["hangs"]
    assert found["last"] == 1.5
    for pid in queue.pids:
        if Path(f"/proc/{pid}").exists():
            assert select.select([os.pidfd_open(int(pid))], [], [], 10)[0], "readable once it has ended"


def test_a_row_that_the_end_of_the_call_cuts_has_not_failed(queue, monkeypatch):
    assert queue.work({"first": 1, "hangs": 4, "last": 1}, monkeypatch, budget=5) == {"first": 1.5}


def test_ratios_are_to_the_row_as_in_the_models_and_to_measured_matmuls():
    name = "float8, tensorwise, output too, whole logits"
    peak = {"row": gpu.PEAKS, "bf16 TFLOP/s": 500.0, "tensorwise, fast TFLOP/s": 1000.0, "tensorwise TFLOP/s": 800.0}
    base = {"row": gpu.BASE, "tokens/s": 5000.0, "bf16 GFLOP of a token": 50.0, "float8 GFLOP of a token": 0.0}
    other = {"row": name, "tokens/s": 7500.0, "bf16 GFLOP of a token": 10.0, "float8 GFLOP of a token": 48.0}
    gpu.add_ratios([peak, base, other])
    assert base["ratio"] == 1
    assert other["ratio"] == 1.5
    assert base["roofline"] == pytest.approx(5000 * 50e9 / 500e12)
    assert other["roofline"] == pytest.approx(7500 * (10e9 / 500e12 + 16e9 / 1000e12 + 32e9 / 800e12))


def test_rows_are_settings_that_exist():
    for run in gpu.RUNS.values():
        gpu.training_config(run, 1, "unused")


def test_rehearsal(tmp_path, monkeypatch):
    """Rows of both kinds, for real, on CPU; not compiled, since that takes long."""
    file = tmp_path / "rows.json"
    rows = "--rows=matmuls of w2;not compiled"
    monkeypatch.setattr("signal.signal", lambda *_: None)
    monkeypatch.setattr("sys.argv", ["gpu", "--rehearse", rows, f"--json={file}", "--budget-seconds=3600"])
    assert gpu.main() == 0
    matmuls, run = json.loads(file.read_text())["rows"]
    assert matmuls["bf16 TFLOP/s"] > 0
    assert matmuls["rowwise TFLOP/s"] > 0
    assert run["tokens/s"] > 0
