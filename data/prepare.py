"""Turn text into a dataset that training reads.

    python -m data.prepare --source stdlib --output datasets/stdlib

Two passes run on all cores, or on one for a small input. The first tokenises the units of
the input and sorts each unit's documents into buckets. The second shuffles the documents of
each bucket and writes them as one shard, or as several if there are more than estimated.
A hash of a document's position in the input decides its bucket and place; a hash of its whole
text decides whether it is held out. So the output does not depend on the number of processes.
Finished work stays in OUTPUT/.parts until the end: after a kill, the same command continues
from there. manifest.json is written last and makes the dataset valid.
"""

import argparse
import hashlib
import json
import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from itertools import chain, compress, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from tqdm import tqdm

from config import TitaniteError, command_line, file_errors
from data.chat import BUILT_IN
from data.order import derive_key, random_words
from data.packing import pack
from data.shards import INDEX_SCHEMA, DataError, Shard, token_type
from data.sources import UNIT_BYTES, Keys, Unit, documents, list_files, pieces, plan_units, text_bytes
from data.tokenizer import CHAT_TEMPLATE, Tokenizer, find_chat_template, load_tokenizer, train_tokenizer
from data.tuning import KEYS, check_examples, encode_examples
from data.workers import locked, run_all, worker_pool
from data.writer import (
    PARTS,
    WrittenShard,
    add_output_options,
    check_output,
    is_held_out,
    refuse_finished,
    refuse_too_large,
    remove_dataset,
    remove_parts,
    say_ready,
    token_dtype,
    write_atomically,
    write_manifest,
    write_shard,
)

BATCH_BYTES = 2**20  # text per tokenizer call: its tokens are Python integers at first, and few fit the caches
PART_TOKENS = 32 * 2**20  # tokens a process holds before it writes a part; a shard's worth if that is more
VOCAB_SIZE = 4096  # default for a trained tokenizer
LARGEST_VOCAB_SIZE = 10**6  # above any in use; the trainer allocates memory for all of it at once
TOKENIZER_SAMPLE_BYTES = 64 * 2**20  # text to train a tokenizer on

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Everything that decides the bytes of the dataset. Any change makes finished parts useless."""

    input: str  # hash of the units (names, sizes and versions of the files, and how they are cut) and the tokenizer
    keys: Keys
    format: str
    seq_len: int
    drop_long: bool
    max_characters: int
    dtype: str
    validation_fraction: float
    block_bytes: int
    train_buckets: int
    validation_buckets: int
    shard_tokens: int  # per shard, about

    def shards(self, held_out: bool, tokens: int) -> int:
        """Shards to cut each bucket into: several if the input has more `tokens` than estimated."""
        share = self.validation_fraction if held_out else 1 - self.validation_fraction
        buckets = self.validation_buckets if held_out else self.train_buckets
        return max(1, round(tokens * share / buckets / self.shard_tokens))


def prepare(
    sources: Sequence[str],
    output: str,
    tokenizer: str = "",
    vocab_size: int = 0,
    eos_token: str = "",
    text_key: str = "text",
    max_characters: int = 0,
    validation_fraction: float = 0.02,
    block_mb: float = 8,
    shard_mb: float = 256,
    processes: int = 0,
    overwrite: bool = False,
    format: str = "text",
    example_keys: str = "",
    seq_len: int = 0,
    drop_long: bool = False,
    chat_template: str = "",
) -> dict[str, Any]:
    """Prepare a dataset and return its manifest. `--help` explains the parameters.

    Raises DataError or TitaniteError.
    """
    # -- check the options
    folder = check_output(output, overwrite, validation_fraction, block_mb, shard_mb)
    if tokenizer and vocab_size:
        raise DataError(f"--vocab-size {vocab_size}: cannot be used with --tokenizer, only to train one")
    if eos_token and not tokenizer:
        raise DataError(f"--eos-token {eos_token}: needs --tokenizer; a newly trained one has its own")
    vocab_size = vocab_size or VOCAB_SIZE
    if not 257 <= vocab_size <= LARGEST_VOCAB_SIZE:
        raise DataError(
            f"--vocab-size {vocab_size}: must be at least 257, for each byte and the end of a document, and at most "
            f"{LARGEST_VOCAB_SIZE:,}"
        )
    if format != "text" and text_key != "text":
        raise DataError(f"--text-key {text_key}: is for --format text; give --example-keys")
    keys = _keys(format, text_key, example_keys)
    if format != "text":
        check_examples(tokenizer, seq_len, max_characters, keys, format)
    elif example_keys or seq_len or drop_long or chat_template:
        raise DataError("--example-keys, --seq-len, --drop-long and --chat-template are for --format sft and chat")

    # -- the input, its tokenizer and what decides the bytes to write
    files = list_files(sources)
    units = plan_units(files)
    chosen = load_tokenizer(tokenizer, eos_token) if tokenizer else _trained_tokenizer(units, keys, vocab_size)
    if chat_template:
        with file_errors():
            template = {CHAT_TEMPLATE: Path(chat_template).read_bytes()}
        chosen.chat_template = find_chat_template(template, chat_template)
    elif format == "chat":
        chosen.chat_template = chosen.chat_template or BUILT_IN
    dtype = token_dtype(chosen.vocab_size) if format == "text" else "uint32"
    shard_tokens = shard_mb * 2**20 / np.dtype(dtype).itemsize
    shards = sum(map(text_bytes, files)) / 4 / shard_tokens  # a token is about four bytes of text
    inputs = json.dumps([units, chosen.fingerprint, chosen.chat_template])
    plan = Plan(
        input=hashlib.sha256(inputs.encode()).hexdigest(),
        keys=keys,
        format=format,
        seq_len=seq_len,
        drop_long=drop_long,
        max_characters=max_characters,
        dtype=dtype,
        validation_fraction=validation_fraction,
        block_bytes=int(block_mb * 2**20),
        train_buckets=max(1, round(shards * (1 - validation_fraction))),
        validation_buckets=max(1, round(shards * validation_fraction)),
        shard_tokens=max(1, int(shard_tokens)),
    )
    _check_first(plan, chosen, units)

    # -- both passes, continuing an interrupted preparation by the same plan
    with locked(folder) as lock:
        refuse_finished(folder, overwrite)  # another process may have finished it meanwhile
        _start_or_go_on(folder, plan, chosen)
        units_bytes, buckets = [unit.bytes for unit in units], range(plan.train_buckets + plan.validation_buckets)
        # Starting a process takes most of a second, in which it could tokenise a few MB.
        workers = processes or (len(os.sched_getaffinity(0)) if sum(units_bytes) >= 2 * UNIT_BYTES else 1)
        with worker_pool(min(workers, max(len(units), len(buckets))), lock) as pool:
            tokenize, write = partial(_tokenize_unit, folder, plan), partial(_write_bucket, folder, plan)
            tokens = run_all(pool, tokenize, list(enumerate(units)), "tokenise", units_bytes)
            if not tokens:  # of other input, `_check_first` found a document
                raise DataError(f"--seq-len {seq_len}: every example is longer; give a larger one")
            tasks = [(bucket, plan.shards(bucket >= plan.train_buckets, tokens)) for bucket in buckets]
            run_all(pool, write, tasks, "write", [1] * len(buckets))
        for part in (folder / PARTS).glob("unit-*.arrow"):  # before the manifest, after which no start takes them up
            part.unlink()
        records = [json.loads(file.read_text(encoding="utf-8")) for file in (folder / PARTS).glob("unit-*.json")]
        dropped = sum(record["dropped"] for record in records)  # examples that are too long
        facts = {"dtype": dtype, "packed_seq_len": seq_len, "dropped": dropped} if format != "text" else {}
        written = [shard for bucket in buckets for shard in _read_record(folder, bucket)]
        manifest = write_manifest(folder, chosen, written, facts)
        remove_parts(folder)
        return manifest


def _keys(format: str, text_key: str, example_keys: str) -> Keys:
    names = example_keys or KEYS.get(format, "")
    return tuple(names.split(",")) if names else text_key


def _trained_tokenizer(units: list[Unit], keys: Keys, vocab_size: int) -> Tokenizer:
    """Train a tokenizer on the beginnings of units spread evenly over the input."""
    total = min(sum(unit.bytes for unit in units), len(units) * UNIT_BYTES)  # if units are few and large, some of each
    step = max(1, total // TOKENIZER_SAMPLE_BYTES)
    chosen = units[::step]
    each = max(TOKENIZER_SAMPLE_BYTES // max(len(chosen), 1), UNIT_BYTES)
    return train_tokenizer(chain.from_iterable(_beginning(unit, keys, each) for unit in chosen), vocab_size)


def _beginning(unit: Unit, keys: Keys, characters: int) -> Iterator[str]:
    """Yield the first documents of a unit until they have this many characters."""
    for text in documents(unit, keys):
        yield text
        characters -= len(text)
        if characters <= 0:
            return


def count(sources: Sequence[str], keys: Keys = "text", max_characters: int = 0) -> dict[str, int]:
    """Count what `prepare` would read. Writes nothing. Raises DataError."""
    files = list_files(sources)
    size = sum(file.size for file in files)
    counts = {"files": len(files), "bytes": size, "documents": 0, "empty": 0, "characters": 0}
    for unit in tqdm(plan_units(files), desc="count", unit=" units"):
        for text in chain.from_iterable(pieces(text, max_characters) for text in documents(unit, keys)):
            counts["documents" if text else "empty"] += 1
            counts["characters"] += len(text)
    return counts


def _check_first(plan: Plan, tokenizer: Tokenizer, units: list[Unit]) -> None:
    """Tokenise the first document, to find a wrong option before anything is removed. Raises DataError."""
    batch = next(chain.from_iterable(_batches(plan, unit) for unit in units), None)
    if not batch:
        raise DataError("the input holds no text: nothing to prepare")
    first = batch[0]
    if plan.format == "text":  # a text may be gigabytes long
        first = first._replace(text=first.text[:1000])
    _tokenize(plan, tokenizer, [first], np.zeros(1, np.uint64))


def _start_or_go_on(folder: Path, plan: Plan, tokenizer: Tokenizer) -> None:
    """Keep the parts of an interrupted preparation by the same plan. Remove everything else that we wrote."""
    plan_file = folder / PARTS / "plan.json"
    record = json.dumps(asdict(plan), indent=1)
    (folder / "manifest.json").unlink(missing_ok=True)
    begun = plan_file.read_text(encoding="utf-8") if plan_file.is_file() else ""
    if begun != record:
        if begun:
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
    """Write the documents of a unit as parts, sorted by bucket. Returns the number of tokens."""
    parts = folder / PARTS
    # About a shard's, since each shard reads a piece of every part; but Arrow lists have 32-bit offsets.
    part_tokens = min(max(PART_TOKENS, plan.shard_tokens), 2**30)
    record = parts / f"unit-{number:06}.json"
    if record.exists():
        return json.loads(record.read_text(encoding="utf-8"))["tokens"]
    key = derive_key("document", number)
    seen = written = tokens = held = dropped = 0
    batches: list[pa.RecordBatch] = []
    for batch in _batches(plan, unit):
        words = random_words(len(batch), key, first=seen)
        try:
            batches.append(_tokenize(plan, _stored_tokenizer(folder, plan), batch, words))
        except TitaniteError as error:  # quotes the text, by which to find it there
            raise DataError(f"{unit.name}: {error}") from None
        seen += len(batch)
        dropped += len(batch) - batches[-1].num_rows
        size = len(batches[-1].column("tokens").values)
        tokens, held = tokens + size, held + size
        if held >= part_tokens:
            _write_part(plan, batches, parts / f"unit-{number:06}-{written:04}.arrow")
            held, written, batches = 0, written + 1, []
    if batches:
        _write_part(plan, batches, parts / f"unit-{number:06}-{written:04}.arrow")
    write_atomically(record, json.dumps({"tokens": tokens, "dropped": dropped}).encode())
    return tokens


class Piece(NamedTuple):
    """A text or part of one that becomes a document."""

    text: str
    held_out: bool


def _batches(plan: Plan, unit: Unit) -> Iterator[list[Piece]]:
    """Yield the pieces of a unit in order, without empty texts, in lists of about BATCH_BYTES."""
    batch: list[Piece] = []
    size = 0
    for text in filter(None, documents(unit, plan.keys)):
        held_out = is_held_out(text.encode(), plan.validation_fraction)
        for piece in pieces(text, plan.max_characters):
            batch.append(Piece(piece, held_out))
            size += len(piece)
            if size >= BATCH_BYTES:
                yield batch
                batch, size = [], 0
    if batch:
        yield batch


def _tokenize(plan: Plan, tokenizer: Tokenizer, batch: list[Piece], words: np.ndarray) -> pa.RecordBatch:
    """A record batch with bucket, sort key and tokens of each document. Validation's buckets follow train's."""
    ids = _encode(plan.format, tokenizer, [piece.text for piece in batch])
    if plan.seq_len:
        fits = [len(document) <= plan.seq_len for document in ids]
        if not all(fits) and not plan.drop_long:
            i = fits.index(False)
            raise DataError(
                f"an example of {len(ids[i])} tokens is longer than --seq-len {plan.seq_len}: {batch[i].text[:100]}; "
                "give a larger one, or --drop-long to leave such examples out"
            )
        ids, batch, words = list(compress(ids, fits)), list(compress(batch, fits)), words[fits]
    lengths = [len(document) for document in ids]
    values = np.fromiter(chain.from_iterable(ids), plan.dtype, sum(lengths))
    offsets = np.cumsum([0, *lengths], dtype=np.int32)
    held_out = plan.train_buckets + words % plan.validation_buckets
    buckets = np.where([piece.held_out for piece in batch], held_out, words % plan.train_buckets)
    tokens = pa.ListArray.from_arrays(offsets, values, type=token_type(plan.dtype))
    return pa.record_batch({"bucket": buckets.astype(np.uint32), "word": words, "tokens": tokens})


def _encode(format: str, tokenizer: Tokenizer, texts: list[str]) -> Sequence[Sequence[int] | np.ndarray]:
    if format != "text":
        return encode_examples(texts, format, tokenizer)
    found, nothing = tokenizer.encode_documents(texts), len(tokenizer.prefix) + 1
    for text, ids in zip(texts, found, strict=True):
        if len(ids) == nothing and text.strip():
            raise DataError(f"the tokenizer has no tokens for a text, and none for unknown characters: {text[:100]}")
    return found


def _write_part(plan: Plan, batches: list[pa.RecordBatch], path: Path) -> None:
    """Write an Arrow file with one record batch per bucket, in the order of the buckets."""
    documents = pa.concat_batches(batches)
    buckets = documents.column("bucket").to_numpy()
    order = np.argsort(buckets, kind="stable")
    bounds = np.cumsum([0, *np.bincount(buckets, minlength=plan.train_buckets + plan.validation_buckets)])
    documents = documents.drop_columns("bucket")
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, documents.schema) as writer:
        for first, stop in pairwise(bounds):
            writer.write_batch(documents.take(pa.array(order[first:stop])))
    write_atomically(path, memoryview(sink.getvalue()))


# ---------------------------------------------------------------- pass 2: shuffle and write


def _write_bucket(folder: Path, plan: Plan, bucket: int, shards: int) -> int:
    """Write the shards of a bucket and a record of their blocks. Returns the number of tokens."""
    record = _record(folder, bucket)
    if not record.exists():
        is_train = bucket < plan.train_buckets
        split, first = ("train", bucket) if is_train else ("validation", bucket - plan.train_buckets)
        written = []
        for shard in range(shards):
            documents, order = _documents_and_order(folder / PARTS, bucket, shard, shards)
            if plan.seq_len:
                documents = pack(documents.take(pa.array(order)), plan.seq_len, _stored_tokenizer(folder, plan).eos_id)
                order = np.arange(len(documents))
            number = first + shard * (plan.train_buckets if is_train else plan.validation_buckets)
            written.append(write_shard(folder, split, number, documents, plan.block_bytes, order))
        content = [(shard, blocks.to_pylist()) for shard, blocks in written]
        write_atomically(record, json.dumps(content).encode())
    return sum(shard.tokens for shard, _ in _read_record(folder, bucket))


def _documents_and_order(parts: Path, bucket: int, shard: int, shards: int) -> tuple[pa.ListArray, np.ndarray]:
    """The documents of one shard of a bucket, from all parts, and their order by sort key."""
    batches = []
    for path in sorted(parts.glob("unit-*.arrow")):
        with pa.OSFile(str(path)) as part:  # read, not mapped: parts may outnumber the allowed open files
            batch = pa.ipc.open_file(part).get_batch(bucket)
        high = batch.column("word").to_numpy() >> np.uint64(32)  # since the low bits chose the bucket
        batches.append(batch.filter(pa.array(high * np.uint64(shards) >> np.uint64(32) == shard)))
    table = pa.Table.from_batches(batches)
    refuse_too_large(sum(len(chunk.values) for chunk in table.column("tokens").chunks), bucket)
    order = np.argsort(table.column("word").to_numpy(), kind="stable")
    return table.column("tokens").combine_chunks(), order


def _record(folder: Path, bucket: int) -> Path:
    return folder / PARTS / f"bucket-{bucket:06}.json"


def _read_record(folder: Path, bucket: int) -> list[WrittenShard]:
    content = json.loads(_record(folder, bucket).read_text(encoding="utf-8"))
    return [WrittenShard(Shard(*shard), pa.Table.from_pylist(blocks, INDEX_SCHEMA)) for shard, blocks in content]


# ---------------------------------------------------------------- command line


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m data.prepare", description="Turn text, JSON lines and Parquet into a dataset."
    )
    add = parser.add_argument
    add("--source", dest="sources", nargs="+", required=True, help="stdlib, or folders, files, globs or URLs")
    add_output_options(parser, required=False)  # a dry run needs none
    add("--tokenizer", default="", help="tokenizer.json, or a folder with one; default: train one on the text")
    add("--vocab-size", type=int, default=0, help=f"size of the vocabulary to train (default {VOCAB_SIZE})")
    add(
        "--format",
        choices=["text", *KEYS],
        default="text",
        help="text; for fine-tuning: sft (prompts with responses) or chat (messages) (default %(default)s)",
    )
    defaults = "; ".join(f"{name}: {keys}" for name, keys in KEYS.items())
    add("--example-keys", default="", help=f"keys of an example, comma-separated (default {defaults})")
    add("--seq-len", type=int, default=0, help="tokens per row of packed examples: the training's seq_len")
    add("--drop-long", action="store_true", help="leave out examples longer than that; they are counted")
    add("--chat-template", default="", help="Jinja file; default: the tokenizer's own, else a built-in one")
    add("--text-key", default="text", help="key or column of the text in JSON lines and Parquet (default %(default)s)")
    add("--max-characters", type=int, default=0, help="cut longer texts at line ends; 0 (default): never")
    add("--processes", type=int, default=0, help="0 (default): one per available core, or one for a few MB")
    add("--dry-run", action="store_true", help="read everything, count it and write nothing")
    arguments = vars(parser.parse_args(argv))
    for name in ("max_characters", "processes"):
        if arguments[name] < 0:
            parser.error(f"--{name.replace('_', '-')} {arguments[name]}: must be at least 0")
    if arguments["output"] is None and not arguments["dry_run"]:
        parser.error("the following arguments are required: --output")
    with command_line():
        if arguments.pop("dry_run"):
            keys = _keys(arguments["format"], arguments["text_key"], arguments["example_keys"])
            counts = count(arguments["sources"], keys, arguments["max_characters"])
            for name, number in counts.items():
                print(f"{name}: {number:,}")
            return
        try:
            manifest = prepare(**arguments)
        except OSError as error:  # a full disk, no permission
            raise DataError(f"--output {arguments['output']}: {error}") from None
        for split in ("train", "validation"):
            shards = [shard for shard in manifest["shards"] if shard["split"] == split]
            total, tokens = sum(shard["documents"] for shard in shards), sum(shard["tokens"] for shard in shards)
            print(f"{split}: documents {total:,}, tokens {tokens:,}, files {len(shards)}")
        if manifest.get("dropped"):
            print(f"examples longer than {manifest['packed_seq_len']} tokens, left out: {manifest['dropped']:,}")
        print(f"vocabulary {manifest['vocab_size']}, token {manifest['eos_id']} ends a document")
        say_ready(manifest, arguments["output"], arguments["validation_fraction"])


if __name__ == "__main__":
    main()
