"""Decide which rank writes what: DCP's planner, on the local plans of all ranks."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import _split_by_size_and_type
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from checkpoint.ranks import Ranks

FILES = 2  # per rank, written at the same time

State = dict[str, Any]  # nested dicts of tensors, as DCP's planners take them


@dataclass(frozen=True)
class Plan:
    """Who writes what. Depends only on names, shapes and placements, so later saves of a run reuse it."""

    files: list[list[WriteItem]]  # what this rank writes into each of its files, in order
    all_files: list[list[list[WriteItem]]]  # the same of every rank; empty but on rank 0
    metadata: Metadata | None  # DCP's index, without the places in the files; on rank 0 only


def plan_save(state: State, ranks: Ranks) -> Plan:
    """Agree on who writes what. One of the ranks that hold a piece writes it. Collective."""
    planner = DefaultSavePlanner()
    planner.set_up_planner(state, is_coordinator=ranks.rank == 0)
    return _share_out(ranks.gather(planner.create_local_plan()), ranks)


def split_rows(path: tuple[str, ...], dtype: torch.dtype, shape: Sequence[int], piece_bytes: int) -> list[WriteItem]:
    """Split a tensor into pieces of whole rows, about `piece_bytes` each."""
    rows, *rest = shape
    step = max(1, piece_bytes // (prod(rest) * dtype.itemsize))
    items = []
    for start in range(0, rows, step):
        offsets, sizes = torch.Size([start, *(0 for _ in rest)]), torch.Size([min(step, rows - start), *rest])
        data = TensorWriteData(ChunkStorageMetadata(offsets, sizes), TensorProperties(dtype=dtype), torch.Size(shape))
        items.append(WriteItem(MetadataIndex(".".join(path), offsets), WriteItemType.SHARD, tensor_data=data))
    return items


def plan_pieces(items: list[WriteItem]) -> Plan:
    """A plan in which this process alone writes all `items`, from `split_rows`."""
    paths = {item.index.fqn: tuple(item.index.fqn.split(".", 1)) for item in items}
    return _share_out([SavePlan(items, planner_data=paths)], Ranks())


def resolver(state: State) -> Callable[[WriteItem], Tensor]:
    """A function that returns the tensor of a write item: this rank's part, on its device."""
    planner = DefaultSavePlanner()
    planner.set_up_planner(state)

    def resolve(item: WriteItem) -> Tensor:
        tensor = planner.resolve_data(item)
        assert isinstance(tensor, Tensor)
        return tensor.detach()

    return resolve


def _share_out(plans: list[SavePlan], ranks: Ranks) -> Plan:
    """Give each piece to one of the ranks that planned it. `plans` are those of all ranks, on rank 0. Collective."""
    all_files: list[list[list[WriteItem]]] = []
    metadata = None

    def choose() -> None:
        nonlocal all_files, metadata  # not returned: each rank needs only its part
        shared, metadata = DefaultSavePlanner().create_global_plan(plans)
        all_files = [[file for file in _split_by_size_and_type(FILES, plan.items) if file] for plan in shared]

    ranks.from_rank_0(choose)
    return Plan(ranks.scatter(all_files), all_files, metadata)
