"""Files of one JSON record a line, added to by every start of a run, and files replaced as a whole. Imports no torch.

A kill or a full disk may cut the last line: it counts as never written.
"""

import argparse
import errno
import json
import mmap
import os
import tempfile
from pathlib import Path
from typing import IO, Any

from config import file_errors, misplaced


def open_records(path: Path) -> IO[str]:
    """The file, to add lines to. What was cut off at its end goes first: the next line would be glued to it."""
    if path.is_file() and path.stat().st_size:
        with open(path, "r+b") as file:
            with mmap.mmap(file.fileno(), 0) as content:
                whole = content.rfind(b"\n") + 1
            file.truncate(whole)
    return open(path, "a", encoding="utf-8")


def write_atomically(path: Path, data: bytes | memoryview) -> None:
    """Write a file, or put it in the place of another: a kill, a full disk or a power cut leaves one of them whole."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def output_path(text: str) -> Path:
    """What an `--output` names, for argparse."""
    if mistake := misplaced(text):
        raise argparse.ArgumentTypeError(f"{text}: {mistake}")
    return Path(text)


def output_file(text: str) -> Path:
    """The file that an `--output` names, with its folder made: argparse finds out before the work, not after it."""
    path = output_path(text)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{path}: its folder cannot be made: {error.strerror}") from None
    try:
        if path.is_dir():
            raise argparse.ArgumentTypeError(f"{path}: is a folder, must be a file")
        if path.exists():
            path.open("ab").close()
        if path.is_file() or not path.exists():
            tempfile.TemporaryFile(dir=path.resolve().parent).close()
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{path}: cannot be written: {error.strerror}") from None
    return path


def write_output(path: Path, text: str) -> None:
    """Write the file of an `--output`: as a whole, unless it is a pipe or a device. Raises TitaniteError."""
    with file_errors(path):
        if path.is_file() or not path.exists():
            try:
                write_atomically(path.resolve(), text.encode())
                return
            except OSError as error:
                if error.errno != errno.EBUSY:  # a file that is mounted by itself, into a container say
                    raise
        path.write_text(text, encoding="utf-8")


def read_records(path: Path) -> list[dict[str, Any]]:
    """The records so far; none if there is no such file. Raises ValueError for a line that is not JSON."""
    lines = path.read_text(encoding="utf-8").split("\n")[:-1] if path.is_file() else []
    return [json.loads(line) for line in lines]
