"""Golden runs: this code trains as the code of an earlier commit did, and resumes its run."""

import shutil

import pytest
import torch

from tests.golden.make import CASES, GOLDEN, RUN, STOP_AFTER, STORED, figures, given, run_case
from tests.harness import run_ranks

STEPS = (1, 10, 50)  # up to which figures are compared; differences grow from one to the next
# The largest relative differences allowed up to step 1, 10 and 50: three to seven times the largest seen, on a CPU with
# AVX-512, between runs with ATEN_CPU_CAPABILITY=default or avx2, ONEDNN_MAX_CPU_ISA=AVX2 or SSE41, MKL_CBWR=COMPATIBLE,
# several of these, two threads, and none of this. The comments say what was seen. Runs that round to few bits drift
# apart, so it is their first steps that show whether they round as they should.
TOLERANCES = {
    "float32": {
        "losses": (5e-7, 1e-6, 1e-6),  # 7.7e-8, 1.9e-7, 2.1e-7
        "grad_norms": (6e-7, 2.5e-6, 1e-5),  # 1.6e-7, 5.6e-7, 1.9e-6
    },
    "bfloat16": {
        "losses": (3e-5, 1e-4, 4e-4),  # 9.0e-6, 2.9e-5, 8.6e-5
        "grad_norms": (2e-4, 2e-3, 6e-2),  # 4.7e-5, 4.9e-4, 1.7e-2
    },
    "float8-bfloat16": {
        "losses": (2e-5, 2e-4, 3e-3),  # 3.4e-6, 4.4e-5, 4.4e-4
        "grad_norms": (7e-4, 1.2e-2, 0.4),  # 9.5e-5, 3.4e-3, 8.3e-2
    },
}


def check(values, name):
    """The figures of a run against the golden ones."""
    golden = STORED["cases"][name]
    allowed = TOLERANCES["-".join(part for part in name.split("-") if "float" in part)]
    versions = f"runs.json was made with torch {STORED['torch']}, this is {torch.__version__}"
    for key in ("losses", "grad_norms"):
        assert len(values[key]) == len(golden[key])
        for steps, tolerance in zip(STEPS, allowed[key], strict=True):
            assert values[key][:steps] == pytest.approx(golden[key][:steps], rel=tolerance, abs=0), versions
    held_out = pytest.approx(golden["validation_losses"], rel=allowed["losses"][-1])
    assert values["validation_losses"] == held_out, versions


@pytest.mark.parametrize("name", CASES)
def test_a_fresh_run_gives_the_golden_figures(name, tmp_path):
    fresh = run_case(CASES[name], tmp_path / "run")
    assert fresh["data"] == STORED["cases"][name]["data"]
    check(fresh, name)


def test_the_golden_run_is_resumed(tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(GOLDEN / "run", folder)
    run_ranks(CASES[RUN].world_size, given, [*CASES[RUN].arguments, f"--run.folder={folder}"], start_group=False)
    resumed, before = figures(folder), figures(GOLDEN / "run")
    assert [resumed[key][:STOP_AFTER] for key in ("losses", "grad_norms")] == [before["losses"], before["grad_norms"]]
    check(resumed, RUN)
