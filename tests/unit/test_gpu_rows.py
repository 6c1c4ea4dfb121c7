"""The rows of GPU measurements: their settings and ratios. One of each kind is rehearsed for real."""

import json

import pytest

from benchmarks import gpu


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
