"""Files with one JSON record per line, to which every start of a run appends; atomic writes.

A kill or a full disk may cut the last line. A cut line counts as never written; a whole one without a line end counts.
Imports no torch.
"""

import argparse
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO, Any, TypeVar

from config import LOCAL, ConfigError, TitaniteError, file_errors, is_form
from storage.errors import passing_errors, retry

T = TypeVar("T")
RETRY_SECONDS = 60  # for trouble of a file system to pass


def open_records(path: Path) -> IO[str]:
    """Open the file to append lines. Ends the last line first, or removes it if it is cut: the next one begins anew."""
    if path.is_file():
        content = path.read_bytes()
        last = content[content.rfind(b"\n") + 1 :]
        if _is_whole(last):
            path.write_bytes(content + b"\n")
        elif last:
            os.truncate(path, len(content) - len(last))
    return open(path, "a", encoding="utf-8")


def append_record(file: IO[str], record: Mapping[str, Any]) -> None:
    """Write a line and flush it. Trouble of the file system that passes is waited for. Raises OSError, OutageError."""
    file.write(json.dumps(record) + "\n")
    retry(partial(_flush, file), RETRY_SECONDS)  # a flush that failed keeps the rest of its bytes for the next one


def _flush(file: IO[str]) -> None:
    with passing_errors(file.name):
        file.flush()


def _is_whole(line: bytes) -> bool:
    """Whether a line without an end is a whole record."""
    try:
        json.loads(line)
    except ValueError:
        return False
    return True


@contextmanager
def written_whole(path: Path, temporary: Path | None = None) -> Iterator[IO[bytes]]:
    """Create or replace a file. After a kill, a full disk or a power cut, either the old or the new file is whole.

    Several processes may write it if each names a `temporary` file of its own, on the same file system.
    """
    temporary = temporary or path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_atomically(path: Path, data: bytes | memoryview) -> None:
    """Create or replace a file as `written_whole` does."""
    with written_whole(path) as file:
        file.write(data)


def output_path(text: str) -> Path:
    """argparse type for an `--output`."""
    if not text or not is_form(text, LOCAL):
        raise argparse.ArgumentTypeError(f"{text}: must be {LOCAL.description}")
    return Path(text)


def read_records(path: Path) -> list[dict[str, Any]]:
    """The records so far, [] if there is no file. Raises ValueError for a line that is not JSON."""
    if not path.is_file():
        return []
    *lines, last = path.read_bytes().split(b"\n")
    if last and _is_whole(last):
        lines.append(last)
    return [json.loads(line) for line in lines if line.strip()]


def read_lines(file: Path, needed: str, record_of: Callable[[Any], T]) -> list[T]:
    """`record_of` the JSON of every line of a user's file. Raises ConfigError naming the line and what is `needed`."""
    records = []
    with file_errors(), file.open("rb") as lines:  # as bytes, since JSON may hold other line ends
        for number, line in enumerate(lines, start=1):
            try:
                records.append(record_of(json.loads(line)))
            except TitaniteError as error:
                raise ConfigError(f"{file}, line {number}: {error}") from None
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise ConfigError(f"{file}, line {number}: must be an object with {needed}: {error!r}") from None
    if not records:
        raise ConfigError(f"{file}: holds no line")
    return records
