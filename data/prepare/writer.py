"""Write and remove the files of a prepared dataset, which data.shards describes. Imports no torch."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from isal import isal_zlib

from data.prepare.output import BLOCKS, MANIFEST, PARTS, PLAN, Output, is_own
from data.shards import FORMAT, INDEX_SCHEMA, VERSION, DataError, Shard, digest, seal, token_schema
from data.tokenizer import Tokenizer

LARGEST_SHARD_MB = 2048  # twice as much would be more tokens than Arrow's lists can count
Rows = Sequence[tuple[int, ...]] | np.ndarray  # of a shard in blocks.arrow, in the order of INDEX_SCHEMA
WrittenShard = tuple[Shard, Rows]


def as_arrow(values: np.ndarray) -> pa.Array:
    """An Arrow array in the same memory. `pa.array` would import pandas, which takes half a second."""
    return pa.Array.from_buffers(pa.from_numpy_dtype(values.dtype), len(values), [None, pa.py_buffer(values)])


def build_index(rows_of_shards: Sequence[Rows]) -> pa.RecordBatch:
    """The content of blocks.arrow."""
    columns = np.concatenate(rows_of_shards, dtype=np.int64).T.copy()
    arrays = [as_arrow(column).cast(field.type) for column, field in zip(columns, INDEX_SCHEMA, strict=True)]
    return pa.record_batch(arrays, schema=INDEX_SCHEMA)


def file_digests(tokenizer: Tokenizer) -> dict[str, str]:
    """Name → digest of the tokenizer's files."""
    return {name: digest(content) for name, content in sorted(tokenizer.files().items())}


def token_dtype(vocab_size: int) -> str:
    """The smallest data type that holds every id."""
    return "uint16" if vocab_size <= 2**16 else "uint32"


def is_held_out(content: bytes, validation_fraction: float) -> bool:
    """Whether a document is for validation, by a hash of its whole content, so all its pieces stay on one side."""
    digest = hashlib.blake2b(content, digest_size=8).digest()
    return int.from_bytes(digest, "little") < validation_fraction * 2**64


def remove_dataset(output: Output) -> None:
    """Remove a dataset's files and parts, and nothing else: a folder may hold the user's own files."""
    remove_parts(output)
    output.store.remove([name for name in output.store.sizes() if is_own(name)])


def remove_parts(output: Output) -> None:
    """Remove the parts, the plan first: parts without a plan are never used, so a kill may leave some."""
    output.store.remove([PLAN, *output.store.sizes(PARTS)])


def write_shard(output: Output, split: str, number: int, documents: pa.ListArray, block_bytes: int) -> WrittenShard:
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
    with output.create(name) as sink:
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
    output: Output, tokenizer: Tokenizer, written: Sequence[WrittenShard], facts: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Write blocks.arrow and then, as the commit, manifest.json, with `facts` in it, too. Returns the manifest.

    `written` holds train's shards first. Raises DataError without documents.
    """
    shards = [shard for shard, _ in written if shard.blocks]
    if not shards:
        raise DataError(f"{output.url}: no documents, or all longer than --seq-len, so there is no dataset")
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, INDEX_SCHEMA) as writer:
        writer.write_batch(build_index([rows for _, rows in written if len(rows)]))
    index = memoryview(sink.getvalue())
    output.put(BLOCKS, index)
    manifest = {
        "format": FORMAT,
        "version": VERSION,
        "dtype": token_dtype(tokenizer.vocab_size),
        "vocab_size": tokenizer.vocab_size,
        "eos_id": tokenizer.eos_id,
        "tokenizer": tokenizer.fingerprint,
        "tokenizer_files": file_digests(tokenizer),
        "index_bytes": len(index),
        "index_crc32": isal_zlib.crc32(index),
        "index_sha256": hashlib.sha256(index).hexdigest(),
        "shards": [shard._asdict() for shard in shards],
    }
    if tokenizer.chat_template:
        manifest["chat_template"] = digest(tokenizer.chat_template.encode())
    manifest |= facts or {}
    content = json.dumps(manifest, indent=1).removesuffix("\n}").encode()
    output.put(MANIFEST, content + seal(content))
    return manifest
