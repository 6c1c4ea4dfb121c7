"""The folder of a run: its name, which model it trains, and the record of every start and of its end."""

import fcntl
import hashlib
import itertools
import json
import logging
import os
import shlex
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

import config as settings
from checkpoint.lease import RUN_ID, SAVED, Start, new_start, read_mark
from checkpoint.loading import model_differences
from config import Config, ConfigError, TitaniteError, file_errors
from run.code import code_changes, git_commit, package_versions
from run.processes import LaunchEnvironment
from storage.records import open_records, read_records, write_atomically

logger = logging.getLogger(__name__)

STARTS = "starts.jsonl"
EXIT = "exit.json"
STOP = "stop"  # a person's request to end the run between two steps
RUNNING = ".running"  # locked by rank 0 of the running start
SUPERSEDED = ".superseded."  # and a node's name: its start ended after another had taken the folder over
STARTED = ".started"  # on each node, with other content for each recorded start; launch/node.sh compares it
# What ranks write on a node with its own disk, which lacks rank 0's files.
OF_RANKS = frozenset({"checkpoints", "data", "profile", EXIT})


def check_run_folder(config: Config, identity: dict[str, Any]) -> None:
    """Refuse to resume what is not a run, or has another model. Raises ConfigError."""
    folder = Path(config.run.folder)
    if not config.run.folder or not folder.exists():
        return
    if (folder / "model.json").is_file():
        _check_model(folder, identity)
        return
    for path in sorted(folder.iterdir()):
        if not path.name.startswith(".") and path.name not in OF_RANKS:
            raise ConfigError(f"run.folder = {str(folder)!r}: is not the folder of a run, it holds {path.name}")


def _check_model(folder: Path, identity: dict[str, Any]) -> None:
    file = folder / "model.json"
    if not file.is_file():
        return
    try:
        different = model_differences(json.loads(file.read_text(encoding="utf-8")), identity)
    except (ValueError, AttributeError) as error:
        raise ConfigError(f"{file}: is damaged: {error}; put back what it said, or begin a new run") from None
    if different:
        hint = "leave run.folder empty for a new run, or give a new job another --rdzv-id"
        raise ConfigError(f"{folder} holds a run with another model: {different}; {hint}")


def choose_run_folder(config: Config, job: str = "") -> Path:
    """The folder that the config names, or that of the job's earlier starts, or a new one. For rank 0."""
    if config.run.folder:
        return Path(config.run.folder)
    outputs = Path(config.run.outputs)
    begun = _folder_of_job(outputs, job) if job else None
    if begun:
        return begun
    stamp = datetime.now(timezone.utc).strftime("%Y%m%d-%H%M%S")
    name = f"{config.model.name}-{config.model.flavor}-{stamp}"
    folder = outputs / name
    for number in itertools.count(2):
        with suppress(FileExistsError):
            folder.mkdir(parents=True)  # claims the name: starts in the same second get different folders
            break
        folder = outputs / f"{name}-{number}"
    return folder


def _folder_of_job(outputs: Path, job: str) -> Path | None:
    """The folder in which a job has started before. A copy of it has the job's name, too: rather the original."""
    found = None
    for file in outputs.glob(f"*/{STARTS}"):
        folder = file.parent
        last = _last_start(folder)
        if last.get("job") == job:
            found = folder
            if last["folder"] == str(folder.absolute()):
                return folder
    return found


def start_run(
    config: Config,
    identity: dict[str, Any],
    environment: LaunchEnvironment,
    check: Callable[[Path], str],
    save: Callable[[Path], None],
) -> tuple[Path, Start, dict[str, tuple[Any, Any]]]:
    """Choose, check and lock the run's folder, record this start, `save` last.

    Returns the folder, the start and what changed. `check` returns the run's id. Rank 0 only. Raises TitaniteError.
    """
    with file_errors():
        folder = choose_run_folder(config, environment.job)
        try:
            _check_model(folder, identity)  # of a job's folder, which no setting names
            run = check(folder)
        except TitaniteError:
            if not config.run.folder:
                with suppress(OSError):  # removes only a folder made just now; any other is not empty
                    folder.rmdir()
            raise
        _lock(folder)
        if not environment.restarts:  # otherwise a person may have asked since the start before
            _remove_stop(folder)
        start = new_start(folder, environment.job, run)
        try:
            changed = record_start(folder, config, identity, environment.world_size, start)
            save(folder)
        except OSError as error:  # a ConfigError, since a restart would only meet it again
            raise ConfigError(f"run.folder = {str(folder)!r}: cannot be written: {error.strerror}") from None
        return folder, start, changed


def _lock(folder: Path) -> None:
    """Hold the folder until this process ends. Raises TitaniteError if another process of this machine holds it."""
    folder.mkdir(parents=True, exist_ok=True)
    process = hold(folder / RUNNING)
    if process:
        raise TitaniteError(
            f"{folder}: a start of this run is still running here, process {process}: wait for its end, ask it to "
            f"stop (touch {shlex.quote(str(folder / 'stop'))}), or give this one a run.folder of its own"
        )


def _remove_stop(folder: Path) -> None:
    """Take away a request to stop that came after the end of the start before. Raises ConfigError if it stays."""
    file = folder / STOP
    if not os.path.lexists(file):
        return
    try:
        file.unlink()
    except OSError as error:
        raise ConfigError(f"{file}: cannot be removed: {error.strerror}; it would end this start at once") from None
    logger.info(f"{file}: was left from before this start, and is removed")


def hold(path: Path) -> str:
    """Lock a file until this process ends. Returns the process of this machine that has locked it, "" if none has."""
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)  # never closed: that would release the lock
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # held, or a file system without locks
        host, _, process = os.pread(file, 1000, 0).decode(errors="replace").partition(" ")
        return process if host == socket.gethostname() else ""
    os.ftruncate(file, 0)
    os.pwrite(file, f"{socket.gethostname()} {os.getpid()}".encode(), 0)
    return ""


def _last_start(folder: Path) -> dict[str, Any]:
    """The last recorded start of the run. {} if there is none or it is unreadable, which must not stop other runs."""
    try:
        return (read_records(folder / STARTS) or [{}])[-1]
    except (OSError, ValueError) as error:
        logger.warning(f"{folder / STARTS}: which job started this run is unknown: {error}")
        return {}


def record_start(
    folder: Path, config: Config, identity: dict[str, Any], world_size: int, start: Start
) -> dict[str, tuple[Any, Any]]:
    """Write model.json and a line of starts.jsonl, which also says how the start before ended. Rank 0 only.

    Writes .run_id and config.toml only if there are none; later `record_config` replaces config.toml. Returns the
    settings that differ from config.toml, dotted key → (old, new), and the key "code" if that differs from the last
    start's. Raises ConfigError.
    """
    before = _last_start(folder)
    saved = read_mark(folder / SAVED)
    count = _count_without_progress(folder, before, start.job, saved, config.failures.restarts_without_progress)
    write_atomically(folder / "model.json", json.dumps(identity, indent=2).encode())  # first: it marks a run's folder
    if not (folder / RUN_ID).is_file():  # an earlier version called it otherwise
        write_atomically(folder / RUN_ID, f"{start.run}\n".encode())
    began = settings.recorded_config(folder)
    if began is None:
        record_config(folder, config)
        began = config
    changed = settings.differences(began, config)
    changed.pop("run.folder", None)
    record = {
        **start._asdict(),
        "saved": saved,  # the last checkpoint so far
        "starts_since_checkpoint": count,
        "after": read_exit(folder),
        "world_size": world_size,
        "changed": changed,
        "git_commit": git_commit(),
        "patch": _record_patch(folder),
        "python": sys.version.split()[0],
        "packages": package_versions() | {"torch": torch.__version__},  # this also names CUDA's
    }
    with open_records(folder / STARTS) as file:
        file.write(json.dumps(record) + "\n")
    (folder / EXIT).unlink(missing_ok=True)  # last: if the disk is full, it must stay
    if before and _code(before) != _code(record):
        changed["code"] = _code(before), _code(record)
    return changed


def _code(record: dict[str, Any]) -> str:
    return f"{record['git_commit']} {record.get('patch', '')}".strip()


def _record_patch(folder: Path) -> str:
    """Keep how the code differs from its commit. Returns the file's name, "" if it does not."""
    patch = code_changes()
    if not patch:
        return ""
    name = f"code-{hashlib.sha256(patch).hexdigest()[:12]}.patch"
    write_atomically(folder / name, patch)
    return name


def resume_command(folder: Path, processes: int, branch_step: int = 0) -> str:
    """What to type to go on with a run, or with a branch of it, with as many processes on this machine."""
    start = f"NGPU={processes} ./run_llama_train.sh" if processes > 1 else "./run_llama_train.sh"
    if branch_step:
        return f"{start} --checkpoint.branch_from={shlex.quote(f'{folder}@{branch_step}')}"
    return f"{start} --resume {shlex.quote(str(folder))}"


def record_config(folder: Path, config: Config) -> None:
    """Write config.toml. On a resume only after the checkpoint accepted `config`: a mistake can be undone."""
    write_atomically(folder / "config.toml", settings.to_toml(config).encode())


def _count_without_progress(folder: Path, last: dict[str, Any], job: str, saved: str, allowed: int) -> int:
    """Count the starts of this job in a row without a checkpoint, including this one; not those that ended in order.

    Raises ConfigError above 1 + `allowed`.
    """
    if not job or (last.get("job"), last.get("saved")) != (job, saved):
        return 1
    count = last["starts_since_checkpoint"]
    ended = read_exit(folder) or {"kind": "unknown", "cause": "unknown, it was killed"}
    if ended["kind"] in ("stopped", "finished", "rolled back"):
        return count
    if count > allowed:
        raise ConfigError(
            f"{folder}: starts of this job in a row that ended without a new checkpoint: {count}, "
            f"failures.restarts_without_progress = {allowed}; the last one: {ended['cause']}. Fix that, then start a "
            f"new job, by another --rdzv-id, with --resume={shlex.quote(str(folder))}"
        )
    return count + 1


def note_start(folder: Path) -> None:
    """Say on this node that a start was recorded, and remove `exit.json` of the one before. One rank of each node.

    A node may have a disk of its own. If that is full the run goes on, and its scheduler may not start it again.
    """
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / EXIT).unlink(missing_ok=True)
        write_atomically(folder / STARTED, f"{os.getpid()} {time.time_ns()}\n".encode())


def record_exit(folder: Path, record: dict[str, Any], start_id: str = "", is_refused: bool = False) -> bool:
    """Write `exit.json`, unless this start has one: its writer knew the cause. Returns whether it had none.

    A finished run stays finished if this start `is_refused`.

    Not if a later start than `start_id` has taken the folder over: how that one ends counts. A mark tells the scheduler
    of this node (launch/node.sh) not to start this one again, which would take it back.
    """
    if start_id and _last_start(folder).get("id", start_id) != start_id:
        with suppress(OSError):
            (folder / f"{SUPERSEDED}{socket.gethostname()}").touch()
        return False
    record = record | {"time": datetime.now(timezone.utc).isoformat(timespec="seconds")}
    before = _last_start(folder).get("after") or {}
    if is_refused and before.get("kind") == "finished":
        record = before
    content = json.dumps(record, indent=2) + "\n"
    try:
        with open(folder / EXIT, "x", encoding="utf-8") as file:  # only one process succeeds
            file.write(content)
    except FileExistsError:
        return False
    except OSError as error:  # on a full disk the caller must still print its line
        print(f"exit.json could not be written: {error}", file=sys.stderr, flush=True)
    return True


def read_exit(folder: Path) -> dict[str, Any] | None:
    """How the last start ended; None if no process could write it. For a damaged `exit.json` the kind is "unknown"."""
    path = folder / EXIT
    try:
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
    except ValueError as error:
        return {"kind": "unknown", "cause": f"unknown, {path} is damaged: {error}"}
