"""Turn text, or tokens of another project, into a dataset that training reads.

    python -m data.prepare --source stdlib --output datasets/stdlib

Two passes run on all cores, or with --cluster on a Dask cluster. The first tokenises each unit of the input into a
file, its documents sorted into buckets. The second shuffles each bucket and writes it as one shard. A hash of a
document's position in the input decides its bucket and place, a hash of its whole text whether it is held out. So the
output does not depend on the processes.
Finished work stays in OUTPUT/.parts: after a kill, the same command goes on. manifest.json is written last.
"""

import argparse
import json
import logging
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import date
from functools import lru_cache, partial
from itertools import chain, pairwise
from operator import itemgetter
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from tqdm import tqdm

from config import LOCAL_OR_S3, TitaniteError, command_line, file_errors, is_form
from data import workers, writer
from data.chat import chat_of, encode_examples, load_transformers, transformers_version, use_template
from data.order import derive_key, random_words
from data.packing import HIDDEN, pack
from data.place import PARTS, PLAN, Place
from data.shards import VERSION, DataError, Shard, as_arrow, as_bytes, as_lists, digest
from data.sources import (
    KEY,
    SEPARATORS,
    UNIT_BYTES,
    Counts,
    File,
    Found,
    Unit,
    documents,
    failures_of,
    has_keys,
    kind_of,
    list_files,
    plan_units,
)
from data.token_files import DTYPES, Reading, token_documents
from data.tokenizer import FILES, Tokenizer, load_tokenizer, parse_tokenizer, train_tokenizer
from data.workers import Map
from storage import Store
from storage.records import written_whole

# Format → keys of a record. Tokens have one column, whatever its name.
KEYS = {"text": "text", "tokens": "", "sft": "prompt,response", "chat": "messages"}
EXAMPLES = ("sft", "chat")  # formats for fine-tuning
# Options that have an effect with some formats only.
OPTIONS = {
    "vocab_size": ("text",),
    "separator": ("text",),
    "max_characters": ("text",),
    "dtype": ("tokens",),
    "packed": ("tokens",),
    "seq_len": EXAMPLES,
    "truncate": EXAMPLES,
    "chat_template": ("chat",),
    "template_argument": ("chat",),
    "train_eos": ("chat",),
}
NO_PART_OF_THE_PLAN = (
    "sources", "output", "tokenizer", "overwrite", "skip_bad", "dry_run", "processes", "cluster", "scratch",
)  # fmt: skip
# Count in the manifest → line that tells it.
TOLD = {
    "bad_records": f"bad records left out, listed in {writer.BAD_RECORDS}: {{bad_records:,}}",
    "dropped": "examples longer than {packed_seq_len} tokens, left out: {dropped:,}",
    "truncated": "examples cut to {packed_seq_len} tokens: {truncated:,}",
    "conversations": "conversations or pairs {conversations:,}, "
    "examples {examples:,}, trained tokens {trained_tokens:,}",
    "vocab_size": "vocabulary {vocab_size}, token {eos_id} ends a document",
}
# Split → what to do if it is empty.
EMPTY = {
    "train": "everything is held out: lower --validation-fraction, or name it in validation.datasets only",
    "validation": "nothing is held out: raise --validation-fraction to validate",
}
COUNTED = ("conversations", "examples", "trained_tokens", "dropped", "truncated")  # in the manifest
BATCH_BYTES = 2**20  # text per tokenizer call: its tokens are Python integers at first, and few fit the caches
HELD_BYTES = 128 * 2**20  # of tokens that a process holds before it writes them
VOCAB_SIZE = 4096  # default for a trained tokenizer
TOKENIZER_SAMPLE_BYTES = 64 * 2**20  # text to train a tokenizer on
JSON_BEGINNING = re.compile(rb"(\xef\xbb\xbf)?\s*(\[\s*)?\{")  # of JSON lines, or an array of objects
PARTS_LAYOUT = 3  # changes with what parts hold: those of an earlier version are not used
# Of the documents in parts. Arrow moves bytes much faster than lists of numbers.
PART_SCHEMA = pa.schema({"word": pa.uint64(), "tokens": pa.large_binary()})

log = logging.getLogger(__name__)
T = TypeVar("T")
Piece = tuple[str, Any, bool]  # a document or part of one: place in the input, text or ids, whether it is held out


@dataclass(frozen=True)
class Plan:
    """How a dataset is made."""

    o: argparse.Namespace
    url: str  # of the output
    input: str  # digest of version, units (names, sizes and versions of files, how they are cut) and tokenizer
    facts: dict[str, Any]  # what the manifest says of how examples are made
    dtype: str
    train_buckets: int  # each becomes a shard
    validation_buckets: int
    units: int

    @property
    def buckets(self) -> int:
        """Of train, then of validation."""
        return self.train_buckets + self.validation_buckets

    def record(self) -> str:
        """Everything that decides the bytes of the dataset. Any change makes finished parts useless."""
        options = {name: value for name, value in vars(self.o).items() if name not in NO_PART_OF_THE_PLAN}
        return json.dumps([PARTS_LAYOUT, options, self.input, self.facts])

    @property
    def place(self) -> Place:
        return Place(self.url, self.o.scratch, digest(self.record().encode()))


def prepare(texts: Iterable[str | Mapping[str, Any]], output: str, **options: Any) -> dict[str, Any]:
    """Prepare texts, or records that hold a format's keys, and return the manifest. Raises DataError, TitaniteError.

    The options are the command's: `seq_len=4096` is --seq-len=4096, `overwrite=True` is --overwrite.
    """
    o = parse_options(["--source=-", *words_of({"output": output, **options})])
    return prepare_sources(o, _json_lines(texts, o.keys))


def words_of(options: Mapping[str, Any]) -> list[str]:
    """Options as words of a command. Without those that are False or None."""
    words = []
    for name, value in options.items():
        option = f"--{name.replace('_', '-')}"
        if value is True:
            words.append(option)
        elif value is not False and value is not None:
            words.append(f"{option}={value}")
    return words


def _json_lines(texts: Iterable[str | Mapping[str, Any]], key: str) -> Iterator[bytes]:
    for text in texts:
        record = {key: text} if isinstance(text, str) else dict(text)
        yield json.dumps(record).encode() + b"\n"


def prepare_sources(o: argparse.Namespace, piped: Iterator[bytes] | None = None) -> dict[str, Any]:
    """Prepare a dataset by `parse_options` and return its manifest. `piped` is the content of source "-"."""
    check_options(o)
    with ExitStack() as kept:
        client = kept.enter_context(workers.connected(o.cluster))
        names = []
        for name in o.sources:
            if name == "-" or Path(name).is_fifo():  # kept as a file meanwhile, since every pass reads it again
                if "://" in o.output:
                    raise DataError(f"--source {name}: a pipe is kept in the output folder, and {o.output} is none")
                name = str(kept.enter_context(_kept(name, Path(o.output), piped)))
            names.append(name)
        files = list_files(names)
        check_files(o, files)
        return _prepare_files(o, files, client)


def _prepare_files(o: argparse.Namespace, files: Sequence[File], client: Any) -> dict[str, Any]:
    units = plan_units(files, o.separator, whole=o.format == "tokens")
    tokenizer = choose_tokenizer(o, units)
    plan = make_plan(o, files, units, tokenizer)
    # A mistake in the template or the keys is found before anything is removed. A dry run finds every one.
    found = Found(_bad_allowed(o))
    usable = _count_usable(plan, tokenizer, units, found)
    if o.dry_run:
        return {"documents": usable, "bad_records": found.bad}
    if not usable:
        raise DataError("the input holds nothing that can be used: nothing to prepare")
    place = Place(plan.url, o.scratch)
    with writer.locked(place):
        workers.check_place(place, client)
        _start_or_go_on(plan, tokenizer)
        return _run_passes(plan, tokenizer, units, client)


# ---------------------------------------------------------------- what decides the bytes to write


def _bad_allowed(o: argparse.Namespace) -> int:
    return sys.maxsize if o.dry_run else o.skip_bad


def choose_tokenizer(o: argparse.Namespace, units: Sequence[Unit]) -> Tokenizer:
    """The tokenizer that is given, or one trained on a sample of the text. Raises TitaniteError."""
    if o.tokenizer:
        return load_tokenizer(o.tokenizer, o.eos_token)
    tokenizer = train_tokenizer(_sample_texts(o, units), o.vocab_size or VOCAB_SIZE)
    if tokenizer.vocab_size < o.vocab_size:
        log.warning(f"--vocab-size {o.vocab_size}: the text has no more than {tokenizer.vocab_size} tokens to learn")
    return tokenizer


def _sample_texts(o: argparse.Namespace, units: Sequence[Unit]) -> Iterator[str]:
    """Yield the first documents of units spread evenly over the input, about TOKENIZER_SAMPLE_BYTES in all."""
    found = Found(_bad_allowed(o))
    chosen = units[:: max(1, len(units) * UNIT_BYTES // TOKENIZER_SAMPLE_BYTES)]
    for unit in chosen:
        left = TOKENIZER_SAMPLE_BYTES // len(chosen)
        for _, text in documents(unit, [o.keys], "text", found):
            yield text
            left -= len(text)
            if left <= 0:
                break


def _use_chat_template(o: argparse.Namespace, tokenizer: Tokenizer) -> dict[str, Any]:
    """Give the tokenizer the template and warn of what it costs. Returns the day, if it asks for that."""
    template = ""
    if o.chat_template:
        with file_errors():
            template = Path(o.chat_template).read_text(encoding="utf-8")
    use_template(tokenizer, template, o.template_argument)
    with suppress(TitaniteError):  # the first example gives the reason
        for warning in chat_of(tokenizer).warnings(o.train_eos):
            log.warning(warning)
    if "strftime_now" not in tokenizer.chat_template:
        return {}
    today = date.today().isoformat()  # as transformers tells it
    log.warning(f"the chat template asks for the day and is told {today}, unless a --template-argument names another")
    return {"day": today}


def make_plan(o: argparse.Namespace, files: Sequence[File], units: Sequence[Unit], tokenizer: Tokenizer) -> Plan:
    """The plan of a preparation. Raises TitaniteError if transformers cannot read the tokenizer of examples."""
    facts: dict[str, Any] = {}
    if o.format == "chat":
        facts = _use_chat_template(o, tokenizer)
    if o.format in EXAMPLES:
        load_transformers(tokenizer)  # what is wrong with it is wrong with every example
        facts |= {"dtype": "uint32", "packed_seq_len": o.seq_len, "kind": o.format}
        facts["transformers"] = transformers_version()
    dtype = facts.get("dtype", writer.token_dtype(tokenizer.vocab_size))
    made_by = {name: digest(content) for name, content in tokenizer.files().items()}
    token_bytes: float = sum(map(_text_bytes, files))
    if o.format != "tokens":
        token_bytes = token_bytes / 4 * np.dtype(dtype).itemsize  # a token is about four bytes of text
    shards = token_bytes / (o.shard_mb * 2**20)
    return Plan(
        o=o,
        url=o.output if "://" in o.output else os.path.abspath(o.output),
        input=digest(json.dumps([VERSION, units, made_by]).encode()),
        facts=facts,
        dtype=dtype,
        train_buckets=max(1, round(shards * (1 - o.validation_fraction))),
        validation_buckets=max(1, round(shards * o.validation_fraction)),
        units=len(units),
    )


def _text_bytes(file: File) -> int:
    """About how much text a file holds."""
    kind, compression = kind_of(file.url)
    return file.size * 5 if compression or kind == "parquet" else file.size


def _count_usable(plan: Plan, tokenizer: Tokenizer, units: Sequence[Unit], found: Found) -> int:
    """How many documents can be used: in a dry run all, otherwise 1 as soon as one can."""
    usable = 0
    batch_bytes = BATCH_BYTES if plan.o.dry_run else 1
    for unit in units:
        for tokenized in _tokenized(plan, tokenizer, 0, unit, found, batch_bytes):
            usable += len(tokenized)
            if plan.o.format in EXAMPLES:
                usable = sum(found.counts.values(), Counter[str]())["conversations"]
            if usable and not plan.o.dry_run:
                return usable
    return usable


# ---------------------------------------------------------------- both passes


def _run_passes(plan: Plan, tokenizer: Tokenizer, units: Sequence[Unit], client: Any) -> dict[str, Any]:
    """Tokenise and write what an earlier start by the same plan has not. Returns the manifest.

    Raises DataError if too many records are bad; finished parts are kept for a larger --skip-bad.
    """
    with _mapping(plan, client) as map_tasks:
        tokenise = partial(_run_once, plan, "unit", _tokenize_unit)
        tokenised = _run_all(map_tasks, tokenise, units, "tokenise", " units")
        found = Found()
        parts: list[str] = []
        for bad, counts, names in tokenised:
            found.bad += bad
            for url, own in counts.items():
                found.counts[url].update(own)
            parts += names
        if len(found.bad) > plan.o.skip_bad:
            raise DataError(f"{len(found.bad)} bad records are more than --skip-bad {plan.o.skip_bad}")
        tell_effects(plan, tokenizer, units, found)
        write = partial(_run_once, plan, "bucket", partial(_write_bucket, parts=parts))
        written = _run_all(map_tasks, write, range(plan.buckets), "write", " shards")
    facts = dict(plan.facts)
    if plan.o.format in EXAMPLES:
        total = sum(found.counts.values(), Counter[str]())
        facts |= {name: total[name] for name in COUNTED}
    if found.bad:
        lines = "".join(f"{line}\n" for line in found.bad)
        plan.place.put(writer.BAD_RECORDS, lines.encode())
        facts["bad_records"] = len(found.bad)
    plan.place.store.remove(parts)  # before the manifest, which ends all starts
    shards = [(Shard(*shard), rows) for shard, rows in written]
    manifest = writer.write_manifest(plan.place, tokenizer, shards, facts)
    writer.remove_parts(plan.place)
    return manifest


@contextmanager
def _mapping(plan: Plan, client: Any) -> Iterator[Map]:
    """What runs the tasks: the cluster of `client`, otherwise processes of this machine."""
    if client:
        yield workers.cluster_map(client)
        return
    tasks = max(plan.units, plan.buckets)
    # Starting a process takes half a second, in which it could tokenise a few MB.
    cores = len(os.sched_getaffinity(0)) if tasks > 2 else 1
    with workers.pool_of_processes(min(plan.o.processes or cores, tasks)) as map_tasks:
        yield map_tasks


def _run_all(
    map_tasks: Map, run: Callable[[tuple[int, Any]], tuple[int, Any]], given: Sequence[Any], title: str, unit: str
) -> list[Any]:
    """Run (number, what is given) for each, with a bar. The results by their numbers."""
    with tqdm(map_tasks(run, list(enumerate(given))), total=len(given), desc=title, unit=unit) as bar:
        numbered = sorted(bar, key=itemgetter(0))
    return [result for _, result in numbered]


def _run_once(plan: Plan, kind: str, work: Callable[[Plan, int, Any], Any], task: tuple[int, Any]) -> tuple[int, Any]:
    """(number of the task, what `work` gives), which is kept in a file for another start."""
    number, given = task
    name = f"{PARTS}/{kind}-{number:06}.json"
    record = plan.place.read_if_there(name)
    if record is None:
        result = json.dumps(work(plan, number, given)).encode()
        plan.place.put(name, result)
        record = memoryview(result)
    return number, json.loads(bytes(record))


def tell_effects(plan: Plan, tokenizer: Tokenizer, units: Sequence[Unit], found: Found) -> None:
    """Warn of a separator and of keys that had no effect on the data, and of what the chat template costs."""
    separator = plan.o.separator
    texts = {file.url: file.size for unit in units for file in unit.files if not has_keys(file)}
    whole = [url for url, size in texts.items() if size and not found.counts[url][SEPARATORS]]
    if separator and whole:
        which = f"{len(whole)} of {len(texts)} texts, such as {min(whole)}"
        log.warning(f"--separator {separator!r}: does not occur in {which}; each of these is one document")
    if plan.o.format != "chat":
        return
    read = chat_of(tokenizer).keys | {plan.o.keys}
    for url, counts in sorted(found.counts.items()):
        unread = sorted({name.removeprefix(KEY) for name in counts if name.startswith(KEY)} - read)
        if unread:
            log.warning(f"{url}: keys that the chat template does not read: {', '.join(unread)}")
        if counts["split"]:
            cost = f"{counts['split']:,} conversations became several examples, {counts['repeated']:,} tokens more"
            log.warning(f"{url}: the chat template changes earlier turns: {cost}")
        if counts["thoughts"]:
            log.warning(f"{url}: the chat template drops the thoughts of {counts['thoughts']:,} earlier answers")


def check_options(o: argparse.Namespace) -> None:
    """Raises DataError for a value that makes no sense, and for an option that would have no effect."""
    for option in ("max_characters", "skip_bad", "processes"):
        _check(o, option, getattr(o, option) >= 0, "must be at least 0")
    for option in ("block_mb", "shard_mb"):
        most = writer.LARGEST_SHARD_MB
        _check(o, option, 1e-6 <= getattr(o, option) <= most, f"must be from 1e-6 to {most}")
    for option, formats in OPTIONS.items():
        _check(o, option, not getattr(o, option) or o.format in formats, f"no effect with --format {o.format}")
    _check(o, "validation_fraction", 0 <= o.validation_fraction <= 1, "must be from 0 to 1")
    _check(o, "output", o.output and is_form(o.output, LOCAL_OR_S3), f"must be {LOCAL_OR_S3.description}")
    _check(o, "cluster", not (o.cluster and o.dry_run), "no effect with --dry-run")
    _check(o, "processes", not (o.processes and o.cluster), "no effect with --cluster")
    _check(
        o, "keys", o.keys.count(",") == KEYS[o.format].count(","), f"must be as many as in {KEYS[o.format] or 'ids'}"
    )
    if o.tokenizer:
        _check(o, "vocab_size", not o.vocab_size, "is to train a tokenizer, not for --tokenizer")
    else:
        _check(o, "vocab_size", o.vocab_size == 0 or o.vocab_size >= 257, "must be at least 257: all bytes and eos")
        _check(o, "eos_token", not o.eos_token, "needs --tokenizer; a trained one has its own")
        _check(o, "format", o.format == "text", "needs the --tokenizer of the tokens, or of the model to be tuned")
    if o.format in EXAMPLES:
        _check(o, "seq_len", o.seq_len >= 2, "must be at least 2, the later training.seq_len")
    if o.scratch and "://" not in o.output:
        log.warning(f"--scratch {o.scratch}: no effect, as a folder needs no temporary files elsewhere")
    if not (o.overwrite or o.dry_run) and Place(o.output).read_if_there("manifest.json", 0, 1):
        raise DataError(f"{o.output}: already holds a finished dataset; give --overwrite to replace it")


def _check(o: argparse.Namespace, option: str, is_right: object, wanted: str) -> None:
    if not is_right:
        raise DataError(f"--{option.replace('_', '-')} {getattr(o, option)}: {wanted}")


def check_files(o: argparse.Namespace, files: Sequence[File]) -> None:
    """Raises DataError for keys and separators that do not fit the kinds of files."""
    with_keys = [file.url for file in files if has_keys(file)]
    if o.format == "text" and o.keys != KEYS["text"] and not with_keys:
        raise DataError(f"--keys {o.keys}: no effect, as text such as {files[0].url} has no keys")
    if o.separator and len(with_keys) == len(files):
        raise DataError(f"--separator {o.separator!r}: no effect, as no file is text; {files[0].url} has records")


@contextmanager
def _kept(name: str, folder: Path, piped: Iterator[bytes] | None) -> Iterator[Path]:
    """A file in `folder` with what `piped`, or the pipe `name`, yields. Removes it at the end."""
    chunks = piped or _chunks(name)
    first = next(chunks, b"")
    suffix = "json" if re.match(JSON_BEGINNING, first) else "txt"
    path = folder.absolute() / f".{Path(name).name}.{suffix}"
    with writer.locked(Place(str(folder))), written_whole(path) as file:
        file.writelines(chain([first], chunks))
    try:
        yield path
    finally:
        path.unlink()


def _chunks(name: str) -> Iterator[bytes]:
    with open(0 if name == "-" else name, "rb", closefd=name != "-") as pipe:
        yield from iter(partial(pipe.read, BATCH_BYTES), b"")


def _start_or_go_on(plan: Plan, tokenizer: Tokenizer) -> None:
    """Keep the parts of an interrupted preparation by the same plan. Remove everything else that we wrote."""
    place = Place(plan.url, plan.o.scratch)
    record = plan.record().encode()
    if place.read_if_there(PLAN) != record:
        writer.remove_dataset(place)
        if place.folder is not None:
            (place.folder / PARTS).mkdir()
        place.put(PLAN, record)
    tokenizer.save(plan.url)


@lru_cache(maxsize=1)
def _stored_tokenizer(place: Place) -> Tokenizer:
    """The tokenizer of a plan, read once by each worker process."""
    files = {}
    for name in FILES:
        content = place.read_if_there(name)
        if content is not None:
            files[name] = bytes(content)
    return parse_tokenizer(files, place.url)


# ---------------------------------------------------------------- pass 1: tokenise


def _tokenize_unit(plan: Plan, number: int, unit: Unit) -> tuple[list[str], Counts, list[str]]:
    """Write a unit's documents into parts. Returns bad records, counts, and the parts' names."""
    tokenizer = _stored_tokenizer(plan.place)
    found = Found(plan.o.skip_bad)
    parts: list[str] = []
    tokenized = _tokenized(plan, tokenizer, number, unit, found, BATCH_BYTES)
    for batches in grouped(tokenized, lambda batch: batch.nbytes, HELD_BYTES):
        name = f"{PARTS}/part-{number:06}-{len(parts)}.arrow"
        _write_part(plan, name, pa.concat_batches(batches))
        parts.append(name)
    return found.bad, found.counts, parts


def _write_part(plan: Plan, name: str, held: pa.RecordBatch) -> None:
    """Write a file of documents, one record batch per bucket, in the order of the buckets.

    It begins with where each batch begins and the last ends (int64), so that a bucket reads only what it needs.
    """
    held = held.take(pc.sort_indices(held["bucket"]))
    bounds = np.from_dlpack(held["bucket"]).searchsorted(np.arange(plan.buckets + 1))
    held = held.select(PART_SCHEMA.names)
    batches = [held.slice(first, stop - first).serialize() for first, stop in pairwise(bounds.tolist())]
    offsets = np.cumsum([8 * len(bounds), *map(len, batches)], dtype=np.int64)
    with plan.place.create(name) as part:
        part.write(offsets.tobytes())
        part.writelines(batches)


def _tokenized(
    plan: Plan, tokenizer: Tokenizer, number: int, unit: Unit, found: Found, batch_bytes: int
) -> Iterator[pa.RecordBatch]:
    """Yield record batches with bucket, sort key and tokens of each document. Validation's buckets follow train's."""
    key = derive_key("document", number)
    count = 0  # of documents
    pieces = _pieces(plan, tokenizer, unit, found)
    batches = grouped(pieces, lambda piece: len(piece[1]), batch_bytes)
    if plan.o.format == "text":  # the others add to `found` here as well
        batches = workers.read_ahead(batches)
    for batch in batches:
        places, texts, held_out = zip(*batch, strict=True)
        words = random_words(len(batch), key, first=count)
        count += len(batch)
        buckets = np.where(held_out, plan.train_buckets + words % plan.validation_buckets, words % plan.train_buckets)
        ids: Sequence[np.ndarray] = texts
        if plan.o.format == "text":
            ids = tokenizer.encode_documents(texts)
        elif plan.o.format in EXAMPLES:
            made = [_examples(plan, tokenizer, place, text, found) for place, text in zip(places, texts, strict=True)]
            of_each = [len(examples) for examples in made]
            buckets = np.repeat(buckets, of_each)
            words = np.repeat(words, of_each)
            ids = list(chain.from_iterable(made))
        tokens = as_bytes(ids, plan.dtype)
        yield pa.record_batch({"bucket": as_arrow(buckets), "word": as_arrow(words), "tokens": tokens})


def _pieces(plan: Plan, tokenizer: Tokenizer, unit: Unit, found: Found) -> Iterator[Piece]:
    """Yield the documents of a unit, without empty ones."""
    o = plan.o
    located = documents(unit, o.keys.split(","), o.format, found)
    if o.format == "tokens":
        located = token_documents(unit, Reading(tokenizer.eos_id, tokenizer.vocab_size, o.dtype, o.keys, o.packed))
    for place, text in located:
        content = text.encode() if isinstance(text, str) else text.tobytes()
        held_out = writer.is_held_out(content, o.validation_fraction)
        for piece in cut(text, o.max_characters):
            if len(piece):
                yield place, piece, held_out


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
    """Cut `text` into parts of at most `max_characters`, at line ends where possible. 0: whole."""
    start = 0
    while max_characters and len(text) - start > max_characters:
        stop = text.rfind("\n", start, start + max_characters) + 1 or start + max_characters
        yield text[start:stop]
        start = stop
    yield text[start:]


def _examples(plan: Plan, tokenizer: Tokenizer, place: str, text: str, found: Found) -> list[np.ndarray]:
    """The examples of a conversation or pair that fit into a row; none of a bad one."""
    o = plan.o
    counts = found.counts[place.rpartition(", ")[0]]
    try:
        (examples,) = encode_examples([text], o.format, tokenizer, o.train_eos, counts)
    except TitaniteError as error:
        found.reject(place, str(error))
        return []
    fitting = []
    for example in examples:
        is_long = len(example) > o.seq_len
        row = example[: o.seq_len]
        trained = int((row < HIDDEN).sum())
        if not trained or (is_long and not o.truncate):
            counts["dropped"] += 1
            continue
        counts["truncated"] += is_long
        counts["trained_tokens"] += trained
        fitting.append(row)
    counts["conversations"] += 1
    counts["examples"] += len(fitting)
    return fitting


# ---------------------------------------------------------------- pass 2: shuffle and write


def _write_bucket(plan: Plan, bucket: int, _: int, *, parts: Sequence[str]) -> writer.WrittenShard:
    """Write a bucket's shard."""
    place = plan.place
    split = "train"
    number = bucket
    if bucket >= plan.train_buckets:
        split = "validation"
        number -= plan.train_buckets
    with ThreadPoolExecutor(place.store.read_threads) as threads:
        batches = list(threads.map(partial(_read_slice, place.store, bucket), parts))
    with failures_of(f"{split}-{number:05}, which a smaller --shard-mb makes smaller"):
        stored = pa.concat_batches(batches)
        del batches  # to hold the documents twice, not three times
        order = pc.sort_indices(stored["word"])
        documents = as_lists(stored["tokens"].take(order), plan.dtype)
        del stored
    if plan.o.seq_len:
        documents = pack(documents, plan.o.seq_len, _stored_tokenizer(place).eos_id)
    block_bytes = int(plan.o.block_mb * 2**20)
    return writer.write_shard(place, split, number, documents, block_bytes)


def _read_slice(store: Store, bucket: int, part: str) -> pa.RecordBatch:
    """A bucket's documents in a part. Parts are named, not listed, so none can be missed."""
    bounds = np.frombuffer(store.read(part, 8 * bucket, 16), np.int64)
    first, stop = bounds.tolist()
    return pa.ipc.read_record_batch(pa.py_buffer(store.read(part, first, stop - first)), PART_SCHEMA)


def parse_options(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m data.prepare", description="Turn text into a dataset for training.")
    add = parser.add_argument
    sources = "stdlib, or folders, files, globs, URLs or pipes (-: standard input)"
    add("--source", dest="sources", nargs="+", required=True, help=sources)
    add("--output", required=True, help="folder of the dataset, or s3://bucket/folder")
    add("--overwrite", action="store_true", help="replace a finished dataset")
    add("--tokenizer", default="", help="tokenizer.json, or a folder with one; default: train one on the text")
    add("--vocab-size", type=int, default=0, help=f"size of the vocabulary to train (default {VOCAB_SIZE})")
    add("--eos-token", default="", help="token that ends a document; default: the tokenizer's own")
    kinds = "text; tokens; for fine-tuning: sft (prompts with responses) or chat (messages) (default %(default)s)"
    add("--format", choices=KEYS, default="text", help=kinds)
    keys = f"keys or columns of a record, comma-separated (default of each format: {KEYS})"
    add("--keys", default="", help=keys)
    separator = "what ends a document in text files; \\n: a line end, LF or CRLF"
    add("--separator", type=_unescaped, default="", help=separator)
    add("--max-characters", type=int, default=0, help="cut longer texts at line ends; 0 (default): never")
    add("--dtype", default="", choices=DTYPES, help="of tokens, in files without a header")
    add("--packed", action="store_true", help="tokens: a document goes on in a table's next row, until eos ends it")
    add("--seq-len", type=int, default=0, help="tokens per row of packed examples; longer ones are left out, counted")
    add("--truncate", action="store_true", help="cut longer examples at the end of a row, not leave them out")
    add("--chat-template", default="", help="file with a Jinja template for --format chat (default: the tokenizer's)")
    argument = "of the chat template, such as enable_thinking=false; repeatable; runs and exports keep it"
    add("--template-argument", action="append", default=[], metavar="NAME=VALUE", help=argument)
    add("--train-eos", action="store_true", help="chat: end each answer with eos, for templates without an end token")
    add("--validation-fraction", type=float, default=0.02, help="share of documents held out (default %(default)s)")
    add("--skip-bad", type=int, default=0, help=f"bad records to leave out at most, listed in {writer.BAD_RECORDS}")
    add("--dry-run", action="store_true", help="list all bad records, prepare nothing")
    add("--block-mb", type=float, default=8, help="MiB of tokens shuffled and read as one block (default %(default)s)")
    add("--shard-mb", type=float, default=256, help="approximate MiB of tokens in a file (default %(default)s)")
    add("--processes", type=int, default=0, help="0 (default): one per available core, or one for a few MB")
    cluster = "scheduler of a Dask cluster: tcp://host:port, or its JSON file (docs/prepare-cluster.md)"
    add("--cluster", default="", metavar="ADDRESS", help=cluster)
    scratch = "for s3:// folder of temporary files on each worker's own disk; default: the system's"
    add("--scratch", default="", metavar="DIR", help=scratch)
    options = parser.parse_args(argv)
    options.keys = options.keys or KEYS[options.format]
    return options


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
        for name, line in TOLD.items():
            if manifest.get(name):
                print(line.format_map(manifest))
        _print_splits(manifest)
        print(f"ready: {options.output}")


def _print_splits(manifest: Mapping[str, Any]) -> None:
    for split, hint in EMPTY.items():
        shards = [shard for shard in manifest["shards"] if shard["split"] == split]
        documents = sum(shard["documents"] for shard in shards)
        tokens = sum(shard["tokens"] for shard in shards)
        print(f"{split}: documents {documents:,}, tokens {tokens:,}, files {len(shards)}")
        if not shards:
            print(hint)


if __name__ == "__main__":
    from data import prepare as imported  # the workers of a cluster cannot import functions of __main__

    imported.main()
