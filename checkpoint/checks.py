"""What is wrong with a run's settings for checkpoints, found before the first step."""

import secrets
import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from checkpoint import CheckpointError
from checkpoint.branch import BEST, find_fork, read_parent, split_place
from checkpoint.loading import by_age, check_identity, load_newest, locate, open_stores
from checkpoint.manifest import Opened, step_of
from checkpoint.owner import check_owner
from checkpoint.ranks import Ranks
from checkpoint.retention import finished
from config import Config, ConfigError, TitaniteError
from storage import LocalStore, Store, StoreError, join


def check_settings(config: Config) -> None:
    """Refuse settings that contradict each other. Raises ConfigError."""
    settings = config.checkpoint
    if settings.branch_from and settings.initial_load:
        raise ConfigError("checkpoint.branch_from and checkpoint.initial_load are two ways to begin: leave one empty")
    if settings.branch_from and split_place(settings.branch_from)[1] == BEST:
        step = "a later start could find another best one; name its step, as in PLACE@STEP"
        raise ConfigError(f"checkpoint.branch_from = {settings.branch_from!r}: {step}")
    for name in ("save_initial", "save_model", "upload", "branch_from", "keep_best"):
        if getattr(settings, name) and not settings.enable:
            raise ConfigError(f"checkpoint.{name} is set and needs checkpoint.enable = true")
    if settings.keep_best:
        _check_validated(config)
    folder = settings.folder or join(config.run.folder, "checkpoints")
    if settings.upload and Path(settings.upload).resolve() == Path(folder).resolve():
        raise ConfigError(f"checkpoint.upload = {settings.upload!r}: is checkpoint.folder itself; name a second place")


def _check_validated(config: Config) -> None:
    """Refuse to look for the best checkpoint where the steps with a checkpoint have no validation loss."""
    if not config.validation.enable:
        needed = "validation.enable = true, and data that holds documents out"
        raise ConfigError(f"checkpoint.keep_best = true: needs {needed}")
    saves, validations = config.checkpoint.interval, config.validation.interval
    shorter, longer = sorted((saves, validations))
    if longer % shorter:
        raise ConfigError(
            f"checkpoint.keep_best = true: checkpoint.interval = {saves} and validation.interval = {validations}: one "
            "must be a multiple of the other, so that validations fall on steps with a checkpoint"
        )


def check_checkpoints(
    config: Config,
    identity: dict[str, Any],
    run_folder: Path,
    check_initial: Callable[[str, Opened], object] = lambda place, opened: None,
    check_place: Callable[[dict[str, Any]], object] = lambda state: None,
    job: str = "",
) -> list[str]:
    """Refuse a run that could not save or resume, or that cannot begin as set. For rank 0. Raises TitaniteError.

    `check_initial` and, for a branch, `check_place` refuse the checkpoint to begin from. `job`: that of this start.
    Nothing is left behind. Returns the names of the checkpoints in the run's places, which are its own.
    """
    settings, steps = config.checkpoint, config.training.steps
    stores = open_stores(config, run_folder) if settings.enable else {}
    saved: list[tuple[Store, list[str]]] = []
    for key, store in stores.items():
        try:
            store.check_writable()
        except StoreError as error:
            what = "cannot be written to and read back"
            raise type(error)(f"checkpoint.{key} = {store.url!r}: {what}: {error}") from None
        names = finished(store.sizes())
        check_owner(key, store, names, run_folder, job)
        saved.append((store, names))
    own = by_age(saved)
    found = [(store, name) for store, name in own if step_of(name) is not None]  # to resume from
    if found and (newest := step_of(found[0][1]) or 0) > steps:
        reached = f"{newest}, {join(found[0][0].url, found[0][1])}: set {newest} or more, or another run.folder"
        raise ConfigError(f"training.steps = {steps}: this run has reached step {reached}")
    parent = read_parent(run_folder) if settings.enable else None
    fork, step = find_fork(settings.branch_from)
    if fork and (parent or (found and (run_folder / "config.toml").is_file())):
        began = f"branched from {parent.place}@{parent.step}" if parent else "is no branch"
        if not parent or step not in (None, parent.step) or Path(fork).resolve() != Path(parent.place).resolve():
            raise ConfigError(
                f"checkpoint.branch_from = {settings.branch_from!r}: the run in {run_folder} {began}: set another "
                "run.folder for a new branch, or leave checkpoint.branch_from empty to go on with that run"
            )
    fork, step = parent[:2] if parent else (fork, step)  # a branch begins where it began before
    if (place := fork or settings.initial_load) and not found:  # a run with checkpoints of its own no longer uses it

        def fits(opened: Opened) -> None:
            check_identity(opened.manifest, identity)
            check_initial(place, opened)
            if fork:
                check_place(opened.manifest.get("dataloader", {}))
                if (at := opened.manifest["step"]) >= steps:
                    raise ConfigError(f"training.steps = {steps}: must be above {at}, {opened.url}")
                if at and not opened.tensors("optimizer."):
                    raise CheckpointError(f"{opened.url}: holds weights alone: set checkpoint.initial_load instead")

        try:
            load_newest(locate(place, config.comm.store_retry_seconds, step), Ranks(), fits)
        except TitaniteError as error:
            raise type(error)(f"checkpoint.{'branch_from' if fork else 'initial_load'}: {error}") from None
    return [name for _, name in own]


def check_shared(key: str, store: LocalStore, ranks: Ranks) -> None:
    """Refuse a folder in which ranks do not see what rank 0 writes. Collective. Raises ConfigError on all."""
    probe = ranks.broadcast_object(f".probe-{secrets.token_hex(4)}")

    def look() -> None:
        if not (store.folder / probe).exists():  # by name: no network file system answers that from an old listing
            raise ConfigError(
                f"checkpoint.{key} = {store.url!r}: {socket.gethostname()} does not see what rank 0 writes there: name "
                "a shared folder or s3://bucket/prefix"
            )

    ranks.from_rank_0(partial(store.put, probe, b"x"))
    try:
        ranks.together(look)
    finally:
        ranks.from_rank_0(partial(store.remove, [probe]))
