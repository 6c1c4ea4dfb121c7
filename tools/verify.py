"""Read datasets and checkpoints in full, and compare every byte with its checksum, every token with its manifest.

    python -m tools.verify datasets/stdlib outputs/RUN s3://bucket/dataset

Exits with 1 if a dataset has a fault, if a committed checkpoint is damaged, or if one is stock DCP's, which cannot be
checked.
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

from checkpoint.files import verify_items
from checkpoint.manifest import MANIFEST, open_checkpoint, read_small
from config import Data, command_line
from data.packing import HIDDEN, START
from data.shards import DataError, Dataset, Split, open_dataset, token_schema
from data.storage import DamagedError, open_folder
from storage import DamagedError as DamagedCheckpointError
from storage import Store
from tools.list_checkpoints import STOCK, UNCOMMITTED, find_begun, look

THREADS = 8
IN_FLIGHT = 32  # blocks held at a time


# ---------------------------------------------------------------- datasets


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


def verify_dataset(url: str, data: Data) -> int:
    """Print a line per fault, and the sizes of the splits. Returns the number of faults."""
    dataset, wrong = open_dataset(url, data), 0
    for message in faults(dataset):
        wrong += 1
        print(message)
    for split in dataset.splits.values():
        documents = sum(shard.documents for shard in split.shards)
        print(f"{dataset.url}: {split.name}: documents {documents:,}, tokens {split.total_tokens:,}")
    return wrong


# ---------------------------------------------------------------- checkpoints


def verify_checkpoint(store: Store, name: str) -> int:
    """Check all of a checkpoint, with a progress bar. Returns its number of items. Raises DamagedCheckpointError."""
    opened = open_checkpoint(store, name)
    for file, digest in opened.manifest.get("companions", {}).items():
        read_small(store, name, file, digest)
    items = opened.metadata.storage_data
    total = sum(info.length for info in items.values())
    with tqdm(total=total, unit="B", unit_scale=True, desc=name[:13], disable=None, leave=False) as bar:
        verify_items(opened, bar.update)
    return len(items)


def judge(store: Store, name: str) -> tuple[str, bool]:
    """What to say of checkpoint `name`, and whether it is damaged or has no checksums.

    Also doubtful is one, named by the user, that was never committed: beside others it is a usual leftover.
    """
    manifest, problem = look(store, name)
    if problem == UNCOMMITTED:
        return f"{UNCOMMITTED}, nothing will use it", not name
    if problem == STOCK:
        return f"{STOCK}: it can be loaded, but not verified", True
    try:
        if problem:
            raise DamagedCheckpointError(problem)
        return f"intact, step {manifest['step']}, {verify_checkpoint(store, name)} items", False
    except DamagedCheckpointError as error:
        if name and f"{name}/{MANIFEST}" not in store.sizes(name):
            return "removed during this check, as a run in training removes its older ones", False
        return f"DAMAGED: {error}", True


def verify_all(store: Store, names: list[str]) -> int:
    """Print one line per checkpoint. Returns how many are doubtful."""
    doubtful = 0
    for name in names:
        said, is_doubtful = judge(store, name)
        print(f"{name or store.url}: {said}")
        doubtful += is_doubtful
    return doubtful


def verify_place(place: str) -> int:
    """Verify the dataset or the checkpoints at a folder or URL. Returns how many faults or doubtful checkpoints."""
    with tempfile.TemporaryDirectory() as cache:  # a run's own cache would hide faults of the dataset
        data = Data(cache_folder=cache, cache_gb=1)
        if open_folder(place, data).size("manifest.json") is not None:
            return verify_dataset(place, data)
    wrong = 0
    for store, names in find_begun(place, ", nor a dataset's manifest.json"):
        wrong += verify_all(store, names)
    return wrong


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.verify", description="Read all of datasets and checkpoints.")
    parser.add_argument("place", nargs="+", help="folder or URL of a dataset, a run, checkpoints or one checkpoint")
    wrong = 0
    with command_line():
        wrong = sum(verify_place(place) for place in parser.parse_args(argv).place)
        if not wrong:
            print("no faults")
    if wrong:
        sys.exit(f"faults: {wrong}")


if __name__ == "__main__":
    main()
