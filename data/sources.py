"""Read documents from text, JSON lines and tables, on any file system that fsspec knows. Imports no torch.

The input is cut into units, each read by one process. Units depend only on the input, not on the number of processes.
"""

import codecs
import csv
import glob
import io
import json
import logging
import os
import re
import sysconfig
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
from isal import igzip

from config import TitaniteError
from data.conversations import (
    BESIDE_MESSAGES,
    IN_PLACE_OF_MESSAGES,
    IN_PLACE_OF_PAIRS,
    read_conversation,
    read_pair,
    without_nulls,
)
from data.shards import DataError

TEXTS = (".txt", ".md", ".rst", ".tex", ".html", ".py", ".c", ".h", ".cc", ".cpp", ".rs", ".go", ".java", ".js")
LINES = (".jsonl", ".ndjson")
TABLES = {".json": "json", ".parquet": "parquet", ".arrow": "arrow", ".csv": "csv", ".tsv": "tsv"}
KINDS = dict.fromkeys(TEXTS, "text") | dict.fromkeys(LINES, "jsonl") | TABLES
# In a folder these hold settings, labels or token ids as often as texts, so they are read only if they are named.
ONLY_IF_NAMED = (".json", ".arrow", ".csv", ".tsv")
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
# Kinds whose readers can begin within a file, and what a unit counts in. Readers of all others get whole files.
DIVISIBLE = {"text": "bytes", "other": "bytes", "jsonl": "bytes", "parquet": "row groups"}
POSITIONS = {
    "text": "document at byte",
    "other": "document at byte",
    "jsonl": "line at byte",
    "json": "record",
}  # of others: row
DELIMITERS = {"csv": ",", "tsv": "\t"}
UNIT_BYTES = 4 * 2**20
MOST_UNITS = 10_000  # about; a larger input gets larger units
ROWS = 64  # Parquet rows converted to Python at once: more cost less per row, fewer take less memory
VERSIONS = ("ETag", "etag", "blob_id", "LastModified", "created")  # what the stores call them, best first
REQUEST_BYTES = 2 * 2**20  # read-ahead from a remote file; little, as a process may need only one unit
ARROW_FILE = b"ARROW1"  # how one begins
READ_BYTES = 2**20  # searched for separators at once, or as much as a longer document has by then
# Format → columns that count beside those that --keys names.
OTHER_COLUMNS = {"chat": (*BESIDE_MESSAGES, *IN_PLACE_OF_MESSAGES), "sft": IN_PLACE_OF_PAIRS}

Located = Iterator[tuple[str, Any]]  # (place in the input, what is there)
Records = Iterator[tuple[int, Any]]  # (byte or row in the file, the bytes, dict or, if it is bad, ValueError)
Counts = defaultdict[str, Counter[str]]  # file → what was found in it
SEPARATORS = "separators"  # in Counts, as well as, with this before it, each key of conversations
KEY = "key "
log = logging.getLogger(__name__)


class File(NamedTuple):
    """One input file."""

    url: str
    size: int
    version: str = ""  # changes with the content; "" if the store has none


class Unit(NamedTuple):
    """A piece of the input that one process reads: whole files, or a range of one file."""

    files: tuple[File, ...]
    start: int = 0  # see DIVISIBLE; a line or document belongs to the unit in which the separator before it begins
    stop: int = 0  # 0: whole files
    separator: str = ""  # ends a document in a text file; "": the file is one document


class Separator(NamedTuple):
    """What divides the bytes of a file."""

    pattern: re.Pattern[bytes]
    longest: int  # bytes that the pattern matches at most
    before: bytes = b""  # belongs to the separator if it stands before it


LINE_END = Separator(re.compile(b"\n"), longest=1)


@dataclass
class Found:
    """What reading has shown."""

    skip_bad: int = 0
    bad: list[str] = field(default_factory=list)  # place and reason of each bad record
    counts: Counts = field(default_factory=lambda: defaultdict(Counter))

    def reject(self, place: str, reason: str) -> None:
        """Note a bad record. Raises DataError if it is one too many."""
        self.bad.append(" ".join(f"{place}: {reason}".split()))
        if len(self.bad) > self.skip_bad:
            advice = f"--skip-bad {self.skip_bad} leaves out no more; --dry-run lists all"
            raise DataError(f"{self.bad[-1]} ({advice})")


@contextmanager
def failures_of(what: str) -> Iterator[None]:
    """Turn the exceptions of every kind of store and file into DataErrors that begin with `what`."""
    try:
        yield
    except TitaniteError:
        raise
    except Exception as error:
        raise DataError(f"{what}: {type(error).__name__}: {' '.join(str(error).split())}") from None


def list_files(sources: Sequence[str]) -> list[File]:
    """The files of stdlib, folders, files, globs and URLs, each once, in a fixed order. Raises DataError if none."""
    files: dict[str, File] = {}  # by what identifies them
    for source in sources:
        with failures_of(f"--source {source}: cannot be listed"):
            found = sorted(_find(source), key=lambda pair: pair[1])
        if not found:
            kinds = f"{' '.join(KINDS)}, also with .gz or .zst, but not for plain {' '.join(ONLY_IF_NAMED)}"
            raise DataError(f"--source {source}: no files there; a folder is searched for {kinds}")
        new = {key: file for key, file in reversed(found) if key not in files}  # of a file's names, the first counts
        files |= new
        repeated = len(found) - len(new)
        if repeated:
            known = "are in the list already, by this or another name; each is read once"
            log.warning(f"--source {source}: {repeated} of {len(found)} files {known}")
    return sorted(files.values())


def has_keys(file: File) -> bool:
    """Whether the file holds records with keys, not plain text."""
    return kind_of(file.url)[0] not in ("text", "other")


def _find(source: str) -> Iterator[tuple[str, File]]:
    """Yield (what identifies the file, file) of a source."""
    scheme, separator, path = source.partition("://")
    if source == "stdlib":
        return _stdlib_files()
    if separator and scheme not in ("file", "local"):
        return _remote_files(source)
    return _local_files(path or source)


def _local_files(source: str) -> Iterator[tuple[str, File]]:
    """Yield (identity, file) of a path or glob. Links are followed: two names of a file have the same identity."""
    walked: set[str] = set()
    matches = [source] if os.path.exists(source) else _glob(source)
    for match in matches:
        names = [match]
        if os.path.isdir(match):
            names = _read_from_folder(match, list(_names_below(match, walked)))
        for name in names:
            yield os.path.realpath(name), _described(os.path.abspath(name))


def _names_below(top: str, walked: set[str]) -> Iterator[str]:
    for folder, names in _walk(top, walked):
        for name in names:
            path = os.path.join(folder, name)
            if os.path.isfile(path) or not os.path.exists(path):  # no pipe; a broken link is an error later
                yield path


def _walk(top: str, walked: set[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield (folder, names of its files) of `top` and all below it, except folders `walked` before, by any name."""
    for folder, below, names in os.walk(top, onerror=_raise, followlinks=True):
        real = os.path.realpath(folder)
        if real in walked:  # a link led back
            below.clear()
            continue
        walked.add(real)
        below.sort()
        yield folder, names


def _glob(pattern: str) -> Iterator[str]:
    """Yield what matches. As for Python's glob, ** is any folder that is not hidden; unlike it, this ends at links."""
    recursive = re.match(r"((?:.*?/)?)\*\*(?:/+|$)(.*)", pattern)
    if not recursive:
        yield from glob.glob(pattern)
        return
    before, after = recursive.groups()
    tops = glob.glob(before) if before else ["."]
    for top in tops:
        for folder, _ in _walk(top, set()):
            parts = Path(folder).relative_to(top).parts
            if not any(part.startswith(".") for part in parts):
                yield from _glob(os.path.join(glob.escape(folder), after or "*"))


def _remote_files(source: str) -> Iterator[tuple[str, File]]:
    """Yield (URL, file) of a URL, which may be a glob."""
    system, path = _file_system(source)
    try:
        details = {path: system.info(path)}
    except FileNotFoundError:
        details = system.glob(path, detail=True)
    for match, about in details.items():
        found = {match: about}
        if about["type"] == "directory":
            below = system.find(match, detail=True)
            found = {name: below[name] for name in _read_from_folder(match, below)}
        for name, info in found.items():
            url = system.unstrip_protocol(name)
            versions = [str(info[key]) for key in VERSIONS if info.get(key)]
            yield url, File(url, int(info["size"]), *versions[:1])


def _file_system(url: str) -> tuple[fsspec.AbstractFileSystem, str]:
    """The file system of a URL, and the path there. The environment sets it up."""
    options = {}
    if url.startswith("s3://"):
        # Its names in the profile and the environment, as botocore by itself does not know AWS_REGION.
        region = ("region", ["AWS_REGION", "AWS_DEFAULT_REGION"], None, None)
        options["session_vars"] = {"region": region}
    return fsspec.core.url_to_fs(url, **options)


def _raise(error: OSError) -> None:
    raise error


def _described(path: str) -> File:
    return File(path, os.stat(path).st_size, str(os.stat(path).st_mtime_ns))


def _read_from_folder(folder: str, names: Collection[str]) -> list[str]:
    """The files of a folder to read."""
    known = [name for name in names if kind_of(name)[0] != "other"]
    read = [name for name in known if not name.lower().endswith(ONLY_IF_NAMED)]
    left_out = set(names).difference(read)
    if left_out:
        log.warning("--source: %s: %s files of other kinds left out, such as %s", folder, len(left_out), min(left_out))
    return read


def _stdlib_files() -> Iterator[tuple[str, File]]:
    """Yield the .py files of Python's standard library, without tests."""
    root = Path(sysconfig.get_path("stdlib"))
    left_out = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    for path in root.rglob("*.py"):
        if not left_out & set(path.relative_to(root).parts):
            yield str(path), _described(str(path))


def plan_units(files: Sequence[File], separator: str = "", whole: bool = False) -> list[Unit]:
    """Cut the input into units of UNIT_BYTES or more. Smaller files share a unit, as do texts without a separator.

    `whole`: cut no file.
    """
    unit_bytes = max(UNIT_BYTES, sum(file.size for file in files) // MOST_UNITS)
    units: list[Unit] = []
    group: list[File] = []
    size = 0  # of the group
    for file in files:
        is_document = not separator and not has_keys(file)
        if whole or is_document or file.size < unit_bytes:
            group.append(file)
            size += file.size
            if size >= unit_bytes:
                units.append(Unit(tuple(group)))
                group = []
                size = 0
        else:
            units += _divided(file, unit_bytes)
    if group:
        units.append(Unit(tuple(group)))
    return [unit._replace(separator=separator) for unit in units]


def _divided(file: File, unit_bytes: int) -> list[Unit]:
    """The units of a file: parts of about `unit_bytes` if its reader can begin within it, otherwise one."""
    kind = content_kind(file)
    if kind_of(file.url)[1] or kind not in DIVISIBLE:
        return [Unit((file,))]
    whole = file.size
    if DIVISIBLE[kind] == "row groups":
        with failures_of(f"{file.url}: cannot be read"), open_file(file) as stream:
            whole = pq.ParquetFile(stream).num_row_groups
    each = max(1, unit_bytes * whole // file.size)
    bounds = pairwise([*range(0, whole, each), whole])
    return [Unit((file,), start, stop) for start, stop in bounds]


def kind_of(url: str) -> tuple[str, str]:
    """(a kind of KINDS, or "other", which is read as text; compression or "") from the file's name."""
    name = url.partition("?")[0] if "://" in url else url
    stem, suffix = os.path.splitext(name.lower())
    compression = COMPRESSIONS.get(suffix, "")
    if compression:
        suffix = os.path.splitext(stem)[1]
    return KINDS.get(suffix, "other"), compression


def content_kind(file: File) -> str:
    """The kind of KINDS, or "other". A .json file is of kind "json" if it holds an array, otherwise of JSON lines."""
    kind = kind_of(file.url)[0]
    if kind != "json":
        return kind
    with failures_of(f"{file.url}: cannot be read"), open_file(file) as raw:
        beginning = _decompressed(file, raw).read(READ_BYTES)
    return "json" if beginning.removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"[") else "jsonl"


def documents(unit: Unit, keys: Sequence[str], format: str = "text", found: Found | None = None) -> Located:
    """Yield (place, text) of a unit's documents; the text of an example is the JSON list of its values.

    Raises DataError for a file that cannot be read, and for bad records beyond those that `found` may leave out.
    """
    found = found or Found()
    columns = [*keys, *OTHER_COLUMNS.get(format, ())]
    for file in unit.files:
        kind = content_kind(file)
        is_plain = not has_keys(file)
        is_document = is_plain and not unit.separator
        with failures_of(f"{file.url}: cannot be read"), open_file(file) as stream:
            for position, record in _records(file, kind, stream, unit, columns):
                place = file.url
                if not is_document:
                    place += f", {POSITIONS.get(kind, 'row')} {position}"
                if position and is_plain:
                    found.counts[file.url][SEPARATORS] += 1
                if isinstance(record, bytes):
                    if position == 0:
                        record = record.removeprefix(codecs.BOM_UTF8)
                    if not record.strip() and not is_document:
                        continue
                try:
                    if kind == "jsonl":
                        record = json.loads(record)
                    elif isinstance(record, bytes):
                        record = {keys[0]: record.decode()}
                    text = _text(record, keys, format, found.counts[file.url])
                except json.JSONDecodeError as error:
                    found.reject(place, f"must be JSON: {error}")
                except (ValueError, TypeError, RecursionError, DataError) as error:
                    found.reject(place, str(error))
                else:
                    yield place, text


def _text(record: Any, keys: Sequence[str], format: str, counts: Counter[str]) -> str:
    """The text of a record, or its values as JSON. Raises what is wrong with it."""
    if isinstance(record, ValueError):
        raise record
    if not isinstance(record, dict):
        raise DataError(f"must be a JSON object, or a .json file must be an array of them: {repr(record)[:100]}")
    if format == "chat":
        values = read_conversation(record, keys[0])
        counts.update(KEY + key for key in _keys_of(record, values[0]))
    elif format == "sft":
        values = read_pair(record, keys)
    else:
        values = [record.get(key) for key in keys]
    text = values[0]
    what = "text"
    if format != "text":
        text = json.dumps(values, ensure_ascii=False)
        what = "value"
    if None in values or not isinstance(text, str):
        there = f"it has {', '.join(record)}; choose with --keys, or see --format"
        raise DataError(f"no {what} under {','.join(keys)!r}; {there}")
    text.encode()  # fails if it holds half a character, as JSON can
    return text


def _keys_of(record: dict[str, Any], messages: Any) -> set[str]:
    """The keys of a record and, as messages.KEY, of its messages, except those that name its kind."""
    found = set(record) - set(IN_PLACE_OF_MESSAGES)
    for message in messages or []:
        found |= {f"messages.{key}" for key in message}
    return found


def open_file(file: File) -> Any:
    if "://" not in file.url:
        return open(file.url, "rb")
    system, path = _file_system(file.url)
    return system.open(path, "rb", block_size=REQUEST_BYTES)


def _decompressed(file: File, raw: Any) -> Any:
    """What an open file holds, as a stream."""
    compression = kind_of(file.url)[1]
    if compression == "zstd":
        return pa.CompressedInputStream(pa.PythonFile(raw), "zstd")
    if compression == "gzip":  # pyarrow refuses zeros after the end, with which tapes and block devices pad
        return igzip.IGzipFile(fileobj=raw)
    return raw


def _records(file: File, kind: str, raw: Any, unit: Unit, keys: Sequence[str]) -> Records:
    """Yield (position, record) of everything in a unit's part of a file. Only DIVISIBLE kinds have a part to mind."""
    stream = _decompressed(file, raw)
    if kind == "parquet":
        yield from _parquet_records(stream, unit, keys)
    elif kind == "arrow":
        yield from _arrow_records(stream, keys)
    elif kind in DELIMITERS:
        yield from _csv_records(stream, DELIMITERS[kind])
    elif kind == "json":
        yield from enumerate(json.loads(stream.read()))
    elif kind == "jsonl":
        yield from _pieces(stream, unit, LINE_END)
    elif unit.separator:
        yield from _pieces(stream, unit, _separator(unit.separator))
    else:
        yield 0, stream.read()
    if DIVISIBLE.get(kind) == "bytes" or kind in DELIMITERS:
        check_end(file, raw, unit.stop or file.size)


def check_end(file: File, raw: Any, stop: int) -> None:
    """Raises DataError if a file ended early: an empty answer, from the server or a proxy, looks like its end."""
    if "://" in file.url and raw.tell() < stop:
        raise DataError(f"{file.url}: cannot be read: the server has sent {raw.tell():,} bytes of {file.size:,}")


def _separator(text: str) -> Separator:
    """A separator whose line ends, LF or CRLF, match both. One with a CR elsewhere matches as it is."""
    lines = text.replace("\r\n", "\n").encode().split(b"\n")
    if b"\r" in b"".join(lines):
        return Separator(re.compile(re.escape(text.encode())), len(text.encode()))
    pattern = b"\r?\n".join(map(re.escape, lines))
    quick = pattern.removeprefix(b"\r?")  # a search for what may begin with either of two takes 20 times as long
    before = b"\r" if quick != pattern else b""
    return Separator(re.compile(quick), len(text.encode()) + len(lines), before)


def _pieces(stream: Any, unit: Unit, separator: Separator) -> Records:
    """Yield (position, content) of what separators divide, as `bytes.split` does, however the file is cut into units.

    Where separators overlap, which of them divide depends on where their run begins, so a run is never cut: a unit has
    all that follows the runs that begin in it, and the first unit also what comes before any. The beginning of a run
    is seen from the bytes of one separator before it.
    """
    first = max(unit.start - separator.longest, 0)
    if first:
        stream.seek(first)
    for begin, section in _sections(stream, first, separator):
        if unit.stop and begin >= unit.stop:
            return
        if begin < unit.start:
            continue
        start = 0
        for match in separator.pattern.finditer(section):
            yield begin + start, section[start : match.start()].removesuffix(separator.before)
            start = match.end()
        yield begin + start, section[start:]


def _sections(stream: Any, position: int, separator: Separator) -> Records:
    """Yield (position, content) of all that is left, cut where runs of separators begin."""
    rest = b""
    more = stream.read(READ_BYTES)
    while more:
        rest += more
        start = 0
        for begin in _runs(rest, separator.pattern):
            yield position + start, rest[start:begin].removesuffix(separator.before)
            start = begin
        rest = rest[start:]
        position += start
        more = stream.read(max(READ_BYTES, len(rest)))  # more for a long document, which is searched again each time
    yield position, rest


def _runs(content: bytes, pattern: re.Pattern[bytes]) -> Iterator[int]:
    """Yield where each run of overlapping separators begins."""
    end = 0  # of the separator before
    match = pattern.search(content)
    while match:
        if match.start() >= end:
            yield match.start()
        end = match.end()
        match = pattern.search(content, match.start() + 1)


def _parquet_records(stream: Any, unit: Unit, keys: Sequence[str]) -> Records:
    table = pq.ParquetFile(stream, page_checksum_verification=True)
    names = table.schema_arrow.names
    first = sum(table.metadata.row_group(i).num_rows for i in range(unit.start))
    groups = list(range(unit.start, unit.stop or table.num_row_groups))
    columns = [name for name in names if name in keys]
    return _table_records(table.iter_batches(ROWS, row_groups=groups, columns=columns), names, first)


def _arrow_records(stream: Any, keys: Sequence[str]) -> Records:
    schema, batches = open_arrow(stream)
    columns = [name for name in schema.names if name in keys]
    first = 0
    for batch in batches:
        few = [batch.slice(start, ROWS).select(columns) for start in range(0, len(batch), ROWS)]
        yield from _table_records(few, schema.names, first)
        first += len(batch)


def open_arrow(stream: Any) -> tuple[pa.Schema, Iterator[pa.RecordBatch]]:
    """The schema and the batches of an Arrow file or stream. Hugging Face's datasets are stored as streams."""
    magic = stream.read(len(ARROW_FILE))
    stream.seek(0)
    if magic == ARROW_FILE:
        file = pa.ipc.open_file(stream)
        return file.schema, map(file.get_batch, range(file.num_record_batches))
    reader = pa.ipc.open_stream(stream)
    return reader.schema, iter(reader)


def _table_records(batches: Iterable[pa.RecordBatch], names: Sequence[str], first: int = 0) -> Records:
    """Yield (row, record) of batches with some of the columns `names`; in others the record has None."""
    number = first
    for batch in batches:
        for row in _rows(batch):
            if isinstance(row, dict):
                row = dict.fromkeys(names) | without_nulls(row)
            yield number, row
            number += 1


def _csv_records(stream: Any, delimiter: str) -> Records:
    csv.field_size_limit(2**31 - 1)  # otherwise 128 KiB, and texts are longer
    lines = io.TextIOWrapper(io.BufferedReader(stream, READ_BYTES), "utf-8-sig", "surrogateescape", newline="")
    reader = csv.DictReader(lines, delimiter=delimiter, strict=True)
    try:
        for number, row in enumerate(reader):
            surplus = row.pop(None, None)
            if surplus:
                yield number, ValueError(f"has {len(surplus)} cells more than the first line names")
            else:
                yield number, row
    except csv.Error as error:
        raise ValueError(f"line {reader.reader.line_num}: {error}") from None


def _rows(batch: pa.RecordBatch) -> list[Any]:
    """Its rows as dicts, or a ValueError in place of a row whose text is not UTF-8."""
    try:
        return batch.to_pylist()
    except ValueError as error:
        return [error] if len(batch) == 1 else [_rows(batch.slice(i, 1))[0] for i in range(len(batch))]
