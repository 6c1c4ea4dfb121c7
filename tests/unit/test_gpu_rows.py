"""The rows of GPU measurements: their settings. One of each kind is rehearsed for real."""

import json

from benchmarks import gpu


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
