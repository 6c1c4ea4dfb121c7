"""Who writes what: DCP's local plans, brought together by few and plain values.

DCP's own way gathers its plan objects: with 512 ranks and 1,089 tensors rank 0 spends most of its time on building
557,000 of them from their pickles, twice.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from checkpoint.ranks import Ranks

State = dict[str, Any]  # nested dicts of tensors, as DCP's planners take them


@dataclass(frozen=True)
class Plan:
    """Depends on names, shapes and placements only, so it serves every later save of a run."""

    items: list[WriteItem]  # of this rank
    indices: list[list[MetadataIndex]]  # of every rank's items, on rank 0
    metadata: Metadata | None  # the index, without places, on rank 0


class Piece(NamedTuple):
    """A box of a tensor that a rank could write."""

    path: tuple[str, ...]  # in the nested state; joined by dots it is the tensor's name
    dtype: torch.dtype
    shape: tuple[int, ...]  # of the whole tensor
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


def plan_save(state: State, ranks: Ranks) -> Plan:
    """Agree on who writes what; a piece that several ranks have is written by one of them. Collective."""
    planner = DefaultSavePlanner()
    planner.set_up_planner(state, is_coordinator=ranks.rank == 0)
    local = planner.create_local_plan()
    pieces = ranks.gather([tuple(_piece(item, local.planner_data)) for item in local.items])
    chosen: list[list[int]] = []
    indices: list[list[MetadataIndex]] = []
    metadata = None
    if ranks.rank == 0:
        all_pieces = [[Piece._make(piece) for piece in own] for own in pieces]
        chosen = _share_out(all_pieces)
        metadata, indices = _describe(all_pieces, chosen)
    return Plan([local.items[number] for number in ranks.scatter(chosen)], indices, metadata)


def split_rows(path: tuple[str, ...], dtype: torch.dtype, shape: Sequence[int], piece_bytes: int) -> list[Piece]:
    """A tensor in pieces of whole rows, of about `piece_bytes` each."""
    rows, *rest = shape
    step = max(1, piece_bytes // (prod(rest) * dtype.itemsize))
    return [
        Piece(path, dtype, tuple(shape), (start, *(0 for _ in rest)), (min(step, rows - start), *rest))
        for start in range(0, rows, step)
    ]


def plan_pieces(pieces: Sequence[Piece]) -> Plan:
    """All `pieces` written by this process alone."""
    metadata, (indices,) = _describe([pieces], [range(len(pieces))])
    items = []
    for index, piece in zip(indices, pieces, strict=True):
        chunk = ChunkStorageMetadata(torch.Size(piece.offsets), torch.Size(piece.sizes))
        data = TensorWriteData(chunk, TensorProperties(dtype=piece.dtype), torch.Size(piece.shape))
        items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
    return Plan(items, [indices], metadata)


def resolver(state: State) -> Callable[[WriteItem], Tensor]:
    """The function that gives a write item's tensor: this rank's part of it, on its device."""
    planner = DefaultSavePlanner()
    planner.set_up_planner(state)

    def resolve(item: WriteItem) -> Tensor:
        tensor = planner.resolve_data(item)
        assert isinstance(tensor, Tensor)
        return tensor.detach()

    return resolve


def _piece(item: WriteItem, paths: dict[str, tuple[str, ...]]) -> Piece:
    data = item.tensor_data
    if data is None:
        raise TypeError(f"{item.index.fqn}: only tensors are part of a checkpoint's state")
    chunk = data.chunk
    path = paths[item.index.fqn]
    return Piece(path, data.properties.dtype, tuple(data.size), tuple(chunk.offsets), tuple(chunk.sizes))


def _share_out(pieces: Sequence[Sequence[Piece]]) -> list[list[int]]:
    """Numbers of the pieces that each rank writes: of those that have one, the rank with the fewest bytes so far."""
    owners: dict[tuple[Any, ...], list[tuple[int, int]]] = defaultdict(list)
    for rank, own in enumerate(pieces):
        for number, piece in enumerate(own):
            owners[piece.path, piece.offsets].append((rank, number))
    chosen: list[list[int]] = [[] for _ in pieces]
    written = [0] * len(pieces)
    for candidates in sorted(owners.values(), key=len):  # those without a choice first
        rank, number = min(candidates, key=lambda candidate: written[candidate[0]])
        chosen[rank].append(number)
        written[rank] += prod(pieces[rank][number].sizes) * pieces[rank][number].dtype.itemsize
    return [sorted(numbers) for numbers in chosen]


def _describe(
    pieces: Sequence[Sequence[Piece]], chosen: Sequence[Sequence[int]]
) -> tuple[Metadata, list[list[MetadataIndex]]]:
    """DCP's index of the chosen pieces, without places; and its key for each of them, by rank."""
    tensors: dict[str, TensorStorageMetadata] = {}
    paths: dict[str, tuple[str, ...]] = {}
    indices: list[list[MetadataIndex]] = [[] for _ in pieces]
    for own, numbers, keys in zip(pieces, chosen, indices, strict=True):
        for path, dtype, shape, offsets, sizes in (own[number] for number in numbers):
            name = ".".join(path)
            if name not in tensors:
                paths[name] = path
                tensors[name] = TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(shape), [])
            place = torch.Size(offsets)
            keys.append(MetadataIndex(name, place, len(tensors[name].chunks)))
            tensors[name].chunks.append(ChunkStorageMetadata(place, torch.Size(sizes)))
    for name, tensor in tensors.items():
        held = sum(chunk.sizes.numel() for chunk in tensor.chunks)
        if held != tensor.size.numel():
            raise ValueError(f"{name}: its pieces have {held} values of {tensor.size.numel()}")
    return Metadata(dict(tensors), planner_data=paths), indices
