"""DCP's index without its objects, which take gigabytes and minutes where ranks are thousands."""

import dataclasses
import io
import itertools
import pickle
import platform
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from checkpoint.manifest import unpickle_metadata
from checkpoint.stores import CheckpointError, DamagedError

UNKNOWN = 0x5AD71FC3 << 32  # stands for a number; pickled, it has the 8 bytes of any other above 2**55


class Template(NamedTuple):
    """A pickled index in which the offset, length and CRC-32 of each item are still to be filled in."""

    pickled: bytes
    places: np.ndarray  # (items, 3): where in `pickled` they begin, of 8 bytes each


def build_template(metadata: Metadata) -> Template:
    """`metadata` with numbers unknown. Raises CheckpointError where a load here would not read it.

    That is tried with one item, for the sake of large ones: all are of the same classes. In another Python or torch
    they may be pickled in another way.
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
            f"no checkpoint is written, since it could not be loaded here (Python {platform.python_version()}, torch "
            f"{torch.__version__}): {error}"
        ) from None
    pickled, place = _pickle(index), 0
    places = np.empty(3 * len(index.storage_data), np.int64)
    for number in range(len(places)):
        place = places[number] = pickled.index((UNKNOWN + number).to_bytes(8, "little"), place)
    return Template(pickled, places.reshape(-1, 3))


def fill(template: Template, numbers: Iterable[np.ndarray]) -> bytes:
    """The pickled index with the `numbers` of all items, in arrays of (items, 3)."""
    filled, start = bytearray(template.pickled), 0
    view = np.frombuffer(filled, np.uint8)
    for part in numbers:  # of a file: another thread may run in between
        places = template.places[start : start + len(part), :, None] + np.arange(8)
        view[places] = part.astype("<i8").view(np.uint8).reshape(places.shape)
        start += len(part)
    return bytes(filled)


def _pickle(metadata: Metadata) -> bytes:
    """As pickle.dumps, which keeps all other threads waiting: for seconds, where ranks and tensors are many."""
    frames: list[bytes] = []

    class Frames(io.RawIOBase):
        def write(self, data: Any) -> int:  # Python code, every 64 KiB: here another thread may take over
            frames.append(bytes(data))
            return len(data)

    pickle.Pickler(Frames()).dump(metadata)
    return b"".join(frames)
