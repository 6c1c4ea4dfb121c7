"""Which checkpoints of a run a store holds, which to remove, and whether the disk has room for more."""

import logging
import shutil
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from checkpoint.manifest import MANIFEST, read_manifest
from checkpoint.names import age_seconds, by_step, is_checkpoint_name, is_same_run, step_of
from config import Checkpoint
from storage import DamagedError, LocalStore, OutageError, S3Store, Store, StoreError, open_store

T = TypeVar("T")

logger = logging.getLogger(__name__)


def committed(store: Store) -> list[str]:
    """Names of the checkpoints in `store` that have a manifest, newest first; not those of a model alone."""
    names = (name for name in finished(store.sizes()) if step_of(name) is not None)
    return sorted(names, key=by_step, reverse=True)


def finished(sizes: Collection[str]) -> set[str]:
    """The checkpoints in a listing that have a manifest."""
    folders = {file.removesuffix(f"/{MANIFEST}") for file in sizes if file.endswith(f"/{MANIFEST}")}
    return set(filter(is_checkpoint_name, folders))


def superfluous(names: Collection[str], saved: str, settings: Checkpoint, damaged: Collection[str]) -> set[str]:
    """The checkpoints of a run to remove, now that `saved` is committed.

    These are the `damaged`, and all but `saved`, the `keep` newest (0: keep all) and every `keep_every`-th step's. If
    `saved` is a model alone: earlier starts' saves of the same model.
    """
    if step_of(saved) is None:
        kind = saved.rpartition("-")[0]
        return {name for name in names if name.rpartition("-")[0] == kind} - {saved}
    steps = sorted((name for name in names if step_of(name) is not None), key=by_step, reverse=True)
    intact = [name for name in steps if name not in damaged]
    stay = {name for name in intact if _is_kept_for_ever(name, settings)}
    return set(steps) - stay - set(intact[: settings.keep]) - {saved}


class Retention:
    """What a run keeps in one store, where other runs may save, too. For rank 0."""

    def __init__(self, store: Store, run: str, settings: Checkpoint, owns_all: bool) -> None:
        """`owns_all`: the store is the run's own folder for checkpoints, even if both were moved."""
        # Nothing is repeated: the next save waits for the removals.
        self.store = open_store(store.url, 0, settings.visibility_seconds)
        self.run, self.settings, self.owns_all = run, settings, owns_all
        self.savers = dict[str, str]()  # committed checkpoint → its run, "" if unknown, of those asked about
        self.lists_uploads = True  # as far as is known

    def tidy(self, saved: str, damaged: Collection[str] = (), leftover_seconds: float | None = None) -> None:
        """Remove what is not kept, now that `saved` is committed. Says in one line what could not be removed.

        Of what killed saves left, keeps what is younger than `leftover_seconds` (None: twice `timeout_seconds`), at
        most `keep`. Another run's checkpoints stay, and beside them all that was never committed, as it may be the
        other's; so do those whose run is unknown, but for the `damaged`.
        """
        seconds = 2 * self.settings.timeout_seconds if leftover_seconds is None else leftover_seconds
        try:
            sizes = self.store.sizes()
            own, is_shared = self._own(finished(sizes) | {saved}, damaged)
            going = superfluous(own, saved, self.settings, damaged)
            if not is_shared:
                going |= self._leftovers(sizes, seconds)
                self._abort_uploads(seconds)
            self._remove(going, sizes)
        except StoreError as error:
            logger.warning(f"old checkpoints could not be removed: {error}")

    def check_room(self, checkpoint_bytes: int) -> bool:
        """Refuse to start if the disk cannot hold the checkpoints to keep and the next one. Raises StoreError.

        Checkpoints that will go, and what killed saves left, count as room. Returns whether they must go before the
        next is written.
        """
        if not isinstance(self.store, LocalStore):
            return False
        sizes = self.store.sizes()
        own, is_shared = self._own(finished(sizes))
        going = {name for name in own if step_of(name) is not None and not _is_kept_for_ever(name, self.settings)}
        going |= set() if is_shared else self._leftovers(sizes, 0)
        going = {name for name in going if not (self.store.folder / name).is_symlink()}  # removing a link frees nothing
        free = shutil.disk_usage(self.store.folder).free
        room = free + sum(size for file, size in sizes.items() if file.partition("/")[0] in going)
        copies = max(2, self.settings.keep + 1)
        if room < copies * checkpoint_bytes:
            raise StoreError(
                f"{self.store.url}: has room for {room / 1e9:.2f} GB, but {copies} checkpoints of "
                f"{checkpoint_bytes / 1e9:.2f} GB must fit (checkpoint.keep and the one being written); free some "
                "space, lower checkpoint.keep, or move the checkpoints and set checkpoint.folder to their new place"
            )
        return free < checkpoint_bytes

    def owns(self, name: str) -> bool:
        """Whether this run saved a committed checkpoint."""
        return bool(self._own([name])[0])

    def _own(self, names: Collection[str], damaged: Collection[str] = ()) -> tuple[set[str], bool]:
        """Those of these checkpoints that this run saved, and whether another run saved one. Reads each manifest once.

        A damaged one whose run is unknown counts as its own.
        """
        if self.owns_all:
            return set(names), False
        self.savers |= savers(self.store, set(names) - self.savers.keys())
        runs = {name: self.savers[name] for name in names}
        own = {name for name, run in runs.items() if (is_same_run(run, self.run) if run else name in damaged)}
        return own, any(run and not is_same_run(run, self.run) for run in runs.values())

    def _leftovers(self, sizes: Collection[str], seconds: float) -> set[str]:
        """The saves in a listing that were never committed and are older than `seconds`, or beyond the `keep` newest.

        Asks for each manifest by name, since a listing may lag.
        """
        begun = {file.partition("/")[0] for file in sizes} - finished(sizes)
        by_newest = sorted(filter(is_checkpoint_name, begun), key=age_seconds)
        keep = max(1, self.settings.keep)
        old = [name for number, name in enumerate(by_newest) if number >= keep or age_seconds(name) > seconds]

        def is_committed(name: str) -> bool:
            try:
                return bool(self.store.read(f"{name}/{MANIFEST}"))
            except DamagedError:
                return False

        return {name for name, is_there in _for_each(is_committed, old).items() if not is_there}

    def _abort_uploads(self, seconds: float) -> None:
        try:
            if isinstance(self.store, S3Store) and self.lists_uploads:
                self.store.abort_uploads(lambda file: is_checkpoint_name(file.partition("/")[0]), seconds)
        except StoreError as error:
            self.lists_uploads = False  # many stores cannot: asked once
            logger.warning(f"unfinished uploads of killed saves stay, and cost storage: {error}")

    def _remove(self, names: Collection[str], sizes: Collection[str]) -> None:
        """Remove those of these checkpoints that are in a listing, each manifest first, so that no half looks whole."""
        present, reason = sorted({file.partition("/")[0] for file in sizes} & set(names), key=by_step), ""
        for name in present:
            files = [file for file in sizes if file.startswith(f"{name}/")]
            try:
                self.store.remove(sorted(files, key=lambda file: not file.endswith(f"/{MANIFEST}")))
            except StoreError as error:
                reason = reason or str(error)
                if isinstance(error, OutageError):
                    break
        listed = {file.partition("/")[0] for file in self.store.sizes()} if present else set()
        if left := [name for name in present if name in listed]:
            reason = reason or "still listed after their removal"
            logger.warning(f"old checkpoints that could not be removed: {len(left)}, the first {left[0]}: {reason}")


def savers(store: Store, names: Collection[str]) -> dict[str, str]:
    """Name → the run that saved it, "" if its manifest does not say."""

    def saver(name: str) -> str:
        try:
            return read_manifest(store, name).get("run", "")
        except DamagedError as error:
            logger.warning(f"which run saved {name} is unknown: {error}")
            return ""

    return _for_each(saver, names)


def _for_each(ask: Callable[[str], T], names: Collection[str]) -> dict[str, T]:
    """Name → answer, all asked at the same time, since a store may let each wait."""
    with ThreadPoolExecutor(32) as threads:
        return dict(zip(names, threads.map(ask, names), strict=True))


def _is_kept_for_ever(name: str, settings: Checkpoint) -> bool:
    every = settings.keep_every
    return not settings.keep or (every > 0 and (step_of(name) or 0) % every == 0)
