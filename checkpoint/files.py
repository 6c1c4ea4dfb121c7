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
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import datetime, timezone
from functools import partial
from types import MappingProxyType
from typing import IO, Any, cast

import numpy as np
import pyarrow as pa
import torch
from isal import isal_zlib
from torch import Tensor
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem, WriteItem
from torch.utils.serialization import config as serialization

from checkpoint import CheckpointError
from checkpoint.manifest import (
    FORMAT_VERSION,
    MANIFEST,
    METADATA,
    ROTARY,
    ChecksumError,
    Manifest,
    Opened,
    checked_twice,
    encode_manifest,
    read_manifest,
    read_metadata,
    sha256,
    unpickle_metadata,
)
from checkpoint.names import file_of
from checkpoint.planning import FILES, Plan, State
from storage import DamagedError, Store, join

RANGE_BYTES = 16 << 20  # neighbouring items are read together up to this size
WINDOW_BYTES = 256 << 20  # most bytes read and not yet copied, unless a single range is larger

Item = tuple[_StorageInfo, Any]  # its place, and what it is wanted for


# ---------------------------------------------------------------- writing


Written = dict[str, np.ndarray]  # file → offset, length and CRC-32 of each item, (items, 3), in order


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
    with ThreadPoolExecutor(FILES) as threads:
        written = {
            file: threads.submit(_write_file, store, f"{name}/{file}", items, resolve, on_progress)
            for file, items in ((file_of(rank, number), items) for number, items in enumerate(files))
        }
        return {file: future.result() for file, future in written.items()}


def commit(
    store: Store,
    name: str,
    plan: Plan,
    written: Sequence[Written],
    facts: Manifest,
    companions: Mapping[str, bytes] = MappingProxyType({}),
) -> None:
    """Write the index, then the manifest, after which the checkpoint exists. For rank 0, after all ranks have written.

    `written` has an entry per rank. `facts` go into the manifest unchanged, `companions` are small files beside it.
    """
    sizes = {file: int(places[-1, :2].sum()) for own in written for file, places in own.items()}
    pickled = pickle.dumps(_fill_in(plan, written))
    try:
        unpickle_metadata(pickled)  # another Python or torch may pickle the classes in another way
    except DamagedError as error:
        raise CheckpointError(f"checkpoint not saved, since it could not be loaded: {error}") from None
    sizes |= {METADATA: len(pickled)} | {file: len(content) for file, content in companions.items()}
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


def _fill_in(plan: Plan, written: Sequence[Written]) -> Metadata:
    """DCP's index, with the place and the CRC-32 of each item. Raises CheckpointError if one was not written."""
    assert plan.metadata is not None
    storage_data = {}
    for files, own in zip(plan.all_files, written, strict=True):
        if list(map(len, files)) != list(map(len, own.values())):
            raise CheckpointError("not all items that were planned were written")
        for items, (file, places) in zip(files, own.items(), strict=True):
            for item, (offset, length, crc32) in zip(items, places.tolist(), strict=True):
                storage_data[item.index] = info = _StorageInfo(file, offset, length)
                info.crc32 = crc32  # type: ignore[attr-defined]
    return dataclasses.replace(
        plan.metadata, storage_data=storage_data, storage_meta=StorageMeta(), version=CURRENT_DCP_VERSION
    )


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


def _write_file(
    store: Store,
    file: str,
    items: Sequence[WriteItem],
    resolve: Callable[[WriteItem], Tensor],
    on_progress: Callable[[], None],
) -> np.ndarray:
    places = np.empty((len(items), 3), np.int64)
    # torch.save's own CRC-32 takes three times as long as ours, and nobody reads it.
    with store.create(file) as raw, serialization.patch("save.compute_crc32", False):  # type: ignore[attr-defined]
        stream = _ChecksummedStream(raw, on_progress)
        for item, place in zip(items, places, strict=True):
            offset, stream.crc32 = stream.position, 0
            try:
                torch.save(_compact(resolve(item)), cast(IO[bytes], stream))
            except RuntimeError as error:  # torch ends the archive after a failed write: raise the write's error
                raise error.__context__ or error from None
            place[:] = offset, stream.position - offset, stream.crc32
    return places


def _compact(tensor: Tensor) -> Tensor:
    """`tensor` in host memory with just the storage it needs, since torch.save writes the whole storage."""
    tensor = tensor.cpu().contiguous()
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def copy_files(source: Store, target: Store, name: str, written: Written, on_progress: Callable[[], None]) -> None:
    """Copy what this rank has `written` of checkpoint `name`, and check each item. Raises DamagedError, StoreError."""

    def copy(file: str, places: Sequence[Sequence[int]]) -> None:
        with target.create(file) as raw:
            for offset, length, crc32 in places:
                stream = _ChecksummedStream(raw, on_progress)
                for start in range(0, length, RANGE_BYTES):
                    stream.write(source.read(file, offset + start, min(RANGE_BYTES, length - start)))
                if stream.crc32 != crc32:
                    raise ChecksumError(f"{join(source.url, file)}: checksum differs at byte {offset}; not copied")

    for file, places in written.items():
        checked_twice(partial(copy, f"{name}/{file}", places.tolist()))


def copy_commit(source: Store, target: Store, name: str) -> None:
    """Copy the index and then the manifest of checkpoint `name`, after all ranks have copied their files."""
    manifest = read_manifest(source, name)
    target.put(f"{name}/{METADATA}", read_metadata(source, name, manifest))
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

    def consume(info: _StorageInfo, data: memoryview, wanted: list[ReadItem]) -> None:
        index = wanted[0].storage_index
        _check_item(opened, info, index, data)
        try:
            tensor = _decode(info, data, metadata, index)
        except Exception as error:
            where = f"{opened.url}/{info.relative_path}"
            raise DamagedError(f"{where}: {index.fqn} is not a readable tensor: {error}") from None
        for item in wanted:
            target = planner.resolve_tensor(item).detach()
            target.copy_(narrow_tensor_by_index(tensor, item.storage_offsets, item.lengths))
        on_progress()

    wanted: dict[tuple[str, int], tuple[_StorageInfo, list[ReadItem]]] = {}
    for item in planner.create_local_plan().items:
        info = metadata.storage_data[item.storage_index]
        wanted.setdefault((info.relative_path, info.offset), (info, []))[1].append(item)
    _read_ranges(opened, [wanted[place] for place in sorted(wanted)], consume)


def verify_items(opened: Opened, progress: Callable[[int], None]) -> None:
    """Read and check every item of a checkpoint. Calls `progress` with the bytes of each. Raises DamagedError."""

    def consume(info: _StorageInfo, data: memoryview, index: MetadataIndex) -> None:
        _check_item(opened, info, index, data)
        progress(info.length)

    items = [(info, index) for index, info in opened.metadata.storage_data.items()]
    _read_ranges(opened, sorted(items, key=lambda item: (item[0].relative_path, item[0].offset)), consume)


def tensors_in(metadata: Metadata, prefix: str) -> set[str]:
    """Names of the checkpoint's tensors that start with `prefix`."""
    return {name for name in metadata.state_dict_metadata if name.startswith(prefix)}


def _check_tensors(opened: Opened, tensors: Mapping[str, Any]) -> None:
    held = opened.metadata.state_dict_metadata
    if missing := sorted(tensors.keys() - held.keys()):
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        hint = "" if opened.manifest else f"; {ROTARY}"
        if missing[0].removeprefix("model.") in held:
            hint = f", but {missing[0].removeprefix('model.')}: weights at the top level are torchtitan's{hint}"
        raise CheckpointError(f"{opened.url}: has no {', '.join(missing[:3])}{more}{hint}")
    for fqn, tensor in tensors.items():
        stored = getattr(held[fqn], "size", None)
        if stored is None or tuple(stored) != tuple(tensor.size()):
            kind = "not a tensor" if stored is None else f"of shape {tuple(stored)}"
            raise CheckpointError(f"{opened.url}: {fqn} is {kind}, must be of shape {tuple(tensor.size())}")


def _check_item(opened: Opened, info: _StorageInfo, index: MetadataIndex, data: memoryview) -> None:
    expected = getattr(info, "crc32", None)  # stock checkpoints have none
    if expected is not None and isal_zlib.crc32(data) != expected:
        where = f"{opened.url}/{info.relative_path}"
        raise ChecksumError(f"{where}: checksum of {index.fqn} differs, at byte {info.offset}")


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


def _read_ranges(
    opened: Opened, items: Sequence[Item], consume: Callable[[_StorageInfo, memoryview, Any], None]
) -> None:
    """Read `items`, sorted by place, with neighbours together. Hand each in order to `consume` with its bytes.

    Threads read the next ranges meanwhile, at most WINDOW_BYTES (or one range, if that is larger).
    """
    store = opened.store

    def read(group: list[Item]) -> memoryview:
        return store.read(opened.path(group[0][0].relative_path), group[0][0].offset, _size(group))

    def consume_all(group: list[Item], data: memoryview) -> None:
        for info, target in group:
            start = info.offset - group[0][0].offset
            consume(info, data[start : start + info.length], target)

    ahead: deque[tuple[list[Item], Future[memoryview]]] = deque()

    def consume_first() -> None:
        group, future = ahead.popleft()
        try:
            consume_all(group, future.result())
        except ChecksumError:  # a bit can also flip on the way
            consume_all(group, read(group))

    with ThreadPoolExecutor(store.read_threads) as threads:
        try:
            for coming in _neighbours(items):
                while ahead and (
                    len(ahead) > store.read_threads
                    or _size(coming) + sum(_size(group) for group, _ in ahead) > WINDOW_BYTES
                ):
                    consume_first()
                ahead.append((coming, threads.submit(read, coming)))
            while ahead:
                consume_first()
        finally:
            for _, future in ahead:
                future.cancel()


def _size(group: Sequence[Item]) -> int:
    """Bytes from the start of the first neighbour to the end of the last."""
    return group[-1][0].offset + group[-1][0].length - group[0][0].offset


def _neighbours(items: Sequence[Item]) -> Iterator[list[Item]]:
    """Yield runs of items that touch in one file, up to RANGE_BYTES."""
    group: list[Item] = []
    for info, target in items:
        if group:
            first, last = group[0][0], group[-1][0]
            touches = info.relative_path == last.relative_path and info.offset == last.offset + last.length
            if not touches or info.offset + info.length - first.offset > RANGE_BYTES:
                yield group
                group = []
        group.append((info, target))
    if group:
        yield group
