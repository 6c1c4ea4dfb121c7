"""One checkpoint in a store: DCP's layout, with a checksum per item and a manifest that commits it.

A checkpoint is a folder `step-00000100-6920d3f2a41c` of its own, never written twice:

    __0_0.distcp ...   the items of each rank, in torch.save's format, one after the other
    .metadata          DCP's pickled index: where each piece of each tensor lies, and its CRC-32
    MANIFEST.json      written last, the commit: sizes of all files, SHA-256 of .metadata, step, ...

Stock readers (`torch.distributed.checkpoint.FileSystemReader`) read it, and stock checkpoints are read
here, unchecked since they hold no checksums. Nothing is unpickled but the classes that DCP's index is made of.
"""

import dataclasses
import io
import itertools
import pickle
import platform
import struct
import zipfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import IO, Any, NamedTuple, cast

import numpy as np
import torch
from isal import isal_zlib
from torch import Tensor
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem, WriteItem
from torch.utils.serialization import config as serialization

from checkpoint.manifest import (
    FORMAT_VERSION,
    MANIFEST,
    METADATA,
    ChecksumError,
    Manifest,
    Opened,
    checked_twice,
    encode_manifest,
    sha256,
    unpickle_metadata,
)
from checkpoint.names import files_of, rank_of
from checkpoint.planning import Plan, State
from checkpoint.stores import ALIGNMENT, CheckpointError, DamagedError, Store, join

WRITE_THREADS = 2
RANGE_BYTES = 16 << 20  # neighbouring items are read together up to this
WINDOW_BYTES = 256 << 20  # read and not yet copied, at most, unless a single item is larger

Item = tuple[_StorageInfo, Any]  # where it lies, and what it is wanted for


# ---------------------------------------------------------------- writing


class Written(NamedTuple):
    """Where an item of a rank's plan lies: few and plain values, since rank 0 gathers millions of them."""

    number: int  # in the plan
    file: str
    offset: int
    length: int
    crc32: int


def write_items(
    store: Store,
    name: str,
    rank: int,
    items: Sequence[WriteItem],
    resolve: Callable[[WriteItem], Tensor],
    on_progress: Callable[[], None] = lambda: None,
) -> list[Written]:
    """Write this rank's `items` into files of the checkpoint folder `name`, each item with its CRC-32.

    `on_progress` is called after each write, by several threads. Raises CheckpointError; then the file in question does
    not exist.
    """
    with ThreadPoolExecutor(WRITE_THREADS) as threads:
        written = [
            threads.submit(_write_file, store, name, f"{files_of(rank)}{number}.distcp", bucket, resolve, on_progress)
            for number, bucket in enumerate(_split_evenly(list(enumerate(items)), WRITE_THREADS))
        ]
        return [entry for future in written for entry in future.result()]


def commit(store: Store, name: str, plan: Plan, written: Sequence[Sequence[Written]], facts: Manifest) -> None:
    """Write the index, then the manifest: from then on the checkpoint exists. For rank 0, after all have written.

    `written` is by rank; `facts` go into the manifest as they are. Raises CheckpointError when an item was
    planned but not written.
    """
    assert plan.metadata is not None
    storage_data = {}
    for rank, (indices, entries) in enumerate(zip(plan.indices, written, strict=True)):
        if [entry.number for entry in sorted(entries)] != list(range(len(indices))):
            raise CheckpointError(
                f"{name}: of {len(indices)} items planned for rank {rank}, {len(entries)} were written"
            )
        for entry in entries:
            info = _StorageInfo(entry.file, entry.offset, entry.length)
            info.crc32 = entry.crc32  # type: ignore[attr-defined]
            storage_data[indices[entry.number]] = info
    storage_meta = StorageMeta(checkpoint_id=name, save_id=name)
    index = dataclasses.replace(
        plan.metadata, storage_data=storage_data, storage_meta=storage_meta, version=CURRENT_DCP_VERSION
    )
    _check_readable(name, index)
    pickled = _pickle(index)
    sizes = {METADATA: len(pickled)}
    for info in storage_data.values():
        sizes[info.relative_path] = max(sizes.get(info.relative_path, 0), info.offset + info.length)
    manifest = {
        "format": FORMAT_VERSION,
        "files": dict(sorted(sizes.items())),
        "metadata_sha256": sha256(pickled),
        **facts,
    }
    store.put(f"{name}/{METADATA}", pickled)
    store.put(f"{name}/{MANIFEST}", encode_manifest(manifest))


def _check_readable(name: str, index: Metadata) -> None:
    """Refuse to commit what no resume could read, as where a Python or torch pickles it in another way than was tried.

    By one item, for the sake of large ones: all are of the same classes. Raises CheckpointError.
    """
    tensors, pieces = (
        dict(itertools.islice(part.items(), 1)) for part in (index.state_dict_metadata, index.storage_data)
    )
    try:
        unpickle_metadata(pickle.dumps(dataclasses.replace(index, state_dict_metadata=tensors, storage_data=pieces)))
    except DamagedError as error:
        raise CheckpointError(
            f"{name}: is not committed, since it could not be loaded here (Python {platform.python_version()}, torch "
            f"{torch.__version__}): {error}"
        ) from None


def _pickle(metadata: Metadata) -> bytes:
    """As pickle.dumps, which keeps all other threads waiting: for seconds, where ranks and tensors are many."""
    frames: list[bytes] = []

    class Frames(io.RawIOBase):
        def write(self, data: Any) -> int:  # Python code, every 64 KiB: here another thread may take over
            frames.append(bytes(data))
            return len(data)

    pickle.Pickler(Frames()).dump(metadata)
    return b"".join(frames)


class _ChecksummedStream(io.RawIOBase):
    """What torch.save writes to: passes bytes on, keeps count and CRC-32 of the item being written."""

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
    name: str,
    file: str,
    items: Sequence[tuple[int, WriteItem]],
    resolve: Callable[[WriteItem], Tensor],
    on_progress: Callable[[], None],
) -> list[Written]:
    written = []
    # torch.save's own CRC-32 takes three times as long as ours, and nothing reads it.
    with store.create(f"{name}/{file}") as raw, serialization.patch("save.compute_crc32", False):  # type: ignore[attr-defined]
        stream = _ChecksummedStream(raw, on_progress)
        for number, item in items:
            offset, stream.crc32 = stream.position, 0
            try:
                torch.save(_compact(resolve(item)), cast(IO[bytes], stream))
            except RuntimeError as error:  # of torch, which ends the archive though a write has failed: say why it did
                raise error.__context__ or error from None
            written.append(Written(number, file, offset, stream.position - offset, stream.crc32))
    return written


def _compact(tensor: Tensor) -> Tensor:
    """`tensor` in host memory, with no more storage than it needs: torch.save writes the whole storage."""
    tensor = tensor.cpu().contiguous()
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def _split_evenly(items: Sequence[tuple[int, WriteItem]], parts: int) -> list[list[tuple[int, WriteItem]]]:
    """At most `parts` lists of about the same number of bytes, none empty."""
    buckets: list[list[tuple[int, WriteItem]]] = [[] for _ in range(parts)]
    sizes = [0] * parts
    for number, item in sorted(items, key=lambda pair: _item_bytes(pair[1]), reverse=True):
        smallest = sizes.index(min(sizes))
        buckets[smallest].append((number, item))
        sizes[smallest] += _item_bytes(item) + 1
    return [bucket for bucket in buckets if bucket]


def _item_bytes(item: WriteItem) -> int:
    assert item.tensor_data is not None
    return item.tensor_data.chunk.sizes.numel() * item.tensor_data.properties.dtype.itemsize


def copy_pieces(
    source: Store, target: Store, name: str, pieces: Iterable[Written], on_progress: Callable[[], None]
) -> None:
    """Copy the files of checkpoint `name` that hold `pieces`, each checked on the way. Raises DamagedError."""
    in_order = sorted(pieces, key=lambda piece: (piece.file, piece.offset))
    for file, group in itertools.groupby(in_order, key=lambda piece: f"{name}/{piece.file}"):
        checked_twice(partial(_copy_file, source, target, file, list(group), on_progress))


def _copy_file(
    source: Store, target: Store, file: str, pieces: Sequence[Written], on_progress: Callable[[], None]
) -> None:
    with target.create(file) as raw:
        for piece in pieces:
            stream = _ChecksummedStream(raw, on_progress)
            for start in range(0, piece.length, RANGE_BYTES):
                part = np.empty(min(RANGE_BYTES, piece.length - start), np.uint8).data
                source.read_into(file, piece.offset + start, part)
                stream.write(part)
            if stream.crc32 != piece.crc32:
                raise ChecksumError(f"{join(source.url, file)}: checksum differs at byte {piece.offset}; not copied")


def pieces_of(metadata: Metadata, rank: int, ranks: int) -> list[Written]:
    """The pieces of a checkpoint in the files of `rank`; those of more ranks than there are now are shared out."""
    return [
        Written(0, info.relative_path, info.offset, info.length, info.crc32)
        for info in metadata.storage_data.values()
        if rank_of(info.relative_path) % ranks == rank
    ]


# ---------------------------------------------------------------- reading


def read_state(opened: Opened, state: State, on_progress: Callable[[], None] = lambda: None, alone: str = "") -> None:
    """Fill the tensors of `state` (nested dicts; DTensors: this rank's part) from a checkpoint, in place.

    Files that begin with `alone`, if any, are read by no other process.

    Every item is checked against its CRC-32 before any of it is copied. Raises CheckpointError when a tensor
    is not in the checkpoint or has another shape there, DamagedError naming file and tensor when bytes are wrong;
    `state` may then be filled in part.
    """
    planner = DefaultLoadPlanner()
    planner.set_up_planner(state, opened.metadata)
    _check_tensors(opened, planner.state_dict)
    plan = planner.create_local_plan()

    def consume(info: _StorageInfo, data: memoryview, wanted: list[ReadItem]) -> None:
        index = wanted[0].storage_index
        _check_item(opened, info, index, data)
        try:
            tensor = _decode(info, data, opened.metadata, index)
        except Exception as error:
            where = f"{opened.url}/{info.relative_path}"
            raise DamagedError(f"{where}: {index.fqn} is not a tensor that can be read: {error}") from None
        for item in wanted:
            target = planner.resolve_tensor(item).detach()
            target.copy_(narrow_tensor_by_index(tensor, item.storage_offsets, item.lengths))
        on_progress()

    wanted: dict[tuple[str, int], tuple[_StorageInfo, list[ReadItem]]] = {}
    for item in plan.items:
        info = opened.metadata.storage_data[item.storage_index]
        wanted.setdefault((info.relative_path, info.offset), (info, []))[1].append(item)
    _read_ranges(opened, [wanted[place] for place in sorted(wanted)], consume, alone)


def verify_items(opened: Opened, progress: Callable[[int], None]) -> None:
    """Read and check every item of a checkpoint; `progress` gets the bytes of each. Raises DamagedError."""

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
        raise CheckpointError(f"{opened.url}: has no {', '.join(missing[:3])}{more}")
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
    """The tensor of an item. One of our own is a view of `data`, which is found without unpickling anything."""
    if not hasattr(info, "crc32"):
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    stored = metadata.state_dict_metadata[index.fqn]
    assert isinstance(stored, TensorStorageMetadata)
    assert index.index is not None  # DCP's planner numbers the chunks
    shape, dtype = stored.chunks[index.index].sizes, stored.properties.dtype
    if not shape.numel():
        return torch.empty(shape, dtype=dtype)
    with zipfile.ZipFile(cast(IO[bytes], _MemoryReader(data))) as archive:  # what torch.save writes
        record = next(entry for entry in archive.infolist() if entry.filename.endswith("/data/0"))
    name_bytes, extra_bytes = struct.unpack_from("<HH", data, record.header_offset + 26)
    start = record.header_offset + 30 + name_bytes + extra_bytes
    values = torch.frombuffer(data, dtype=torch.uint8, count=shape.numel() * dtype.itemsize, offset=start)
    if dtype == torch.complex128:  # torch reads it as if it always lay at a multiple of 16 bytes, or crashes
        values = values.clone()
    return values.view(dtype).view(shape)


def _read_ranges(
    opened: Opened,
    items: Sequence[Item],
    consume: Callable[[_StorageInfo, memoryview, Any], None],
    alone: str = "",
) -> None:
    """Read `items`, sorted by place, neighbours together, and hand each in order to `consume` with its bytes.

    The next ranges are read by threads meanwhile, WINDOW_BYTES of them at most (or one range, if that is larger).
    """
    store = opened.store
    prefix = f"{opened.name}/" if opened.name else ""
    free: list[np.ndarray] = []  # buffers to use again: new memory costs more than the copy into it

    def read(group: list[Item]) -> tuple[np.ndarray, memoryview]:
        offset, size = group[0][0].offset, _size(group)
        room = max(size, RANGE_BYTES) + ALIGNMENT
        buffer = free.pop() if free and size <= RANGE_BYTES else np.empty(room, np.uint8)
        start = (offset - buffer.ctypes.data) % ALIGNMENT  # in memory as in the file, so that it can be read directly
        data = buffer[start : start + size].data
        file = group[0][0].relative_path
        store.read_into(prefix + file, offset, data, bool(alone) and file.startswith(alone))
        return buffer, data

    def consume_all(group: list[Item], buffer: np.ndarray, data: memoryview) -> None:
        for info, target in group:
            start = info.offset - group[0][0].offset
            consume(info, data[start : start + info.length], target)
        if len(buffer) == RANGE_BYTES + ALIGNMENT:
            free.append(buffer)

    ahead: deque[tuple[list[Item], Future[tuple[np.ndarray, memoryview]]]] = deque()

    def consume_first() -> None:
        group, future = ahead.popleft()
        try:
            consume_all(group, *future.result())
        except ChecksumError:  # a bit can flip on the way, too
            consume_all(group, *read(group))

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
    """Bytes from the first to the end of the last of some neighbours."""
    return group[-1][0].offset + group[-1][0].length - group[0][0].offset


def _neighbours(items: Sequence[Item]) -> Iterator[list[Item]]:
    """Runs of items that touch in one file, up to RANGE_BYTES."""
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


class _MemoryReader(io.RawIOBase):
    """A seekable file over memory, without the copy that BytesIO would make."""

    def __init__(self, data: memoryview) -> None:
        self.data = data
        self.position = 0

    def tell(self) -> int:
        return self.position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self.position = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self.position, io.SEEK_END: len(self.data)}[whence]
        return self.position

    def readinto(self, buffer: Any) -> int:
        count = min(len(buffer), len(self.data) - self.position)
        buffer[:count] = self.data[self.position : self.position + count]
        self.position += count
        return count
