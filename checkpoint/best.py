"""Which checkpoint of a run has the lowest validation loss, by the metrics.jsonl in its folder."""

import math
from collections.abc import Collection
from pathlib import Path
from typing import Any

from checkpoint import CheckpointError
from checkpoint.manifest import by_step, step_of
from storage.records import read_records

LOSS = "validation_loss"


def best_of(names: Collection[str], run_folder: Path) -> str | None:
    """The checkpoint with the lowest validation loss, the newest of equals. None if none was validated.

    Raises CheckpointError if metrics.jsonl cannot be read.
    """
    losses = validation_losses(run_folder)
    newest_first = sorted(names, key=by_step, reverse=True)
    validated = [name for name in newest_first if step_of(name) in losses]
    return min(validated, key=lambda name: losses[step_of(name) or 0], default=None)


def validation_losses(run_folder: Path) -> dict[int, float]:
    """Step → validation loss of the first held-out set; the later one of a step that was trained twice.

    Losses of different sets do not compare, so only those of the set that was validated last count.
    """
    file = run_folder / "metrics.jsonl"
    try:
        found = [(row["step"], *_first_loss(row)) for row in read_records(file)]
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"{file}: cannot be read: {type(error).__name__}: {error}") from None
    measured = [(step, name, loss) for step, name, loss in found if name]
    if not measured:
        return {}
    last_set = measured[-1][1]
    return {step: loss for step, name, loss in measured if name == last_set and math.isfinite(loss)}


def _first_loss(row: dict[str, Any]) -> tuple[str, float]:
    """Name and value of the first validation loss of a row, ("", nan) if there is none."""
    for name, value in row.items():
        is_loss = name == LOSS or name.startswith(f"{LOSS}/")
        if is_loss and value is not None:
            return name, value
    return "", math.nan
