"""Write the files of a prepared dataset, which data.shards describes. Imports no torch."""

import argparse
import hashlib
import json
import math
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from isal import isal_zlib

from config import LOCAL
from data.shards import FORMAT, INDEX_SCHEMA, VERSION, DataError, Shard, digest, seal, token_schema
from data.tokenizer import Tokenizer
from records import write_atomically

PARTS = ".parts"  # folder of a preparation's finished work, until its end
SHARDS = re.compile(r"\.?(train|validation)-\d{5,}\.(arrow|lengths)(\.tmp)?")


class WrittenShard(NamedTuple):
    """A shard and its rows in blocks.arrow."""

    shard: Shard
    blocks: pa.Table  # INDEX_SCHEMA


def token_dtype(vocab_size: int) -> str:
    """The smallest data type that holds every id."""
    return "uint16" if vocab_size <= 2**16 else "uint32"


def is_held_out(content: bytes, validation_fraction: float) -> bool:
    """Whether a document is for validation, by a hash of its whole content, so all its pieces stay on one side."""
    digest = hashlib.blake2b(content, digest_size=8).digest()
    return int.from_bytes(digest, "little") < validation_fraction * 2**64


def add_output_options(parser: argparse.ArgumentParser, required: bool = True) -> None:
    """The options of every command that writes a dataset."""
    add = parser.add_argument
    add("--output", required=required, help="folder of the dataset")
    add("--eos-token", default="", help="token that ends a document; default: the tokenizer's own")
    add("--validation-fraction", type=float, default=0.02, help="share of documents held out (default %(default)s)")
    add("--block-mb", type=float, default=8, help="MiB of tokens shuffled and read as one block (default %(default)s)")
    add("--shard-mb", type=float, default=256, help="approximate MiB of tokens in a file (default %(default)s)")
    add("--overwrite", action="store_true", help="replace a finished dataset")


def say_ready(manifest: dict[str, Any], output: str, validation_fraction: float) -> None:
    """Print the last line of every command that writes a dataset, and before it if nothing is held out as asked."""
    if validation_fraction and not any(shard["split"] == "validation" for shard in manifest["shards"]):
        print(
            f"nothing is held out: --validation-fraction {validation_fraction:g} is too small for so few documents; "
            "raise it, or train with --validation.enable=false"
        )
    print(f"ready: {output}")


def check_output(output: str, overwrite: bool, validation_fraction: float, block_mb: float, shard_mb: float) -> Path:
    """Check the output options and return the folder to write a dataset to. Raises DataError."""
    for name, value in (("block-mb", block_mb), ("shard-mb", shard_mb)):
        if not 1e-6 <= value < math.inf:
            raise DataError(f"--{name} {value}: must be above 0 and finite")
    if not 0 <= validation_fraction <= 1:
        raise DataError(f"--validation-fraction {validation_fraction}: must be from 0 to 1")
    if not output or output not in LOCAL:
        raise DataError(f"--output {output}: must be a string {LOCAL}")
    try:
        output.encode()
    except UnicodeEncodeError:  # Arrow could not open files there, and no config could name it
        raise DataError(f"--output {output}: must be valid text, in UTF-8") from None
    refuse_finished(Path(output), overwrite)
    return Path(output)


def refuse_finished(folder: Path, overwrite: bool) -> None:
    if (folder / "manifest.json").exists() and not overwrite:
        raise DataError(f"{folder}: already holds a finished dataset; give --overwrite to replace it")


def refuse_too_large(tokens: int, shard: int) -> None:
    """Refuse more tokens than Arrow's 32-bit list offsets can hold. Raises DataError."""
    if tokens >= 2**31:
        raise DataError(f"shard {shard} would hold {tokens:,} tokens, 2^31 or more; give a smaller --shard-mb")


def remove_dataset(folder: Path) -> None:
    """Remove manifest, shards and parts from a folder, and nothing else: it may hold the user's own files."""
    (folder / "manifest.json").unlink(missing_ok=True)
    remove_parts(folder)
    for file in [file for file in folder.iterdir() if SHARDS.fullmatch(file.name)]:
        file.unlink()


def remove_parts(folder: Path) -> None:
    """Remove the parts, the plan first: parts without a plan are never used, so a kill may leave some."""
    (folder / PARTS / "plan.json").unlink(missing_ok=True)
    if (folder / PARTS).exists():
        shutil.rmtree(folder / PARTS)


def write_shard(
    folder: Path,
    split: str,
    number: int,
    documents: pa.ListArray,
    block_bytes: int,
    order: np.ndarray | None = None,
) -> WrittenShard:
    """Write documents (list<uint16 | uint32>) as one shard, in blocks of at most about `block_bytes`.

    `order`: the documents' numbers in the order to write; None: as they stand. Writes nothing without documents. The
    files appear whole or not at all.
    """
    path = folder / f"{split}-{number:05}.arrow"
    order = np.arange(len(documents)) if order is None else order
    sizes = np.diff(documents.offsets.to_numpy())[order]
    offsets = np.concatenate(([0], np.cumsum(sizes, dtype=np.int64)))
    blocks, lengths = INDEX_SCHEMA.empty_table(), sizes.astype("<u4").tobytes()
    if len(documents):
        blocks = _write_blocks(path, documents, order, offsets, block_bytes)
        write_atomically(path.with_suffix(".lengths"), lengths)
    shard = Shard(
        file=path.name,
        split=split,
        bytes=path.stat().st_size if blocks else 0,
        blocks=len(blocks),
        documents=len(documents),
        tokens=int(offsets[-1]),
        lengths_crc32=isal_zlib.crc32(lengths),
    )
    return WrittenShard(shard, blocks)


def _write_blocks(
    path: Path, documents: pa.ListArray, order: np.ndarray, offsets: np.ndarray, block_bytes: int
) -> pa.Table:
    """Write a record batch per block and return their rows of the index. `offsets` are the tokens' in `order`."""
    dtype = str(documents.type.value_type)
    schema = token_schema(dtype)
    block_tokens = block_bytes // np.dtype(dtype).itemsize
    blocks = []
    temporary = path.with_name(f"{path.name}.tmp")
    with pa.OSFile(str(temporary), "wb") as sink:
        with pa.ipc.new_file(sink, schema) as writer:
            first = 0
            while first < len(documents):
                stop = int(offsets.searchsorted(int(offsets[first]) + block_tokens, side="right")) - 1
                stop = min(max(stop, first + 1), len(documents))  # at least one document, however long
                batch = pa.record_batch([documents.take(pa.array(order[first:stop]))], schema=schema)
                message = batch.serialize()
                writer.write_batch(batch)
                blocks.append(
                    {
                        "offset": sink.tell() - message.size,
                        "size": message.size,
                        "documents": stop - first,
                        "tokens": int(offsets[stop] - offsets[first]),
                        "crc32": isal_zlib.crc32(message),
                    }
                )
                first = stop
        sink.flush()
        os.fsync(sink.fileno())
    temporary.replace(path)
    return pa.Table.from_pylist(blocks, INDEX_SCHEMA)


def write_manifest(
    folder: Path, tokenizer: Tokenizer, written: Sequence[WrittenShard], facts: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Write blocks.arrow and then, as the commit, manifest.json. Returns the manifest.

    `written` holds train's shards first; `facts` are more entries of the manifest. Raises DataError without documents.
    """
    shards = [shard for shard, _ in written if shard.blocks]
    if not shards:
        raise DataError(f"{folder}: no documents, so there is no dataset")
    blocks = pa.concat_tables([blocks for _, blocks in written])
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, INDEX_SCHEMA) as writer:
        writer.write_table(blocks.combine_chunks())
    index = memoryview(sink.getvalue())
    write_atomically(folder / "blocks.arrow", index)
    template = {"chat_template": digest(tokenizer.chat_template.encode())} if tokenizer.chat_template else {}
    manifest = {
        "format": FORMAT,
        "version": VERSION,
        "dtype": token_dtype(tokenizer.vocab_size),
        "vocab_size": tokenizer.vocab_size,
        "eos_id": tokenizer.eos_id,
        "tokenizer": tokenizer.fingerprint,
        "index_bytes": len(index),
        "index_crc32": isal_zlib.crc32(index),
        "index_sha256": hashlib.sha256(index).hexdigest(),
        "shards": [shard._asdict() for shard in shards],
        **template,
        **(facts or {}),
    }
    content = json.dumps(manifest, indent=1).removesuffix("\n}").encode()
    write_atomically(folder / "manifest.json", content + seal(content))
    return manifest
