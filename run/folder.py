"""The folder of a run: its name, which model it trains, and the record of every start."""

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
from checkpoint.loading import model_differences
from checkpoint.names import RUN_NAME, run_name
from config import Config, ConfigError, TitaniteError, tomllib
from records import open_records, read_records, write_atomically
from run import exits
from run.processes import tell_launcher

logger = logging.getLogger(__name__)

STARTS = "starts.jsonl"
PASSING = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE, errno.ETIMEDOUT)  # the disk is full or unreachable
PROGRESS = ".progress"  # exists once a start has saved a checkpoint
RUNNING = ".running"  # locked by rank 0 of the running start
ENDING_SECONDS = 30.0  # time for an earlier start to end; ranks whose torchrun was killed take a second
PACKAGES = ("torchao", "triton", "numpy", "pyarrow", "tokenizers", "s3fs")


def check_run_folder(config: Config, identity: dict[str, Any]) -> None:
    """Refuse to resume what is not a run, or has another model or optimizer. Raises ConfigError, TitaniteError."""
    folder = Path(config.run.folder)
    with _usable(config):
        if not config.run.folder or not folder.exists():
            return
        hold = _visible(folder) if folder.is_dir() else [folder]
        if hold == [folder / "checkpoints"] and hold[0].is_dir() and not _visible(hold[0]):
            return  # of a start that was killed early or, on a node with its own disk, before its first checkpoint
        if hold and not (folder / "model.json").is_file() and not _left_by_ranks(folder):
            raise ConfigError(f"run.folder = {config.run.folder!r}: exists, but is not the folder of a run")
        _check_model(folder, identity, f"run.folder = {config.run.folder!r}", "leave run.folder empty for a new run")
        _check_optimizer(folder, config)


def _visible(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if not path.name.startswith(".")]


@contextmanager
def _usable(config: Config) -> Iterator[None]:
    """Turn an OSError at the run's folder into a TitaniteError, or ConfigError if a retry cannot help."""
    try:
        yield
    except OSError as error:
        name = "folder" if config.run.folder else "outputs"
        kind = TitaniteError if error.errno in PASSING else ConfigError  # torchrun may retry only the former
        raise kind(f"run.{name} = {getattr(config.run, name)!r}: cannot be used: {error}") from None


def _check_model(folder: Path, identity: dict[str, Any], chosen: str, otherwise: str) -> None:
    """Refuse a folder that holds a run with another model. Raises ConfigError.

    `chosen` says who chose the folder, `otherwise` what else the user can do.
    """
    file = folder / "model.json"
    if not file.is_file():
        return
    try:
        saved = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{file}: is damaged ({error}); start again in a new folder") from None
    if different := model_differences(saved, identity):
        raise ConfigError(
            f"{chosen} holds a run with another model: {different}. Resume with the run's own model, or {otherwise}"
        )


def _check_optimizer(folder: Path, config: Config) -> None:
    """Refuse a run with another kind of optimizer, whose state does not fit. Raises ConfigError."""
    file, theirs = folder / "config.toml", config.optimizer.name
    if file.is_file():
        with suppress(ValueError, KeyError, TypeError):  # if damaged, `_changed` reports it; or from an old version
            theirs = tomllib.loads(file.read_text(encoding="utf-8"))["optimizer"]["name"]
    if theirs != config.optimizer.name:
        raise ConfigError(
            f"optimizer.name = {config.optimizer.name!r}: the run in {folder} was trained with {theirs!r}, whose state "
            f"does not fit. Resume with that, or begin a new run with checkpoint.initial_load = {str(folder)!r}"
        )


def _left_by_ranks(folder: Path) -> bool:
    """Whether ranks have written here on a node with its own disk, which lacks rank 0's files."""
    theirs = ("data/rank-*.jsonl", "profile/*-rank*", "checkpoints/step-*", exits.FILE)
    return any(any(folder.glob(pattern)) for pattern in theirs)


def choose_run_folder(config: Config, identity: dict[str, Any], job: str = "") -> Path:
    """The folder that the config names, else that of the job's earlier starts, else a new one in `run.outputs`.

    A finished run of the job is chosen only if the config is unchanged. The start then has nothing to do: a scheduler
    may restart a job that was asked to stop in its last moments.

    Call on rank 0 only: clocks and views of a shared folder differ between nodes. Raises ConfigError.
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
            folder.mkdir()  # claims the name, so that starts in the same second get different folders
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
    """Choose, check and lock the run's folder and record this start. Rank 0 only.

    Calls `checks` with the folder before writing there, and `save(folder)` last. Holds the folder until this process
    ends. Returns it and what `record_start` returns. Raises TitaniteError, also if a check does or another process on
    this machine holds the folder.
    """
    with _usable(config):
        folder = choose_run_folder(config, identity, job)
        try:
            for check in checks:
                check(folder)
        except TitaniteError:
            if not config.run.folder:
                with suppress(OSError):  # removes only a folder made just now; any other is not empty
                    folder.rmdir()
            raise
        _take(folder)
        # Again: a start that ended meanwhile may have written there, or the job may have chosen the folder.
        _check_model(folder, identity, str(folder), "name another run.folder")
        _check_optimizer(folder, config)
        changed = record_start(folder, config, identity, world_size, job)
        tell_launcher(folder)
        save(folder)
        return folder, changed


def _take(folder: Path) -> None:
    """Lock the folder until this process ends, however it ends.

    Raises TitaniteError if another process on this machine holds the lock. Ignores another machine's lock, which a lost
    machine may leave. Two runs that still share a folder end at their first checkpoint (checkpoint.manager).
    """
    folder.mkdir(parents=True, exist_ok=True)
    file = os.open(folder / RUNNING, os.O_RDWR | os.O_CREAT, 0o666)  # never closed: that would release the lock
    deadline = time.monotonic() + ENDING_SECONDS
    while True:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except OSError as error:
            host, _, process = os.pread(file, 1000, 0).decode(errors="replace").partition(" ")
            held = error.errno in (errno.EACCES, errno.EAGAIN)  # not every file system has locks
            if not held or host not in ("", socket.gethostname()):  # "": the holder is about to write its name
                return
        if time.monotonic() > deadline:
            raise TitaniteError(
                f"{folder}: a start of this run is still running here, process {process}: wait for its end, ask it to "
                f"stop (touch {folder / 'stop'}), or give this one a run.folder of its own"
            )
        time.sleep(0.1)
    os.ftruncate(file, 0)
    os.pwrite(file, f"{socket.gethostname()} {os.getpid()}".encode(), 0)
    os.fsync(file)  # so that other machines see it


def read_starts(folder: Path) -> list[dict[str, Any]]:
    """The starts of a run so far, without a last line that a kill cut."""
    return read_records(folder / STARTS)


def _last_start(folder: Path) -> dict[str, Any]:
    """The last recorded start of the run. {} if there is none or it is unreadable, which must not stop other runs."""
    try:
        return [{}, *read_starts(folder)][-1]
    except (OSError, ValueError) as error:
        logger.warning(f"{folder / STARTS}: which job started this run is unknown: {error}")
        return {}


def _changed(folder: Path, config: Config) -> dict[str, tuple[Any, Any]]:
    """Dotted key → (old, new) of the settings that differ from config.toml, see `record_config`."""
    file = folder / "config.toml"
    if not file.is_file():
        return {}
    old = settings.from_dict(settings.read_recorded(file.read_bytes(), file))
    changed = settings.differences(old, config)
    changed.pop("run.folder", None)
    return changed


def _finished(folder: Path) -> bool:
    ended = exits.read_exit(folder)
    return ended is not None and ended["kind"] == "finished"


def record_start(
    folder: Path, config: Config, identity: dict[str, Any], world_size: int, job: str = ""
) -> dict[str, tuple[Any, Any]]:
    """Write model.json and a line of starts.jsonl, which also says how the start before ended. Rank 0 only.

    Writes .run_name and config.toml only if there are none; later `record_config` replaces config.toml. Returns the
    settings that differ from config.toml, dotted key → (old, new). Raises CrashLoopError.
    """
    folder.mkdir(parents=True, exist_ok=True)
    count = _count_without_progress(folder, job, world_size, config.failures.restarts_without_progress)
    changed = _changed(folder, config)
    model = json.dumps(identity, indent=2) + "\n"
    write_atomically(folder / "model.json", model.encode())  # first, since it marks the folder as a run's
    if not (folder / RUN_NAME).exists():
        write_atomically(folder / RUN_NAME, f"{run_name(folder)}\n".encode())
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
        | {name: package_version(name) for name in PACKAGES},  # torch's version also names CUDA's
    }
    with open_records(folder / STARTS) as file:
        file.write(json.dumps(start) + "\n")
    for recorded in (PROGRESS, exits.FILE):  # last: if the disk is full, both must stay
        (folder / recorded).unlink(missing_ok=True)
    return changed


def record_config(folder: Path, config: Config) -> None:
    """Write config.toml. On a resume only after the checkpoint accepted `config`: a mistake can be undone."""
    write_atomically(folder / "config.toml", settings.to_toml(config).encode())


class CrashLoopError(TitaniteError):
    """A job that is restarted again and again without progress."""


def record_progress(folder: Path) -> None:
    """Note that this start saved a checkpoint, so that earlier restarts no longer count. Rank 0 only."""
    (folder / PROGRESS).touch()


def _count_without_progress(folder: Path, job: str, world_size: int, allowed: int) -> int:
    """Count the starts of this job in a row without a checkpoint, including this one.

    Leaves out starts that were asked to stop, that finished all steps, that rolled back, or that ended during start-up
    without a record to make room for more ranks. Raises CrashLoopError above 1 + `allowed`.
    """
    last, ended = _last_start(folder), exits.read_exit(folder)
    before = last.get("starts_since_checkpoint", 0) if job and last.get("job") == job else 0
    orderly = (
        ended["kind"] in ("stopped", "finished", "rolled back")
        if ended
        else world_size > last.get("world_size", world_size)
    )
    count = 1 if (folder / PROGRESS).exists() else max(1, before + (not orderly))
    if count > 1 + allowed:
        cause = ended["cause"] if ended else "unknown, it was killed"
        raise CrashLoopError(
            f"{folder}: starts of this job in a row that ended without a new checkpoint: {count - 1}, "
            f"failures.restarts_without_progress = {allowed}; the last one: {cause}. Fix that, then start a new job "
            f"with --run.folder={folder}"
        )
    return count


def git_commit() -> str | None:
    """The commit of this code, with "-dirty" if files differ from it. None outside a repository."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=40"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def package_version(package: str) -> str | None:
    """The version of an installed package, None if there is none."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
