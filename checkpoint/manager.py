"""When checkpoints are written, which are kept, and from which one a run resumes."""

import dataclasses
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.stateful import Stateful
from torch.utils._pytree import tree_map

from checkpoint.index import Opened
from checkpoint.loading import check_identity, check_same_names, load_newest, locate, open_one
from checkpoint.manifest import (
    MANIFEST,
    METADATA,
    ROTARY,
    Manifest,
    encode_manifest,
    read_manifest,
    read_metadata,
)
from checkpoint.names import (
    age_seconds,
    by_step,
    files_of,
    is_same_run,
    new_checkpoint_name,
    rename_command,
    run_name,
    step_of,
)
from checkpoint.planning import Plan, State, plan_save, resolver
from checkpoint.ranks import Ranks, build_ranks
from checkpoint.retention import (
    Neighbours,
    by_age,
    check_room,
    committed,
    finished,
    meet_neighbours,
    never_committed,
    remove_checkpoints,
    savers,
    superfluous,
    unfinished,
)
from checkpoint.staging import Staging
from checkpoint.state import (
    allocate_optimizer_state,
    held_bytes,
    model_tensors,
    optimizer_tensors,
    parameters,
    random_state,
    set_random_state,
)
from checkpoint.storage import Written, commit, copy_pieces, pieces_of, read_state, tensors_in, write_items
from checkpoint.stores import CheckpointError, DamagedError, LocalStore, Store, join, open_store
from config import Checkpoint, Config, ConfigError, TitaniteError, to_toml

SAVED = ".saved"  # in the run's folder: names the last committed checkpoint
OUTER = ".outer_momentum"
LOWEST_PRIORITY = 19  # a `nice` value

logger = logging.getLogger(__name__)


def check_initial_load(
    settings: Checkpoint,
    identity: dict[str, Any],
    run_folder: Path,
    check: Callable[[Opened], object] = lambda opened: None,
) -> None:
    """Refuse a new run whose `initial_load` has no checkpoint, one of another model, or one that `check` refuses.

    For rank 0, before anything is written. A run with checkpoints of its own no longer uses `initial_load`. Raises
    CheckpointError.
    """
    if not settings.initial_load:
        return
    if settings.enable and any(map(committed, _open_stores(settings, run_folder))):
        return

    def fits(opened: Opened) -> None:
        check_identity(opened.manifest, _jsonable(identity))
        check(opened)

    try:
        load_newest(locate(settings.initial_load, settings), Ranks(), fits)
    except TitaniteError as error:
        raise CheckpointError(f"checkpoint.initial_load: {error}") from None


def check_places(settings: Checkpoint, run_folder: Path) -> None:
    """Refuse to start if checkpoints cannot be written to either place. Raises CheckpointError.

    For rank 0, before anything else is written: the first save may be hours away.
    """
    if not _writes(settings):
        return
    for key, store in zip(("folder", "upload"), _open_stores(settings, run_folder), strict=False):
        try:
            store.check_writable()
        except CheckpointError as error:
            raise CheckpointError(f"checkpoint.{key} = {store.url!r}: cannot be written to: {error}") from None


def check_owner(settings: Checkpoint, run_folder: Path) -> None:
    """Refuse to save where the newest checkpoint whose manifest can be read is another run's. Raises ConfigError.

    For rank 0, before anything is written.
    """
    stores = _open_stores(settings, run_folder) if _writes(settings) else []
    for key, store in zip(("folder", "upload"), stores, strict=False):
        names = [] if _is_default(store, run_folder) else finished(store.sizes())
        asked = (savers(store, [name]) for name in sorted(names, key=by_step, reverse=True))
        for name, other in next(filter(None, asked), {}).items():
            if not is_same_run(other, run_name(run_folder)):
                raise ConfigError(
                    f"checkpoint.{key} = {store.url!r}: its newest checkpoint, {name}, was saved by another run, "
                    f"{other}: set another checkpoint.{key}. To start from its weights, set also "
                    f"checkpoint.initial_load = {store.url!r}. If this is that run, only moved or renamed, start it "
                    f"with --run.folder={run_folder} after: {rename_command(run_folder, other)}"
                )


def check_steps(config: Config, run_folder: Path) -> None:
    """Refuse to resume a run that is beyond training.steps. Raises ConfigError.

    For rank 0, before anything is written.
    """
    found = by_age(_open_stores(config.checkpoint, run_folder)) if config.checkpoint.enable else []
    if found and (newest := step_of(found[0][1]) or 0) > config.training.steps:
        raise ConfigError(
            f"training.steps = {config.training.steps}: this run has reached step {newest}, "
            f"{join(found[0][0].url, found[0][1])}: set {newest} or more, or another run.folder"
        )


@dataclass(frozen=True)
class Save:
    """Everything needed to write one save, independent of what training does meanwhile."""

    name: str
    plan: Plan
    facts: Manifest
    resolve: Callable[[WriteItem], Tensor]
    started: float


class CheckpointManager:
    """The checkpoints of one run. All methods but `check` are collective: every rank calls them at the same step."""

    def __init__(
        self,
        config: Config,
        run_folder: Path,
        model: Sequence[nn.Module],
        optimizer: torch.optim.Optimizer,
        dataloader: Stateful,
        identity: dict[str, Any],
        *,
        on_commit: Callable[[int], None] = lambda step: None,
        on_progress: Callable[[], None] = lambda: None,
        on_begin: Callable[[str], None] = lambda section: None,
    ) -> None:
        """`identity` (JSON-able) says what the model is. A checkpoint with another identity is refused.

        `dataloader` knows its place in the data: a small JSON-able dict, the same on all ranks.

        `on_commit` is called on every rank with the step of each committed checkpoint; in mode `async` the background
        thread calls it. Any thread calls `on_progress` as bytes are written, read or uploaded. `on_begin` is called
        with "load" or "checkpoint" as one begins.
        """
        self.config, self.settings = config, config.checkpoint
        self.model, self.optimizer, self.dataloader = model, optimizer, dataloader
        self.identity = _jsonable(identity)
        self.on_commit, self.on_progress, self.on_begin = on_commit, on_progress, on_begin
        self.ranks = build_ranks(self.settings.timeout_seconds)
        self.stores = _open_stores(self.settings, run_folder)
        self.store = self.stores[0]
        self.upload_store = self.stores[1] if self.settings.upload else None
        self.model_bytes = self._gather_model_bytes()
        self.run_folder, self.saved_file = run_folder, run_folder / SAVED
        self.run = self.ranks.from_rank_0(lambda: run_name(run_folder))
        self.savers = dict[str, str]()  # on rank 0: checkpoint → its run, of those asked about and those saved since
        self.began, self.known = time.time(), set[str]()  # `known`: this run's checkpoints; both used on rank 0
        self.newest_step: int | None = None  # of the last save or load
        self.damaged: set[tuple[str, str]] = set()  # (url, name) found while loading; removed after the next commit
        self.stranded: set[str] = set()  # on rank 0: checkpoints on other machines' disks, newer than those it sees
        self.under_way: Future[None] | None = None
        self.state_checked = False
        self.staging = Staging(next(model[0].parameters()).device)
        if self.settings.mode == "async":
            optimizer.register_step_pre_hook(lambda *_: self.staging.wait())
        self.planned: tuple[Any, Plan] | None = None

    # ------------------------------------------------------------ load

    def load(self) -> int:
        """Resume from the newest intact checkpoint of this run, or start from `initial_load`. Returns the step.

        Returns 0 if the run has no checkpoint. Restores model, optimizer and place in the data, and at the same world
        size the random states. If a checkpoint is damaged, logs it and takes the one before. Raises CheckpointError if
        none is intact, if one is of another model, or if the disk has no room for those to come; ConfigError if
        machines have disks of their own and no place that they share.
        """
        self.on_begin("load")
        self.wait()
        neighbours = self._meet_neighbours()
        if not self.settings.enable:
            self._load_initial()
            return 0
        candidates = self._agreed(partial(self._find, neighbours))
        is_full = self._check_room(neighbours.disk)
        if not candidates:
            self._load_initial()
            if self.settings.save_initial:
                self.save(0)
            return 0
        if self.upload_store and self.ranks.broadcast(bool(neighbours.others)):
            candidates = self._upload_newest(self.upload_store, candidates)
        advice = ". To start a new run instead, set another run.folder"
        fill = partial(self._fill, random_state())
        opened, _, self.damaged = load_newest(candidates, self.ranks, fill, advice)
        self.dataloader.load_state_dict(opened.manifest["dataloader"])
        logger.info(f"resumed from {opened.url}, world size {opened.manifest['world_size']} then")
        self.newest_step = opened.manifest["step"]
        if is_full:  # the start before was killed after a commit and before the removal that makes room
            self._remove_superfluous(self.store, opened.name, is_newer=False)
        if self.upload_store and (self.upload_store, opened.name) not in candidates:  # an earlier start was cut off
            all_ranks = dict.fromkeys(opened.index.files, range(self.ranks.size))
            pieces = pieces_of(opened.index, self.ranks.rank, all_ranks)
            self._start(partial(self._make_up, self.upload_store, opened.name, lambda: pieces))
        return opened.manifest["step"]

    def _upload_newest(self, store: Store, candidates: list[tuple[Store, str]]) -> list[tuple[Store, str]]:
        """Upload the newest candidate to `store` if it is not there yet. Returns the candidates, that copy first.

        Each rank copies files of its own disk. On nodes' own disks no rank finds all that it reads: the optimizer's
        step, for example, is written by one rank for all.
        """
        newest = candidates[0][1]

        def pieces() -> Written:
            _, index = self.ranks.from_rank_0(lambda: open_one(self.store, newest))
            here = self.ranks.together(lambda: self.store.sizes(newest).keys())
            seen = self.ranks.broadcast(self.ranks.gather(set(here)))
            paths = {file: f"{newest}/{file}" for file in index.files}
            holders = {file: [rank for rank, disk in enumerate(seen) if path in disk] for file, path in paths.items()}
            return pieces_of(index, self.ranks.rank, {file: ranks or [0] for file, ranks in holders.items()})

        is_new = (store, newest) not in candidates and self._make_up(store, newest, pieces)
        return [(store, newest), *candidates] if is_new else candidates

    def _find(self, neighbours: Neighbours) -> list[tuple[Store, str]]:
        """The checkpoints of this run, newest first. Raises CheckpointError if none is seen although one was saved."""
        known = last = ""
        if self.saved_file.is_file():  # its existence is enough: a kill may have cut its text
            last = self.saved_file.read_text(encoding="utf-8", errors="replace")
            known = f"saved {last}"
        if self.newest_step is not None:
            known = f"saved or loaded one of step {self.newest_step}"
        deadline = time.monotonic() + self.settings.visibility_seconds
        while not (found := by_age(self.stores)) and known:
            if time.monotonic() > deadline:
                raise CheckpointError(
                    f"{self.store.url}: no checkpoint found, but this run has {known}; set checkpoint.folder to where "
                    "it is now, or another run.folder for a new run"
                )
            time.sleep(0.2)
        # Rank 0 was on these machines then. Such checkpoints cannot be loaded, as the disks of other ranks have parts.
        newest = found[0][1] if found else ""
        elsewhere = {machine: name for machine, name in neighbours.others.items() if by_step(name) > by_step(newest)}
        self.stranded = set(elsewhere.values())
        for machine, name in elsewhere.items():
            if not found:
                raise CheckpointError(
                    f"{self.store.url}: rank 0 on {socket.gethostname()} finds no checkpoint, but {machine} has "
                    f"{name}, written when rank 0 was on {machine} and not completely uploaded; start with rank 0 on "
                    f"{machine}, or set another run.folder for a new run"
                )
            logger.warning(f"skipped: {name}, written when rank 0 was on {machine} and not completely uploaded")
        name = last.rpartition("/")[2]
        if found and step_of(name) is not None and by_step(name) > by_step(newest):
            places = ", ".join(store.url for store in self.stores)
            logger.warning(f"skipped: {last}, the last checkpoint that this run saved, is not in {places}")
        if self.newest_step is None:
            self.known.update(name for _, name in found)
        else:  # returning to a checkpoint of this start, or to the one it began with
            for store in self.stores:
                self._check_alone(store)
        return found

    def _check_alone(self, store: Store) -> None:
        """Refuse to save beside another run: each would resume from the other's checkpoints and remove them.

        For rank 0. Raises ConfigError, as no restart helps, if another run began and committed one since this start.
        """
        others: list[str] = []
        with suppress(CheckpointError):  # a failed listing stops no run; the removal of old checkpoints will report it
            strange = [name for name in store.folders() - self.known if step_of(name) is not None]
            began = [name for name in strange if age_seconds(name) < time.time() - self.began]
            others = [name for name in sorted(began) if f"{name}/{MANIFEST}" in store.sizes(name)]
        if others:
            whose = "another run"
            with suppress(CheckpointError):  # the other run may have removed it meanwhile
                whose = read_manifest(store, others[0]).get("run", whose)
            raise ConfigError(
                f"{join(store.url, others[0])} was saved by {whose} while this run was training. Two runs must not "
                "save to the same place: each would resume from the other's checkpoints and remove them. This one "
                "ends, and nothing was removed; continue the other, or this one in a folder of its own"
            )

    def _load_initial(self) -> None:
        """Load the weights of `checkpoint.initial_load`, if set, into the model. Collective."""
        if not (place := self.settings.initial_load):
            return

        def fill(opened: Opened) -> None:
            self._check_fits(opened)
            read_state(opened, {"model": model_tensors(self.model)}, self.on_progress)

        opened, *_ = load_newest(self._agreed(lambda: locate(place, self.settings)), self.ranks, fill)
        logger.info(f"model weights loaded from {opened.url}")
        if not opened.manifest:
            logger.info(f"they are stock DCP's, assumed to rotate halves of a head, as ours do; {ROTARY}")

    def _check_fits(self, opened: Opened) -> None:
        check_identity(opened.manifest, self.identity)
        check_same_names(opened, self.model_bytes)

    def _fill(self, before: dict[str, Tensor], opened: Opened) -> None:
        """Load model, optimizer and random states from a checkpoint and check each byte.

        At another world size, sets the random states `before` the load: a damaged checkpoint that was tried first may
        have changed them on some ranks.
        """
        self._check_fits(opened)
        state: State = {"model": model_tensors(self.model)}
        if saved := tensors_in(opened.index, "optimizer."):
            state["optimizer"] = self._optimizer_tensors_of(opened, saved)
        else:  # a checkpoint of step 0; a damaged one that was tried first may have left some state
            self.optimizer.state.clear()
        states = {kind: value.clone() for kind, value in before.items()}
        same_size = opened.manifest["world_size"] == self.ranks.size
        if same_size:
            prefix = f"rng.{self.ranks.rank}."
            states = {kind: value for kind, value in states.items() if tensors_in(opened.index, f"{prefix}{kind}")}
            state["rng"] = {str(self.ranks.rank): states}
        # A rank with its own share is the only reader of its files. The first of several replicas fills the page cache.
        held = held_bytes(state["model"].values()) * self.ranks.size
        alone = same_size and held <= 1.1 * sum(self.model_bytes.values())
        read_state(opened, state, self.on_progress, files_of(self.ranks.rank) if alone else "")
        set_random_state(states)

    def _optimizer_tensors_of(self, opened: Opened, saved: set[str]) -> dict[str, Tensor]:
        """The optimizer's tensors to fill from those in a checkpoint, `saved`. Drops state that it lacks."""
        allocate_optimizer_state(self.optimizer)
        weights = {name: weight for name, weight in parameters(self.model).items() if weight.requires_grad}
        stateful = {key.removeprefix("optimizer.").rpartition(".")[0] for key in saved}
        idle = [weight for weight in weights if weight not in stateful]  # without state at the time of the save
        if not stateful & self.model_bytes.keys():
            raise CheckpointError(f"{opened.url}: its optimizer state belongs to other weights, such as {min(saved)}")
        for weight in idle:
            self.optimizer.state.pop(weights[weight], None)
        if idle:
            lacking = f"has no optimizer state for some weights ({len(idle)}), such as {min(idle)}"
            logger.info(f"{opened.name}: {lacking}; theirs starts empty")
        tensors = optimizer_tensors(self.model, self.optimizer)
        for new in [key for key in tensors if key.endswith(OUTER) and f"optimizer.{key}" not in saved]:
            tensors.pop(new).zero_()  # of the islands: parallelism.local_steps was turned on after the save
        return tensors

    # ------------------------------------------------------------ save

    def finish(self, step: int) -> None:
        """Save the last `step` of this start unless that is done; after the run's last step, the model too if asked."""
        if self.settings.enable and step != self.newest_step:
            self.save(step)
        if self.settings.save_model and step == self.config.training.steps:
            self._save_model(step)

    @torch.no_grad()
    def save(self, step: int) -> None:
        """Write a checkpoint of `step`; in mode `async`, in the background.

        In that mode, weights and moments are copied during the next forward and backward, and the optimizer's next step
        waits for that; all else is taken at once. Waits for the save before: only one is under way at a time. Raises
        CheckpointError on all ranks if this save (`sync`) or the one before was not committed.
        """
        started = time.monotonic()
        self.on_begin("checkpoint")
        self.wait()
        state: State = {
            "model": model_tensors(self.model),
            "optimizer": optimizer_tensors(self.model, self.optimizer),
            "rng": {str(self.ranks.rank): random_state()},
        }
        save = self._prepare(new_checkpoint_name(step), step, state, started)
        if self.settings.mode == "async":
            copy = self.staging.prepare({item.index: save.resolve(item) for file in save.plan.files for item in file})
            staged = dataclasses.replace(save, resolve=lambda item: self.staging.copies[item.index])
            self._start(lambda: self._follow_up(staged, self._write(staged, copy)))
        else:
            written = self._write(save)
            self._start(lambda: self._follow_up(save, written))
        self.newest_step = step

    def _save_model(self, step: int) -> None:
        """Write the weights alone, unless an earlier start has written them to all places."""
        self.wait()
        started = time.monotonic()

        def saved(store: Store) -> bool:
            models = {name for name in finished(store.sizes()) if name.startswith(f"model-{step:08d}-")}
            return any(self._ownership(store, models).values())

        if not self.ranks.from_rank_0(lambda: all(map(saved, self.stores))):
            state: State = {"model": model_tensors(self.model)}
            save = self._prepare(new_checkpoint_name(step, "model"), step, state, started)
            written = self._write(save)
            self._start(lambda: self._follow_up(save, written))

    def last_saved(self) -> int | None:
        """Wait for the save under way. Returns the step of the newest save or load, None if there was none."""
        self.wait()
        return self.newest_step

    def check(self) -> None:
        """Raise the failure of a background save that has ended, or of the first step's state if it cannot be saved.

        Costs almost nothing; call it after every step.
        """
        if self.settings.enable and not self.state_checked:  # the first save may be hours away
            optimizer_tensors(self.model, self.optimizer)
            self.state_checked = True
        if self.under_way is not None and self.under_way.done():
            self.wait()

    def wait(self) -> None:
        """Wait for the background work. Raises its failure."""
        if self.under_way is not None:
            under_way, self.under_way = self.under_way, None
            under_way.result()

    def _prepare(self, name: str, step: int, state: State, started: float) -> Save:
        """Everything that the save of `state` needs. Replans only if names or shapes have changed."""
        shapes = tree_map(lambda tensor: tensor.shape, state)
        changed = self.ranks.gather(self.planned is None or self.planned[0] != shapes)
        name, replan = self.ranks.broadcast((name, any(changed)))  # all ranks or none: a pipeline's stages may differ
        if replan or self.planned is None:
            self.planned = shapes, plan_save(state, self.ranks)
        self.known.add(name)
        self.savers[name] = self.run
        return Save(name, self.planned[1], self._facts(step), resolver(state), started)

    def _write(self, save: Save, before: Callable[[], None] = lambda: None) -> Written:
        """Write and commit a checkpoint. Returns what this rank has written. Collective."""

        def write() -> Written:
            before()
            files = save.plan.files
            written = write_items(self.store, save.name, self.ranks.rank, files, save.resolve, self.on_progress)
            if self.ranks.rank == 0:
                self._check_alone(self.store)
            return written

        try:
            written = self.ranks.together(write)
        except Exception:
            if isinstance(self.store, LocalStore):  # finished files of a failed save would only fill the disk
                with suppress(CheckpointError):
                    own = [file for file in self.store.sizes(save.name) if f"/{files_of(self.ranks.rank)}" in file]
                    self.store.remove(own)
                    self.store.remove_empty([save.name])
            raise
        gathered = self.ranks.gather(written)
        self.ranks.from_rank_0(lambda: commit(self.store, save.name, save.plan, gathered, save.facts))
        if step_of(save.name) is not None:  # a run cannot resume from a model alone
            if self.ranks.rank == 0:
                with suppress(OSError):  # the disk may be full; the checkpoint is safe anyway
                    self.saved_file.write_text(join(self.store.url, save.name), encoding="utf-8")
            self.on_commit(save.facts["step"])
        logger.info(f"checkpoint {save.name} saved in {time.monotonic() - save.started:.1f} s")
        return written

    def _follow_up(self, save: Save, written: Written) -> None:
        """After the commit of `save`, do what training need not wait for."""
        self._remove_superfluous(self.store, save.name)
        if self.upload_store:
            self._upload(self.upload_store, save.name, written, save.started)

    def _upload(self, store: Store, name: str, pieces: Written, started: float, is_newer: bool = True) -> None:
        """Copy a checkpoint to the second place. Every rank copies its own `pieces`; the manifest comes last."""
        if isinstance(store, LocalStore):  # it does not overwrite leftovers of an interrupted upload
            self.ranks.from_rank_0(lambda: remove_checkpoints(store, [name], store.sizes(name)))
        self.ranks.together(lambda: copy_pieces(self.store, store, name, pieces, self.on_progress))

        def finish() -> None:
            manifest = read_manifest(self.store, name)
            self._check_alone(store)
            store.put(f"{name}/{METADATA}", read_metadata(self.store, name, manifest))
            store.put(f"{name}/{MANIFEST}", encode_manifest(manifest))

        self.ranks.from_rank_0(finish)
        logger.info(f"checkpoint {name} uploaded to {store.url} {time.monotonic() - started:.1f} s after its start")
        self._remove_superfluous(store, name, is_newer)

    def _make_up(self, store: Store, name: str, pieces: Callable[[], Written]) -> bool:
        """Upload what an earlier start did not. Damage in parts that no rank needed must not end every start."""
        try:
            self._upload(store, name, pieces(), time.monotonic(), is_newer=False)
            return True
        except DamagedError as error:
            if self.ranks.rank == 0:
                logger.warning(f"{name} was not uploaded to {store.url}, but the next checkpoint will be: {error}")
            return False

    def _remove_superfluous(self, store: Store, saved: str, is_newer: bool = True) -> None:
        """Remove from `store` what is not kept, now that `saved` is committed there.

        Damaged checkpoints, and those only on other machines' disks, go only if `saved` is newer: renumbered ranks or a
        person may still recover them. Another run's stay, and beside them all that was never committed, as it may be
        the other's; so do those whose run is unknown, but for the damaged.
        """
        damaged = {name for url, name in self.damaged if url == store.url}
        spared = set[str]() if is_newer else damaged | self.stranded
        leftover_seconds = 2 * self.settings.timeout_seconds

        def remove() -> tuple[set[str], set[str], bool, str]:
            """On rank 0: (what goes, what stays, whether another run's are there, why if more stays than should)."""
            listed = store.sizes()
            there, begun = finished(listed), unfinished(listed, leftover_seconds)
            leftovers = never_committed(store, begun)
            may_go = leftovers | superfluous(listed, saved, self.settings, damaged)
            owned = self._ownership(store, there if may_go else there & self.savers.keys())
            is_shared = False in owned.values()
            own = {name for name, is_own in owned.items() if is_own or (is_own is None and name in damaged)}
            going = superfluous([f"{name}/{MANIFEST}" for name in own], saved, self.settings, damaged)
            going = (going if is_shared else going | leftovers) - spared
            stay = (there | begun | {saved}) - going | spared  # a listing may not show `saved` yet
            try:
                if not is_shared:
                    store.abort_uploads(leftover_seconds)
            except CheckpointError as error:
                logger.warning(f"unfinished uploads could not be removed: {error}")
            try:
                remove_checkpoints(store, going, listed)
            except CheckpointError as error:
                return going, stay | finished(store.sizes()), is_shared, str(error)
            return going, stay, is_shared, ""

        def remove_here(disk: LocalStore) -> None:
            here = disk.folders()
            here &= (going if is_shared else going | unfinished(here, leftover_seconds)) - stay
            remove_checkpoints(disk, here, [file for name in here for file in disk.sizes(name)])
            disk.remove_empty(here)

        # An old checkpoint that stays need not stop the run, but must not stay unnoticed.
        try:
            going, stay, is_shared, trouble = self.ranks.from_rank_0(remove)
            if isinstance(store, LocalStore):  # nodes' own disks after rank 0's, the only one with manifests
                self.ranks.together(partial(remove_here, store))
            if trouble:
                raise CheckpointError(trouble)
            if is_newer:
                self.damaged = {(url, name) for url, name in self.damaged if url != store.url}
        except CheckpointError as error:
            if self.ranks.rank == 0:
                logger.warning(f"old checkpoints could not be removed: {error}")

    def _ownership(self, store: Store, names: Collection[str]) -> dict[str, bool | None]:
        """Whether this run saved each of these committed checkpoints, None if that is unknown. For rank 0.

        Reads each manifest but once, and none of this start's own saves.
        """
        if _is_default(store, self.run_folder):
            return dict.fromkeys(names, True)
        self.savers |= savers(store, set(names) - self.savers.keys())
        known = {name: is_same_run(run, self.run) for name, run in self.savers.items()}
        return {name: known.get(name) for name in names}

    def _start(self, work: Callable[[], object]) -> None:
        """Run `work` in a daemon thread, so that a run that fails for another reason does not wait for it."""
        future: Future[None] = Future()

        def run() -> None:
            # Training gets the cores first. On Linux this affects only this thread and those it starts.
            with suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOWEST_PRIORITY)
            try:
                work()
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(None)

        threading.Thread(target=run, name="checkpoint", daemon=True).start()
        self.under_way = future

    # ------------------------------------------------------------ parts

    def _facts(self, step: int) -> Manifest:
        """The manifest's entries on this checkpoint other than its files."""
        return {
            "step": step,
            "world_size": self.ranks.size,
            "run": self.run,
            "identity": self.identity,
            "dataloader": _jsonable(self.dataloader.state_dict()),
            "config": to_toml(self.config),
        }

    def _gather_model_bytes(self) -> dict[str, int]:
        """Name → bytes of every whole tensor of the model, over the parts on all ranks. Collective."""
        own = {name: value.numel() * value.itemsize for name, value in model_tensors(self.model).items()}
        parts = self.ranks.gather(own)
        return self.ranks.broadcast({name: size for part in parts for name, size in part.items()})

    def _meet_neighbours(self) -> Neighbours:
        """Find which ranks share rank 0's disk, if the first place is a disk. Collective.

        Raises ConfigError if the last place is not shared: ranks arranged differently would not find all parts there.
        """
        if not _writes(self.settings):
            return Neighbours("", {})
        last, wait = self.stores[-1], self.settings.visibility_seconds
        met = [meet_neighbours(store, self.ranks, wait if store is last else 0) for store in self.stores]
        others = met[-1].others

        def check() -> None:
            if others:
                key = "upload" if self.upload_store else "folder"
                raise ConfigError(
                    f"checkpoint.{key} = {last.url!r}: {socket.gethostname()}, where rank 0 is, and "
                    f"{', '.join(sorted(others))} have disks of their own there, so each would hold a part of every "
                    "checkpoint, which would be lost when ranks are renumbered; set it to a folder that all machines "
                    "share, or set checkpoint.upload to such a folder or to s3://bucket/prefix"
                )

        self.ranks.from_rank_0(check)
        return met[0]

    def _check_room(self, disk: str) -> bool:
        """If the first store is a disk, check its room for weights, moments and, with islands, the outer momentum.

        Returns whether an old checkpoint must go before the next is written. Raises CheckpointError.
        """
        if isinstance(self.store, LocalStore):
            moments = 1 if self.config.optimizer.state_dtype == "bfloat16" else 2  # in sizes of the weights
            outer = 1 if self.config.parallelism.local_steps else 0
            rank_bytes = (1 + moments + outer) * sum(self.model_bytes.values()) // self.ranks.size
            ownership = partial(self._ownership, self.store)
            return check_room(self.store, self.ranks, disk, rank_bytes, self.settings, ownership, self.stranded)
        return False

    def _agreed(self, find: Callable[[], list[tuple[Store, str]]]) -> list[tuple[Store, str]]:
        """What `find` returns on rank 0, on every rank. Collective."""
        agreed = self.ranks.from_rank_0(lambda: [(store.url, name) for store, name in find()])
        stores = {store.url: store for store in self.stores}
        stores |= {url: open_store(url, self.settings) for url in {url for url, _ in agreed} - stores.keys()}
        return [(stores[url], name) for url, name in agreed]


def _writes(settings: Checkpoint) -> bool:
    return settings.enable or settings.save_model


def _open_stores(settings: Checkpoint, run_folder: Path) -> list[Store]:
    """The places of a run's checkpoints: the first, and the second if there is one."""
    places = [settings.folder or run_folder / "checkpoints", settings.upload]
    return [open_store(place, settings) for place in places if place]


def _is_default(store: Store, run_folder: Path) -> bool:
    """Whether a place is the run's own folder for checkpoints. All there is its own, even if both were moved."""
    return Path(store.url).absolute() == (run_folder / "checkpoints").absolute()


def _jsonable(value: dict[str, Any]) -> dict[str, Any]:
    """`value` after a round trip through JSON: tuples become lists, keys become strings."""
    return json.loads(json.dumps(value))
