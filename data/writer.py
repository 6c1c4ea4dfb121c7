"""Write the files of a prepared dataset, which data.shards describes. Imports no torch."""

import fcntl
import hashlib
import json
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import pyarrow as pa
from isal import isal_zlib

from config import file_errors
from data.place import PARTS, PLAN, Place
from data.shards import FORMAT, INDEX_SCHEMA, VERSION, DataError, Rows, Shard, build_index, digest, seal, token_schema
from data.tokenizer import Tokenizer
from storage import S3Store, StoreError

LARGEST_SHARD_MB = 2048  # twice as much would be more tokens than Arrow's lists can count
BAD_RECORDS = "bad_records.txt"  # a line for each that was left out: place and reason
WrittenShard = tuple[Shard, Rows]
SHARDS = re.compile(r"\.?(train|validation)-\d{5,}\.(arrow|lengths)(\.tmp)?")


def token_dtype(vocab_size: int) -> str:
    """The smallest data type that holds every id."""
    return "uint16" if vocab_size <= 2**16 else "uint32"


def is_held_out(content: bytes, validation_fraction: float) -> bool:
    """Whether a document is for validation, by a hash of its whole content, so all its pieces stay on one side."""
    digest = hashlib.blake2b(content, digest_size=8).digest()
    return int.from_bytes(digest, "little") < validation_fraction * 2**64


@contextmanager
def locked(place: Place) -> Iterator[None]:
    """Make a folder and lock it until the context ends. Raises DataError if another process writes there.

    Nothing on S3: each write asks for the plan there, so that of two commands the earlier one fails.
    """
    folder = place.folder
    if folder is None:
        yield
        return
    with file_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / ".lock").open("a") as file:  # writable, since NFS locks no others
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:  # others: a file system without locks
                if isinstance(error, BlockingIOError):
                    raise DataError(f"{folder}: another process is writing there; wait until it has ended") from None
            yield


def remove_dataset(place: Place) -> None:
    """Remove manifest, shards and parts, and nothing else: a folder may hold the user's own files."""
    place.store.remove(["manifest.json"])  # first, so that nothing reads a dataset replaced in part
    place.store.remove([BAD_RECORDS])
    remove_parts(place)
    if place.folder is not None:
        names = [file.name for file in place.folder.iterdir()]
    else:
        names = list(place.store.sizes())
    place.store.remove([name for name in names if SHARDS.fullmatch(name)])


def remove_parts(place: Place) -> None:
    """Remove the parts, the plan first: parts without a plan are never used, so a kill may leave some."""
    store = place.store
    store.remove([PLAN])
    if isinstance(store, S3Store):
        store.remove(list(store.sizes(PARTS)))
        with suppress(StoreError):  # some stores do not list them
            store.abort_uploads(lambda name: bool(SHARDS.fullmatch(name)) or name.startswith(f"{PARTS}/"))
    elif (store.folder / PARTS).exists():
        shutil.rmtree(store.folder / PARTS)


def write_shard(place: Place, split: str, number: int, documents: pa.ListArray, block_bytes: int) -> WrittenShard:
    """Write documents (list<uint16 | uint32>) as a shard in blocks of about `block_bytes`. Without documents: none."""
    name = f"{split}-{number:05}.arrow"
    if not len(documents):
        return Shard(name, split, 0, 0, 0, 0), []
    offsets = np.from_dlpack(documents.offsets)
    dtype = str(documents.type.value_type)
    schema = token_schema(dtype)
    block_tokens = block_bytes // np.dtype(dtype).itemsize
    rows = []
    first = 0
    with place.create(name) as sink:
        with pa.ipc.new_file(sink, schema) as writer:
            while first < len(documents):
                stop = int(offsets.searchsorted(int(offsets[first]) + block_tokens, side="right")) - 1
                stop = min(max(stop, first + 1), len(documents))  # at least one document, however long
                batch = pa.record_batch([documents.slice(first, stop - first)], schema=schema)
                message = batch.serialize()
                writer.write_batch(batch)
                offset = sink.tell() - message.size
                tokens = int(offsets[stop] - offsets[first])
                rows.append((offset, message.size, stop - first, tokens, isal_zlib.crc32(message)))
                first = stop
        size = sink.tell()
    shard = Shard(name, split, size, len(rows), len(documents), int(offsets[-1] - offsets[0]))
    return shard, rows


def write_manifest(
    place: Place, tokenizer: Tokenizer, written: Sequence[WrittenShard], facts: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Write blocks.arrow and then, as the commit, manifest.json, with `facts` in it, too. Returns the manifest.

    `written` holds train's shards first. Raises DataError without documents.
    """
    shards = [shard for shard, _ in written if shard.blocks]
    if not shards:
        raise DataError(f"{place.url}: no documents, or all longer than --seq-len, so there is no dataset")
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, INDEX_SCHEMA) as writer:
        writer.write_batch(build_index([rows for _, rows in written if len(rows)]))
    index = memoryview(sink.getvalue())
    place.put("blocks.arrow", index)
    manifest = {
        "format": FORMAT,
        "version": VERSION,
        "dtype": token_dtype(tokenizer.vocab_size),
        "vocab_size": tokenizer.vocab_size,
        "eos_id": tokenizer.eos_id,
        "tokenizer": tokenizer.fingerprint,
        "tokenizer_files": {name: digest(content) for name, content in sorted(tokenizer.files().items())},
        "index_bytes": len(index),
        "index_crc32": isal_zlib.crc32(index),
        "index_sha256": hashlib.sha256(index).hexdigest(),
        "shards": [shard._asdict() for shard in shards],
    }
    if tokenizer.chat_template:
        manifest["chat_template"] = digest(tokenizer.chat_template.encode())
    manifest |= facts or {}
    content = json.dumps(manifest, indent=1).removesuffix("\n}").encode()
    place.put("manifest.json", content + seal(content))
    return manifest
