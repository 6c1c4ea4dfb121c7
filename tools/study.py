"""The runs of a study: checked together before the first starts, then trained as a user starts them.

Each has a folder and, beside it, the whole config with which it starts (`./run_llama_train.sh FOLDER/NAME.toml`).
Nothing else is kept: what is finished, stopped or missing is read from the runs' folders.
"""

import argparse
import csv
import json
import os
import re
import shlex
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import torch

import train
from checkpoint.checks import check_checkpoints
from config import (
    Config,
    ConfigError,
    TitaniteError,
    change_text,
    close_match,
    differences,
    file_errors,
    from_dict,
    read_toml,
    recorded_config,
    to_toml,
    tomllib,
)
from data.loader import DataLoader
from loss import check_loss, loss_chunks
from models import build_model, find_model
from models.trained import settle_model
from parallel.device import choose_param_dtype
from parallel.mesh import ParallelDims
from run.folder import read_exit
from run.processes import launch_environment
from storage.records import write_atomically
from tools.processes import processes

POLL_SECONDS = 0.2


class Run(NamedTuple):
    """A run of a study."""

    values: Mapping[str, Any]  # what tells it from the others, setting → value
    config: Config
    after: str = ""  # the name of the run whose checkpoint it begins from

    @property
    def name(self) -> str:
        """Its name, that of its folder."""
        return name_values(self.values)

    @property
    def folder(self) -> Path:
        """Its run folder."""
        return Path(self.config.run.folder)

    @property
    def state(self) -> str:
        """How far it is, in a word or two."""
        if (read_exit(self.folder) or {}).get("kind") == "finished":
            return "finished"
        return "stopped" if (self.folder / "config.toml").is_file() else "not begun"

    @property
    def finished(self) -> bool:
        """Whether it has come to its last step."""
        return self.state == "finished"


def name_values(values: Mapping[str, Any]) -> str:
    """A name made of values, each by the last part of its setting."""
    words = []
    for key, value in values.items():
        text = value if isinstance(value, str) else json.dumps(value)
        words.append(f"{key.rpartition('.')[2]}={re.sub(r'[^0-9A-Za-z_.+-]+', '-', text).strip('-')}")
    return ",".join(words)


class Study:
    """What the file of a study says. Raises ConfigError."""

    def __init__(self, file: Path, keys: Sequence[str]):
        try:
            self.values = tomllib.loads(file.read_text(encoding="utf-8"))
        except ValueError as error:  # also bytes that are not UTF-8
            raise ConfigError(f"{file}: not valid TOML: {error}") from None
        self.file = file
        allowed = ("base", "folder", "set", *keys)
        for key in self.values:
            if key not in allowed:
                raise ConfigError(f"{file}: {key}: must be one of {', '.join(allowed)}{close_match(key, allowed)}")
        if "base" not in self.values:
            raise ConfigError(f"{file}: base: must name the config that all runs share, relative to this file")
        self.folder = Path(self.values.get("folder", f"outputs/{file.stem}"))
        self.common = self.settings("set", self.values.get("set", {}))

    def settings(self, place: str, table: Mapping[str, Any]) -> dict[str, Any]:
        """Dotted key → value of a table of settings."""
        found: dict[str, Any] = {}
        for section, entries in table.items():
            if not isinstance(entries, dict):
                raise ConfigError(f"{self.file}: {place}: {section}: must be a setting, as optimizer.lr without quotes")
            found |= {f"{section}.{name}": value for name, value in entries.items()}
        if "run.folder" in found:
            raise ConfigError(f"{self.file}: {place}: run.folder: each run has a folder of its own below `folder`")
        return found

    def run(self, values: Mapping[str, Any], settings: Mapping[str, Any], after: str = "") -> Run:
        """The run of these values, with these settings over the common ones."""
        nested = read_toml(self.file.parent / self.values["base"])
        for key, value in (self.common | {**settings, "run.folder": str(self.folder / name_values(values))}).items():
            section, _, name = key.partition(".")
            nested.setdefault(section, {})[name] = value
        return Run(values, from_dict(nested), after)


# -- the command line


def build_parser(kind: str, description: str) -> argparse.ArgumentParser:
    """The options of a kind of study."""
    program = f"python -m tools.{kind}"
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog=program, description=description, formatter_class=form)
    add = parser.add_argument
    add("file", type=Path, help=f"{kind}.toml")
    add("--at-once", type=int, default=0, metavar="N", help="most runs to train together; default: 1, with Slurm all")
    add("--processes", type=int, default=0, metavar="N", help="of each run; default: one for each device here")
    add("--dry-run", action="store_true", help="check all, list the runs, write nothing")
    add("--page", action="store_true", help="train nothing, write the page of what is there")
    add("--slurm", metavar="OPTIONS", help='submit job arrays with options of sbatch, as --slurm="--nodes=1"')
    return parser


def conduct(options: argparse.Namespace, folder: Path, runs: Sequence[Run]) -> dict[str, str] | None:
    """Check the runs, and do with them what the command line says. Raises TitaniteError.

    Returns why runs failed, by name; None if there is nothing to report yet.
    """
    at_once = max(options.at_once, 1)
    devices = torch.accelerator.device_count() // at_once or 1
    counts = {run.name: options.processes or processes(run.config, devices) for run in runs}
    check_runs(runs, counts)
    if options.dry_run:
        for run in runs:
            print(f"{run.state:10} {run.folder}")
        return None
    if options.page:
        return {}
    if options.slurm is not None:
        submit(runs, folder, options.at_once or len(runs), options.slurm)
        return None
    return train_all(runs, at_once, counts)


def report(runs: Sequence[Run], failed: Mapping[str, str]) -> int:
    """Name the runs that failed, and say how many are not finished. Returns the exit code."""
    for name, why in failed.items():
        print(f"failed: {name}: {why}")
    missing = [run for run in runs if not run.finished]
    if missing:
        print(f"not finished: {len(missing)} of {len(runs)} runs; the same command goes on with them")
    return int(bool(failed))


def write_csv(file: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows, whose keys are the columns."""
    columns = dict.fromkeys(key for row in rows for key in row)
    with file.open("w", newline="", encoding="utf-8") as text:
        writer = csv.DictWriter(text, list(columns))
        writer.writeheader()
        writer.writerows(rows)
    print(f"{file}: a row for each run")


# -- checks


def check_runs(runs: Sequence[Run], counts: Mapping[str, int]) -> None:
    """Find mistakes of all runs before the first starts. `counts`: name → processes. Raises TitaniteError."""
    names = [run.name for run in runs]
    for run in runs:
        try:
            if names.count(run.name) > 1:
                raise ConfigError("two runs would have this folder: give each value once")
            config = check_run(run, counts[run.name])
            began = recorded_config(run.folder) or config
            for key, (old, new) in differences(began, config).items():
                if key != "run.folder":
                    both = f"it began with {key} = {change_text(old)}, now asked: {change_text(new)}"
                    raise ConfigError(f"{both}; name another `folder` for the new runs, or remove {run.folder}")
        except TitaniteError as error:
            raise type(error)(f"{run.name}: {error}") from None


def check_run(run: Run, world_size: int) -> Config:
    """Check as train.py does before a process group starts. Returns the config that the run would record."""
    config = choose_param_dtype(run.config)
    with file_errors():
        config = settle_model(config)
        dims = ParallelDims.from_config(config.parallelism, world_size)
        data = DataLoader(config, 0, dims.dp)
        config = data.settle(config)
        spec, flavor = find_model(config.model, data.vocab_size)
        identity = {"name": config.model.name, **asdict(flavor)}
        train.check_start(config, launch_environment(), data, spec, flavor, identity)
        if not run.after:
            check_checkpoints(config, identity, run.folder, data)
        data.close()
    model = build_model(spec, flavor)
    check_loss(config)
    spec.check_replacements(model, config, loss_chunks(config))
    return config


# -- running


class Job(NamedTuple):
    """A run that trains."""

    run: Run
    child: "subprocess.Popen[bytes]"
    place: dict[str, str]  # its environment
    began: float


def train_all(runs: Sequence[Run], at_once: int, counts: Mapping[str, int]) -> dict[str, str]:
    """Train what is not finished, up to `at_once` runs together. Returns why those that failed did, by name.

    A run begins once the one that it comes `after` is finished. Raises SystemExit after a signal.
    """
    waiting = [run for run in runs if not run.finished]
    finished = {"", *(run.name for run in runs if run.finished)}
    print(f"runs to train: {len(waiting)} of {len(runs)}", flush=True)
    places = share_devices(at_once)
    jobs: list[Job] = []
    failed: dict[str, str] = {}
    with signals_passed_on(jobs) as signals:
        while True:
            for run in list(waiting):
                if run.after in failed:
                    failed[run.name] = f"not begun, since it needs {run.after}"
                    waiting.remove(run)
                elif places and not signals and run.after in finished:
                    jobs.append(start(run, counts[run.name], places.pop()))
                    waiting.remove(run)
            if not jobs:
                break
            time.sleep(POLL_SECONDS)
            for job in [job for job in jobs if job.child.poll() is not None]:
                jobs.remove(job)
                places.append(job.place)
                if job.run.finished:
                    finished.add(job.run.name)
                else:
                    failed[job.run.name] = f"exit code {job.child.returncode}: {find_cause(job)}"
                seconds = time.time() - job.began
                say(f"{job.run.name}: {failed.get(job.run.name, 'finished')}, {seconds:.0f} s; {len(waiting)} wait")
    if signals:
        print("stopped: the same command goes on from here")
        raise SystemExit(128 + signals[-1])
    return failed


def say(line: str) -> None:
    """Print a line with the time."""
    print(f"{datetime.now():%H:%M:%S} {line}", flush=True)


def beside(run: Run, suffix: str) -> Path:
    """A file beside a run's folder, of the same name."""
    return run.folder.with_name(run.name + suffix)


def write_config(run: Run) -> Path:
    """Write the config with which a run starts. Returns its file."""
    file = beside(run, ".toml")
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, to_toml(run.config).encode())
    return file


def start(run: Run, world_size: int, place: dict[str, str]) -> Job:
    """Start the processes of a run, in a session of their own: Ctrl-C reaches them only through us."""
    log = beside(run, ".log")
    words = ["./run_llama_train.sh", str(write_config(run))]
    environment = os.environ | place | {"NGPU": str(world_size)}
    say(f"{run.name}: {'resumed' if run.state == 'stopped' else 'started'}; its output: {log}")
    with log.open("ab") as output:
        child = subprocess.Popen(
            words, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
    return Job(run, child, place, time.time())


def find_cause(job: Job) -> str:
    """Why a run has ended: as it recorded, otherwise the last line of its log."""
    record = read_exit(job.run.folder) or {}
    recorded = datetime.fromisoformat(record.get("time", "2000-01-01")).timestamp()
    if recorded > job.began - 1:  # not of an earlier start
        return record["cause"]
    return ["", *beside(job.run, ".log").read_text(encoding="utf-8", errors="replace").splitlines()][-1]


@contextmanager
def signals_passed_on(jobs: Sequence[Job]) -> Iterator[list[int]]:
    """Inside pass on requests to stop to all jobs. Yields the list of those that came."""
    came: list[int] = []

    def pass_on(number: int, frame: object) -> None:
        came.append(number)
        for job in jobs:
            job.child.send_signal(number)

    numbers = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
    before = [signal.signal(number, pass_on) for number in numbers if signal.getsignal(number) != signal.SIG_IGN]
    yield came
    for number, handler in zip(numbers, before, strict=False):
        signal.signal(number, handler)


def share_devices(at_once: int) -> list[dict[str, str]]:
    """The environment of each of the runs at once: its devices, or its share of the cores. Several may share a GPU."""
    if at_once == 1:
        return [{}]
    count = torch.accelerator.device_count()
    if not count:
        return [{"OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // at_once))}] * at_once
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = visible.split(",") if visible else list(map(str, range(count)))
    per_run = count // at_once or 1
    firsts = [number * per_run % count for number in range(at_once)]
    return [{"CUDA_VISIBLE_DEVICES": ",".join(devices[first : first + per_run])} for first in firsts]


# -- Slurm


def submit(runs: Sequence[Run], folder: Path, at_once: int, options: str) -> None:
    """Submit what is not finished as job arrays of launch/slurm.sh, with these `options` of sbatch.

    First the runs that need no other, then, once those have ended, the rest. Raises TitaniteError if jobs of an earlier
    call are still queued or running, or sbatch fails.
    """
    name = str(folder.absolute())
    queued = _call("squeue", "--me", "--noheader", "--format=%A", f"--name={name}").split()
    if queued:
        raise TitaniteError(f"jobs of this study are still queued or running: wait, or scancel {' '.join(set(queued))}")
    after: list[str] = []
    for is_branch in (False, True):
        stage = [run for run in runs if not run.finished and bool(run.after) == is_branch]
        if not stage:
            continue
        file = folder / f"slurm-{int(is_branch)}.txt"
        for run in stage:
            write_config(run)
        write_atomically(file, "".join(f"{run.folder}\n" for run in stage).encode())
        words = [f"--job-name={name}", f"--array=1-{len(stage)}%{at_once}", f"--output={folder}/slurm-%A_%a.log"]
        words += [f"--export=ALL,STUDY_RUNS={file}", *after, *shlex.split(options), "launch/slurm.sh"]
        job = _call("sbatch", "--parsable", *words).partition(";")[0].strip()
        after = [f"--dependency=afterany:{job}"]
        print(f"submitted {len(stage)} runs as job {job}; once they have ended, --page writes the page")


def _call(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise TitaniteError(f"{words[0]}: {done.stderr.strip()}")
    return done.stdout
