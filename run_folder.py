"""The folder of a run: its name, what it is the run of, and the record of every start."""

import dataclasses
import json
import os
import subprocess
import sys
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import config as settings
from config import Config, ConfigError, Run, TitaniteError
from parallel import exits
from records import open_records, read_records

STARTS = "starts.jsonl"
PROGRESS = ".progress"  # exists once a start has saved a checkpoint
PACKAGES = ("torch", "torchao", "triton", "numpy", "pyarrow", "tokenizers", "s3fs")


def check_run_folder(config: Config, identity: dict[str, Any]) -> None:
    """Refuse to resume what is not a run, or is the run of another model. Raises ConfigError."""
    folder = Path(config.run.folder)
    if not config.run.folder or not folder.exists():
        return
    hold = [path for path in folder.iterdir() if not path.name.startswith(".")] if folder.is_dir() else [folder]
    if hold and not (folder / "model.json").is_file() and not _left_by_ranks(folder):
        raise ConfigError(f"run.folder = {config.run.folder!r}: exists, but is not the folder of a run")
    if (folder / "model.json").is_file():
        try:
            saved = json.loads((folder / "model.json").read_text(encoding="utf-8"))
        except ValueError as error:
            raise ConfigError(f"{folder / 'model.json'}: is damaged ({error}); start again in a new folder") from None
        different = [
            f"{key} is {saved.get(key)!r} there and {identity.get(key)!r} in this config"
            for key in sorted(saved.keys() | identity.keys())
            if saved.get(key) != identity.get(key)
        ]
        if different:
            raise ConfigError(
                f"run.folder = {config.run.folder!r} holds the run of another model: {'; '.join(different)}. "
                "Resume with the run's own model, or leave run.folder empty for a new run"
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
        if _last_job(starts.parent) == job and not (_finished(starts.parent) and _changed(starts.parent, config)):
            check_run_folder(dataclasses.replace(config, run=Run(folder=str(starts.parent))), identity)
            return starts.parent
    stamp = datetime.now(timezone.utc).strftime("%Y%m%d-%H%M%S")
    name = f"{config.model.name}-{config.model.flavor}-{stamp}"
    number, folder = 1, Path(config.run.outputs) / name
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        while True:
            try:
                folder.mkdir()  # at once, so that it is of one start alone, however many begin in this second
                return folder
            except FileExistsError:
                number += 1
                folder = folder.with_name(f"{name}-{number}")
    except OSError as error:
        raise ConfigError(f"run.outputs = {config.run.outputs!r}: no folder can be made there: {error}") from None


def start_run(
    config: Config, identity: dict[str, Any], world_size: int, job: str
) -> tuple[Path, dict[str, tuple[Any, Any]]]:
    """The run's folder, and what `record_start` says. Rank 0 only. Raises ConfigError, CrashLoopError."""
    folder = choose_run_folder(config, identity, job)
    return folder, record_start(folder, config, identity, world_size, job)


def read_starts(folder: Path) -> list[dict[str, Any]]:
    """The starts of a run so far; a last line cut by a kill is left out."""
    return read_records(folder / STARTS)


def _last_job(folder: Path) -> str | None:
    """The job that started the run last; None if no start was recorded whole."""
    starts = read_starts(folder)
    return starts[-1].get("job") if starts else None


def _changed(folder: Path, config: Config) -> dict[str, tuple[Any, Any]]:
    """The settings that differ from the last start's: dotted key → (old, new)."""
    file = folder / "config.toml"
    if not file.is_file():
        return {}
    old = settings.from_dict(settings.read_recorded(file.read_bytes(), file))
    changed = settings.differences(old, config)
    changed.pop("run.folder", None)
    return changed


def _write(path: Path, text: str) -> None:
    """Put a whole file in the place of another: a kill or a full disk leaves the one or the other."""
    new = path.with_name(f".{path.name}.new")
    new.write_text(text, encoding="utf-8")
    os.replace(new, path)


def _finished(folder: Path) -> bool:
    """Whether the run has done all its steps."""
    file = folder / exits.FILE
    return file.is_file() and json.loads(file.read_text(encoding="utf-8"))["kind"] == "finished"


def record_start(
    folder: Path, config: Config, identity: dict[str, Any], world_size: int, job: str = ""
) -> dict[str, tuple[Any, Any]]:
    """Write what this start runs: config.toml, model.json and a line of starts.jsonl, with how the one before ended.

    Returns the settings that differ from the start before, dotted key → (old, new). Rank 0 only.
    Raises CrashLoopError.
    """
    folder.mkdir(parents=True, exist_ok=True)
    count = _count_without_progress(folder, job, config.failures.restarts_without_progress)
    after = exits.take_exit(folder)
    changed = _changed(folder, config)
    _write(folder / "model.json", json.dumps(identity, indent=2) + "\n")  # first: by it a folder is known as a run's
    _write(folder / "config.toml", settings.to_toml(config))
    start = {
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "job": job,
        "starts_since_checkpoint": count,
        "after": after,
        "world_size": world_size,
        "changed": changed,
        "git_commit": git_commit(),
        "python": sys.version.split()[0],
        "packages": {name: _version(name) for name in PACKAGES},
    }
    with open_records(folder / STARTS) as file:
        file.write(json.dumps(start) + "\n")
    return changed


class CrashLoopError(TitaniteError):
    """A job that is started again and again and gets nowhere."""


def record_progress(folder: Path) -> None:
    """A checkpoint was saved in this start: restarts before it count no more. Rank 0 only."""
    (folder / PROGRESS).touch()


def _count_without_progress(folder: Path, job: str, allowed: int) -> int:
    """Starts of this job, this one included, since the last checkpoint. Raises CrashLoopError above 1 + `allowed`."""
    starts, progress = read_starts(folder), folder / PROGRESS
    before = starts[-1].get("starts_since_checkpoint", 0) if starts and job and starts[-1].get("job") == job else 0
    count = 1 if progress.exists() else before + 1
    progress.unlink(missing_ok=True)
    if count > 1 + allowed:
        path = folder / exits.FILE
        last = json.loads(path.read_text(encoding="utf-8"))["cause"] if path.is_file() else "unknown, it was killed"
        raise CrashLoopError(
            f"{folder}: {count - 1} starts of this job in a row ended without a new checkpoint, "
            f"failures.restarts_without_progress = {allowed}; the last one: {last}. Mend that, then start a new job "
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
