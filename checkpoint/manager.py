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
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.stateful import Stateful
from torch.utils._pytree import tree_map

from checkpoint import CheckpointError, files, loading
from checkpoint.branch import Parent, find_fork, read_parent, record_parent
from checkpoint.checks import check_shared
from checkpoint.files import Plan, State, Written, read_state, tensors_in
from checkpoint.loading import load_newest, locate, store_waits
from checkpoint.manifest import Manifest, Opened, by_step, jsonable, new_checkpoint_name, run_name, step_of
from checkpoint.ranks import Ranks
from checkpoint.retention import Retention, check_room, committed, finished
from checkpoint.state import Staging, model_tensors, optimizer_tensors, random_state, set_random_state, tensors_to_fill
from config import Config, to_toml
from data.ledger import saved_place
from records import write_atomically
from storage import Store, join, open_store

SAVED = ".saved"  # in the run's folder: names the last committed checkpoint
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

        `dataloader` knows its place in the data: a small JSON-able dict, the same on all ranks. `on_commit` is called
        on every rank with the step of each committed checkpoint, by the background thread in mode `async`. Any thread
        calls `on_progress` as bytes move. `on_begin` is called with "load" or "checkpoint" as one begins.
        """
        self.config, self.settings = config, config.checkpoint
        self.model, self.optimizer, self.dataloader = model, optimizer, dataloader
        self.identity = jsonable(identity)
        self.on_commit, self.on_progress, self.on_begin = on_commit, on_progress, on_begin
        # Over their own group of gloo: nothing goes through the accelerator, nor between training's collectives.
        wait = timedelta(seconds=self.settings.timeout_seconds)
        self.ranks = Ranks(dist.new_group(backend="gloo", timeout=wait)) if dist.is_initialized() else Ranks()
        self.stores = loading.open_stores(config, run_folder)
        self.store = self.stores["folder"]
        sizes = self.ranks.gather_object({name: value.nbytes for name, value in model_tensors(model).items()}) or []
        # Name → bytes of every whole tensor of the model, over the parts on all ranks.
        self.model_bytes: dict[str, int] = self.ranks.broadcast_object({k: v for own in sizes for k, v in own.items()})
        self.run_folder, self.saved_file = run_folder, run_folder / SAVED
        self.parent: dict[str, Any] | None = None  # where this run branched from
        self.run = self.ranks.from_rank_0(lambda: run_name(run_folder))
        self.retention = {k: Retention(k, store, self.run, self.settings) for k, store in self.stores.items()}  # rank 0
        self.newest_step: int | None = None  # of the last save or load
        self.under_way: Future[object] | None = None
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
        TitaniteError if none is intact, one is of another model, the disk has no room, or ranks do not share a folder.
        """
        self.on_begin("load")
        self.wait()
        if not self.settings.enable:
            self._load_initial()
            return 0
        for key, store in self.stores.items():
            check_shared(key, store, self.ranks)
        own = self._agreed(self._find)
        moments = 1 if self.config.optimizer.state_dtype == "bfloat16" else 2  # of the weights' size; islands: one more
        needed = (1 + moments + bool(self.config.parallelism.local_steps)) * sum(self.model_bytes.values())
        self.ranks.from_rank_0(lambda: check_room(self.store, self.settings, needed))
        if candidates := own or self._agreed(self._find_fork):
            advice = ". To start a new run instead, set another run.folder"
            opened, _, damaged = load_newest(candidates, self.ranks, self._fill, advice)
            self.dataloader.load_state_dict(opened.manifest["dataloader"])
            what = "resumed" if own else "branched"
            logger.info(f"{what} from {opened.url}, world size {opened.manifest['world_size']} then")
            self.newest_step = opened.manifest["step"]
            began = opened.manifest.get("parent")
            if not own:
                place, _ = find_fork(self.settings.branch_from)
                tokens = saved_place(opened.manifest["dataloader"]).tokens
                began = Parent(place, opened.manifest["step"], opened.manifest.get("run", ""), tokens)._asdict()
            self.parent = self.ranks.from_rank_0(lambda: record_parent(self.run_folder, began))
        else:
            self._load_initial()
        if self.ranks.is_coordinator:  # killed saves, or a kill after a commit, have left what may fill the disk
            for retention in self.retention.values():
                retention.damaged = {name for url, name in damaged if url == retention.store.url} if own else set()
                retention.start(opened.name if own else "")
        if not own and self.settings.save_initial:
            self.save(self.newest_step or 0)
        return self.newest_step or 0

    def _find(self) -> list[tuple[Store, str]]:
        """The checkpoints of this run, newest first. Raises CheckpointError if none is seen although one was saved."""
        found = loading.by_age((store, committed(store)) for store in self.stores.values())
        if self.saved_file.is_file():
            last = self.saved_file.read_text(encoding="utf-8")
            places = ", ".join(store.url for store in self.stores.values())
            if not found:
                raise CheckpointError(
                    f"{places}: no checkpoint found, but this run has saved {last}; set checkpoint.folder to where it "
                    "is now, or another run.folder for a new run"
                )
            if by_step(last.rpartition("/")[2]) > by_step(found[0][1]):
                logger.warning(f"skipped: {last}, the last checkpoint that this run saved, is not in {places}")
        return found

    def _find_fork(self) -> list[tuple[Store, str]]:
        """The checkpoints of another run that this one branches from, newest first; none if it is no branch."""
        place, step = find_fork(self.settings.branch_from, read_parent(self.run_folder))
        return locate(place, *store_waits(self.config), step=step) if place else []

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
            logger.info("they are stock DCP's, assumed to rotate halves of a head: see docs/huggingface.md")

    def _check_fits(self, opened: Opened) -> None:
        loading.check_identity(opened.manifest, self.identity)
        loading.check_same_names(opened, self.model_bytes)

    def _fill(self, opened: Opened) -> None:
        """Load model, optimizer and, at the same world size, random states from a checkpoint and check each byte."""
        self._check_fits(opened)
        state: State = {"model": model_tensors(self.model)}
        if saved := {name.partition(".")[2] for name in tensors_in(opened.metadata, "optimizer.")}:
            state["optimizer"] = tensors_to_fill(self.model, self.optimizer, saved)
        else:  # a checkpoint of step 0; a damaged one that was tried first may have left some state
            self.optimizer.state.clear()
        random_states = {}
        if opened.manifest["world_size"] == self.ranks.size:
            held = tensors_in(opened.metadata, prefix := f"rng.{self.ranks.rank}.")
            random_states = {kind: value for kind, value in random_state().items() if f"{prefix}{kind}" in held}
            state["rng"] = {str(self.ranks.rank): random_states}
        read_state(opened, state, self.on_progress)
        set_random_state(random_states)

    # ------------------------------------------------------------ save

    def finish(self, step: int) -> None:
        """Save the last `step` of this start unless that is done; after the run's last step, the model too if asked."""
        if self.settings.enable and step != self.newest_step:
            self.save(step)
        if not self.settings.save_model or step != self.config.training.steps:
            return
        self.wait()

        def is_saved(store: Store) -> bool:  # by an earlier start
            return any(name.startswith(f"model-{step:08d}-") for name in finished(store.sizes()))

        if not self.ranks.from_rank_0(lambda: all(map(is_saved, self.stores.values()))):
            save = self._prepare("model", step, {"model": model_tensors(self.model)})
            self._start(partial(self._follow_up, save, self._write(save)))

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
        changed = self.ranks.gather_object(self.planned is None or self.planned[0] != shapes) or []
        # All ranks replan or none: a pipeline's stages may differ.
        name, replan = self.ranks.broadcast_object((new_checkpoint_name(step, kind), any(changed)))
        if replan or self.planned is None:
            self.planned = shapes, files.plan_save(state, self.ranks)
        facts = {
            "step": step,
            "world_size": self.ranks.size,
            "run": self.run,
            "identity": self.identity,
            "dataloader": self.dataloader.state_dict(),
            "parent": self.parent,
            "config": to_toml(self.config),
        }
        return Save(name, self.planned[1], facts, files.resolver(state), started)

    def _write(self, save: Save, before: Callable[[], None] = lambda: None) -> Written:
        """Write and commit a checkpoint. Returns what this rank has written. Collective."""

        def write() -> Written:
            before()
            plan, resolve = save.plan.files, save.resolve
            return files.write_items(self.store, save.name, self.ranks.rank, plan, resolve, self.on_progress)

        written = self.ranks.together(write)
        gathered = self.ranks.gather_object(written) or []
        self.ranks.from_rank_0(lambda: files.commit(self.store, save.name, save.plan, gathered, save.facts, {}))
        if step_of(save.name) is not None:  # a run cannot resume from a model alone
            if self.ranks.is_coordinator:
                with suppress(OSError):  # the disk may be full; the checkpoint is safe anyway
                    write_atomically(self.saved_file, join(self.store.url, save.name).encode())
            self.on_commit(save.facts["step"])
        logger.info(f"checkpoint {save.name} saved in {time.monotonic() - save.started:.1f} s")
        return written

    def _follow_up(self, save: Save, written: Written) -> None:
        """After the commit of `save`, do what training need not wait for: remove old ones, upload the new one.

        Every rank copies what it has `written` to the second place; the manifest comes last.
        """
        for key, store in self.stores.items():
            if store is not self.store:
                copy = partial(files.copy_files, self.store, store, save.name, written, self.on_progress)
                self.ranks.together(copy)
                self.ranks.from_rank_0(partial(files.copy_commit, self.store, store, save.name))
                seconds = time.monotonic() - save.started
                logger.info(f"checkpoint {save.name} uploaded to {store.url} {seconds:.1f} s after its start")
            self.ranks.from_rank_0(partial(self.retention[key].tidy, save.name))

    def _start(self, work: Callable[[], object]) -> None:
        """Run `work` in a daemon thread, so that a run that fails for another reason does not wait for it."""
        future: Future[object] = Future()

        def run() -> None:
            # Training gets the cores first. On Linux this affects only this thread and those it starts.
            with suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOWEST_PRIORITY)
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)

        threading.Thread(target=run, name="checkpoint", daemon=True).start()
        self.under_way = future

    def _agreed(self, find: Callable[[], list[tuple[Store, str]]]) -> list[tuple[Store, str]]:
        """What `find` returns on rank 0, on every rank. Collective."""
        agreed = self.ranks.from_rank_0(lambda: [(store.url, name) for store, name in find()])
        stores = {url: open_store(url, *store_waits(self.config)) for url, _ in agreed}
        return [(stores[url], name) for url, name in agreed]
