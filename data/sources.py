"""Read documents from text, JSON lines and Parquet, on any file system that fsspec knows.

The input is cut into units, each read by one process. Units depend only on the input, so
the result does not depend on the number of processes. Imports no torch.
"""

import io
import json
import logging
import os
import sysconfig
import tokenize
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from glob import has_magic
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
from fsspec.implementations.local import LocalFileSystem

from config import TitaniteError
from data.shards import DataError
from data.storage import file_system

STDLIB = "stdlib"
TEXT_SUFFIXES = (".txt", ".md", ".rst", ".tex", ".html", ".py", ".c", ".h", ".cc", ".cpp", ".rs", ".go", ".java", ".js")
KINDS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".parquet": "parquet"}
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
UNIT_BYTES = 4 * 2**20
MOST_UNITS = 10_000  # about; a larger input gets larger units
ROWS = 64  # Parquet rows converted to Python at once: more cost less per row, fewer take less memory
HASHES = ("ETag", "etag", "blob_id")  # of the content, by the stores' own names
VERSIONS = (*HASHES, "mtime", "LastModified", "created")  # best first
Keys = str | tuple[str, ...]  # under which a record holds a text, or the values of an example
REQUEST_BYTES = 2 * 2**20  # read-ahead from a remote file; little, as a process may need only one unit

log = logging.getLogger(__name__)


class File(NamedTuple):
    """One input file."""

    url: str
    size: int
    version: str = ""  # changes with the content; "" if the store has none


class Unit(NamedTuple):
    """A piece of the input that one process reads: whole files, or a range of one file.

    The range counts row groups in Parquet and bytes in JSON lines, where a line belongs to
    the unit it starts in. `stop` 0: the whole of `files`.
    """

    files: tuple[File, ...]
    start: int = 0
    stop: int = 0
    bytes: int = 0

    @property
    def name(self) -> str:
        """Where it is, for an error."""
        first, others = self.files[0].url, len(self.files) - 1
        return f"{first} or one of the {others} files after it" if others else first


SEARCHED = (
    f"a folder is searched for {' '.join((*TEXT_SUFFIXES, *KINDS))}, also compressed as .gz or .zst, but not for plain "
    f".json; a file or glob may have any suffix, and `{STDLIB}` is the Python standard library"
)


def list_files(sources: Sequence[str], searched: str = SEARCHED) -> list[File]:
    """The files that the sources (stdlib, folders, files, globs, URLs) name, in a fixed order.

    Raises DataError naming a source without files and what is `searched` for.
    """
    files: dict[str, File] = {}
    for source in sources:
        if not source:  # would mean the working directory
            raise DataError("--source : must not be empty")
        found = _stdlib_files() if source == STDLIB else _expand(source)
        if not found:
            raise DataError(f"--source {source}: no files there; {searched}")
        files.update((file.url, file) for file in found)
    return list(files.values())


def _is_read_from_folder(name: str) -> bool:
    """Whether to read a folder's file. Not plain .json, which in a folder holds settings as often as data."""
    suffix, compression = _suffixes(name)
    return suffix in (*TEXT_SUFFIXES, *KINDS) and (suffix, compression) != (".json", "")


@contextmanager
def failures_of(what: str) -> Iterator[None]:
    """Turn the exceptions of every kind of store and file into DataErrors that begin with `what`."""
    try:
        yield
    except TitaniteError:
        raise
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{what}: {error}") from None
    except Exception as error:
        raise DataError(f"{what}: {type(error).__name__}: {error}") from None


def _expand(source: str) -> list[File]:
    with failures_of(f"--source {source}: cannot be listed"):
        system, path = file_system(source)
        is_local = isinstance(system, LocalFileSystem)
        if is_local:  # resolves links to folders, so a file named in two ways is one; a link to a file stays its own
            folder, name = (path, "") if os.path.isdir(path) else os.path.split(path)
            path = str(Path(os.path.realpath(folder), name))
        details, is_folder = _details(system, path)
        if is_local and is_folder:
            for _ in os.walk(path, onerror=_raise):  # fsspec takes a folder that may not be read for an empty one
                pass
        details = {name: system.info(name) if info.get("islink") else info for name, info in details.items()}
        looked_into = details if is_folder else _linked_folders(system, path)
    for name, info in looked_into.items():
        if info.get("islink") and info["type"] != "file":
            what = "neither a file nor a folder"
            if info["type"] == "directory":
                what = "a folder, which is not followed: name each folder as its own source"
            raise DataError(f"--source {source}: {name} is a link to {what}")
    for info in details.values():
        if info["type"] == "file" and info["size"] is None:
            raise DataError(f"--source {source}: the server does not say how large the file is; download it first")
    read = [
        name
        for name, info in sorted(details.items())
        if info["type"] == "file" and (not is_folder or _is_read_from_folder(name))
    ]
    if is_folder and len(read) < len(details):
        suffixes = Counter("".join(_suffixes(name)) or "no suffix" for name in details.keys() - set(read))
        common = ", ".join(f"{number:,} with {suffix}" for suffix, number in suffixes.most_common(5))
        log.warning("--source %s: files left out: %s (%s)", source, f"{suffixes.total():,}", common)
    if folders := [name for name, info in sorted(details.items()) if info["type"] == "directory"]:  # from a glob
        reached = {str(folder) for name in read for folder in PurePosixPath(name).parents}
        unread = [name for name in folders if name.rstrip("/") not in reached]
        if unread:
            log.warning("--source %s: folders left out: %s, such as %s", source, f"{len(unread):,}", unread[0])
    marks = () if is_local else ("::", "?versionId=") if "s3" in system.protocol else ("::",)
    if odd := [name for name in read if any(mark in name for mark in marks)]:
        raise DataError(
            f"--source {source}: {odd[0]}: cannot be named by a URL, where {' and '.join(marks)} have a special meaning"
        )
    return [_described(name if is_local else system.unstrip_protocol(name), details[name]) for name in read]


def _described(url: str, info: dict[str, Any]) -> File:
    return File(url, info["size"], next((str(info[key]) for key in VERSIONS if info.get(key)), ""))


def _raise(error: OSError) -> None:
    raise error


def _details(system: fsspec.AbstractFileSystem, path: str) -> tuple[dict[str, dict[str, Any]], bool]:
    """File name → details of the files at a path or glob, and whether the path is a folder."""
    try:
        found = system.info(path)  # `isdir` and `exists` would take a refusal for a missing file
    except FileNotFoundError:
        return (system.glob(path, detail=True) if has_magic(path) else {}), False
    is_folder = found["type"] == "directory"
    return (system.find(path, detail=True) if is_folder else {path: found}), is_folder


def _linked_folders(system: fsspec.AbstractFileSystem, pattern: str) -> dict[str, dict[str, Any]]:
    """Links to folders that a shell would enter for this glob and fsspec does not."""
    if not isinstance(system, LocalFileSystem) or os.path.lexists(pattern):
        return {}
    above = [str(folder) for folder in PurePosixPath(pattern).parents] + [pattern] * pattern.endswith("**")
    names = {name for part in above if has_magic(part) for name in system.glob(part)}
    return {name: system.info(name) for name in sorted(names) if os.path.islink(name) and os.path.isdir(name)}


def _stdlib_files() -> list[File]:
    """The .py files of the running Python's standard library, without tests."""
    root = Path(sysconfig.get_path("stdlib"))
    left_out = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    paths = [path for path in root.rglob("*.py") if not left_out & set(path.relative_to(root).parts)]
    system = file_system(str(root))[0]
    return [_described(str(path), system.info(str(path))) for path in sorted(paths)]


def plan_units(files: Sequence[File]) -> list[Unit]:
    """Cut the input into units of UNIT_BYTES or more. Smaller files share a unit, as do text files of any size."""
    unit_bytes = max(UNIT_BYTES, sum(file.size for file in files) // MOST_UNITS)
    units: list[Unit] = []
    group: list[File] = []
    group_bytes = 0
    for file in files:
        kind, compression = kind_of(file.url)
        if kind == "text" or file.size < unit_bytes:
            group.append(file)
            group_bytes += file.size
            if group_bytes >= unit_bytes:
                units.append(Unit(tuple(group), bytes=group_bytes))
                group, group_bytes = [], 0
        elif kind == "parquet":
            units += _row_group_units(file, unit_bytes)
        elif kind == "jsonl" and not compression:
            for start in range(0, file.size, unit_bytes):
                stop = min(start + unit_bytes, file.size)
                units.append(Unit((file,), start, stop, stop - start))
        else:
            units.append(Unit((file,), bytes=file.size))
    if group:
        units.append(Unit(tuple(group), bytes=group_bytes))
    return units


def kind_of(url: str) -> tuple[str, str]:
    """("text" | "jsonl" | "parquet", compression or "") from the file's name."""
    suffix, compression = _suffixes(url)
    return KINDS.get(suffix, "text"), COMPRESSIONS.get(compression, "")


def text_bytes(file: File) -> int:
    """Estimated bytes of text in a file: five times its size if it is Parquet or compressed."""
    kind, compression = kind_of(file.url)
    return file.size * (5 if compression or kind == "parquet" else 1)


def _suffixes(url: str) -> tuple[str, str]:
    """The suffix of a file's name and its compression suffix or "", in lower case."""
    name = urlsplit(url).path if url.startswith(("http://", "https://")) else url
    stem, suffix = os.path.splitext(name.lower())
    return (os.path.splitext(stem)[1], suffix) if suffix in COMPRESSIONS else (suffix, "")


def _open(file: File) -> Any:
    system, path = file_system(file.url)
    return system.open(path, "rb", block_size=REQUEST_BYTES)


def _row_group_units(file: File, unit_bytes: int) -> list[Unit]:
    with failures_of(f"{file.url}: cannot be read"), _open(file) as stream:
        groups = pq.ParquetFile(stream).num_row_groups
    per_unit = max(1, unit_bytes * groups // max(1, file.size))  # some writers make groups of a few megabytes
    starts = range(0, groups, per_unit)
    stops = [min(start + per_unit, groups) for start in starts]
    return [Unit((file,), a, b, file.size * (b - a) // groups) for a, b in zip(starts, stops, strict=True)]


def documents(unit: Unit, keys: Keys) -> Iterator[str]:
    """Yield the texts of a unit in order, or of each example the JSON list of the values under its keys.

    Raises DataError naming file and place.
    """
    for file in unit.files:
        with failures_of(f"{file.url}: cannot be read"), _open(file) as stream:
            yield from _texts(file, stream, unit, keys)
            _check_unchanged(file, stream)


def _check_unchanged(file: File, stream: Any) -> None:
    """Refuse a file that changed since it was listed: units of both versions would mix silently."""
    if "://" in file.url:  # as opened; hashes only, since stores name and format times in several ways
        details = getattr(stream, "details", {})
        changed = file.version and any(str(details[key]) != file.version for key in HASHES if details.get(key))
    else:
        system, path = file_system(file.url)
        changed = _described(file.url, system.info(path)) != file
    if changed:
        raise DataError(f"{file.url}: was changed while it was read; stop what writes to it, and start again")


def pieces(text: str, max_characters: int) -> Iterator[str]:
    """Cut `text` into parts of at most `max_characters`, at line ends where possible. 0: whole."""
    start = 0
    while max_characters and len(text) - start > max_characters:
        stop = text.rfind("\n", start, start + max_characters) + 1 or start + max_characters
        yield text[start:stop]
        start = stop
    yield text[start:]


def _texts(file: File, raw: Any, unit: Unit, keys: Keys) -> Iterator[str]:
    kind, compression = kind_of(file.url)
    stream = raw
    if compression:
        if not file.size:  # even an empty compressed text has a header
            raise DataError(f"{file.url}: is empty, so it is not compressed text")
        stream = pa.CompressedInputStream(pa.PythonFile(raw), compression)
    if compression or kind == "jsonl":
        stream = io.BufferedReader(stream, 2**20)  # a remote file's own readline copies its whole read-ahead
    if kind == "parquet":
        yield from _parquet_texts(file, stream, unit, keys)
    elif kind == "jsonl":
        yield from _json_texts(file, stream, unit, keys)
    elif not isinstance(keys, str):
        raise DataError(f"{file.url}: examples are read from JSON lines and Parquet only")
    else:
        yield _decode(file, stream.read())
    # An empty answer, from the server or a proxy, looks like the end of the file.
    if "://" in file.url and kind != "parquet" and raw.tell() < (unit.stop or file.size):
        raise DataError(f"{file.url}: cannot be read: the server has sent {raw.tell():,} bytes of {file.size:,}")


def _decode(file: File, data: bytes) -> str:
    encoding = "utf-8"
    try:
        if file.url.endswith(".py"):  # may declare an encoding
            encoding = tokenize.detect_encoding(io.BytesIO(data).readline)[0]
        text = data.decode(encoding)
        text.encode()  # unicode_escape, for example, can give half a character
        return text
    except UnicodeDecodeError as error:
        known = _suffixes(file.url)[0] in TEXT_SUFFIXES
        hint = "" if known else f"; all but {' '.join(KINDS)}, also compressed as .gz or .zst, is read as text"
        raise DataError(f"{file.url}: not {encoding} text: {error.reason} at byte {error.start}{hint}") from None
    except (SyntaxError, LookupError, UnicodeError) as error:  # unknown encoding, or not one of text
        raise DataError(f"{file.url}: {error}") from None


def _json_texts(file: File, stream: Any, unit: Unit, keys: Keys) -> Iterator[str]:
    position = unit.start
    if position:
        stream.seek(position - 1)
        position += len(stream.readline()) - 1  # a line that began earlier belongs to the unit before
    while not unit.stop or position < unit.stop:
        line = stream.readline()
        if not line:
            return
        if line.strip():
            yield _json_text(f"{file.url}, line at byte {position}", line, keys)
        position += len(line)


def _json_text(place: str, line: bytes, keys: Keys) -> str:
    if line.lstrip().startswith(b"["):
        raise DataError(f"{place}: a JSON array; make it one object on each line, as `jq -c '.[]'` does")
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:  # RecursionError if nested too deep
        raise DataError(f"{place}: not JSON, one object on each line: {error}") from None
    if not isinstance(record, dict):
        raise DataError(f"{place}: not a JSON object, but {type(record).__name__}")
    text = _text(record, keys, place)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = ascii(text[error.start])[1:-1]
        raise DataError(f"{place}: holds {half}, a lone surrogate, which is not valid text") from None
    return text


def _text(record: dict[str, Any], keys: Keys, place: str) -> str:
    """A record's text, or the JSON list of an example's values. Raises DataError."""
    wanted, option = _wanted(keys)
    for key in wanted:
        if key not in record:
            names = ", ".join(record) or "no keys"
            raise DataError(f"{place}: nothing under {key!r}; it has {names}; choose with {option}")
        if record[key] is None:
            raise DataError(f"{place}: {key!r} is null; leave such records out")
    if not isinstance(keys, str):
        try:
            return json.dumps([record[key] for key in keys], ensure_ascii=False)
        except TypeError as error:
            raise DataError(f"{place}: cannot be written as JSON: {error}") from None
    if not isinstance(record[keys], str):
        raise DataError(f"{place}: {keys!r} holds {repr(record[keys])[:100]}, which is no text")
    return record[keys]


def _wanted(keys: Keys) -> tuple[tuple[str, ...], str]:
    """The keys as a tuple, and the option that chooses them."""
    return ((keys,), "--text-key") if isinstance(keys, str) else (keys, "--example-keys")


def _parquet_texts(file: File, stream: Any, unit: Unit, keys: Keys) -> Iterator[str]:
    table = pq.ParquetFile(stream, page_checksum_verification=True)
    names = table.schema_arrow.names
    wanted, option = _wanted(keys)
    for key in wanted:
        if key not in names:
            raise DataError(f"{file.url}: no column {key!r}; it has {', '.join(names)}; choose with {option}")
        if names.count(key) > 1:
            raise DataError(f"{file.url}: has {names.count(key)} columns {key!r}; rename all but one")
    first = sum(table.metadata.row_group(i).num_rows for i in range(unit.start))
    groups = list(range(unit.start, unit.stop or table.num_row_groups))
    for batch in table.iter_batches(ROWS, row_groups=groups, columns=list(wanted)):
        for number, row in enumerate(_records(batch, file, first), start=first):
            record = {key: _without_nulls(value) for key, value in row.items()}
            yield _text(record, keys, f"{file.url}, row {number}")
        first += len(batch)


def _without_nulls(value: Any) -> Any:
    """Drop keys that hold None: Arrow gives each struct the keys of all, and templates test whether a key exists."""
    if isinstance(value, dict):
        return {key: _without_nulls(part) for key, part in value.items() if part is not None}
    return [_without_nulls(part) for part in value] if isinstance(value, list) else value


def _records(batch: pa.RecordBatch, file: File, first: int) -> list[dict[str, Any]]:
    """The rows of a batch that begins at row `first` of the file. Raises DataError naming a row that is not text."""
    try:
        return batch.to_pylist()
    except UnicodeDecodeError as error:
        if len(batch) > 1:  # find the bad row
            return [row for i in range(len(batch)) for row in _records(batch.slice(i, 1), file, first + i)]
        raise DataError(f"{file.url}, row {first}: not utf-8 text: {error.reason} at byte {error.start}") from None
