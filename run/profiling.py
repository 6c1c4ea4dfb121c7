"""Traces by torch's profiler and snapshots of CUDA memory."""

import contextlib
import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

import config as settings
from config import ConfigError, file_errors

logger = logging.getLogger(__name__)


def check_profiling(profiling: settings.Profiling, steps: int) -> None:
    """Raises ConfigError for a trace after the last of `steps`, or a snapshot of CUDA memory without CUDA."""
    first = max(2, profiling.trace_start)  # the step before warms the profiler up
    if profiling.trace and first > steps:
        raise ConfigError(f"profiling.trace_start = {first}: exceeds training.steps = {steps}")
    if profiling.memory_snapshot and not torch.cuda.is_available():
        raise ConfigError("profiling.memory_snapshot = true: needs CUDA, whose allocations it records")


@contextlib.contextmanager
def profile(
    profiling: settings.Profiling, folder: Path, rank: int, steps_done: int
) -> Iterator[Callable[[], None]]:  # fmt: skip
    """A function that the loop must call before each step, and after the last.

    Steps are counted from the start of the run, which has done `steps_done` of them; those left out count too. A trace
    whose first step has passed begins as soon as it can: with this start's second step, since the first warms the
    profiler up. Files are named after their first step, so a later start does not overwrite them.
    """
    first = max(profiling.trace_start, steps_done + 2)

    def write(trace: torch.profiler.profile) -> None:
        if steps_done + trace.step_num <= first:  # the run ended before its first step
            return
        path = folder / f"trace-step{first}-rank{rank}.json.gz"
        with file_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            trace.export_chrome_trace(str(path))
            logger.info(f"profile: wrote {path}")

    profiler = None
    if profiling.trace:
        wait = first - steps_done - 1
        schedule = torch.profiler.schedule(wait=wait, warmup=1, active=profiling.trace_steps, repeat=1)
        profiler = torch.profiler.profile(schedule=schedule, on_trace_ready=write, record_shapes=True)
    if profiling.memory_snapshot:
        torch.cuda.memory._record_memory_history(max_entries=200_000)
    try:
        with profiler or contextlib.nullcontext():
            yield profiler.step if profiler else lambda: None
    finally:
        if profiling.memory_snapshot:
            folder.mkdir(parents=True, exist_ok=True)
            torch.cuda.memory._dump_snapshot(str(folder / f"memory-step{steps_done + 1}-rank{rank}.pickle"))
            torch.cuda.memory._record_memory_history(enabled=None)
