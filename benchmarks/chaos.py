"""Run real torchrun jobs of a tiny model on CPU, with faults from a seeded schedule.

    python -m benchmarks.chaos [--quick] [--check] [--json=benchmarks/results/chaos.json]

Each job trains the same 200 steps while faults hit it. It must end with the weights of an undisturbed run, bit for bit,
and with a ledger that `tools.audit --prove` accepts. The watchdog's verdicts must name the rank that was stopped.
"""

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from benchmarks.report import build_parser, finish, print_row, require_cpu
from config import TitaniteError
from run.folder import STARTS
from storage.records import read_records
from tests.corpus import write_dataset
from tests.distributed.checkpoint_runs import flip_bit
from tests.ports import free_port
from tests.runs import flat, same
from tests.s3.fault_proxy import fault_proxy
from tests.s3.server import create_bucket, s3_environment, s3_server
from tools.audit import prove

ROOT = Path(__file__).parents[1]
RANKS = 2
STEPS = 200
TIMEOUT_SECONDS = 10  # for a collective, so that a hang is noticed after 8
PATIENCE_SECONDS = 180  # for any awaited event
OUTAGE_SECONDS = 6.0
ARGUMENTS = (
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
    f"--comm.train_timeout_seconds={TIMEOUT_SECONDS}",
    "--failures.restarts_without_progress=50",
)


Row = dict[str, Any]


class Fault(NamedTuple):
    """A fault that must happen once the job has trained `step`."""

    kind: str
    step: int
    rank: int
    delay_seconds: float


class Job:
    """A job under torchrun, its run folder, and what happened to it."""

    def __init__(
        self,
        folder: Path,
        dataset: Path,
        *extra: str,
        environment: dict[str, str] | None = None,
        agents: tuple[str, ...] = ("--nnodes=1", f"--nproc-per-node={RANKS}", "--rdzv-endpoint=localhost:0"),
    ):
        folder.mkdir(parents=True)
        self.folder = folder
        self.name = folder.name
        self.agents = agents
        places = (f"--data.datasets={dataset}", f"--run.outputs={folder / 'out'}")
        self.arguments = [*ARGUMENTS, *places, *extra]
        self.environment = os.environ | {"OMP_NUM_THREADS": "1", "CHAOS_FOLDER": str(folder)} | (environment or {})
        self.log = open(folder / "log", "ab")  # noqa: SIM115
        self.hung: list[int] = []  # ranks that were stopped, in order
        self.launch()

    def launch(self) -> None:
        """Start torchrun, as a scheduler does whenever it has ended: the same job, no run folder named."""
        self.process = self.start_agent(*self.agents)

    def start_agent(self, *arguments: str) -> subprocess.Popen[bytes]:
        """Start the torchrun of one node."""
        words = f"-m torch.distributed.run --rdzv-backend=c10d --rdzv-id={self.name} --max-restarts=1000"
        command = [sys.executable, *words.split(), "--monitor-interval=0.1", *arguments, "-m", "benchmarks.chaos_rank"]
        command += self.arguments
        return subprocess.Popen(command, cwd=ROOT, env=self.environment, stdout=self.log, stderr=self.log)

    @property
    def run(self) -> Path:
        """The run folder that the job has made."""
        return next(iter(sorted((self.folder / "out").glob("*/starts.jsonl")))).parent

    def starts(self) -> int:
        """How often the run has been started."""
        return len(read_records(self.run / STARTS))

    def rows(self) -> list[int]:
        """The steps logged so far, over all starts."""
        files = (self.folder / "out").glob("*/metrics.jsonl")
        return [row["step"] for file in files for row in read_records(file)]

    def pids(self) -> dict[int, int]:
        """Rank → process id."""
        found = {}
        for pid in _children(self.process.pid):
            with contextlib.suppress(OSError, StopIteration):
                words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                found[int(next(word[5:] for word in words if word.startswith(b"RANK=")))] = pid
        return found

    def wait(self, ready: Callable[[], bool], what: str) -> None:
        """Wait until `ready`. Starts the job again if it has ended, as a scheduler would."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not ready():
            if self.process.poll() is not None and self.process.returncode != 0:
                self.launch()
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self.name}: waited {PATIENCE_SECONDS} s for {what}; see {self.folder / 'log'}")
            time.sleep(0.005)

    def is_done(self) -> bool:
        """Whether the run has ended well."""
        return self.process.poll() == 0

    def wait_for_step(self, step: int) -> None:
        """Wait until a step is logged."""
        self.wait(lambda: max(self.rows(), default=0) >= step, f"step {step}")

    def wait_for_restart(self, starts: int) -> None:
        """Wait until there are more than `starts`."""
        self.wait(lambda: self.starts() > starts or self.is_done(), "a restart")

    def train_on(self, kind: str, struck: float, rows: list[Row], seen: int | None = None) -> Row:
        """Wait for a step after the `seen` ones (default: those logged by now), and add the fault's row."""
        known = len(self.rows()) if seen is None else seen
        self.wait(lambda: len(self.rows()) > known or self.is_done(), "the next step")
        row: Row = {"job": self.name, "fault": kind, "seconds": round(time.monotonic() - struck, 2)}
        print_row(row)
        rows.append(row)
        return row

    def finish(self) -> None:
        """Wait for the end of the run."""
        self.wait(self.is_done, "the end")

    def close(self) -> None:
        if self.process.poll() is None:
            kill_machine(self.process)
        self.log.close()


def kill_machine(agent: subprocess.Popen[bytes]) -> None:
    """Act as if a machine were gone: SIGKILL its torchrun and all its ranks."""
    for pid in (agent.pid, *_children(agent.pid)):
        _signal(pid, signal.SIGKILL)
    agent.wait()


def _children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


# ---------------------------------------------------------------- faults


def strike(job: Job, fault: Fault) -> None:
    """Make a fault happen, and return as soon as it has."""
    if fault.kind == "SIGKILL in a save":
        await_save(job)
        time.sleep(fault.delay_seconds / 10)
    else:
        time.sleep(fault.delay_seconds)
    pid = job.pids().get(fault.rank)
    if fault.kind in ("SIGSTOP", "stall"):
        job.hung.append(fault.rank)
    if fault.kind.startswith("SIGKILL"):
        _signal(pid, signal.SIGKILL)
    elif fault.kind == "SIGSTOP":
        _signal(pid, signal.SIGSTOP)
    elif fault.kind in ("NaN", "stall"):
        (job.folder / f"{fault.rank}-{fault.kind.lower()}").touch()
    elif fault.kind == "SIGTERM":
        job.process.terminate()
        job.process.wait()
        job.launch()
    elif fault.kind == "corrupt checkpoint":
        newest = max((job.run / "checkpoints").glob("*/MANIFEST.json")).parent
        file = random.Random(fault.step).choice(sorted(newest.glob("*.distcp")))
        flip_bit(file, file.stat().st_size // 2)
        _signal(pid, signal.SIGKILL)
    elif fault.kind == "machine lost":
        kill_machine(job.process)
        job.launch()


def await_save(job: Job) -> None:
    """Wait until a save begins, or not for ever if none does."""
    saves = job.run / "checkpoints"
    known = set(saves.glob("*"))
    with contextlib.suppress(TimeoutError):
        job.wait(lambda: bool(set(saves.glob("*")) - known), "a save")


def _signal(pid: int | None, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        if pid is not None:
            os.kill(pid, number)


def suffer(job: Job, faults: list[Fault], rows: list[Row]) -> None:
    """Make each fault happen once the job trains again, then await the end of the run. Adds a row per fault."""
    for fault in faults:
        job.wait_for_step(fault.step)
        if job.is_done():
            break  # the run has ended first
        strike(job, fault)
        saves = sorted((job.run / "checkpoints").glob("step-*"), key=lambda save: save.stat().st_mtime)
        amid = bool(saves) and not (saves[-1] / "MANIFEST.json").exists()
        struck = time.monotonic()
        seen = len(job.rows())
        if fault.kind not in ("SIGTERM", "machine lost"):
            job.wait_for_restart(job.starts())
            seen = len(job.rows())
        row = job.train_on(fault.kind, struck, rows, seen)
        if fault.kind == "SIGKILL in a save":
            row["amid"] = amid
    job.finish()


def schedule(rng: random.Random, counts: dict[str, int], per_job: int, steps: int = STEPS) -> list[list[Fault]]:
    """The faults of each job of `steps` steps, at random steps and on random ranks."""
    kinds = [kind for kind, count in counts.items() for _ in range(count)]
    rng.shuffle(kinds)
    jobs = []
    for first in range(0, len(kinds), per_job):
        own = kinds[first : first + per_job]
        at = sorted(rng.sample(range(6, steps - 10), len(own)))
        jobs.append(
            [Fault(kind, step, rng.randrange(RANKS), rng.uniform(0, 0.05)) for kind, step in zip(own, at, strict=True)]
        )
    return jobs


# ---------------------------------------------------------------- verdicts


def weights(run: Path, scratch: Path) -> dict[str, torch.Tensor]:
    """Everything in the newest checkpoint except random states, read by torch's own tool."""
    newest = max((run / "checkpoints").glob("*/MANIFEST.json")).parent
    dcp_to_torch_save(newest, scratch / "all.pt")
    return flat(torch.load(scratch / "all.pt", weights_only=True))


def explained_ends(job: Job) -> list[dict[str, Any]]:
    """What the exits of the job's starts say."""
    return [start["after"] for start in read_records(job.run / STARTS) if start["after"]]


def wrong_verdicts(job: Job) -> int:
    """How many of the watchdog's verdicts name another rank than the one that was stopped."""
    wrong = 0
    stopped = list(job.hung)
    for end in explained_ends(job):
        if end["kind"] != "hung" or end["rank"] is None:
            continue
        if end["rank"] in stopped:
            del stopped[: stopped.index(end["rank"]) + 1]
        else:
            wrong += 1
    return wrong


def judge_job(job: Job, reference: dict[str, torch.Tensor] | None, scratch: Path) -> Row:
    """Check ledger, weights and verdicts of a job that is done. No reference if its world size has changed.

    A job that saves elsewhere has left a copy of its checkpoints in its folder.
    """
    ledger = "exact"
    try:
        prove(job.run)
    except TitaniteError as error:
        ledger = str(error)
    ends = explained_ends(job)
    row: Row = {"job": job.name, "starts": job.starts(), "explained": len(ends), "ledger": ledger, "bit_equal": None}
    if reference is not None:
        copy = job.folder / "copy"
        row["bit_equal"] = same(weights(copy if copy.exists() else job.run, scratch), reference)
    row["verdicts"] = sum(end["kind"] == "hung" for end in ends)
    row["wrong_verdicts"] = wrong_verdicts(job)
    print_row(row)
    return row


# ---------------------------------------------------------------- jobs


def prepare_data(folder: Path) -> Path:
    """Write a dataset of random tokens."""
    rng = random.Random(0)
    documents = [[rng.randrange(1, 300) for _ in range(rng.randint(50, 400))] for _ in range(60)]
    return write_dataset(folder, [documents], vocab_size=300)


def run_on_s3(folder: Path, dataset: Path, rows: list[Row]) -> Job:
    """Run a job with checkpoints on an S3 server that repeatedly cannot be reached for some seconds."""
    arguments = ("--checkpoint.folder=s3://chaos/run", "--checkpoint.interval=10")
    with s3_server() as server, fault_proxy(server) as proxy:
        create_bucket(server, "chaos")
        environment = s3_environment(proxy.endpoint)
        with contextlib.closing(Job(folder, dataset, *arguments, environment=environment)) as job:
            for step, outage in ((8, "503"), (68, "reset"), (128, "503")):
                job.wait_for_step(step)
                struck = time.monotonic()
                proxy.fault(outage)
                time.sleep(OUTAGE_SECONDS)
                proxy.reset()
                job.train_on("S3 outage", struck, rows)
            job.finish()
        script = "import s3fs, sys; s3fs.S3FileSystem().get('chaos/run', sys.argv[1], recursive=True)"
        copy = folder / "copy" / "checkpoints"
        subprocess.run([sys.executable, "-c", script, copy], env=os.environ | s3_environment(server), check=True)
    return job


def run_elastic(folder: Path, dataset: Path, rows: list[Row]) -> Job:
    """Run a job on two nodes of one rank. The second is lost; the job goes on without it until it is back."""
    common = ("--nnodes=1:2", "--nproc-per-node=1", f"--rdzv-endpoint=127.0.0.1:{free_port()}")
    conf = "--rdzv-conf=join_timeout=120,last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=3,is_host="
    node = (*common, conf + "false")
    # Slowed down, since one rank alone would finish before the other is back.
    environment = {"CHAOS_PAUSE_SECONDS": "0.2", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    with contextlib.closing(Job(folder, dataset, agents=(*common, conf + "true"), environment=environment)) as job:
        second = job.start_agent(*node)
        try:
            for step in (8, 88):
                job.wait_for_step(step)
                struck = time.monotonic()
                kill_machine(second)
                job.wait(partial(has_ranks, job, 1), "the loss of a node")
                job.train_on("node lost", struck, rows)
                struck = time.monotonic()
                second = job.start_agent(*node)
                job.wait(partial(has_ranks, job, 2), "the node")
                job.train_on("node back", struck, rows)
            job.finish()
            second.wait()
        finally:
            kill_machine(second)
    return job


def has_ranks(job: Job, ranks: int) -> bool:
    """Whether the newest start has so many ranks."""
    return bool(read_records(job.run / STARTS)[-1]["world_size"] == ranks)


def run_on_full_disk(folder: Path, dataset: Path, rows: list[Row]) -> Job:
    """Run a job with checkpoints on a small disk that something else fills at times. CalledProcessError: no mount."""
    disk = folder.parent / f"{folder.name}-disk"
    disk.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", disk], check=True)
    try:
        with contextlib.closing(Job(folder, dataset, f"--checkpoint.folder={disk}")) as job:
            for step in (8, 98):
                job.wait_for_step(step)
                struck = time.monotonic()
                starts = job.starts()
                with contextlib.suppress(OSError), open(disk / "filler", "wb", buffering=0) as filler:
                    while True:
                        filler.write(bytes(4096))
                job.wait_for_restart(starts)
                (disk / "filler").unlink()
                job.train_on("disk full", struck, rows)
            job.finish()
        shutil.copytree(disk, folder / "copy" / "checkpoints")
    finally:
        subprocess.run(["umount", disk], check=True)
    return job


def summarize(faults: list[Row]) -> list[Row]:
    """A row per kind of fault."""
    table = []
    for kind in sorted({row["fault"] for row in faults}):
        own = [row for row in faults if row["fault"] == kind]
        seconds = [row["seconds"] for row in own]
        row = {"fault": kind, "survived": len(own), "median_seconds": median(seconds), "worst_seconds": max(seconds)}
        if kind == "SIGKILL in a save":
            row["amid_a_save"] = sum(fault["amid"] for fault in own)
        table.append(row)
    return table


COUNTS = {
    "SIGKILL": 26,
    "SIGKILL in a save": 26,
    "SIGSTOP": 20,
    "stall": 3,
    "SIGTERM": 30,
    "NaN": 3,
    "corrupt checkpoint": 4,
    "machine lost": 3,
}
QUICK_COUNTS = {"SIGKILL": 1, "SIGKILL in a save": 1, "SIGSTOP": 1, "SIGTERM": 1, "NaN": 1, "corrupt checkpoint": 1}


def measure(quick: bool, folder: Path) -> tuple[list[Row], list[tuple[str, bool]]]:
    """Run all jobs. Returns the rows of the report and its bars."""
    dataset = prepare_data(folder / "data")
    with contextlib.closing(Job(folder / "undisturbed", dataset)) as job:
        job.finish()
        reference = weights(job.run, folder)
    faults: list[Row] = []
    counts = QUICK_COUNTS if quick else COUNTS

    def suffer_planned(planned: list[Fault], own: Path) -> Job:
        with contextlib.closing(Job(own, dataset)) as job:
            suffer(job, planned, faults)
        return job

    works: dict[str, Callable[[Path], Job]] = {}
    for number, planned in enumerate(schedule(random.Random(0), counts, per_job=21)):
        works[f"job-{number}"] = partial(suffer_planned, planned)
    if not quick:
        for name, work in (("s3", run_on_s3), ("disk", run_on_full_disk), ("elastic", run_elastic)):
            works[name] = partial(work, dataset=dataset, rows=faults)
    jobs = []
    for name, run_job in works.items():
        try:
            job = run_job(folder / name)
            jobs.append(judge_job(job, None if name == "elastic" else reference, folder))
        except TimeoutError as error:
            jobs.append({"job": str(error), "ledger": "not done", "bit_equal": False})
            print_row(jobs[-1])
        except subprocess.CalledProcessError as error:  # no right to mount a disk
            print(f"left out: {error}")
    missing = sum(counts.values()) - sum(row["fault"] in counts for row in faults)
    bars = [
        (f"every planned fault happened ({missing} did not)", missing == 0),
        ("no token lost or repeated", all(job["ledger"] == "exact" for job in jobs)),
        ("final weights bit-equal to the undisturbed run", all(job["bit_equal"] is not False for job in jobs)),
        ("no wrong verdict of the watchdog", not any(job.get("wrong_verdicts") for job in jobs)),
    ]
    return [*summarize(faults), *jobs], bars


def main() -> int:
    parser = build_parser(__doc__ or "")
    arguments = parser.parse_args()
    require_cpu(parser)
    with tempfile.TemporaryDirectory(prefix="chaos-") as scratch:
        rows, bars = measure(arguments.quick, Path(scratch))
    return finish(arguments, rows, bars)


if __name__ == "__main__":
    sys.exit(main())
