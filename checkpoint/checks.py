"""What is wrong with a run's settings for checkpoints, found before the first step."""

import secrets
import socket
from functools import partial
from pathlib import Path
from typing import Any

from checkpoint import CheckpointError
from checkpoint.branch import Parent, find_fork, read_parent, split_place
from checkpoint.companions import check_vocabulary
from checkpoint.lease import check_owner, read_run_id
from checkpoint.loading import check_identity, load_newest, locate, open_place
from checkpoint.manifest import Opened, committed, step_of
from config import Config, ConfigError, TitaniteError
from data.loader import DataLoader
from parallel.ranks import Ranks
from storage import LocalStore, StoreError, join


def check_settings(config: Config) -> None:
    """Refuse settings that contradict each other. Raises ConfigError."""
    settings = config.checkpoint
    if settings.branch_from and settings.initial_load:
        raise ConfigError("checkpoint.branch_from and checkpoint.initial_load are two ways to begin: leave one empty")
    if settings.branch_from and not settings.enable:
        raise ConfigError("checkpoint.branch_from is set and needs checkpoint.enable = true")
    average = config.validation.average
    if average and not (settings.enable and (settings.keep >= average or settings.keep == 0)):
        needed = f"needs checkpoint.enable = true, and checkpoint.keep = {average} or more, or 0"
        raise ConfigError(f"validation.average = {average}: {needed}")


def check_checkpoints(
    config: Config, identity: dict[str, Any], run_folder: Path, data: DataLoader | None = None
) -> str:
    """Refuse a run that could not save or resume, or that cannot begin as set. For rank 0. Raises TitaniteError.

    `data`, if given, must suit what the run begins from. Nothing is left behind. Returns the run's id, which is new if
    the run is.
    """
    settings = config.checkpoint
    if not settings.enable:
        _check_beginning(config, identity, None, data)
        return read_run_id(run_folder) or secrets.token_hex(8)
    store = open_place(config, run_folder)
    try:
        store.check_writable()
    except StoreError as error:
        what = f"checkpoint.folder = {store.url!r}: cannot be written to and read back"
        raise type(error)(f"{what}: {error}") from None
    own = committed(store)
    run = check_owner(store, own, run_folder)
    parent = read_parent(run_folder)
    if own:
        reached = step_of(own[0])
        steps = config.training.steps
        if reached > steps:
            raise ConfigError(
                f"training.steps = {steps}: this run has reached step {reached}, {join(store.url, own[0])}: "
                f"set {reached} or more, or another run.folder"
            )
    if parent or (own and (run_folder / "config.toml").is_file()):
        _check_same_branch(settings.branch_from, run_folder, parent)
    if not own:  # a run with checkpoints of its own no longer needs another's
        _check_beginning(config, identity, parent, data)
    return run


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
        if not opened.tensors("optimizer."):
            raise CheckpointError(f"{opened.url}: holds weights alone: set checkpoint.initial_load instead")
        if data:
            data.check_position(opened.manifest.get("dataloader", {}))
        step = opened.manifest["step"]
        steps = config.training.steps
        if step >= steps:
            raise ConfigError(f"training.steps = {steps}: must be above {step}, {opened.url}")

    try:
        load_newest(locate(place, config.comm.store_retry_seconds), Ranks(), check)
    except TitaniteError as error:
        key = "branch_from" if fork else "initial_load"
        raise type(error)(f"checkpoint.{key}: {error}") from None


def check_shared(store: LocalStore, ranks: Ranks) -> None:
    """Refuse a folder in which ranks do not see what rank 0 writes. Collective. Raises ConfigError on all."""
    probe = ranks.broadcast_object(f".probe-{secrets.token_hex(4)}")

    def look() -> None:
        if not (store.folder / probe).exists():  # by name: no network file system answers that from an old listing
            raise ConfigError(
                f"checkpoint.folder = {store.url!r}: {socket.gethostname()} does not see what rank 0 writes there: "
                "name a shared folder or s3://bucket/prefix"
            )

    ranks.from_rank_0(partial(store.put, probe, b"x"))
    try:
        ranks.together(look)
    finally:
        ranks.from_rank_0(partial(store.remove, [probe]))
