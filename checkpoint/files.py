"""The files of one checkpoint, in DCP's layout with a checksum per item: docs/checkpoints.md.

Stock readers read it. Stock checkpoints are read here too, but unchecked, since they hold no checksums.
"""

import io
import struct
import zipfile
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import groupby
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
from torch.utils.serialization import config as serialization

from checkpoint import CheckpointError
from checkpoint.manifest import ChecksumError, Opened, checked_twice
from checkpoint.ranks import Ranks
from storage import DamagedError, Store, join

FILES = 2  # per rank, written at the same time
RANGE_BYTES = 16 << 20  # neighbouring items are read together up to this size

Item = tuple[_StorageInfo, MetadataIndex, list[ReadItem]]  # its place, and what it is wanted for
State = dict[str, Any]  # nested dicts of tensors, as DCP's planners take them
Written = dict[MetadataIndex, _StorageInfo]  # item → its place, with its CRC-32


# ---------------------------------------------------------------- planning, by DCP


class Plan(NamedTuple):
    """Who writes what. Depends only on names, shapes and placements, so later saves of a run reuse it."""

    files: list[list[WriteItem]]  # what this rank writes into each of its files, in order
    metadata: Any  # DCP's index, without the places in the files; on rank 0 only


def plan_save(state: State, ranks: Ranks) -> Plan:
    """Agree on who writes what. One of the ranks that hold a piece writes it. Collective."""
    planner = DefaultSavePlanner()
    planner.set_up_planner(state, is_coordinator=ranks.is_coordinator)
    return _share_out(planner.create_local_plan(), ranks)


def plan_rows(weights: dict[str, Tensor], piece_bytes: int) -> Plan:
    """A plan in which this process alone writes a model, of (meta) tensors by name, in pieces of whole rows."""
    items = []
    for name, weight in weights.items():
        step = max(1, piece_bytes // (weight[0].numel() * weight.itemsize))
        for start in range(0, len(weight), step):
            offsets, sizes = torch.Size([start, *[0] * (weight.ndim - 1)]), weight[start : start + step].shape
            properties = TensorProperties(dtype=weight.dtype)
            data = TensorWriteData(ChunkStorageMetadata(offsets, sizes), properties, weight.shape)
            items.append(WriteItem(MetadataIndex(f"model.{name}", offsets), WriteItemType.SHARD, tensor_data=data))
    return _share_out(SavePlan(items, planner_data={f"model.{name}": ("model", name) for name in weights}), Ranks())


def _share_out(plan: SavePlan, ranks: Ranks) -> Plan:
    """Give each piece to one of the ranks that planned it. Collective."""
    planner = DefaultSavePlanner()
    own: SavePlan = ranks.reduce_scatter("plan", lambda: plan, lambda plans: planner.create_global_plan(plans)[0])
    files = [file for file in _split_by_size_and_type(FILES, own.items) if file]
    return Plan(files, planner.metadata if ranks.is_coordinator else None)


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
    """Write this rank's `files` of items to checkpoint `name`. Returns their places and CRC-32. Raises StoreError."""

    def write(file: str, items: Sequence[WriteItem]) -> Written:
        written = {}
        # torch.save's own CRC-32 takes three times as long as ours, and nobody reads it. This patch is a thread's own.
        with store.create(f"{name}/{file}") as raw, serialization.patch("save.compute_crc32", False):  # type: ignore[attr-defined]
            stream = _ChecksummedStream(raw, on_progress)
            for item in items:
                tensor, offset, stream.crc32 = resolve(item).cpu().contiguous(), stream.position, 0
                if tensor.untyped_storage().nbytes() > tensor.nbytes:  # torch.save writes the whole storage
                    tensor = tensor.clone()
                try:
                    torch.save(tensor, cast(IO[bytes], stream))
                except RuntimeError as error:  # torch ends the archive after a failed write: raise the write's error
                    raise error.__context__ or error from None
                written[item.index] = info = _StorageInfo(file, offset, stream.position - offset)
                info.crc32 = stream.crc32  # type: ignore[attr-defined]
        return written

    names = [f"__{rank}_{number}.distcp" for number in range(FILES)]
    with ThreadPoolExecutor(FILES) as threads:
        return {index: info for own in threads.map(write, names, files) for index, info in own.items()}


class _ChecksummedStream(io.RawIOBase):
    """A stream for torch.save. Passes bytes on and keeps their count and the CRC-32 of the current item."""

    def __init__(self, stream: IO[bytes], on_progress: Callable[[], None]) -> None:
        self.stream, self.on_progress = stream, on_progress
        self.position = 0
        self.crc32 = 0

    def write(self, data: Any) -> int:
        self.crc32 = isal_zlib.crc32(data, self.crc32)
        self.position += len(data)
        self.stream.write(data)
        self.on_progress()
        return len(data)


def copy_files(source: Store, target: Store, name: str, written: Written, on_progress: Callable[[], None]) -> None:
    """Copy what this rank has `written` of checkpoint `name`, and check each item. Raises DamagedError, StoreError."""

    def copy(path: str, places: Sequence[Any]) -> None:
        with target.create(path) as raw:
            for info in places:
                data = source.read(path, info.offset, info.length)
                if isal_zlib.crc32(data) != info.crc32:
                    raise ChecksumError(f"{join(source.url, path)}: checksum differs at byte {info.offset}; not copied")
                raw.write(data)
                on_progress()

    for file, places in groupby(written.values(), lambda info: info.relative_path):  # as written: file by file
        checked_twice(partial(copy, f"{name}/{file}", list(places)))


# ---------------------------------------------------------------- reading


def read_state(opened: Opened, state: State, on_progress: Callable[[], None] = lambda: None) -> None:
    """Fill the tensors of `state` (nested dicts; DTensors: this rank's part) from a checkpoint, in place.

    Checks every item's CRC-32 before copying any of it. Raises CheckpointError if the checkpoint lacks a tensor or has
    it in another shape, DamagedError naming file and tensor if bytes are wrong; `state` may then be filled in part.
    """
    planner, metadata = DefaultLoadPlanner(), opened.metadata
    planner.set_up_planner(state, metadata)
    try:
        items = planner.create_local_plan().items
    except (RuntimeError, ValueError) as error:  # of DCP: a tensor is missing or has another shape
        hint = "" if opened.manifest else "; torchtitan's come in by `python -m tools.hf import --from torchtitan`"
        raise CheckpointError(f"{opened.url}: {error}{hint}") from None

    def copy(info: _StorageInfo, index: MetadataIndex, wanted: list[ReadItem], data: memoryview) -> None:
        try:
            tensor = _decode(info, data, metadata, index)
        except Exception as error:
            where = f"{opened.url}/{info.relative_path}"
            raise DamagedError(f"{where}: {index.fqn} is not a readable tensor: {error}") from None
        for item in wanted:
            target = planner.resolve_tensor(item).detach()
            target.copy_(narrow_tensor_by_index(tensor, item.storage_offsets, item.lengths))
        on_progress()

    wanted = dict[MetadataIndex, list[ReadItem]]()
    for item in items:
        wanted.setdefault(item.storage_index, []).append(item)
    _read_items(opened, [(metadata.storage_data[index], index, items) for index, items in wanted.items()], copy)


def verify_items(opened: Opened, progress: Callable[[int], None]) -> None:
    """Read and check every item of a checkpoint. Calls `progress` with the bytes of each. Raises DamagedError."""
    items: list[Item] = [(info, index, []) for index, info in opened.metadata.storage_data.items()]
    _read_items(opened, items, lambda info, index, wanted, data: progress(info.length))


def _decode(info: _StorageInfo, data: memoryview, metadata: Any, index: MetadataIndex) -> Tensor:
    """The tensor of an item. For our own checkpoints, a view of `data`, found without unpickling."""
    if not hasattr(info, "crc32"):
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    stored: Any = metadata.state_dict_metadata[index.fqn]
    shape, dtype = stored.chunks[index.index].sizes, stored.properties.dtype  # DCP's planner numbers the chunks
    with zipfile.ZipFile(pa.BufferReader(data)) as archive:  # what torch.save writes
        record = next(entry for entry in archive.infolist() if entry.filename.endswith("/data/0"))
    name_bytes, extra_bytes = struct.unpack_from("<HH", data, record.header_offset + 26)
    start = record.header_offset + 30 + name_bytes + extra_bytes
    values = torch.frombuffer(data, dtype=torch.uint8, count=shape.numel() * dtype.itemsize, offset=start)
    return values.view(dtype).view(shape)


def _read_items(opened: Opened, items: Iterable[Item], consume: Callable[..., None]) -> None:
    """Read `items` by place, neighbours together. Threads hand each to `consume` with its bytes, which are checked.

    Each thread holds the bytes of one range, RANGE_BYTES or one larger item.
    """

    def read(group: list[Item]) -> list[memoryview]:
        first = group[0][0]
        data = opened.store.read(
            f"{opened.name}/{first.relative_path}".lstrip("/"), first.offset, _end(group) - first.offset
        )
        pieces = [data[info.offset - first.offset :][: info.length] for info, *_ in group]
        for (info, index, _), piece in zip(group, pieces, strict=True):
            expected = getattr(info, "crc32", None)  # stock checkpoints have none
            if expected is not None and isal_zlib.crc32(piece) != expected:
                where = f"{opened.url}/{info.relative_path}"
                raise ChecksumError(f"{where}: checksum of {index.fqn} differs, at byte {info.offset}")
        return pieces

    def load(group: list[Item]) -> None:
        for item, piece in zip(group, checked_twice(partial(read, group)), strict=True):
            consume(*item, piece)

    start: Callable[[], None] | None = None
    if torch.accelerator.is_available():  # a new thread has the first device, where a copy would make a context
        start = partial(torch.accelerator.set_device_index, torch.accelerator.current_device_index())
    with ThreadPoolExecutor(opened.store.read_threads, initializer=start) as threads:
        try:
            list(threads.map(load, _neighbours(items)))
        finally:
            threads.shutdown(cancel_futures=True)


def _end(group: Sequence[Item]) -> int:
    return group[-1][0].offset + group[-1][0].length


def _neighbours(items: Iterable[Item]) -> list[list[Item]]:
    """Runs of items that touch in one file, up to RANGE_BYTES."""
    groups = list[list[Item]]()
    for item in sorted(items, key=lambda item: (item[0].relative_path, item[0].offset)):
        if groups:
            info, first = item[0], groups[-1][0][0]
            touches = (info.relative_path, info.offset) == (first.relative_path, _end(groups[-1]))
            if touches and info.offset + info.length - first.offset <= RANGE_BYTES:
                groups[-1].append(item)
                continue
        groups.append([item])
    return groups
