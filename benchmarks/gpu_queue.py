"""What a machine with one GPU should measure next, in one call that ends in time.

    python -m benchmarks.gpu_queue [--budget-seconds 540] [--only "JOB;..."] [--output FOLDER] [--list] [--rehearse]

Its jobs are done in order, each by a process of its own: rows of benchmarks.gpu, or tests of tests/gpu. Those with
results for the present code are left out, those that failed before come last. FOLDER/gpu_queue-GPU.json gets each
result as soon as it is there; what the processes print goes into the .log beside it. The next call goes on from there.
FOLDER is --output; without it $OUT where that is set; otherwise benchmarks/results, whose results the others begin
with.

A job whose estimate exceeds the rest of the budget is left out. A process that takes twice its estimate, or all of the
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
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks import gpu
from benchmarks.report import REHEARSE, cell, has_gpu, machine, print_row, table
from storage.records import output_path, write_atomically

ROOT = Path(__file__).parents[1]
RESULTS, REHEARSAL = ROOT / "benchmarks" / "results", ROOT / "outputs" / "rehearsal"
# What computes a step. If one of these files changes, results are old.
CODE = (
    "train.py", "trainer.py", "config.py", "loss.py", "optim.py", "muon.py", "models/**/*.py", "parallel/*.py",
    "float8/*.py", "checkpoint/*.py", "run/*.py", "tools/same.py", "tests/layouts.py", "tests/gpu/*.py",
)  # fmt: skip
ENVIRONMENT = {"TEST_GPU": "1", "HF_HUB_OFFLINE": "1", "COLUMNS": "300"}  # the last: of pytest's summary
SHOWN = ("ratio", "passed", "failed")  # of a result in the table, beside rates
END_SECONDS = 15  # for imports and the table

Results = dict[str, dict[str, Any]]  # "job: row" → what was measured, and of which code


class Job(NamedTuple):
    """Rows of benchmarks.gpu that one process measures, or tests of tests/gpu, by pytest's expression.

    `after` is a job of tests that must have passed by the present code.
    """

    seconds: int  # that it should take on an H200
    rows: Sequence[str] = ()
    tests: str = ""
    after: str = ""

    @property
    def results(self) -> Sequence[str]:
        """The names of its results."""
        return self.rows or [self.tests]

    def command(self, part: Path, rehearse: bool) -> list[str]:
        """What does it, and writes its rows to `part`."""
        if self.tests:
            return ["pytest", "-q", "-rpfE", "-p", "no:cacheprovider", "tests/gpu", "-k", self.tests]
        flags = ["--rehearse"] * rehearse
        return ["benchmarks.gpu", f"--rows={';'.join(self.rows)}", *flags, f"--json={part}"]


def build_jobs() -> dict[str, Job]:
    """The queue, by name. Estimates come from earlier runs where there are such."""
    float8 = [f"float8, {recipe}" for recipe in gpu.RECIPES]
    own = [f"{name}, own kernels" for name in float8]
    gains = [name for name in gpu.settings() if name.startswith("float8") and name not in own]
    others = [name for name in gpu.SETTINGS if name != gpu.BASE]
    jobs = {
        "matmuls": Job(60, ("peaks", *gpu.MATMULS)),
        "kernels": Job(100, tests="test_kernels"),
        "own kernels": Job(150, (gpu.BASE, *float8, *own), after="kernels"),
        "float8": Job(45 + 20 * len(gains), (gpu.BASE, *gains)),
        "2 ranks": Job(100, tests="2ranks and not compiled"),
        "2 ranks, compiled": Job(150, tests="2ranks and compiled"),
        "4 ranks": Job(90, tests="4ranks"),
        "2 ranks, then 4": Job(60, tests="save_behind"),
        "one rank": Job(120, tests="test_gpu"),
    }
    runs = gpu.whole_models()
    for flavor, seconds in (("8B", 95), ("1.8B", 60), ("3B", 75)):
        for name in (name for name, run in runs.items() if run.flavor == flavor):
            jobs[name] = Job(seconds, ("peaks", name))
    jobs["settings"] = Job(45 + 20 * len(others), (gpu.BASE, *others))
    for name, run in runs.items():
        if run.peer and not importlib.util.find_spec(run.peer):
            del jobs[name]
    return jobs


def hash_code() -> str:
    """A digest of the code that results depend on."""
    digest = hashlib.sha256()
    for path in sorted({path for pattern in CODE for path in ROOT.glob(pattern)}):
        digest.update(f"{path.relative_to(ROOT)}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def why_not(name: str, jobs: Mapping[str, Job], results: Results, code: str) -> str:
    """Why a job is left out; empty if it is to be done."""
    job = jobs[name]
    own = [results.get(f"{name}: {row}", {}) for row in job.results]
    if all(result.get("code") == code and "failed" not in result for result in own):
        return "done"
    if job.after:
        tests = results.get(f"{job.after}: {jobs[job.after].tests}", {})
        if tests.get("code") != code:
            return f"{job.after} not tested yet"
        if "failed" in tests:
            return f"{job.after} failed: {tests['failed']}"
    return ""


def work(jobs: Mapping[str, Job], chosen: Sequence[str], file: Path, budget_seconds: float, rehearse: bool) -> None:
    """Do what fits into the budget. Each result is printed and goes into `file` once it is there."""
    end = time.monotonic() + budget_seconds - END_SECONDS
    patience = 2.0
    if rehearse:
        patience = 20.0  # CPUs compile for minutes
    facts = machine()
    code = hash_code()
    results = load(file)

    def has_failed(name: str) -> bool:
        return any("failed" in results.get(f"{name}: {row}", {}) for row in jobs[name].results)

    for name in sorted(chosen, key=has_failed):
        job = jobs[name]
        if why_not(name, jobs, results, code) or time.monotonic() + job.seconds > end:
            continue
        kept: set[str] = set()

        def keep(row: str, found: dict[str, Any], name: str = name, kept: set[str] = kept) -> None:
            if row not in kept:
                kept.add(row)
                results[f"{name}: {row}"] = {"code": code, "date": facts["date"], "commit": facts["commit"]} | found
                print_row({"item": f"{name}: {row}"} | found)
                write_atomically(file, json.dumps({"machine": facts, "results": results}, indent=1).encode() + b"\n")

        limit = min(end, time.monotonic() + patience * job.seconds)
        failure = measure(job, file, limit, keep, rehearse)
        if failure and time.monotonic() < end:  # otherwise this call's time is over, and the next one goes on
            for row in job.results:
                keep(row, {"failed": failure})


def measure(job: Job, file: Path, end: float, keep: Callable[[str, dict[str, Any]], None], rehearse: bool) -> str:
    """Do a job to its end, or to `end`, and keep each row once it is there. Returns how it failed, or ""."""
    part = file.with_suffix(".part.json")
    part.unlink(missing_ok=True)
    command = job.command(part, rehearse)
    with open(file.with_suffix(".log"), "a+", encoding="utf-8") as log:
        print(f"--- {' '.join(command)}", file=log, flush=True)
        begin = log.tell()
        child = subprocess.Popen(
            [sys.executable, "-m", *command], cwd=ROOT, env=os.environ | ENVIRONMENT,
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
    if job.tests:
        keep(job.tests, {"passed": sum(line.startswith("PASSED tests/") for line in lines)})
    return ""


def keep_rows(part: Path, keep: Callable[[str, dict[str, Any]], None]) -> None:
    """Keep the rows in a benchmark's JSON file. It may not be there yet, or not be whole."""
    with suppress(ValueError, FileNotFoundError):
        for row in json.loads(part.read_text(encoding="utf-8"))["rows"]:
            keep(row["row"], row)


def load(file: Path) -> Results:
    if not file.exists():
        return {}
    return json.loads(file.read_text(encoding="utf-8"))["results"]


def summarize(jobs: Mapping[str, Job], chosen: Sequence[str], results: Results) -> list[dict[str, Any]]:
    """A row of the table for each result, present, older or missing."""
    code = hash_code()
    lines = []
    for name in chosen:
        for row in jobs[name].results:
            result = results.get(f"{name}: {row}", {})
            shown = {key: value for key, value in result.items() if key.endswith("/s") or key in SHOWN}
            text = ", ".join(f"{key} {cell(value)[:80]}" for key, value in shown.items())
            of = {None: "", code: "present"}.get(result.get("code"), "older")
            why = why_not(name, jobs, results, code).removeprefix("done")
            lines.append({"job": name, "row": row, "estimate s": jobs[name].seconds, "code": of, "result": text + why})
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
    parser.add_argument("--only", default="", help="jobs, with ; between them (default: all)")
    parser.add_argument("--output", type=output_path, help="folder of the results (default benchmarks/results)")
    parser.add_argument("--list", action="store_true", help="jobs, estimates and what there is, then end")
    parser.add_argument("--rehearse", action="store_true", help=REHEARSE)
    arguments = parser.parse_args()
    jobs = build_jobs()
    chosen = list(jobs)
    if arguments.only:
        chosen = arguments.only.split(";")
    unknown = {*chosen} - {*jobs}
    if unknown:
        parser.error(f"--only: unknown {'; '.join(sorted(unknown))}; known are {'; '.join(jobs)}")
    if not has_gpu(arguments.rehearse or arguments.list):
        return 0
    name = "h200"
    kept = RESULTS
    if torch.cuda.is_available():
        name = re.sub(r"\W+", "-", torch.cuda.get_device_name().lower().removeprefix("nvidia "))
    if arguments.rehearse:
        name = "rehearsal"
        kept = REHEARSAL
    file = find_file(arguments.output, name, kept)
    if not arguments.list:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # through `finally`: no process stays on the GPU
        with suppress(subprocess.CalledProcessError):  # some jobs need no data
            gpu.prepare_data(arguments.rehearse)
        left = arguments.budget_seconds - (time.monotonic() - started)
        work(jobs, chosen, file, left, arguments.rehearse)
    print("\n" + table(summarize(jobs, chosen, load(file))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
