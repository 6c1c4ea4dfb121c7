"""When checkpoints are written, which are kept, and from which one a run resumes."""

import dataclasses
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
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

from checkpoint import CheckpointError
from checkpoint.branch import Parent, find_fork, read_parent, record_parent
from checkpoint.checks import check_shared, is_own_folder
from checkpoint.files import Written, commit, copy_commit, copy_files, read_state, tensors_in, write_items
from checkpoint.loading import by_age, check_identity, check_same_names, load_newest, locate, open_stores, store_waits
from checkpoint.manifest import ROTARY, Manifest, Opened, jsonable
from checkpoint.names import by_step, file_of, new_checkpoint_name, run_name, step_of
from checkpoint.planning import FILES, Plan, State, plan_save, resolver
from checkpoint.ranks import build_ranks
from checkpoint.retention import Retention, finished
from checkpoint.staging import Staging
from checkpoint.state import (
    allocate_optimizer_state,
    model_tensors,
    optimizer_tensors,
    parameters,
    random_state,
    set_random_state,
)
from config import Config, to_toml
from data.ledger import saved_place
from storage import LocalStore, Store, StoreError, join, open_store

SAVED = ".saved"  # in the run's folder: names the last committed checkpoint
OUTER = ".outer_momentum"
LOWEST_PRIORITY = 19  # a `nice` value

logger = logging.getLogger(__name__)


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
        self.identity = jsonable(identity)
        self.on_commit, self.on_progress, self.on_begin = on_commit, on_progress, on_begin
        self.ranks = build_ranks(self.settings.timeout_seconds)
        self.stores = open_stores(config, run_folder)
        self.store, self.upload_store = self.stores[0], self.stores[1] if self.settings.upload else None
        self.model_bytes = self._gather_model_bytes()
        self.run_folder, self.saved_file = run_folder, run_folder / SAVED
        self.parent: dict[str, Any] | None = None  # where this run branched from
        self.run = self.ranks.from_rank_0(lambda: run_name(run_folder))
        self.retention = {  # used on rank 0
            store.url: Retention(store, self.run, self.settings, is_own_folder(store, run_folder))
            for store in self.stores
        }
        self.newest_step: int | None = None  # of the last save or load
        self.damaged: set[tuple[str, str]] = set()  # (url, name) found while loading; removed after the next commit
        self.under_way: Future[None] | None = None
        self.state_checked = False
        self.staging = Staging(next(model[0].parameters()).device)
        if self.settings.mode == "async":
            optimizer.register_step_pre_hook(lambda *_: self.staging.wait())
        self.planned: tuple[Any, Plan] | None = None

    # ------------------------------------------------------------ load

    def load(self) -> int:
        """Resume from the newest intact checkpoint of this run, or begin by `branch_from` or `initial_load`.

        Returns the step, 0 for a new run that is no branch. Restores model, optimizer and place in the data, and at the
        same world size the random states. If a checkpoint is damaged, logs it and takes the one before. Raises
        CheckpointError if none is intact or one is of another model; StoreError if the disk has no room for those to
        come; ConfigError if a folder is not shared by all ranks.
        """
        self.on_begin("load")
        self.wait()
        if self.settings.enable or self.settings.save_model:
            check_shared(self.stores, self.ranks, self.settings.visibility_seconds)
        if not self.settings.enable:
            self._load_initial()
            return 0
        own = self._agreed(self._find)
        is_full = self.ranks.from_rank_0(lambda: self.retention[self.store.url].check_room(self._checkpoint_bytes()))
        if candidates := own or self._agreed(self._find_fork):
            advice = ". To start a new run instead, set another run.folder"
            fill = partial(self._fill, random_state())
            opened, _, self.damaged = load_newest(candidates, self.ranks, fill, advice)
            self.dataloader.load_state_dict(opened.manifest["dataloader"])
            what = "resumed" if own else "branched"
            logger.info(f"{what} from {opened.url}, world size {opened.manifest['world_size']} then")
            self.newest_step = opened.manifest["step"]
            began = opened.manifest.get("parent") if own else self._fork(opened.manifest)
            self.parent = self.ranks.from_rank_0(lambda: record_parent(self.run_folder, began))
        else:
            self._load_initial()
        if is_full and self.ranks.rank == 0:  # killed saves, or a kill after a commit, left what would fill the disk
            self.retention[self.store.url].tidy(opened.name if own else new_checkpoint_name(0), (), 0)
        if not own and self.settings.save_initial:
            self.save(self.newest_step or 0)
        return self.newest_step or 0

    def _find(self) -> list[tuple[Store, str]]:
        """The checkpoints of this run, newest first. Raises CheckpointError if none is seen although one was saved."""
        has_saved = self.saved_file.is_file()  # which is enough: a kill may have cut its text
        last = self.saved_file.read_text(encoding="utf-8", errors="replace") if has_saved else ""
        deadline = time.monotonic() + self.settings.visibility_seconds
        while not (found := by_age(self.stores)) and has_saved:
            if time.monotonic() > deadline:
                raise CheckpointError(
                    f"{self.store.url}: no checkpoint found, but this run has saved {last or 'one'}; set "
                    "checkpoint.folder to where it is now, or another run.folder for a new run"
                )
            time.sleep(0.2)
        name = last.rpartition("/")[2]
        if found and step_of(name) is not None and by_step(name) > by_step(found[0][1]):
            places = ", ".join(store.url for store in self.stores)
            logger.warning(f"skipped: {last}, the last checkpoint that this run saved, is not in {places}")
        return found

    def _find_fork(self) -> list[tuple[Store, str]]:
        """The checkpoints of another run that this one branches from, newest first; none if it is no branch."""
        place, step = find_fork(self.settings.branch_from, read_parent(self.run_folder))
        return locate(place, *store_waits(self.config), step=step) if place else []

    def _fork(self, manifest: Manifest) -> dict[str, Any]:
        """The Parent of this run, by the manifest of the checkpoint that it begins from."""
        place, tokens = find_fork(self.settings.branch_from)[0], saved_place(manifest["dataloader"]).tokens
        return Parent(place, manifest["step"], manifest.get("run", ""), tokens)._asdict()

    def _load_initial(self) -> None:
        """Load the weights of `checkpoint.initial_load`, if set, into the model. Collective."""
        if not (place := self.settings.initial_load):
            return

        def fill(opened: Opened) -> None:
            self._check_fits(opened)
            read_state(opened, {"model": model_tensors(self.model)}, self.on_progress)

        opened, *_ = load_newest(self._agreed(lambda: locate(place, *store_waits(self.config))), self.ranks, fill)
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
        if saved := tensors_in(opened.metadata, "optimizer."):
            state["optimizer"] = self._optimizer_tensors_of(opened, saved)
        else:  # a checkpoint of step 0; a damaged one that was tried first may have left some state
            self.optimizer.state.clear()
        states = {kind: value.clone() for kind, value in before.items()}
        if opened.manifest["world_size"] == self.ranks.size:
            prefix = f"rng.{self.ranks.rank}."
            states = {kind: value for kind, value in states.items() if tensors_in(opened.metadata, f"{prefix}{kind}")}
            state["rng"] = {str(self.ranks.rank): states}
        read_state(opened, state, self.on_progress)
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
        waits for that; the rest is taken at once. Waits for the save before: only one is under way at a time. Raises
        the error on all ranks if this save (`sync`) or the one before was not committed.
        """
        self.on_begin("checkpoint")
        self.wait()
        state: State = {
            "model": model_tensors(self.model),
            "optimizer": optimizer_tensors(self.model, self.optimizer),
            "rng": {str(self.ranks.rank): random_state()},
        }
        save = self._prepare("step", step, state)
        if self.settings.mode == "async":
            copy = self.staging.prepare({item.index: save.resolve(item) for file in save.plan.files for item in file})
            staged = dataclasses.replace(save, resolve=lambda item: self.staging.copies[item.index])
            self._start(lambda: self._follow_up(staged, self._write(staged, copy)))
        else:
            self._start(partial(self._follow_up, save, self._write(save)))
        self.newest_step = step

    def _save_model(self, step: int) -> None:
        """Write the weights alone, unless an earlier start has written them to all places."""
        self.wait()

        def is_saved(store: Store) -> bool:
            models = (name for name in finished(store.sizes()) if name.startswith(f"model-{step:08d}-"))
            return any(map(self.retention[store.url].owns, models))

        if not self.ranks.from_rank_0(lambda: all(map(is_saved, self.stores))):
            save = self._prepare("model", step, {"model": model_tensors(self.model)})
            self._start(partial(self._follow_up, save, self._write(save)))

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

    def _prepare(self, kind: str, step: int, state: State) -> Save:
        """Everything that the save of `state` needs. Replans only if names or shapes have changed."""
        started, shapes = time.monotonic(), tree_map(lambda tensor: tensor.shape, state)
        changed = self.ranks.gather(self.planned is None or self.planned[0] != shapes)
        # All ranks replan or none: a pipeline's stages may differ.
        name, replan = self.ranks.broadcast((new_checkpoint_name(step, kind), any(changed)))
        if replan or self.planned is None:
            self.planned = shapes, plan_save(state, self.ranks)
        facts = {
            "step": step,
            "world_size": self.ranks.size,
            "run": self.run,
            "identity": self.identity,
            "dataloader": jsonable(self.dataloader.state_dict()),
            "parent": self.parent,
            "config": to_toml(self.config),
        }
        return Save(name, self.planned[1], facts, resolver(state), started)

    def _write(self, save: Save, before: Callable[[], None] = lambda: None) -> Written:
        """Write and commit a checkpoint. Returns what this rank has written. Collective."""

        def write() -> Written:
            before()
            files = save.plan.files
            return write_items(self.store, save.name, self.ranks.rank, files, save.resolve, self.on_progress)

        try:
            written = self.ranks.together(write)
        except Exception:
            if isinstance(self.store, LocalStore):  # finished files of a failed save would only fill the disk
                with suppress(StoreError):
                    self.store.remove([f"{save.name}/{file_of(self.ranks.rank, number)}" for number in range(FILES)])
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
        self._tidy(self.store, save.name)
        if self.upload_store:
            self._upload(self.upload_store, save, written)

    def _upload(self, store: Store, save: Save, written: Written) -> None:
        """Copy a checkpoint to the second place. Every rank copies what it has `written`; the manifest comes last."""
        self.ranks.together(lambda: copy_files(self.store, store, save.name, written, self.on_progress))

        self.ranks.from_rank_0(lambda: copy_commit(self.store, store, save.name))
        seconds = time.monotonic() - save.started
        logger.info(f"checkpoint {save.name} uploaded to {store.url} {seconds:.1f} s after its start")
        self._tidy(store, save.name)

    def _tidy(self, store: Store, saved: str) -> None:
        """Remove from `store` what is not kept, now that `saved` is committed there."""
        if self.ranks.rank == 0:
            self.retention[store.url].savers[saved] = self.run
            self.retention[store.url].tidy(saved, {name for url, name in self.damaged if url == store.url})
        self.damaged = {(url, name) for url, name in self.damaged if url != store.url}

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

    def _gather_model_bytes(self) -> dict[str, int]:
        """Name → bytes of every whole tensor of the model, over the parts on all ranks. Collective."""
        own = {name: value.numel() * value.itemsize for name, value in model_tensors(self.model).items()}
        parts = self.ranks.gather(own)
        return self.ranks.broadcast({name: size for part in parts for name, size in part.items()})

    def _checkpoint_bytes(self) -> int:
        """About the size of a checkpoint: weights, moments and, with islands, the outer momentum."""
        moments = 1 if self.config.optimizer.state_dtype == "bfloat16" else 2  # in sizes of the weights
        outer = 1 if self.config.parallelism.local_steps else 0
        return (1 + moments + outer) * sum(self.model_bytes.values())

    def _agreed(self, find: Callable[[], list[tuple[Store, str]]]) -> list[tuple[Store, str]]:
        """What `find` returns on rank 0, on every rank. Collective."""
        agreed = self.ranks.from_rank_0(lambda: [(store.url, name) for store, name in find()])
        stores = {store.url: store for store in self.stores}
        new = {url for url, _ in agreed} - stores.keys()
        stores |= {url: open_store(url, *store_waits(self.config)) for url in new}
        return [(stores[url], name) for url, name in agreed]
