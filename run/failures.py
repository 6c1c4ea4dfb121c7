"""Trouble in a run that goes on: steps that must be left out, and results that a device has computed wrongly."""

import json
import logging
import math
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from config import Config, ConfigError, Failures, TitaniteError, file_errors
from run.processes import LaunchEnvironment, from_rank_0
from storage.records import open_records, read_records

logger = logging.getLogger(__name__)

SKIPPED = "skipped.jsonl"
SPIKE_WINDOW = 32  # good steps that a loss is compared with
SIGMA_WINDOW = 128  # good steps whose mean and deviation are taken


def check_failures(config: Config, environment: LaunchEnvironment) -> None:
    """Raises ConfigError for a setting that needs another, and if nobody would start the run again after a rollback."""
    failures = config.failures
    if failures.replay_interval and not config.run.deterministic:
        raise ConfigError("failures.replay_interval: needs run.deterministic = true, for the same bits twice")
    if failures.on_bad_step == "rollback" and not (config.checkpoint.enable and environment.max_restarts):
        raise ConfigError(
            'failures.on_bad_step = "rollback": needs checkpoint.enable = true and a torchrun that starts it again, by '
            "--max-restarts (MAX_RESTARTS of run_llama_train.sh) at least failures.bad_step_budget"
        )


class RolledBackError(TitaniteError):
    """The run is to start again, from its last checkpoint and without the updates after it."""


class BadSteps:
    """The steps whose update is left out, in `skipped.jsonl` of the run's folder. The same on all ranks.

    The data of these steps is consumed as usual. A resume leaves the steps out again, without computing them. A start
    that writes no checkpoints neither reads nor writes the file.
    """

    def __init__(self, failures: Failures, folder: Path, step: int, saves: bool, last_saved: Callable[[], int | None]):
        """For a start after `step` that `saves` checkpoints or not. Collective.

        `last_saved` waits for the save under way and returns the step of the newest, None if there is none.
        """
        self.settings, self.file, self.saves, self.last_saved = failures, folder / SKIPPED, saves, last_saved
        records = from_rank_0(lambda: read_records(self.file) if saves else [])
        self.skipped = {step for record in records for step in range(record["first"], record["last"] + 1)}
        self.incidents = len(records)
        if to_come := sorted(left_out for left_out in self.skipped if left_out > step):
            steps = f"{to_come[0]} to {to_come[-1]} ({len(to_come)})"
            logger.info(f"steps left out again: {steps}; to train on them remove their lines from {self.file}")
        self.recent: deque[tuple[float, float]] = deque(maxlen=SIGMA_WINDOW)  # losses and gradient norms
        self.active = failures.on_bad_step != "stop" or failures.spike_factor > 0 or failures.spike_sigmas > 0

    def accepts(self, step: int, loss: Tensor, grad_norm: Tensor) -> bool:
        """Whether the update of a step is to be made; the same on all ranks. Waits for the device if it has to judge.

        Raises TitaniteError if the run is to stop, RolledBackError if it is to go on from its last checkpoint.
        """
        if step in self.skipped:
            return False
        if not self.active or not (trouble := self.judge(loss, grad_norm)):
            return True
        saved = self.last_saved() if self.settings.on_bad_step == "rollback" else None
        first = step if saved is None else saved + 1
        self.leave_out(first, step, trouble)
        if saved is not None:
            again = f"the run starts again after step {saved}, without the updates since"
            raise RolledBackError(f"step {step}: {trouble}, so {again}", agreed=True)
        return False

    def judge(self, loss: Tensor, grad_norm: Tensor) -> str:
        """What is wrong with a step; empty: nothing. Both tensors are the same on all ranks. Waits for the device."""
        value, norm = torch.stack((loss, grad_norm)).tolist()
        if not (math.isfinite(value) and math.isfinite(norm)):
            return f"loss {value}, gradient norm {norm}: not finite"
        factor, sigmas, recent = self.settings.spike_factor, self.settings.spike_sigmas, list(self.recent)
        if factor and len(recent) >= SPIKE_WINDOW:
            limit = factor * median(loss for loss, _ in recent[-SPIKE_WINDOW:])
            if value > limit:
                return f"loss {value:.4f} is above {limit:.4f}, {factor:g} times the median before"
        if sigmas and len(recent) == SIGMA_WINDOW:
            losses, norms = zip(*recent, strict=True)
            for what, found, before in (("loss", value, losses), ("gradient norm", norm, norms)):
                limit = fmean(before) + sigmas * stdev(before)
                if found > limit:
                    return f"{what} {found:.4f} is above {limit:.4f}, {sigmas:g} deviations above the mean before"
        if norm:  # otherwise nothing of the step was trained
            self.recent.append((value, norm))
        return ""

    def leave_out(self, first: int, last: int, cause: str) -> None:
        """Record that the updates of steps `first` to `last` are left out. Raises TitaniteError beyond the budget."""
        budget = self.settings.bad_step_budget
        self.incidents += 1
        spent = self.incidents > budget
        if self.settings.on_bad_step == "stop" or spent:
            why = f"; failures.bad_step_budget = {budget} is spent: lower optimizer.lr, or allow more" if spent else ""
            raise TitaniteError(f"step {last}: {cause}, so training stops and nothing of it is saved{why}", agreed=True)
        if dist.get_rank() == 0 and self.saves:
            with file_errors(self.file), open_records(self.file) as file:
                file.write(json.dumps({"first": first, "last": last, "cause": cause}) + "\n")
        self.skipped |= set(range(first, last + 1))
        logger.info(f"step {last}: {cause}; no update by steps {first} to {last}")


def compute_twice(step: int, compute: Callable[[], list[Tensor]], parameters: Sequence[Tensor]) -> list[Tensor]:
    """Call `compute` twice, for this rank's losses and the gradients, and compare them bit for bit.

    This finds a processor that now and then computes wrongly (Dixit et al. 2021, "Silent data corruptions at scale").
    Returns the losses; the gradients of one computation stay in place. Raises TitaniteError on all ranks.
    """
    found = []
    for _ in range(2):
        for parameter in parameters:
            parameter.grad = None
        losses = compute()
        found.append((_bits(losses), _bits([p.grad for p in parameters if p.grad is not None])))
    differ: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(differ, [first != second for first, second in zip(*found, strict=True)])
    for kind, what in enumerate(("the loss differs", "no loss differs but gradients do")):
        if ranks := [rank for rank, kinds in enumerate(differ) if kinds[kind]]:
            hint = "a device or the network is suspect, `python -m tools.preflight` tests them"
            raise TitaniteError(f"step {step}: computed twice, {what} on rank {ranks}: {hint}", agreed=True)
    return losses


def _bits(tensors: Sequence[Tensor]) -> list[int]:
    """The sum of the bytes of each tensor, which one wrong bit changes."""
    own = [t.to_local() if isinstance(t, DTensor) else t.detach() for t in tensors]
    sums = [t.reshape(-1).view(torch.uint8).sum(dtype=torch.int64) for t in own]
    return torch.stack(sums).tolist() if sums else []  # the host waits for the device once
