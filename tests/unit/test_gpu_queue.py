"""The queue of GPU measurements ends in time, keeps what it has and goes on from there.

Its processes are stood in for, and its clock stands still while they work. One of each kind is rehearsed for real.
"""

import json
import os
import select
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import gpu, gpu_queue
from benchmarks.gpu_queue import END_SECONDS, Job, build_jobs, load, summarize, work

# Takes rows; writes as benchmarks do. `hangs` waits with a process of its own, as torchrun would.
PROCESS = """
import json, pathlib, signal, subprocess, sys
rows, out = sys.argv[1:]
out, done = pathlib.Path(out), []
for row in rows.split(";"):
    if row == "hangs":
        child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
        print(child.pid, file=open(out.parent / "pids", "a"), flush=True)
        signal.pause()
    if row == "crashes" and not (out.parent / "mended").exists():
        raise RuntimeError("out of luck")
    print("measured", row, flush=True)
    done.append({"row": row, "tokens/s": 1.5} | ({"failed": "no room"} if row == "too large" else {}))
    out.write_text(json.dumps({"rows": done}))
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of the results. Whenever a process hangs ten seconds pass."""
    pids = tmp_path / "pids"
    pids.touch()
    now = SimpleNamespace(monotonic=lambda: 10.0 * len(pids.read_text().splitlines()))
    monkeypatch.setattr("benchmarks.gpu_queue.time", now)
    (tmp_path / "process.py").write_text(PROCESS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(Job, "command", lambda job, part, _: ["process", ";".join(job.results), str(part)])
    return tmp_path / "gpu_queue-test.json"


def do(jobs: dict[str, Job], file: Path, budget_seconds: float = 60) -> list[str]:
    """Work, and return the rows that were measured by the log, which then starts empty."""
    work(jobs, list(jobs), file, budget_seconds, rehearse=False)
    log = file.with_suffix(".log")
    if not log.exists():
        return []
    lines = log.rename(file.with_suffix(".old")).read_text().splitlines()
    return [line.removeprefix("measured ") for line in lines if line.startswith("measured ")]


def test_failures_are_recorded_and_the_next_call_goes_on(
    file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = {"a": Job(1, ("base", "crashes", "last")), "b": Job(100, ("long",)), "c": Job(1, ("too large", "short"))}
    assert do(jobs, file) == ["base", "too large", "short"], "b does not fit"
    found = load(file)
    assert list(found) == ["a: base", "a: crashes", "a: last", "c: too large", "c: short"]
    assert found["a: crashes"]["failed"] == found["a: last"]["failed"] == "RuntimeError: out of luck"
    assert found["a: base"]["tokens/s"] == found["c: short"]["tokens/s"] == 1.5
    assert [json.loads(line)["item"] for line in capsys.readouterr().out.splitlines()] == list(found)
    (file.parent / "mended").touch()
    jobs["d"] = Job(1, ("new",))
    assert do(jobs, file) == ["new", "base", "crashes", "last", "too large", "short"], "what failed comes last"
    lines = {line["row"]: (line["code"], line["result"]) for line in summarize(jobs, list(jobs), load(file))}
    assert lines["crashes"] == lines["short"] == ("present", "tokens/s 1.5")
    assert lines["long"] == ("", "")
    assert lines["too large"][1].endswith("failed no room")
    assert do(jobs, file) == ["too large", "short"]
    monkeypatch.setattr(gpu_queue, "hash_code", lambda: "other code")
    assert do({"d": jobs["d"]}, file) == ["new"]


def test_what_takes_too_long_is_killed_with_its_processes(file: Path) -> None:
    assert do({"a": Job(1, ("first", "hangs", "last")), "b": Job(1, ("other",))}, file) == ["first", "other"]
    found = load(file)
    assert found["a: hangs"]["failed"] == found["a: last"]["failed"] == "killed, since it took too long"
    assert found["a: first"]["tokens/s"] == 1.5
    for pid in (file.parent / "pids").read_text().split():
        if Path(f"/proc/{pid}").exists():
            assert select.select([os.pidfd_open(int(pid))], [], [], 10)[0], "readable once it has ended"


def test_a_row_that_the_end_of_the_call_cuts_has_not_failed(file: Path) -> None:
    jobs = {"a": Job(1, ("first", "hangs", "last")), "b": Job(1, ("other",))}
    assert do(jobs, file, END_SECONDS + 5) == ["first"]
    assert list(load(file)) == ["a: first"]


@pytest.mark.parametrize(
    ("tests", "why"),
    [
        ({"code": "older", "passed": 9}, "not tested yet"),
        ({"code": "present", "failed": "FAILED test_casts"}, "failed: FAILED test_casts"),
        ({"code": "present", "passed": 9}, ""),
    ],
)
def test_own_kernels_are_timed_only_after_their_tests_have_passed(
    tests: dict[str, Any], why: str, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_queue, "hash_code", lambda: "present")
    file.write_text(json.dumps({"results": {"kernels: test_kernels": tests}}))
    jobs = build_jobs()
    chosen = {name: jobs[name]._replace(seconds=1) for name in ("own kernels",)} | {"kernels": jobs["kernels"]}
    work(chosen, ["own kernels"], file, 60, rehearse=False)
    assert any(key.startswith("own kernels: ") for key in load(file)) == (not why)
    lines = summarize(jobs, ["own kernels"], load(file))
    assert len(lines) == 5
    assert all(why in line["result"] for line in lines)


def test_rows_are_settings_that_exist() -> None:
    for run in (gpu.whole_models() | gpu.settings()).values():
        gpu.training_config(run, 1, "unused")
    rows = {row for job in build_jobs().values() for row in job.rows}
    peers = {name for name, run in gpu.whole_models().items() if run.peer}
    assert rows - peers == {"peaks", *gpu.MATMULS, *gpu.whole_models(), *gpu.settings()} - peers - {
        f"{gpu.BASE}, again"
    }


def test_ratios_are_to_the_row_as_in_the_models_and_half_the_sequences_are_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    speeds = {False: 100.0, True: 150.0}

    def measure(run: gpu.Run, device: Any) -> dict[str, Any]:
        row = {"sequences": run.local_batch_size}
        if run.local_batch_size > 1:
            return row | {"failed": gpu.NO_ROOM}
        return row | {"tokens/s": speeds["--training.loss_chunks=1" in run.options]}

    monkeypatch.setattr(gpu, "measure", measure)
    monkeypatch.setattr(gpu, "rehearsal", lambda run: gpu.dataclasses.replace(run, local_batch_size=4))
    monkeypatch.setattr(gpu, "prepare_data", lambda rehearse: None)
    name, file = "float8, tensorwise, output too, whole logits", tmp_path / "rows.json"
    monkeypatch.setattr("sys.argv", ["gpu", "--rehearse", f"--rows={gpu.BASE};{name}", f"--json={file}"])
    assert gpu.main() == 0
    base, other = json.loads(file.read_text())["rows"]
    assert (base["ratio"], other["ratio"], other["sequences"]) == (1, 1.5, 1)


def test_results_go_where_OUT_says_and_begin_with_those_that_are_kept(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, out = tmp_path / "kept", tmp_path / "out" / "gpu_queue-h200.json"
    kept.mkdir()
    jobs = {"a": Job(1, ("first",)), "b": Job(1, ("second",))}
    work(jobs, ["a"], kept / out.name, 60, rehearse=False)
    before = (kept / out.name).read_bytes()
    monkeypatch.setenv("OUT", str(out.parent))
    assert gpu_queue.find_file(None, "h200", kept) == out
    assert do(jobs, out) == ["second"]
    assert list(load(out)) == ["a: first", "b: second"]
    assert gpu_queue.find_file(kept, "h200", kept).read_bytes() == before


def test_rehearsal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of each kind, for real, on CPU; not compiled, since that takes long."""
    jobs = {"a": Job(50, ("matmuls of w2", "not compiled"))}
    monkeypatch.setattr("benchmarks.gpu_queue.build_jobs", lambda: jobs)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    monkeypatch.setattr("sys.argv", ["gpu_queue", "--rehearse", f"--output={tmp_path}", "--budget-seconds=3600"])
    assert gpu_queue.main() == 0
    found = load(tmp_path / "gpu_queue-rehearsal.json")
    assert not [(key, row["failed"]) for key, row in found.items() if "failed" in row]
    assert found["a: matmuls of w2"]["bf16 TFLOP/s"] > 0
    assert found["a: matmuls of w2"]["rowwise TFLOP/s"] > 0
    assert found["a: not compiled"]["tokens/s"] > 0
