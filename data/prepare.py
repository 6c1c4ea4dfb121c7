"""Turn text into a dataset that training reads.

    python -m data.prepare --source stdlib --output datasets/stdlib

Two passes run on all cores. The first tokenises each unit of the input into a file, its documents sorted into buckets.
The second shuffles each bucket and writes it as one shard. A hash of a document's position in the input decides its
bucket and place, a hash of its whole text whether it is held out. So the output does not depend on the processes.
Finished work stays in OUTPUT/.parts: after a kill, the same command goes on. manifest.json is written last.
"""

import argparse
import ctypes
import json
import logging
import multiprocessing
import os
import re
import signal
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager, suppress
from datetime import date
from functools import lru_cache, partial
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from tqdm import tqdm

from config import TitaniteError, command_line, file_errors
from data import writer
from data.chat import chat_of, encode_examples, load_transformers, transformers_version, use_template
from data.order import derive_key, random_words
from data.packing import HIDDEN, pack
from data.shards import INDEX_SCHEMA, VERSION, DataError, Shard, digest, token_type
from data.sources import (
    UNIT_BYTES,
    File,
    Reject,
    Seen,
    Unit,
    documents,
    failures_of,
    has_keys,
    kind_of,
    list_files,
    plan_units,
)
from data.tokenizer import Tokenizer, load_tokenizer, train_tokenizer
from storage.records import write_atomically, written_whole

KEYS = {"text": "text", "sft": "prompt,response", "chat": "messages"}  # format → keys of a record
# Format → options that have an effect with it only.
OPTIONS = {
    "text": ("vocab_size", "separator", "max_characters", "hold_out_pieces"),
    "sft": ("seq_len", "truncate"),
    "chat": ("seq_len", "truncate", "chat_template", "template_argument", "train_eos"),
}
COUNTED = ("conversations", "examples", "trained_tokens", "dropped", "truncated")  # in the manifest
BATCH_BYTES = 2**20  # text per tokenizer call: its tokens are Python integers at first, and few fit the caches
HELD_BYTES = 128 * 2**20  # of tokens that a process holds before it writes them
VOCAB_SIZE = 4096  # default for a trained tokenizer
TOKENIZER_SAMPLE_BYTES = 64 * 2**20  # text to train a tokenizer on
JSON_BEGINNING = re.compile(rb"(\xef\xbb\xbf)?\s*(\[\s*)?\{")  # of JSON lines, or an array of objects
AT_ONCE = 1024  # tasks given to a pool: more than processes, but submitting thousands may block (cpython 105829)
PR_SET_PDEATHSIG = 1  # linux/prctl.h: the signal that this process gets when its parent ends

log = logging.getLogger(__name__)
Map = Callable[..., Iterator[None]]
Batch = list[tuple[str, str, bool]]  # documents: place in the input, text, whether it is held out


class UnitFacts(NamedTuple):
    """What the main process is to know of a unit, besides its documents."""

    bad: list[str]  # a line for each bad record
    separated: list[str]  # files in which the separator occurs
    unread: dict[str, list[str]]  # file → keys that the chat template does not read
    counts: Mapping[str, Mapping[str, int]]  # file → what its examples are, and cost


class Plan(NamedTuple):
    """Everything that decides the bytes of the dataset. Any change makes finished parts useless."""

    input: str  # digest of version, units (names, sizes and versions of files, how they are cut) and tokenizer
    transformers: str  # its version, "" for texts
    format: str
    keys: tuple[str, ...]
    seq_len: int
    max_characters: int
    hold_out_pieces: bool
    day: str  # that a chat template which asks for it is told, otherwise ""
    train_eos: bool
    truncate: bool
    dtype: str
    validation_fraction: float
    block_bytes: int
    train_buckets: int  # each becomes a shard
    validation_buckets: int

    @property
    def buckets(self) -> int:
        """Of train, then of validation."""
        return self.train_buckets + self.validation_buckets


def prepare(texts: Iterable[str | Mapping[str, Any]], output: str, **options: Any) -> dict[str, Any]:
    """Prepare texts, or records that hold a format's keys, and return the manifest. Raises DataError, TitaniteError.

    The options are the command's: `seq_len=4096` is --seq-len=4096, `overwrite=True` is --overwrite.
    """
    words = ["--source=-", f"--output={output}"]
    for name, value in options.items():
        option = f"--{name.replace('_', '-')}"
        if value is not False:
            words.append(option if value is True else f"{option}={value}")
    o = parse_options(words)
    return prepare_sources(o, _json_lines(texts, o.keys or KEYS["text"]))


def _json_lines(texts: Iterable[str | Mapping[str, Any]], key: str) -> Iterator[bytes]:
    for text in texts:
        record = {key: text} if isinstance(text, str) else dict(text)
        yield json.dumps(record).encode() + b"\n"


def prepare_sources(o: argparse.Namespace, piped: Iterator[bytes] | None = None) -> dict[str, Any]:
    """Prepare a dataset by `parse_options` and return its manifest. `piped` is the content of source "-"."""
    folder = writer.check_output(o.output, o.overwrite or o.dry_run, o.validation_fraction, o.block_mb, o.shard_mb)
    check_options(o)
    with ExitStack() as kept:
        names = []
        for name in o.sources:
            if name == "-" or Path(name).is_fifo():  # kept as a file meanwhile, since every pass reads it again
                name = str(kept.enter_context(_kept(name, folder, piped)))
            names.append(name)
        files = list_files(names)
        check_files(o, files)
        return _prepare_files(o, folder, files)


def _prepare_files(o: argparse.Namespace, folder: Path, files: Sequence[File]) -> dict[str, Any]:
    units = plan_units(files, o.separator)
    bad: list[str] = []
    reject = partial(_reject, bad, sys.maxsize if o.dry_run else o.skip_bad)
    tokenizer = choose_tokenizer(o, units, reject)
    day = _use_chat_template(o, tokenizer) if o.format == "chat" else ""
    plan = make_plan(o, files, units, tokenizer, day)
    # A mistake in the template or the keys is found before anything is removed. A dry run finds every one.
    bad.clear()
    usable = _count_usable(plan, tokenizer, units, reject, all_of_them=o.dry_run)
    if o.dry_run:
        return {"documents": usable, "bad_records": bad}
    if not usable:
        raise DataError("the input holds no text that can be used: nothing to prepare")
    with writer.locked(folder):
        _start_or_go_on(folder, plan, tokenizer)
        _run_passes(o, folder, plan, units)
        return _finish(folder, plan, tokenizer)


# ---------------------------------------------------------------- what decides the bytes to write


def keys_of(o: argparse.Namespace) -> tuple[str, ...]:
    return tuple((o.keys or KEYS[o.format]).split(","))


def choose_tokenizer(o: argparse.Namespace, units: Sequence[Unit], reject: Reject) -> Tokenizer:
    """The tokenizer that is given, or one trained on a sample of the text. Raises TitaniteError."""
    if o.tokenizer:
        return load_tokenizer(o.tokenizer, o.eos_token)
    tokenizer = train_tokenizer(_sample_texts(units, keys_of(o), reject), o.vocab_size or VOCAB_SIZE)
    if tokenizer.vocab_size < o.vocab_size:
        log.warning(f"--vocab-size {o.vocab_size}: the text has no more than {tokenizer.vocab_size} tokens to learn")
    return tokenizer


def _sample_texts(units: Sequence[Unit], keys: Sequence[str], reject: Reject) -> Iterator[str]:
    """Yield the first documents of units spread evenly over the input, about TOKENIZER_SAMPLE_BYTES in all."""
    chosen = units[:: max(1, len(units) * UNIT_BYTES // TOKENIZER_SAMPLE_BYTES)]
    for unit in chosen:
        left = TOKENIZER_SAMPLE_BYTES // len(chosen)
        for _, text in documents(unit, keys, "text", reject):
            yield text
            left -= len(text)
            if left <= 0:
                break


def _use_chat_template(o: argparse.Namespace, tokenizer: Tokenizer) -> str:
    """Give the tokenizer the template and warn of what it costs. Returns the day that it is told, or ""."""
    template = ""
    if o.chat_template:
        with file_errors():
            template = Path(o.chat_template).read_text(encoding="utf-8")
    use_template(tokenizer, template, o.template_argument)
    with suppress(TitaniteError):  # the first example gives the reason
        for warning in chat_of(tokenizer).warnings(o.train_eos):
            log.warning(warning)
    if "strftime_now" not in tokenizer.chat_template:
        return ""
    today = date.today().isoformat()  # as transformers tells it
    log.warning(f"the chat template asks for the day and is told {today}, unless a --template-argument names another")
    return today


def make_plan(
    o: argparse.Namespace, files: Sequence[File], units: Sequence[Unit], tokenizer: Tokenizer, day: str
) -> Plan:
    """The plan of a preparation. Raises TitaniteError if transformers cannot read the tokenizer of examples."""
    dtype = "uint32"
    transformers = ""
    if o.format == "text":
        dtype = writer.token_dtype(tokenizer.vocab_size)
    else:
        load_transformers(tokenizer)  # what is wrong with it is wrong with every example
        transformers = transformers_version()
    made_by = {name: digest(content) for name, content in tokenizer.files().items()}
    text_bytes = sum(_text_bytes(file) for file in files)
    shards = text_bytes / 4 * np.dtype(dtype).itemsize / (o.shard_mb * 2**20)  # a token is about four bytes of text
    return Plan(
        input=digest(json.dumps([VERSION, units, made_by]).encode()),
        transformers=transformers,
        format=o.format,
        keys=keys_of(o),
        seq_len=o.seq_len,
        max_characters=o.max_characters,
        hold_out_pieces=o.hold_out_pieces,
        day=day,
        train_eos=o.train_eos,
        truncate=o.truncate,
        dtype=dtype,
        validation_fraction=o.validation_fraction,
        block_bytes=int(o.block_mb * 2**20),
        train_buckets=max(1, round(shards * (1 - o.validation_fraction))),
        validation_buckets=max(1, round(shards * o.validation_fraction)),
    )


def _count_usable(plan: Plan, tokenizer: Tokenizer, units: Sequence[Unit], reject: Reject, all_of_them: bool) -> int:
    """How many documents can be used, or 1 as soon as one can."""
    usable = 0
    for unit in units:
        for batch in _batches(plan, unit, reject):
            tried = batch if all_of_them else batch[:1]
            counts = defaultdict[str, Counter[str]](Counter)
            tokenized = _tokenize(plan, tokenizer, tried, np.zeros(len(tried), np.uint64), reject, counts)
            if plan.format == "text":
                usable += len(tokenized)
            else:
                usable += sum(own["conversations"] for own in counts.values())
            if usable and not all_of_them:
                return usable
    return usable


# ---------------------------------------------------------------- both passes


def _run_passes(o: argparse.Namespace, folder: Path, plan: Plan, units: Sequence[Unit]) -> None:
    """Tokenise and write what an earlier start by the same plan has not."""
    waiting = [(bucket, 1) for bucket in range(plan.buckets) if not _record(folder, bucket).exists()]
    if not waiting:
        return
    # Starting a process takes most of a second, in which it could tokenise a few MB.
    is_small = sum(unit.bytes for unit in units) < 2 * UNIT_BYTES
    cores = 1 if is_small else len(os.sched_getaffinity(0))
    workers = o.processes or cores
    with _worker_pool(min(workers, max(len(units), plan.buckets))) as pool_map:
        numbered = [(pair, pair[1].bytes) for pair in enumerate(units)]
        _run_all(pool_map, partial(_tokenize_unit, folder, plan, o.skip_bad), numbered, "tokenise", "B")
        of_units = _read_facts(folder)
        _write_bad_records(folder, of_units, o.skip_bad)
        tell_effects(o.separator, units, of_units)
        _run_all(pool_map, partial(_write_bucket, folder, plan), waiting, "write", " shards")


def _write_bad_records(folder: Path, of_units: Sequence[UnitFacts], skip_bad: int) -> None:
    """List the bad records. Raises DataError if they are too many; finished parts are kept for a larger --skip-bad."""
    bad = list(chain.from_iterable(unit_facts.bad for unit_facts in of_units))
    if len(bad) > skip_bad:
        raise DataError(f"{len(bad)} bad records are more than --skip-bad {skip_bad}")
    if bad:
        lines = "".join(f"{line}\n" for line in bad)
        write_atomically(folder / writer.BAD_RECORDS, lines.encode())


def tell_effects(separator: str, units: Sequence[Unit], of_units: Sequence[UnitFacts]) -> None:
    """Warn of a separator and of keys that had no effect on the data."""
    separated = set(chain.from_iterable(unit_facts.separated for unit_facts in of_units))
    texts = {file.url: file.size for unit in units for file in unit.files if not has_keys(file)}
    whole = [url for url, size in texts.items() if size and url not in separated]
    if separator and whole:
        which = f"{len(whole)} of {len(texts)} texts, such as {min(whole)}"
        log.warning(f"--separator {separator!r}: does not occur in {which}; each of these is one document")
    unread = defaultdict[str, set[str]](set)
    for unit_facts in of_units:
        for url, keys in unit_facts.unread.items():
            unread[url].update(keys)
    for url in sorted(unread):
        log.warning(f"{url}: keys that the chat template does not read: {', '.join(sorted(unread[url]))}")


def _finish(folder: Path, plan: Plan, tokenizer: Tokenizer) -> dict[str, Any]:
    """Write the manifest, remove the parts and return the manifest."""
    facts: dict[str, Any] = {}
    if plan.format != "text":
        facts = _facts_of_examples(plan, _read_facts(folder))
    for part in (folder / writer.PARTS).glob("unit-*"):  # before the manifest, after which no start takes them up
        part.unlink()
    written = []
    for bucket in range(plan.buckets):
        shard, rows = json.loads(_record(folder, bucket).read_text(encoding="utf-8"))
        written.append((Shard(*shard), pa.Table.from_pylist(rows, INDEX_SCHEMA)))
    if (folder / writer.BAD_RECORDS).exists():
        facts["bad_records"] = (folder / writer.BAD_RECORDS).read_bytes().count(b"\n")
    manifest = writer.write_manifest(folder, tokenizer, written, facts)
    writer.remove_parts(folder)
    return manifest


def check_options(o: argparse.Namespace) -> None:
    """Raises DataError for a value that makes no sense, and for an option that would have no effect."""
    for option in ("max_characters", "skip_bad", "processes"):
        value = getattr(o, option)
        if value < 0:
            raise DataError(f"--{option.replace('_', '-')} {value}: must be at least 0")
    own = OPTIONS[o.format]
    for option in chain.from_iterable(OPTIONS.values()):
        value = getattr(o, option)
        if value and option not in own:
            raise DataError(f"--{option.replace('_', '-')} {value}: no effect with --format {o.format}")
    if o.keys and o.keys.count(",") != KEYS[o.format].count(","):
        raise DataError(f"--keys {o.keys}: must be as many as in {KEYS[o.format]}")
    if o.tokenizer and o.vocab_size:
        raise DataError(f"--vocab-size {o.vocab_size}: is to train a tokenizer, not for --tokenizer")
    if o.vocab_size and o.vocab_size < 257:
        raise DataError(f"--vocab-size {o.vocab_size}: must be at least 257: all bytes and eos")
    if o.eos_token and not o.tokenizer:
        raise DataError(f"--eos-token {o.eos_token}: needs --tokenizer; a trained one has its own")
    if o.format != "text" and not o.tokenizer:
        raise DataError(f"--format {o.format}: give the --tokenizer of the model to be tuned")
    if o.format != "text" and o.seq_len < 2:
        raise DataError(f"--seq-len {o.seq_len}: must be at least 2, the later training.seq_len")
    if o.hold_out_pieces and not (o.max_characters and o.validation_fraction):
        raise DataError("--hold-out-pieces: needs --max-characters and a --validation-fraction above 0")


def check_files(o: argparse.Namespace, files: Sequence[File]) -> None:
    """Raises DataError for keys and separators that do not fit the kinds of files."""
    with_keys = [file.url for file in files if has_keys(file)]
    if o.keys and not with_keys:
        raise DataError(f"--keys {o.keys}: no effect, as text such as {files[0].url} has no keys")
    if o.separator and len(with_keys) == len(files):
        raise DataError(f"--separator {o.separator!r}: no effect, as no file is text; {files[0].url} has records")


@contextmanager
def _kept(name: str, folder: Path, piped: Iterator[bytes] | None) -> Iterator[Path]:
    """A file in `folder` with what `piped`, or the pipe `name`, yields. Removes it at the end."""
    with _opened(name) as pipe:
        chunks = piped or iter(partial(pipe.read, BATCH_BYTES), b"")
        first = next(chunks, b"")
        suffix = "json" if re.match(JSON_BEGINNING, first) else "txt"
        path = folder.absolute() / f".{Path(name).name}.{suffix}"
        with writer.locked(folder), written_whole(path) as file:
            file.writelines(chain([first], chunks))
    try:
        yield path
    finally:
        path.unlink()


def _opened(name: str) -> Any:
    if name == "-":
        return open(0, "rb", closefd=False)
    return open(name, "rb")


def _text_bytes(file: File) -> int:
    """About how much text a file holds."""
    kind, compression = kind_of(file.url)
    if compression or kind == "parquet":
        return file.size * 5
    return file.size


def _read_facts(folder: Path) -> list[UnitFacts]:
    paths = sorted((folder / writer.PARTS).glob("unit-*.json"))
    return [UnitFacts(*json.loads(path.read_text(encoding="utf-8"))) for path in paths]


def _facts_of_examples(plan: Plan, of_units: Sequence[UnitFacts]) -> dict[str, Any]:
    """What the manifest says of packed examples. Warns of what the chat template costs each file."""
    files = defaultdict[str, Counter[str]](Counter)
    for unit_facts in of_units:
        for url, counts in unit_facts.counts.items():
            files[url].update(counts)
    for url in sorted(files):
        counts = files[url]
        if counts["split"]:
            cost = f"{counts['split']:,} conversations became several examples, {counts['repeated']:,} tokens more"
            log.warning(f"{url}: the chat template changes earlier turns: {cost}")
        if counts["thoughts"]:
            log.warning(f"{url}: the chat template drops the thoughts of {counts['thoughts']:,} earlier answers")
    total = sum(files.values(), Counter[str]())
    facts: dict[str, Any] = {"dtype": plan.dtype, "packed_seq_len": plan.seq_len, "kind": plan.format}
    facts["transformers"] = plan.transformers
    facts |= {name: total[name] for name in COUNTED}
    if plan.day:
        facts["day"] = plan.day
    return facts


def _reject(bad: list[str], limit: int, place: str, reason: str) -> None:
    """Note a bad record. Raises DataError if it is one too many."""
    bad.append(" ".join(f"{place}: {reason}".split()))
    if len(bad) > limit:
        raise DataError(f"{bad[-1]} (--skip-bad {limit} leaves out no more; --dry-run lists all)")


def _start_or_go_on(folder: Path, plan: Plan, tokenizer: Tokenizer) -> None:
    """Keep the parts of an interrupted preparation by the same plan. Remove everything else that we wrote."""
    plan_file = folder / writer.PARTS / "plan.json"
    record = json.dumps(plan._asdict(), indent=1)
    if not plan_file.is_file() or plan_file.read_text(encoding="utf-8") != record:
        writer.remove_dataset(folder)
        plan_file.parent.mkdir()
        write_atomically(plan_file, record.encode())
    tokenizer.save(folder)


@lru_cache(maxsize=1)
def _stored_tokenizer(folder: Path, plan: Plan) -> Tokenizer:
    """The tokenizer of a plan, read once by each worker process."""
    return load_tokenizer(folder)


# ---------------------------------------------------------------- pass 1: tokenise


def _tokenize_unit(folder: Path, plan: Plan, skip_bad: int, numbered: tuple[int, Unit]) -> None:
    """Write a unit's documents as a file, one record batch per bucket every HELD_BYTES."""
    number, unit = numbered
    path = folder / writer.PARTS / f"unit-{number:06}.arrow"
    if path.exists():
        return
    tokenizer = _stored_tokenizer(folder, plan)
    key = derive_key("document", number)
    count = 0  # of documents
    seen = Seen()
    counts = defaultdict[str, Counter[str]](Counter)
    bad: list[str] = []
    reject = partial(_reject, bad, skip_bad)
    held: list[pa.RecordBatch] = []
    schema = pa.schema({"word": pa.uint64(), "tokens": token_type(plan.dtype)})
    with written_whole(path) as sink, pa.ipc.new_file(sink, schema) as part_writer:
        for batch in _batches(plan, unit, reject, seen):
            words = random_words(len(batch), key, first=count)
            count += len(batch)
            held.append(_tokenize(plan, tokenizer, batch, words, reject, counts))
            if sum(tokenized.nbytes for tokenized in held) >= HELD_BYTES:
                _write_sorted(plan, held, part_writer)
                held = []
        if held:
            _write_sorted(plan, held, part_writer)
        unread = _unread_keys(plan, tokenizer, seen)
        facts = UnitFacts(bad, sorted(seen.separated), unread, counts)
        if any(facts):  # on the disk before the unit counts as done
            write_atomically(path.with_suffix(".json"), json.dumps(facts).encode())


def _unread_keys(plan: Plan, tokenizer: Tokenizer, seen: Seen) -> dict[str, list[str]]:
    """File → keys that the chat template does not read."""
    if plan.format != "chat":
        return {}
    read = chat_of(tokenizer).keys.union(plan.keys)
    return {url: sorted(keys - read) for url, keys in seen.keys.items() if keys - read}


def _batches(plan: Plan, unit: Unit, reject: Reject, seen: Seen | None = None) -> Iterator[Batch]:
    """Yield the documents of a unit, without empty ones, in lists of about BATCH_BYTES. `seen`: see `documents`."""
    batch: Batch = []
    size = 0
    for place, text in documents(unit, plan.keys, plan.format, reject, seen):
        held_out = not plan.hold_out_pieces and writer.is_held_out(text.encode(), plan.validation_fraction)
        for piece in _pieces(text, plan.max_characters):
            if not piece:
                continue
            if plan.hold_out_pieces:
                held_out = writer.is_held_out(piece.encode(), plan.validation_fraction)
            batch.append((place, piece, held_out))
            size += len(piece)
            if size >= BATCH_BYTES:
                yield batch
                batch = []
                size = 0
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


def _tokenize(
    plan: Plan,
    tokenizer: Tokenizer,
    batch: Batch,
    words: np.ndarray,
    reject: Reject,
    counts: defaultdict[str, Counter[str]],
) -> pa.RecordBatch:
    """A record batch with bucket, sort key and tokens of each document. Validation's buckets follow train's.

    `counts` gets file → what its examples are, and cost.
    """
    places, texts, held_out = zip(*batch, strict=True)
    buckets = np.where(held_out, plan.train_buckets + words % plan.validation_buckets, words % plan.train_buckets)
    if plan.format == "text":
        ids: Sequence[Any] = tokenizer.encode_documents(texts)
    else:
        made = []
        for place, text in zip(places, texts, strict=True):
            url = place.rpartition(", ")[0]
            made.append(_examples(plan, tokenizer, place, text, reject, counts[url]))
        of_each = [len(examples) for examples in made]
        buckets = np.repeat(buckets, of_each)
        words = np.repeat(words, of_each)
        ids = list(chain.from_iterable(made))
    lengths = [len(document) for document in ids]
    values = np.fromiter(chain.from_iterable(ids), plan.dtype, sum(lengths))
    offsets = np.cumsum([0, *lengths], dtype=np.int32)
    tokens = pa.ListArray.from_arrays(offsets, values, type=token_type(plan.dtype))
    return pa.record_batch({"bucket": buckets.astype(np.uint32), "word": words, "tokens": tokens})


def _examples(
    plan: Plan, tokenizer: Tokenizer, place: str, text: str, reject: Reject, counts: Counter[str]
) -> list[np.ndarray]:
    """The examples of a conversation or pair that fit into a row; none of a bad one."""
    try:
        (examples,) = encode_examples([text], plan.format, tokenizer, plan.train_eos, counts)
    except TitaniteError as error:
        reject(place, str(error))
        return []
    fitting = []
    for example in examples:
        is_long = len(example) > plan.seq_len
        row = example[: plan.seq_len]
        trained = int((row < HIDDEN).sum())
        if not trained or (is_long and not plan.truncate):
            counts["dropped"] += 1
            continue
        counts["truncated"] += is_long
        counts["trained_tokens"] += trained
        fitting.append(row)
    counts["conversations"] += 1
    counts["examples"] += len(fitting)
    return fitting


def _write_sorted(plan: Plan, batches: list[pa.RecordBatch], part_writer: pa.RecordBatchFileWriter) -> None:
    """Write one record batch per bucket, in the order of the buckets."""
    documents = pa.concat_batches(batches)
    buckets = documents.column("bucket").to_numpy()
    order = np.argsort(buckets, kind="stable")
    bounds = np.cumsum([0, *np.bincount(buckets, minlength=plan.buckets)])
    documents = documents.drop_columns("bucket")
    for first, stop in pairwise(bounds):
        part_writer.write_batch(documents.take(pa.array(order[first:stop])))


# ---------------------------------------------------------------- pass 2: shuffle and write


def _write_bucket(folder: Path, plan: Plan, bucket: int) -> None:
    """Write a bucket's shard and a record of its blocks."""
    split = "train"
    number = bucket
    if bucket >= plan.train_buckets:
        split = "validation"
        number -= plan.train_buckets
    batches = []
    for path in sorted((folder / writer.PARTS).glob("unit-*.arrow")):
        with pa.OSFile(str(path)) as part:  # read, not mapped: units may outnumber the allowed open files
            file = pa.ipc.open_file(part)
            batches += [file.get_batch(i) for i in range(bucket, file.num_record_batches, plan.buckets)]
    with failures_of(f"{split}-{number:05}, which a smaller --shard-mb makes smaller"):
        table = pa.Table.from_batches(batches)
        order = np.argsort(table.column("word").to_numpy(), kind="stable")
        documents = table.column("tokens").combine_chunks()
        del table, batches  # to hold the documents twice, not three times
        documents = documents.take(pa.array(order))
    if plan.seq_len:
        documents = pack(documents, plan.seq_len, _stored_tokenizer(folder, plan).eos_id)
    shard, blocks = writer.write_shard(folder, split, number, documents, plan.block_bytes)
    write_atomically(_record(folder, bucket), json.dumps([shard, blocks.to_pylist()]).encode())


def _record(folder: Path, bucket: int) -> Path:
    return folder / writer.PARTS / f"bucket-{bucket:06}.json"


@contextmanager
def _worker_pool(count: int) -> Iterator[Map]:
    """The `map` of a pool of `count` processes, each started when it gets a task. For 1: Python's own."""
    if count == 1:
        yield map
        return
    pool = ProcessPoolExecutor(count, multiprocessing.get_context("spawn"), _start_worker)
    try:
        yield pool.map
    except BrokenProcessPool:
        advice = "continue with the same command, best with fewer --processes, or begin with a smaller --shard-mb"
        raise DataError(f"the system killed a worker, most often for lack of memory; {advice}") from None
    finally:
        pool.shutdown(cancel_futures=True)


def _run_all(pool_map: Map, function: Callable[..., None], tasks: list[tuple[Any, int]], title: str, unit: str) -> None:
    """Run `function(task)` for each (task, its size in `unit`), with a bar."""
    with tqdm(total=sum(size for _, size in tasks), desc=title, unit=unit, unit_scale=True) as bar:
        for first in range(0, len(tasks), AT_ONCE):
            some = tasks[first : first + AT_ONCE]
            results = pool_map(function, [task for task, _ in some])
            for (_, size), _ in zip(some, results, strict=True):
                bar.update(size)


def _start_worker() -> None:
    """Let this worker end with its parent. Otherwise it would outlive a killed parent and go on writing."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes share the cores
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    parent = multiprocessing.parent_process()
    if not parent or not parent.is_alive():
        os._exit(1)


def parse_options(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m data.prepare", description="Turn text into a dataset for training.")
    add = parser.add_argument
    sources = "stdlib, or folders, files, globs, URLs or pipes (-: standard input)"
    add("--source", dest="sources", nargs="+", required=True, help=sources)
    writer.add_output_options(parser)
    add("--tokenizer", default="", help="tokenizer.json, or a folder with one; default: train one on the text")
    add("--vocab-size", type=int, default=0, help=f"size of the vocabulary to train (default {VOCAB_SIZE})")
    kinds = "text; for fine-tuning: sft (prompts with responses) or chat (messages) (default %(default)s)"
    add("--format", choices=KEYS, default="text", help=kinds)
    keys = f"keys or columns of a record, comma-separated (default of each format: {KEYS})"
    add("--keys", default="", help=keys)
    separator = "what ends a document in text files; \\n: a line end, LF or CRLF"
    add("--separator", type=_unescaped, default="", help=separator)
    add("--skip-bad", type=int, default=0, help=f"bad records to leave out at most, listed in {writer.BAD_RECORDS}")
    add("--dry-run", action="store_true", help="list all bad records, prepare nothing")
    add("--seq-len", type=int, default=0, help="tokens per row of packed examples; longer ones are left out, counted")
    add("--chat-template", default="", help="file with a Jinja template for --format chat (default: the tokenizer's)")
    argument = "of the chat template, such as enable_thinking=false; repeatable; runs and exports keep it"
    add("--template-argument", action="append", default=[], metavar="NAME=VALUE", help=argument)
    add("--truncate", action="store_true", help="cut longer examples at the end of a row, not leave them out")
    add("--train-eos", action="store_true", help="chat: end each answer with eos, for templates without an end token")
    add("--max-characters", type=int, default=0, help="cut longer texts at line ends; 0 (default): never")
    add("--hold-out-pieces", action="store_true", help="hold out pieces of a text, not only whole texts")
    add("--processes", type=int, default=0, help="0 (default): one per available core, or one for a few MB")
    return parser.parse_args(argv)


def _unescaped(text: str) -> str:
    for escape, character in (("\\n", "\n"), ("\\r", "\r"), ("\\t", "\t")):
        text = text.replace(escape, character)
    return text


def main(argv: Sequence[str] | None = None) -> None:
    options = parse_options(argv)
    with command_line():
        manifest = prepare_sources(options)
        if options.dry_run:
            bad = manifest["bad_records"]
            print(*bad, f"documents {manifest['documents']:,}, bad records {len(bad):,}", sep="\n")
            sys.exit(len(bad) > options.skip_bad)
        if manifest.get("bad_records"):
            print(f"bad records left out, listed in {writer.BAD_RECORDS}: {manifest['bad_records']:,}")
        if manifest.get("dropped"):
            print(f"examples longer than {manifest['packed_seq_len']} tokens, left out: {manifest['dropped']:,}")
        if manifest.get("truncated"):
            print(f"examples cut to {manifest['packed_seq_len']} tokens: {manifest['truncated']:,}")
        if "examples" in manifest:
            trained = f"examples {manifest['examples']:,}, trained tokens {manifest['trained_tokens']:,}"
            print(f"conversations or pairs {manifest['conversations']:,}, {trained}")
        writer.report(manifest, options.output)


if __name__ == "__main__":
    main()
