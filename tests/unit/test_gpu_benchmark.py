"""The GPU benchmark, rehearsed on CPU: a typo must not cost the first minute on a GPU."""

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch._functorch import config as functorch

from benchmarks import chaos, ethernet, gpu, gpu_settings, step
from benchmarks.gpu import KERNELS, attainable, bars, merged, runs, shares
from models.llama import FLAVORS
from models.llama.model import Llama
from tests.harness import run_ranks

ROOT = Path(__file__).parents[2]


def test_a_rehearsal_measures_its_rows(tmp_path: Path) -> None:
    kinds = "peaks,8B bf16 8192,8B tensorwise 8192"
    command = [sys.executable, "-m", "benchmarks.gpu", "--rehearse", f"--rows={kinds}", f"--json={tmp_path / 'rows'}"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    rows = {row["row"]: row for row in json.loads((tmp_path / "rows").read_text())["rows"]}
    assert list(rows) == kinds.split(",")
    assert not [row for row in rows.values() if "failed" in row]
    assert rows["peaks"]["bf16 TFLOP/s"] > 0
    assert all(row["tokens/s"] > 0 and row["peak GiB"] > 0 for row in list(rows.values())[1:])
    losses = [rows[name]["loss"] for name in kinds.split(",")[1:]]
    assert losses[0] != losses[1] == pytest.approx(losses[0], rel=0.01)


def test_settings_are_rehearsed(tmp_path: Path) -> None:
    rows = f"{gpu_settings.BASE};the compiler unguided"
    command = [sys.executable, "-m", "benchmarks.gpu_settings", "--rehearse", "--rows", rows]
    result = subprocess.run(
        [*command, f"--json={tmp_path / 'rows'}"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    first, second = json.loads((tmp_path / "rows").read_text())["rows"]
    assert "failed" not in first | second
    assert first["ratio"] == 1
    assert second["ratio"] == second["tokens/s"] / first["tokens/s"]


def test_a_setting_starts_without_the_last_ones_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    def budget(*_: Any) -> dict[str, Any]:
        found = functorch.activation_memory_budget
        functorch.activation_memory_budget = 0.8  # as a run with a budget leaves it
        return {"budget": found}

    monkeypatch.setattr(gpu_settings, "measure_training", budget)
    row = gpu_settings.rows()["nothing recomputed"]
    for _ in range(2):
        assert gpu_settings.measure(row, torch.device("cpu"), rehearse=True) == {"budget": 1.0}


def test_a_setting_that_failed_misses_the_check(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def fail(*_: Any) -> dict[str, Any]:
        raise RuntimeError("out of memory")

    (tmp_path / "manifest.json").touch()  # the dataset need not be prepared
    monkeypatch.setattr(gpu_settings, "REHEARSAL", tmp_path)
    monkeypatch.setattr(gpu_settings, "measure_training", fail)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(sys, "argv", ["gpu_settings", "--rehearse", "--quick", "--check"])
    assert gpu_settings.main() == 1
    missed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("missed: ")]
    assert missed == [f"missed: {row}: RuntimeError: out of memory" for row in gpu_settings.QUICK]


def test_settings_say_which_rows_there_are(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu_settings", "--rows=eager"])
    with pytest.raises(SystemExit):
        gpu_settings.main()
    assert "--rows: unknown eager; known are as in the rows of the 8B; " in capsys.readouterr().err


def attention_masks(step: Callable[[], None], *_: Any) -> dict[str, Any]:
    """Calls of attention in a step of a peer and shapes of the masks it is given, in place of its speed."""
    with torch.profiler.profile(record_shapes=True) as profiler:
        step()
    names = "aten::_scaled_dot_product_flash_attention_for_cpu", "aten::_scaled_dot_product_attention_math"
    calls = [event for event in profiler.events() or [] if event.name in names]
    return {"calls": len(calls), "masks": [shape for event in calls for shape in event.input_shapes[3:] if shape]}


def measure_masks() -> dict[str, Any]:
    quick = partial(torch.compile, backend="aot_eager")
    with mock.patch.object(gpu, "measure_loop", attention_masks), mock.patch.object(torch, "compile", quick):
        return gpu.measure_row("1.8B transformers 8192", 2, rehearse=True, started=0.0)


def test_transformers_is_compiled_so_that_attention_needs_no_mask() -> None:
    (found,) = run_ranks(1, measure_masks)
    assert found["calls"] > 0
    assert found["masks"] == []


def run_main(
    monkeypatch: pytest.MonkeyPatch, folder: Path, rows: list[str], run_row: Callable[..., Any], gib: float = 138.5
) -> None:
    """The command on a machine with a GPU of `gib`, whose rows are measured by `run_row(name, sequences, ...)`."""

    def run(name: str, *others: Any) -> dict[str, Any]:
        return {gpu.MEMORY: gib} if name == gpu.MEMORY else run_row(name, *others)

    monkeypatch.setattr(gpu, "run_row", run)
    monkeypatch.setattr(gpu, "DATASET", folder)
    (folder / "manifest.json").touch()  # the dataset need not be prepared
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(sys, "argv", ["gpu", f"--rows={','.join(rows)}"])
    assert gpu.main() == 0


def test_a_row_without_room_is_measured_with_half_the_sequences(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What fits the first row of a model is what its others begin with, peers too; not another model's."""
    room = {"1.8B bf16 8192": 2, "1.8B transformers 8192": 1, "1.8B bf16 4096": 4, "3B bf16 8192": 2}
    tried: list[tuple[str, int]] = []

    def run_row(name: str, sequences: int, *_: Any) -> dict[str, Any]:
        tried.append((name, sequences))
        if sequences > room[name]:
            return {"failed": f"{gpu.NO_ROOM} for {sequences} sequences at once"}
        return {"tokens/s": 1.0, "sequences": sequences}

    run_main(monkeypatch, tmp_path, list(room), run_row)
    assert tried == [
        ("1.8B bf16 8192", 4),
        ("1.8B bf16 8192", 2),
        ("1.8B transformers 8192", 2),
        ("1.8B transformers 8192", 1),
        ("1.8B bf16 4096", 4),
        ("3B bf16 8192", 2),
    ]


def test_another_failure_is_not_tried_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tried: list[int] = []

    def run_row(name: str, sequences: int, *_: Any) -> dict[str, Any]:
        tried.append(sequences)
        return {"failed": "ValueError"}

    run_main(monkeypatch, tmp_path, ["1.8B bf16 8192"], run_row)
    assert tried == [4]


def test_without_torchao_only_the_rows_that_need_it_fail(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    run_main(monkeypatch, tmp_path, ["1.8B tensorwise 8192", "1.8B transformers 8192"], lambda *_: {"tokens/s": 1.0})
    first, second = map(json.loads, capsys.readouterr().out.splitlines()[:2])
    assert "torchao.float8" in first["failed"]
    assert second["tokens/s"] == 1


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nMore of it"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("Triton Error [CUDA]: out of memory"),
    ],
    ids=["allocator", "cuBLAS", "Triton"],
)
def test_memory_that_runs_out_is_said_by_the_process_of_the_row(
    error: RuntimeError, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measure_row(*_: Any) -> dict[str, Any]:
        raise error

    class Ended(BaseException):
        pass

    def leave(code: int) -> None:
        raise Ended

    monkeypatch.setattr(gpu, "measure_row", measure_row)
    monkeypatch.setattr(gpu.os, "_exit", leave)
    monkeypatch.setattr(sys, "argv", ["gpu", "--alone=1.8B bf16 8192", "--sequences=4"])
    with pytest.raises(Ended):
        gpu.main()
    failed = json.loads(capsys.readouterr().out)["failed"]
    assert failed == f"no room for 4 sequences at once: {str(error).splitlines()[0]}"
    assert failed.startswith(gpu.NO_ROOM)


@pytest.mark.parametrize(
    ("says", "failed"),
    [("Skipping a library", "ended by SIGSEGV"), ("CUDA error: misaligned", "CUDA error: misaligned")],
)
def test_a_row_that_a_signal_ended_says_why(
    says: str, failed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = tmp_path / "row"
    row.write_text(f"#!/bin/sh\necho '{says}' >&2\nkill -SEGV $$\n")
    row.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(row))
    assert gpu.run_row("peaks", 1, True, 60, tmp_path / "log") == {"failed": f"{failed}, see {tmp_path / 'log'}"}


def test_the_plan_leaves_room_for_what_a_device_holds() -> None:
    """Peaks counted by torch's CUDA allocator for an H200, docs/speed.md, and the room of GPUs in GiB."""
    h100, h200 = 79.2, 138.5
    least = {name: gpu.least_gib(run) for name, run in runs().items()}
    fits_h100 = {name for name, gib in least.items() if gib <= h100}
    assert not fits_h100 & {"1.8B bf16 8192", "8B bf16 8192", "8B bf16 8192 saving memory", "8B tensorwise 8192"}
    assert {name for name in runs() if "12 layers" in name or runs()[name].peer} <= fits_h100
    assert gpu.least_gib(dataclasses.replace(runs()["1.8B bf16 8192"], local_batch_size=2)) <= h100
    assert max(least.values()) <= h200


@pytest.mark.parametrize("first", [[], ["peaks"]], ids=["asked", "of peaks"])
def test_no_process_is_started_for_what_the_planner_sees_no_room_for(
    first: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tried: list[tuple[str, int]] = []

    def run_row(name: str, sequences: int, *_: Any) -> dict[str, Any]:
        tried.append((name, sequences))
        return {gpu.MEMORY: 79.2} if name == "peaks" else {"tokens/s": 1.0, "sequences": sequences}

    rows = [*first, "1.8B bf16 8192", "8B bf16 8192", "8B bf16 8192 of 12 layers"]
    run_main(monkeypatch, tmp_path, rows, run_row, gib=0.0 if first else 79.2)
    assert tried == [*((name, 1) for name in first), ("1.8B bf16 8192", 2), ("8B bf16 8192 of 12 layers", 1)]


def test_data_are_prepared_by_a_command_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Whose workers import nothing of the benchmark's."""
    commands: list[list[str]] = []
    monkeypatch.setattr(subprocess, "run", lambda command, **_: commands.append(command))
    monkeypatch.setattr(gpu, "DATASET", tmp_path / "set")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(gpu, "run_row", lambda *_: {})
    monkeypatch.setattr(sys, "argv", ["gpu", "--rows=peaks"])
    gpu.main()
    assert [command[1:3] for command in commands] == [["-m", "data.prepare"]]


@pytest.mark.parametrize("benchmark", [chaos, ethernet, step], ids=lambda module: module.__name__)
def test_a_benchmark_of_the_cpu_refuses_a_gpu(
    benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("benchmarks.report.device_type", lambda: "cuda")
    monkeypatch.setattr(sys, "argv", [benchmark.__name__])
    with pytest.raises(SystemExit):
        benchmark.main()
    assert "torch has found a device of type 'cuda': set CUDA_VISIBLE_DEVICES=" in capsys.readouterr().err


def test_a_wait_for_the_device_is_no_part_of_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]

    def spend(seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr(gpu, "synchronize", lambda device: spend(0.1))
    monkeypatch.setattr(gpu.time, "perf_counter", lambda: now[0])
    assert gpu.seconds(lambda: spend(1.0), torch.device("cpu")) == pytest.approx(1.0, rel=0.02)


def test_every_row_can_be_picked_and_is_a_config() -> None:
    assert not [name for name in runs() if "," in name], "--rows separates names by commas"
    for run in runs().values():
        assert gpu.training_config(run, 1, "outputs").compile.enable
        assert gpu.training_config(gpu.rehearsal(run), 1, "outputs").training.seq_len == 64


@pytest.mark.parametrize("first", [{"tokens/s": 3.0}, {"failed": gpu.NO_ROOM}], ids=["room", "no room"])
def test_a_row_that_saves_memory_is_for_want_of_it(
    first: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    name, saving = "8B bf16 8192", "8B bf16 8192 saving memory"
    results = {name: first, saving: {"tokens/s": 2.0}}
    measured: list[str] = []

    def run_row(name: str, *_: Any) -> dict[str, Any]:
        measured.append(name)
        return results[name] | {"sequences": 1}

    run_main(monkeypatch, tmp_path, [name, saving, f"{name} of 12 layers"], run_row)
    assert measured == ([name] if "failed" not in first else [name, saving])


def test_the_bar_is_met_by_the_row_that_could_be_measured() -> None:
    rows: list[dict[str, Any]] = [
        {"row": "8B bf16 8192", "failed": "no room"},
        {"row": "8B bf16 8192 saving memory", "tokens/s": 10_600.0},
    ]
    chosen = [row["row"] for row in rows]
    assert list(bars(rows, chosen, "NVIDIA H200")) == [("8B bf16 8192: 10,600 tokens/s, at least 10,500", True)]
    assert list(bars(rows, chosen, "NVIDIA H100 80GB HBM3")) == []
    rows = [{"row": "1.8B bf16 8192", "tokens/s": 1.0, "attention by": "flash"}]
    assert ("1.8B bf16 8192: attention by flash, cudnn is asked for", False) in list(bars(rows, [], "NVIDIA H200"))
    rows = [{"row": "1.8B torchtitan 8192", "tokens/s": 1.0, "attention by": "flash"}]  # which is its own affair
    assert list(bars(rows, [], "NVIDIA H200")) == []


def test_a_peer_is_profiled_for_one_step_after_those_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    run = gpu.rehearsal(dataclasses.replace(runs()["1.8B torchtitan 8192"], steps=2))
    steps: list[int] = []

    def step() -> None:
        steps.append(len(steps) + 1)
        with torch.profiler.record_function(f"step {len(steps)}"):
            torch.ones(1)

    def names(profiler: torch.profiler.profile, _: torch.device) -> dict[str, Any]:
        return {"seen": [event.name for event in profiler.events() or [] if event.name.startswith("step")]}

    monkeypatch.setattr(gpu, "shares", names)
    row = gpu.measure_loop(step, run, torch.device("cpu"), started=0.0)
    assert len(steps) == gpu.WARMUP_STEPS + 2 + 1
    assert row["seen"] == [f"step {len(steps)}"]


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

    # torchao's filter leaves all but w1 and w3 of the 1.8B in bfloat16, which have 52 % of its blocks' weights.
    flavor = FLAVORS["1.8B"]
    rowwise = 6 * flavor.n_layers * 2 * flavor.dim * flavor.hidden_dim
    ours = attainable(runs()["1.8B rowwise 8192"], peak)
    of_bf16 = 1 / attainable(runs()["1.8B bf16 8192"], peak)
    assert 1 / ours == pytest.approx(of_bf16 - rowwise / 790e12 + rowwise / 1500e12, rel=1e-6)


def test_time_of_kernels_that_overlap_is_counted_once() -> None:
    assert list(merged(iter([(5.0, 7.0), (1.0, 3.0), (2.0, 4.0)]))) == [(0.0, 0.0), (1.0, 4.0), (5.0, 7.0)]
    assert KERNELS[-1][1] == "", "every kernel is counted as something"


def event(name: str, begin: float, end: float, annotation: bool = False) -> SimpleNamespace:
    span = SimpleNamespace(start=begin, end=end, elapsed_us=lambda: end - begin)
    return SimpleNamespace(
        name=name, time_range=span, device_type=torch.autograd.DeviceType.CUDA, is_user_annotation=annotation
    )


def test_shares_count_kernels_and_nothing_that_only_bears_a_name() -> None:
    events = [
        event("## Call CompiledFxGraph ##", 0, 100, annotation=True),
        event("Optimizer.step#AdamW.step", 60, 100, annotation=True),
        event("nvjet_tst_128x256_64x4", 0, 40),
        event("cudnn_generated_fort_native_sdpa_sm90_flash_fprop", 40, 60),
        event("triton_poi_fused__scaled_dot_product_cudnn_attention_view_3", 60, 70),
        event("triton_poi_fused_add_div_lerp_mul_sqrt_0", 70, 80),
        event("triton_tem_fused_flex_attention_1", 90, 100),
        event("void cudnn::fusion::compute_dot_do_o_specialized<true, 128>", 100, 110),
        event("void cublasLt::splitKreduce_kernel<32, 16, int>", 110, 120),
        event("multi_tensor_apply_kernel<LpNormFunctor<float, NormType::L2>>", 120, 130),
        event("multi_tensor_apply_kernel<FusedAdamMathFunctor<float, 4>>", 130, 140),
        event("void at::native::(anonymous namespace)::chunk_cat_cuda_kernel<float, c10::BFloat16>", 140, 200),
    ]
    found = shares(SimpleNamespace(events=lambda: events), torch.device("cuda"))  # type: ignore[arg-type]
    assert {name: found[f"{name} %"] for name in ("GEMM", "attention", "pointwise", "optimizer", "copy", "idle")} == {
        "GEMM": 25,
        "attention": 20,
        "pointwise": 10,
        "optimizer": 10,
        "copy": 30,
        "idle": pytest.approx(5),
    }
    assert found["attention by"] == "cudnn+flex"
