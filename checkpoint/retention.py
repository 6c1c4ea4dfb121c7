"""Which checkpoints a store holds, which of them go, and whether the disk has room for them."""

import socket
import time
from collections.abc import Collection, Sequence

from checkpoint.manifest import MANIFEST
from checkpoint.ranks import Ranks
from checkpoint.storage import age_seconds, step_of
from checkpoint.stores import CheckpointError, LocalStore, Store


def committed(store: Store) -> list[str]:
    """Names of the checkpoints in `store` that have a manifest, newest first."""
    return _committed(store.sizes())


def superfluous(
    store: Store, *, keep: int, keep_every: int, damaged: Collection[str], leftover_seconds: float
) -> list[str]:
    """What may go from `store`, now that a newer checkpoint is committed there.

    All but the `keep` newest (0: all are kept) and those of every `keep_every`-th step; the `damaged`; and what
    was begun more than `leftover_seconds` ago and never committed.
    """
    sizes = store.sizes()
    names = _committed(sizes)
    intact = [name for name in names if name not in damaged]
    old = intact[keep:] if keep else []
    kept_for_ever = [name for name in old if _kept_for_ever(name, keep_every)]
    folders = {file.partition("/")[0] for file in sizes}
    leftovers = [
        folder
        for folder in folders - set(names)
        if step_of(folder) is not None and age_seconds(folder) > leftover_seconds
    ]
    return sorted({*old, *leftovers, *(name for name in names if name in damaged)} - set(kept_for_ever))


def _kept_for_ever(name: str, keep_every: int) -> bool:
    return bool(keep_every) and (step_of(name) or 0) % keep_every == 0


def remove_checkpoint(store: Store, name: str) -> None:
    """Remove checkpoint `name`, its manifest first, so that no half of it ever passes for a whole.

    Raises CheckpointError if it is still listed afterwards.
    """
    store.remove(sorted(store.sizes(name), key=lambda file: not file.endswith(f"/{MANIFEST}")))
    if left := store.sizes(name):
        raise CheckpointError(f"{store.url}/{name}: {len(left)} files are still listed after their removal")


def check_room(store: LocalStore, ranks: Ranks, rank_bytes: int, *, keep: int, keep_every: int) -> None:
    """Refuse to start where the disk cannot hold what is kept and the next, `rank_bytes` each here. Collective.

    Checkpoints that are there already count as room, unless they are kept for ever. Raises CheckpointError.
    """
    copies = max(2, keep + 1)
    probe = ranks.broadcast(f".probe-{time.time_ns()}")
    ranks.together(lambda: store.touch(probe) if ranks.rank == 0 else None)
    sizes = store.sizes()
    disk = "shared" if probe in sizes else socket.gethostname()  # ranks that see it share one disk
    stay = {name for name in _committed(sizes) if not keep or _kept_for_ever(name, keep_every)}
    room = store.free_bytes() + sum(size for file, size in sizes.items() if file.partition("/")[0] not in stay)
    reports = ranks.gather((disk, rank_bytes, room))

    def check() -> None:
        if ranks.rank == 0:
            store.remove([probe])
        for disk in {disk for disk, _, _ in reports}:
            needed = copies * sum(size for other, size, _ in reports if other == disk)
            room = min(room for other, _, room in reports if other == disk)
            if room < needed:
                raise CheckpointError(
                    f"{store.url}: has room for {room / 1e9:.2f} GB, but {copies} checkpoints of "
                    f"{needed / copies / 1e9:.2f} GB must fit (checkpoint.keep and the one being written); free some "
                    "space, lower checkpoint.keep or set checkpoint.folder elsewhere"
                )

    ranks.together(check)


def _committed(sizes: Collection[str]) -> list[str]:
    folders = {file.removesuffix(f"/{MANIFEST}") for file in sizes if file.endswith(f"/{MANIFEST}")}
    return sorted((folder for folder in folders if step_of(folder) is not None), reverse=True)


def by_age(stores: Sequence[Store]) -> list[tuple[Store, str]]:
    """(store, name) of all committed checkpoints, newest first, of the same one the first store's before the others."""
    found = [(name, -number, store) for number, store in enumerate(stores) for name in committed(store)]
    return [(store, name) for name, _, store in sorted(found, key=lambda entry: entry[:2], reverse=True)]
