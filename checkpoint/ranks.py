"""The collectives on objects that checkpoints need, over their own group, and errors on which all ranks agree."""

import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from config import TitaniteError
from storage import DamagedError

T = TypeVar("T")


@dataclass(frozen=True)
class Ranks:
    """All ranks of the run, or this process alone (`group` None)."""

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None

    def broadcast(self, value: T) -> T:
        """Rank 0's `value`, on every rank."""
        if self.group is None:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self.group)
        return box[0]

    def gather(self, value: T) -> list[T]:
        """Every rank's `value`, in rank order, on rank 0; an empty list elsewhere."""
        if self.group is None:
            return [value]
        values: list[Any] | None = [None] * self.size if self.rank == 0 else None
        dist.gather_object(value, values, dst=0, group=self.group)
        return values or []

    def scatter(self, values: Sequence[T]) -> T:
        """Entry number `rank` of rank 0's `values`."""
        if self.group is None:
            return values[0]
        box: list[Any] = [None]
        dist.scatter_object_list(box, list(values) if self.rank == 0 else None, src=0, group=self.group)
        return box[0]

    def together(self, step: Callable[[], T]) -> T:
        """Run `step` on every rank. If it fails on any, raise the same error on all.

        Prefers other errors to a DamagedError, which is raised only if no rank failed for another reason.
        """
        result, error = _tried(step)
        failed = [failure for failure in self.gather(_portable(error)) if failure is not None]
        failed.sort(key=lambda failure: isinstance(failure, DamagedError))
        _raise_agreed(self.broadcast(failed[0] if failed else None), error)
        return result  # type: ignore[return-value]

    def from_rank_0(self, step: Callable[[], T]) -> T:
        """Run `step` on rank 0 and return its result on every rank. Raises its error on all."""
        result, error = _tried(step) if self.rank == 0 else (None, None)
        result, verdict = self.broadcast((result, _portable(error)))
        _raise_agreed(verdict, error)
        return result  # type: ignore[return-value]


def _tried(step: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """(result of `step` or None, its error or None)."""
    try:
        return step(), None
    except Exception as error:
        return None, error


def _raise_agreed(verdict: Exception | None, own: Exception | None) -> None:
    """Raise `verdict`, the error that all ranks raise, if any, from this rank's `own`."""
    if verdict is None:
        return
    if isinstance(verdict, TitaniteError):
        verdict.agreed = True
    if verdict is own:
        raise verdict  # it may already have a cause
    raise verdict from own


def build_ranks(timeout_seconds: int) -> Ranks:
    """All ranks of the default process group, over their own gloo group; this process alone without one. Collective.

    The separate group keeps the objects off the accelerator and lets a background save run while
    training uses the default group.
    """
    if not dist.is_initialized():
        return Ranks()
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_seconds))
    return Ranks(dist.get_rank(), dist.get_world_size(), group)


def _portable(error: Exception | None) -> Exception | None:
    """`error`, or a RuntimeError with its text if it cannot be pickled."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
