"""Golden runs: this code trains as the code of an earlier commit did, and resumes its run or refuses it in one line."""

import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.golden.make import (
    FIGURES,
    GOLDEN,
    ROOT,
    RUN,
    STOP_AFTER,
    UP_TO,
    data_hash,
    distances,
    figures,
    loaded,
    run_case,
    stored,
    stored_case,
)
from tests.ports import free_port

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
RESUME_SECONDS = 240  # for a machine that is busy


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


@pytest.mark.parametrize("dp_size", [1, 4])
def test_the_golden_dataset_gives_the_golden_data(dp_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    golden = CASES["one-float32"]
    arguments = [word for word in golden["arguments"] if "local_batch_size" not in word]
    arguments.append("--training.local_batch_size=2")
    ranks = [loaded(arguments, dp_rank, dp_size, len(golden["losses"])) for dp_rank in range(dp_size)]
    assert data_hash(ranks, dp_size) == golden["data"]


def start(arguments: list[str], world_size: int, tmp_path: Path) -> tuple[int, str]:
    """The exit code and stderr of rank 0 of train.py, in processes of their own, as torchrun would start them."""
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(world_size)}
    ranks: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(world_size):
            environment = {**os.environ, **address, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            with (tmp_path / f"stderr{rank}").open("wb") as stderr:
                command = [sys.executable, "train.py", *arguments]
                ranks.append(subprocess.Popen(command, cwd=ROOT, env=environment, stderr=stderr))
        code = ranks[0].wait(RESUME_SECONDS)
        if not code:
            assert [process.wait(RESUME_SECONDS) for process in ranks] == [0] * world_size
    finally:
        for process in ranks:  # others let rank 0 say what is wrong, and wait until they are ended
            process.kill()
            process.wait()
    return code, (tmp_path / "stderr0").read_text()


def test_the_golden_run_is_resumed_or_refused_in_one_line(tmp_path: Path) -> None:
    golden, folder = CASES[RUN], tmp_path / "run"
    shutil.copytree(GOLDEN / "run", folder)
    code, said = start([*golden["arguments"], f"--run.folder={folder}"], golden["world_size"], tmp_path)
    if code:
        errors = [line for line in said.splitlines() if line.startswith("error")]
        assert (code, errors) == (2, said.splitlines()[-1:]), said
        assert "Traceback" not in said
        warnings.warn(f"this code refuses the golden run: {errors[0]}", stacklevel=1)
        assert _content(folder / "checkpoints") == _content(GOLDEN / "run" / "checkpoints"), "refused, and changed"
        return
    resumed, before = figures(folder), figures(GOLDEN / "run")
    assert [resumed[key][:STOP_AFTER] for key in ("losses", "grad_norms")] == [before["losses"], before["grad_norms"]]
    check(resumed, RUN)


def _content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
