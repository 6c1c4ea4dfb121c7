"""When checkpoints are written, which are kept, and from which one a run resumes."""

import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
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
from checkpoint.companions import declared_by
from checkpoint.files import Plan, State, Written, read_state
from checkpoint.loading import load_newest, locate
from checkpoint.manifest import Manifest, Opened, commit, copy_commit, new_checkpoint_name, step_of
from checkpoint.owner import Start, check_claim, new_start, read_known, record_known, run_name
from checkpoint.ranks import Ranks
from checkpoint.retention import Retention, check_room, committed, finished
from checkpoint.state import Staging, model_tensors, optimizer_tensors, random_state, tensors_to_fill
from config import Config, TitaniteError, to_toml
from data.ledger import saved_place
from storage import LocalStore, Store, StoreError, join
from storage.records import write_atomically

SAVED = ".saved"  # in the run's folder: names the last committed checkpoint
LOWEST_PRIORITY = 19  # a `nice` value

logger = logging.getLogger(__name__)


class CheckpointManager:
    """The checkpoints of one run. All methods are collective: every rank calls them at the same step.

    Not so `check` and `wait_for_copies`.
    """

    def __init__(
        self,
        config: Config,
        run_folder: Path,
        model: Sequence[nn.Module],
        optimizer: torch.optim.Optimizer,
        dataloader: Stateful,
        identity: dict[str, Any],
        allocate_state: Callable[[], None],
        *,
        start: Start | None = None,
        on_commit: Callable[[int], None] = lambda step: None,
        on_progress: Callable[[], None] = lambda: None,
        section: Callable[[str], AbstractContextManager[None]] = lambda name: nullcontext(),
    ) -> None:
        """`identity` (JSON-able) says what the model is. A checkpoint with another identity is refused.

        `start`: the run's start that saves, as the run's folder records it; that of rank 0 counts. `dataloader` knows
        its place in the data: a small JSON-able dict, the same on all ranks. `allocate_state` gives the optimizer the
        state that a load fills, without a step. `on_commit` is called on every rank with the step of each committed
        checkpoint, by the background thread in mode `async`. Any thread calls `on_progress` as bytes move. The context
        `section("load")` or `section("checkpoint")` is around whatever waits for them.
        """
        self.config, self.settings = config, config.checkpoint
        self.model, self.optimizer, self.dataloader = model, optimizer, dataloader
        self.identity, self.allocate_state = identity, allocate_state
        self.on_commit, self.on_progress, self.section = on_commit, on_progress, section
        # Over their own group of gloo: nothing goes through the accelerator, nor between training's collectives.
        wait = timedelta(seconds=self.settings.timeout_seconds)
        self.ranks = Ranks(dist.new_group(backend="gloo", timeout=wait)) if dist.is_initialized() else Ranks()
        self.stores = loading.open_stores(config, run_folder)
        self.store = self.stores["folder"]
        parts = self.ranks.all_gather_object({name: value.nbytes for name, value in model_tensors(model).items()})
        self.model_bytes: dict[str, int] = {k: v for part in parts for k, v in part.items()}  # of each whole tensor
        self.run_folder = run_folder
        self.parent: dict[str, Any] | None = None  # where this run branched from
        self.declared: dict[str, Any] = {}  # by the Hugging Face model that the weights come from
        self.run = self.ranks.from_rank_0(lambda: run_name(run_folder))
        self.start = start or new_start(run_folder)
        build_retention = partial(Retention, settings=self.settings, start=self.start, run_folder=run_folder)
        self.retentions = [build_retention(store) for store in self.stores.values()]  # of rank 0
        self.newest_step: int | None = None  # of the last save or load
        # Training gets the cores first. On Linux 0 is this thread alone, and those it starts.
        lower_priority = partial(os.setpriority, os.PRIO_PROCESS, 0, LOWEST_PRIORITY)
        self.background = ThreadPoolExecutor(1, "checkpoint", lower_priority)
        self.under_way: Future[Any] | None = None
        self.staging = Staging(next(model[0].parameters()).device)
        self.planned: tuple[Any, Any] = (None, None)  # shapes, and the plan for them

    # ------------------------------------------------------------ load

    def load(self) -> int:
        """Resume from the newest intact checkpoint of this run, or begin by `branch_from` or `initial_load`.

        Returns the step, 0 for a new run that is no branch. Restores model, optimizer and place in the data, and at the
        same world size the random states. If a checkpoint is damaged, logs it and takes the one before. Raises
        TitaniteError if none is intact, one is of another model, the disk has no room, or ranks do not share a folder.
        """
        with self.section("load"):
            return self._load()

    def _load(self) -> int:
        self.wait()
        if not self.settings.enable:
            self._load_initial()
            return 0
        for key, store in self.stores.items():
            if isinstance(store, LocalStore):
                check_shared(key, store, self.ranks)
        own = self.ranks.from_rank_0(self._find)
        moments = 1 if self.config.optimizer.state_dtype == "bfloat16" else 2  # of the weights' size; islands: one more
        needed = (1 + moments + bool(self.config.parallelism.local_steps)) * sum(self.model_bytes.values())
        self.ranks.from_rank_0(lambda: check_room(self.store, self.settings, needed))
        self.ranks.from_rank_0(partial(self._claim, own))
        if candidates := own or self.ranks.from_rank_0(self._find_fork):
            opened, _, damaged = load_newest(candidates, self.ranks, self._fill)
            self.dataloader.load_state_dict(opened.manifest["dataloader"])
            self.declared = declared_by(opened)
            self.newest_step, size = opened.manifest["step"], opened.manifest["world_size"]
            logger.info(f"{'resumed' if own else 'branched'} from {opened.url}, world size {size} then")
            began = opened.manifest.get("parent")
            if not own:
                place = find_fork(self.settings.branch_from)[0]
                tokens = saved_place(opened.manifest["dataloader"]).tokens
                began = Parent(place, self.newest_step, opened.manifest.get("run", ""), tokens)._asdict()
            self.parent = self.ranks.from_rank_0(partial(record_parent, self.run_folder, began))
        else:
            self._load_initial()
        if self.ranks.is_coordinator:  # killed saves, or a kill after a commit, have left what may fill the disk
            for retention in self.retentions:
                retention.damaged = {name for url, name in damaged if url == retention.store.url} if own else set()
                retention.start(opened.name if own else "")
        if not own and self.settings.save_initial:
            self.save(self.newest_step or 0)
        return self.newest_step or 0

    def _find(self) -> list[tuple[Store, str]]:
        """The checkpoints of this run, newest first. Raises CheckpointError if none is seen although one was saved."""
        found = loading.by_age((store, committed(store)) for store in self.stores.values())
        if not found and (self.run_folder / SAVED).is_file():
            places, saved = (store.url for store in self.stores.values()), (self.run_folder / SAVED).read_text()
            hint = "set checkpoint.folder to where it is now, or another run.folder for a new run"
            raise CheckpointError(f"{', '.join(places)}: no checkpoint found, but this run has saved {saved}; {hint}")
        return found

    def _claim(self, own: list[tuple[Store, str]]) -> None:
        """Claim the places for this start. Whatever it finds there, checked before, is from here on the run's own."""
        for retention in self.retentions:
            retention.claim()
        found = {name for _, name in own}
        known = read_known(self.run_folder) or set()
        with suppress(OSError):  # then the next start asks again
            record_known(self.run_folder, found - known)

    def _find_fork(self) -> list[tuple[Store, str]]:
        """The checkpoints of another run that this one branches from, newest first; none if it is no branch."""
        parent = read_parent(self.run_folder)
        place, step = parent[:2] if parent else find_fork(self.settings.branch_from)
        return locate(place, self.config.comm.store_retry_seconds, step) if place else []

    def _load_initial(self) -> None:
        """Load the weights of `checkpoint.initial_load`, if set, into the model. Collective."""
        if place := self.settings.initial_load:
            candidates = self.ranks.from_rank_0(partial(locate, place, self.config.comm.store_retry_seconds))
            opened, *_ = load_newest(candidates, self.ranks, partial(self._fill, weights_only=True))
            self.declared = declared_by(opened)
            logger.info(f"model weights loaded from {opened.url}")
            if not opened.manifest:
                logger.info("they are stock DCP's, assumed to rotate halves of a head: see docs/huggingface.md")

    def _fill(self, opened: Opened, weights_only: bool = False) -> None:
        """Load model, optimizer and, at the same world size, random states from a checkpoint and check each byte."""
        loading.check_identity(opened.manifest, self.identity)
        loading.check_same_names(opened, self.model_bytes)
        state: State = {"model": model_tensors(self.model)}
        if weights_only:
            read_state(opened, state, self.on_progress)
            return
        if saved := {name.partition(".")[2] for name in opened.tensors("optimizer.")}:
            self.allocate_state()
            state["optimizer"] = tensors_to_fill(self.model, self.optimizer, saved)
        else:  # a checkpoint of step 0; a damaged one that was tried first may have left some state
            self.optimizer.state.clear()
        random_states = {}
        if opened.manifest["world_size"] == self.ranks.size:
            held = opened.tensors(prefix := f"rng.{self.ranks.rank}.")
            random_states = {kind: value for kind, value in random_state().items() if f"{prefix}{kind}" in held}
            state["rng"] = {str(self.ranks.rank): random_states}
        read_state(opened, state, self.on_progress)
        for kind, value in random_states.items():
            (torch if kind == "cpu" else torch.get_device_module(kind)).set_rng_state(value)

    # ------------------------------------------------------------ save

    def finish(self, step: int) -> None:
        """Save the last `step` of this start unless that is done; after the run's last step, the model too if asked."""
        if self.settings.enable and step != self.newest_step:
            self.save(step)
        if self.settings.save_model and step == self.config.training.steps:
            model = f"model-{step:08d}-"
            found = self.ranks.from_rank_0(lambda: [name for name in finished(self.store.sizes()) if model in name])
            if not found:  # by an earlier start
                self.save(step, "model")

    def save(self, step: int, kind: str = "step") -> None:
        """Write a checkpoint of `step`, or its "model" alone; in mode `async`, in the background.

        In that mode, weights and moments are copied during the next forward and backward, and who changes them next
        must first call `wait_for_copies`; the rest is taken at once. Waits for the save before: only one is under way
        at a time. Raises the error on all ranks if this save (`sync`) or the one before was not committed.
        """
        with self.section("checkpoint"):
            self._save(step, kind)

    @torch.no_grad()
    def _save(self, step: int, kind: str) -> None:
        self.wait()
        state: State = {"model": model_tensors(self.model)}
        if kind == "step":
            state["optimizer"] = optimizer_tensors(self.model, self.optimizer)
            state["rng"] = {str(self.ranks.rank): random_state()}
        shapes = tree_map(lambda tensor: tensor.shape, state)
        if any(self.ranks.all_gather_object(self.planned[0] != shapes)):  # a pipeline's stages may differ
            self.planned = shapes, files.plan_save(state, self.ranks)
        plan, resolve = self.planned[1], files.resolver(state)
        name = self.ranks.broadcast_object(new_checkpoint_name(step, kind))
        facts = {
            "step": step,
            "world_size": self.ranks.size,
            "run": self.run,
            "start": self.start._asdict(),
            "identity": self.identity,
            **self.declared,
            "dataloader": self.dataloader.state_dict(),
            "parent": self.parent,
            "config": to_toml(self.config),
        }
        if self.settings.mode == "async":
            copy = self.staging.prepare({item.index: resolve(item) for file in plan.files for item in file})

            def save_in_background() -> None:
                self.ranks.together(copy)
                self._follow_up(name, self._write(name, plan, lambda item: self.staging.copies[item.index], facts))

            self.under_way = self.background.submit(save_in_background)
        else:
            written = self._write(name, plan, resolve, facts)
            self.under_way = self.background.submit(self._follow_up, name, written)
        self.newest_step = step

    def last_saved(self) -> int | None:
        """Wait for the save under way. Returns the step of the newest save or load, None if there was none."""
        self.wait()
        return self.newest_step

    def check(self) -> None:
        """Raise the failure of a background save that has ended. Costs almost nothing; call it after every step."""
        if self.under_way is not None and self.under_way.done():
            self.wait()

    def wait(self) -> None:
        """Wait for the background work. Raises its failure."""
        under_way, self.under_way = self.under_way, None
        if under_way is not None:
            with self.section("checkpoint"):
                under_way.result()

    def wait_for_copies(self) -> None:
        """Return when weights and moments may change: a background save then has copies of them."""
        with self.section("checkpoint"):
            self.staging.wait()

    def _write(self, name: str, plan: Plan, resolve: Callable[[WriteItem], Tensor], facts: Manifest) -> Written:
        """Write and commit a checkpoint. Returns what this rank has written. Collective."""
        started, rank = time.monotonic(), self.ranks.rank
        write = partial(files.write_items, self.store, name, rank, plan.files, resolve, self.on_progress)
        with self._unless_taken_over():
            self.ranks.from_rank_0(partial(check_claim, self.store, self.start))  # again before the commit
            written = self.ranks.together(write)
            gathered = self.ranks.gather_object(written) or []
            self.ranks.from_rank_0(lambda: self._commit(name, plan, gathered, facts))
        if step_of(name) is not None:  # a run cannot resume from a model alone
            if self.ranks.is_coordinator:
                with suppress(OSError):  # the disk may be full; the checkpoint is safe anyway
                    write_atomically(self.run_folder / SAVED, join(self.store.url, name).encode())
            self.on_commit(facts["step"])
        logger.info(f"checkpoint {name} saved in {time.monotonic() - started:.1f} s")
        return written

    def _commit(self, name: str, plan: Plan, written: list[Written], facts: Manifest) -> None:
        """Commit a checkpoint, unless a later start has claimed the place. For rank 0."""
        check_claim(self.store, self.start)
        try:
            record_known(self.run_folder, [name])  # first: after a kill in between the checkpoint is no stranger
        except OSError:  # the disk may be full; the checkpoint is safe anyway
            facts = facts | {"unrecorded": True}
        commit(self.store, name, plan.metadata, written, facts)

    @contextmanager
    def _unless_taken_over(self) -> Iterator[None]:
        """Raise TakenOverError in place of an error that a later start may have caused. Collective, as those are."""
        try:
            yield
        except TitaniteError:
            self.ranks.from_rank_0(self._check_claims)
            raise

    def _check_claims(self) -> None:
        for store in self.stores.values():
            with suppress(StoreError):
                check_claim(store, self.start)

    def _follow_up(self, name: str, written: Written) -> None:
        """After a commit, do what training need not wait for: upload what this rank has `written`, remove old ones."""
        if second := self.stores.get("upload"):
            with self._unless_taken_over():
                self.ranks.together(partial(files.copy_files, self.store, second, name, written, self.on_progress))
                self.ranks.from_rank_0(partial(self._commit_copy, second, name))
            logger.info(f"checkpoint {name} uploaded to {second.url}")
        if self.ranks.is_coordinator:
            for retention in self.retentions:
                retention.tidy(name)

    def _commit_copy(self, second: Store, name: str) -> None:
        check_claim(second, self.start)
        copy_commit(self.store, second, name)
