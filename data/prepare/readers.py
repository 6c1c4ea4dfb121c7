"""Read documents from text, JSON lines and tables, unit by unit. Imports no torch.

A unit is what one process reads: small files together, or a part of a large one. Units depend only on the input, not on
the number of processes.
"""

import codecs
import csv
import io
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from data.chat import read_conversation, without_nulls
from data.prepare.sources import File, check_end, decompressed, failures_of, has_keys, kind_of, open_file
from data.prepare.tuning import BESIDE, read_pair
from data.shards import DataError

# Kinds whose readers can begin within a file, and what a unit counts in. Readers of all others get whole files.
DIVISIBLE = {"jsonl": "bytes", "parquet": "row groups"}
POSITIONS = {"text": "document at byte", "other": "document at byte", "jsonl": "line at byte", "json": "record"}
DELIMITERS = {"csv": ",", "tsv": "\t"}
UNIT_BYTES = 4 * 2**20
MOST_UNITS = 10_000  # about; a larger input gets larger units
ROWS = 64  # of a table converted to Python at once: more cost less per row, fewer take less memory
READ_BYTES = 2**20
ARROW_FILE = b"ARROW1"  # how one begins
PARQUET_FILE = b"PAR1"
HEADER_BYTES = 1024  # the longest that a kind of file has

Located = Iterator[tuple[str, Any]]  # (place in the input, what is there)
Records = Iterator[tuple[int, Any]]  # (byte or row in the file; text, a record or, if it is bad, an exception)


class Unit(NamedTuple):
    """A piece of the input that one process reads: whole files, or a range of one file."""

    files: tuple[File, ...]
    start: int = 0  # see DIVISIBLE; a line belongs to the unit in which the line end before it is
    stop: int = 0  # 0: whole files


@dataclass
class Tally:
    """What is counted while documents are read and tokenised."""

    skip_bad: int = 0
    bad: list[str] = field(default_factory=list)  # place and reason of each bad record
    counts: Counter[str] = field(default_factory=Counter)

    def reject(self, place: str, reason: str) -> None:
        """Note a bad record. Raises DataError if it is one too many."""
        self.bad.append(" ".join(f"{place}: {reason}".split()))
        if len(self.bad) > self.skip_bad:
            raise DataError(f"{self.bad[-1]} (--skip-bad {self.skip_bad} leaves out no more)")


def plan_units(files: Sequence[File], whole: bool = False) -> list[Unit]:
    """Cut the input into units of UNIT_BYTES or more. Smaller files, and texts, share a unit. `whole`: cut no file."""
    unit_bytes = max(UNIT_BYTES, sum(file.size for file in files) // MOST_UNITS)
    units: list[Unit] = []
    group: list[File] = []
    size = 0  # of the group
    for file in files:
        if whole or not has_keys(file) or file.size < unit_bytes:
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
    return units


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


def content_kind(file: File) -> str:
    """The kind of KINDS, or "other". A .json file is of kind "json" if it holds an array, otherwise of JSON lines."""
    kind = kind_of(file.url)[0]
    if kind != "json":
        return kind
    with failures_of(f"{file.url}: cannot be read"), open_file(file) as raw:
        beginning = decompressed(file, raw).read(READ_BYTES)
    return "json" if beginning.removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"[") else "jsonl"


def documents(
    unit: Unit, keys: Sequence[str] = ("text",), format: str = "text", separator: str = "", tally: Tally | None = None
) -> Located:
    """Yield (place, text) of a unit's documents; the text of an example is the JSON list of its values.

    Raises DataError for a file that cannot be read, and for bad records beyond those that `tally` may leave out.
    """
    tally = tally or Tally()
    columns = [*keys, *BESIDE.get(format, ())]
    for file in unit.files:
        kind = content_kind(file)
        with failures_of(f"{file.url}: cannot be read"), open_file(file) as stream:
            for position, record in _records(file, kind, stream, unit, columns, separator):
                place = file.url
                if separator or has_keys(file):
                    place += f", {POSITIONS.get(kind, 'row')} {position}"
                try:
                    text = _text(record, keys, format)
                except json.JSONDecodeError as error:
                    tally.reject(place, f"must be JSON: {error}")
                except (ValueError, TypeError, RecursionError, DataError) as error:
                    tally.reject(place, str(error))
                else:
                    yield place, text


def _text(record: Any, keys: Sequence[str], format: str) -> str:
    """The text of a record, or its values as JSON. Raises what is wrong with it."""
    if isinstance(record, Exception):
        raise record
    if isinstance(record, str):
        return record
    if not isinstance(record, dict):
        raise DataError(f"must be a JSON object, or a .json file must be an array of them: {repr(record)[:100]}")
    if format == "text":
        text = record.get(keys[0])
        if isinstance(text, bytes):  # of a column of binary type
            text = text.decode()
        if not isinstance(text, str):
            there = f"it has {', '.join(record)}; choose with --keys, or see --format"
            raise DataError(f"no text under {keys[0]!r}; {there}")
    else:
        values = read_conversation(record, keys[0]) if format == "chat" else read_pair(record, keys)
        text = json.dumps([value for value in values if value is not None], ensure_ascii=False)
    text.encode()  # fails if it holds half a character, as JSON can
    return text


# ---------------------------------------------------------------- records of each kind of file


def _records(file: File, kind: str, raw: Any, unit: Unit, columns: Sequence[str], separator: str) -> Records:
    """Yield (position, record) of everything in a unit's part of a file. Only DIVISIBLE kinds have a part to mind."""
    stream = decompressed(file, raw)
    if kind in ("parquet", "arrow"):
        yield from _table_records(stream, unit, columns)
    elif kind in DELIMITERS:
        yield from _csv_records(stream, DELIMITERS[kind])
    elif kind == "json":
        yield from enumerate(json.loads(stream.read()))
    elif kind == "jsonl":
        yield from _json_lines(stream, unit)
    elif kind in ("text", "other"):
        yield from _texts(stream.read().removeprefix(codecs.BOM_UTF8), separator)
    else:
        raise DataError(f"{file.url}: KINDS has {kind!r}, which no branch of _records in data/prepare/readers.py reads")
    if kind not in ("parquet", "arrow"):
        check_end(file, raw, unit.stop or file.size)


def _json_lines(stream: Any, unit: Unit) -> Records:
    """Yield (byte, record) of the lines after the line ends in the unit; the first unit also has the first line."""
    position = unit.start
    if unit.start:
        stream.seek(unit.start)
    lines = io.BufferedReader(stream, READ_BYTES)
    if unit.start:
        position += len(lines.readline())
    while not unit.stop or position - 1 < unit.stop:
        line = lines.readline()
        if not line:
            return
        if position == 0:
            line = line.removeprefix(codecs.BOM_UTF8)
        if line.strip():
            yield position, _parsed(line)
        position += len(line)


def _parsed(line: bytes) -> Any:
    """The JSON of a line, or what is wrong with it."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        return error


def _texts(content: bytes, separator: str) -> Records:
    """Yield (byte, text) of what separators divide, as `bytes.split` does, without blank ones; "": of the whole."""
    if not separator:
        yield 0, _decoded(content)
        return
    lines = separator.replace("\r\n", "\n").encode().split(b"\n")  # a line end in it stands for LF and CRLF
    start = 0
    for match in re.finditer(b"\r?\n".join(map(re.escape, lines)), content):
        if content[start : match.start()].strip():
            yield start, _decoded(content[start : match.start()])
        start = match.end()
    if content[start:].strip():
        yield start, _decoded(content[start:])


def _decoded(content: bytes) -> str | ValueError:
    try:
        return content.decode()
    except ValueError as error:
        return error


def _table_records(stream: Any, unit: Unit, columns: Sequence[str]) -> Records:
    """Yield (row, record) of a table. In columns that are not read the record has None."""

    def choose(schema: pa.Schema) -> list[str]:
        return [name for name in schema.names if name in columns]

    for first, names, batch in table_batches(stream, unit, choose):
        for number, row in enumerate(batch.to_pylist(), first):
            # A table gives each object the keys of all; templates would print the nulls.
            yield number, dict.fromkeys(names) | without_nulls(row)


def table_batches(
    stream: Any, unit: Unit, choose: Callable[[pa.Schema], list[str]]
) -> Iterator[tuple[int, list[str], pa.RecordBatch]]:
    """Yield (number of its first row, names of all columns, record batch) of a unit's part of Parquet or Arrow.

    A batch has the columns that `choose` names. Raises ValueError for an Arrow stream.
    """
    first = 0
    header = header_of(stream)
    if header.startswith(PARQUET_FILE):
        parquet = pq.ParquetFile(stream, page_checksum_verification=True)
        schema = parquet.schema_arrow
        first = sum(parquet.metadata.row_group(i).num_rows for i in range(unit.start))
        groups = list(range(unit.start, unit.stop or parquet.num_row_groups))
        batches = parquet.iter_batches(ROWS, row_groups=groups, columns=choose(schema))
    elif header.startswith(ARROW_FILE):
        arrow = pa.ipc.open_file(stream)
        schema = arrow.schema
        batches = _slices(arrow, choose(schema))
    else:
        raise ValueError("no Arrow file or Parquet; an Arrow stream becomes Parquet by Dataset.to_parquet")
    for batch in batches:
        yield first, schema.names, batch
        first += len(batch)


def _slices(arrow: pa.ipc.RecordBatchFileReader, columns: list[str]) -> Iterator[pa.RecordBatch]:
    for number in range(arrow.num_record_batches):
        batch = arrow.get_batch(number).select(columns)
        for start in range(0, len(batch), ROWS):
            yield batch.slice(start, ROWS)


def header_of(stream: Any) -> Any:
    """The first HEADER_BYTES of a file."""
    header = stream.read(HEADER_BYTES)
    stream.seek(0)
    return header


def _csv_records(stream: Any, delimiter: str) -> Records:
    csv.field_size_limit(2**31 - 1)  # otherwise 128 KiB, and texts are longer
    lines = io.TextIOWrapper(io.BufferedReader(stream, READ_BYTES), "utf-8-sig", "surrogateescape", newline="")
    reader = csv.DictReader(lines, delimiter=delimiter, strict=True)
    try:
        for number, row in enumerate(reader):
            if None in row:  # the key of what is too much
                yield number, ValueError("has more cells than the first line names")
            else:
                yield number, row
    except csv.Error as error:
        raise ValueError(f"line {reader.reader.line_num}: {error}") from None
