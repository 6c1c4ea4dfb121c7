"""The collectives on objects that checkpoints need, over their own group, and errors on which all ranks agree."""

import pickle
from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.utils import _DistWrapper

from config import TitaniteError
from storage import DamagedError

T = TypeVar("T")


class Ranks(_DistWrapper):
    """All ranks of a group, or without one this process alone: DCP's collectives, and two of steps that may fail."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        super().__init__(group, use_dist=group is not None, coordinator_rank=0)
        self.size = self.get_world_size()

    def together(self, step: Callable[[], T]) -> T:
        """Run `step` on every rank. If it fails on any, raise the same error on all, a DamagedError only if all are."""
        result, error = _tried(step)
        failed = [failure for failure in self.all_gather_object(error) if failure is not None]
        failed.sort(key=lambda failure: isinstance(failure, DamagedError))
        _raise_agreed(failed[0] if failed else None, error)
        return result  # type: ignore[return-value]

    def from_rank_0(self, step: Callable[[], T]) -> T:
        """Run `step` on rank 0 and return its result on every rank. Raises its error on all."""
        result, error = _tried(step) if self.is_coordinator else (None, None)
        result, verdict = self.broadcast_object((result, error))
        _raise_agreed(verdict, error)
        return result  # type: ignore[return-value]


def _tried(step: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """(result of `step` or None, its error or None). An error that cannot be pickled becomes a RuntimeError."""
    try:
        return step(), None
    except Exception as error:
        try:
            pickle.loads(pickle.dumps(error))
            return None, error
        except Exception:
            portable = RuntimeError(f"{type(error).__name__}: {error}")
            portable.__cause__ = error
            return None, portable


def _raise_agreed(verdict: Exception | None, own: Exception | None) -> None:
    """Raise `verdict`, the error that all ranks raise, if any."""
    if isinstance(verdict, TitaniteError):
        verdict.agreed = True
    if verdict is not None:
        raise verdict from (verdict.__cause__ if verdict is own else own)
