"""The files of one checkpoint, in DCP's layout with a checksum per item: docs/checkpoints.md. Stock readers read it."""

import io
import struct
import zipfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import IO, Any, NamedTuple, cast

import pyarrow as pa
import torch
from isal import isal_zlib
from torch import Tensor
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import _split_by_size_and_type, _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import ReadItem, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor
from torch.utils.serialization import config as serialization

from checkpoint import CheckpointError
from checkpoint.manifest import Opened, path_of
from parallel.ranks import Ranks
from storage import DamagedError, LocalStore, Store, StoreError, retry

FILES = 2  # per rank, written at the same time
RANGE_BYTES = 16 << 20  # neighbouring items are read together up to this size

State = dict[str, Any]  # nested dicts of tensors, as DCP's planners take them
Written = dict[MetadataIndex, _StorageInfo]  # item → its file, offset and length, with its CRC-32


# ---------------------------------------------------------------- planning, by DCP


class WritePlan(NamedTuple):
    """Who writes what. Depends only on names, shapes and placements, so later saves of a run reuse it."""

    files: list[list[WriteItem]]  # what this rank writes into each of its files, in order
    metadata: Any  # DCP's index, without what lies where; on rank 0 only


def plan_save(state: State, ranks: Ranks) -> WritePlan:
    """Agree on who writes what. One of the ranks that hold a piece writes it. Collective."""
    planner = DefaultSavePlanner()
    planner.set_up_planner(state, is_coordinator=ranks.is_coordinator)
    return _share_out(planner.create_local_plan(), ranks)


def plan_rows(weights: dict[str, Tensor], piece_bytes: int) -> WritePlan:
    """A plan in which this process alone writes a model, of (meta) tensors by name, in pieces of whole rows."""
    items = []
    for name, weight in weights.items():
        row_bytes = weight[0].numel() * weight.itemsize
        rows = max(1, piece_bytes // row_bytes)
        for start in range(0, len(weight), rows):
            items.append(_write_item(f"model.{name}", weight, start, rows))
    names = {f"model.{name}": ("model", name) for name in weights}
    return _share_out(SavePlan(items, planner_data=names), Ranks())


def _write_item(name: str, weight: Tensor, start: int, rows: int) -> WriteItem:
    """DCP's order to write some rows of a weight."""
    offsets = torch.Size([start, *[0] * (weight.ndim - 1)])
    chunk = ChunkStorageMetadata(offsets, weight[start : start + rows].shape)
    data = TensorWriteData(chunk, TensorProperties(dtype=weight.dtype), weight.shape)
    return WriteItem(MetadataIndex(name, offsets), WriteItemType.SHARD, tensor_data=data)


def _share_out(plan: SavePlan, ranks: Ranks) -> WritePlan:
    """Give each piece to one of the ranks that planned it. Collective."""
    planner = DefaultSavePlanner()
    own: SavePlan = ranks.reduce_scatter("plan", lambda: plan, lambda plans: planner.create_global_plan(plans)[0])
    files = [file for file in _split_by_size_and_type(FILES, own.items) if file]
    return WritePlan(files, planner.metadata if ranks.is_coordinator else None)


def resolver(state: State) -> Callable[[WriteItem], Tensor]:
    """A function that returns the tensor of a write item: this rank's part, on its device."""
    planner = DefaultSavePlanner()
    planner.set_up_planner(state)
    return lambda item: cast(Tensor, planner.resolve_data(item)).detach()


# ---------------------------------------------------------------- writing


def write_items(
    store: Store,
    name: str,
    rank: int,
    files: Sequence[Sequence[WriteItem]],
    resolve: Callable[[WriteItem], Tensor],
    on_progress: Callable[[], None] = lambda: None,
) -> Written:
    """Write this rank's `files` of items to checkpoint `name`. Returns where they lie. Raises StoreError."""

    def write(file: str, items: Sequence[WriteItem]) -> Written:
        written = {}
        # torch.save's own CRC-32 takes three times as long as ours, and nobody reads it. This patch is a thread's own.
        with store.create(f"{name}/{file}") as raw, serialization.patch("save.compute_crc32", False):  # type: ignore[attr-defined]
            stream = _ChecksummedStream(raw, on_progress)
            for item in items:
                offset = stream.position
                stream.crc32 = 0
                _save_tensor(resolve(item), stream)
                info = _StorageInfo(file, offset, stream.position - offset)
                info.crc32 = stream.crc32  # type: ignore[attr-defined]
                written[item.index] = info
        return written

    def write_again(file: str, items: Sequence[WriteItem]) -> Written:
        # What an S3 store tries again are its requests; after a failed fsync a file has to be written anew.
        return retry(partial(write, file, items), store.retry_seconds)

    written = {}
    names = [f"__{rank}_{number}.distcp" for number in range(FILES)]
    try:
        with ThreadPoolExecutor(FILES) as threads:
            for own in threads.map(write_again, names, files):
                written.update(own)
    except StoreError:
        # A folder in which nothing was written would stay for good. Only now does no thread need it any more.
        if isinstance(store, LocalStore):
            with suppress(StoreError):
                store.remove([f"{name}/{file}" for file in names])
        raise
    return written


def _save_tensor(tensor: Tensor, stream: "_ChecksummedStream") -> None:
    tensor = tensor.cpu().contiguous()
    if tensor.untyped_storage().nbytes() > tensor.nbytes:  # torch.save writes the whole storage
        tensor = tensor.clone()
    try:
        torch.save(tensor, cast(IO[bytes], stream))
    except RuntimeError as error:  # torch ends the archive after a failed write: raise the write's error
        raise error.__context__ or error from None


class _ChecksummedStream(io.RawIOBase):
    """A stream for torch.save. Passes bytes on and keeps their count and the CRC-32 of the current item."""

    def __init__(self, stream: IO[bytes], on_progress: Callable[[], None]) -> None:
        self.stream = stream
        self.on_progress = on_progress
        self.position = 0
        self.crc32 = 0

    def write(self, data: Any) -> int:
        self.crc32 = isal_zlib.crc32(data, self.crc32)
        self.position += len(data)
        self.stream.write(data)
        self.on_progress()
        return len(data)


# ---------------------------------------------------------------- reading


class _Item(NamedTuple):
    """One piece of a tensor in a checkpoint."""

    info: Any  # its file, offset and length; and CRC-32, but for stock checkpoints
    piece: MetadataIndex  # of which tensor, and where in it
    wanted: list[ReadItem]  # what it is read for

    @property
    def end(self) -> int:
        return self.info.offset + self.info.length


def read_state(opened: Opened, state: State, on_progress: Callable[[], None] = lambda: None) -> None:
    """Fill the tensors of `state` (nested dicts; DTensors: this rank's part) from a checkpoint, in place.

    Checks every item's CRC-32 before copying any of it. Raises CheckpointError if the checkpoint
    lacks a tensor or has it in another shape, DamagedError naming file and tensor if bytes are
    wrong; `state` may then be filled in part.
    """
    metadata = opened.metadata
    planner = DefaultLoadPlanner()
    planner.set_up_planner(state, metadata)
    try:
        plan = planner.create_local_plan()
    except (RuntimeError, ValueError) as error:  # of DCP: a tensor is missing or has another shape
        raise CheckpointError(f"{opened.url}: {error}") from None

    def copy(item: _Item, data: memoryview) -> None:
        try:
            tensor = _decode(item, data, metadata)
        except Exception as error:
            where = f"{opened.url}/{item.info.relative_path}"
            raise DamagedError(f"{where}: {item.piece.fqn} is not a readable tensor: {error}") from None
        for part in item.wanted:
            target = planner.resolve_tensor(part).detach()
            target.copy_(narrow_tensor_by_index(tensor, part.storage_offsets, part.lengths))
        on_progress()

    wanted: dict[MetadataIndex, list[ReadItem]] = {}
    for part in plan.items:
        wanted.setdefault(part.storage_index, []).append(part)
    items = [_Item(metadata.storage_data[index], index, parts) for index, parts in wanted.items()]
    _read_items(opened, items, copy)


@torch.no_grad()
def read_average(
    checkpoints: Sequence[Opened],
    tensors: Mapping[str, Tensor],
    on_progress: Callable[[], None] = lambda: None,
) -> None:
    """Fill weights, each or this rank's part, with the mean over checkpoints, one after another.

    Sums are in float64, of one weight at a time. Raises what `read_state` does; weights may then be filled in part.
    """
    for name, tensor in tensors.items():
        values = local_part(tensor)
        total = torch.zeros_like(values, dtype=torch.float64)
        for opened in checkpoints:
            read_state(opened, {"model": {name: tensor}}, on_progress)
            total += values
        values.copy_(total / len(checkpoints))


def local_part(tensor: Tensor) -> Tensor:
    """What this rank has of a tensor, sharing memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def verify_items(opened: Opened, progress: Callable[[int], None]) -> None:
    """Read and check every item of a checkpoint. Calls `progress` with the bytes of each. Raises DamagedError."""
    items = [_Item(info, index, []) for index, info in opened.metadata.storage_data.items()]
    _read_items(opened, items, lambda item, data: progress(item.info.length))


def _decode(item: _Item, data: memoryview, metadata: Any) -> Tensor:
    """The tensor of an item. For our own checkpoints, a view of `data`, found without unpickling."""
    if not hasattr(item.info, "crc32"):  # a stock checkpoint's, in an import
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    stored: Any = metadata.state_dict_metadata[item.piece.fqn]
    shape = stored.chunks[item.piece.index].sizes  # DCP's planner numbers the chunks
    dtype = stored.properties.dtype
    with zipfile.ZipFile(pa.BufferReader(data)) as archive:  # what torch.save writes
        record = next(entry for entry in archive.infolist() if entry.filename.endswith("/data/0"))
    name_bytes, extra_bytes = struct.unpack_from("<HH", data, record.header_offset + 26)
    start = record.header_offset + 30 + name_bytes + extra_bytes
    values = torch.frombuffer(data, dtype=torch.uint8, count=shape.numel() * dtype.itemsize, offset=start)
    return values.view(dtype).view(shape)


def _read_items(opened: Opened, items: Sequence[_Item], consume: Callable[[_Item, memoryview], None]) -> None:
    """Read `items` in the order in which they lie, neighbours together. Threads check each and hand it to `consume`.

    Each thread holds the bytes of one range, RANGE_BYTES or one larger item.
    """

    def load(group: list[_Item]) -> None:
        for item, piece in zip(group, _read_range(opened, group), strict=True):
            consume(item, piece)

    start: Callable[[], None] | None = None
    if torch.accelerator.is_available():  # a new thread has the first device, where a copy would make a context
        start = partial(torch.accelerator.set_device_index, torch.accelerator.current_device_index())
    with ThreadPoolExecutor(opened.store.read_threads, initializer=start) as threads:
        try:
            list(threads.map(load, _neighbours(items)))
        finally:
            threads.shutdown(cancel_futures=True)


def _read_range(opened: Opened, group: list[_Item]) -> list[memoryview]:
    """The bytes of each of some neighbours, read at once and checked. Raises DamagedError, StoreError."""
    file = group[0].info.relative_path
    first = group[0].info.offset
    data = opened.store.read(path_of(opened.name, file), first, group[-1].end - first)
    pieces = []
    for item in group:
        piece = data[item.info.offset - first : item.end - first]
        expected = getattr(item.info, "crc32", None)  # a stock checkpoint's has none
        if expected is not None and isal_zlib.crc32(piece) != expected:
            where = f"{opened.url}/{file}: checksum of {item.piece.fqn} differs"
            raise DamagedError(f"{where}, at byte {item.info.offset}")
        pieces.append(piece)
    return pieces


def _neighbours(items: Sequence[_Item]) -> list[list[_Item]]:
    """Runs of items that touch in one file, up to RANGE_BYTES."""
    groups: list[list[_Item]] = []
    touched = None  # the place where a neighbour would begin
    for item in sorted(items, key=lambda item: (item.info.relative_path, item.info.offset)):
        file = item.info.relative_path
        if touched != (file, item.info.offset) or item.end - groups[-1][0].info.offset > RANGE_BYTES:
            groups.append([])
        groups[-1].append(item)
        touched = (file, item.end)
    return groups
