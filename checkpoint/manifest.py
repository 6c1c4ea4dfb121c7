"""What a checkpoint is called, the manifest that commits it and vouches for it, and a safe reader of DCP's index."""

import dataclasses
import hashlib
import io
import json
import operator
import pickle
import re
import secrets
import time
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from datetime import datetime, timezone
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta

from checkpoint import CheckpointError
from storage import DamagedError, Store, join

MANIFEST = "MANIFEST.json"
METADATA = ".metadata"
FORMAT_VERSION = 1

Manifest = dict[str, Any]


def new_checkpoint_name(step: int) -> str:
    """A folder name that no other save has: step, time and random digits. Names sort by step, then by time."""
    return f"step-{step:08d}-{int(time.time()):08x}{secrets.token_hex(2)}"


def is_checkpoint_name(name: str) -> bool:
    """Whether `new_checkpoint_name` may have made this name."""
    return re.fullmatch(r"step-\d{8,}-[0-9a-f]{12}", name) is not None


def step_of(name: str) -> int:
    """The step in the name of a checkpoint."""
    return int(name.split("-")[1])


def begun(sizes: Iterable[str]) -> list[str]:
    """All checkpoints in a listing, committed or not, oldest first."""
    folders = {file.partition("/")[0] for file in sizes if "/" in file}
    return sorted(filter(is_checkpoint_name, folders))


def finished(sizes: Collection[str]) -> list[str]:
    """The checkpoints in a listing that have a manifest, newest first."""
    return [name for name in reversed(begun(sizes)) if f"{name}/{MANIFEST}" in sizes]


def committed(store: Store) -> list[str]:
    """Names of the checkpoints in `store` that have a manifest, newest first."""
    return finished(store.sizes())


class Opened(NamedTuple):
    """A checkpoint to read: where it is, its manifest and DCP's index."""

    store: Store
    name: str  # "" if the store is this one checkpoint
    manifest: Manifest
    metadata: Metadata

    @property
    def url(self) -> str:
        return join(self.store.url, self.name)

    def tensors(self, prefix: str) -> set[str]:
        """Names of its tensors that start with `prefix`."""
        return {name for name in self.metadata.state_dict_metadata if name.startswith(prefix)}


def open_checkpoint(store: Store, name: str) -> Opened:
    """Read manifest and index of a checkpoint, without its data. Raises CheckpointError, StoreError."""
    if not name and MANIFEST not in store.sizes():
        theirs = "torchtitan's weights come in by way of Hugging Face's format, see docs/huggingface.md"
        raise CheckpointError(f"{store.url}: was never committed, it has no {MANIFEST}; name another ({theirs})")
    manifest = read_manifest(store, name)
    pickled = read_small(store, name, METADATA, manifest["metadata_sha256"])
    return Opened(store, name, manifest, unpickle_metadata(pickled))


def encode_manifest(manifest: Manifest) -> bytes:
    """The manifest as stored, with a checksum of itself. Any other bytes count as damaged."""
    encode = partial(json.dumps, indent=1, sort_keys=True)
    return encode({"manifest": manifest, "sha256": sha256(encode(manifest).encode())}).encode()


def read_encoded(store: Store, file: str) -> Manifest:
    """Read what `encode_manifest` encoded. Raises DamagedError for any other bytes."""
    content = store.read(file)
    with suppress(ValueError, TypeError, KeyError):
        manifest = json.loads(bytes(content))["manifest"]
        if encode_manifest(manifest) == content:
            return manifest
    raise DamagedError(f"{join(store.url, file)}: its checksum differs")


def commit(
    store: Store, name: str, index: Metadata, written: Sequence[dict[MetadataIndex, Any]], facts: Manifest
) -> None:
    """Write DCP's index, then the manifest with `facts`, after which the checkpoint exists.

    For rank 0, after all have written: `written`: each rank's item → where it lies. Raises
    CheckpointError, StoreError.
    """
    found: dict[MetadataIndex, Any] = {}
    for own in written:
        found |= own
    planned = sum(len(getattr(stored, "chunks", ())) for stored in index.state_dict_metadata.values())
    if len(found) != planned:
        raise CheckpointError("not all items that were planned were written")
    whole = dataclasses.replace(index, storage_data=found, version=CURRENT_DCP_VERSION, storage_meta=StorageMeta())
    pickled = pickle.dumps(whole)
    unpickle_metadata(pickled)  # a later Python or torch may pickle other classes, which no load would accept
    sizes = {METADATA: len(pickled)}
    for info in found.values():
        sizes[info.relative_path] = max(sizes.get(info.relative_path, 0), info.offset + info.length)
    manifest = {
        "format": FORMAT_VERSION,
        "files": sizes,
        "metadata_sha256": sha256(pickled),
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "torch": torch.__version__,
        **facts,
    }
    store.put(f"{name}/{METADATA}", pickled)
    store.put(f"{name}/{MANIFEST}", encode_manifest(manifest))


def read_manifest(store: Store, name: str) -> Manifest:
    """Read the manifest of checkpoint `name`. Raises DamagedError if it is missing or any byte was altered."""
    manifest = read_encoded(store, path_of(name, MANIFEST))
    if manifest["format"] != FORMAT_VERSION:
        found = f"has format {manifest['format']}"
        raise CheckpointError(f"{join(store.url, name)}: {found}; this version reads {FORMAT_VERSION}")
    return manifest


def read_small(store: Store, name: str, file: str, digest: str) -> bytes:
    """Read a small file of checkpoint `name`. Raises DamagedError if its SHA-256 is not `digest`."""
    path = path_of(name, file)
    content = bytes(store.read(path))
    if sha256(content) != digest:
        raise DamagedError(f"{join(store.url, path)}: its checksum differs")
    return content


def path_of(name: str, file: str) -> str:
    """A file of checkpoint `name`, "" if the store is that checkpoint, in its store."""
    return f"{name}/{file}".lstrip("/")


def sha256(data: bytes) -> str:
    """The SHA-256 of `data`, in hex."""
    return hashlib.sha256(data).hexdigest()


INDEX_CLASSES = {
    "torch.distributed.checkpoint.metadata": "Metadata ChunkStorageMetadata TensorStorageMetadata BytesStorageMetadata "
    "TensorProperties MetadataIndex StorageMeta _MEM_FORMAT_ENCODING",
    "torch.distributed.checkpoint.filesystem": "_StorageInfo",
    "torch": "Size",
    "torch.serialization": "_get_layout",
    "pathlib": "PosixPath",  # the checkpoint's own path, in stock ones
    "pathlib._local": "PosixPath",
}  # module → what an index may refer to


class _IndexUnpickler(pickle.Unpickler):
    """Builds only the classes that an index is made of, so that no code hidden in a checkpoint runs."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):  # Python 3.11.0 to 3.11.3 pickle members of enums so
            return operator.getitem  # which finds those, and nothing that could run
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if name not in INDEX_CLASSES.get(module, "").split() and not is_dtype:
            raise DamagedError(f"{METADATA}: refused, since it refers to {module}.{name}, which no index needs")
        return super().find_class(module, name)


def unpickle_metadata(pickled: bytes) -> Metadata:
    """Unpickle DCP's index. Raises DamagedError if the pickle asks for a class that no index contains."""
    try:
        metadata = _IndexUnpickler(io.BytesIO(pickled)).load()
        assert isinstance(metadata, Metadata)
        return metadata
    except DamagedError:
        raise
    except Exception as error:
        raise DamagedError(f"{METADATA}: not a readable index: {type(error).__name__}: {error}") from None
