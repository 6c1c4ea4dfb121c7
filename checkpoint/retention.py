"""Which checkpoints a store holds, which to remove, and whether the disk has room for more."""

import logging
import socket
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

from checkpoint.manifest import MANIFEST, read_manifest
from checkpoint.names import age_seconds, by_step, is_checkpoint_name, step_of
from checkpoint.ranks import Ranks
from checkpoint.stores import CheckpointError, DamagedError, LocalStore, Store
from config import Checkpoint

Ownership = Callable[[Collection[str]], dict[str, bool | None]]  # name → whether this run saved it, None: unknown

logger = logging.getLogger(__name__)


class _NoRoomError(CheckpointError):
    """The disk is too small for the checkpoints to come."""


def committed(store: Store) -> list[str]:
    """Names of the checkpoints in `store` that have a manifest, newest first."""
    return _committed(store.sizes())


def by_age(stores: Sequence[Store]) -> list[tuple[Store, str]]:
    """(store, name) of all committed checkpoints, newest first. Copies of one are in the order of `stores`."""
    found = [(store, name) for store in stores for name in committed(store)]
    return sorted(found, key=lambda pair: by_step(pair[1]), reverse=True)  # stable: keeps the order of equal ones


def superfluous(sizes: Collection[str], saved: str, settings: Checkpoint, damaged: Collection[str]) -> set[str]:
    """The checkpoints of a listing to remove, now that `saved` is committed there.

    These are the `damaged`, and all but `saved`, the `keep` newest (0: keep all) and every `keep_every`-th step's. If
    `saved` is a model alone: earlier starts' saves of the same model.
    """
    if step_of(saved) is None:
        kind = saved.rpartition("-")[0]
        return {name for name in finished(sizes) if name.rpartition("-")[0] == kind} - {saved}
    names = _committed(sizes)
    intact = [name for name in names if name not in damaged]
    stay = {name for name in intact if _kept_for_ever(name, settings)}
    return set(names) - stay - set(intact[: settings.keep]) - {saved}


def finished(sizes: Collection[str]) -> set[str]:
    """The checkpoints in a listing that have a manifest."""
    folders = {file.removesuffix(f"/{MANIFEST}") for file in sizes if file.endswith(f"/{MANIFEST}")}
    return set(filter(is_checkpoint_name, folders))


def unfinished(sizes: Collection[str], seconds: float = 0) -> set[str]:
    """The checkpoints in a listing that were begun more than `seconds` ago and not committed."""
    folders = _folders(sizes) - finished(sizes)
    return {name for name in folders if is_checkpoint_name(name) and age_seconds(name) > seconds}


def never_committed(store: Store, names: Collection[str]) -> set[str]:
    """Those of `names` that have no manifest. Requests each by name, since a listing may lag.

    In parallel, since each request gives object storage some time to show the manifest.
    """

    def has_manifest(name: str) -> bool:
        try:
            store.read(f"{name}/{MANIFEST}")
        except DamagedError:
            return False
        return True

    with ThreadPoolExecutor(32) as threads:
        asked = {name: threads.submit(has_manifest, name) for name in names}
    return {name for name, has in asked.items() if not has.result()}


def savers(store: Store, names: Collection[str]) -> dict[str, str]:
    """Name → the run that saved it, of those of these checkpoints whose manifest says so. In parallel, as above."""

    def saver(name: str) -> str:
        try:
            return read_manifest(store, name).get("run", "")
        except DamagedError as error:
            logger.warning(f"which run saved {name} is unknown: {error}")
            return ""

    with ThreadPoolExecutor(32) as threads:
        asked = {name: threads.submit(saver, name) for name in names}
    return {name: run for name, answer in asked.items() if (run := answer.result())}


def remove_checkpoints(store: Store, names: Collection[str], sizes: Collection[str]) -> None:
    """Remove those of `names` that are in a listing, each manifest first, so that no half passes for a whole.

    Tries all. Raises CheckpointError if one could not be removed or is still listed afterwards.
    """
    present = sorted(_folders(sizes) & set(names), key=by_step)
    failures = []
    for name in present:
        files = [file for file in sizes if file.startswith(f"{name}/")]
        try:
            store.remove(sorted(files, key=lambda file: not file.endswith(f"/{MANIFEST}")))
        except CheckpointError as error:
            failures.append(error)
    if failures:
        raise failures[0]
    if present and (left := sorted(_folders(store.sizes()) & set(present))):
        raise CheckpointError(f"{store.url}: files of {', '.join(left)} are still listed after their removal")


class Neighbours(NamedTuple):
    """Which ranks share a disk, and what the others hold."""

    disk: str  # of this rank: "" if it sees what rank 0 writes, else the name of its machine
    others: dict[str, str]  # on rank 0, for disks other than its own: machine → the newest checkpoint there, or ""


def meet_neighbours(store: Store, ranks: Ranks, visibility_seconds: float = 0) -> Neighbours:
    """Find who sees rank 0's disk within `visibility_seconds`, and what lies on other disks. Collective.

    All ranks see the same object storage.
    """
    if not isinstance(store, LocalStore):
        return Neighbours("", {})
    probe = ranks.broadcast(f".probe-{time.time_ns()}")
    ranks.from_rank_0(lambda: store.touch(probe))

    def look() -> tuple[str, str]:
        deadline = time.monotonic() + visibility_seconds
        # By name: a network file system does not answer that from an old listing.
        while not (seen := store.has(probe)) and time.monotonic() < deadline:
            time.sleep(0.2)
        return ("", "") if seen else (socket.gethostname(), max(committed(store), key=by_step, default=""))

    disk, newest = ranks.together(look)
    others = {machine: held for machine, held in sorted(ranks.gather((disk, newest))) if machine}
    ranks.from_rank_0(lambda: store.remove([probe, *store.probes()]))  # also probes of killed starts
    return Neighbours(disk, others)


def check_room(
    store: LocalStore,
    ranks: Ranks,
    disk: str,
    rank_bytes: int,
    settings: Checkpoint,
    ownership: Ownership,
    spared: Collection[str] = (),
) -> bool:
    """Refuse to start if the disk cannot hold the checkpoints to keep and the next one. Collective.

    `rank_bytes`: of one checkpoint, on this rank. `disk`: as in Neighbours. Own checkpoints that will go count as room.
    If room is short and no other run has checkpoints here, removes those never committed, but for rank 0's `spared`.
    Returns whether one must go before the next is written. Raises CheckpointError.
    """
    compare = partial(_compare_room, store, ranks, disk, rank_bytes, settings, ownership)
    try:
        return compare()
    except _NoRoomError:
        lists = ranks.rank == 0 or disk != ""
        here = ranks.together(lambda: set(filter(is_checkpoint_name, store.folders())) if lists else set())
        everywhere = ranks.gather(here)
        begun = ranks.from_rank_0(lambda: never_committed(store, set().union(*everywhere) - set(spared)))
        ranks.together(lambda: remove_checkpoints(store, begun, store.sizes()) if lists else None)
        if begun and ranks.rank == 0:
            logger.warning(f"{store.url}: removed to make room, since never committed: {', '.join(sorted(begun))}")
        return compare()


def _compare_room(
    store: LocalStore, ranks: Ranks, disk: str, rank_bytes: int, settings: Checkpoint, ownership: Ownership
) -> bool:
    copies = max(2, settings.keep + 1)
    # Only rank 0 lists a shared disk: there may be thousands of ranks, each with its own files.
    lists = ranks.rank == 0 or disk != ""
    sizes, free_bytes = ranks.together(lambda: (store.sizes() if lists else {}, store.free_bytes()))
    owned = ranks.from_rank_0(lambda: ownership(finished(sizes)))  # in rank 0's view
    own = {name for name, is_own in owned.items() if is_own and step_of(name) is not None}
    going = {name for name in own if not _kept_for_ever(name, settings)}
    going = {name for name in going if not (store.folder / name).is_symlink()}  # removing a link frees nothing
    old_bytes = sum(size for file, size in sizes.items() if file.partition("/")[0] in going)
    reports = ranks.gather((disk, rank_bytes, free_bytes, old_bytes if lists else None))

    def check() -> bool:
        is_full = False
        for disk in {disk for disk, *_ in reports}:
            one = sum(size for other, size, *_ in reports if other == disk)
            free = min(free for other, _, free, _ in reports if other == disk)
            room = free + min(old for other, _, _, old in reports if other == disk and old is not None)
            if room < copies * one:
                raise (CheckpointError if False in owned.values() else _NoRoomError)(
                    f"{store.url}: has room for {room / 1e9:.2f} GB, but {copies} checkpoints of "
                    f"{one / 1e9:.2f} GB must fit (checkpoint.keep and the one being written); free some "
                    "space, lower checkpoint.keep, or move the checkpoints and set checkpoint.folder to their new place"
                )
            is_full |= free < one
        return is_full

    return ranks.from_rank_0(check)


def _kept_for_ever(name: str, settings: Checkpoint) -> bool:
    every = settings.keep_every
    return not settings.keep or (every > 0 and (step_of(name) or 0) % every == 0)


def _folders(sizes: Collection[str]) -> set[str]:
    return {file.partition("/")[0] for file in sizes}


def _committed(sizes: Collection[str]) -> list[str]:
    return sorted((name for name in finished(sizes) if step_of(name) is not None), key=by_step, reverse=True)
