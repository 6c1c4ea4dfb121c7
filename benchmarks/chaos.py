"""Run real torchrun jobs of a tiny model on CPU, with faults from a seeded schedule.

    python -m benchmarks.chaos [--quick] [--check] [--json=benchmarks/results/chaos.json]

Each job trains the same 200 steps while faults hit it. It must end with the weights of an undisturbed run, bit for bit,
and with a ledger that `tools.audit --prove` accepts. The watchdog's verdicts must name the rank that was stopped.
"""

import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch

from benchmarks.report import build_parser, finish, print_row, require_cpu
from config import TitaniteError
from run.folder import STARTS
from storage.records import read_records
from tests.corpus import write_dataset
from tests.runs import final_weights, flat, same
from tests.s3.fault_proxy import fault_proxy
from tests.s3.server import create_bucket, s3_environment, s3_server
from tools.audit import prove

ROOT = Path(__file__).parents[1]
RANKS = 2
STEPS = 200
PATIENCE_SECONDS = 180  # for any awaited event
OUTAGE_SECONDS = 6.0
SETTINGS = (
    "--model.flavor=tiny",
    "--model.n_layers=2",
    "--training.seq_len=16",
    "--training.local_batch_size=2",
    "--training.global_batch_size=4",
    "--training.param_dtype=float32",
    f"--training.steps={STEPS}",
    "--metrics.log_interval=1",
    "--metrics.tensorboard=false",
    "--validation.enable=false",
    "--checkpoint.interval=5",
    "--checkpoint.keep=3",
    "--checkpoint.timeout_seconds=120",
    "--comm.store_retry_seconds=7",
    "--comm.init_timeout_seconds=30",
    "--comm.train_timeout_seconds=10",  # so that a hang is noticed after 8
    "--failures.restarts_without_progress=50",
)
IN_A_SAVE = "SIGKILL in a save"
COUNTS = {"SIGKILL": 26, IN_A_SAVE: 26, "SIGSTOP": 20, "SIGTERM": 30, "machine lost": 3}
QUICK_COUNTS = dict.fromkeys(COUNTS, 1)

Row = dict[str, Any]


class Fault(NamedTuple):
    """A fault that must happen once the job has trained `step`."""

    kind: str
    step: int
    rank: int
    delay_seconds: float


class Job:
    """A job under torchrun, started again whenever it fails, as by a scheduler; its run folder is folder/run."""

    def __init__(self, folder: Path, dataset: Path, *words: str, **environment: str) -> None:
        folder.mkdir(parents=True)
        self.folder = folder
        self.run = folder / "run"
        launcher = f"-m torch.distributed.run --standalone --nproc-per-node={RANKS} --max-restarts=1000"
        places = (f"--data.datasets={dataset}", f"--run.folder={self.run}")
        self.command = [sys.executable, *launcher.split(), "--monitor-interval=0.1", "train.py"]
        self.command += [*SETTINGS, *places, *words]
        self.environment = os.environ | {"OMP_NUM_THREADS": "1"} | environment
        self.log = open(folder / "log", "ab")  # noqa: SIM115
        self.launch()

    def launch(self) -> None:
        streams: dict[str, Any] = {"stdout": self.log, "stderr": self.log}
        self.process = subprocess.Popen(self.command, cwd=ROOT, env=self.environment, **streams)

    def pids(self) -> dict[int, int]:
        """Rank → process id."""
        found: dict[int, int] = {}
        with contextlib.suppress(OSError):  # a process that has just ended
            for pid in Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split():
                words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                found |= {int(word[5:]): int(pid) for word in words if word.startswith(b"RANK=")}
        return found

    def wait(self, ready: Callable[[], bool], what: str) -> None:
        """Wait until `ready`, or until the run has ended well."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not ready() and self.process.poll() != 0:
            if self.process.poll() is not None:
                self.launch()
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self.folder.name}: waited {PATIENCE_SECONDS} s for {what}; see {self.log.name}")
            time.sleep(0.005)

    def starts(self) -> list[Row]:
        return read_records(self.run / STARTS)

    def logged(self) -> list[int]:
        """The steps logged so far, over all starts."""
        return [row["step"] for row in read_records(self.run / "metrics.jsonl")]

    def wait_for_step(self, step: int) -> None:
        self.wait(lambda: max(self.logged(), default=0) >= step, f"step {step}")

    def train_on(self, kind: str, struck: float) -> Row:
        """Wait for another step to be logged. Returns the row of a fault."""
        known = len(self.logged())
        self.wait(lambda: len(self.logged()) > known, "the next step")
        row: Row = {"job": self.folder.name, "fault": kind, "seconds": round(time.monotonic() - struck, 2)}
        print_row(row)
        return row

    def finish(self) -> None:
        """Wait for the end of the run."""
        self.wait(lambda: False, "the end")

    def kill(self) -> None:
        """Act as if the machine were gone: SIGKILL torchrun and all ranks."""
        for pid in (self.process.pid, *self.pids().values()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()

    def close(self) -> None:
        if self.process.poll() is None:
            self.kill()
        self.log.close()


# ---------------------------------------------------------------- faults


def strike(job: Job, fault: Fault) -> None:
    """Make a fault happen, and return as soon as it has."""
    saves = job.run / "checkpoints"
    known = {*saves.glob("*")}
    if fault.kind == IN_A_SAVE:
        job.wait(lambda: bool({*saves.glob("*")} - known), "a save")
    time.sleep(fault.delay_seconds)
    if fault.kind == "SIGTERM":
        job.process.terminate()
        job.process.wait()
        job.launch()
    elif fault.kind == "machine lost":
        job.kill()
        job.launch()
    elif fault.rank in job.pids():
        number = signal.SIGSTOP if fault.kind == "SIGSTOP" else signal.SIGKILL
        with contextlib.suppress(ProcessLookupError):
            os.kill(job.pids()[fault.rank], number)


def suffer(job: Job, faults: list[Fault]) -> list[Row]:
    """Make each fault happen once the job trains again, then await the end of the run. Returns a row per fault."""
    rows = []
    for fault in faults:
        job.wait_for_step(fault.step)
        if job.process.poll() == 0:
            break  # the run has ended first
        starts = len(job.starts())
        strike(job, fault)
        struck = time.monotonic()
        saves = sorted((job.run / "checkpoints").glob("step-*"), key=lambda save: save.stat().st_mtime)
        job.wait(lambda starts=starts: len(job.starts()) > starts, "a restart")  # type: ignore[misc]
        row = job.train_on(fault.kind, struck)
        if fault.kind == IN_A_SAVE:
            row["amid"] = bool(saves) and not (saves[-1] / "MANIFEST.json").exists()
        rows.append(row)
    job.finish()
    return rows


def lose_store(job: Job, proxy: Any) -> list[Row]:
    """Let the job's S3 server repeatedly be out of reach for some seconds."""
    rows = []
    for step, outage in ((8, "503"), (68, "reset"), (128, "503")):
        job.wait_for_step(step)
        struck = time.monotonic()
        proxy.fault(outage)
        time.sleep(OUTAGE_SECONDS)
        proxy.reset()
        rows.append(job.train_on("S3 outage", struck))
    job.finish()
    return rows


def schedule(rng: random.Random, counts: dict[str, int], per_job: int) -> list[list[Fault]]:
    """The faults of each job, at random steps and on random ranks."""
    kinds = [kind for kind, count in counts.items() for _ in range(count)]
    rng.shuffle(kinds)
    jobs = []
    for first in range(0, len(kinds), per_job):
        own = kinds[first : first + per_job]
        steps = sorted(rng.sample(range(6, STEPS - 10), len(own)))
        faults = []
        for kind, step in zip(own, steps, strict=True):
            delay = rng.uniform(0, 0.005) if kind == IN_A_SAVE else rng.uniform(0, 0.05)
            faults.append(Fault(kind, step, rng.randrange(RANKS), delay))
        jobs.append(faults)
    return jobs


# ---------------------------------------------------------------- verdicts


def judge(job: Job, faults: list[Fault], bit_equal: bool) -> Row:
    """Check ledger and verdicts of a job that is done."""
    ledger = "exact"
    try:
        prove(job.run)
    except TitaniteError as error:
        ledger = str(error)
    ends = [start["after"] for start in job.starts() if start["after"]]
    row: Row = {"job": job.folder.name, "starts": len(job.starts()), "explained": len(ends), "ledger": ledger}
    verdicts = [end["rank"] for end in ends if end["kind"] == "hung" and end["rank"] is not None]
    stopped = iter([fault.rank for fault in faults if fault.kind == "SIGSTOP"])
    # Each verdict names the rank of a later stop than the verdict before.
    wrong = [rank for rank in verdicts if rank not in stopped]
    row |= {"bit_equal": bit_equal, "verdicts": len(verdicts), "wrong_verdicts": len(wrong)}
    print_row(row)
    return row


def summarize(faults: list[Row]) -> list[Row]:
    """A row per kind of fault."""
    table = []
    for kind in sorted({row["fault"] for row in faults}):
        own = [row for row in faults if row["fault"] == kind]
        seconds = [row["seconds"] for row in own]
        row = {"fault": kind, "survived": len(own), "median_seconds": median(seconds), "worst_seconds": max(seconds)}
        if kind == IN_A_SAVE:
            row["amid_a_save"] = sum(fault["amid"] for fault in own)
        table.append(row)
    return table


def prepare_data(folder: Path) -> Path:
    """Write a dataset of random tokens."""
    rng = random.Random(0)
    documents = [[rng.randrange(1, 300) for _ in range(rng.randint(50, 400))] for _ in range(60)]
    return write_dataset(folder, [documents], vocab_size=300)


def measure(quick: bool, folder: Path) -> tuple[list[Row], list[tuple[str, bool]]]:
    """Run all jobs. Returns the rows of the report and its bars."""
    dataset = prepare_data(folder / "data")

    def weights(run: Path) -> dict[str, torch.Tensor]:
        return flat(final_weights(run, folder))

    with contextlib.closing(Job(folder / "undisturbed", dataset)) as job:
        job.finish()
        reference = weights(job.run)
    counts = QUICK_COUNTS if quick else COUNTS
    rows = []
    jobs = []
    for number, planned in enumerate(schedule(random.Random(0), counts, per_job=21)):
        with contextlib.closing(Job(folder / f"job-{number}", dataset)) as job:
            rows += suffer(job, planned)
        jobs.append(judge(job, planned, same(weights(job.run), reference)))
    if not quick:
        with s3_server() as server, fault_proxy(server) as proxy:
            create_bucket(server, "chaos")
            words = ("--checkpoint.folder=s3://chaos/run", "--checkpoint.interval=10")
            with contextlib.closing(Job(folder / "s3", dataset, *words, **s3_environment(proxy.endpoint))) as job:
                rows += lose_store(job, proxy)
            script = "import s3fs, sys; s3fs.S3FileSystem().get('chaos/run', sys.argv[1], recursive=True)"
            copy = [sys.executable, "-c", script, f"{folder}/copy/checkpoints"]
            subprocess.run(copy, env=os.environ | s3_environment(server), check=True)
        jobs.append(judge(job, [], same(weights(folder / "copy"), reference)))
    missing = sum(counts.values()) - sum(row["fault"] in counts for row in rows)
    bars = [
        (f"every planned fault happened ({missing} did not)", missing == 0),
        ("no token lost or repeated", all(job["ledger"] == "exact" for job in jobs)),
        ("final weights bit-equal to the undisturbed run", all(job["bit_equal"] for job in jobs)),
        ("no wrong verdict of the watchdog", not any(job["wrong_verdicts"] for job in jobs)),
    ]
    return [*summarize(rows), *jobs], bars


def main() -> int:
    parser = build_parser(__doc__ or "")
    arguments = parser.parse_args()
    require_cpu(parser)
    with tempfile.TemporaryDirectory(prefix="chaos-") as scratch:
        rows, bars = measure(arguments.quick, Path(scratch))
    return finish(arguments, rows, bars)


if __name__ == "__main__":
    sys.exit(main())
