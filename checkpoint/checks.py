"""What is wrong with a run's settings for checkpoints, found before the first step."""

import secrets
import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from checkpoint import CheckpointError
from checkpoint.branch import Parent, find_fork, read_parent
from checkpoint.files import tensors_in
from checkpoint.loading import by_age, check_identity, load_newest, locate, open_stores, store_waits
from checkpoint.manifest import Opened, jsonable, run_name, step_of
from checkpoint.ranks import Ranks
from checkpoint.retention import check_owner, committed, finished
from config import Config, ConfigError, TitaniteError
from storage import LocalStore, Store, StoreError, join


def check_checkpoints(
    config: Config,
    identity: dict[str, Any],
    run_folder: Path,
    check_initial: Callable[[str, Opened], object] = lambda place, opened: None,
    check_place: Callable[[dict[str, Any]], object] = lambda state: None,
) -> None:
    """Refuse a run that could not use its checkpoints; nothing is left behind. For rank 0.

    That is one whose settings contradict each other; that would save where nothing can be written or read back (the
    first save may be hours away) or where another run has saved; one beyond `training.steps`; a branch in another run's
    folder; one whose `initial_load` or `branch_from` has no checkpoint, one of another model, or one that
    `check_initial` refuses, or `check_place` by its place in the data. Raises TitaniteError.
    """
    settings = config.checkpoint
    if settings.branch_from and settings.initial_load:
        raise ConfigError("checkpoint.branch_from and checkpoint.initial_load are two ways to begin: leave one empty")
    for name in ("save_initial", "save_model", "upload", "branch_from"):
        if getattr(settings, name) and not settings.enable:
            raise ConfigError(f"checkpoint.{name} is set and needs checkpoint.enable = true")
    stores = open_stores(config, run_folder) if settings.enable else {}
    if len({Path(store.url).resolve() for store in stores.values()}) < len(stores):
        raise ConfigError(f"checkpoint.upload = {settings.upload!r}: is checkpoint.folder itself; name a second place")
    for key, store in stores.items():
        try:
            store.check_writable()
        except StoreError as error:
            what = "cannot be written to and read back"
            raise type(error)(f"checkpoint.{key} = {store.url!r}: {what}: {error}") from None
        check_owner(key, store, finished(store.sizes()), run_name(run_folder))
    found = by_age((store, committed(store)) for store in stores.values())
    if found and (newest := step_of(found[0][1]) or 0) > config.training.steps:
        raise ConfigError(
            f"training.steps = {config.training.steps}: this run has reached step {newest}, "
            f"{join(found[0][0].url, found[0][1])}: set {newest} or more, or another run.folder"
        )
    parent = read_parent(run_folder) if settings.enable else None
    if settings.branch_from and (parent or (found and (run_folder / "config.toml").is_file())):
        _check_parent(settings.branch_from, parent, run_folder)
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


def _check_parent(branch_from: str, parent: Parent | None, run_folder: Path) -> None:
    """Refuse to branch in the folder of a run that began in another way. Raises ConfigError."""
    place, step = find_fork(branch_from)
    if not parent or step not in (None, parent.step) or Path(place).resolve() != Path(parent.place).resolve():
        began = f"branched from {parent.place}@{parent.step}" if parent else "is no branch"
        raise ConfigError(
            f"checkpoint.branch_from = {branch_from!r}: the run in {run_folder} {began}: set another run.folder for a "
            "new branch, or leave checkpoint.branch_from empty to go on with that run"
        )


def check_shared(key: str, store: Store, ranks: Ranks) -> None:
    """Refuse a folder in which ranks do not see what rank 0 writes. Collective. Raises ConfigError on all."""
    if not isinstance(store, LocalStore):
        return
    probe = ranks.broadcast_object(f".probe-{secrets.token_hex(4)}")

    def look() -> None:
        if not (store.folder / probe).exists():  # by name: no network file system answers that from an old listing
            raise ConfigError(
                f"checkpoint.{key} = {store.url!r}: {socket.gethostname()} does not see what rank 0 writes there, so "
                "each node would hold a part of every checkpoint: set it to a folder that all nodes share or to "
                "s3://bucket/prefix. A run that was saved so resumes at commit 7cc964e only (docs/migration.md)"
            )

    ranks.from_rank_0(partial(store.put, probe, b"x"))
    try:
        ranks.together(look)
    finally:
        ranks.from_rank_0(partial(store.remove, [probe]))
