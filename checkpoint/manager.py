"""When checkpoints are written, which are kept, and which one a run resumes from."""

import json
import logging
import time
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata

import config as titanite_config
from checkpoint.ranks import Ranks, build_ranks
from checkpoint.state import (
    allocate_optimizer_state,
    model_tensors,
    optimizer_tensors,
    random_state,
    set_random_state,
)
from checkpoint.storage import (
    MANIFEST,
    METADATA,
    Manifest,
    State,
    commit,
    new_checkpoint_name,
    plan_save,
    read_manifest,
    read_metadata,
    read_state,
    resolver,
    step_of,
    tensors_in,
    unpickle_metadata,
    write_items,
)
from checkpoint.stores import CheckpointError, DamagedError, Store, join, open_store
from config import Config

logger = logging.getLogger(__name__)


class Stateful(Protocol):
    """What knows its place in the data: a small JSON-able dict, the same on all ranks."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None: ...


class CheckpointManager:
    """The checkpoints of one run. All methods are collective: every rank calls them at the same step."""

    def __init__(
        self,
        config: Config,
        run_folder: Path,
        *,
        model: Sequence[nn.Module],
        optimizer: torch.optim.Optimizer,
        dataloader: Stateful,
        identity: dict[str, Any],
    ) -> None:
        """`identity` says what the model is (JSON-able); a checkpoint of another identity is refused."""
        self.config = config
        self.model, self.optimizer, self.dataloader = model, optimizer, dataloader
        self.identity = _jsonable(identity)
        self.device = next(model[0].parameters()).device
        self.ranks = build_ranks(config.checkpoint.timeout_seconds)
        self.store = open_store(
            config.checkpoint.folder or run_folder / "checkpoints",
            request_seconds=config.checkpoint.request_timeout_seconds,
            visibility_seconds=config.checkpoint.visibility_seconds,
        )
        self.newest_step: int | None = None  # of the last save or load
        self.damaged: list[str] = []  # found so while loading; removed after the next commit

    def load(self) -> int:
        """Resume from the newest intact checkpoint of this run, or start from `initial_load`. Returns the step.

        0 if the run has no checkpoint. Restores model, optimizer and place in the data, and the random states
        where the world size is the same. A damaged checkpoint is passed over for the one before, with a line
        that says so. Raises CheckpointError if none is intact, or if one is of another model.
        """
        if not self.config.checkpoint.enable:
            return self._load_initial()
        names = self.ranks.broadcast(self.ranks.together(self._on_rank_0(lambda: committed(self.store))))
        if not names:
            return self._load_initial()
        name, manifest, self.damaged = load_newest(
            self.store, names, self.ranks, self._fill, lambda manifest: check_identity(manifest, self.identity)
        )
        self.dataloader.load_state_dict(manifest["dataloader"])
        logger.info(f"resumed from {join(self.store.url, name)}, written by {manifest['world_size']} ranks")
        self.newest_step = manifest["step"]
        return manifest["step"]

    def save_if_due(self, step: int, last: bool) -> None:
        """Save every `checkpoint.interval` steps and at the last step, no step twice."""
        due = last or step % self.config.checkpoint.interval == 0
        if self.config.checkpoint.enable and due and step != self.newest_step:
            self.save(step)

    def save(self, step: int) -> None:
        """Write a checkpoint of `step`. Raises CheckpointError, on all ranks, if it could not be committed."""
        started = time.monotonic()
        name = self.ranks.broadcast(new_checkpoint_name(step))
        state = self._state()
        plan, metadata = plan_save(state, self.ranks)
        resolve = resolver(state)
        written = self.ranks.together(lambda: write_items(self.store, name, self.ranks.rank, plan.items, resolve))
        results = [result for results in self.ranks.gather(written) for result in results]

        def finish() -> Manifest:
            assert metadata is not None
            return commit(self.store, name, metadata, results, self._facts(step))

        self.ranks.together(self._on_rank_0(finish))
        self.newest_step = step
        self.ranks.together(self._on_rank_0(self._remove_old))
        logger.info(f"checkpoint {name} saved in {time.monotonic() - started:.1f} s")

    def close(self) -> None:
        """Wait for what is under way; raises its failure."""

    def _state(self) -> State:
        return {
            "model": model_tensors(self.model),
            "optimizer": optimizer_tensors(self.model, self.optimizer),
            "rng": {str(self.ranks.rank): random_state(self.device)},
        }

    def _facts(self, step: int) -> Manifest:
        """What the manifest says of this checkpoint beside its files."""
        return {
            "step": step,
            "world_size": self.ranks.size,
            "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "identity": self.identity,
            "dataloader": _jsonable(self.dataloader.state_dict()),
            "config": titanite_config.to_toml(self.config),
            "torch": torch.__version__,
        }

    def _fill(self, store: Store, name: str, manifest: Manifest, metadata: Metadata) -> None:
        """Model, optimizer and random states from checkpoint `name`, each byte checked."""
        state: State = {"model": model_tensors(self.model)}
        _check_same_model(join(store.url, name), state, metadata)
        if tensors_in(metadata, "optimizer."):  # a checkpoint of step 0 has none
            allocate_optimizer_state(self.optimizer)
            state["optimizer"] = optimizer_tensors(self.model, self.optimizer)
        states = random_state(self.device)
        if manifest["world_size"] == self.ranks.size:
            prefix = f"rng.{self.ranks.rank}."
            states = {kind: value for kind, value in states.items() if tensors_in(metadata, f"{prefix}{kind}")}
            state["rng"] = {str(self.ranks.rank): states}
        read_state(store, name, metadata, state)
        set_random_state(states)

    def _load_initial(self) -> int:
        """The weights of `checkpoint.initial_load`, if set, into the model."""
        place = self.config.checkpoint.initial_load
        if place:
            store, names = self.ranks.broadcast(self.ranks.together(self._on_rank_0(lambda: _locate(place))))

            def fill(store: Store, name: str, manifest: Manifest, metadata: Metadata) -> None:
                _fill_model(store, name, metadata, self.model)

            name, _, _ = load_newest(
                store, names, self.ranks, fill, lambda manifest: check_identity(manifest, self.identity)
            )
            logger.info(f"model weights loaded from {join(store.url, name)}")
        return 0

    def _remove_old(self) -> None:
        """Remove what the next newer checkpoints have made superfluous, and what was found damaged."""
        intact = [name for name in committed(self.store) if name not in self.damaged]
        keep = self.config.checkpoint.keep or len(intact)
        for name in intact[keep:] + self.damaged:
            remove_checkpoint(self.store, name)
        self.damaged = []

    def _on_rank_0(self, step: Callable[[], Any]) -> Callable[[], Any]:
        return step if self.ranks.rank == 0 else lambda: None


def load_model(folder_or_checkpoint: str | Path, model: nn.Module) -> Manifest:
    """Fill `model` in this process from the newest intact checkpoint; returns its manifest.

    `folder_or_checkpoint` is a run folder, a folder of checkpoints or a single checkpoint; one written by stock
    DCP (with its model under the key `model`) will do, and has an empty manifest. Values are converted to the
    model's types. Raises CheckpointError.
    """
    store, names = _locate(folder_or_checkpoint)

    def fill(store: Store, name: str, manifest: Manifest, metadata: Metadata) -> None:
        _fill_model(store, name, metadata, [model])

    _, manifest, _ = load_newest(store, names, Ranks(), fill, lambda manifest: None)
    return manifest


# ---------------------------------------------------------------- finding, checking, removing


def committed(store: Store) -> list[str]:
    """Names of the checkpoints in `store` that have a manifest, newest first."""
    folders = {file.removesuffix(f"/{MANIFEST}") for file in store.sizes() if file.endswith(f"/{MANIFEST}")}
    return sorted((folder for folder in folders if step_of(folder) is not None), reverse=True)


def load_newest(
    store: Store,
    names: Sequence[str],
    ranks: Ranks,
    fill: Callable[[Store, str, Manifest, Metadata], None],
    check: Callable[[Manifest], None],
) -> tuple[str, Manifest, list[str]]:
    """`fill` from the first of `names` that is intact: (its name, its manifest, names of the damaged before it).

    Collective; all ranks take the same one. Raises CheckpointError if none is intact.
    """
    damaged: list[str] = []
    for name in names:
        try:
            manifest = _load_one(store, name, ranks, fill, check)
        except DamagedError as error:
            damaged.append(name)
            reason = error
            if ranks.rank == 0:
                logger.warning(f"checkpoint damaged, passed over: {error}")
        else:
            return name, manifest, damaged
    raise CheckpointError(
        f"{store.url}: none of its {len(names)} checkpoints is intact ({', '.join(damaged)}); the last one: {reason}. "
        "Nothing was started anew: name another checkpoint.folder or run.folder to do so"
    )


def _load_one(
    store: Store,
    name: str,
    ranks: Ranks,
    fill: Callable[[Store, str, Manifest, Metadata], None],
    check: Callable[[Manifest], None],
) -> Manifest:
    """Rank 0 reads manifest and index, all ranks fill from the same ones. Raises the same error on all."""
    opened = ranks.together(lambda: _open(store, name) if ranks.rank == 0 else ({}, b""))
    manifest, pickled = ranks.broadcast(opened)
    check(manifest)
    ranks.together(lambda: fill(store, name, manifest, unpickle_metadata(pickled)))
    return manifest


def check_identity(manifest: Manifest, identity: dict[str, Any]) -> None:
    """Raises CheckpointError naming what differs where a checkpoint is of another model."""
    theirs = manifest.get("identity", identity)
    different = [
        f"{key} = {theirs.get(key)!r}, here {identity.get(key)!r}"
        for key in sorted(theirs.keys() | identity.keys())
        if theirs.get(key) != identity.get(key)
    ]
    if different:
        raise CheckpointError(f"the checkpoint of step {manifest['step']} is of another model: {'; '.join(different)}")


def remove_checkpoint(store: Store, name: str) -> None:
    """Remove checkpoint `name`, its manifest first, so that no half of it ever passes for a whole."""
    files = sorted(store.sizes(name), key=lambda file: not file.endswith(f"/{MANIFEST}"))
    store.remove(files)


def _open(store: Store, name: str) -> tuple[Manifest, bytes]:
    """Manifest and pickled index of a checkpoint; a stock one has an empty manifest."""
    stock = not name and MANIFEST not in store.sizes()
    manifest = {} if stock else read_manifest(store, name)
    return manifest, read_metadata(store, name, manifest or None)


def _locate(place: str | Path) -> tuple[Store, list[str]]:
    """(store, names of its checkpoints, newest first) of a run folder, a folder of checkpoints or one checkpoint."""
    for url in (str(place), join(place, "checkpoints")):
        store = open_store(url)
        if {MANIFEST, METADATA} & store.sizes().keys():
            return store, [""]
        names = committed(store)
        if names:
            return store, names
    raise CheckpointError(f"{place}: no checkpoint here, nor in its folder `checkpoints`")


def _fill_model(store: Store, name: str, metadata: Metadata, model: Sequence[nn.Module]) -> None:
    state = {"model": model_tensors(model)}
    _check_same_model(join(store.url, name), state, metadata)
    read_state(store, name, metadata, state)


def _check_same_model(place: str, state: State, metadata: Metadata) -> None:
    """Raises CheckpointError where the checkpoint has weights that the model has not."""
    extra = sorted(tensors_in(metadata, "model.") - {f"model.{name}" for name in state["model"]})
    if extra:
        raise CheckpointError(f"{place}: has {len(extra)} tensors that the model has not, such as {extra[0]}")


def _jsonable(value: dict[str, Any]) -> dict[str, Any]:
    """`value` as it comes back from JSON: tuples are lists, keys are strings."""
    return json.loads(json.dumps(value))
