"""Read documents from text, JSON lines and Parquet, on any file system that fsspec knows. Imports no torch.

The input is cut into units, each read by one process. Units depend only on the input, not on the number of processes.
"""

import glob
import io
import json
import logging
import os
import sysconfig
from collections.abc import Collection, Iterator, Sequence
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

log = logging.getLogger(__name__)


class File(NamedTuple):
    """One input file."""

    url: str
    size: int
    version: str = ""  # changes with the content; "" if the store has none


class Unit(NamedTuple):
    """A piece of the input that one process reads: whole files, or a range of one file."""

    files: tuple[File, ...]
    start: int = 0  # Parquet: row groups; JSON lines: bytes, and a line belongs to the unit it starts in
    stop: int = 0  # 0: whole files
    bytes: int = 0


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
    files: dict[str, File] = {}
    for source in sources:
        with failures_of(f"--source {source}: cannot be listed"):
            find = _stdlib_files if source == "stdlib" else _remote_files if "://" in source else _local_files
            found = sorted(find(source), reverse=True)  # of a file's names, the first counts
        if not found:
            kinds = f"{' '.join(KINDS)}, also with .gz or .zst, but not for plain .json"
            raise DataError(f"--source {source}: no files there; a folder is searched for {kinds}")
        files |= dict(found)
    return sorted(files.values())


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


def plan_units(files: Sequence[File]) -> list[Unit]:
    """Cut the input into units of UNIT_BYTES or more. Smaller files share a unit, as do text files of any size."""
    unit_bytes = max(UNIT_BYTES, sum(file.size for file in files) // MOST_UNITS)
    units: list[Unit] = []
    group: list[File] = []
    size = 0  # of the group
    for file in files:
        kind, compression = kind_of(file.url)
        if kind in ("text", "other") or file.size < unit_bytes:
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
    return [*units, Unit(tuple(group), bytes=size)] if group else units


def kind_of(url: str) -> tuple[str, str]:
    """("text" | "jsonl" | "parquet" | "other", read as text; compression or "") from the file's name."""
    name = url.partition("?")[0] if "://" in url else url
    stem, suffix = os.path.splitext(name.lower())
    if compression := COMPRESSIONS.get(suffix, ""):
        suffix = os.path.splitext(stem)[1]
    return KINDS.get(suffix, "other"), compression


def documents(unit: Unit, keys: Sequence[str], is_text: bool = True) -> Iterator[str]:
    """Yield the texts of a unit, or without `is_text` the JSON list of each example's values. Raises DataError."""
    for file in unit.files:
        with failures_of(f"{file.url}: cannot be read"), _open(file) as stream:
            for place, record in _records(file, stream, unit, keys):
                values = [record.get(key) for key in keys]
                if None in values or (is_text and not isinstance(values[0], str)):
                    names, what = ", ".join(record), "text" if is_text else "value"
                    raise DataError(f"{place}: no {what} under {','.join(keys)!r}; it has {names}; choose with --keys")
                text = str(values[0]) if is_text else json.dumps(values, ensure_ascii=False)
                text.encode()  # fails if it holds half a character, as JSON can
                yield text


def _open(file: File) -> Any:
    if "://" not in file.url:
        return open(file.url, "rb")
    system, path = _file_system(file.url)
    return system.open(path, "rb", block_size=REQUEST_BYTES)


def _records(file: File, raw: Any, unit: Unit, keys: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (place, record) of everything in a unit's part of a file. A text file is one record."""
    kind, compression = kind_of(file.url)
    stream = pa.CompressedInputStream(pa.PythonFile(raw), "zstd") if compression == "zstd" else raw
    if compression == "gzip":  # pyarrow refuses zeros after the end, with which tapes and block devices pad
        stream = igzip.IGzipFile(fileobj=raw)
    if kind == "parquet":
        yield from _parquet_records(file, stream, unit, keys)
    elif kind == "jsonl":  # buffered, since a remote file's own readline copies its whole read-ahead
        yield from _json_records(file, io.BufferedReader(stream, 2**20), unit)
    else:
        yield file.url, {keys[0]: stream.read().decode("utf-8-sig")}
    # An empty answer, from the server or a proxy, looks like the end of the file.
    if kind != "parquet" and "://" in file.url and raw.tell() < (unit.stop or file.size):
        raise DataError(f"{file.url}: cannot be read: the server has sent {raw.tell():,} bytes of {file.size:,}")


def _json_records(file: File, stream: Any, unit: Unit) -> Iterator[tuple[str, dict[str, Any]]]:
    position = unit.start
    if position:
        stream.seek(position - 1)
        position += len(stream.readline()) - 1  # a line that began earlier belongs to the unit before
    for line in stream:
        if unit.stop and position >= unit.stop:
            return
        if line.strip():
            place = f"{file.url}, line at byte {position}"
            try:
                record = json.loads(line)
            except ValueError as error:
                record = error
            if not isinstance(record, dict):
                raise DataError(f"{place}: must be a JSON object (`jq -c '.[]'` splits an array): {repr(record)[:100]}")
            yield place, record
        position += len(line)


def _parquet_records(file: File, stream: Any, unit: Unit, keys: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    table = pq.ParquetFile(stream, page_checksum_verification=True)
    names = table.schema_arrow.names
    first = sum(table.metadata.row_group(i).num_rows for i in range(unit.start))
    groups = range(unit.start, unit.stop or table.num_row_groups)
    columns = list(keys) if set(keys) <= set(names) else names  # all, for the error to show
    batches = table.iter_batches(ROWS, row_groups=list(groups), columns=columns)
    for number, row in enumerate(chain.from_iterable(batch.to_pylist() for batch in batches), start=first):
        yield f"{file.url}, row {number}", _without_nulls(row)


def _without_nulls(value: Any) -> Any:
    """Drop keys that hold None: Arrow gives each struct the keys of all, and templates test whether a key exists."""
    if isinstance(value, dict):
        return {key: _without_nulls(part) for key, part in value.items() if part is not None}
    return [_without_nulls(part) for part in value] if isinstance(value, list) else value
