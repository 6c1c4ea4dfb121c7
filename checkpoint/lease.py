"""The place of a run's checkpoints: whose they are, the start that may save there, what is kept, the disk's room.

A run has an id, written once into its folder, and its checkpoints bear it. The place of its checkpoints has one lease:
it names the start that saves there, its run and its folder. A later start takes the lease. An earlier one that still
runs, on a machine that was taken for lost, finds that before its next commit or removal, and ends.
"""

import logging
import os
import secrets
import shutil
import socket
from collections.abc import Collection, Sequence, Set
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import NamedTuple

from checkpoint.manifest import (
    MANIFEST,
    Manifest,
    begun,
    encode_manifest,
    finished,
    read_encoded,
    read_manifest,
    step_of,
)
from config import Checkpoint, ConfigError
from storage import DamagedError, LocalStore, Store, StoreError, join

RUN_ID = ".run_id"  # in the run's folder: its id, so that it moves with the folder
RUN_NAME = ".run_name"  # what earlier versions called it
SAVED = ".saved"  # in the run's folder: names the last committed checkpoint
LEASE = ".lease"  # in a store: the start that saves there

logger = logging.getLogger(__name__)


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


def read_run_id(run_folder: Path) -> str:
    """The id of the run in a folder, "" if it has none."""
    return read_mark(run_folder / RUN_ID) or read_mark(run_folder / RUN_NAME)


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
    own = read_run_id(run_folder)
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
    if folder != here and read_run_id(Path(folder)) == own:
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


# ---------------------------------------------------------------- what is kept, and the room for it


def check_room(store: LocalStore, settings: Checkpoint, checkpoint_bytes: int) -> None:
    """Refuse a disk without room for the checkpoints to keep and the next; those there count. Raises StoreError."""
    sizes = store.sizes()
    kept = {name for name in finished(sizes) if _is_kept_for_ever(name, settings)}
    removable = {*begun(sizes)} - kept
    room = shutil.disk_usage(store.folder).free
    room += sum(size for file, size in sizes.items() if file.partition("/")[0] in removable)
    copies = max(2, settings.keep + 1)
    if room < copies * checkpoint_bytes:
        raise StoreError(
            f"{store.url}: has room for {room / 1e9:.2f} GB, but {copies} checkpoints of {checkpoint_bytes / 1e9:.2f} "
            "GB must fit (checkpoint.keep and the one being written); free some space, lower checkpoint.keep, or move "
            "the checkpoints and set checkpoint.folder to their new place"
        )


def tidy(
    store: Store,
    settings: Checkpoint,
    start: Start,
    newest: str,
    damaged: Set[str],
    at_start: bool = False,
    others_may_write: bool = False,
) -> None:
    """Remove all but `newest`, the `keep` newest and every `keep_every`-th step's, and what killed saves have left.

    For rank 0, while it saves nothing. `damaged` ones do not count; they go, too, but not `at_start`, before another
    is committed. What was not committed stays if `others_may_write` it. An error ends no run: it is logged.
    """
    try:
        sizes = store.sizes()
        check_lease(store, start)  # after the listing, in which nothing of a later start can then be
        whole = {name for name in begun(sizes) if _is_committed(store, name, sizes)}
        old = sorted(whole - damaged - {newest}, reverse=True)[max(0, settings.keep - 1) :]
        going = {name for name in old if not _is_kept_for_ever(name, settings)}
        if not at_start:
            going |= damaged
        if not others_may_write:
            going |= {*begun(sizes)} - whole - {newest}
        _remove(store, going, sizes)
    except (StoreError, ConfigError) as error:
        logger.warning(f"old checkpoints could not be removed: {error}")


def _is_committed(store: Store, name: str, sizes: Collection[str]) -> bool:
    """Whether a checkpoint has a manifest, which a listing may not show yet."""
    file = f"{name}/{MANIFEST}"
    if file in sizes:
        return True
    try:
        store.read(file)
    except DamagedError:
        return False
    return True


def _remove(store: Store, names: Set[str], sizes: Collection[str]) -> None:
    """Remove those of these checkpoints that are in a listing, each manifest first, so that no half looks whole."""
    for name in sorted(names):
        files = [file for file in sizes if file.startswith(f"{name}/")]
        store.remove(sorted(files, key=lambda file: not file.endswith(f"/{MANIFEST}")))


def _is_kept_for_ever(name: str, settings: Checkpoint) -> bool:
    if not settings.keep:
        return True
    return settings.keep_every > 0 and step_of(name) % settings.keep_every == 0
