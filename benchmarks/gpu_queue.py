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
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.bare import require_packages

if __name__ == "__main__":
    require_packages()  # before the next imports fail

from benchmarks import gpu, gpu_settings
from benchmarks.report import REHEARSE, has_gpu, machine, prepare_once, print_row, table
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
ENVIRONMENT = {"TEST_GPU": "1", "HF_HUB_OFFLINE": "1", "COLUMNS": "300"}  # the last: of pytest's summary
WON = 1.005  # the least gain that is no noise: a repeated row differed by 0.001
END_SECONDS = 15  # for imports and the table

Results = dict[str, dict[str, Any]]  # "group: row" → what was measured, and of which code


class Group(NamedTuple):
    """Rows that one process measures together."""

    seconds: dict[str, int]  # row → what it should take
    command: Callable[[Sequence[str], Results], list[str]]  # from rows, and the results so far
    start_seconds: int = 25  # before the first row
    always: tuple[str, ...] = ()  # rows of every process, to compare with
    files: tuple[str, ...] = STEP


def build_groups(rehearse: bool) -> dict[str, Group]:
    """The queue. Estimates are for an H200, by earlier rows if there are such."""
    flags = ["--rehearse"] if rehearse else []
    runs = gpu.runs()
    settings = gpu_settings.rows()

    def measure_matmuls(rows: Sequence[str], _: Results) -> list[str]:
        return ["benchmarks.float8_gemm", "--matmuls", "--training.local_batch_size=2", *flags]

    def measure_runs(rows: Sequence[str], results: Results) -> list[str]:
        command = ["benchmarks.gpu", f"--rows={','.join(rows)}", *flags]
        for row in rows:
            options = won(row, results) if row in runs else ()
            if options:
                command.append(f"--add={row}={' '.join(options)}")
        return command

    def measure_settings(rows: Sequence[str], _: Results) -> list[str]:
        return ["benchmarks.gpu_settings", f"--rows={';'.join(rows)}", "--budget-seconds=inf", *flags]

    def tests(expression: str, seconds: int, files: tuple[str, ...] = TESTS) -> Group:
        words = ["pytest", "-q", "-rpfE", "-p", "no:cacheprovider", "-k", expression, "tests/gpu"]
        return Group({expression: seconds}, lambda *_: words, files=files)

    def single(kinds: Sequence[str]) -> Group:
        names = [f"float8, {recipe}, {kind}".strip(", ") for kind in kinds for recipe in gpu_settings.RECIPES]
        rows = [name for name in names if name in settings and gpu.is_known(settings[name].options)]
        return Group(dict.fromkeys(rows, 20), measure_settings, 45, (gpu_settings.BASE,))

    def whole(names: Sequence[str], **options: Any) -> Group:
        seconds = {"1.8B": 50, "3B": 65, "8B": 85}
        return Group({name: seconds[runs[name].flavor] for name in names if name in runs}, measure_runs, **options)

    shapes = {"attention.wq attention.wo": 6, "attention.wk attention.wv": 4}
    shapes |= {"feed_forward.w1 feed_forward.w3": 8, "feed_forward.w2": 8, "output": 25}
    if rehearse:
        shapes = {"any": 5}
    later = ("output too, whole logits", *gpu_settings.IMPRECISE)
    first = ("", *(gain for gain in gpu_settings.GAINS if gain not in later))
    recipes = ("tensorwise", "bf16", "rowwise", "blockwise", "muon")
    large = [f"{flavor} {recipe} 8192" for flavor in ("8B", "1.8B") for recipe in recipes]
    peers = [name for name, run in runs.items() if run.peer and importlib.util.find_spec(run.peer)]
    medium = [name for name in runs if name.startswith("3B")]
    compared = ("peaks", "1.8B bf16 8192")
    groups = {
        "matmuls": Group(shapes, measure_matmuls, files=("benchmarks/float8_gemm.py",)),
        "peaks": Group({"peaks": 10}, measure_runs, files=("benchmarks/gpu.py",)),
    }
    for recipe in gpu_settings.RECIPES:
        groups[f"kernels, {recipe}"] = tests(f"test_kernels and {recipe}", 45, KERNEL_TESTS)
    groups["settings"] = single(first)
    for name, (expression, seconds) in RANKS.items():
        groups[name] = tests(expression, seconds)
    groups["8B and 1.8B"] = whole(large, always=("peaks",))
    groups["peers"] = whole(peers, start_seconds=85, always=compared, files=("benchmarks/gpu.py",))
    groups["3B"] = whole(medium, always=("peaks",))
    groups["settings, later"] = single(later)
    return groups


def kernels_unproven(row: str, results: Results) -> str:
    """Why a row must not be timed, as its own kernels have passed no test of the present code; empty if it may be."""
    recipe = next((recipe for recipe in gpu_settings.RECIPES if recipe in row), "")
    is_test = row.startswith("test_kernels")
    if is_test or (recipe != "blockwise" and "own kernels" not in row):
        return ""
    result = results.get(f"kernels, {recipe}: test_kernels and {recipe}", {})
    if "failed" in result:
        return f"its kernels fail their tests: {result['failed']}"
    if result.get("code") != hash_files(KERNEL_TESTS):
        return "its kernels are not tested yet"
    return ""


def won(row: str, results: Results) -> tuple[str, ...]:
    """The settings that were faster one by one for the row's recipe, of each kind the best.

    None if the row has failed with them.
    """
    for key, result in results.items():
        if key.endswith(f": {row}") and "failed" in result and "added" in result:
            return ()
    ratios = {key.partition(": ")[2]: row.get("ratio", 0) for key, row in results.items() if key.startswith("settings")}
    best: dict[str, tuple[float, tuple[str, ...]]] = {}
    for name, setting in gpu_settings.rows().items():
        if setting.beside != f"float8, {row.split()[1]}" or kernels_unproven(name, results):
            continue
        ratio = ratios.get(name, 0)
        if ratio > WON * ratios.get(setting.beside, ratio):
            kind = name.split(", ")[2]
            best[kind] = max(best.get(kind, (0.0, ())), (ratio, setting.gain))
    return tuple(option for _, gain in best.values() for option in gain)


def choose(name: str, group: Group, results: Results, tried: set[str], again: bool, left: float) -> list[str]:
    """The rows that fit into the seconds that are `left`: those without a result, or `again` those that failed."""
    code = hash_files(group.files)
    seconds = group.start_seconds
    rows = []
    for row, of_row in group.seconds.items():
        key = f"{name}: {row}"
        result = results.get(key, {})
        is_wanted = "failed" in result if again else result.get("code") != code
        if not is_wanted or key in tried or kernels_unproven(row, results):
            continue
        if seconds + of_row <= left:
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

    def keep(key: str, group: Group, row: dict[str, Any]) -> None:
        results[key] = {"code": hash_files(group.files), "date": facts["date"], "commit": facts["commit"]} | row
        print_row({"item": key} | row)
        write_atomically(file, json.dumps({"machine": facts, "results": results}, indent=1).encode() + b"\n")

    def measure_rows(name: str, group: Group, rows: list[str], tried: set[str]) -> None:
        seconds = group.start_seconds + sum(group.seconds[row] for row in rows)
        limit = min(end, time.monotonic() + patience * seconds)
        command = group.command(list(dict.fromkeys((*group.always, *rows))), results)
        failure = ""
        for found, why in measure(command, file, limit):
            failure = why
            for row, result in found.items():
                key = f"{name}: {row or rows[0]}"
                if key not in tried:
                    tried.add(key)
                    keep(key, group, result)
        keys = [f"{name}: {row}" for row in rows]
        missing = [key for key in keys if key not in tried]
        if missing and failure and time.monotonic() < end:  # otherwise this call's time is over
            keep(missing[0], group, {"failed": failure})
            tried.add(missing[0])  # the others are tried without it
        else:
            tried.update(missing)

    for again in (False, True):
        tried: set[str] = set()
        for name, group in groups.items():
            while True:
                rows = choose(name, group, results, tried, again, end - time.monotonic())
                if not rows:
                    break
                measure_rows(name, group, rows, tried)


def measure(command: Sequence[str], file: Path, end: float) -> Iterator[tuple[Results, str]]:
    """Run a command to its end, or to `end`. Yields again and again what it has measured; last, how it failed."""
    part = file.with_suffix(".part.json")
    part.unlink(missing_ok=True)
    words = [*command] if command[0] == "pytest" else [*command, f"--json={part}"]
    with open(file.with_suffix(".log"), "a+", encoding="utf-8") as log:
        print(f"--- {' '.join(words)}", file=log, flush=True)
        begin = log.tell()
        child = subprocess.Popen(
            [sys.executable, "-m", *words],
            cwd=ROOT,
            env=os.environ | ENVIRONMENT,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            while child.poll() is None and time.monotonic() < end:
                with suppress(subprocess.TimeoutExpired):
                    child.wait(1)
                yield read(part), ""
            code = child.poll()
        finally:  # with its own processes
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        log.seek(begin)
        lines = [line for line in log.read().splitlines() if line.strip()] or ["no output"]
    failure = ""
    if code is None:
        failure = "killed, since it took too long"
    elif code:
        errors = [line for line in lines if re.search(r"[Ee]rror: .", line)]
        failure = (errors or lines)[-1][:300]
    yield read(part) or count_tests(lines), failure


def read(part: Path) -> Results:
    """The rows in a benchmark's JSON file. It may not be there yet, or not be whole."""
    with suppress(ValueError, FileNotFoundError):
        return {row.get("row") or row["layers"]: row for row in json.loads(part.read_text(encoding="utf-8"))["rows"]}
    return {}


def count_tests(lines: Sequence[str]) -> Results:
    """What pytest's summary says, as a row that has no name."""
    passed = sum(line.startswith("PASSED tests/") for line in lines)
    failed = [line for line in lines if re.match("(FAILED|ERROR) tests/", line)]
    if failed:
        return {"": {"passed": passed, "failed": "; ".join(failed)}}
    return {"": {"passed": passed}} if passed else {}


def load(file: Path) -> Results:
    return json.loads(file.read_text(encoding="utf-8"))["results"] if file.exists() else {}


def summary(groups: dict[str, Group], results: Results) -> list[dict[str, Any]]:
    """A row of the table for each row of the queue, and for what was measured beside."""
    lines = []
    for name, group in groups.items():
        beside = [key.partition(": ")[2] for key in results if key.startswith(f"{name}: ")]
        for row in dict.fromkeys((*group.seconds, *beside)):
            result = results.get(f"{name}: {row}", {})
            texts = []
            for key, value in result.items():
                if key.endswith("/s") and value is not None:
                    texts.append(f"{value:,.0f} {key}")
                elif key in ("ratio", "passed"):
                    texts.append(f"{key} {value:.4g}")
                elif key in ("added", "failed"):
                    texts.append(f"{key} {value[:80]}")
            unproven = kernels_unproven(row, results)
            if unproven:
                texts.append(f"not timed, {unproven[:80]}")
            code = ""
            if result:
                code = "present" if result["code"] == hash_files(group.files) else "older"
            estimate = group.seconds.get(row)
            lines.append({"group": name, "row": row, "estimate s": estimate, "code": code, "result": ", ".join(texts)})
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
    groups = build_groups(arguments.rehearse)
    if arguments.only:
        chosen = [name.strip() for name in arguments.only.split(";")]
        unknown = set(chosen) - set(groups)
        if unknown:
            parser.error(f"--only: unknown {'; '.join(sorted(unknown))}; known are {'; '.join(groups)}")
        groups = {name: group for name, group in groups.items() if name in chosen}
    if not has_gpu(arguments.rehearse or arguments.list):
        return 0
    name = "rehearsal"
    if not arguments.rehearse:
        device = torch.cuda.get_device_name() if torch.cuda.is_available() else "h200"
        name = re.sub(r"\W+", "-", device.lower().removeprefix("nvidia "))
    file = find_file(arguments.output, name, REHEARSAL if arguments.rehearse else RESULTS)
    if not arguments.list:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # through `finally`: no process stays on the GPU
        with suppress(subprocess.CalledProcessError):  # some rows need no data
            prepare_once(*((gpu.REHEARSAL, "docs") if arguments.rehearse else (gpu.DATASET,)))
        left = arguments.budget_seconds - (time.monotonic() - started)
        work(groups, file, left, patience=20.0 if arguments.rehearse else 2.0)  # CPUs compile for minutes
    print("\n" + table(summary(groups, load(file))))
    unknown = {name for name, row in gpu_settings.rows().items() if not gpu.is_known(row.options)}
    print(f"left out, since config.py does not know their settings: {'; '.join(sorted(unknown)) or 'none'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
