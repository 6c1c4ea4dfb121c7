"""The runs of a study: checked together before the first starts, then trained as a user starts them.

Each has a folder and, beside it, the whole config with which it starts (`./run_llama_train.sh FOLDER/NAME.toml`).
Nothing else is kept: which runs are finished is read from their folders.
"""

import argparse
import asyncio
import os
import re
import shlex
import signal
import subprocess
import time
from asyncio.subprocess import DEVNULL
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain, cycle, islice
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch

from config import Config, ConfigError, TitaniteError, differences, from_dict, nest, overlay, read_toml, to_toml
from run.folder import read_exit
from run.processes import LaunchEnvironment, end_with_parent
from start import set_up
from storage.records import write_atomically


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
    def end(self) -> dict[str, Any]:
        """The record of its end."""
        return read_exit(self.folder) or {"kind": "unknown", "cause": "no end is recorded"}

    @property
    def finished(self) -> bool:
        """Whether it has come to its last step."""
        return self.end["kind"] == "finished"

    def beside(self, suffix: str) -> Path:
        """The file beside its folder with this suffix: `.toml` its config, `.log` its output."""
        return self.folder.with_name(self.name + suffix)


Chain: TypeAlias = Sequence[Run]  # runs that train one after another, since they begin from checkpoints of the first


def name_values(values: Mapping[str, Any]) -> str:
    """A name made of values."""
    words = [f"{key}={value}" for key, value in values.items()]
    return ",".join(re.sub(r"[^\w.+=-]+", "-", word) for word in words)


class Study:
    """The file of a study: a config for all runs, the `folder` of their folders, and `keys` of its kind."""

    def __init__(self, file: Path, keys: Sequence[str]):
        """Raises ConfigError."""
        self.config = read_toml(file, ("folder", *keys))
        self.folder = Path(self.config.pop("folder", f"outputs/{file.stem}"))
        self.values = {key: self.config.pop(key) for key in keys if key in self.config}

    def run(self, values: Mapping[str, Any], settings: Mapping[str, Any]) -> Run:
        """The run of these values, with these settings over those for all. Raises ConfigError."""
        if "run.folder" in settings:
            raise ConfigError("run.folder: a study names its runs; `folder` is where they are")
        layer = nest({**settings, "run.folder": str(self.folder / name_values(values))})
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


def conduct(
    kind: str,
    about: str,
    argv: Sequence[str],
    read: Callable[[Path], tuple[Path, Sequence[Chain]]],
    write_results: Callable[[Path, Sequence[Run]], None],
) -> int:
    """The command line of a kind of study. Returns the exit code. Raises TitaniteError.

    `read` gives folder and runs of its file, `write_results` writes what came of them to the folder.
    """
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
    folder, chains = read(options.file)
    runs = list(chain(*chains))
    at_once = max(1, options.at_once)
    world_size = options.processes or torch.accelerator.device_count() // at_once or 1
    if not options.page:
        check_runs(runs, world_size)
    if options.slurm is not None:
        submit(find_missing(chains), folder, at_once, options.slurm)
        return 0
    if not (options.dry_run or options.page):
        asyncio.run(train_all(find_missing(chains), at_once, world_size))
    missing = [run for run in runs if not run.finished]
    for run in missing:
        print(f"not finished: {run.name}: {run.end['cause']}")
    print(f"finished: {len(runs) - len(missing)} of {len(runs)} runs")
    if options.dry_run:
        return 0
    write_results(folder, runs)
    return int(bool(missing))


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
        changed = set(differences(from_dict(read_toml(file)), run.config))
        changed -= {"run.folder", "checkpoint.branch_from"}  # places: the study's folder may have been moved
        if changed:
            raise ConfigError(f"began with other values of {', '.join(changed)}: name another `folder`, or remove it")


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


async def train_all(chains: Sequence[Chain], at_once: int, world_size: int) -> None:
    """Train chains, up to `at_once` together; what follows a run that did not finish is not started."""
    places: asyncio.Queue[dict[str, str]] = asyncio.Queue()
    for place in share_devices(at_once, world_size):
        places.put_nowait(place)

    async def train_chain(runs: Chain) -> None:
        place = await places.get()
        for run in runs:
            await train_run(run, place)
            if not run.finished:
                break
        places.put_nowait(place)

    await asyncio.gather(*map(train_chain, chains))


async def train_run(run: Run, place: Mapping[str, str]) -> None:
    """Train a run in processes of a session of their own. Ctrl-C lets it save and stop, and so does our end."""
    print(f"{run.name}: starts", flush=True)
    log = run.beside(".log")
    with log.open("ab") as output:
        child = await asyncio.create_subprocess_exec(
            "./run_llama_train.sh",
            str(run.beside(".toml")),
            env=place,
            stdin=DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            preexec_fn=partial(end_with_parent, signal.SIGTERM),
        )
    try:
        code = await child.wait()
    except asyncio.CancelledError:
        print(f"{run.name}: saves and stops; the same command goes on from there", flush=True)
        child.terminate()
        await child.wait()
        raise
    print(f"{run.name}: ended with exit code {code}, its output: {log}", flush=True)


def share_devices(at_once: int, world_size: int) -> list[dict[str, str]]:
    """The environment of each of the runs at once: its devices and its share of the cores. Several may share a GPU."""
    count = torch.accelerator.device_count()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(count)))
    devices = cycle(visible.split(","))
    threads = len(os.sched_getaffinity(0)) // (at_once * world_size) or 1
    places = []
    for _ in range(at_once):
        own = ",".join(islice(devices, count // at_once or 1))
        numbers = {"NGPU": str(world_size), "CUDA_VISIBLE_DEVICES": own}
        places.append({"OMP_NUM_THREADS": str(threads), **os.environ, **numbers})
    return places


def submit(chains: Sequence[Chain], folder: Path, at_once: int, options: str) -> None:
    """Submit chains as an array of launch/slurm.sh, a task for each, with these `options` of sbatch.

    Its jobs wait for those of an earlier call, and end at once where those have done all. Raises TitaniteError if
    sbatch fails.
    """
    if not chains:
        raise TitaniteError("every run is finished: --page writes the page")
    file = folder / f"slurm-{time.time_ns()}.txt"
    lines = ["\t".join(str(run.folder) for run in runs) for runs in chains]
    write_atomically(file, "".join(f"{line}\n" for line in lines).encode())
    words = [f"--job-name={folder.absolute()}", "--dependency=singleton", f"--array=1-{len(lines)}%{at_once}"]
    words += [f"--output={folder}/slurm-%A_%a.log", f"--export=ALL,STUDY_RUNS={file}", *shlex.split(options)]
    code = subprocess.run(["sbatch", *words, "launch/slurm.sh"]).returncode
    if code:
        raise TitaniteError(f"sbatch ended with exit code {code}")
    print("once it has ended, --page writes the page")
