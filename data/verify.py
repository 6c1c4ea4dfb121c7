"""Check every token of prepared datasets against their manifests.

    python -m data.verify datasets/stdlib s3://bucket/dataset

Prints a line for each fault and exits with status 1 if there is any.
"""

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pyarrow as pa
from isal import isal_zlib
from tqdm import tqdm

from config import Data, command_line
from data.packing import HIDDEN, START
from data.shards import DataError, Dataset, Split, open_dataset, token_schema
from data.storage import DamagedError

THREADS = 8
IN_FLIGHT = 32  # blocks held at a time


def faults(dataset: Dataset) -> Iterator[str]:
    """Yield a message for each fault of a dataset; none if it is as it was made.

    Raises StorageError if it cannot be read.
    """
    try:
        dataset.check_tokenizer()
    except DataError as error:
        yield str(error)
    for split in dataset.splits.values():
        yield from _shard_faults(dataset, split)
        yield from _block_faults(dataset, split)


def _shard_faults(dataset: Dataset, split: Split) -> Iterator[str]:
    for number, shard in enumerate(split.shards):
        own = split.blocks_of(number)
        if (split.documents[own].sum(), split.tokens[own].sum()) != (shard.documents, shard.tokens):
            yield f"{dataset.url}/{shard.file}: blocks.arrow and manifest.json differ in its documents or tokens"
        size = dataset.folder.size(shard.file)
        if size != shard.bytes:
            yield f"{dataset.url}/{shard.file}: has {size} bytes, the manifest says {shard.bytes}"
        elif not _is_arrow_of_index(split, number):
            yield f"{dataset.url}/{shard.file}: its Arrow schema or footer is damaged: other readers find other blocks"
        lengths = shard.file.replace(".arrow", ".lengths")
        try:
            if isal_zlib.crc32(dataset.folder.read(lengths)) != shard.lengths_crc32:
                yield f"{dataset.url}/{lengths}: is damaged, its checksum does not match"
        except DamagedError as error:
            yield f"{dataset.url}/{lengths}: {error}"


def _is_arrow_of_index(split: Split, number: int) -> bool:
    """Whether an Arrow reader finds the blocks of the index, given the schema and footer around them."""
    shard, own = split.shards[number], split.blocks_of(number)
    offsets, sizes = split.offset[own].astype(np.int64), split.size[own].astype(np.int64)
    end = int(offsets[-1] + sizes[-1])
    try:
        head = split.folder.read(shard.file, 0, int(offsets[0]))
        tail = split.folder.read(shard.file, end, shard.bytes - end)
        stream, file = pa.py_buffer(head[8:] + tail), pa.py_buffer(head[:8] + tail)  # without the blocks
        as_it_is = pa.ipc.IpcReadOptions(ensure_native_endian=False)
        by_footer = pa.ipc.open_file(file, options=as_it_is)
        schemas = pa.ipc.open_stream(stream, options=as_it_is).read_all().schema, by_footer.schema
        footer = tail[-10 - int.from_bytes(tail[-10:-6], "little") : -10]
        dictionaries, blocks = (_footer_places(footer, field) for field in (2, 3))
    except (pa.ArrowException, DamagedError, ValueError, OSError):
        return False
    return (
        head.startswith(b"ARROW1")
        and all(schema.equals(token_schema(split.dtype), check_metadata=True) for schema in schemas)
        and not len(dictionaries)
        and by_footer.num_record_batches == len(offsets)
        and np.array_equal(blocks["offset"], offsets)
        and np.array_equal(blocks["metadata"] + blocks["body"], sizes)
    )


def _footer_places(footer: bytes, field: int) -> np.ndarray:
    """Places of messages in field 2 (dictionaries) or 3 (record batches) of a `Footer` (Arrow's format/File.fbs)."""

    def number(at: int, size: int = 4) -> int:
        return int.from_bytes(footer[at : at + size], "little", signed=True)

    root = number(0)
    entry = root + number(root - number(root) + 4 + 2 * field, 2)  # the vtable says where the fields are
    vector = entry + number(entry)
    place = [("offset", "<i8"), ("metadata", "<i4"), ("padding", "<i4"), ("body", "<i8")]
    return np.frombuffer(footer, place, number(vector), vector + 4)


def _block_faults(dataset: Dataset, split: Split) -> Iterator[str]:
    blocks = len(split.tokens)
    with ThreadPoolExecutor(THREADS) as threads, tqdm(total=blocks, desc=split.name, unit=" blocks") as bar:
        for first in range(0, blocks, IN_FLIGHT):
            numbers = range(first, min(first + IN_FLIGHT, blocks))
            for messages in threads.map(lambda block: list(_faults_of_block(dataset, split, block)), numbers):
                bar.update()
                yield from messages


def _faults_of_block(dataset: Dataset, split: Split, block: int) -> Iterator[str]:
    try:
        content = split.read(block)
    except DataError as error:
        yield str(error)
        return
    values, ids, offsets = content.values, split.ids(content.values), content.offsets
    ended = ids[offsets[1:] - 1] == dataset.eos_id
    if split.packed_seq_len:
        wrong = {
            f"does not have {split.packed_seq_len} tokens": np.diff(offsets) != split.packed_seq_len,
            "does not begin with a hidden start": values[offsets[:-1]] < START + HIDDEN,
            f"does not end with token {dataset.eos_id}": ~ended,
        }
    else:
        counts = np.diff(np.flatnonzero(ids == dataset.eos_id).searchsorted(offsets))  # of eos in each document
        wrong = {f"must have token {dataset.eos_id} once, at its end": ~ended | (counts != 1)}
    for what, rows in wrong.items():
        if rows.any():
            yield f"{split.location(block)}, row {int(np.argmax(rows))}: {what}"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m data.verify", description="Check every token of datasets.")
    parser.add_argument("dataset", nargs="+", help="folder or URL of a prepared dataset")
    wrong = 0
    with command_line():
        for url in parser.parse_args(argv).dataset:
            with tempfile.TemporaryDirectory() as cache:  # a run's own cache would hide faults of the dataset
                dataset = open_dataset(url, Data(cache_folder=cache, cache_gb=1))
                for message in faults(dataset):
                    wrong += 1
                    print(message)
            for split in dataset.splits.values():
                documents = sum(shard.documents for shard in split.shards)
                print(f"{dataset.url}: {split.name}: documents {documents:,}, tokens {split.total_tokens:,}")
        if not wrong:
            print("no faults")
    if wrong:
        sys.exit(f"faults: {wrong}")


if __name__ == "__main__":
    main()
