"""What a machine with one GPU should measure next, in one call that ends in time.

    python -m benchmarks.gpu_queue [--budget-seconds 540] [--only "GROUP;..."] [--output FOLDER] [--list] [--rehearse]

It measures what has no result for the present code, in this order: rates of matmuls and attention, tests of float8's
kernels, float8's settings one by one, tests with several ranks, rows of benchmarks.gpu for 8B and 1.8B with the
settings that won, peers, the 3B, settings with less to hope for. What has failed is tried again last. Own kernels are
timed only after their tests have passed. FOLDER/gpu_queue-GPU.json gets each result as soon as it is there, with a hash
of the files that it depends on; what the processes print goes into the .log beside it. The next call goes on from
there. FOLDER is --output, else $OUT where that is set, else benchmarks/results, whose results the others begin with.

A row whose estimate exceeds the rest of the budget is left out. A process that takes twice its estimate, or all of the
rest, is killed. `--list` measures nothing, and without a GPU lists an H200's results. `--rehearse` runs everything on
CPU with tiny shapes, to find typos before using a GPU: its figures say nothing.
"""

import argparse
import hashlib
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.bare import require_packages

if __name__ == "__main__":
    require_packages()  # before the next imports fail

from benchmarks import gpu
from benchmarks.report import REHEARSE, cell, has_gpu, machine, prepare_once, print_row, table
from storage.records import output_path, write_atomically

ROOT = Path(__file__).parents[1]
RESULTS, REHEARSAL = ROOT / "benchmarks" / "results", ROOT / "outputs" / "rehearsal"
# What computes a step. If one of these files changes, results are old.
STEP = ("train.py", "config.py", "loss.py", "optim.py", "muon.py", "models/**/*.py", "parallel/*.py", "float8/*.py")
TESTS = (*STEP, "checkpoint/*.py", "run/*.py", "tests/gpu/*.py", "tests/parity*.py")
KERNEL_TESTS = ("float8/*.py", "tests/gpu/test_kernels.py", "tests/unit/test_float8_*.py")
# Group of tests → pytest's expression, and the seconds that it should take.
RANKS = {
    "2 ranks": ("2ranks and not compiled", 100),
    "2 ranks, compiled": ("2ranks and compiled", 150),
    "4 ranks": ("4ranks", 90),
    "2 ranks, then 4": ("save_behind", 60),
    "one rank": ("test_gpu", 120),
}
MODEL_SECONDS = {"1.8B": 50, "3B": 65, "8B": 85}
SHAPE_SECONDS = {
    "attention.wq attention.wo": 6,
    "attention.wk attention.wv": 4,
    "feed_forward.w1 feed_forward.w3": 8,
    "feed_forward.w2": 8,
    "output": 25,
}
ENVIRONMENT = {"TEST_GPU": "1", "HF_HUB_OFFLINE": "1", "COLUMNS": "300"}  # the last: of pytest's summary
SHOWN = ("ratio", "passed", "added", "failed")  # of a result in the table, beside rates
WON = 1.005  # the least gain that is no noise: a repeated row differed by 0.001
END_SECONDS = 15  # for imports and the table

Results = dict[str, dict[str, Any]]  # "group: row" → what was measured, and of which code


class Group(NamedTuple):
    """Rows that one process measures, with those of `always` to compare with; if not `together`, a process each."""

    seconds: dict[str, int]  # row → what it should take
    words: tuple[str, ...]  # a module and its options, ROWS among them for those to measure
    start_seconds: int = 25  # before the first row
    always: tuple[str, ...] = ()
    files: tuple[str, ...] = STEP
    together: bool = True

    def command(self, rows: Sequence[str], results: Results) -> list[str]:
        """What measures these rows, with the settings that have won."""
        names = ";".join(dict.fromkeys((*self.always, *rows)))
        command = [word.replace("ROWS", names) for word in self.words]
        for row in rows:
            options = won(row, results)
            if options:
                command.append(f"--add={row}={' '.join(options)}")
        return command


def build_groups(rehearse: bool) -> dict[str, Group]:
    """The queue. Estimates are for an H200, by earlier rows if there are such."""
    flags = ("--rehearse",) if rehearse else ()
    measure_rows = ("benchmarks.gpu", "--rows=ROWS", *flags)
    measure_matmuls = ("benchmarks.float8_gemm", "--matmuls", "--training.local_batch_size=2", *flags)
    runs = gpu.whole_models()
    settings = gpu.settings()

    def tests(expression: str, seconds: int, files: tuple[str, ...] = TESTS) -> Group:
        words = ("pytest", "-q", "-rpfE", "-p", "no:cacheprovider", "tests/gpu", "-k", expression)
        return Group({expression: seconds}, words, files=files)

    def single(kinds: Sequence[str]) -> Group:
        names = [f"float8, {recipe}, {kind}".strip(", ") for kind in kinds for recipe in gpu.RECIPES]
        seconds = {name: 20 for name in names if name in settings}
        return Group(seconds, measure_rows, 45, (gpu.BASE,))

    def whole(names: Sequence[str], **options: Any) -> Group:
        seconds = {name: MODEL_SECONDS[runs[name].flavor] for name in names}
        return Group(seconds, measure_rows, 10, ("peaks",), together=False, **options)

    later = ("output too, whole logits", *gpu.IMPRECISE)
    first = ("", *(gain for gain in gpu.GAINS if gain not in later))
    recipes = ("tensorwise", "bf16", "rowwise", "muon")
    peers = [name for name, run in runs.items() if run.peer and importlib.util.find_spec(run.peer)]
    shapes = {"any": 5} if rehearse else SHAPE_SECONDS
    groups = {
        "matmuls": Group(shapes, measure_matmuls, files=("benchmarks/float8_gemm.py",)),
        "peaks": Group({"peaks": 10}, measure_rows, files=("benchmarks/gpu.py",)),
    }
    for recipe in gpu.RECIPES:
        groups[f"kernels, {recipe}"] = tests(f"test_kernels and {recipe}", 45, KERNEL_TESTS)
    groups["settings"] = single(first)
    for name, (expression, seconds) in RANKS.items():
        groups[name] = tests(expression, seconds)
    groups["8B and 1.8B"] = whole([f"{flavor} {recipe} 8192" for flavor in ("8B", "1.8B") for recipe in recipes])
    groups["peers"] = whole(["1.8B bf16 8192", *peers], files=("benchmarks/gpu.py",))
    groups["3B"] = whole([name for name in runs if name.startswith("3B")])
    groups["settings, later"] = single(later)
    return groups


def kernels_unproven(row: str, results: Results) -> str:
    """Why a row must not be timed, as its own kernels have passed no test of the present code; empty if it may be."""
    recipe = next((recipe for recipe in gpu.RECIPES if recipe in row), "")
    is_test = row.startswith("test_kernels")
    if is_test or "own kernels" not in row:
        return ""
    result = results.get(f"kernels, {recipe}: test_kernels and {recipe}", {})
    if "failed" in result:
        return f"its kernels fail their tests: {result['failed']}"
    return "" if result.get("code") == hash_files(KERNEL_TESTS) else "its kernels are not tested yet"


def won(row: str, results: Results) -> tuple[str, ...]:
    """The settings that were faster one by one for the recipe of a whole model's row, of each kind the best.

    None if the row has failed with them.
    """
    failed_with = [
        key for key, found in results.items() if key.endswith(f": {row}") and {"failed", "added"} <= {*found}
    ]
    if row not in gpu.whole_models() or failed_with:
        return ()
    ratios = {key.partition(": ")[2]: found["ratio"] for key, found in results.items() if "ratio" in found}
    best: dict[str, tuple[float, tuple[str, ...]]] = {}
    for name, setting in gpu.settings().items():
        ratio = ratios.get(name, 0)
        is_own = setting.beside == f"float8, {row.split()[1]}"
        if is_own and ratio > WON * ratios.get(setting.beside, ratio) and not kernels_unproven(name, results):
            kind = name.split(", ")[2]
            best[kind] = max(best.get(kind, (0.0, ())), (ratio, setting.gain))
    return tuple(option for _, gain in best.values() for option in gain)


def choose(name: str, group: Group, results: Results, tried: set[str], again: bool, left: float) -> list[str]:
    """The rows that fit into the seconds that are `left`: those without a result, or `again` those that failed."""
    code = hash_files(group.files)
    seconds = group.start_seconds
    rows: list[str] = []
    for row, of_row in group.seconds.items():
        key = f"{name}: {row}"
        result = results.get(key, {})
        is_wanted = "failed" in result if again else result.get("code") != code
        # What has failed may have left the GPU in a state in which all rows of its process fail.
        has_room = not rows or (group.together and not again)
        fits = seconds + of_row <= left and has_room
        if is_wanted and fits and key not in tried and not kernels_unproven(row, results):
            rows.append(row)
            seconds += of_row
    return rows


def hash_files(patterns: Sequence[str]) -> str:
    digest = hashlib.sha256()
    for path in sorted({path for pattern in patterns for path in ROOT.glob(pattern)}):
        digest.update(f"{path.relative_to(ROOT)}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def work(groups: dict[str, Group], file: Path, budget_seconds: float, patience: float = 2.0) -> None:
    """Measure what fits into the budget. Each result is printed and goes into `file` once it is there.

    A process that takes `patience` times its estimate is killed.
    """
    end = time.monotonic() + budget_seconds - END_SECONDS
    facts = machine()
    results = load(file)
    tried: set[str] = set()

    def keep(name: str, row: str, found: dict[str, Any]) -> None:
        key = f"{name}: {row}"
        if key not in tried:
            tried.add(key)
            code = hash_files(groups[name].files)
            results[key] = {"code": code, "date": facts["date"], "commit": facts["commit"]} | found
            print_row({"item": key} | found)
            write_atomically(file, json.dumps({"machine": facts, "results": results}, indent=1).encode() + b"\n")

    for again in (False, True):
        tried.clear()
        for name, group in groups.items():
            while rows := choose(name, group, results, tried, again, end - time.monotonic()):
                seconds = group.start_seconds + sum(group.seconds[row] for row in rows)
                limit = min(end, time.monotonic() + patience * seconds)
                failure = measure(group.command(rows, results), file, limit, partial(keep, name))
                missing = [row for row in rows if f"{name}: {row}" not in tried]
                if not failure or time.monotonic() >= end:  # this call's time is over
                    tried.update(f"{name}: {row}" for row in missing)
                elif missing:
                    keep(name, missing[0], {"failed": failure})  # the others are tried without it


def measure(command: Sequence[str], file: Path, end: float, keep: Callable[[str, dict[str, Any]], None]) -> str:
    """Run a command to its end, or to `end`, and keep each row once it is there. Returns how it failed, or ""."""
    part = file.with_suffix(".part.json")
    part.unlink(missing_ok=True)
    is_test = command[0] == "pytest"
    words = [*command] if is_test else [*command, f"--json={part}"]
    with open(file.with_suffix(".log"), "a+", encoding="utf-8") as log:
        print(f"--- {' '.join(words)}", file=log, flush=True)
        begin = log.tell()
        child = subprocess.Popen(
            [sys.executable, "-m", *words], cwd=ROOT, env=os.environ | ENVIRONMENT,
            stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            while child.poll() is None and time.monotonic() < end:
                with suppress(subprocess.TimeoutExpired):
                    child.wait(1)
                keep_rows(part, keep)
            code = child.poll()
        finally:  # with its own processes
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        keep_rows(part, keep)
        log.seek(begin)
        lines = [line for line in log.read().splitlines() if line.strip()] or ["no output"]
    if code is None:
        return "killed, since it took too long"
    if code:
        errors = [line for line in lines if re.search(r"[Ee]rror: .", line)]
        return (errors or lines)[-1][:300]
    if is_test:
        keep(command[-1], {"passed": sum(line.startswith("PASSED tests/") for line in lines)})
    return ""


def keep_rows(part: Path, keep: Callable[[str, dict[str, Any]], None]) -> None:
    """Keep the rows in a benchmark's JSON file. It may not be there yet, or not be whole."""
    with suppress(ValueError, FileNotFoundError):
        for row in json.loads(part.read_text(encoding="utf-8"))["rows"]:
            keep(row.get("row") or row["layers"], row)


def load(file: Path) -> Results:
    return json.loads(file.read_text(encoding="utf-8"))["results"] if file.exists() else {}


def summary(groups: dict[str, Group], results: Results) -> list[dict[str, Any]]:
    """A row of the table for each row of the queue, and for what was measured beside."""
    lines = []
    for name, group in groups.items():
        beside = [key.partition(": ")[2] for key in results if key.startswith(f"{name}: ")]
        for row in dict.fromkeys((*group.seconds, *beside)):
            result = results.get(f"{name}: {row}", {})
            code = ""
            if result:
                code = "present" if result["code"] == hash_files(group.files) else "older"
            shown = {key: value for key, value in result.items() if key.endswith("/s") or key in SHOWN}
            text = ", ".join(f"{key} {cell(value)[:80]}" for key, value in shown.items())
            text += kernels_unproven(row, results)[:80]
            estimate = group.seconds.get(row)
            lines.append({"group": name, "row": row, "estimate s": estimate, "code": code, "result": text})
    return lines


def find_file(output: Path | None, name: str, kept: Path) -> Path:
    """The file of the results in the folder asked for, which begins with those that are kept."""
    file = Path(output or os.environ.get("OUT", "") or kept) / f"gpu_queue-{name}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    earlier = kept / file.name
    if earlier.exists() and not file.exists():
        shutil.copyfile(earlier, file)
    return file


def main() -> int:
    started = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget-seconds", type=float, default=540, help="the whole call (default %(default)s)")
    parser.add_argument("--only", default="", help="groups, with ; between them (default: all)")
    parser.add_argument("--output", type=output_path, help="folder of the results (default benchmarks/results)")
    parser.add_argument("--list", action="store_true", help="rows, estimates and what there is, then end")
    parser.add_argument("--rehearse", action="store_true", help=REHEARSE)
    arguments = parser.parse_args()
    rehearse = arguments.rehearse
    groups = build_groups(rehearse)
    chosen = arguments.only.split(";") if arguments.only else list(groups)
    unknown = {*chosen} - {*groups}
    if unknown:
        parser.error(f"--only: unknown {'; '.join(sorted(unknown))}; known are {'; '.join(groups)}")
    groups = {name: group for name, group in groups.items() if name in chosen}
    if not has_gpu(rehearse or arguments.list):
        return 0
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "h200"
    name = "rehearsal" if rehearse else re.sub(r"\W+", "-", device.lower().removeprefix("nvidia "))
    file = find_file(arguments.output, name, REHEARSAL if rehearse else RESULTS)
    if not arguments.list:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # through `finally`: no process stays on the GPU
        with suppress(subprocess.CalledProcessError):  # some rows need no data
            prepare_once(*((gpu.REHEARSAL, "docs") if rehearse else (gpu.DATASET,)))
        left = arguments.budget_seconds - (time.monotonic() - started)
        work(groups, file, left, patience=20.0 if rehearse else 2.0)  # CPUs compile for minutes
    print("\n" + table(summary(groups, load(file))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
