"""Which checkpoints to remove, and whether the disk has room for more."""

import logging
import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress

from checkpoint.lease import Start, check_lease
from checkpoint.manifest import MANIFEST, begun, finished, is_checkpoint_name, step_of
from config import Checkpoint, ConfigError
from storage import DamagedError, LocalStore, S3Store, Store, StoreError

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


class Retention:
    """What a run keeps in its place. It removes only what it found at its start or has saved since. For rank 0."""

    def __init__(self, store: Store, settings: Checkpoint, start: Start) -> None:
        self.store = store
        self.settings = settings
        self.this_start = start
        self.own = set[str]()
        self.damaged = set[str]()  # found while loading; removed after the next commit
        self.leftovers: set[str] | None = None  # of saves that were not committed; None: removed

    def start(self, resumed: str, damaged: set[str], others_may_write: bool) -> None:
        """Remove what killed saves have left, and more checkpoints than are kept, before this start's first save.

        If another start may still write to what was left, that stays until a commit.
        """
        self.damaged = damaged
        with _warned("what killed saves have left stays, and takes room"):
            sizes = self.store.sizes()
            self.own = {*finished(sizes)}  # whose they are was just asked
            for name in {*begun(sizes)} - self.own:
                with suppress(DamagedError):
                    self.store.read(f"{name}/{MANIFEST}")  # a listing may lag
                    self.own.add(name)
            self.leftovers = {*begun(sizes)} - self.own
            self._remove(self._superfluous(self.own - damaged, resumed), sizes)
            if not others_may_write:
                self._remove_leftovers(sizes)

    def tidy(self, saved: str) -> None:
        """Remove what is not kept, now that `saved` is committed."""
        self.own.add(saved)
        with _warned("old checkpoints could not be removed"):
            sizes = self.store.sizes()
            names = {*finished(sizes), saved} & self.own - self.damaged
            self._remove(self._superfluous(names, saved) | self.damaged, sizes)
            self._remove_leftovers(sizes)

    def _remove_leftovers(self, sizes: Collection[str]) -> None:
        """Remove what was begun before this start and not committed, unfinished uploads included. Once."""
        if self.leftovers is None:
            return
        self._remove(self.leftovers - {*finished(sizes)}, sizes)
        self.leftovers = None
        if isinstance(self.store, S3Store):
            with _warned("unfinished uploads of killed saves could not be removed, and may take room"):
                self.store.abort_uploads(lambda file: is_checkpoint_name(file.partition("/")[0]))

    def _superfluous(self, names: set[str], saved: str) -> set[str]:
        """All but `saved`, the `keep` newest (0: keep all) and every `keep_every`-th step's."""
        old = sorted(names - {saved}, reverse=True)[max(0, self.settings.keep - 1) :]
        return {name for name in old if not _is_kept_for_ever(name, self.settings)}

    def _remove(self, names: Collection[str], sizes: Collection[str]) -> None:
        """Remove those of these checkpoints that are in a listing, each manifest first, so that no half looks whole."""
        if names:
            check_lease(self.store, self.this_start)  # a later start may need them
        for name in begun(sizes):
            if name in names:
                files = [file for file in sizes if file.startswith(f"{name}/")]
                self.store.remove(sorted(files, key=lambda file: not file.endswith(f"/{MANIFEST}")))


@contextmanager
def _warned(consequence: str) -> Iterator[None]:
    """Log an error inside, which must not end the run."""
    try:
        yield
    except (StoreError, ConfigError) as error:
        logger.warning(f"{consequence}: {error}")


def _is_kept_for_ever(name: str, settings: Checkpoint) -> bool:
    if not settings.keep:
        return True
    return settings.keep_every > 0 and step_of(name) % settings.keep_every == 0
