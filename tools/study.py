"""The runs of a study: checked together before the first starts, then trained as a user starts them.

Each has a folder and, beside it, the whole config with which it starts (`./run_llama_train.sh FOLDER/NAME.toml`).
Nothing else is kept: what is finished, stopped or missing is read from the runs' folders.
"""

import argparse
import json
import os
import re
import shlex
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from queue import SimpleQueue
from types import FrameType
from typing import Any

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

SUBMITTED = ".slurm_jobs"  # in a study's folder: the Slurm jobs of the last --slurm
MAX_NAME = 200  # bytes of a folder's name, which most file systems limit to 255


@dataclass(frozen=True)
class Run:
    """A run of a study: its config, and the settings that tell it from the others."""

    name: str  # of its folder
    values: Mapping[str, Any]  # dotted key → value
    config: Config
    after: str = ""  # the run whose checkpoint it begins from

    @property
    def folder(self) -> Path:
        """Its run folder."""
        return Path(self.config.run.folder)

    @property
    def config_file(self) -> Path:
        """The config with which it starts."""
        return self.folder.with_name(f"{self.name}.toml")

    @property
    def log(self) -> Path:
        """What its processes print, of all starts."""
        return self.folder.with_name(f"{self.name}.log")

    @property
    def finished(self) -> bool:
        """Whether it has come to its last step."""
        return (read_exit(self.folder) or {}).get("kind") == "finished"

    @property
    def state(self) -> str:
        """How far it is, in a word."""
        if self.finished:
            return "finished"
        return "stopped" if (self.folder / "config.toml").is_file() else "not begun"


# -- from a file to runs


def read_study(file: Path, keys: Sequence[str]) -> dict[str, Any]:
    """The values of a study's file, whose top has these `keys`. Raises ConfigError."""
    try:
        with file_errors():
            values = tomllib.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:  # also bytes that are not UTF-8
        raise ConfigError(f"{file}: not valid TOML: {error}") from None
    for key in values:
        if key not in keys:
            raise ConfigError(f"{file}: {key}: unknown key; one of {', '.join(keys)}{close_match(key, keys)}")
    if not isinstance(values.get("base"), str):
        raise ConfigError(f"{file}: base: must name the config that all runs share, relative to this file")
    return values


def flatten(table: Any, place: str) -> dict[str, Any]:
    """Dotted key → value of a table of settings, whether `optimizer.lr` is quoted or not. Raises ConfigError."""
    if not isinstance(table, dict):
        raise ConfigError(f"{place}: must be a table of settings, such as optimizer.lr = ...")
    found: dict[str, Any] = {}
    for section, entries in table.items():
        if isinstance(entries, dict):
            found |= {f"{section}.{name}": value for name, value in entries.items()}
        else:
            found[section] = entries
    for key in found:
        if key.count(".") != 1:
            raise ConfigError(f"{place}: {key}: must be a setting with its section, such as optimizer.lr")
        if key.startswith("run.") and key != "run.seed":
            raise ConfigError(f"{place}: {key}: each run of a study has a folder of its own, below `folder`")
    return found


def build_config(base: Path, folder: Path, values: Mapping[str, Any]) -> Config:
    """The config of a run in `folder`: the file `base` with these values, dotted key → value. Raises ConfigError."""
    nested = read_toml(base)
    for key, value in {**values, "run.folder": str(folder)}.items():
        section, _, name = key.partition(".")
        nested.setdefault(section, {})[name] = value
    return from_dict(nested)


def name_values(values: Mapping[str, Any]) -> str:
    """The name of a run's folder: its values, by the last part of a key where that says which."""
    last_parts = [key.rpartition(".")[2] for key in values]
    words = []
    for key, value in values.items():
        name = key.rpartition(".")[2]
        if last_parts.count(name) > 1:
            name = key
        text = value if isinstance(value, str) else json.dumps(value)
        words.append(f"{name}={re.sub(r'[^0-9A-Za-z_.+-]+', '-', text).strip('-')}")
    return ",".join(words)


# -- the command line


def build_parser(name: str, description: str) -> argparse.ArgumentParser:
    """The options of all kinds of studies."""
    parser = argparse.ArgumentParser(
        prog=f"python -m tools.{name}", description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path, help=f"{name}.toml")
    parser.add_argument(
        "--at-once", type=_positive, metavar="N", help="most runs to train together; default: 1, of a Slurm array all"
    )
    parser.add_argument(
        "--processes", type=_positive, metavar="N", help="of each run; default: one for each of its devices, on CPU 1"
    )
    parser.add_argument("--dry-run", action="store_true", help="check all, list the runs, write nothing")
    parser.add_argument("--page", action="store_true", help="train nothing: the page of what is there")
    parser.add_argument(
        "--slurm",
        nargs="?",
        const="",
        metavar="OPTIONS",
        help='submit job arrays, as --slurm="--nodes=1 --time=2:00:00"',
    )
    return parser


def _positive(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text}: must be a number, at least 1")
    return int(text)


def conduct(arguments: argparse.Namespace, folder: Path, runs: Sequence[Run]) -> dict[str, str] | None:
    """Check the runs, and do with them what the command line says. Raises TitaniteError.

    Returns why runs failed, by name; None if nothing is to be reported yet.
    """
    on_cluster = arguments.slurm is not None
    at_once = arguments.at_once or 1
    devices = torch.accelerator.device_count() // at_once or 1
    counts = {}
    for run in runs:
        fitting = fewest_processes(run.config) if on_cluster else processes(run.config, devices)
        counts[run.name] = arguments.processes or fitting
    check_runs(runs, counts)
    if arguments.dry_run:
        for run in runs:
            print(f"{run.state:10} {run.folder}")
        print(f"{len(runs)} runs, {sum(run.finished for run in runs)} finished")
        return None
    if arguments.page:
        return {}
    if on_cluster:
        submit(runs, folder, arguments.at_once, arguments.slurm)
        return None
    return train_all(runs, at_once, counts)


def report_failures(runs: Sequence[Run], failed: Mapping[str, str]) -> int:
    """Name the runs that failed, and say how many are not finished. Returns the exit code."""
    for name, why in failed.items():
        print(f"failed: {name}: {why}")
    missing = [run for run in runs if not run.finished]
    if missing:
        print(f"not finished: {len(missing)} of {len(runs)} runs; the same command goes on with them")
    return int(bool(failed))


# -- checks


def check_runs(runs: Sequence[Run], counts: Mapping[str, int]) -> None:
    """Find mistakes of all runs before the first starts. `counts`: name → processes. Raises TitaniteError."""
    names = [run.name for run in runs]
    for run in runs:
        if names.count(run.name) > 1:
            raise ConfigError(f"{run.name}: two runs would have this folder: give each value once")
        if len(run.name.encode()) > MAX_NAME:
            raise ConfigError(f"{run.name}: too long for a folder's name: vary fewer settings, or shorter values")
    for run in runs:
        try:
            config = check_run(run.config, counts[run.name], bool(run.after))
            _check_same(run, config)
        except TitaniteError as error:
            raise type(error)(f"{run.name}: {error}") from None


def check_run(config: Config, world_size: int, begins_later: bool = False) -> Config:
    """Check as train.py does before a process group starts. Returns the config that the run would record.

    `begins_later`: from a checkpoint that is not there yet.
    """
    config = choose_param_dtype(config)
    with file_errors():
        config = settle_model(config)
        dims = ParallelDims.from_config(config.parallelism, world_size)
        data = DataLoader(config, 0, dims.dp)
        try:
            config = data.settle(config)
            spec, flavor = find_model(config.model, data.vocab_size)
            identity = {"name": config.model.name, **asdict(flavor)}
            train.check_start(config, launch_environment(), data, spec, flavor, identity)
            if not begins_later:
                check_checkpoints(config, identity, Path(config.run.folder), data)
        finally:
            data.close()
    model = build_model(spec, flavor)
    check_loss(config)
    spec.check_replacements(model, config, loss_chunks(config))
    return config


def fewest_processes(config: Config) -> int:
    """The least world size that the layout allows."""
    layout = config.parallelism
    return layout.pp * layout.dp_replicate * max(layout.dp_shard, 1) * layout.cp * layout.tp


def _check_same(run: Run, config: Config) -> None:
    """Refuse a study whose file has changed since a run began, and so would mix runs of two kinds."""
    began = recorded_config(run.folder)
    if began is None:
        return
    changed = differences(began, config)
    changed.pop("run.folder", None)
    for key, (old, new) in changed.items():
        both = f"it began with {key} = {change_text(old)}, now asked: {change_text(new)}"
        raise ConfigError(f"{both}; name another `folder` for the new runs, or remove {run.folder}")


# -- running


def train_all(runs: Sequence[Run], at_once: int, counts: Mapping[str, int]) -> dict[str, str]:
    """Train what is not finished, up to `at_once` runs together. Returns why those that failed did, by name.

    A run begins once the one that it comes `after` is finished. SIGINT, SIGTERM and SIGHUP are passed on to the runs,
    which save and stop; nothing else is then begun.
    """
    places = SimpleQueue[dict[str, str]]()
    for place in share_devices(at_once):
        places.put(place)
    children = Children()
    waiting = [run for run in runs if not run.finished]
    finished = {run.name for run in runs if run.finished}
    failed: dict[str, str] = {}
    futures: dict[Future[str], Run] = {}
    total = len(waiting)
    print(f"{len(finished)} of {len(runs)} runs are finished", flush=True)
    with ThreadPoolExecutor(at_once) as pool, children.signals_passed_on():
        while waiting or futures:
            for run in list(waiting):
                if run.after in failed:
                    failed[run.name] = f"not begun, since it needs {run.after}"
                elif run.after and run.after not in finished:
                    continue
                else:
                    futures[pool.submit(_train, run, counts[run.name], places, children)] = run
                waiting.remove(run)
            done, _ = wait(futures, return_when=FIRST_COMPLETED)
            for future in done:
                run = futures.pop(future)
                why = future.result()
                if why:
                    failed[run.name] = why
                else:
                    finished.add(run.name)
                left = len(waiting) + len(futures)
                say(f"[{total - left}/{total}] {run.name}: {why or 'finished'}")
    return failed


def say(line: str) -> None:
    """Print a line with the time."""
    print(f"{datetime.now():%H:%M:%S} {line}", flush=True)


def _train(run: Run, count: int, places: "SimpleQueue[dict[str, str]]", children: "Children") -> str:
    """Train one run to its end. Returns why it did not get there, "" if it did."""
    place = places.get()
    try:
        write_config(run)
        verb = "resumed" if run.state == "stopped" else "started"
        began = time.monotonic()
        with run.log.open("ab") as log:
            words = ["./run_llama_train.sh", str(run.config_file)]
            environment = os.environ | place | {"NGPU": str(count)}
            child = children.start(words, env=environment, stdout=log, stderr=subprocess.STDOUT)
            if child is None:
                return "not begun"
            say(f"{run.name}: {verb}; its output: {run.log}")
            code = child.wait()
        children.remove(child)
        if run.finished:
            return ""
        cause = (read_exit(run.folder) or {}).get("cause") or last_error(run.log)
        return f"exit code {code} after {time.monotonic() - began:.0f} s: {cause}"
    except OSError as error:
        return f"{error.filename}: {error.strerror}"
    finally:
        places.put(place)


def write_config(run: Run) -> None:
    """Write the config with which a run starts."""
    run.config_file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(run.config_file, to_toml(run.config).encode())


def last_error(log: Path) -> str:
    """The last line of a log that speaks of an error, otherwise the last line."""
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines() or [""]
    errors = [line for line in lines if "error" in line.lower()]
    return (errors or lines)[-1].strip()


def share_devices(at_once: int) -> list[dict[str, str]]:
    """The environment of each of the runs at once: its own devices, on CPU its share of the cores.

    With fewer devices than runs, several runs share one.
    """
    if at_once == 1:
        return [{}]
    devices = list(map(str, range(torch.accelerator.device_count())))
    if not devices:
        threads = max(1, len(os.sched_getaffinity(0)) // at_once)
        return [{"OMP_NUM_THREADS": str(threads)}] * at_once
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible:
        devices = visible.split(",")
    per_run = len(devices) // at_once or 1
    places = []
    for number in range(at_once):
        first = number * per_run % len(devices)
        places.append({"CUDA_VISIBLE_DEVICES": ",".join(devices[first : first + per_run])})
    return places


class Children:
    """The processes of the runs, to which signals are passed on."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.running: list[subprocess.Popen[bytes]] = []
        self.stopped_by = 0  # the signal that was passed on last

    def start(self, words: Sequence[str], **options: Any) -> "subprocess.Popen[bytes] | None":
        """Start a process; None if all were asked to stop. A session of its own: Ctrl-C reaches it only through us."""
        with self.lock:
            if self.stopped_by:
                return None
            child = subprocess.Popen(words, start_new_session=True, stdin=subprocess.DEVNULL, **options)
            self.running.append(child)
            return child

    def remove(self, child: "subprocess.Popen[bytes]") -> None:
        """Forget a process that has ended."""
        with self.lock:
            self.running.remove(child)

    @contextmanager
    def signals_passed_on(self) -> Iterator[None]:
        """Pass signals on inside. Raises SystemExit at the end if there was one."""
        before = {}
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) != signal.SIG_IGN:  # as SIGHUP under nohup
                before[number] = signal.signal(number, self._pass_on)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        if self.stopped_by:
            print("stopped: the same command goes on from here")
            raise SystemExit(128 + self.stopped_by)

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        with self.lock:
            self.stopped_by = number
            for child in self.running:
                child.send_signal(number)


# -- Slurm


def submit(runs: Sequence[Run], folder: Path, at_once: int | None, options: str) -> None:
    """Submit what is not finished as job arrays of launch/slurm.sh, with these `options` of sbatch.

    First the runs that need no other, then, once those have ended, the rest. Raises TitaniteError if jobs of an earlier
    call are still queued or running.
    """
    _refuse_second_submission(folder / SUBMITTED)
    missing = [run for run in runs if not run.finished]
    stages = [[run for run in missing if not run.after], [run for run in missing if run.after]]
    jobs: list[str] = []
    for stage in filter(None, stages):
        for run in stage:
            write_config(run)
        queued = folder / f"slurm-{len(jobs) + 1}.txt"
        write_atomically(queued, "".join(f"{run.folder}\n" for run in stage).encode())
        words = [
            "sbatch",
            "--parsable",
            f"--array=1-{len(stage)}%{at_once or len(stage)}",
            f"--output={folder}/slurm-%A_%a.log",
        ]
        words += [f"--export=ALL,STUDY_RUNS={queued}", *shlex.split(options)]
        if jobs:
            words.append(f"--dependency=afterany:{jobs[-1]}")
        jobs.append(_call([*words, "launch/slurm.sh"]).partition(";")[0].strip())
        write_atomically(folder / SUBMITTED, ",".join(jobs).encode())
        print(f"submitted {len(stage)} runs as job {jobs[-1]}")
    print("once they have ended, the same command with --page in place of --slurm writes the page")


def _refuse_second_submission(file: Path) -> None:
    if not file.is_file():
        return
    jobs = file.read_text(encoding="utf-8")
    queued = subprocess.run(["squeue", "--noheader", f"--jobs={jobs}"], capture_output=True, text=True)
    if queued.stdout.strip():
        raise TitaniteError(f"jobs {jobs} of this study are still queued or running: wait, or scancel {jobs}")


def _call(words: Sequence[str]) -> str:
    try:
        done = subprocess.run(words, capture_output=True, text=True)
    except FileNotFoundError:
        raise TitaniteError("--slurm: sbatch is not installed here") from None
    if done.returncode:
        raise TitaniteError(f"{shlex.join(words)}: {done.stderr.strip()}")
    return done.stdout
