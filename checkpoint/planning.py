"""Decide which rank writes what, by gathering DCP's local plans as a few plain values.

DCP itself gathers plan objects. With 512 ranks and 1,089 tensors, rank 0 then spends most of its time on unpickling
557,000 of them, twice.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from checkpoint.index import Template, build_template
from checkpoint.names import file_of
from checkpoint.ranks import Ranks

FILES = 2  # per rank, written at the same time

State = dict[str, Any]  # nested dicts of tensors, as DCP's planners take them


@dataclass(frozen=True)
class Plan:
    """Who writes what. Depends only on names, shapes and placements, so later saves of a run reuse it."""

    files: list[list[WriteItem]]  # what this rank writes into each of its files, in order
    index: Template | None  # covers the files of all ranks; on rank 0 only


class Piece(NamedTuple):
    """A box of a tensor that a rank could write."""

    path: tuple[str, ...]  # in the nested state; joined by dots, the tensor's name
    dtype: torch.dtype
    shape: tuple[int, ...]  # of the whole tensor
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


def plan_save(state: State, ranks: Ranks) -> Plan:
    """Agree on who writes what. One of the ranks that hold a piece writes it. Collective."""
    planner = DefaultSavePlanner()
    planner.set_up_planner(state, is_coordinator=ranks.rank == 0)
    local = planner.create_local_plan()
    pieces = ranks.gather([tuple(_piece(item, local.planner_data)) for item in local.items])
    chosen: list[list[list[int]]] = []
    index = None

    def choose() -> None:
        nonlocal chosen, index  # not returned, as they are large: each rank gets only its part, the index stays here
        all_pieces = [[Piece._make(piece) for piece in own] for own in pieces]
        chosen = _share_out(all_pieces)
        index = build_template(_describe(all_pieces, chosen))

    ranks.from_rank_0(choose)
    return Plan([[local.items[number] for number in file] for file in ranks.scatter(chosen)], index)


def split_rows(path: tuple[str, ...], dtype: torch.dtype, shape: Sequence[int], piece_bytes: int) -> list[Piece]:
    """Split a tensor into pieces of whole rows, about `piece_bytes` each."""
    rows, *rest = shape
    step = max(1, piece_bytes // (prod(rest) * dtype.itemsize))
    return [
        Piece(path, dtype, tuple(shape), (start, *(0 for _ in rest)), (min(step, rows - start), *rest))
        for start in range(0, rows, step)
    ]


def plan_pieces(pieces: Sequence[Piece]) -> Plan:
    """A plan in which this process alone writes all `pieces`."""
    files = _split_evenly(pieces, range(len(pieces)))

    def item(piece: Piece) -> WriteItem:
        chunk = ChunkStorageMetadata(torch.Size(piece.offsets), torch.Size(piece.sizes))
        data = TensorWriteData(chunk, TensorProperties(dtype=piece.dtype), torch.Size(piece.shape))
        return WriteItem(MetadataIndex(".".join(piece.path), chunk.offsets), WriteItemType.SHARD, tensor_data=data)

    index = build_template(_describe([pieces], [files]))
    return Plan([[item(pieces[number]) for number in file] for file in files], index)


def resolver(state: State) -> Callable[[WriteItem], Tensor]:
    """A function that returns the tensor of a write item: this rank's part, on its device."""
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


def _share_out(pieces: Sequence[Sequence[Piece]]) -> list[list[list[int]]]:
    """Numbers of the pieces that each rank writes, by file. The rank with the fewest bytes writes a shared piece."""
    owners: dict[tuple[Any, ...], list[tuple[int, int]]] = defaultdict(list)
    for rank, own in enumerate(pieces):
        for number, piece in enumerate(own):
            owners[piece.path, piece.offsets].append((rank, number))
    chosen: list[list[int]] = [[] for _ in pieces]
    written = [0] * len(pieces)
    for candidates in sorted(owners.values(), key=len):  # pieces without a choice first
        rank, number = min(candidates, key=lambda candidate: written[candidate[0]])
        chosen[rank].append(number)
        written[rank] += _bytes(pieces[rank][number])
    return [_split_evenly(own, sorted(numbers)) for own, numbers in zip(pieces, chosen, strict=True)]


def _split_evenly(pieces: Sequence[Piece], numbers: Sequence[int]) -> list[list[int]]:
    """Divide the `numbers` of pieces among at most FILES files of about equal bytes, none empty."""
    files: list[list[int]] = [[] for _ in range(FILES)]
    sizes = [0] * FILES
    for number in sorted(numbers, key=lambda number: _bytes(pieces[number]), reverse=True):
        smallest = sizes.index(min(sizes))
        files[smallest].append(number)
        sizes[smallest] += _bytes(pieces[number]) + 1
    return [file for file in files if file]


def _bytes(piece: Piece) -> int:
    return prod(piece.sizes) * piece.dtype.itemsize


def _describe(pieces: Sequence[Sequence[Piece]], files: Sequence[Sequence[Sequence[int]]]) -> Metadata:
    """DCP's index of the pieces that each rank writes, by file. Leaves the places in the files open."""
    tensors: dict[str, TensorStorageMetadata] = {}
    paths: dict[str, tuple[str, ...]] = {}
    storage_data: dict[MetadataIndex, _StorageInfo] = {}
    join, size = cache(".".join), cache(torch.Size)  # equal values share one object, which is pickled once
    in_order = (
        (file, own[item])
        for rank, own in enumerate(pieces)
        for file, items in ((file_of(rank, number), items) for number, items in enumerate(files[rank]))
        for item in items
    )
    for file, (path, dtype, shape, offsets, sizes) in in_order:
        name = join(path)
        if name not in tensors:
            paths[name] = path
            tensors[name] = TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(shape), [])
        place = torch.Size(offsets)
        storage_data[MetadataIndex(name, place, len(tensors[name].chunks))] = _StorageInfo(file, 0, 0)
        tensors[name].chunks.append(ChunkStorageMetadata(place, size(sizes)))
    for name, tensor in tensors.items():
        held = sum(chunk.sizes.numel() for chunk in tensor.chunks)
        if held != tensor.size.numel():
            raise ValueError(f"{name}: its pieces hold {held} values, must hold {tensor.size.numel()}")
    return Metadata(dict(tensors), paths, storage_data)
