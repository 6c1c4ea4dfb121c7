"""Trouble in a run that goes on: steps that must be left out, slow ranks, wrong results."""

import json
import logging
import math
import socket
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from statistics import median, median_low
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from config import Config, ConfigError, Failures, TitaniteError, file_errors
from parallel.device import best_seconds
from records import open_records, read_records, write_atomically
from run.processes import LaunchEnvironment, from_rank_0

logger = logging.getLogger(__name__)

SKIPPED = "skipped.jsonl"
SPIKE_WINDOW = 32  # good steps that a loss is compared with
SLOW = 1.5  # a slow rank takes this many times as long as the others,
SLOW_SECONDS = 0.02  # and at least this much longer: less is noise
PROBES = 5
PROBE_SECONDS = 0.1  # of each, many products: on a GPU one takes a fraction of a millisecond
INTEGER_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


# ---------------------------------------------------------------- bad steps


def check_failures(config: Config, environment: LaunchEnvironment) -> None:
    """Raises ConfigError for settings that need others, and if nobody would start the run again after a rollback."""
    failures = config.failures
    if failures.replay_interval and not config.run.deterministic:
        raise ConfigError(
            f"failures.replay_interval = {failures.replay_interval}: needs run.deterministic = true, for the same bits "
            "twice"
        )
    if failures.on_bad_step == "rollback" and not config.checkpoint.enable:
        raise ConfigError('failures.on_bad_step = "rollback": needs checkpoint.enable = true')
    if failures.on_bad_step == "rollback" and not environment.max_restarts:
        raise ConfigError(
            'failures.on_bad_step = "rollback": the run ends and is started again from its last checkpoint, but nobody '
            "would: start it by torchrun with --max-restarts, at least failures.bad_step_budget (for "
            'run_llama_train.sh set MAX_RESTARTS), or set "skip"'
        )


class RolledBackError(TitaniteError):
    """The run is to start again, from its last checkpoint and without the updates after it."""


class BadSteps:
    """The steps whose update is left out, in `skipped.jsonl` of the run's folder. The same on all ranks.

    A record has the `first` and `last` step left out and the `cause`, found at the last; `spent` if it ended the start,
    `unsaved` if the start wrote no checkpoints. The data of these steps is consumed as usual, so the order of the data
    does not change. A resume leaves the steps out again, without computing them.
    """

    def __init__(
        self,
        failures: Failures,
        folder: Path,
        step: int,
        saves: bool,
        last_saved: Callable[[], int | None] = lambda: None,
    ):
        """For a start that goes on from `step`; `saves`: whether it writes checkpoints. Collective.

        `last_saved` waits for the save under way and returns the step of the newest, None if there is none.
        """
        self.last_saved = last_saved
        self.settings, self.file = failures, folder / SKIPPED
        self.unsaved = {} if saves else {"unsaved": True}
        records = from_rank_0(lambda: _take_over(self.file, step, saves))
        self.skipped = {step for record in records for step in range(record["first"], record["last"] + 1)}
        self.incidents = {record["last"] for record in records}
        if to_come := sorted(left_out for left_out in self.skipped if left_out > step):
            logger.info(
                f"steps left out again, as by a start before ({len(to_come)}): {to_come[0]} to {to_come[-1]}; to "
                f"train on them stop, and remove their lines from {self.file}"
            )
        self.recent: deque[float] = deque(maxlen=SPIKE_WINDOW)
        self.active = failures.on_bad_step != "stop" or failures.spike_factor > 0

    def accepts(self, step: int, loss: Tensor, grad_norm: Tensor) -> bool:
        """Whether the update of a step is to be made; the same on all ranks. Waits for the device if it has to judge.

        Raises TitaniteError if the run is to stop at a bad step or has spent its budget of them, RolledBackError if it
        is to go on from its last checkpoint.
        """
        if step in self.skipped:
            return False
        if not (trouble := self.judge(step, loss, grad_norm)):
            return True
        saved = self.last_saved() if self.settings.on_bad_step == "rollback" else None
        first = step if saved is None else saved + 1
        self.leave_out(first, step, trouble)
        if saved is not None:
            raise RolledBackError(
                f"step {step}: {trouble}, so the run goes on after step {saved}, without the updates of steps {first} "
                f"to {step}; a start of it leaves them out",
                agreed=True,
            )
        return False

    def judge(self, step: int, loss: Tensor, grad_norm: Tensor) -> str:
        """What is wrong with a step, the same on all ranks; empty: nothing. Waits for the device if it has to judge."""
        if not self.active:
            return ""
        value, norm = torch.stack((loss, grad_norm)).tolist()
        limit = self.settings.spike_factor * median(self.recent) if len(self.recent) == SPIKE_WINDOW else 0.0
        bad = [not (math.isfinite(value) and math.isfinite(norm)), 0 < limit < value]
        verdict = torch.tensor(bad, dtype=torch.float32, device=loss.device)
        dist.all_reduce(verdict, dist.ReduceOp.MAX)
        not_finite, spikes = verdict.tolist()
        if not_finite:
            return f"loss {value}, gradient norm {norm}: not finite"
        if spikes:
            return f"loss {value:.4f} is above {limit:.4f}, {self.settings.spike_factor:g} times the median before"
        self.recent.append(value)
        return ""

    def leave_out(self, first: int, last: int, cause: str) -> None:
        """Record that the updates of steps `first` to `last` are left out. Raises TitaniteError beyond the budget."""
        budget = self.settings.bad_step_budget
        stopped = f"step {last}: {cause}, so training stops and nothing of it is saved"
        if self.settings.on_bad_step == "stop":
            raise TitaniteError(stopped, agreed=True)
        self.incidents.add(last)
        spent = {"spent": True} if len(self.incidents) > budget else {}
        if dist.get_rank() == 0:
            with file_errors(self.file), open_records(self.file) as file:
                file.write(json.dumps({"first": first, "last": last, "cause": cause} | spent | self.unsaved) + "\n")
        if spent:
            raise TitaniteError(
                f"{stopped}; failures.bad_step_budget = {budget} is spent. A later start goes on from the last "
                "checkpoint and judges all steps after it anew: lower optimizer.lr, or allow more",
                agreed=True,
            )
        self.skipped |= set(range(first, last + 1))
        logger.info(f"step {last}: {cause}; no update by steps {first} to {last}")


def _take_over(file: Path, step: int, saves: bool) -> list[dict[str, Any]]:
    """The records that count for a start from `step`. Removes from the file what lost weights had left out."""
    before = read_records(file)
    records = [record for record in before if not record.get("unsaved")]
    if saves and records and records[-1].get("spent"):  # with other settings its steps after `step` may be sound
        records = [record | {"last": min(record["last"], step)} for record in records if record["first"] <= step]
    if records != before:
        with file_errors(file):
            write_atomically(file, "".join(json.dumps(record) + "\n" for record in records).encode())
    return records if saves else []


# ---------------------------------------------------------------- slow ranks


class Timing(NamedTuple):
    """Times of one rank, measured before it waits for any other."""

    host: str
    compute_seconds: float  # for the probe's products, the best of several tries
    data_seconds: float  # for the batch of this step


class Stragglers:
    """Names ranks that twice in a row took much longer than the others for the same work. Collective."""

    def __init__(self, device: torch.device, timeout_seconds: int):
        self.device = device
        size, dtype = (512, torch.float32) if device.type == "cpu" else (4096, torch.bfloat16)
        self.factor = torch.ones(size, size, dtype=dtype, device=device)
        # gloo: not behind the device's queue
        self.group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_seconds))
        fastest = torch.tensor(self._seconds(products=1))
        dist.all_reduce(fastest, dist.ReduceOp.MIN, group=self.group)
        self.products = math.ceil(PROBE_SECONDS / fastest.item())  # the same on all ranks
        self.suspects: set[tuple[int, str]] = set()

    def check(self, step: int, data_seconds: float) -> list[str]:
        """Time the probe on all ranks. Returns a line per slow rank, the same on all ranks. Collective."""
        timings: list[Any] = [None] * dist.get_world_size()
        own = Timing(socket.gethostname(), self._seconds(self.products), data_seconds)
        dist.all_gather_object(timings, own, group=self.group)
        slow = find_slow(timings)
        lines = [text for key, text in slow.items() if key in self.suspects]
        self.suspects = set(slow)
        for line in lines:
            logger.info(f"straggler, seen twice up to step {step}: {line}")
        return lines

    def _seconds(self, products: int) -> float:
        def multiply() -> None:
            for _ in range(products):
                self.factor @ self.factor

        return best_seconds(multiply, self.device, PROBES)


def find_slow(timings: Sequence[Timing]) -> dict[tuple[int, str], str]:
    """(rank, what it is slow at) → the evidence, by comparison with the median of the ranks, the lower of two."""
    slow = {}
    for field, work in (("compute_seconds", "the same matrix products"), ("data_seconds", "its batch")):
        values = [getattr(timing, field) for timing in timings]
        usual = median_low(values)
        for rank, value in enumerate(values):
            if value > SLOW * usual and value > usual + SLOW_SECONDS:
                slow[rank, field] = (
                    f"rank {rank} ({timings[rank].host}) needed {1e3 * value:.1f} ms for {work}, "
                    f"half of the ranks at most {1e3 * usual:.1f} ms"
                )
    return slow


# ---------------------------------------------------------------- wrong results


def check_replay(
    step: int, parameters: Sequence[Tensor], losses: list[Tensor], again: Callable[[], list[Tensor]]
) -> None:
    """Compute a step a second time, by `again`, and compare losses and gradients bit for bit. Gradients stay in place.

    `losses` are this rank's own from the first time. This finds a processor that now and then computes wrongly
    (Dixit et al. 2021, "Silent data corruptions at scale"). Raises TitaniteError on all ranks.
    """
    first = (_bits(losses), _bits(_gradients(parameters)))
    for parameter in parameters:
        parameter.grad = None
    second = (_bits(again()), _bits(_gradients(parameters)))
    differ = [None] * dist.get_world_size()
    dist.all_gather_object(differ, [a != b for a, b in zip(first, second, strict=True)])
    losses_differ, gradients_differ = ([r for r, d in enumerate(differ) if d and d[kind]] for kind in (0, 1))
    if losses_differ:
        raise TitaniteError(
            f"step {step}: computed twice, the loss differs on rank {losses_differ}: its device is suspect",
            agreed=True,
        )
    if gradients_differ:
        raise TitaniteError(
            f"step {step}: computed twice, gradients differ on rank {gradients_differ} and no rank's own loss does: "
            "the backward of one of them, or the network, is suspect; `python -m tools.preflight` tests each device",
            agreed=True,
        )


def _gradients(parameters: Sequence[Tensor]) -> list[Tensor]:
    grads = [p.grad for p in parameters if p.grad is not None]
    return [grad.to_local() if isinstance(grad, DTensor) else grad for grad in grads]


def _bits(tensors: Sequence[Tensor]) -> list[int]:
    """The sum of the bit patterns of each tensor, which one wrong element changes."""
    sums = [t.detach().contiguous().view(INTEGER_OF_SIZE[t.element_size()]).sum(dtype=torch.int64) for t in tensors]
    return torch.stack(sums).tolist() if sums else []
