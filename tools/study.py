"""The runs of a study: checked together before the first starts, then trained as a user starts them.

Each has a folder and, beside it, the whole config with which it starts (`./run_llama_train.sh FOLDER/NAME.toml`).
Nothing else is kept: which runs are finished is read from their folders.
"""

import argparse
import csv
import os
import re
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, cycle, islice
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch

from config import (
    Config,
    ConfigError,
    TitaniteError,
    differences,
    from_dict,
    nest,
    overlay,
    read_toml,
    to_toml,
)
from run.folder import read_exit
from run.processes import LaunchEnvironment, end_with_parent
from start import set_up
from storage.records import write_atomically

Child: TypeAlias = "subprocess.Popen[bytes]"
POLL_SECONDS = 0.2


class Run(NamedTuple):
    """A run of a study."""

    values: Mapping[str, Any]  # what tells it from the others, setting → value
    config: Config

    @property
    def folder(self) -> Path:
        """Its run folder."""
        return Path(self.config.run.folder)

    @property
    def name(self) -> str:
        """Its name, that of its folder."""
        return self.folder.name

    @property
    def end(self) -> str:
        """The kind of its end, if one was recorded."""
        record = read_exit(self.folder) or {}
        return record.get("kind", "none recorded")

    @property
    def finished(self) -> bool:
        """Whether it has come to its last step."""
        return self.end == "finished"

    def beside(self, suffix: str) -> Path:
        """The file beside its folder with this suffix: `.toml` its config, `.log` its output."""
        return self.folder.with_name(self.name + suffix)


Chain = Sequence[Run]  # runs that train one after another, since they begin from checkpoints of the first
Plan = tuple[Path, Sequence[Chain], Callable[[], None]]  # a study's folder, its runs, and what writes its results


def name_values(values: Mapping[str, Any]) -> str:
    """A name made of values, each by the last part of its setting, or by all of it if two have the same."""
    last = {key: key.rpartition(".")[2] for key in values}
    words = []
    for key, value in values.items():
        name = last[key]
        if list(last.values()).count(name) > 1:
            name = key
        plain = re.sub(r"[^0-9A-Za-z_.+-]+", "-", str(value)).strip("-")
        words.append(f"{name}={plain}")
    return ",".join(words)


class Study:
    """The file of a study: a config for all runs, the `folder` of their folders, and `keys` of its kind."""

    def __init__(self, file: Path, keys: Sequence[str]):
        """Raises ConfigError."""
        self.config = read_toml(file, ("folder", *keys))
        self.folder = Path(self.config.pop("folder", f"outputs/{file.stem}"))
        self.values = {key: self.config.pop(key) for key in keys if key in self.config}

    def run(self, values: Mapping[str, Any], settings: Mapping[str, Any]) -> Run:
        """The run of these values, with these settings over those for all."""
        layer = nest({"run.folder": str(self.folder / name_values(values)), **settings})
        return Run(values, from_dict(overlay(self.config, layer)))


def dotted(table: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted key → value of a table of settings. Raises ConfigError."""
    found: dict[str, Any] = {}
    for section, entries in table.items():
        if not isinstance(entries, dict):
            raise ConfigError(f"{section}: must be a setting, as optimizer.lr without quotes")
        found |= {f"{section}.{name}": value for name, value in entries.items()}
    return found


# -- the command line


def conduct(kind: str, about: str, argv: Sequence[str], read: Callable[[Path], Plan]) -> int:
    """The command line of a kind of study; `read` reads its file. Returns the exit code. Raises TitaniteError."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog=f"python -m tools.{kind}", description=about, formatter_class=form)
    add = parser.add_argument
    add("file", type=Path, help=f"{kind}.toml")
    add("--at-once", type=int, default=1, metavar="N", help="most runs to train together (default %(default)s)")
    add("--processes", type=int, default=0, metavar="N", help="of each run; default: one for each of its devices")
    add("--dry-run", action="store_true", help="check all, list what is missing, write nothing")
    add("--page", action="store_true", help="train nothing, write the page of what is there")
    add("--slurm", metavar="OPTIONS", help='submit a job array with options of sbatch, as --slurm="--nodes=1"')
    options = parser.parse_args(argv)
    folder, chains, write_results = read(options.file)
    runs = list(chain(*chains))
    at_once = max(1, options.at_once)
    world_size = options.processes or torch.accelerator.device_count() // at_once or 1
    if not options.page:
        check_runs(runs, world_size)
    if options.slurm is not None:
        submit(chains, folder, at_once, options.slurm)
        return 0
    if not (options.dry_run or options.page):
        train_all(chains, at_once, world_size)
    missing = [run for run in runs if not run.finished]
    for run in missing:
        print(f"not finished: {run.name}{last_words(run)}")
    print(f"finished: {len(runs) - len(missing)} of {len(runs)} runs")
    if options.dry_run:
        return 0
    write_results()
    return int(bool(missing))


def last_words(run: Run) -> str:
    """Where the output of a run is, and its last line; "" if it has never started."""
    log = run.beside(".log")
    if not log.exists():
        return ""
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
    last = [line for line in lines if line.strip()][-1:]
    return "; ".join([f", its output: {log}", *last])


def write_csv(file: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows, whose keys are the columns."""
    columns = dict.fromkeys(chain(*rows))
    with file.open("w", newline="", encoding="utf-8") as text:
        writer = csv.DictWriter(text, columns)
        writer.writeheader()
        writer.writerows(rows)


# -- checks


def check_runs(runs: Sequence[Run], world_size: int) -> None:
    """Find mistakes of all runs before the first starts. Raises TitaniteError."""
    folders = [run.folder for run in runs]
    for run in runs:
        try:
            if folders.count(run.folder) > 1:
                raise ConfigError("two runs would have this folder: give each value once")
            check_unchanged(run)
            set_up(run.config, LaunchEnvironment(0, 0, world_size)).data.close()
        except TitaniteError as error:
            raise type(error)(f"{run.name}: {error}") from None


def check_unchanged(run: Run) -> None:
    """Refuse other settings than a run began with, wherever its folder was then. Raises ConfigError."""
    file = run.beside(".toml")
    if file.exists() and run.folder.exists():
        changed = differences(_placeless(from_dict(read_toml(file))), _placeless(run.config))
        if changed:
            raise ConfigError(f"began with other values of {', '.join(changed)}: name another `folder`, or remove it")


def _placeless(config: Config) -> Config:
    """The config without the place of the study's folder: it may have been moved."""
    branch_from = config.checkpoint.branch_from.rpartition("/")[2]
    checkpoint = replace(config.checkpoint, branch_from=branch_from)
    return replace(config, run=replace(config.run, folder=""), checkpoint=checkpoint)


# -- running


def find_missing(chains: Sequence[Chain]) -> list[Chain]:
    """What is not finished, with the config of each run written beside its folder."""
    waiting: list[Chain] = []
    for runs in chains:
        missing = [run for run in runs if not run.finished]
        for run in missing:
            file = run.beside(".toml")
            file.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(file, to_toml(run.config).encode())
        if missing:
            waiting.append(missing)
    return waiting


def train_all(chains: Sequence[Chain], at_once: int, world_size: int) -> None:
    """Train what is not finished, up to `at_once` runs together.

    Ctrl-C lets the runs save and stop. So does the end of this process in any other way.
    """
    waiting = find_missing(chains)
    places = share_devices(at_once, world_size)
    jobs: dict[Child, tuple[Chain, dict[str, str]]] = {}  # what trains: its chain and its place
    try:
        while waiting or jobs:
            while waiting and places:
                runs = waiting.pop(0)
                place = places.pop()
                jobs[start(runs[0], world_size, place)] = runs, place
            time.sleep(POLL_SECONDS)
            for child in [child for child in jobs if child.poll() is not None]:
                (run, *rest), place = jobs.pop(child)
                places.append(place)
                print(f"{run.name}: ended with exit code {child.returncode}", flush=True)
                if run.finished and rest:
                    waiting.insert(0, rest)
    except KeyboardInterrupt:
        print("the runs save and stop; the same command goes on from there", flush=True)
        for child in jobs:
            child.terminate()
        for child in jobs:
            child.wait()
        raise


def start(run: Run, world_size: int, place: dict[str, str]) -> Child:
    """Start the processes of a run, in a session of their own: Ctrl-C reaches them only through us."""
    print(f"{run.name}: starts", flush=True)
    with run.beside(".log").open("ab") as output:
        return subprocess.Popen(
            ["./run_llama_train.sh", str(run.beside(".toml"))],
            env=place | {"NGPU": str(world_size)},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            preexec_fn=partial(end_with_parent, signal.SIGTERM),
        )


def share_devices(at_once: int, world_size: int) -> list[dict[str, str]]:
    """The environment of each of the runs at once: its devices and its share of the cores. Several may share a GPU."""
    count = torch.accelerator.device_count()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(count)))
    devices = cycle(visible.split(","))
    threads = len(os.sched_getaffinity(0)) // (at_once * world_size) or 1
    places = []
    for _ in range(at_once):
        own = ",".join(islice(devices, count // at_once or 1))
        places.append({"OMP_NUM_THREADS": str(threads), **os.environ, "CUDA_VISIBLE_DEVICES": own})
    return places


# -- Slurm


def submit(chains: Sequence[Chain], folder: Path, at_once: int, options: str) -> None:
    """Submit what is not finished as an array of launch/slurm.sh, with these `options` of sbatch.

    Its jobs wait for those of an earlier call, and end at once where those have done all. Raises TitaniteError if
    sbatch fails.
    """
    waiting = find_missing(chains)
    if not waiting:
        raise TitaniteError("every run is finished: --page writes the page")
    file = folder / f"slurm-{time.time_ns()}.txt"
    lines = ["\t".join(str(run.folder) for run in runs) for runs in waiting]
    write_atomically(file, "".join(f"{line}\n" for line in lines).encode())
    words = [f"--job-name={folder.absolute()}", "--dependency=singleton", f"--array=1-{len(lines)}%{at_once}"]
    words += [f"--output={folder}/slurm-%A_%a.log", f"--export=ALL,STUDY_RUNS={file}", *shlex.split(options)]
    done = subprocess.run(["sbatch", *words, "launch/slurm.sh"], capture_output=True, text=True)
    if done.returncode:
        raise TitaniteError(f"sbatch: {done.stderr.strip()}")
    print(f"{done.stdout.strip()}; once it has ended, --page writes the page")
