"""Which run this is, whose checkpoints a place holds, and the start that may save there. Imports no torch.

A run has an id, written once into its folder, and its checkpoints bear it. The place of its checkpoints has one lease:
it names the start that saves there, its run and its folder. A later start takes the lease. An earlier one that still
runs, on a machine that was taken for lost, finds that before its next commit or removal, and ends.
"""

import os
import secrets
import socket
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import NamedTuple

from checkpoint.manifest import Manifest, encode_manifest, read_encoded, read_manifest
from config import ConfigError
from storage import DamagedError, Store, join

RUN_ID = ".run_id"  # in the run's folder: its id, so that it moves with the folder
SAVED = ".saved"  # in the run's folder: names the last committed checkpoint
LEASE = ".lease"  # in a store: the start that saves there


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
    run: str = ""  # the run's id


def new_start(run_folder: Path, job: str = "", run: str = "") -> Start:
    """This start."""
    time = datetime.now(timezone.utc).isoformat(timespec="seconds")
    return Start(secrets.token_hex(8), time, job, str(run_folder.absolute()), socket.gethostname(), os.getpid(), run)


def read_mark(file: Path) -> str:
    """The text of a small file of the run's folder, "" if there is none."""
    if not file.is_file():
        return ""
    return file.read_text(encoding="utf-8", errors="replace").strip()


def check_owner(store: Store, names: Sequence[str], run_folder: Path) -> str:
    """Refuse a place with checkpoints of another run, or of the run whose copy `run_folder` is.

    `names`: the checkpoints there, newest first. Returns the id by which the run in the folder goes on: its own, or
    that of the checkpoints if the folder was made again at the path of theirs, or a new one. Raises ConfigError.
    """
    here = str(run_folder.absolute())
    own = read_mark(run_folder / RUN_ID)
    manifest = _newest_readable(store, names)
    if manifest is None:
        return own or secrets.token_hex(8)
    owner: str = manifest["run"]
    folder = _folder_of(store, manifest)
    if not own and folder == here:
        return owner
    there = f"checkpoint.folder = {store.url!r}: holds checkpoints of"
    newest = f"{store.url}@{manifest['step']}"
    if own != owner:
        raise ConfigError(
            f"{there} another run, {folder}: set another checkpoint.folder, and to start from theirs "
            f"checkpoint.initial_load or checkpoint.branch_from = {newest!r}"
        )
    if folder != here and read_mark(Path(folder) / RUN_ID) == own:
        raise ConfigError(
            f"{there} {folder}, which is there, and {run_folder} is a copy of it: go on in {folder}, or begin a branch "
            f"in a new run.folder, by --checkpoint.branch_from={newest}"
        )
    return own


def _newest_readable(store: Store, names: Sequence[str]) -> Manifest | None:
    """The manifest of the first checkpoint whose manifest is not damaged."""
    for name in names:
        with suppress(DamagedError):
            return read_manifest(store, name)
    return None


def _folder_of(store: Store, newest: Manifest) -> str:
    """The folder of the run that owns a place's `newest` checkpoint, as the last of its starts named it."""
    holder = _read_lease(store)
    if holder is not None and holder.run == newest["run"]:
        return holder.folder
    return newest.get("start", {}).get("folder", "elsewhere")


def take_lease(store: Store, start: Start) -> bool:
    """Take the lease of a place. Returns whether the start before was on another machine, and may still run."""
    before = _read_lease(store)
    store.put(LEASE, encode_manifest(start._asdict()))
    return before is not None and before.host != start.host


def check_lease(store: Store, start: Start) -> None:
    """Raise TakenOverError if a later start has the lease of a place, ConfigError if the lease is gone."""
    holder = _read_lease(store)
    file = join(store.url, LEASE)
    if holder is None:
        raise ConfigError(f"{file}: is gone, so the place was moved, removed or replaced: nothing more is saved there")
    if holder.id != start.id:
        raise TakenOverError(
            f"{file}: a later start saves there: of {holder.time} on {holder.host}, process {holder.process}, run "
            f"folder {holder.folder}; this one ends, and saves nothing more"
        )


def _read_lease(store: Store) -> Start | None:
    """The lease of a place. None if there is none, or a damaged one."""
    with suppress(DamagedError, TypeError):
        return Start(**read_encoded(store, LEASE))
    return None
