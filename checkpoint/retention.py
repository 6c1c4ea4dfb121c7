"""Which checkpoints to remove, and whether the disk has room for more."""

import logging
import shutil
from collections.abc import Collection, Set

from checkpoint.lease import Start, check_lease
from checkpoint.manifest import MANIFEST, begun, finished, step_of
from config import Checkpoint, ConfigError
from storage import DamagedError, LocalStore, Store, StoreError

logger = logging.getLogger(__name__)


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
