"""What is wrong with a run's settings for checkpoints, found before the first step."""

import secrets
import socket
from functools import partial
from pathlib import Path
from typing import Any

from checkpoint import CheckpointError
from checkpoint.branch import BEST, Parent, find_fork, read_parent, split_place
from checkpoint.companions import check_vocabulary
from checkpoint.loading import check_identity, load_newest, locate, open_stores
from checkpoint.manifest import Opened, by_step, finished, step_of
from checkpoint.owner import check_owner
from checkpoint.ranks import Ranks
from config import Config, ConfigError, TitaniteError
from data.loader import DataLoader
from storage import LocalStore, Store, StoreError, join


def check_settings(config: Config) -> None:
    """Refuse settings that contradict each other. Raises ConfigError."""
    settings = config.checkpoint
    if settings.branch_from and settings.initial_load:
        raise ConfigError("checkpoint.branch_from and checkpoint.initial_load are two ways to begin: leave one empty")
    if split_place(settings.branch_from)[1] == BEST:
        step = "a later start could find another best one; name its step, as in PLACE@STEP"
        raise ConfigError(f"checkpoint.branch_from = {settings.branch_from!r}: {step}")
    for name in ("save_initial", "save_model", "upload", "branch_from", "keep_best"):
        if getattr(settings, name) and not settings.enable:
            raise ConfigError(f"checkpoint.{name} is set and needs checkpoint.enable = true")
    if settings.keep_best and not config.validation.enable:
        needed = "validation.enable = true, and data that holds documents out"
        raise ConfigError(f"checkpoint.keep_best = true: needs {needed}")
    average = config.validation.average
    if average and not (settings.enable and (settings.keep >= average or settings.keep == 0)):
        needed = f"needs checkpoint.enable = true, and checkpoint.keep = {average} or more, or 0"
        raise ConfigError(f"validation.average = {average}: {needed}")
    saves = settings.interval
    validations = config.validation.interval
    if settings.keep_best and max(saves, validations) % min(saves, validations):
        raise ConfigError(
            f"checkpoint.keep_best = true: checkpoint.interval = {saves} and validation.interval = {validations}: "
            "one must be a multiple of the other, so that validations fall on steps with a checkpoint"
        )
    folder = settings.folder or join(config.run.folder, "checkpoints")
    if settings.upload and Path(settings.upload).resolve() == Path(folder).resolve():
        raise ConfigError(f"checkpoint.upload = {settings.upload!r}: is checkpoint.folder itself; name a second place")


def check_checkpoints(
    config: Config, identity: dict[str, Any], run_folder: Path, data: DataLoader | None = None, job: str = ""
) -> list[str]:
    """Refuse a run that could not save or resume, or that cannot begin as set. For rank 0. Raises TitaniteError.

    `data`, if given, must suit what the run begins from. `job`: that of this start. Nothing is left
    behind. Returns the names of the checkpoints in the run's places, its own.
    """
    settings = config.checkpoint
    if not settings.enable:
        _check_beginning(config, identity, None, data)
        return []
    own: list[tuple[Store, str]] = []
    for key, store in open_stores(config, run_folder).items():
        try:
            store.check_writable()
        except StoreError as error:
            what = f"checkpoint.{key} = {store.url!r}: cannot be written to and read back"
            raise type(error)(f"{what}: {error}") from None
        found = [(store, name) for name in finished(store.sizes())]
        check_owner(key, found, run_folder, job)
        own += found
    resumable = [pair for pair in own if step_of(pair[1]) is not None]
    parent = read_parent(run_folder)
    if resumable:
        store, name = max(resumable, key=lambda pair: by_step(pair[1]))
        reached = step_of(name) or 0
        steps = config.training.steps
        if reached > steps:
            raise ConfigError(
                f"training.steps = {steps}: this run has reached step {reached}, {join(store.url, name)}: "
                f"set {reached} or more, or another run.folder"
            )
    if parent or (resumable and (run_folder / "config.toml").is_file()):
        _check_same_branch(settings.branch_from, run_folder, parent)
    if not resumable:  # a run with checkpoints of its own no longer needs another's
        _check_beginning(config, identity, parent, data)
    return [name for _, name in own]


def _check_same_branch(branch_from: str, run_folder: Path, parent: Parent | None) -> None:
    """Refuse `branch_from` for a run that began in another way."""
    place, step = split_place(branch_from)
    if not place:
        return
    began = "is no branch"
    if parent:
        if Path(place).resolve() == Path(parent.place).resolve() and int(step or parent.step) == parent.step:
            return
        began = f"branched from {parent.place}@{parent.step}"
    raise ConfigError(
        f"checkpoint.branch_from = {branch_from!r}: the run in {run_folder} {began}: set another run.folder for a new "
        "branch, or leave checkpoint.branch_from empty to go on with that run"
    )


def _check_beginning(config: Config, identity: dict[str, Any], parent: Parent | None, data: DataLoader | None) -> None:
    """Refuse a checkpoint to begin from that is not there or does not fit. A branch begins where it began before."""
    fork = find_fork(config.checkpoint.branch_from, parent)
    place = fork or config.checkpoint.initial_load
    if not place:
        return

    def check(opened: Opened) -> None:
        check_identity(opened.manifest, identity)
        if data:
            check_vocabulary(data.tokenizer, place, opened)
        if not fork:
            return
        if data:
            data.check_position(opened.manifest.get("dataloader", {}))
        step = opened.manifest["step"]
        steps = config.training.steps
        if step >= steps:
            raise ConfigError(f"training.steps = {steps}: must be above {step}, {opened.url}")
        if step and not opened.tensors("optimizer."):
            raise CheckpointError(f"{opened.url}: holds weights alone: set checkpoint.initial_load instead")

    try:
        load_newest(locate(place, config.comm.store_retry_seconds), Ranks(), check)
    except TitaniteError as error:
        key = "branch_from" if fork else "initial_load"
        raise type(error)(f"checkpoint.{key}: {error}") from None


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
