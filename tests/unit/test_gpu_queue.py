"""The queue of GPU measurements ends in time, keeps what it has and goes on from there.

Its processes are stood in for, and its clock stands still while they work. One of each kind is rehearsed for real.
"""

import json
import os
import select
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import gpu, gpu_queue
from benchmarks.gpu_queue import END_SECONDS, KERNEL_TESTS, Group, build_groups, choose, load, summary, won, work

# Takes rows; writes as benchmarks do. `hangs` waits with a process of its own, as torchrun would.
PROCESS = """
import json, pathlib, signal, subprocess, sys
rows, out = sys.argv[1:]
out, done = pathlib.Path(out.removeprefix("--json=")), []
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


def group(*rows: str, **options: Any) -> Group:
    seconds = {row: 100 if row == "long" else 1 for row in rows}
    return Group(seconds, ("process", "ROWS"), **{"start_seconds": 0, "files": (), **options})


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of the results. Whenever a process hangs ten seconds pass."""
    pids = tmp_path / "pids"
    pids.touch()
    now = SimpleNamespace(monotonic=lambda: 10.0 * len(pids.read_text().splitlines()))
    monkeypatch.setattr("benchmarks.gpu_queue.time", now)
    (tmp_path / "process.py").write_text(PROCESS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path / "gpu_queue-test.json"


def measured(file: Path) -> list[str]:
    """The rows that were measured, by the log, which begins anew."""
    log = file.with_suffix(".log").rename(file.with_suffix(".old"))
    return [line.removeprefix("measured ") for line in log.read_text().splitlines() if line.startswith("measured ")]


def test_failures_are_recorded_and_the_next_call_goes_on(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    groups = {"a": group("base", "crashes", "last", always=("base",)), "b": group("too large", "long", "short")}
    work(groups, file, 60)
    found = load(file)
    assert list(found) == ["a: base", "a: crashes", "a: last", "b: too large", "b: short"], "long does not fit"
    assert found["a: crashes"]["failed"] == "RuntimeError: out of luck"
    assert found["a: last"]["tokens/s"] == found["b: short"]["tokens/s"] == 1.5
    assert [json.loads(line)["item"] for line in capsys.readouterr().out.splitlines()][:5] == list(found)
    assert measured(file) == ["base", "base", "last", "too large", "short", "base", "too large"], "failures twice"
    (file.parent / "mended").touch()
    work(groups, file, 60)
    assert measured(file) == ["base", "crashes", "too large"], "what has failed, with what it is compared with"
    lines = {line["row"]: (line["code"], line["result"]) for line in summary(groups, load(file))}
    assert lines["crashes"] == lines["short"] == ("present", "tokens/s 1.5")
    assert lines["long"] == ("", "")
    assert lines["too large"][1].endswith("failed no room")
    work({"a": groups["a"]._replace(files=("train.py",), together=False)}, file, 60)
    assert measured(file) == ["base", "base", "crashes", "base", "last"], "results of other code, a process each"


def test_what_takes_too_long_is_killed_with_its_processes(file: Path) -> None:
    work({"a": group("first", "hangs", "last")}, file, 60)
    found = load(file)
    assert found["a: hangs"]["failed"] == "killed, since it took too long"
    assert found["a: first"]["tokens/s"] == found["a: last"]["tokens/s"] == 1.5
    for pid in (file.parent / "pids").read_text().split():
        if Path(f"/proc/{pid}").exists():
            assert select.select([os.pidfd_open(int(pid))], [], [], 10)[0], "readable once it has ended"


def test_a_row_that_the_end_of_the_call_cuts_has_not_failed(file: Path) -> None:
    work({"a": group("first", "hangs", "last"), "b": group("other")}, file, END_SECONDS + 5)
    assert list(load(file)) == ["a: first"]
    assert measured(file) == ["first"]


def test_settings_that_won_are_added() -> None:
    """To rows of their recipe, of each kind the best; not slower ones, nor what a row has failed with."""
    ratios = {"float8, tensorwise": 1.2, "float8, tensorwise, wk and wv too": 1.21, "float8, rowwise": 1.1}
    ratios |= {"float8, tensorwise, output too, whole logits": 1.19, "float8, tensorwise, fast accumulation": 1.3}
    results: dict[str, Any] = {f"settings: {row}": {"ratio": ratio} for row, ratio in ratios.items()}
    assert won("8B tensorwise 8192", results) == ("--float8.filter=all",)
    assert won("8B bf16 8192", results) == won("8B rowwise 8192", results) == ()
    results["settings, later: float8, tensorwise, output too, whole logits"] = {"ratio": 1.25}
    results["settings: float8, tensorwise, output too"] = {"ratio": 1.24}
    expected = ("--float8.filter=all", "--float8.skip=[]", "--training.loss_chunks=1")
    assert won("8B tensorwise 8192", results) == expected
    command = build_groups(False)["8B and 1.8B"].command(["peaks", "8B bf16 8192", "8B tensorwise 8192"], results)
    assert f"--add=8B tensorwise 8192={' '.join(expected)}" in command
    assert not [word for word in command if "=8B bf16" in word and "add" in word]
    results["8B and 1.8B: 8B tensorwise 8192"] = {"failed": "no room", "added": " ".join(expected)}
    assert won("8B tensorwise 8192", results) == ()


TESTED, OWN = "kernels, rowwise: test_kernels and rowwise", "float8, rowwise, own kernels"
PRESENT = gpu_queue.hash_files(KERNEL_TESTS)


@pytest.mark.parametrize(
    ("tests", "why"),
    [
        ({"code": "older", "passed": 9}, "not tested yet"),
        ({"code": PRESENT, "failed": "FAILED test_casts"}, "fail their tests: FAILED test_"),
        ({"code": PRESENT, "passed": 9}, ""),
    ],
)
def test_own_kernels_are_timed_only_after_their_tests_have_passed(tests: dict[str, Any], why: str, file: Path) -> None:
    ratios = {"float8, rowwise": 1.1, OWN: 1.2}
    results = {TESTED: tests} | {f"settings: {row}": {"ratio": ratio} for row, ratio in ratios.items()}
    assert won("8B rowwise 8192", results) == (() if why else ("--float8.kernels=own",))
    file.write_text(json.dumps({"results": {TESTED: tests}}))
    groups = {"settings": group("float8, rowwise", OWN)}
    work(groups, file, 60)
    assert measured(file) == ["float8, rowwise"] + [OWN] * (not why)
    plain, own = (line["result"] for line in summary(groups, load(file)))
    assert why in own
    assert ("kernels" in own) == bool(why)
    assert "kernels" not in plain


def test_rows_are_settings_that_exist_and_tests_of_kernels_come_before_what_waits_for_them() -> None:
    for run in (gpu.whole_models() | gpu.settings()).values():
        gpu.training_config(run, 1, "unused")
    groups = build_groups(False)
    for recipe in gpu.RECIPES:
        name = f"kernels, {recipe}"
        assert choose(name, groups[name], {}, set(), False, 1000) == [f"test_kernels and {recipe}"]
    own = "float8, rowwise, own kernels"
    assert own in groups["settings"].seconds
    assert own not in choose("settings", groups["settings"], {}, set(), False, 1000)


def test_ratios_are_to_the_row_as_in_the_models_and_half_the_sequences_are_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    speeds = {"--model.n_layers=4": 100.0, "--training.loss_chunks=1": 150.0}

    def measure(run: gpu.Run, device: Any) -> dict[str, Any]:
        row = {"sequences": run.local_batch_size}
        return row | ({"tokens/s": speeds[run.options[-1]]} if run.local_batch_size == 1 else {"failed": gpu.NO_ROOM})

    monkeypatch.setattr(gpu, "measure", measure)
    monkeypatch.setattr(gpu, "rehearsal", lambda run: gpu.dataclasses.replace(run, local_batch_size=4))
    monkeypatch.setattr(gpu, "prepare_once", lambda *_: None)
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
    work({"a": group("first")}, kept / out.name, 60)
    before = (kept / out.name).read_bytes()
    monkeypatch.setenv("OUT", str(out.parent))
    assert gpu_queue.find_file(None, "h200", kept) == out
    work({"a": group("first", "second")}, out, 60)
    assert list(load(out)) == ["a: first", "a: second"]
    assert measured(out) == ["second"]
    assert gpu_queue.find_file(kept, "h200", kept).read_bytes() == before


def test_what_a_bare_machine_lacks_is_said_in_one_line() -> None:
    code = "import runpy, sys; sys.modules['isal'] = sys.modules['torchao'] = None; "
    code += "runpy.run_module('benchmarks.gpu_queue', run_name='__main__')"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.returncode == 1
    assert ended.stderr.splitlines()[-1].startswith("error: this Python lacks isal, torchao: install them, or bring ")


def test_rehearsal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row of each benchmark, for real, on CPU; not compiled, since that takes long."""
    rows = {"matmuls": "any", "settings": "not compiled", "8B and 1.8B": "1.8B bf16 8192"}
    groups = build_groups(rehearse=True)
    few = {name: groups[name]._replace(seconds={row: 50}, always=()) for name, row in rows.items()}
    monkeypatch.setattr("benchmarks.gpu_queue.build_groups", lambda rehearse: few)
    eager = ("--compile.enable=false",)
    monkeypatch.setattr("benchmarks.gpu_queue.won", lambda row, results: eager if row in gpu.whole_models() else ())
    monkeypatch.setattr("signal.signal", lambda *_: None)
    monkeypatch.setattr("sys.argv", ["gpu_queue", "--rehearse", f"--output={tmp_path}", "--budget-seconds=3600"])
    assert gpu_queue.main() == 0
    found = load(tmp_path / "gpu_queue-rehearsal.json")
    assert not [(key, row["failed"]) for key, row in found.items() if "failed" in row]
    assert found["matmuls: any"]["bf16 TFLOP/s"] > 0
    assert found["settings: not compiled"]["tokens/s"] > 0
    assert found["8B and 1.8B: 1.8B bf16 8192"]["tokens/s"] > 0
    assert found["8B and 1.8B: 1.8B bf16 8192"]["added"] == "--compile.enable=false"
