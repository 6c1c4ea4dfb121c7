"""Stores for the bytes of checkpoints: a local folder or an object store, behind the same few operations.

Names are relative to the store and use `/`. A name is written once and never overwritten.
"""

import errno
import fcntl
import io
import os
import shutil
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import IO, Any, Protocol, cast

import numpy as np

from config import Checkpoint, Config, ConfigError, TitaniteError

O_DIRECT = getattr(os, "O_DIRECT", 0)  # Linux only
DIRECT_BYTES = 8 << 20  # per write
ALIGNMENT = 4096  # of memory, offset and size in direct reads and writes


class CheckpointError(TitaniteError):
    """A checkpoint cannot be written, or does not fit what it is loaded into."""


class DamagedError(CheckpointError):
    """Bytes of a checkpoint are missing or differ from those written."""


def check_checkpoint(config: Config) -> None:
    """Raises ConfigError for checkpoints that are asked for and switched off, and for a copy onto themselves."""
    settings = config.checkpoint
    for name in ("save_initial", "save_model", "upload"):
        if getattr(settings, name) and not settings.enable:
            raise ConfigError(f"checkpoint.{name} is set and needs checkpoint.enable = true")
    first = settings.folder or (config.run.folder and f"{config.run.folder}/checkpoints")
    if settings.upload and first and Path(settings.upload).resolve() == Path(first).resolve():
        raise ConfigError(f"checkpoint.upload = {settings.upload!r}: is checkpoint.folder itself; name a second place")


class Store(Protocol):
    """The operations that checkpoints need of a place."""

    url: str
    read_threads: int  # number of parallel reads that it serves well

    def sizes(self, prefix: str = "") -> dict[str, int]:
        """Name → bytes of every file under the folder `prefix`; {} if there is none."""

    def folders(self) -> set[str]:
        """Names of the top-level folders, which are far fewer than the files."""

    def read(self, name: str) -> bytes:
        """Read all of a small file. Raises DamagedError if it does not exist."""

    def read_into(self, name: str, offset: int, view: memoryview, alone: bool = False) -> None:
        """Fill `view` from `offset`. Raises DamagedError if the file is missing or too short.

        `alone`: no other process reads the same bytes, so they need not enter the page cache.
        """

    def create(self, name: str) -> AbstractContextManager[IO[bytes]]:
        """A stream to write. The file is durable and visible once the context ends well, else gone."""

    def put(self, name: str, data: bytes) -> None:
        """Write a small file atomically and durably."""

    def check_writable(self) -> None:
        """Raise CheckpointError if nothing can be written. Leaves nothing behind."""

    def remove(self, names: list[str]) -> None:
        """Remove files, the first before all others. Ignores those already gone."""

    def abort_uploads(self, older_than_seconds: float) -> None:
        """Drop unfinished uploads, which no other method can see."""


class LocalStore:
    """A folder of a file system."""

    read_threads = 1  # in order, as disks prefer: on a virtual machine's disk two threads took longer

    def __init__(self, folder: str | Path) -> None:
        self.url = str(folder)
        self.folder = Path(folder)

    def sizes(self, prefix: str = "") -> dict[str, int]:
        sizes = {}
        with _reported(join(self.url, prefix)):
            for folder, folders, names in os.walk(self.folder / prefix, onerror=_raise_unless_gone, followlinks=True):
                folders[:] = [name for name in folders if name != "lost+found"]  # root's, at the top of a file system
                for file in (Path(folder) / name for name in names):
                    with suppress(FileNotFoundError):  # removed since it was listed
                        sizes[file.relative_to(self.folder).as_posix()] = file.stat().st_size
        return sizes

    def read(self, name: str) -> bytes:
        with _reported(f"{self.url}/{name}"):
            return (self.folder / name).read_bytes()

    def read_into(self, name: str, offset: int, view: memoryview, alone: bool = False) -> None:
        start, end = -offset % ALIGNMENT, len(view) - (offset + len(view)) % ALIGNMENT  # bounds of the whole blocks
        if not alone or start >= end or (np.frombuffer(view, np.uint8).ctypes.data - offset) % ALIGNMENT:
            start = end = 0
        with _reported(f"{self.url}/{name}"), open(self.folder / name, "rb", buffering=0) as file:
            for first, last, direct in ((0, start, False), (start, end, True), (end, len(view), False)):
                file.seek(offset + first)
                while first < last:
                    count = _transfer(file.fileno(), direct, file.readinto, view[first:last])
                    if not count:
                        missing = f"ends at byte {offset + first}, {len(view) - first} bytes missing"
                        raise DamagedError(f"{self.url}/{name}: {missing}")
                    first += count

    @contextmanager
    def create(self, name: str) -> Iterator[IO[bytes]]:
        path = self.folder / name
        with _reported(f"{self.url}/{name}"):
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(path, "xb", buffering=0) as file:
                try:
                    writer = _DirectWriter(file.fileno())
                    yield cast(IO[bytes], writer)
                    writer.finish()
                except BaseException:
                    path.unlink(missing_ok=True)
                    raise

    def put(self, name: str, data: bytes) -> None:
        path = self.folder / name
        temporary = f"{name}.tmp"
        with self.create(temporary) as file:
            file.write(data)
        with _reported(f"{self.url}/{name}"):
            os.replace(self.folder / temporary, path)
            for folder in (path.parent, path.parent.parent):  # the names must survive a power cut, too
                descriptor = os.open(folder, os.O_RDONLY)
                os.fsync(descriptor)
                os.close(descriptor)

    def check_writable(self) -> None:
        with _reported(self.url):
            for folder in (self.folder, *self.folder.parents):  # in the first that exists
                try:
                    with NamedTemporaryFile(dir=folder, prefix=".probe-"):
                        return
                except FileNotFoundError:
                    if folder.is_symlink():  # no folder can be made there
                        raise

    def remove(self, names: list[str]) -> None:
        parents = {(self.folder / name).parent for name in names} - {self.folder}
        links = {parent for parent in parents if parent.is_symlink()}  # their targets are not ours to remove
        for path in (self.folder / name for name in names):
            if path.parent not in links:
                with _reported(str(path)):
                    path.unlink(missing_ok=True)
        for parent in parents:
            with suppress(OSError):  # it still holds files, or another rank of the node was faster
                parent.unlink() if parent in links else parent.rmdir()

    def abort_uploads(self, older_than_seconds: float) -> None:
        pass  # here unfinished files are ordinary files

    def folders(self) -> set[str]:
        with _reported(self.url):
            try:
                return {entry.name for entry in os.scandir(self.folder) if entry.is_dir()}
            except FileNotFoundError:
                return set()

    def remove_empty(self, names: Collection[str]) -> None:
        """Remove those of these folders that are empty: a killed save may leave one."""
        for name in names:
            with suppress(OSError):
                (self.folder / name).rmdir()

    def touch(self, name: str) -> None:
        """Make an empty file."""
        with _reported(f"{self.url}/{name}"):
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / name).touch()

    def has(self, name: str) -> bool:
        """Whether a file exists."""
        return (self.folder / name).exists()

    def probes(self) -> list[str]:
        """The top-level files that starts have made to see who shares the disk."""
        with _reported(self.url):
            return [name for name in os.listdir(self.folder) if name.startswith(".probe-")]

    def free_bytes(self) -> int:
        """Bytes free on the disk."""
        with _reported(self.url):
            self.folder.mkdir(parents=True, exist_ok=True)
            return shutil.disk_usage(self.folder).free


class _DirectWriter(io.RawIOBase):
    """Collects bytes and writes them past the page cache (O_DIRECT) if the file system can.

    Gigabytes in the page cache would push out the training data and cost the kernel time, though a checkpoint is rarely
    read soon.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        room = np.empty(DIRECT_BYTES + ALIGNMENT, np.uint8)
        start = -room.ctypes.data % ALIGNMENT
        self.buffer = room[start : start + DIRECT_BYTES]
        self.filled = 0

    def write(self, data: Any) -> int:
        bytes_ = np.frombuffer(data, np.uint8)
        done = 0
        while done < len(bytes_):
            taken = min(len(bytes_) - done, DIRECT_BYTES - self.filled)
            self.buffer[self.filled : self.filled + taken] = bytes_[done : done + taken]
            self.filled += taken
            done += taken
            if self.filled == DIRECT_BYTES:
                self._write_out(direct=True)
        return len(bytes_)

    def finish(self) -> None:
        """Write the rest. Everything is durable once this returns."""
        self._write_out(direct=False)
        os.fsync(self.descriptor)

    def _write_out(self, direct: bool) -> None:
        rest = self.buffer[: self.filled].data
        while rest:
            rest = rest[_transfer(self.descriptor, direct, os.write, self.descriptor, rest) :]
        self.filled = 0


def _transfer(descriptor: int, direct: bool, move: Callable[..., int], *arguments: Any) -> int:
    """The bytes that `move` reads or writes, past the page cache if `direct` and the file system can."""
    _set_direct(descriptor, direct)
    try:
        return move(*arguments)
    except OSError as error:
        if error.errno != errno.EINVAL or not direct:
            raise
        _set_direct(descriptor, False)
        return move(*arguments)


def _set_direct(descriptor: int, direct: bool) -> None:
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    with suppress(OSError):  # a file system without O_DIRECT goes through the page cache
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | O_DIRECT if direct else flags & ~O_DIRECT)


def open_store(url: str | Path, settings: Checkpoint | None = None) -> Store:
    """The store at a path or `s3://bucket/prefix`, with the waits of `settings` (None: defaults)."""
    scheme, separator, _ = str(url).partition("://")
    if not scheme or (separator and scheme != "s3"):
        raise CheckpointError(f"{str(url)!r}: must be a folder or s3://bucket/prefix")
    if not separator:
        return LocalStore(url)
    from checkpoint.s3 import S3Store  # here, since it costs a second to import

    return S3Store(str(url), settings or Checkpoint())


def join(url: str | Path, name: str) -> str:
    """`name` inside the folder `url`."""
    return f"{str(url).rstrip('/')}/{name}".rstrip("/")


def _raise_unless_gone(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error


@contextmanager
def _reported(path: str) -> Iterator[None]:
    """Turn an OSError into a CheckpointError that names the file, DamagedError if it is missing."""
    try:
        yield
    except FileNotFoundError:
        raise DamagedError(f"{path}: missing") from None
    except OSError as error:
        full = "; free some space, or move the checkpoints and set checkpoint.folder to their new place"
        hint = full if error.errno == errno.ENOSPC else ""
        where = error.filename or path
        raise CheckpointError(f"{where}: {error.strerror or error}{hint}") from error
