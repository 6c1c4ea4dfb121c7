"""Read documents from text, JSON lines and Parquet, on any file system that fsspec knows. Imports no torch.

The input is cut into units, each read by one process. Units depend only on the input, not on the number of processes.
"""

import glob
import io
import json
import logging
import os
import re
import sysconfig
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
from isal import igzip

from config import TitaniteError
from data.shards import DataError

TEXTS = (".txt", ".md", ".rst", ".tex", ".html", ".py", ".c", ".h", ".cc", ".cpp", ".rs", ".go", ".java", ".js")
KINDS = dict.fromkeys(TEXTS, "text") | dict.fromkeys((".jsonl", ".ndjson", ".json"), "jsonl") | {".parquet": "parquet"}
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
UNIT_BYTES = 4 * 2**20
MOST_UNITS = 10_000  # about; a larger input gets larger units
ROWS = 64  # Parquet rows converted to Python at once: more cost less per row, fewer take less memory
VERSIONS = ("ETag", "etag", "blob_id", "LastModified", "created")  # what the stores call them, best first
REQUEST_BYTES = 2 * 2**20  # read-ahead from a remote file; little, as a process may need only one unit
# What others call the roles. A message of ShareGPT's is from one of these or those.
ROLES = {"human": "user", "gpt": "assistant", "observation": "tool", "developer": "system"}
IN_PLACE_OF_MESSAGES = ("conversations", "prompt", "completion")

Located = Iterator[tuple[str, Any]]  # (place in the input, what is there)
Reject = Callable[[str, str], None]  # is given the place of a bad record, and a reason
log = logging.getLogger(__name__)


class File(NamedTuple):
    """One input file."""

    url: str
    size: int
    version: str = ""  # changes with the content; "" if the store has none
    keys: tuple[str, ...] = ()  # of its records; (): those of the command


class Unit(NamedTuple):
    """A piece of the input that one process reads: whole files, or a range of one file."""

    files: tuple[File, ...]
    start: int = 0  # Parquet: row groups; others: bytes, and a line or document belongs to the unit it starts in
    stop: int = 0  # 0: whole files
    bytes: int = 0
    separator: str = ""  # ends a document in a text file; "": the file is one document


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
    files: dict[Any, File] = {}
    for source, keys in map(split_keys, sources):
        with failures_of(f"--source {source}: cannot be listed"):
            find = _stdlib_files if source == "stdlib" else _remote_files if "://" in source else _local_files
            found = sorted(find(source), reverse=True)  # of a file's names, the first counts
        if not found:
            kinds = f"{' '.join(KINDS)}, also with .gz or .zst, but not for plain .json"
            raise DataError(f"--source {source}: no files there; a folder is searched for {kinds}")
        files |= {(name, keys): file._replace(keys=keys) for name, file in found}
    return sorted(files.values())


def split_keys(source: str) -> tuple[str, tuple[str, ...]]:
    """(SOURCE, (KEY, ...)) of SOURCE:KEY,KEY, or (source, ()) if it names no keys or is a file."""
    named = None if os.path.exists(source) else re.fullmatch(r"(.+):([^\W\d][\w,-]*)", source)
    return (named[1], tuple(named[2].split(","))) if named else (source, ())


def _local_files(source: str) -> Iterator[tuple[str, File]]:
    """Yield (real path, file) of a path or glob. Links are followed, so two names of a file are one file."""
    for match in [source] if os.path.exists(source) else glob.glob(source, recursive=True):
        names = [match]
        if os.path.isdir(match):
            folders = os.walk(match, onerror=_raise, followlinks=True)
            names = _read_from_folder(match, [os.path.join(folder, name) for folder, _, own in folders for name in own])
        for name in names:
            yield os.path.realpath(name), _described(os.path.abspath(name))


def _remote_files(source: str) -> Iterator[tuple[str, File]]:
    """Yield (URL, file) of a URL, which may be a glob."""
    system, path = _file_system(source)
    try:
        details = {path: system.info(path)}
    except FileNotFoundError:
        details = system.glob(path, detail=True)
    for match, about in list(details.items()):
        names = [match]
        if about["type"] == "directory":
            details |= (found := system.find(match, detail=True))
            names = _read_from_folder(match, found)
        for name in names:
            url, info = system.unstrip_protocol(name), details[name]
            yield url, File(url, int(info["size"]), next((str(info[key]) for key in VERSIONS if info.get(key)), ""))


def _file_system(url: str) -> tuple[fsspec.AbstractFileSystem, str]:
    """The file system of a URL, and the path there. The environment sets it up."""
    # Its names in the profile and the environment, as botocore by itself does not know AWS_REGION.
    region = ("region", ["AWS_REGION", "AWS_DEFAULT_REGION"], None, None)
    return fsspec.core.url_to_fs(url, **({"session_vars": {"region": region}} if url.startswith("s3://") else {}))


def _raise(error: OSError) -> None:
    raise error


def _described(path: str) -> File:
    return File(path, os.stat(path).st_size, str(os.stat(path).st_mtime_ns))


def _read_from_folder(folder: str, names: Collection[str]) -> list[str]:
    """The files of a folder to read. Not plain .json, which there holds settings as often as data."""
    read = [name for name in names if kind_of(name)[0] != "other" and not name.lower().endswith(".json")]
    if left_out := set(names).difference(read):
        log.warning("--source: %s: %s files of other kinds left out, such as %s", folder, len(left_out), min(left_out))
    return read


def _stdlib_files(_: str) -> Iterator[tuple[str, File]]:
    """Yield the .py files of Python's standard library, without tests."""
    root = Path(sysconfig.get_path("stdlib"))
    left_out = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    for path in root.rglob("*.py"):
        if not left_out & set(path.relative_to(root).parts):
            yield str(path), _described(str(path))


def plan_units(files: Sequence[File], separator: str = "") -> list[Unit]:
    """Cut the input into units of UNIT_BYTES or more. Smaller files share a unit, as do texts without a separator."""
    unit_bytes = max(UNIT_BYTES, sum(file.size for file in files) // MOST_UNITS)
    units: list[Unit] = []
    group: list[File] = []
    size = 0  # of the group
    for file in files:
        kind, compression = kind_of(file.url)
        if (kind in ("text", "other") and not separator) or file.size < unit_bytes:
            group.append(file)
            size += file.size
            if size >= unit_bytes:
                units.append(Unit(tuple(group), bytes=size))
                group, size = [], 0
        elif compression:
            units.append(Unit((file,), bytes=file.size))
        else:
            whole = file.size
            if kind == "parquet":
                with failures_of(f"{file.url}: cannot be read"), _open(file) as stream:
                    whole = pq.ParquetFile(stream).num_row_groups
            each = max(1, unit_bytes * whole // file.size)
            bounds = pairwise([*range(0, whole, each), whole])
            units += [Unit((file,), start, stop, file.size * (stop - start) // whole) for start, stop in bounds]
    units += [Unit(tuple(group), bytes=size)] if group else []
    return [unit._replace(separator=separator) for unit in units]


def kind_of(url: str) -> tuple[str, str]:
    """("text" | "jsonl" | "parquet" | "other", read as text; compression or "") from the file's name."""
    name = url.partition("?")[0] if "://" in url else url
    stem, suffix = os.path.splitext(name.lower())
    if compression := COMPRESSIONS.get(suffix, ""):
        suffix = os.path.splitext(stem)[1]
    return KINDS.get(suffix, "other"), compression


def documents(
    unit: Unit,
    keys: Sequence[str],
    format: str = "text",
    reject: Reject | None = None,
    seen: dict[str, set[str]] | None = None,
) -> Located:
    """Yield (place, text) of a unit's documents; the text of an example is the JSON list of its values.

    A bad record is given to `reject`. `seen` gets file → keys of its conversations and, as messages.KEY, of their
    messages. Raises DataError for a bad record without `reject`, and for a file that cannot be read.
    """
    for file in unit.files:
        kind, names = kind_of(file.url)[0], file.keys or keys
        with failures_of(f"{file.url}: cannot be read"), _open(file) as stream:
            others = ("tools", *IN_PLACE_OF_MESSAGES) if format == "chat" else ()
            found = seen.setdefault(file.url, set()) if seen is not None else set()
            for place, record in _records(file, stream, unit, (*names, *others)):
                try:
                    text = _text(record, kind, names, format, found)
                except (ValueError, TypeError, RecursionError, DataError) as error:
                    if not reject:
                        raise DataError(f"{place}: {error}") from None
                    reject(place, str(error))
                else:
                    yield place, text


def _text(record: Any, kind: str, keys: Sequence[str], format: str, found: set[str]) -> str:
    """The text of a record, or its values as JSON. Raises what is wrong with it. `found` gets a conversation's keys."""
    if kind == "jsonl":
        try:
            record = json.loads(record)
        except ValueError as error:
            record = error
        if not isinstance(record, dict):
            raise DataError(f"must be a JSON object (`jq -c '.[]'` splits an array): {repr(record)[:100]}")
    elif kind != "parquet":
        record = {keys[0]: record.decode("utf-8-sig")}
    elif isinstance(record, ValueError):
        raise record
    values = [record.get(key) for key in keys]
    if format == "chat":
        values = [messages := _conversation(record, keys[0]), *filter(None, [record.get("tools")])]
        own = (f"messages.{name}" for message in messages or () if isinstance(message, dict) for name in message)
        found |= {*record, *own} - {*IN_PLACE_OF_MESSAGES}
    if None in values or (format == "text" and not isinstance(values[0], str)):
        names, what = ", ".join(record), "text" if format == "text" else "value"
        raise DataError(f"no {what} under {','.join(keys)!r}; it has {names}; choose with --keys")
    text = str(values[0]) if format == "text" else json.dumps(values, ensure_ascii=False)
    text.encode()  # fails if it holds half a character, as JSON can
    return text


def _conversation(record: dict[str, Any], key: str) -> Any:
    """The messages of a record. In place of "messages", ShareGPT's, or TRL's untrained prompt and its completion."""
    if key == "messages" and record.get(key) is None:
        key = "conversations"
        if all(isinstance(record.get(part), list) for part in ("prompt", "completion")):
            prompt, completion = (list(map(_message, record[part])) for part in ("prompt", "completion"))
            return [part | ({"weight": 0} if part["role"] == "assistant" else {}) for part in prompt] + completion
    messages = record.get(key)
    return list(map(_message, messages)) if isinstance(messages, list) else messages


def _message(message: dict[str, Any]) -> dict[str, Any]:
    """A message as templates expect it: role and content, its parts as one text, "" if there is only a call."""
    if not isinstance(message, dict):
        raise DataError(f'message {repr(message)[:80]}: must have a "role" and a "content"')
    if "from" in message and "role" not in message:
        names = {"from": "role", "value": "content"}
        message = {names.get(key, key): value for key, value in message.items()}
        if message["role"] not in (known := {*ROLES, *ROLES.values()}):
            raise DataError(f"a message is from {message['role']!r}, not from one of {', '.join(sorted(known))}")
    role, content = message.get("role"), message.get("content")
    if isinstance(content, list):
        if other := [part for part in content if not isinstance(part, dict) or part.get("type") != "text"]:
            raise DataError(f"a part of a message is no text: {repr(other[0])[:80]}")
        content = "".join(part.get("text") for part in content)
    elif content is None and message.get("tool_calls"):
        content = ""
    return message | {"role": ROLES.get(str(role), role), "content": content}


def _open(file: File) -> Any:
    if "://" not in file.url:
        return open(file.url, "rb")
    system, path = _file_system(file.url)
    return system.open(path, "rb", block_size=REQUEST_BYTES)


def _records(file: File, raw: Any, unit: Unit, keys: Sequence[str]) -> Located:
    """Yield (place, record) of everything in a unit's part of a file, of JSON and text its bytes."""
    kind, compression = kind_of(file.url)
    stream = pa.CompressedInputStream(pa.PythonFile(raw), "zstd") if compression == "zstd" else raw
    if compression == "gzip":  # pyarrow refuses zeros after the end, with which tapes and block devices pad
        stream = igzip.IGzipFile(fileobj=raw)
    if kind == "parquet":
        yield from _parquet_records(file, stream, unit, keys)
    elif separator := "\n" if kind == "jsonl" else unit.separator:
        # Buffered, since a remote file's own readline copies its whole read-ahead.
        for position, content in _pieces(io.BufferedReader(stream, 2**20), unit, separator.encode()):
            yield f"{file.url}, {'line' if kind == 'jsonl' else 'document'} at byte {position}", content
    else:
        yield file.url, stream.read()
    # An empty answer, from the server or a proxy, looks like the end of the file.
    if kind != "parquet" and "://" in file.url and raw.tell() < (unit.stop or file.size):
        raise DataError(f"{file.url}: cannot be read: the server has sent {raw.tell():,} bytes of {file.size:,}")


def _pieces(stream: Any, unit: Unit, separator: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield (position, content) of what begins in the unit and ends with the separator or the file, except blanks."""
    if position := max(unit.start - len(separator), 0):
        stream.seek(position)
    pieces = stream if separator == b"\n" else _split(stream, separator)
    if unit.start:
        position += len(next(pieces, b""))  # what began earlier belongs to the unit before
    for piece in pieces:
        if unit.stop and position >= unit.stop:
            return
        if (content := piece.removesuffix(separator)).strip():
            yield position, content
        position += len(piece)


def _split(stream: Any, separator: bytes) -> Iterator[bytes]:
    rest = b""
    while more := stream.read(max(2**20, len(rest))):  # at least as much as is left, to copy long documents seldom
        *pieces, rest = (rest + more).split(separator)
        yield from (piece + separator for piece in pieces)
    yield rest


def _parquet_records(file: File, stream: Any, unit: Unit, keys: Sequence[str]) -> Located:
    table = pq.ParquetFile(stream, page_checksum_verification=True)
    names = table.schema_arrow.names
    first = sum(table.metadata.row_group(i).num_rows for i in range(unit.start))
    groups = range(unit.start, unit.stop or table.num_row_groups)
    columns = [name for name in names if name in keys]
    batches = table.iter_batches(ROWS, row_groups=list(groups), columns=columns)
    for number, row in enumerate(chain.from_iterable(map(_rows, batches)), start=first):
        record = row if isinstance(row, ValueError) else dict.fromkeys(names) | _without_nulls(row)
        yield f"{file.url}, row {number}", record


def _rows(batch: pa.RecordBatch) -> list[Any]:
    try:
        return batch.to_pylist()
    except ValueError as error:  # some text is not UTF-8
        return [error] if len(batch) == 1 else [_rows(batch.slice(i, 1))[0] for i in range(len(batch))]


def _without_nulls(value: Any) -> Any:
    """Drop keys that hold None: Arrow gives each struct the keys of all, and templates test whether a key exists."""
    if isinstance(value, dict):
        return {key: _without_nulls(part) for key, part in value.items() if part is not None}
    return [_without_nulls(part) for part in value] if isinstance(value, list) else value
