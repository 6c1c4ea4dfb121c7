"""Golden runs: this code trains as the code of an earlier commit did, and resumes its run."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.golden.make import (
    FIGURES,
    GOLDEN,
    RUN,
    STOP_AFTER,
    UP_TO,
    distances,
    figures,
    given,
    run_case,
    stored,
    stored_case,
)
from tests.harness import run_ranks

STORED = stored()
CASES: dict[str, Any] = STORED["cases"]
# The largest relative differences allowed up to step 1, 10 and 50: three to seven times the largest seen, on a CPU with
# AVX-512, between runs with ATEN_CPU_CAPABILITY=default or avx2, ONEDNN_MAX_CPU_ISA=AVX2 or SSE41, MKL_CBWR=COMPATIBLE,
# several of these, two threads, and none of this. The comments say what was seen. Runs that round to few bits drift
# apart, so it is their first steps that show whether they round as they should.
TOLERANCES: dict[str, dict[str, tuple[float, float, float]]] = {
    "float32": {
        "losses": (5e-7, 1e-6, 1e-6),  # 7.7e-8, 1.9e-7, 2.1e-7
        "grad_norms": (6e-7, 2.5e-6, 1e-5),  # 1.6e-7, 5.6e-7, 1.9e-6
    },
    "bfloat16": {
        "losses": (3e-5, 1e-4, 4e-4),  # 9.0e-6, 2.9e-5, 8.6e-5
        "grad_norms": (2e-4, 2e-3, 6e-2),  # 4.7e-5, 4.9e-4, 1.7e-2
    },
    "float8-float32": {
        "losses": (1e-6, 2e-4, 3e-3),  # 2.5e-7, 4.2e-5, 6.0e-4
        "grad_norms": (7e-4, 8e-3, 0.4),  # 1.9e-4, 2.1e-3, 6.7e-2
    },
    "float8-bfloat16": {
        "losses": (2e-5, 2e-4, 3e-3),  # 3.4e-6, 4.4e-5, 4.4e-4
        "grad_norms": (7e-4, 1.2e-2, 0.4),  # 9.5e-5, 3.4e-3, 8.3e-2
    },
}
ALIKE = 1e-5  # the same, between layouts in float32
LAYOUTS = ("fsdp2-float32", "tp2-cp2-float32", "pp2-float32")


def precision(name: str) -> str:
    """The key of TOLERANCES for a case."""
    return "-".join(part for part in name.split("-") if "float" in part)


def check(values: dict[str, Any], name: str) -> None:
    """The figures of a run against the golden ones."""
    golden, allowed = CASES[name], TOLERANCES[precision(name)]
    versions = f"runs.json was made with torch {STORED['torch']}, this is {torch.__version__}"
    for key in ("losses", "grad_norms"):
        for steps, far, tolerance in zip(UP_TO, distances(values[key], golden[key]), allowed[key], strict=True):
            assert far <= tolerance, f"{key} differ by {far:.1e} up to step {steps}; {versions}"
    held_out = pytest.approx(golden["validation_losses"], rel=allowed["losses"][-1])
    assert values["validation_losses"] == held_out, versions


def check_alike(values: dict[str, Any]) -> None:
    """The figures of a run in float32 against those of one process."""
    for key in FIGURES:
        assert values[key] == pytest.approx(CASES["one-float32"][key], rel=ALIKE), key


@pytest.mark.parametrize("name", CASES)
def test_a_fresh_run_gives_the_golden_figures(name: str, tmp_path: Path) -> None:
    fresh = run_case(stored_case(CASES[name]), tmp_path / "run")
    assert fresh["data"] == CASES[name]["data"]
    check(fresh, name)
    if name in LAYOUTS:
        check_alike(fresh)


def test_the_golden_run_is_resumed(tmp_path: Path) -> None:
    golden, folder = CASES[RUN], tmp_path / "run"
    shutil.copytree(GOLDEN / "run", folder)
    run_ranks(golden["world_size"], given, [*golden["arguments"], f"--run.folder={folder}"], start_group=False)
    resumed, before = figures(folder), figures(GOLDEN / "run")
    assert [resumed[key][:STOP_AFTER] for key in ("losses", "grad_norms")] == [before["losses"], before["grad_norms"]]
    check(resumed, RUN)
