"""DCP's index as arrays. With thousands of ranks, DCP's own objects would take gigabytes and minutes."""

import dataclasses
import io
import itertools
import pickle
import platform
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    STORAGE_TYPES,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem

from checkpoint.manifest import METADATA, Manifest, uncollected, unpickle_metadata
from checkpoint.stores import CheckpointError, DamagedError, Store, join

DIMENSIONS = 64  # far above any tensor's; without a limit, a damaged index could ask for any amount of memory
UNKNOWN = 0x5AD71FC3 << 32  # placeholder for a number; pickles to 8 bytes, as does any number above 2**55


class Template(NamedTuple):
    """A pickled index with placeholders for the offset, length and CRC-32 of each item."""

    pickled: bytes
    places: np.ndarray  # int64 (items, 3): where in `pickled` these begin, 8 bytes each


def build_template(metadata: Metadata) -> Template:
    """Pickle `metadata` with placeholders. Raises CheckpointError if this code could not load the result.

    Another Python or torch may pickle the classes differently. One item is tried, since all have the same classes and a
    large index takes long.
    """
    numbers = itertools.count(UNKNOWN)
    for info in metadata.storage_data.values():
        info.offset, info.length, info.crc32 = next(numbers), next(numbers), next(numbers)
    index = dataclasses.replace(metadata, storage_meta=StorageMeta(), version=CURRENT_DCP_VERSION)
    tensors, items = (
        dict(itertools.islice(part.items(), 1)) for part in (index.state_dict_metadata, index.storage_data)
    )
    try:
        unpickle_metadata(pickle.dumps(dataclasses.replace(index, state_dict_metadata=tensors, storage_data=items)))
    except DamagedError as error:
        raise CheckpointError(
            f"checkpoint not saved, since Python {platform.python_version()} and torch {torch.__version__} could not "
            f"load it: {error}"
        ) from None
    pickled, place = _pickle(index), 0
    places = np.empty(3 * len(index.storage_data), np.int64)
    for number in range(len(places)):
        place = places[number] = pickled.index((UNKNOWN + number).to_bytes(8, "little"), place)
    return Template(pickled, places.reshape(-1, 3))


def fill(template: Template, numbers: Iterable[np.ndarray]) -> bytes:
    """The pickled index with the `numbers` of all items filled in, given as arrays (items, 3).

    Raises CheckpointError if a planned item was not written.
    """
    filled, start = bytearray(template.pickled), 0
    view = np.frombuffer(filled, np.uint8)
    for part in numbers:  # by file, so that other threads run in between
        places = template.places[start : start + len(part), :, None] + np.arange(8)
        view[places] = part.astype("<i8").view(np.uint8).reshape(places.shape)
        start += len(part)
    if start != len(template.places):
        raise CheckpointError(f"{len(template.places)} items were planned, and {start} were written")
    return bytes(filled)


class Index(NamedTuple):
    """An index in memory and between ranks: a few arrays instead of ten objects per piece."""

    tensors: dict[str, STORAGE_TYPES]  # each described as one whole piece
    rows: dict[str, slice]  # a tensor's pieces in the arrays below
    boxes: np.ndarray  # (pieces, 2, dimensions): offsets and sizes; 0 and 1 in dimensions that a tensor lacks
    places: np.ndarray  # (pieces, 4): file, offset, length, CRC-32 or -1 in stock DCP's
    files: list[str]

    @property
    def is_stock(self) -> bool:
        """Whether stock DCP wrote it: its items have no checksums, while all of ours do."""
        return not (self.places[:, 3] >= 0).any()

    def info(self, row: int) -> _StorageInfo:
        """Where a piece lies, in DCP's form."""
        file, offset, length, crc32 = self.places[row].tolist()
        info = _StorageInfo(self.files[file], offset, length)
        if crc32 >= 0:
            info.crc32 = crc32  # type: ignore[attr-defined]
        return info


@dataclass(frozen=True)
class Opened:
    """A checkpoint to read: its place, its manifest ({} for a stock one) and its index."""

    store: Store
    name: str  # "" if the store is this one checkpoint
    manifest: Manifest
    index: Index

    @property
    def url(self) -> str:
        return join(self.store.url, self.name)


def read_index(pickled: bytes) -> Index:
    """Read a checkpoint's pickled index. Raises DamagedError."""
    try:
        with uncollected():
            return _compact(unpickle_metadata(pickled))
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
        raise DamagedError(f"{METADATA}: not a readable index: {type(error).__name__}: {error}") from None


def _compact(metadata: Metadata) -> Index:
    tensors, rows, files = dict(metadata.state_dict_metadata), dict[str, slice](), dict[str, int]()
    dims = max((len(getattr(tensor, "size", ())) for tensor in tensors.values()), default=0)
    if dims > DIMENSIONS:
        raise ValueError(f"a tensor has {dims} dimensions, at most {DIMENSIONS} are allowed")
    infos = {(key.fqn, key.offset): info for key, info in metadata.storage_data.items()}  # DCP's key is slow to hash
    boxes, places, begin = [np.empty((0, 2, dims), np.int64)], [np.empty((0, 4), np.int64)], 0
    for name, tensor in metadata.state_dict_metadata.items():
        if not isinstance(tensor, TensorStorageMetadata):
            continue
        pieces, size = len(tensor.chunks), tensor.size
        place = [
            (files.setdefault(info.relative_path, len(files)), info.offset, info.length, getattr(info, "crc32", -1))
            for info in (infos[name, chunk.offsets] for chunk in tensor.chunks)
        ]
        box = np.tile([[0], [1]], (pieces, 1, dims))
        box[:, 0, : len(size)] = np.reshape([chunk.offsets for chunk in tensor.chunks], (pieces, len(size)))
        box[:, 1, : len(size)] = np.reshape([chunk.sizes for chunk in tensor.chunks], (pieces, len(size)))
        if (held := int(box[:, 1].prod(1).sum())) < size.numel():
            raise ValueError(f"the pieces of {name} hold only {held} of {size.numel()} values")
        boxes.append(box)
        places.append(np.reshape(np.array(place, np.int64), (pieces, 4)))
        rows[name] = slice(begin, begin := begin + pieces)
        whole = ChunkStorageMetadata(torch.Size([0] * len(size)), size)
        tensors[name] = dataclasses.replace(tensor, chunks=[whole])
    if not all(isinstance(name, str) for name in (*tensors, *files)):
        raise TypeError("the name of a tensor or a file is not a string")
    every = np.concatenate(boxes)
    smallest = np.min_scalar_type(every.max(initial=0))
    return Index(tensors, rows, every.astype(smallest), np.concatenate(places), list(files))


def cut_out(index: Index, wanted: Iterable[ReadItem]) -> Metadata:
    """DCP's index of just the pieces that overlap the `wanted` items, which were planned on `index.tensors`."""
    tensors = dict(index.tensors)
    storage_data: dict[MetadataIndex, _StorageInfo] = {}
    for name, items in itertools.groupby(wanted, key=lambda item: item.storage_index.fqn):
        tensor, rows = tensors[name], index.rows[name]
        assert isinstance(tensor, TensorStorageMetadata)
        boxes = index.boxes[rows, :, : len(tensor.size)].astype(np.int64)
        starts, ends, meets = boxes[:, 0], boxes.sum(1), np.zeros(len(boxes), bool)
        for item in items:
            low = np.array(item.storage_offsets, np.int64)
            meets |= ((starts < low + item.lengths) & (low < ends)).all(1)
        chunks = [ChunkStorageMetadata(*map(torch.Size, box)) for box in boxes[meets].tolist()]
        for number, (row, chunk) in enumerate(zip(meets.nonzero()[0], chunks, strict=True)):
            storage_data[MetadataIndex(name, chunk.offsets, number)] = index.info(rows.start + row)
        tensors[name] = dataclasses.replace(tensor, chunks=chunks)
    return Metadata(tensors, storage_data=storage_data)


def _pickle(metadata: Metadata) -> bytes:
    """pickle.dumps that lets other threads run; the original blocks them, for seconds with many ranks and tensors."""
    frames: list[bytes] = []

    class Frames(io.RawIOBase):
        def write(self, data: Any) -> int:  # Python code, called every 64 KiB: here another thread can take over
            frames.append(bytes(data))
            return len(data)

    pickle.Pickler(Frames()).dump(metadata)
    return b"".join(frames)
