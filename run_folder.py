"""The folder of a run: its name, what it is the run of, and the record of every start."""

import errno
import fcntl
import json
import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import config as settings
from checkpoint.loading import differences
from config import Config, ConfigError, TitaniteError, tomllib
from parallel import exits
from parallel.comm import tell_launcher
from records import open_records, read_records, write_atomically

logger = logging.getLogger(__name__)

STARTS = "starts.jsonl"
PASSING = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE, errno.ETIMEDOUT)  # of a disk that is full or away
PROGRESS = ".progress"  # exists once a start has saved a checkpoint
RUNNING = ".running"  # locked by rank 0 of the start that is running
ENDING_SECONDS = 30.0  # that a start before may take to end; ranks whose torchrun was killed take a second
PACKAGES = ("torchao", "triton", "numpy", "pyarrow", "tokenizers", "s3fs")


def check_run_folder(config: Config, identity: dict[str, Any]) -> None:
    """Refuse to resume what is not a run, or is that of another model or optimizer. Raises ConfigError."""
    folder = Path(config.run.folder)
    with _usable(config):
        if not config.run.folder or not folder.exists():
            return
        hold = [path for path in folder.iterdir() if not path.name.startswith(".")] if folder.is_dir() else [folder]
        if hold and not (folder / "model.json").is_file() and not _left_by_ranks(folder):
            raise ConfigError(f"run.folder = {config.run.folder!r}: exists, but is not the folder of a run")
        _check_model(folder, identity, f"run.folder = {config.run.folder!r}", "leave run.folder empty for a new run")
        _check_optimizer(folder, config)


@contextmanager
def _usable(config: Config) -> Iterator[None]:
    """Errors of the operating system at the run's folder, in one line. Raises TitaniteError."""
    try:
        yield
    except OSError as error:
        name = "folder" if config.run.folder else "outputs"
        kind = TitaniteError if error.errno in PASSING else ConfigError  # torchrun may try again, or need not
        raise kind(f"run.{name} = {getattr(config.run, name)!r}: cannot be used: {error}") from None


def _check_model(folder: Path, identity: dict[str, Any], chosen: str, otherwise: str) -> None:
    """Refuse a folder that is of another model. Raises ConfigError, with who chose it and what else can be done."""
    file = folder / "model.json"
    if not file.is_file():
        return
    try:
        saved = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{file}: is damaged ({error}); start again in a new folder") from None
    if different := differences(saved, identity):
        raise ConfigError(
            f"{chosen} holds the run of another model: {different}. Resume with the run's own model, or {otherwise}"
        )


def _check_optimizer(folder: Path, config: Config) -> None:
    """Refuse a run of another kind of optimizer, whose state is not this one's. Raises ConfigError."""
    file, theirs = folder / "config.toml", config.optimizer.name
    if file.is_file():
        with suppress(ValueError, KeyError, TypeError):  # damaged: `_changed` says so; or of an old version
            theirs = tomllib.loads(file.read_text(encoding="utf-8"))["optimizer"]["name"]
    if theirs != config.optimizer.name:
        raise ConfigError(
            f"optimizer.name = {config.optimizer.name!r}: the run in {folder} has {theirs!r}, whose state is another. "
            f"Resume with that, or begin a new run with checkpoint.initial_load = {str(folder)!r}"
        )


def _left_by_ranks(folder: Path) -> bool:
    """Whether it holds what ranks write on a node with a disk of its own, where rank 0's files are not."""
    theirs = ("data/rank-*.jsonl", "profile/*-rank*", "checkpoints/step-*", exits.FILE)
    return any(any(folder.glob(pattern)) for pattern in theirs)


def choose_run_folder(config: Config, identity: dict[str, Any], job: str = "") -> Path:
    """The folder that the config names; else that of the job's earlier starts; else a new one under `run.outputs`.

    A run that has done all its steps is gone on with only by the same config, and then has nothing to do: a scheduler
    may start a job again that was asked to stop in its last moments.

    Only rank 0 may ask: clocks and views of a shared folder differ. Raises ConfigError.
    """
    if config.run.folder:
        return Path(config.run.folder)
    for starts in Path(config.run.outputs).glob(f"*/{STARTS}") if job else ():
        folder = starts.parent
        if _last_start(folder).get("job") == job and not (_finished(folder) and _changed(folder, config)):
            otherwise = "give a new run a new --rdzv-id (on Slurm a new job, on Kubernetes another rdzvId)"
            _check_model(folder, identity, f"job {job!r} began {folder}, which", otherwise)
            return folder
    stamp = datetime.now(timezone.utc).strftime("%Y%m%d-%H%M%S")
    name = f"{config.model.name}-{config.model.flavor}-{stamp}"
    number, folder = 1, Path(config.run.outputs) / name
    folder.parent.mkdir(parents=True, exist_ok=True)
    while True:
        try:
            folder.mkdir()  # at once, so that it is of one start alone, however many begin in this second
            return folder
        except FileExistsError:
            number += 1
            folder = folder.with_name(f"{name}-{number}")


def start_run(
    config: Config,
    identity: dict[str, Any],
    world_size: int,
    job: str,
    checks: Sequence[Callable[[Path], None]],
    save: Callable[[Path], None],
) -> tuple[Path, dict[str, tuple[Any, Any]]]:
    """The run's folder, and what `record_start` says. Rank 0 only.

    Each of `checks` is called with the folder before anything is written there, `save(folder)` last. The folder is
    this process's to its end. Raises TitaniteError, as they may, and where another process on this machine has it.
    """
    with _usable(config):
        folder = choose_run_folder(config, identity, job)
        try:
            for check in checks:
                check(folder)
        except TitaniteError:
            if not config.run.folder:
                with suppress(OSError):  # unless it was made just now it is not empty
                    folder.rmdir()
            raise
        _take(folder)
        _check_model(folder, identity, str(folder), "name another run.folder")  # of a start that has ended since
        _check_optimizer(folder, config)  # or that the job, not the config, has named
        changed = record_start(folder, config, identity, world_size, job)
        tell_launcher(folder)
        save(folder)
        return folder, changed


def _take(folder: Path) -> None:
    """Lock the folder up to the end of this process, whatever end that is. Raises TitaniteError if it is locked here.

    A lock of another machine is passed over: a machine that was lost may leave one. Two runs that go on in one folder
    all the same end at their first checkpoint (checkpoint.manager).
    """
    folder.mkdir(parents=True, exist_ok=True)
    file = os.open(folder / RUNNING, os.O_RDWR | os.O_CREAT, 0o666)  # never closed: that would give the lock back
    deadline = time.monotonic() + ENDING_SECONDS
    while True:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except OSError as error:
            host, _, process = os.pread(file, 1000, 0).decode(errors="replace").partition(" ")
            held = error.errno in (errno.EACCES, errno.EAGAIN)  # not every file system has locks
            if not held or host not in ("", socket.gethostname()):  # "": it is about to write its name
                return
        if time.monotonic() > deadline:
            raise TitaniteError(
                f"{folder}: a start of this run is still running here, process {process}: wait for its end, ask it to "
                f"stop (touch {folder / 'stop'}), or give this one a run.folder of its own"
            )
        time.sleep(0.1)
    os.ftruncate(file, 0)
    os.pwrite(file, f"{socket.gethostname()} {os.getpid()}".encode(), 0)
    os.fsync(file)  # other machines see it too


def read_starts(folder: Path) -> list[dict[str, Any]]:
    """The starts of a run so far; a last line cut by a kill is left out."""
    return read_records(folder / STARTS)


def _last_start(folder: Path) -> dict[str, Any]:
    """The start of the run recorded last; empty where none is, or it cannot be read, which must stop no other run."""
    try:
        return [{}, *read_starts(folder)][-1]
    except (OSError, ValueError) as error:
        logger.warning(f"{folder / STARTS}: which job started this run is unknown: {error}")
        return {}


def _changed(folder: Path, config: Config) -> dict[str, tuple[Any, Any]]:
    """The settings that differ from config.toml, of the last start that went on: dotted key → (old, new)."""
    file = folder / "config.toml"
    if not file.is_file():
        return {}
    old = settings.from_dict(settings.read_recorded(file.read_bytes(), file))
    changed = settings.differences(old, config)
    changed.pop("run.folder", None)
    return changed


def _finished(folder: Path) -> bool:
    """Whether the run has done all its steps."""
    ended = exits.read_exit(folder)
    return ended is not None and ended["kind"] == "finished"


def record_start(
    folder: Path, config: Config, identity: dict[str, Any], world_size: int, job: str = ""
) -> dict[str, tuple[Any, Any]]:
    """Write what this start runs: model.json and a line of starts.jsonl, with how the one before ended.

    And config.toml, unless there is one, for `record_config` to replace.

    Returns the settings that differ from config.toml, dotted key → (old, new). Rank 0 only.
    Raises CrashLoopError.
    """
    folder.mkdir(parents=True, exist_ok=True)
    count = _count_without_progress(folder, job, world_size, config.failures.restarts_without_progress)
    changed = _changed(folder, config)
    model = json.dumps(identity, indent=2) + "\n"
    write_atomically(folder / "model.json", model.encode())  # first: by it a folder is known as a run's
    if not (folder / "config.toml").exists():
        record_config(folder, config)
    start = {
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "job": job,
        "starts_since_checkpoint": count,
        "after": exits.read_exit(folder),
        "world_size": world_size,
        "changed": changed,
        "git_commit": git_commit(),
        "python": sys.version.split()[0],
        "packages": {"torch": torch.__version__}
        | {name: _version(name) for name in PACKAGES},  # torch's names CUDA, too
    }
    with open_records(folder / STARTS) as file:
        file.write(json.dumps(start) + "\n")
    for recorded in (PROGRESS, exits.FILE):  # last: a disk that is full by now must lose neither
        (folder / recorded).unlink(missing_ok=True)
    return changed


def record_config(folder: Path, config: Config) -> None:
    """Write config.toml, of an older run only once its checkpoint has taken `config`: a mistake can be taken back."""
    write_atomically(folder / "config.toml", settings.to_toml(config).encode())


class CrashLoopError(TitaniteError):
    """A job that is started again and again and gets nowhere."""


def record_progress(folder: Path) -> None:
    """A checkpoint was saved in this start: restarts before it count no more. Rank 0 only."""
    (folder / PROGRESS).touch()


def _count_without_progress(folder: Path, job: str, world_size: int, allowed: int) -> int:
    """How many starts of this job in a row came to no checkpoint, this one counted.

    Not counted are those that were asked to stop, that had done all steps, or that ended while they started up, with
    nothing recorded, to make room for more ranks. Raises CrashLoopError above 1 + `allowed`.
    """
    last, ended = _last_start(folder), exits.read_exit(folder)
    before = last.get("starts_since_checkpoint", 0) if job and last.get("job") == job else 0
    orderly = ended["kind"] in ("stopped", "finished") if ended else world_size > last.get("world_size", world_size)
    count = 1 if (folder / PROGRESS).exists() else max(1, before + (not orderly))
    if count > 1 + allowed:
        cause = ended["cause"] if ended else "unknown, it was killed"
        raise CrashLoopError(
            f"{folder}: {count - 1} starts of this job in a row ended without a new checkpoint, "
            f"failures.restarts_without_progress = {allowed}; the last one: {cause}. Mend that, then start a new job "
            f"with --run.folder={folder}"
        )
    return count


def git_commit() -> str | None:
    """Commit of this code, with "-dirty" where files differ from it; None outside a repository."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=40"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
