"""The manifest, which commits a checkpoint and vouches for it, and a safe reader of DCP's pickled index."""

import hashlib
import io
import json
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeVar

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from checkpoint import CheckpointError
from storage import DamagedError, Store, join

MANIFEST = "MANIFEST.json"
METADATA = ".metadata"
FORMAT_VERSION = 1

Manifest = dict[str, Any]
T = TypeVar("T")


class ChecksumError(DamagedError):
    """Bytes read do not have the checksum that they were written with."""


@dataclass(frozen=True)
class Opened:
    """A checkpoint to read: its place, its manifest ({} for a stock one) and DCP's index."""

    store: Store
    name: str  # "" if the store is this one checkpoint
    manifest: Manifest
    metadata: Metadata

    @property
    def url(self) -> str:
        return join(self.store.url, self.name)

    def path(self, file: str) -> str:
        """The name in the store of one of its files."""
        return f"{self.name}/{file}" if self.name else file

    @property
    def is_stock(self) -> bool:
        """Whether stock DCP wrote it: its items have no checksums, while all of ours do."""
        return not any(hasattr(info, "crc32") for info in self.metadata.storage_data.values())


def open_checkpoint(store: Store, name: str) -> Opened:
    """Read manifest and index of a checkpoint, without its data. Raises CheckpointError, StoreError."""
    if name or MANIFEST in store.sizes():
        manifest = read_manifest(store, name)
        return Opened(store, name, manifest, _whole(unpickle_metadata(read_metadata(store, name, manifest))))
    opened = Opened(store, name, {}, _whole(unpickle_metadata(read_metadata(store, name, None))))
    if not opened.is_stock:
        raise CheckpointError(f"{store.url}: was never committed, it has no {MANIFEST}; name another checkpoint")
    return opened


def _whole(metadata: Metadata) -> Metadata:
    """`metadata`, if its pieces hold every value of each tensor. Raises DamagedError."""
    try:
        placed = {(index.fqn, index.offset) for index in metadata.storage_data}
        for name, tensor in metadata.state_dict_metadata.items():
            if isinstance(tensor, TensorStorageMetadata):
                held = sum(chunk.sizes.numel() for chunk in tensor.chunks if (name, chunk.offsets) in placed)
                if held < tensor.size.numel():
                    raise DamagedError(f"{METADATA}: {name} has only {held} of its {tensor.size.numel()} values")
    except (AttributeError, TypeError) as error:
        raise DamagedError(f"{METADATA}: not a readable index: {type(error).__name__}: {error}") from None
    return metadata


def checked_twice(read: Callable[[], T]) -> T:
    """`read()`, tried again if a checksum differs: a bit can also flip on the way."""
    try:
        return read()
    except ChecksumError:
        return read()


def encode_manifest(manifest: Manifest) -> bytes:
    """The manifest as stored, with a checksum of itself. Any other bytes count as damaged."""
    body = json.dumps(manifest, indent=1, sort_keys=True)
    return json.dumps({"manifest": manifest, "sha256": sha256(body)}, indent=1, sort_keys=True).encode()


def read_manifest(store: Store, name: str) -> Manifest:
    """Read the manifest of checkpoint `name`. Raises DamagedError if it is missing or any byte was altered."""
    path = f"{name}/{MANIFEST}".lstrip("/")

    def read() -> Manifest:
        raw = bytes(store.read(path))
        try:
            manifest = json.loads(raw)["manifest"]
            intact = encode_manifest(manifest) == raw
        except (ValueError, TypeError, KeyError):
            intact = False
        if not intact:
            raise ChecksumError(f"{store.url}/{path}: does not match its own checksum")
        return manifest

    manifest = checked_twice(read)
    if manifest["format"] != FORMAT_VERSION:
        raise CheckpointError(f"{store.url}/{path}: format {manifest['format']}; this version reads {FORMAT_VERSION}")
    return manifest


def read_metadata(store: Store, name: str, manifest: Manifest | None) -> bytes:
    """Read the pickled index of checkpoint `name`. Raises DamagedError if it does not match `manifest`."""
    return read_small(store, name, METADATA, None if manifest is None else manifest["metadata_sha256"])


def read_small(store: Store, name: str, file: str, digest: str | None) -> bytes:
    """Read a small file of checkpoint `name`. Raises DamagedError if its SHA-256 is not `digest`, if given."""
    path = f"{name}/{file}".lstrip("/")

    def read() -> bytes:
        content = bytes(store.read(path))
        if digest is not None and sha256(content) != digest:
            raise ChecksumError(f"{store.url}/{path}: SHA-256 differs from the manifest's")
        return content

    return checked_twice(read)


def unpickle_metadata(pickled: bytes) -> Metadata:
    """Unpickle DCP's index. Raises DamagedError if the pickle asks for a class that no index contains."""
    try:
        metadata = _IndexUnpickler(io.BytesIO(pickled)).load()
    except DamagedError:
        raise
    except Exception as error:
        raise DamagedError(f"{METADATA}: not a readable index: {type(error).__name__}: {error}") from None
    if not isinstance(metadata, Metadata):
        raise DamagedError(f"{METADATA}: holds a {type(metadata).__name__}, not DCP's Metadata")
    return metadata


# For messages about stock DCP checkpoints, which do not say how their rotary weights are laid out.
ROTARY = (
    "interleaved rotary weights must be permuted: torchtitan's by `python -m tools.hf import --from torchtitan`, "
    "Meta's on their way through Hugging Face (docs/huggingface.md)"
)


_METADATA_CLASSES = (
    "Metadata ChunkStorageMetadata TensorStorageMetadata BytesStorageMetadata TensorProperties MetadataIndex "
    "StorageMeta _MEM_FORMAT_ENCODING"
)
_INDEX_CLASSES = frozenset(
    {("torch.distributed.checkpoint.metadata", name) for name in _METADATA_CLASSES.split()}
    | {("torch.distributed.checkpoint.filesystem", "_StorageInfo")}
    | {("torch", "Size"), ("torch.serialization", "_get_layout")}
    | {("pathlib", "PosixPath"), ("pathlib._local", "PosixPath")}  # the checkpoint's own path, in stock ones
)


class _IndexUnpickler(pickle.Unpickler):
    """Builds only the classes that an index is made of, so that no code hidden in a checkpoint runs."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):  # Python 3.11.0 to 3.11.3 pickle enum members so
            return _member
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if (module, name) not in _INDEX_CLASSES and not is_dtype:
            raise DamagedError(f"{METADATA}: refused, since it refers to {module}.{name}, which no index needs")
        return super().find_class(module, name)


def _member(kind: Any, name: str) -> Any:
    """`getattr(kind, name)` of an enum. An index contains no other."""
    if not (isinstance(kind, type) and issubclass(kind, Enum)):
        raise DamagedError(f"{METADATA}: refused, since it refers to {name!r} of {kind!r}, which no index needs")
    return kind[name]


def jsonable(value: dict[str, Any]) -> dict[str, Any]:
    """`value` after a round trip through JSON: tuples become lists, keys become strings."""
    return json.loads(json.dumps(value))


def sha256(data: bytes | str) -> str:
    """The SHA-256 of `data`, in hex."""
    return hashlib.sha256(data.encode() if isinstance(data, str) else data).hexdigest()
