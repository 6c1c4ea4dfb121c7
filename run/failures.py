"""Bad steps of a run that goes on: which updates are left out."""

import json
import logging
import math
from collections import deque
from collections.abc import Callable
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from config import Config, ConfigError, Failures, TitaniteError, file_errors
from run.processes import LaunchEnvironment, from_rank_0
from storage.records import open_records, read_records

logger = logging.getLogger(__name__)

SKIPPED = "skipped.jsonl"
SIGMA_WINDOW = 128  # good steps whose mean and deviation are taken


def check_failures(config: Config, environment: LaunchEnvironment) -> None:
    """Raises ConfigError if steps would be left out without checkpoints, or nobody would start a rolled back run."""
    failures = config.failures
    chosen = f'failures.on_bad_step = "{failures.on_bad_step}"'
    if failures.on_bad_step != "stop" and not config.checkpoint.enable:
        raise ConfigError(f"{chosen}: needs checkpoint.enable = true")
    if failures.on_bad_step == "rollback" and not environment.max_restarts:
        raise ConfigError(
            f"{chosen}: needs a torchrun that starts the run again, by --max-restarts (MAX_RESTARTS of "
            "run_llama_train.sh) at least failures.bad_step_budget"
        )


class RolledBackError(TitaniteError):
    """The run is to start again, from its last checkpoint and without the updates after it."""


class BadSteps:
    """The steps whose update is left out, in `skipped.jsonl` of the run's folder. The same on all ranks.

    The data of these steps is consumed as usual. A resume leaves the steps out again, without computing them.
    """

    def __init__(self, failures: Failures, folder: Path):
        self.settings = failures
        self.file = folder / SKIPPED
        self.last_saved: Callable[[], int | None] = lambda: None
        self.incidents = 0
        self.skipped = set[int]()
        self.good: deque[list[float]] = deque(maxlen=SIGMA_WINDOW)  # loss and gradient norm of good steps

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps: the figures of the last good steps."""
        return {"good": list(self.good)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Judge the next steps by the good ones before a checkpoint."""
        self.good.extend(state["good"])

    def start(self, step: int, last_saved: Callable[[], int | None]) -> None:
        """Read which steps after `step` to leave out. Collective. Raises ConfigError for a damaged record.

        `last_saved` waits for the save under way and returns the step of the newest, None if there is none.
        """
        self.last_saved = last_saved
        records = from_rank_0(self._read)
        self.incidents = len(records)
        for left_out in records:
            self.skipped.update(left_out)
        to_come = sorted(skipped for skipped in self.skipped if skipped > step)
        if to_come:
            steps = f"{to_come[0]} to {to_come[-1]} ({len(to_come)})"
            logger.info(f"steps left out again: {steps}; to train on them remove their lines from {self.file}")

    def _read(self) -> list[range]:
        """The steps of each record."""
        try:
            return [range(record["first"], record["last"] + 1) for record in read_records(self.file)]
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{self.file}: each line must be an object with first and last: {error!r}") from None

    def accepts(self, step: int, loss: Tensor, grad_norm: Tensor) -> bool:
        """Whether the update of a step is to be made; the same on all ranks. Waits for the device if it has to judge.

        Raises TitaniteError if the run is to stop, RolledBackError if it is to go on from its last checkpoint.
        """
        if step in self.skipped:
            return False
        if self.settings.on_bad_step == "stop" and not self.settings.spike_sigmas:
            return True  # metrics stop the run at a figure that is not finite
        trouble = self.find_trouble(loss, grad_norm)
        if not trouble:
            return True
        saved = None
        if self.settings.on_bad_step == "rollback":
            saved = self.last_saved()
        first = step if saved is None else saved + 1
        self.leave_out(first, step, trouble)
        if saved is not None:
            again = f"the run starts again after step {saved}, without the updates since"
            raise RolledBackError(f"step {step}: {trouble}, so {again}", agreed=True)
        return False

    def find_trouble(self, loss: Tensor, grad_norm: Tensor) -> str:
        """What is wrong with a step; empty: nothing. Both tensors are the same on all ranks. Waits for the device."""
        figures = torch.stack((loss, grad_norm)).tolist()
        if not all(map(math.isfinite, figures)):
            return f"loss {figures[0]}, gradient norm {figures[1]}: not finite"
        sigmas = self.settings.spike_sigmas
        if sigmas and len(self.good) == SIGMA_WINDOW:
            for what, value, before in zip(
                ("loss", "gradient norm"), figures, zip(*self.good, strict=True), strict=True
            ):
                limit = fmean(before) + sigmas * stdev(before)
                if value > limit:
                    return f"{what} {value:.4f} is above {limit:.4f}, {sigmas:g} deviations above the mean before"
        if figures[1]:  # with a norm of 0 nothing of the step was trained
            self.good.append(figures)
        return ""

    def leave_out(self, first: int, last: int, cause: str) -> None:
        """Record that the updates of steps `first` to `last` are left out. Raises TitaniteError beyond the budget."""
        self.incidents += 1
        budget = self.settings.bad_step_budget
        end = f"step {last}: {cause}, so training stops and nothing of it is saved"
        if self.incidents > budget:
            end += f"; failures.bad_step_budget = {budget} is spent: lower optimizer.lr, or allow more"
        if self.incidents > budget or self.settings.on_bad_step == "stop":
            raise TitaniteError(end, agreed=True)
        if dist.get_rank() == 0:
            line = json.dumps({"first": first, "last": last, "cause": cause})
            with file_errors(self.file), open_records(self.file) as file:
                file.write(line + "\n")
        self.skipped.update(range(first, last + 1))
        logger.info(f"step {last}: {cause}; no update by steps {first} to {last}")
