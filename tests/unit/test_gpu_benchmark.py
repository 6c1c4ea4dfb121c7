"""The GPU benchmark, rehearsed on CPU: a typo must not cost the first minute on a GPU."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import KERNELS, attainable, merged, runs
from models.llama import FLAVORS
from models.llama.model import Llama

ROOT = Path(__file__).parents[2]


def test_a_rehearsal_measures_its_rows(tmp_path: Path) -> None:
    kinds = "peaks,8B tensorwise 8192"
    command = [sys.executable, "-m", "benchmarks.gpu", "--rehearse", f"--rows={kinds}", f"--json={tmp_path / 'rows'}"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    rows = {row["row"]: row for row in json.loads((tmp_path / "rows").read_text())["rows"]}
    assert list(rows) == kinds.split(",")
    assert not [row for row in rows.values() if "failed" in row]
    assert rows["peaks"]["bf16 TFLOP/s"] > 0
    assert all(row["tokens/s"] > 0 and row["peak GiB"] > 0 for row in list(rows.values())[1:])


def test_what_is_attainable_follows_from_the_operations_of_a_token() -> None:
    peak = {"bf16 TFLOP/s": 790, "float8 TFLOP/s": 1500}
    for name in ("1.8B", "8B"):
        flavor = FLAVORS[name]
        with torch.device("meta"):
            operations = Llama(flavor).flops_per_token(8192)
        operations -= 6 * flavor.n_layers * flavor.n_heads * flavor.head_dim * 8192  # what the causal mask leaves out
        bf16, float8 = (attainable(runs()[f"{name} {kind} 8192"], peak) for kind in ("bf16", "tensorwise"))
        assert bf16 == pytest.approx(790e12 / operations, rel=1e-3)
        assert bf16 < float8 < bf16 * 1500 / 790


def test_time_of_kernels_that_overlap_is_counted_once() -> None:
    assert list(merged(iter([(5.0, 7.0), (1.0, 3.0), (2.0, 4.0)]))) == [(0.0, 0.0), (1.0, 4.0), (5.0, 7.0)]
    assert KERNELS[-1][1] == "", "every kernel is counted as something"
