"""Both passes of a preparation: units become parts, sorted by bucket, and each bucket becomes a shard."""

import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import pairwise
from operator import itemgetter
from typing import Any, NamedTuple, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from tqdm import tqdm

from config import TitaniteError
from data.order import derive_key, random_words
from data.packing import HIDDEN, pack
from data.prepare import workers, writer
from data.prepare.options import TUNING, Options
from data.prepare.output import BAD_RECORDS, PARTS, PLAN, Output
from data.prepare.readers import Located, Tally, Unit, documents
from data.prepare.sources import failures_of
from data.prepare.tokens import token_documents
from data.prepare.tuning import encode_example
from data.prepare.workers import Map
from data.shards import DataError, Shard, digest, token_type
from data.tokenizer import FILES, Tokenizer, parse_tokenizer
from storage import Store

COUNTED = ("conversations", "trained_tokens", "dropped")  # of examples, in the manifest
BATCH_BYTES = 2**20  # text per tokenizer call: its tokens are Python integers at first, and few fit the caches
HELD_BYTES = 128 * 2**20  # of tokens that a process holds before it writes them
PARTS_LAYOUT = 4  # changes with what parts hold: those of an earlier version are not used
# Of the documents in parts. Arrow moves bytes much faster than lists of numbers.
PART_SCHEMA = pa.schema({"word": pa.uint64(), "tokens": pa.large_binary()})

T = TypeVar("T")


class Document(NamedTuple):
    """A document, or a piece of one that was cut."""

    place: str  # in the input
    content: Any  # text, the JSON of an example, or ids
    is_held_out: bool


@dataclass(frozen=True)
class Preparation:
    """How a dataset is made."""

    options: Options
    url: str  # of the output
    input: str  # digest of version, units (names, sizes and versions of files, how they are cut) and tokenizer
    facts: dict[str, Any]  # what the manifest says of how examples are made
    dtype: str
    train_buckets: int  # each becomes a shard
    validation_buckets: int

    @property
    def buckets(self) -> int:
        """Of train, then of validation."""
        return self.train_buckets + self.validation_buckets

    def record(self) -> str:
        """Everything that decides the bytes of the dataset. Any change makes finished parts useless."""
        return json.dumps([PARTS_LAYOUT, self.options.planned(), self.input, self.facts])

    @property
    def output(self) -> Output:
        return Output(self.url, digest(self.record().encode()))


def run_passes(preparation: Preparation, tokenizer: Tokenizer, units: Sequence[Unit], client: Any) -> dict[str, Any]:
    """Tokenise and write what an earlier start by the same plan has not. Returns the manifest.

    Raises DataError if too many records are bad; finished parts are kept for a larger --skip-bad.
    """
    _start_or_go_on(preparation, tokenizer)
    output = preparation.output
    if client:
        workers.check_workers(output, client)
    with _mapping(preparation, len(units), client) as map_tasks:
        tokenise = partial(_run_once, preparation, "unit", _tokenise_unit)
        bad: list[str] = []
        counts: Counter[str] = Counter()
        parts: list[str] = []
        for own_bad, own_counts, own_parts in _run_all(map_tasks, tokenise, units, "tokenise", " units"):
            bad += own_bad
            counts.update(own_counts)
            parts += own_parts
        if len(bad) > preparation.options.skip_bad:
            raise DataError(f"{len(bad)} bad records are more than --skip-bad {preparation.options.skip_bad}")
        write = partial(_run_once, preparation, "bucket", partial(_write_bucket, parts=parts))
        written = _run_all(map_tasks, write, range(preparation.buckets), "write", " shards")
    facts = dict(preparation.facts)
    if preparation.options.format in TUNING:
        facts |= {name: counts[name] for name in COUNTED}
    if bad:
        output.put(BAD_RECORDS, "".join(f"{line}\n" for line in bad).encode())
        facts["bad_records"] = len(bad)
    output.store.remove(parts)  # before the manifest, which ends all starts
    shards = [(Shard(*shard), rows) for shard, rows in written]
    manifest = writer.write_manifest(output, tokenizer, shards, facts)
    writer.remove_parts(output)
    return manifest


def _start_or_go_on(preparation: Preparation, tokenizer: Tokenizer) -> None:
    """Keep the parts of an interrupted preparation by the same plan. Remove everything else that we wrote."""
    output = Output(preparation.url)
    record = preparation.record().encode()
    if output.read_if_there(PLAN) != record:
        writer.remove_dataset(output)
        if output.folder is not None:
            (output.folder / PARTS).mkdir(exist_ok=True)
        output.put(PLAN, record)
    tokenizer.save(preparation.url)


@contextmanager
def _mapping(preparation: Preparation, units: int, client: Any) -> Iterator[Map]:
    """What runs the tasks: the cluster of `client`, otherwise processes of this machine."""
    if client:
        yield workers.cluster_map(client)
        return
    tasks = max(units, preparation.buckets)
    # Starting a process takes half a second, in which it could tokenise a few MB.
    cores = len(os.sched_getaffinity(0)) if tasks > 2 else 1
    with workers.pool_of_processes(min(preparation.options.processes or cores, tasks)) as map_tasks:
        yield map_tasks


def _run_all(
    map_tasks: Map, run: Callable[[tuple[int, Any]], tuple[int, Any]], given: Sequence[Any], title: str, unit: str
) -> list[Any]:
    """Run (number, what is given) for each, with a bar. The results by their numbers."""
    with tqdm(map_tasks(run, list(enumerate(given))), total=len(given), desc=title, unit=unit) as bar:
        numbered = sorted(bar, key=itemgetter(0))
    return [result for _, result in numbered]


def _run_once(
    preparation: Preparation, kind: str, work: Callable[[Preparation, int, Any], Any], task: tuple[int, Any]
) -> tuple[int, Any]:
    """(number of the task, what `work` gives), which is kept in a file for another start."""
    number, given = task
    name = f"{PARTS}/{kind}-{number:06}.json"
    record = preparation.output.read_if_there(name)
    if record is None:
        result = json.dumps(work(preparation, number, given)).encode()
        preparation.output.put(name, result)
        record = memoryview(result)
    return number, json.loads(bytes(record))


@lru_cache(maxsize=1)
def _stored_tokenizer(output: Output) -> Tokenizer:
    """The tokenizer of a plan, read once by each worker process."""
    files = {}
    for name in FILES:
        content = output.read_if_there(name)
        if content is not None:
            files[name] = bytes(content)
    return parse_tokenizer(files, output.url)


# ---------------------------------------------------------------- pass 1: tokenise


def _tokenise_unit(preparation: Preparation, number: int, unit: Unit) -> tuple[list[str], Counter[str], list[str]]:
    """Write a unit's documents into parts. Returns bad records, counts, and the parts' names."""
    tokenizer = _stored_tokenizer(preparation.output)
    tally = Tally(preparation.options.skip_bad)
    parts: list[str] = []
    batches = tokenised(preparation, tokenizer, number, unit, tally, BATCH_BYTES)
    for held in grouped(batches, lambda batch: batch.nbytes, HELD_BYTES):
        name = f"{PARTS}/part-{number:06}-{len(parts)}.arrow"
        _write_part(preparation, name, pa.concat_batches(held))
        parts.append(name)
    return tally.bad, tally.counts, parts


def tokenised(
    preparation: Preparation, tokenizer: Tokenizer, number: int, unit: Unit, tally: Tally, batch_bytes: int
) -> Iterator[pa.RecordBatch]:
    """Yield record batches with bucket, sort key and tokens of each document. Validation's buckets follow train's."""
    format = preparation.options.format
    key = derive_key("document", number)
    count = 0
    batches = grouped(_documents(preparation, tokenizer, unit, tally), lambda found: len(found.content), batch_bytes)
    if format == "text":  # the others add to `tally` here as well
        batches = workers.read_ahead(batches)
    for batch in batches:
        words = random_words(len(batch), key, first=count)
        count += len(batch)
        held_out = np.array([document.is_held_out for document in batch])
        in_validation = preparation.train_buckets + words % preparation.validation_buckets
        buckets = np.where(held_out, in_validation, words % preparation.train_buckets)
        if format == "text":
            tokens = tokenizer.encode_documents([document.content for document in batch])
        elif format == "tokens":
            tokens = [document.content for document in batch]
        else:
            tokens = [_example(preparation.options, tokenizer, document, tally) for document in batch]
        kept = [place for place, ids in enumerate(tokens) if len(ids)]
        columns = {
            "bucket": writer.as_arrow(buckets[kept]),
            "word": writer.as_arrow(words[kept]),
            "tokens": as_bytes([tokens[place] for place in kept], preparation.dtype),
        }
        yield pa.record_batch(columns)


def _documents(preparation: Preparation, tokenizer: Tokenizer, unit: Unit, tally: Tally) -> Iterator[Document]:
    """Yield the documents of a unit, those that are too long in pieces, without empty ones."""
    options = preparation.options
    located: Located
    if options.format == "tokens":
        located = token_documents(unit, tokenizer, options.dtype, options.keys)
    else:
        located = documents(unit, options.columns, options.format, options.separator_text, tally)
    for place, content in located:
        whole = content.encode() if isinstance(content, str) else content.tobytes()
        is_held_out = writer.is_held_out(whole, options.validation_fraction)
        for piece in cut(content, options.max_characters):
            if len(piece):
                yield Document(place, piece, is_held_out)


def grouped(items: Iterable[T], size_of: Callable[[T], int], least: int) -> Iterator[list[T]]:
    """Yield the items in lists whose sizes come to `least` or a little more; the last may be smaller."""
    group: list[T] = []
    size = 0
    for item in items:
        group.append(item)
        size += size_of(item)
        if size >= least:
            yield group
            group = []
            size = 0
    if group:
        yield group


def cut(text: Any, max_characters: int) -> Iterator[Any]:
    """Cut `text` into pieces of at most `max_characters`, at line ends where possible. 0: whole."""
    start = 0
    while max_characters and len(text) - start > max_characters:
        stop = text.rfind("\n", start, start + max_characters) + 1 or start + max_characters
        yield text[start:stop]
        start = stop
    yield text[start:]


def _example(options: Options, tokenizer: Tokenizer, document: Document, tally: Tally) -> np.ndarray:
    """The example of a conversation or pair, empty if it is bad or does not fit into a row."""
    nothing = np.zeros(0, np.uint32)
    try:
        example = encode_example(document.content, options.format, tokenizer)
    except TitaniteError as error:
        tally.reject(document.place, str(error))
        return nothing
    tally.counts["conversations"] += 1
    if len(example) > options.seq_len:
        tally.counts["dropped"] += 1
        return nothing
    tally.counts["trained_tokens"] += int((example < HIDDEN).sum())
    return example


def _write_part(preparation: Preparation, name: str, held: pa.RecordBatch) -> None:
    """Write a file of documents, one record batch per bucket, in the order of the buckets.

    It begins with where each batch begins and the last ends (int64), so that a bucket reads only what it needs.
    """
    held = held.take(pc.sort_indices(held["bucket"]))
    bounds = np.from_dlpack(held["bucket"]).searchsorted(np.arange(preparation.buckets + 1))
    held = held.select(PART_SCHEMA.names)
    batches = [held.slice(first, stop - first).serialize() for first, stop in pairwise(bounds.tolist())]
    offsets = np.cumsum([8 * len(bounds), *map(len, batches)], dtype=np.int64)
    with preparation.output.create(name) as part:
        part.write(offsets.tobytes())
        part.writelines(batches)


# ---------------------------------------------------------------- pass 2: shuffle and write


def _write_bucket(preparation: Preparation, bucket: int, _: int, *, parts: Sequence[str]) -> writer.WrittenShard:
    """Write a bucket's shard."""
    output = preparation.output
    split = "train"
    number = bucket
    if bucket >= preparation.train_buckets:
        split = "validation"
        number -= preparation.train_buckets
    with ThreadPoolExecutor(output.store.read_threads) as threads:
        batches = list(threads.map(partial(_read_slice, output.store, bucket), parts))
    with failures_of(f"{split}-{number:05}, which a smaller --shard-mb makes smaller"):
        stored = pa.concat_batches(batches)
        del batches  # to hold the documents twice, not three times
        order = pc.sort_indices(stored["word"])
        documents = as_lists(stored["tokens"].take(order), preparation.dtype)
        del stored
    if preparation.options.seq_len:
        documents = pack(documents, preparation.options.seq_len, _stored_tokenizer(output).eos_id)
    block_bytes = int(preparation.options.block_mb * 2**20)
    return writer.write_shard(output, split, number, documents, block_bytes)


def _read_slice(store: Store, bucket: int, part: str) -> pa.RecordBatch:
    """A bucket's documents in a part. Parts are named, not listed, so none can be missed."""
    bounds = np.frombuffer(store.read(part, 8 * bucket, 16), np.int64)
    first, stop = bounds.tolist()
    return pa.ipc.read_record_batch(pa.py_buffer(store.read(part, first, stop - first)), PART_SCHEMA)


def as_bytes(documents: Sequence[np.ndarray], dtype: str) -> pa.LargeBinaryArray:
    """The tokens of each document, as bytes."""
    tokens = np.concatenate([np.zeros(0, dtype), *documents], dtype=dtype, casting="unsafe")
    bounds = np.cumsum([0, *map(len, documents)], dtype=np.int64) * tokens.itemsize
    buffers = [None, pa.py_buffer(bounds), pa.py_buffer(tokens)]
    return pa.LargeBinaryArray.from_buffers(pa.large_binary(), len(documents), buffers)


def as_lists(documents: pa.LargeBinaryArray, dtype: str) -> pa.ListArray:
    """The documents of `as_bytes` as lists, in the same memory. Raises ArrowInvalid for 2**31 tokens or more."""
    lengths = np.from_dlpack(pc.binary_length(documents)) // np.dtype(dtype).itemsize
    bounds = np.cumsum(np.append(0, lengths))
    tokens = pa.Array.from_buffers(pa.type_for_alias(dtype), int(bounds[-1]), [None, documents.buffers()[2]])
    return pa.ListArray.from_arrays(writer.as_arrow(bounds).cast(pa.int32()), tokens, type=token_type(dtype))
