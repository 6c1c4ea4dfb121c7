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
        result = None
        own = None
        try:
            result = step()
        except Exception as error:
            own = _portable(error)
        failed = [error for error in self.all_gather_object(own) if error is not None]
        if failed:
            chosen = min(failed, key=lambda error: isinstance(error, DamagedError))
            if isinstance(chosen, TitaniteError):
                chosen.agreed = True
            raise chosen from (chosen.__cause__ if chosen is own else own)
        return result  # type: ignore[return-value]

    def from_rank_0(self, step: Callable[[], T]) -> T:
        """Run `step` on rank 0 and return its result on every rank. Raises its error on all."""
        return self.broadcast_object(self.together(step if self.is_coordinator else lambda: None))


def _portable(error: Exception) -> Exception:
    """`error`, or what stands for it where its pickle does not come back: other ranks would be left waiting."""
    try:
        pickle.loads(pickle.dumps(error))
        return error
    except Exception:
        portable = RuntimeError(f"{type(error).__name__}: {error}")
        portable.__cause__ = error
        return portable
