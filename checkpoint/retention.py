"""Which checkpoints a store holds and whose they are, which to remove, and whether the disk has room for more."""

import logging
import shutil
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor

from checkpoint.manifest import MANIFEST, RUN_NAME, by_step, is_checkpoint_name, read_manifest, step_of
from config import Checkpoint, ConfigError
from storage import DamagedError, LocalStore, OutageError, S3Store, Store, StoreError, open_store

logger = logging.getLogger(__name__)


def committed(store: Store) -> list[str]:
    """Names of the checkpoints in `store` that have a manifest, newest first; not those of a model alone."""
    return [name for name in finished(store.sizes()) if step_of(name) is not None]


def finished(sizes: Collection[str]) -> list[str]:
    """The checkpoints in a listing that have a manifest, newest first; also those of a model alone."""
    folders = (file.removesuffix(f"/{MANIFEST}") for file in sizes if file.endswith(f"/{MANIFEST}"))
    return sorted(filter(is_checkpoint_name, folders), key=by_step, reverse=True)


def begun(sizes: Collection[str]) -> list[str]:
    """All checkpoints in a listing, committed or not, oldest first."""
    return sorted(filter(is_checkpoint_name, {file.partition("/")[0] for file in sizes if "/" in file}), key=by_step)


def check_owner(key: str, store: Store, names: Collection[str], run: str) -> None:
    """Refuse a place if another run saved one of these checkpoints. Raises ConfigError."""

    def saver(name: str) -> str:
        try:
            return read_manifest(store, name).get("run", run)
        except DamagedError:
            return run

    with ThreadPoolExecutor(32) as threads:
        for name, other in zip(names, threads.map(saver, names), strict=True):
            if other != run:
                raise ConfigError(
                    f"checkpoint.{key} = {store.url!r}: {name} there was saved by another run, {other}: set another "
                    f"checkpoint.{key}. If this is that run, moved or renamed, write {other} into {RUN_NAME} in its "
                    "run.folder"
                )


def check_room(store: Store, settings: Checkpoint, checkpoint_bytes: int) -> None:
    """Refuse a disk without room for the checkpoints to keep and the next one; those there count as room.

    Raises StoreError.
    """
    if not isinstance(store, LocalStore):
        return
    sizes = store.sizes()
    stay = {name for name in finished(sizes) if _is_kept_for_ever(name, settings)}
    going = {*begun(sizes)} - stay
    room = shutil.disk_usage(store.folder).free
    room += sum(size for file, size in sizes.items() if file.partition("/")[0] in going)
    copies = max(2, settings.keep + 1)
    if room < copies * checkpoint_bytes:
        raise StoreError(
            f"{store.url}: has room for {room / 1e9:.2f} GB, but {copies} checkpoints of {checkpoint_bytes / 1e9:.2f} "
            "GB must fit (checkpoint.keep and the one being written); free some space, lower checkpoint.keep, or move "
            "the checkpoints and set checkpoint.folder to their new place"
        )


class Retention:
    """What a run keeps in one store. For rank 0."""

    def __init__(self, key: str, store: Store, run: str, settings: Checkpoint) -> None:
        # Nothing is repeated: the next save waits for the removals.
        self.store = open_store(store.url, 0, settings.visibility_seconds)
        self.key, self.run, self.settings = key, run, settings
        self.own = set[str]()  # committed checkpoints of this run that were seen
        self.damaged = set[str]()  # found while loading; removed after the next commit

    def start(self, resumed: str) -> None:
        """Remove what killed saves have left, and more checkpoints than are kept, before this start's first save."""
        try:
            sizes = self.store.sizes()
            names = self.own = {*finished(sizes)}  # check_checkpoints has just asked whose they are
            left = {name for name in begun(sizes) if name not in names and not self._is_committed(name)}
            self._remove(left | self._superfluous(names, resumed), sizes)
            if isinstance(self.store, S3Store):
                self.store.abort_uploads(lambda file: is_checkpoint_name(file.partition("/")[0]), 0)
        except StoreError as error:
            logger.warning(f"what killed saves have left stays, and takes room: {error}")

    def tidy(self, saved: str) -> None:
        """Remove what is not kept, now that `saved` is committed. Raises ConfigError if another run has saved here."""
        self.own.add(saved)
        try:
            sizes = self.store.sizes()
            names = {*finished(sizes), saved}
            check_owner(self.key, self.store, names - self.own, self.run)
            self.own |= names
            if step_of(saved) is not None:
                self._remove(self._superfluous(names - self.damaged, saved) | self.damaged, sizes)
        except StoreError as error:
            logger.warning(f"old checkpoints could not be removed: {error}")

    def _superfluous(self, names: set[str], saved: str) -> set[str]:
        """All but `saved`, the `keep` newest (0: keep all), every `keep_every`-th step's and models alone."""
        steps = sorted((name for name in names if step_of(name) is not None), key=by_step, reverse=True)
        old = steps[self.settings.keep :]
        return {name for name in old if not _is_kept_for_ever(name, self.settings)} - {saved}

    def _is_committed(self, name: str) -> bool:
        """Whether a checkpoint has a manifest, asked by its name, since a listing may lag."""
        try:
            return bool(self.store.read(f"{name}/{MANIFEST}"))
        except DamagedError:
            return False

    def _remove(self, names: Collection[str], sizes: Collection[str]) -> None:
        """Remove those of these checkpoints that are in a listing, each manifest first, so that no half looks whole."""
        left, reason = [name for name in begun(sizes) if name in names], ""
        for name in [*left]:
            files = [file for file in sizes if file.startswith(f"{name}/")]
            try:
                self.store.remove(sorted(files, key=lambda file: not file.endswith(f"/{MANIFEST}")))
                left.remove(name)
            except StoreError as error:
                reason = str(error)
                if isinstance(error, OutageError):
                    break
        if left:
            logger.warning(f"old checkpoints that could not be removed: {len(left)}, the first {left[0]}: {reason}")


def _is_kept_for_ever(name: str, settings: Checkpoint) -> bool:
    every = settings.keep_every
    return step_of(name) is None or not settings.keep or (every > 0 and (step_of(name) or 0) % every == 0)
