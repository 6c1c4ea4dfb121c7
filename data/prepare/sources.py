"""Find the files to prepare, on any file system that fsspec knows. Imports no torch."""

import bz2
import glob
import logging
import lzma
import os
import sysconfig
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import fsspec
import pyarrow as pa
from isal import igzip

from config import TitaniteError
from data.shards import DataError

TEXTS = (".txt", ".md", ".rst", ".tex", ".html", ".py", ".c", ".h", ".cc", ".cpp", ".rs", ".go", ".java", ".js")
LINES = (".jsonl", ".ndjson")
TABLES = {".json": "json", ".parquet": "parquet", ".arrow": "arrow", ".csv": "csv", ".tsv": "tsv"}
KINDS = dict.fromkeys(TEXTS, "text") | dict.fromkeys(LINES, "jsonl") | TABLES
# In a folder these hold settings, labels or token ids as often as texts, so they are read only if they are named.
ONLY_IF_NAMED = (".json", ".arrow", ".csv", ".tsv")
DECOMPRESSORS: dict[str, Callable[[Any], Any]] = {
    ".gz": lambda raw: igzip.IGzipFile(fileobj=raw),  # pyarrow refuses zeros after the end, with which tapes pad
    ".bz2": bz2.BZ2File,
    ".xz": lzma.LZMAFile,
    ".zst": lambda raw: pa.CompressedInputStream(pa.PythonFile(raw), "zstd"),
}
VERSIONS = ("ETag", "etag", "blob_id", "LastModified", "created")  # what the stores call them, best first
REQUEST_BYTES = 2 * 2**20  # read-ahead from a remote file; little, as a process may need only one unit

log = logging.getLogger(__name__)


class File(NamedTuple):
    """One input file."""

    url: str
    size: int
    version: str = ""  # changes with the content; "" if the store has none


@contextmanager
def failures_of(what: str) -> Iterator[None]:
    """Turn the exceptions of every kind of store and file into DataErrors that begin with `what`."""
    try:
        yield
    except TitaniteError:
        raise
    except Exception as error:
        said = " ".join(str(error).split())
        if "requires too much memory" in said:  # zstd's words for a long window
            said += "; compress it again with zstd --long=27 or less"
        raise DataError(f"{what}: {type(error).__name__}: {said}") from None


def list_files(sources: Sequence[str]) -> list[File]:
    """The files of stdlib, folders, files, globs and URLs, each once, in a fixed order. Raises DataError if none."""
    files: dict[str, File] = {}  # by what identifies them
    for source in sources:
        with failures_of(f"--source {source}: cannot be listed"):
            found = sorted(_find(source), key=itemgetter(1))
        if not found:
            kinds = f"{' '.join(KINDS)}, also with {' '.join(DECOMPRESSORS)}, but not for plain"
            kinds += f" {' '.join(ONLY_IF_NAMED)}; pipes and standard input are not read"
            raise DataError(f"--source {source}: no files there; a folder is searched for {kinds}")
        for key, file in found:
            files.setdefault(key, file)
    return sorted(files.values())


def has_keys(file: File) -> bool:
    """Whether the file holds records with keys, not plain text."""
    return kind_of(file.url)[0] not in ("text", "other")


def kind_of(url: str) -> tuple[str, str]:
    """(a kind of KINDS, or "other", which is read as text; a suffix of DECOMPRESSORS or "") from the file's name."""
    name = url.partition("?")[0] if "://" in url else url
    stem, suffix = os.path.splitext(name.lower())
    if suffix not in DECOMPRESSORS:
        return KINDS.get(suffix, "other"), ""
    return KINDS.get(os.path.splitext(stem)[1], "other"), suffix


def open_file(file: File) -> Any:
    if "://" not in file.url:
        return open(file.url, "rb")
    system, path = _file_system(file.url)
    return system.open(path, "rb", block_size=REQUEST_BYTES)


def decompressed(file: File, raw: Any) -> Any:
    """What an open file holds, as a stream."""
    suffix = kind_of(file.url)[1]
    if suffix:
        return DECOMPRESSORS[suffix](raw)
    return raw


def check_end(file: File, raw: Any, stop: int) -> None:
    """Raises DataError if a file ended early: an empty answer, from the server or a proxy, looks like its end."""
    if "://" in file.url and raw.tell() < stop:
        raise DataError(f"{file.url}: cannot be read: the server has sent {raw.tell():,} bytes of {file.size:,}")


# ---------------------------------------------------------------- sources of every kind


def _find(source: str) -> Iterator[tuple[str, File]]:
    """Yield (what identifies the file, file) of a source."""
    if source == "stdlib":
        return _stdlib_files()
    if "://" in source:
        return _remote_files(source)
    return _local_files(source)


def _stdlib_files() -> Iterator[tuple[str, File]]:
    """Yield the .py files of Python's standard library, without tests."""
    root = Path(sysconfig.get_path("stdlib"))
    left_out = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    for path in root.rglob("*.py"):
        if not left_out & set(path.relative_to(root).parts):
            yield str(path), _described(str(path))


def _local_files(source: str) -> Iterator[tuple[str, File]]:
    """Yield (identity, file) of a path or glob. Two names of a file, such as a link, have the same identity."""
    matches = [source] if os.path.exists(source) else glob.glob(source, recursive=True)
    for match in matches:
        names = [match]
        if os.path.isdir(match):
            names = _read_from_folder(match, list(_names_below(match)))
        for name in names:
            if os.path.isfile(name) or not os.path.exists(name):  # no pipe; a broken link is an error
                yield os.path.realpath(name), _described(os.path.abspath(name))


def _described(path: str) -> File:
    about = os.stat(path)
    return File(path, about.st_size, str(about.st_mtime_ns))


def _names_below(top: str) -> Iterator[str]:
    """Yield the files below a folder, and the folders left out: hidden ones, and links, which may lead back."""
    for folder, below, names in os.walk(top, onerror=_raise):
        left_out = [name for name in below if name.startswith(".") or os.path.islink(f"{folder}/{name}")]
        below[:] = set(below).difference(left_out)
        for name in names + left_out:
            yield os.path.join(folder, name)


def _raise(error: OSError) -> None:
    raise error


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


def _read_from_folder(folder: str, names: Collection[str]) -> list[str]:
    """The files of a folder to read. What is left out is counted."""
    read = [name for name in names if _is_read(name.removeprefix(folder))]
    left_out = set(names).difference(read)
    if left_out:
        which = f"{len(left_out)} left out that are hidden, linked folders or of other kinds"
        log.warning(f"--source {folder}: {which}, such as {min(left_out)}")
    return read


def _is_read(name: str) -> bool:
    """Whether a file is read if its folder is given."""
    is_hidden = "/." in f"/{name.lstrip('/')}"
    return not is_hidden and kind_of(name)[0] != "other" and not name.lower().endswith(ONLY_IF_NAMED)
