"""Whose checkpoints a place holds: those that the folder of a run knows, and the start that may save there.

The folder names each of its checkpoints before the commit. So a copy of the folder does not know
what the original has saved since, and a kill makes no checkpoint a stranger. A start claims its
places. An earlier one that still runs, on a machine that was taken for lost, finds that before its
next commit or removal, and ends.
"""

import os
import secrets
import socket
from collections.abc import Iterable
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import NamedTuple

from checkpoint.manifest import Manifest, encode_manifest, read_encoded, read_manifest
from config import ConfigError
from storage import DamagedError, Store, join

RUN_NAME = ".run_name"  # in the run's folder: holds its name, so that it moves with the folder
KNOWN = ".known_saves"  # in the run's folder: the names of its checkpoints
CLAIM = ".claim"  # in a store: the start that saves there


class TakenOverError(ConfigError):
    """A later start of the run saves in this one's place. To start this one again would only take it back."""


class Start(NamedTuple):
    """One start of a run, as its rank 0 began it."""

    id: str
    time: str
    job: str  # that torchrun names; "" without it
    folder: str  # the run's, absolute
    host: str
    process: int


def new_start(run_folder: Path, job: str = "") -> Start:
    """This start."""
    time = datetime.now(timezone.utc).isoformat(timespec="seconds")
    return Start(secrets.token_hex(8), time, job, str(run_folder.absolute()), socket.gethostname(), os.getpid())


def run_name(run_folder: Path) -> str:
    """The name that a run's checkpoints bear: that in `.run_name` in its folder, or the folder's absolute path."""
    file = run_folder / RUN_NAME
    name = file.read_text(encoding="utf-8").strip() if file.is_file() else ""
    return name or str(run_folder.absolute())


def read_known(run_folder: Path) -> set[str] | None:
    """The names of the checkpoints that a run's folder knows. None: it has no record, as one made again has none."""
    file = run_folder / KNOWN
    return {*file.read_text(encoding="utf-8").split()} if file.is_file() else None


def record_known(run_folder: Path, names: Iterable[str]) -> None:
    """Add names to the record, and begin it if there is none. Raises OSError."""
    with open(run_folder / KNOWN, "a", encoding="utf-8") as file:
        file.write("".join(f"\n{name}\n" for name in names))  # the line before may be cut
        file.flush()
        os.fsync(file.fileno())


def check_owner(found: list[tuple[Store, str]], run_folder: Path, job: str = "") -> None:
    """Refuse a place with checkpoints of another run, or of this one that its folder does not know.

    `found`: those in the place, newest first. Of strange ones the newest that can be read counts,
    so that one manifest is read at most. A folder without a record takes its run's checkpoints for
    its own. Raises ConfigError.
    """
    known = read_known(run_folder)
    newest = _newest_readable([pair for pair in found if pair[1] not in (known or ())])
    if newest is None:
        return
    store, name, manifest = newest
    there = f"checkpoint.folder = {store.url!r}: {name} there was saved"
    run = run_name(run_folder)
    other = manifest.get("run", run)
    if other != run:
        raise ConfigError(
            f"{there} by another run, {other}: set another checkpoint.folder, and to start from its weights "
            f"checkpoint.initial_load = {store.url!r}. If this is that run, moved or renamed, write {other} into "
            f"{RUN_NAME} in its run.folder"
        )
    if known is not None and not _goes_on(manifest, run_folder, job):
        origin = manifest.get("start", {}).get("folder", "elsewhere")
        raise ConfigError(
            f"{there} from {origin} and is unknown to {run_folder}, a copy of the run or an older state of it: go on "
            f"in {origin}, or begin a branch in a new run.folder (checkpoint.branch_from = "
            f"'{store.url}@{manifest['step']}'), or set another checkpoint.folder, without unknown checkpoints. If "
            f"{run_folder} is the run to go on with, as after a restore, remove its {KNOWN}"
        )


def own_checkpoints(run_folder: Path, found: list[tuple[Store, str]]) -> list[tuple[Store, str]]:
    """Those of the checkpoints in a run's places, newest first, that its folder takes for its own, as a start does."""
    known = read_known(run_folder)
    if known is None:
        return found
    newest = _newest_readable([pair for pair in found if pair[1] not in known])
    if newest is None or _goes_on(newest[2], run_folder):
        return found
    return [pair for pair in found if pair[1] in known]


def _newest_readable(checkpoints: Iterable[tuple[Store, str]]) -> tuple[Store, str, Manifest] | None:
    """The first that is not damaged, and its manifest."""
    for store, name in checkpoints:
        with suppress(DamagedError):
            return store, name, read_manifest(store, name)
    return None


def _goes_on(manifest: Manifest, run_folder: Path, job: str = "") -> bool:
    """Whether a folder goes on with a checkpoint that it does not know.

    It was saved from a folder of this path, by the same job on another node, with a disk of its
    own, or while the disk of the folder was full.
    """
    start = manifest.get("start", {})
    if start.get("folder") != str(run_folder.absolute()):
        return False
    same_job = job != "" and start.get("job") == job
    return same_job or manifest.get("unrecorded", False)


def take_claim(store: Store, start: Start) -> bool:
    """Claim a place for this start. Returns whether the start before it was on another machine, and may still run."""
    before = _read_claim(store)
    store.put(CLAIM, encode_manifest(start._asdict()))
    return before is not None and before.host != start.host


def check_claim(store: Store, start: Start) -> None:
    """Raise TakenOverError if a later start has claimed the place."""
    holder = _read_claim(store)
    if holder is not None and holder.id != start.id:
        raise TakenOverError(
            f"{join(store.url, CLAIM)}: a later start saves there: of {holder.time} on {holder.host}, process "
            f"{holder.process}, run folder {holder.folder}; this one ends, and saves nothing more"
        )


def _read_claim(store: Store) -> Start | None:
    """The claim on a place. None if there is none, or none that this version wrote."""
    with suppress(DamagedError, TypeError):
        return Start(**read_encoded(store, CLAIM))
    return None
