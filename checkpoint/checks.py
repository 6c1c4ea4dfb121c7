"""What is wrong with a run's settings for checkpoints, found before the first step."""

import secrets
import socket
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from checkpoint import CheckpointError
from checkpoint.branch import Parent, find_fork, read_parent
from checkpoint.files import tensors_in
from checkpoint.loading import by_age, check_identity, load_newest, locate, open_stores, store_waits
from checkpoint.manifest import Opened, jsonable
from checkpoint.names import RUN_NAME, by_step, is_same_run, run_name, step_of
from checkpoint.ranks import Ranks
from checkpoint.retention import finished, savers
from config import Config, ConfigError, TitaniteError
from storage import LocalStore, Store, StoreError, join


def check_checkpoint(config: Config) -> None:
    """Raises ConfigError for checkpoints asked for and switched off, or a copy onto themselves."""
    settings = config.checkpoint
    if settings.branch_from and settings.initial_load:
        raise ConfigError("checkpoint.branch_from and checkpoint.initial_load are two ways to begin: leave one empty")
    for name in ("save_initial", "save_model", "upload", "branch_from"):
        if getattr(settings, name) and not settings.enable:
            raise ConfigError(f"checkpoint.{name} is set and needs checkpoint.enable = true")
    first = settings.folder or (config.run.folder and f"{config.run.folder}/checkpoints")
    if settings.upload and first and Path(settings.upload).resolve() == Path(first).resolve():
        raise ConfigError(f"checkpoint.upload = {settings.upload!r}: is checkpoint.folder itself; name a second place")


def check_checkpoints(
    config: Config,
    identity: dict[str, Any],
    run_folder: Path,
    check_initial: Callable[[str, Opened], object] = lambda place, opened: None,
    check_place: Callable[[dict[str, Any]], object] = lambda state: None,
) -> None:
    """Refuse a run that could not use its checkpoints; nothing is left behind. For rank 0.

    That is one that would save where nothing can be written or read back (the first save may be hours away) or where
    the newest checkpoint is another run's; one beyond `training.steps`; a branch in another run's folder; one whose
    `initial_load` or `branch_from` has no checkpoint, one of another model, or one that `check_initial` refuses, or
    `check_place` by its place in the data. Raises ConfigError, CheckpointError, StoreError.
    """
    settings = config.checkpoint
    stores = open_stores(config, run_folder) if settings.enable or settings.save_model else []
    for key, store in zip(("folder", "upload"), stores, strict=False):
        try:
            store.check_writable()
        except StoreError as error:
            what = "cannot be written to and read back"
            raise type(error)(f"checkpoint.{key} = {store.url!r}: {what}: {error}") from None
        if not is_own_folder(store, run_folder):
            _check_owner(key, store, run_folder)
    found = by_age(stores) if settings.enable else []
    if found and (newest := step_of(found[0][1]) or 0) > config.training.steps:
        raise ConfigError(
            f"training.steps = {config.training.steps}: this run has reached step {newest}, "
            f"{join(found[0][0].url, found[0][1])}: set {newest} or more, or another run.folder"
        )
    parent = read_parent(run_folder) if settings.enable else None
    if settings.branch_from and (found or parent):
        _check_parent(settings.branch_from, parent, found, run_folder)
    fork, step = find_fork(settings.branch_from, parent)
    if (place := fork or settings.initial_load) and not found:  # a run with checkpoints of its own no longer uses it

        def fits(opened: Opened) -> None:
            check_identity(opened.manifest, jsonable(identity))
            check_initial(place, opened)
            if fork:
                check_place(opened.manifest.get("dataloader", {}))
                if (at := opened.manifest["step"]) >= config.training.steps:
                    raise ConfigError(f"training.steps = {config.training.steps}: must be above {at}, {opened.url}")
                if at and not tensors_in(opened.metadata, "optimizer."):
                    raise CheckpointError(f"{opened.url}: holds weights alone: set checkpoint.initial_load instead")

        try:
            load_newest(locate(place, *store_waits(config), step=step), Ranks(), fits)
        except TitaniteError as error:
            raise type(error)(f"checkpoint.{'branch_from' if fork else 'initial_load'}: {error}") from None


def _check_parent(
    branch_from: str, parent: Parent | None, found: Sequence[tuple[Store, str]], run_folder: Path
) -> None:
    """Refuse to branch in the folder of a run that began in another way. Raises ConfigError."""
    place, step = find_fork(branch_from)
    if not parent:  # a lost run folder is made again
        facts = load_newest(found, Ranks(), lambda opened: opened.manifest.get("parent"))[1]
        parent = Parent(**facts) if facts else None
    if not parent or step not in (None, parent.step) or Path(place).resolve() != Path(parent.place).resolve():
        began = f"branched from {parent.place}@{parent.step}" if parent else "is no branch"
        raise ConfigError(
            f"checkpoint.branch_from = {branch_from!r}: the run in {run_folder} {began}: set another run.folder for a "
            "new branch, or leave checkpoint.branch_from empty to go on with that run"
        )


def is_own_folder(store: Store, run_folder: Path) -> bool:
    """Whether a place is the run's own folder for checkpoints. All there is its own, even if both were moved."""
    return Path(store.url).absolute() == (run_folder / "checkpoints").absolute()


def _check_owner(key: str, store: Store, run_folder: Path) -> None:
    """Refuse to save where the newest checkpoint whose manifest can be read is another run's. Raises ConfigError."""
    asked = (savers(store, [name]) for name in sorted(finished(store.sizes()), key=by_step, reverse=True))
    for name, other in next((said for said in asked if any(said.values())), {}).items():
        if not is_same_run(other, run_name(run_folder)):
            raise ConfigError(
                f"checkpoint.{key} = {store.url!r}: its newest checkpoint, {name}, was saved by another run, {other}: "
                f"set another checkpoint.{key}. To start from its weights, set also checkpoint.initial_load = "
                f"{store.url!r}. If this is that run, only moved or renamed, write {other} into "
                f"{run_folder / RUN_NAME} and start it with --run.folder={run_folder}"
            )


def check_shared(stores: Sequence[Store], ranks: Ranks, visibility_seconds: float) -> None:
    """Refuse a folder in which ranks do not see what rank 0 writes. Collective. Raises ConfigError on all."""
    for key, store in zip(("folder", "upload"), stores, strict=False):
        if not isinstance(store, LocalStore):
            continue
        probe = ranks.broadcast(f".probe-{secrets.token_hex(4)}")
        ranks.from_rank_0(partial(store.put, probe, b"x"))
        deadline = time.monotonic() + visibility_seconds
        # By name: a network file system does not answer that from an old listing.
        while not (sees := (store.folder / probe).exists()) and time.monotonic() < deadline:
            time.sleep(0.2)
        blind = ranks.broadcast(ranks.gather("" if sees else socket.gethostname()))
        ranks.from_rank_0(partial(store.remove, [probe]))
        if any(blind):
            raise ConfigError(
                f"checkpoint.{key} = {store.url!r}: {', '.join(sorted({host for host in blind if host}))} does not see "
                "what rank 0 writes there, so each node would hold a part of every checkpoint: set it to a folder that "
                "all nodes share or to s3://bucket/prefix. To resume a run that was saved so on nodes' own disks, use "
                "commit 7cc964e (docs/migration.md)",
                agreed=True,
            )
