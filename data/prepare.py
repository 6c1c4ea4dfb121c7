"""Turn text into a dataset that training reads.

    python -m data.prepare --source stdlib --output datasets/stdlib

Two passes run on all cores, or on one for a small input. The first tokenises each unit of the input into a file, with
its documents sorted into buckets. The second shuffles the documents of each bucket and writes them as one shard.
A hash of a document's position in the input decides its bucket and place; a hash of its whole text decides whether it
is held out. So the output does not depend on the number of processes. Finished work stays in OUTPUT/.parts until the
end: after a kill, the same command continues from there. manifest.json is written last and makes the dataset valid.
"""

import argparse
import hashlib
import json
import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from config import TitaniteError, command_line, file_errors
from data.chat import BUILT_IN, encode_examples
from data.order import derive_key, random_words
from data.packing import pack
from data.shards import INDEX_SCHEMA, VERSION, DataError, Shard, token_type
from data.sources import UNIT_BYTES, Unit, documents, failures_of, list_files, plan_units, text_bytes
from data.tokenizer import Tokenizer, load_tokenizer, train_tokenizer
from data.workers import locked, run_all, worker_pool
from data.writer import (
    PARTS,
    WrittenShard,
    add_output_options,
    check_output,
    is_held_out,
    refuse_finished,
    remove_dataset,
    remove_parts,
    report,
    token_dtype,
    write_atomically,
    write_manifest,
    write_shard,
    written_whole,
)

KEYS = {"text": "text", "sft": "prompt,response", "chat": "messages"}  # format → keys of a record
BATCH_BYTES = 2**20  # text per tokenizer call: its tokens are Python integers at first, and few fit the caches
HELD_TOKENS = 64 * 2**20  # that a process holds before it writes them
VOCAB_SIZE = 4096  # default for a trained tokenizer
TOKENIZER_SAMPLE_BYTES = 64 * 2**20  # text to train a tokenizer on

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Everything that decides the bytes of the dataset. Any change makes finished parts useless."""

    input: str  # hash of format, units (names, sizes and versions of files, how they are cut) and tokenizer
    format: str
    keys: tuple[str, ...]
    seq_len: int
    drop_long: bool
    max_characters: int
    dtype: str
    validation_fraction: float
    block_bytes: int
    train_buckets: int  # each becomes a shard
    validation_buckets: int

    @property
    def buckets(self) -> int:
        """Of train, then of validation."""
        return self.train_buckets + self.validation_buckets


def prepare(
    sources: Sequence[str],
    output: str,
    tokenizer: str = "",
    vocab_size: int = 0,
    eos_token: str = "",
    format: str = "text",
    keys: str = "",
    seq_len: int = 0,
    drop_long: bool = False,
    max_characters: int = 0,
    validation_fraction: float = 0.02,
    block_mb: float = 8,
    shard_mb: float = 256,
    processes: int = 0,
    overwrite: bool = False,
) -> dict[str, Any]:
    """Prepare a dataset and return its manifest. `--help` explains the parameters.

    Raises DataError or TitaniteError.
    """
    folder = check_output(output, overwrite, validation_fraction, block_mb, shard_mb)
    is_text, wanted = format == "text", KEYS[format].split(",")
    names = tuple(keys.split(",")) if keys else tuple(wanted)
    for mistake, said in (
        (tokenizer and vocab_size, f"--vocab-size {vocab_size}: is to train a tokenizer, not for --tokenizer"),
        (vocab_size and vocab_size < 257, f"--vocab-size {vocab_size}: must be at least 257: all bytes and eos"),
        (eos_token and not tokenizer, f"--eos-token {eos_token}: needs --tokenizer; a newly trained one has its own"),
        (not is_text and not tokenizer, f"--format {format}: give the --tokenizer of the model to be tuned"),
        (not is_text and seq_len < 2, f"--seq-len {seq_len}: must be at least 2, the later training.seq_len"),
        (is_text and (seq_len or drop_long), f"--seq-len {seq_len}, --drop-long: are for --format sft and chat"),
        (len(names) != len(wanted), f"--keys {keys}: --format {format} needs {len(wanted)}, such as {KEYS[format]}"),
        (max_characters < 0, f"--max-characters {max_characters}: must be at least 0"),
        (max_characters and not is_text, f"--max-characters {max_characters}: examples are never cut"),
        (processes < 0, f"--processes {processes}: must be at least 0"),
    ):
        if mistake:
            raise DataError(said)

    # -- the input, its tokenizer and what decides the bytes to write
    files = list_files(sources)
    units = plan_units(files)
    chosen = load_tokenizer(tokenizer, eos_token) if tokenizer else _trained_tokenizer(units, names, vocab_size)
    if format == "chat":
        chosen.chat_template = chosen.chat_template or BUILT_IN
    dtype = token_dtype(chosen.vocab_size) if is_text else "uint32"
    shard_tokens = shard_mb * 2**20 / np.dtype(dtype).itemsize
    shards = sum(map(text_bytes, files)) / 4 / shard_tokens  # a token is about four bytes of text
    inputs = json.dumps([VERSION, units, chosen.fingerprint, chosen.chat_template])
    plan = Plan(
        input=hashlib.sha256(inputs.encode()).hexdigest(),
        format=format,
        keys=names,
        seq_len=seq_len,
        drop_long=drop_long,
        max_characters=max_characters,
        dtype=dtype,
        validation_fraction=validation_fraction,
        block_bytes=int(block_mb * 2**20),
        train_buckets=max(1, round(shards * (1 - validation_fraction))),
        validation_buckets=max(1, round(shards * validation_fraction)),
    )
    _check_first(plan, chosen, units)

    # -- both passes, continuing an interrupted preparation by the same plan
    with locked(folder), file_errors(folder):
        refuse_finished(folder, overwrite)  # another process may have finished it meanwhile
        _start_or_go_on(folder, plan, chosen)
        units_bytes = [unit.bytes for unit in units]
        waiting = [(bucket,) for bucket in range(plan.buckets) if not _record(folder, bucket).exists()]
        # Starting a process takes most of a second, in which it could tokenise a few MB.
        workers = processes or (len(os.sched_getaffinity(0)) if sum(units_bytes) >= 2 * UNIT_BYTES else 1)
        with worker_pool(min(workers, max(len(units), plan.buckets))) as pool_map:
            if waiting:
                tokenize = partial(_tokenize_unit, folder, plan)
                run_all(pool_map, tokenize, list(enumerate(units)), "tokenise", units_bytes)
            run_all(pool_map, partial(_write_bucket, folder, plan), waiting, "write", [1] * len(waiting))
        for part in (folder / PARTS).glob("unit-*"):  # before the manifest, after which no start takes them up
            part.unlink()
        records = [json.loads(_record(folder, bucket).read_text(encoding="utf-8")) for bucket in range(plan.buckets)]
        written = [WrittenShard(Shard(*shard), pa.Table.from_pylist(rows, INDEX_SCHEMA)) for shard, rows, _ in records]
        if not any(shard.documents for shard, _ in written):  # of other input, `_check_first` found a document
            raise DataError(f"--seq-len {seq_len}: every example is longer; give a larger one")
        dropped = sum(number for *_, number in records)
        facts = {} if is_text else {"dtype": dtype, "packed_seq_len": seq_len, "dropped": dropped}
        manifest = write_manifest(folder, chosen, written, facts)
        remove_parts(folder)
        return manifest


def _trained_tokenizer(units: list[Unit], keys: Sequence[str], vocab_size: int) -> Tokenizer:
    """Train a tokenizer (0: of VOCAB_SIZE tokens) on the beginnings of units spread evenly over the input."""
    total = min(sum(unit.bytes for unit in units), len(units) * UNIT_BYTES)  # if units are few and large, some of each
    chosen = units[:: max(1, total // TOKENIZER_SAMPLE_BYTES)]
    each = max(TOKENIZER_SAMPLE_BYTES // max(len(chosen), 1), UNIT_BYTES)
    return train_tokenizer(
        chain.from_iterable(_beginning(unit, keys, each) for unit in chosen), vocab_size or VOCAB_SIZE
    )


def _beginning(unit: Unit, keys: Sequence[str], characters: int) -> Iterator[str]:
    """Yield the first documents of a unit until they have this many characters."""
    for text in documents(unit, keys):
        yield text
        characters -= len(text)
        if characters <= 0:
            return


def _check_first(plan: Plan, tokenizer: Tokenizer, units: list[Unit]) -> None:
    """Tokenise the first document, to find a wrong option before anything is removed. Raises DataError."""
    batch = next(chain.from_iterable(_batches(plan, unit) for unit in units), None)
    if not batch:
        raise DataError("the input holds no text: nothing to prepare")
    text, held_out = batch[0]
    text = text[:1000] if plan.format == "text" else text  # it may be gigabytes long
    _tokenize(plan, tokenizer, [(text, held_out)], np.zeros(1, np.uint64))


def _start_or_go_on(folder: Path, plan: Plan, tokenizer: Tokenizer) -> None:
    """Keep the parts of an interrupted preparation by the same plan. Remove everything else that we wrote."""
    plan_file = folder / PARTS / "plan.json"
    record = json.dumps(asdict(plan), indent=1)
    (folder / "manifest.json").unlink(missing_ok=True)
    before = plan_file.read_text(encoding="utf-8") if plan_file.is_file() else ""
    if before != record:
        if before:
            log.warning("%s: starting over, since the input, the options or the version changed", folder)
        remove_dataset(folder)
        plan_file.parent.mkdir()
        write_atomically(plan_file, record.encode())
    tokenizer.save(folder)


@lru_cache(maxsize=1)
def _stored_tokenizer(folder: Path, plan: Plan) -> Tokenizer:
    """The tokenizer of the plan that a folder is prepared by. Each worker process reads it once."""
    return load_tokenizer(folder)


# ---------------------------------------------------------------- pass 1: tokenise


def _tokenize_unit(folder: Path, plan: Plan, number: int, unit: Unit) -> int:
    """Write the documents of a unit as an Arrow file, unless it is there. Returns the number of tokens.

    The file repeats one record batch per bucket, in their order, as often as HELD_TOKENS are reached.
    """
    path, tokenizer = folder / PARTS / f"unit-{number:06}.arrow", _stored_tokenizer(folder, plan)
    if path.exists():
        return 0
    key, seen, tokens, held = derive_key("document", number), 0, 0, 0
    batches: list[pa.RecordBatch] = []
    schema = pa.schema({"word": pa.uint64(), "tokens": token_type(plan.dtype)})
    with written_whole(path) as sink, pa.ipc.new_file(sink, schema) as writer:
        for batch in _batches(plan, unit):
            try:
                batches.append(_tokenize(plan, tokenizer, batch, random_words(len(batch), key, first=seen)))
            except TitaniteError as error:  # quotes the text, by which to find it there
                others = len(unit.files) - 1
                name = f"{unit.files[0].url}{f' or one of the {others} files after it' if others else ''}"
                raise DataError(f"{name}: {error}") from None
            seen += len(batch)
            size = len(batches[-1].column("tokens").values)
            tokens, held = tokens + size, held + size
            if held >= HELD_TOKENS:
                _write_sorted(plan, batches, writer)
                held, batches = 0, []
        if batches:
            _write_sorted(plan, batches, writer)
    return tokens


def _batches(plan: Plan, unit: Unit) -> Iterator[list[tuple[str, bool]]]:
    """Yield (document, whether it is held out) of a unit, without empty ones, in lists of about BATCH_BYTES."""
    batch: list[tuple[str, bool]] = []
    size = 0
    for text in filter(None, documents(unit, plan.keys, plan.format == "text")):
        held_out = is_held_out(text.encode(), plan.validation_fraction)
        for piece in _pieces(text, plan.max_characters):
            batch.append((piece, held_out))
            size += len(piece)
            if size >= BATCH_BYTES:
                yield batch
                batch, size = [], 0
    if batch:
        yield batch


def _pieces(text: str, max_characters: int) -> Iterator[str]:
    """Cut `text` into parts of at most `max_characters`, at line ends where possible. 0: whole."""
    start = 0
    while max_characters and len(text) - start > max_characters:
        stop = text.rfind("\n", start, start + max_characters) + 1 or start + max_characters
        yield text[start:stop]
        start = stop
    yield text[start:]


def _tokenize(plan: Plan, tokenizer: Tokenizer, batch: list[tuple[str, bool]], words: np.ndarray) -> pa.RecordBatch:
    """A record batch with bucket, sort key and tokens of each document. Validation's buckets follow train's."""
    texts, held_out = [text for text, _ in batch], [held_out for _, held_out in batch]
    ids = _encode(plan, tokenizer, texts)
    buckets = np.where(held_out, plan.train_buckets + words % plan.validation_buckets, words % plan.train_buckets)
    if plan.drop_long:
        ids = [document if len(document) <= plan.seq_len else () for document in ids]  # counted by `_write_bucket`
    lengths = [len(document) for document in ids]
    if plan.seq_len and max(lengths, default=0) > plan.seq_len:
        i = int(np.argmax(lengths))
        raise DataError(
            f"an example of {lengths[i]} tokens is longer than --seq-len {plan.seq_len}: {texts[i][:100]}; "
            "give a larger one, or --drop-long to leave such examples out"
        )
    values = np.fromiter(chain.from_iterable(ids), plan.dtype, sum(lengths))
    offsets = np.cumsum([0, *lengths], dtype=np.int32)
    tokens = pa.ListArray.from_arrays(offsets, values, type=token_type(plan.dtype))
    return pa.record_batch({"bucket": buckets.astype(np.uint32), "word": words, "tokens": tokens})


def _encode(plan: Plan, tokenizer: Tokenizer, texts: list[str]) -> Sequence[Sequence[int] | np.ndarray]:
    if plan.format != "text":
        return encode_examples(texts, plan.format, tokenizer)
    found, nothing = tokenizer.encode_documents(texts), len(tokenizer.prefix) + 1
    for text, ids in zip(texts, found, strict=True):
        if len(ids) == nothing and text.strip():
            raise DataError(f"the tokenizer has no tokens for a text, and none for unknown characters: {text[:100]}")
    return found


def _write_sorted(plan: Plan, batches: list[pa.RecordBatch], writer: pa.RecordBatchFileWriter) -> None:
    """Write one record batch per bucket, in the order of the buckets."""
    documents = pa.concat_batches(batches)
    buckets = documents.column("bucket").to_numpy()
    order = np.argsort(buckets, kind="stable")
    bounds = np.cumsum([0, *np.bincount(buckets, minlength=plan.buckets)])
    documents = documents.drop_columns("bucket")
    for first, stop in pairwise(bounds):
        writer.write_batch(documents.take(pa.array(order[first:stop])))


# ---------------------------------------------------------------- pass 2: shuffle and write


def _write_bucket(folder: Path, plan: Plan, bucket: int) -> int:
    """Write the shard of a bucket and a record: its blocks and the examples dropped. Returns the number of tokens."""
    is_train = bucket < plan.train_buckets
    split, number = ("train", bucket) if is_train else ("validation", bucket - plan.train_buckets)
    with failures_of(f"{split}-{number:05}, which a smaller --shard-mb makes smaller"):
        documents = _shuffled_documents(folder / PARTS, bucket, plan.buckets)
    dropped = 0
    if plan.seq_len:
        found = len(documents)
        documents = documents.filter(pc.greater(pc.list_value_length(documents), 0))
        dropped = found - len(documents)
        documents = pack(documents, plan.seq_len, _stored_tokenizer(folder, plan).eos_id)
    shard, blocks = write_shard(folder, split, number, documents, plan.block_bytes)
    write_atomically(_record(folder, bucket), json.dumps([shard, blocks.to_pylist(), dropped]).encode())
    return shard.tokens


def _shuffled_documents(parts: Path, bucket: int, buckets: int) -> pa.ListArray:
    """The documents of a bucket, from all units, in the order of their sort keys."""
    batches = []
    for path in sorted(parts.glob("unit-*.arrow")):
        with pa.OSFile(str(path)) as part:  # read, not mapped: units may outnumber the allowed open files
            file = pa.ipc.open_file(part)
            batches += [file.get_batch(i) for i in range(bucket, file.num_record_batches, buckets)]
    table = pa.Table.from_batches(batches)
    order = np.argsort(table.column("word").to_numpy(), kind="stable")
    tokens = table.column("tokens").combine_chunks()
    del table, batches  # to hold the documents twice, not three times
    return tokens.take(pa.array(order))


def _record(folder: Path, bucket: int) -> Path:
    return folder / PARTS / f"bucket-{bucket:06}.json"


# ---------------------------------------------------------------- command line


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m data.prepare", description="Turn text, JSON lines and Parquet into a dataset."
    )
    add = parser.add_argument
    add("--source", dest="sources", nargs="+", required=True, help="stdlib, or folders, files, globs or URLs")
    add_output_options(parser)
    add("--tokenizer", default="", help="tokenizer.json, or a folder with one; default: train one on the text")
    add("--vocab-size", type=int, default=0, help=f"size of the vocabulary to train (default {VOCAB_SIZE})")
    kinds = "text; for fine-tuning: sft (prompts with responses) or chat (messages) (default %(default)s)"
    add("--format", choices=KEYS, default="text", help=kinds)
    keys = f"keys or columns of a record, comma-separated (default of each format: {KEYS})"
    add("--keys", "--text-key", "--example-keys", default="", help=keys)
    add("--seq-len", type=int, default=0, help="tokens per row of packed examples: the training's seq_len")
    add("--drop-long", action="store_true", help="leave out examples longer than that; they are counted")
    add("--max-characters", type=int, default=0, help="cut longer texts at line ends; 0 (default): never")
    add("--processes", type=int, default=0, help="0 (default): one per available core, or one for a few MB")
    options = parser.parse_args(argv)
    with command_line():
        manifest = prepare(**vars(options))
        if manifest.get("dropped"):
            print(f"examples longer than {manifest['packed_seq_len']} tokens, left out: {manifest['dropped']:,}")
        report(manifest, options.output)


if __name__ == "__main__":
    main()
