"""The files of one checkpoint: DCP's layout, with a checksum per item and a manifest that commits it.

Each checkpoint has its own folder `step-00000100-6920d3f2a41c`, which is never written twice:

    __0_0.distcp ...   the items of each rank, in torch.save's format, one after the other
    .metadata          DCP's pickled index: where each piece of each tensor lies, and its CRC-32
    MANIFEST.json      written last, the commit: sizes of all files, SHA-256 of .metadata, step, ...

Stock readers (`torch.distributed.checkpoint.FileSystemReader`) read it. Stock checkpoints are read here too,
but unchecked, since they hold no checksums. Only the classes that DCP's index is made of are unpickled.
"""

import dataclasses
import io
import pickle
import struct
import zipfile
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import partial
from itertools import groupby
from math import prod
from typing import IO, Any, cast

import pyarrow as pa
import torch
from isal import isal_zlib
from torch import Tensor
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _split_by_size_and_type, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.utils.serialization import config as serialization

from checkpoint import CheckpointError
from checkpoint.manifest import (
    FORMAT_VERSION,
    MANIFEST,
    METADATA,
    ChecksumError,
    Manifest,
    Opened,
    checked_twice,
    encode_manifest,
    read_manifest,
    read_small,
    sha256,
    unpickle_metadata,
)
from checkpoint.ranks import Ranks
from storage import DamagedError, Store, join

FILES = 2  # per rank, written at the same time
RANGE_BYTES = 16 << 20  # neighbouring items are read together up to this size
WINDOW_BYTES = 256 << 20  # most bytes read and not yet copied, unless a single range is larger

Item = tuple[_StorageInfo, MetadataIndex, list[ReadItem]]  # its place, and what it is wanted for
State = dict[str, Any]  # nested dicts of tensors, as DCP's planners take them
Written = dict[MetadataIndex, _StorageInfo]  # item → its place, with its CRC-32


# ---------------------------------------------------------------- planning, by DCP


@dataclass(frozen=True)
class Plan:
    """Who writes what. Depends only on names, shapes and placements, so later saves of a run reuse it."""

    files: list[list[WriteItem]]  # what this rank writes into each of its files, in order
    metadata: Metadata | None  # DCP's index, without the places in the files; on rank 0 only


def plan_save(state: State, ranks: Ranks) -> Plan:
    """Agree on who writes what. One of the ranks that hold a piece writes it. Collective."""
    planner = DefaultSavePlanner()
    planner.set_up_planner(state, is_coordinator=ranks.is_coordinator)
    return _share_out(planner.create_local_plan(), ranks)


def plan_pieces(items: list[WriteItem]) -> Plan:
    """A plan in which this process alone writes all `items`, from `split_rows`."""
    paths = {item.index.fqn: tuple(item.index.fqn.split(".", 1)) for item in items}
    return _share_out(SavePlan(items, planner_data=paths), Ranks())


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


def _share_out(plan: SavePlan, ranks: Ranks) -> Plan:
    """Give each piece to one of the ranks that planned it. Collective."""
    metadata = None

    def choose(plans: list[SavePlan]) -> list[SavePlan]:
        nonlocal metadata
        chosen, metadata = DefaultSavePlanner().create_global_plan(plans)
        return chosen

    own: SavePlan = ranks.reduce_scatter("plan", lambda: plan, choose)
    return Plan([file for file in _split_by_size_and_type(FILES, own.items) if file], metadata)


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
    """Write this rank's `files`, lists of items, to the checkpoint folder `name`. Returns the items' places and CRC-32.

    Several threads call `on_progress`, after each write. Raises StoreError; the failed file then does not exist.
    """

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


def commit(
    store: Store, name: str, plan: Plan, written: Sequence[Written], facts: Manifest, companions: Mapping[str, bytes]
) -> None:
    """Write the index, then the manifest, after which the checkpoint exists. For rank 0, after all ranks have written.

    `written` has an entry per rank. `facts` go into the manifest unchanged, `companions` are small files beside it.
    """
    assert plan.metadata is not None
    places = {index: info for own in written for index, info in own.items()}
    if len(places) != sum(len(getattr(item, "chunks", ())) for item in plan.metadata.state_dict_metadata.values()):
        raise CheckpointError("not all items that were planned were written")
    index = dataclasses.replace(plan.metadata, storage_data=places, version=CURRENT_DCP_VERSION)
    pickled = pickle.dumps(dataclasses.replace(index, storage_meta=StorageMeta()))
    unpickle_metadata(pickled)  # a later Python or torch may pickle other classes, which no load would accept
    sizes = {METADATA: len(pickled)} | {file: len(content) for file, content in companions.items()}
    for info in places.values():
        sizes[info.relative_path] = max(sizes.get(info.relative_path, 0), info.offset + info.length)
    manifest = {
        "format": FORMAT_VERSION,
        "files": dict(sorted(sizes.items())),
        "metadata_sha256": sha256(pickled),
        "companions": {file: sha256(content) for file, content in companions.items()},
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "torch": torch.__version__,
        **facts,
    }
    for file, content in {**companions, METADATA: pickled}.items():
        store.put(f"{name}/{file}", content)
    store.put(f"{name}/{MANIFEST}", encode_manifest(manifest))


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
                stream = _ChecksummedStream(raw, on_progress)
                for start in range(0, info.length, RANGE_BYTES):
                    size = min(RANGE_BYTES, info.length - start)
                    stream.write(source.read(path, info.offset + start, size))
                if stream.crc32 != info.crc32:
                    raise ChecksumError(f"{join(source.url, path)}: checksum differs at byte {info.offset}; not copied")

    for file, places in groupby(written.values(), lambda info: info.relative_path):  # as written: file by file
        checked_twice(partial(copy, f"{name}/{file}", list(places)))


def copy_commit(source: Store, target: Store, name: str) -> None:
    """Copy the index and then the manifest of checkpoint `name`, after all ranks have copied their files."""
    manifest = read_manifest(source, name)
    target.put(f"{name}/{METADATA}", read_small(source, name, METADATA, manifest["metadata_sha256"]))
    target.put(f"{name}/{MANIFEST}", encode_manifest(manifest))


# ---------------------------------------------------------------- reading


def read_state(opened: Opened, state: State, on_progress: Callable[[], None] = lambda: None) -> None:
    """Fill the tensors of `state` (nested dicts; DTensors: this rank's part) from a checkpoint, in place.

    Checks every item's CRC-32 before copying any of it. Raises CheckpointError if the checkpoint lacks a tensor or has
    it in another shape, DamagedError naming file and tensor if bytes are wrong; `state` may then be filled in part.
    """
    planner, metadata = DefaultLoadPlanner(), opened.metadata
    planner.set_up_planner(state, metadata)
    _check_tensors(opened, planner.state_dict)

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
    for item in planner.create_local_plan().items:
        wanted.setdefault(item.storage_index, []).append(item)
    _read_items(opened, [(metadata.storage_data[index], index, items) for index, items in wanted.items()], copy)


def verify_items(opened: Opened, progress: Callable[[int], None]) -> None:
    """Read and check every item of a checkpoint. Calls `progress` with the bytes of each. Raises DamagedError."""
    items: list[Item] = [(info, index, []) for index, info in opened.metadata.storage_data.items()]
    _read_items(opened, items, lambda info, index, wanted, data: progress(info.length))


def tensors_in(metadata: Metadata, prefix: str) -> set[str]:
    """Names of the checkpoint's tensors that start with `prefix`."""
    return {name for name in metadata.state_dict_metadata if name.startswith(prefix)}


def _check_tensors(opened: Opened, tensors: Mapping[str, Any]) -> None:
    held = opened.metadata.state_dict_metadata
    if missing := sorted(tensors.keys() - held.keys()):
        hint = "" if opened.manifest else "; torchtitan's come in by `python -m tools.hf import --from torchtitan`"
        raise CheckpointError(f"{opened.url}: lacks {len(missing)} tensors, such as {missing[0]}{hint}")
    for fqn, tensor in tensors.items():
        stored = getattr(held[fqn], "size", None)
        if stored is None or tuple(stored) != tuple(tensor.size()):
            kind = "not a tensor" if stored is None else f"of shape {tuple(stored)}"
            raise CheckpointError(f"{opened.url}: {fqn} is {kind}, must be of shape {tuple(tensor.size())}")


def _decode(info: _StorageInfo, data: memoryview, metadata: Metadata, index: MetadataIndex) -> Tensor:
    """The tensor of an item. For our own checkpoints, a view of `data`, found without unpickling."""
    if not hasattr(info, "crc32"):
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    stored = metadata.state_dict_metadata[index.fqn]
    assert isinstance(stored, TensorStorageMetadata)
    assert index.index is not None  # DCP's planner numbers the chunks
    shape, dtype = stored.chunks[index.index].sizes, stored.properties.dtype
    with zipfile.ZipFile(pa.BufferReader(data)) as archive:  # what torch.save writes
        record = next(entry for entry in archive.infolist() if entry.filename.endswith("/data/0"))
    name_bytes, extra_bytes = struct.unpack_from("<HH", data, record.header_offset + 26)
    start = record.header_offset + 30 + name_bytes + extra_bytes
    values = torch.frombuffer(data, dtype=torch.uint8, count=shape.numel() * dtype.itemsize, offset=start)
    return values.view(dtype).view(shape)


def _read_items(opened: Opened, items: Iterable[Item], consume: Callable[..., None]) -> None:
    """Read `items` by place, neighbours together. Hand each to `consume` with its bytes, once those are checked.

    Threads read and check the next ranges meanwhile, at most WINDOW_BYTES (or one range, if that is larger).
    """
    store = opened.store

    def read(group: list[Item]) -> list[memoryview]:
        first = group[0][0]
        data = store.read(opened.path(first.relative_path), first.offset, _size(group))
        pieces = [data[info.offset - first.offset :][: info.length] for info, *_ in group]
        for (info, index, _), piece in zip(group, pieces, strict=True):
            expected = getattr(info, "crc32", None)  # stock checkpoints have none
            if expected is not None and isal_zlib.crc32(piece) != expected:
                where = f"{opened.url}/{info.relative_path}"
                raise ChecksumError(f"{where}: checksum of {index.fqn} differs, at byte {info.offset}")
        return pieces

    ahead: deque[tuple[list[Item], Future[list[memoryview]]]] = deque()

    def consume_first() -> None:
        group, future = ahead.popleft()
        for item, piece in zip(group, future.result(), strict=True):
            consume(*item, piece)

    with ThreadPoolExecutor(store.read_threads) as threads:
        try:
            for group in _neighbours(sorted(items, key=lambda item: (item[0].relative_path, item[0].offset))):
                ahead.append((group, threads.submit(checked_twice, partial(read, group))))
                while len(ahead) > store.read_threads or sum(_size(group) for group, _ in ahead) > WINDOW_BYTES:
                    consume_first()
            while ahead:
                consume_first()
        finally:
            threads.shutdown(cancel_futures=True)


def _size(group: Sequence[Item]) -> int:
    """Bytes from the start of the first neighbour to the end of the last."""
    return group[-1][0].offset + group[-1][0].length - group[0][0].offset


def _neighbours(items: Iterable[Item]) -> list[list[Item]]:
    """Runs of items that touch in one file, up to RANGE_BYTES."""
    groups = list[list[Item]]()
    for item in items:
        if groups:
            info, last = item[0], groups[-1][-1][0]
            touches = (info.relative_path, info.offset) == (last.relative_path, last.offset + last.length)
            if touches and _size([groups[-1][0], item]) <= RANGE_BYTES:
                groups[-1].append(item)
                continue
        groups.append([item])
    return groups
