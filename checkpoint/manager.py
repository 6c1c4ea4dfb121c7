"""When checkpoints are written, which are kept, and from which one a run resumes."""

import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
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

from checkpoint import CheckpointError, files
from checkpoint.branch import Parent, find_fork, read_parent, record_parent, split_place
from checkpoint.checks import check_shared
from checkpoint.companions import declared_by
from checkpoint.files import State, WritePlan, Written, local_part, read_average, read_state
from checkpoint.lease import (
    SAVED,
    Start,
    check_lease,
    check_owner,
    check_room,
    new_start,
    read_mark,
    take_lease,
    tidy,
)
from checkpoint.loading import check_identity, check_same_names, load_newest, locate, open_place
from checkpoint.manifest import (
    Manifest,
    Opened,
    commit,
    committed,
    new_checkpoint_name,
    open_checkpoint,
)
from checkpoint.state import Staging, model_tensors, optimizer_tensors, random_state, tensors_to_fill
from config import Config, TitaniteError, to_toml
from data.ledger import saved_position
from parallel.ranks import Ranks
from storage import LocalStore, Store, join
from storage.records import write_atomically

LOWEST_PRIORITY = 19  # a `nice` value

logger = logging.getLogger(__name__)


class CheckpointManager:
    """The checkpoints of one run. All methods are collective: every rank calls them at the same step.

    Except `check` and `wait_for_copies`, which are local.
    """

    def __init__(
        self,
        config: Config,
        run_folder: Path,
        model: Sequence[nn.Module],
        optimizer: torch.optim.Optimizer,
        stateful: Mapping[str, Stateful],
        identity: dict[str, Any],
        allocate_state: Callable[[], None],
        *,
        start: Start | None = None,
        on_commit: Callable[[int], None] = lambda step: None,
        on_progress: Callable[[], None] = lambda: None,
        section: Callable[[str], AbstractContextManager[None]] = lambda name: nullcontext(),
    ) -> None:
        """`identity` (JSON-able) says what the model is. A checkpoint with another identity is refused.

        `start`: the run's start that saves, as the run's folder records it; that of rank 0 counts.
        `stateful`: the run's other parts with a state, a small JSON-able dict that is the same on all ranks: one is
        "dataloader", which knows the position in the data.
        `allocate_state` gives the optimizer the state that a load fills, without a step.
        `on_commit` is called on every rank with the step of each committed checkpoint, by the
        background thread in mode `async`. Any thread calls `on_progress` as bytes move. The context
        `section("load")` or `section("checkpoint")` is around whatever waits for them.
        """
        self.config = config
        self.settings = config.checkpoint
        self.run_folder = run_folder
        self.model = model
        self.optimizer = optimizer
        self.stateful = stateful
        self.identity = identity
        self.allocate_state = allocate_state
        self.on_commit = on_commit
        self.on_progress = on_progress
        self.section = section
        self.ranks = Ranks()
        if dist.is_initialized():
            # A group of gloo: nothing goes through the accelerator, nor between other collectives.
            timeout = timedelta(seconds=self.settings.timeout_seconds)
            self.ranks = Ranks(dist.new_group(backend="gloo", timeout=timeout))
        self.model_bytes: dict[str, int] = {}  # of each whole tensor
        for part in self.ranks.all_gather_object({name: value.nbytes for name, value in model_tensors(model).items()}):
            self.model_bytes.update(part)
        self.parent: Parent | None = None  # where this run branched from
        self.declared: dict[str, Any] = {}  # by the Hugging Face model that the weights come from
        self.start = start or new_start(run_folder)
        self.store = open_place(config, run_folder)
        self.damaged = set[str]()  # found while loading; removed after the next commit
        self.newest_step: int | None = None  # of the last save or load
        self.background = ThreadPoolExecutor(1, "checkpoint", _lower_priority)
        self.under_way: Future[Any] | None = None
        self.staging = Staging(next(model[0].parameters()).device)
        self.planned: tuple[Any, Any] = (None, None)  # shapes, and the plan for them

    # ------------------------------------------------------------ load

    def load(self) -> int:
        """Resume from the newest intact checkpoint of this run, or begin by `branch_from` or `initial_load`.

        Returns the step, 0 for a new run that is no branch. Restores model, optimizer and position
        in the data, and at the same world size the random states. If a checkpoint is damaged, logs
        it and takes the one before. Raises TitaniteError if none is intact, one is of another
        model, the disk has no room, or ranks do not share a folder.
        """
        with self.section("load"):
            self.wait()
            if self.settings.enable:
                return self._load()
            self._load_initial()
            return 0

    def _load(self) -> int:
        if isinstance(self.store, LocalStore):
            check_shared(self.store, self.ranks)
        checkpoint_bytes = self._count_bytes()
        own, others_may_write = self.ranks.from_rank_0(partial(self._take_place, checkpoint_bytes))
        parent = self.ranks.from_rank_0(partial(read_parent, self.run_folder))
        fork = find_fork(self.settings.branch_from, parent)
        resumed = ""
        if own or fork:
            opened, _, self.damaged = load_newest(own or self._locate(fork), self.ranks, self._fill)
            manifest = opened.manifest
            resumed = opened.name
            for name, part in self.stateful.items():
                if name in manifest:  # an earlier version may have saved fewer
                    part.load_state_dict(manifest[name])
            self.declared = declared_by(opened)
            self.newest_step = manifest["step"]
            recorded = manifest.get("parent")
            if own:
                parent = Parent(**recorded) if recorded else None
            else:
                tokens = saved_position(manifest["dataloader"]).tokens
                folder = manifest.get("start", {}).get("folder", manifest.get("run", ""))
                parent = Parent(split_place(fork)[0], manifest["step"], folder, tokens)
            self.parent = self.ranks.from_rank_0(partial(record_parent, self.run_folder, parent))
            how = "resumed" if own else "branched"
            logger.info(f"{how} from {opened.url}, world size {manifest['world_size']} then")
        else:
            self._load_initial()
        # Killed saves, or a kill after a commit, have left what may fill the disk.
        self._tidy(resumed, at_start=True, others_may_write=others_may_write)
        return self.newest_step or 0

    def _count_bytes(self) -> int:
        """Bytes of the tensors of a checkpoint, from the state that the optimizer makes itself. Collective."""
        self.allocate_state()
        tensors = optimizer_tensors(self.model, self.optimizer)
        sizes = {name: value.nbytes for name, value in tensors.items()}
        self.optimizer.state.clear()  # a weight without a gradient keeps none
        for part in self.ranks.all_gather_object(sizes):
            sizes.update(part)
        return sum(self.model_bytes.values()) + sum(sizes.values())

    def _take_place(self, checkpoint_bytes: int) -> tuple[list[tuple[Store, str]], bool]:
        """Take the lease of the place of this run's checkpoints, if it has room. For rank 0.

        Returns what is there, newest first, and whether an earlier start may still write. Raises CheckpointError if
        nothing is there although it was saved.
        """
        names = committed(self.store)
        check_owner(self.store, names, self.run_folder)  # again: another run may have begun to save there meanwhile
        saved = read_mark(self.run_folder / SAVED)
        if not names and saved:
            raise CheckpointError(
                f"{self.store.url}: no checkpoint found, but this run has saved {saved}; "
                "set checkpoint.folder to where it is now, or another run.folder for a new run"
            )
        if isinstance(self.store, LocalStore):
            check_room(self.store, self.settings, checkpoint_bytes)
        others_may_write = take_lease(self.store, self.start)
        return [(self.store, name) for name in names], others_may_write

    def _locate(self, place: str) -> list[tuple[Store, str]]:
        return self.ranks.from_rank_0(partial(locate, place, self.config.comm.store_retry_seconds))

    def _load_initial(self) -> None:
        """Load the weights of `checkpoint.initial_load`, if set, into the model. Collective."""
        place = self.settings.initial_load
        if place:
            opened, *_ = load_newest(self._locate(place), self.ranks, partial(self._fill, weights_only=True))
            self.declared = declared_by(opened)
            logger.info(f"model weights loaded from {opened.url}")

    def _fill(self, opened: Opened, weights_only: bool = False) -> None:
        """Load model, optimizer and, at the same world size, random states from a checkpoint and check each byte."""
        check_identity(opened.manifest, self.identity)
        check_same_names(opened, self.model_bytes)
        state: State = {"model": model_tensors(self.model)}
        random_states = {}
        if not weights_only:
            saved = {name.removeprefix("optimizer.") for name in opened.tensors("optimizer.")}
            if saved:
                self.allocate_state()
                state["optimizer"] = tensors_to_fill(self.model, self.optimizer, saved)
            else:  # one of an earlier version, of step 0; a damaged one that was tried first may have left some state
                self.optimizer.state.clear()
            if opened.manifest["world_size"] == self.ranks.size:
                prefix = f"rng.{self.ranks.rank}."
                held = opened.tensors(prefix)
                random_states = {kind: value for kind, value in random_state().items() if f"{prefix}{kind}" in held}
                state["rng"] = {str(self.ranks.rank): random_states}
        read_state(opened, state, self.on_progress)
        for kind, value in random_states.items():
            device = torch if kind == "cpu" else torch.get_device_module(kind)
            device.set_rng_state(value)

    @contextmanager
    def averaged(self, count: int) -> Iterator[int]:
        """Inside, the model has the mean of the weights in the newest `count` checkpoints; yields of how many.

        Its own weights wait on the host, and are the same bit for bit afterwards. 0: the run has no checkpoint yet, or
        one could not be read, which is logged; the weights are then not to be used. Waits for a save under way.
        """
        tensors = model_tensors(self.model)
        found = 0
        with self.section("load"), torch.no_grad():
            self.wait()
            own = {name: local_part(tensor).to("cpu", copy=True) for name, tensor in tensors.items()}
            try:
                newest = self.ranks.from_rank_0(partial(self._open_newest, count))
                if newest:
                    self.ranks.together(partial(read_average, newest, tensors, self.on_progress))
                    found = len(newest)
            except TitaniteError as error:
                logger.warning(f"no figures of the mean of checkpoints: {error}")
        try:
            yield found
        finally:
            with torch.no_grad():
                for name, tensor in tensors.items():
                    local_part(tensor).copy_(own[name])

    def _open_newest(self, count: int) -> list[Opened]:
        return [open_checkpoint(self.store, name) for name in committed(self.store)[:count]]

    # ------------------------------------------------------------ save

    def finish(self, step: int) -> None:
        """Save the last `step` of this start, unless that is done."""
        if self.settings.enable and step != self.newest_step:
            self.save(step)

    def save(self, step: int) -> None:
        """Write a checkpoint of `step`; in mode `async`, in the background.

        In that mode, weights and moments are copied during the next forward and backward, and who
        changes them next must first call `wait_for_copies`; the rest is taken at once. Waits for
        the save before: only one is under way at a time. Raises the error on all ranks if this save
        (`sync`) or the one before was not committed.
        """
        with self.section("checkpoint"), torch.no_grad():
            self.wait()
            self._save(step)
        self.newest_step = step

    def _save(self, step: int) -> None:
        state: State = {
            "model": model_tensors(self.model),
            "optimizer": optimizer_tensors(self.model, self.optimizer),
            "rng": {str(self.ranks.rank): random_state()},
        }
        plan = self._plan(state)
        resolve = files.resolver(state)
        name = self.ranks.broadcast_object(new_checkpoint_name(step))
        facts = {
            "step": step,
            "world_size": self.ranks.size,
            "run": self.start.run,
            "start": self.start._asdict(),
            "identity": self.identity,
            **self.declared,
            **{name: part.state_dict() for name, part in self.stateful.items()},
            "parent": self.parent._asdict() if self.parent else None,
            "config": to_toml(self.config),
        }
        if self.settings.mode == "sync":
            self._write(name, plan, resolve, facts)
            self.under_way = self.background.submit(self._tidy, name)
            return
        copy = self.staging.prepare({item.index: resolve(item) for file in plan.files for item in file})

        def save_in_background() -> None:
            self.ranks.together(copy)
            self._write(name, plan, lambda item: self.staging.copies[item.index], facts)
            self._tidy(name)

        self.under_way = self.background.submit(save_in_background)

    def _plan(self, state: State) -> WritePlan:
        """Who writes what of a state: that of the save before if no rank's shapes have changed. Collective."""
        shapes = tree_map(lambda tensor: tensor.shape, state)
        changed = self.ranks.all_gather_object(self.planned[0] != shapes)  # a pipeline's stages may differ
        if any(changed):
            self.planned = (shapes, files.plan_save(state, self.ranks))
        plan: WritePlan = self.planned[1]
        return plan

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
        under_way = self.under_way
        self.under_way = None
        if under_way is not None:
            with self.section("checkpoint"):
                under_way.result()

    def wait_for_copies(self) -> None:
        """Return when weights and moments may change: a background save then has copies of them."""
        with self.section("checkpoint"):
            self.staging.wait()

    def _write(self, name: str, plan: WritePlan, resolve: Callable[[WriteItem], Tensor], facts: Manifest) -> None:
        """Write and commit a checkpoint. Collective."""
        started = time.monotonic()
        write = partial(files.write_items, self.store, name, self.ranks.rank, plan.files, resolve, self.on_progress)
        self.ranks.from_rank_0(partial(check_lease, self.store, self.start))  # again before the commit
        written = self.ranks.together(write)
        gathered = self.ranks.gather_object(written) or []
        self.ranks.from_rank_0(lambda: self._commit(name, plan, gathered, facts))
        if self.ranks.is_coordinator:
            with suppress(OSError):  # the disk may be full; the checkpoint is safe anyway
                write_atomically(self.run_folder / SAVED, join(self.store.url, name).encode())
        self.on_commit(facts["step"])
        logger.info(f"checkpoint {name} saved in {time.monotonic() - started:.1f} s")

    def _commit(self, name: str, plan: WritePlan, written: list[Written], facts: Manifest) -> None:
        """Commit a checkpoint, unless a later start has taken the place. For rank 0."""
        check_lease(self.store, self.start)
        commit(self.store, name, plan.metadata, written, facts)

    def _tidy(self, newest: str, **when: bool) -> None:
        """Remove older checkpoints than `newest`, for which training need not wait after a commit."""
        if self.ranks.is_coordinator:
            tidy(self.store, self.settings, self.start, newest, self.damaged, **when)


def _lower_priority() -> None:
    """Training gets the cores first. On Linux 0 is this thread alone, and those it starts."""
    os.setpriority(os.PRIO_PROCESS, 0, LOWEST_PRIORITY)
