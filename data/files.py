"""The files of a dataset, in a folder or on S3 behind a cache on the node's own disk. Imports no torch."""

import errno
import fcntl
import hashlib
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pyarrow as pa
from isal import isal_zlib

from config import Config, file_errors
from storage import DamagedError, LocalStore, MissingError, StoreError, join, open_store

LOCKS = 64  # lock files of a cache; each fetch holds one
CHECKSUM_ATTEMPTS = 3  # fetches of a range before it counts as damaged


class Files:
    """Reads ranges of a dataset's files. On S3 each range is fetched once into the cache, which processes share."""

    def __init__(self, url: str, config: Config) -> None:
        self.url = url.rstrip("/") or url
        self.store = open_store(self.url, config.comm.store_retry_seconds)
        if not isinstance(self.store, LocalStore):
            folder = config.data.cache_folder or f"{tempfile.gettempdir()}/titanite-data-{os.getuid()}"
            self._cache = Cache(Path(folder), int(config.data.cache_gb * 1e9))

    def read(self, name: str) -> bytes:
        """Read a small file, without a check. Raises DamagedError, StoreError."""
        return bytes(self.store.read(name))

    def map(self, name: str, offset: int, size: int, crc32: int) -> memoryview:
        """Map a range of a file into memory and check it. Raises DamagedError, StoreError."""
        if isinstance(self.store, LocalStore):
            return _map(self.store.folder / name, offset, size, crc32)

        def fetch() -> memoryview:
            for _ in range(CHECKSUM_ATTEMPTS):
                content = self.store.read(name, offset, size)
                if isal_zlib.crc32(content) == crc32:
                    return content
            raise DamagedError(f"{join(self.url, name)}: is damaged, its checksum does not match")

        key = hashlib.sha256(f"{self.url}/{name}:{offset}:{size}:{crc32}".encode()).hexdigest()[:24]
        return self._cache.map(key, fetch, size, crc32)


def _map(path: Path, offset: int, size: int, crc32: int) -> memoryview:
    """Map part of a file and check it. Keeps no file open, unlike Python's mmap."""
    try:
        with pa.memory_map(str(path)) as file:
            file.seek(min(offset, file.size()))
            content = memoryview(file.read_buffer(size)).cast("B")
    except FileNotFoundError:
        raise MissingError(f"{path}: missing") from None
    except OSError as error:  # Arrow gives no errno for a folder
        raise StoreError(f"{path}: {os.strerror(error.errno or errno.EIO)}") from None
    if len(content) != size:
        raise DamagedError(f"{path}: is cut short, {size - len(content)} of {size} bytes missing")
    if isal_zlib.crc32(content) != crc32:
        raise DamagedError(f"{path}: is damaged, its checksum does not match")
    return content


class Cache:
    """A folder with ranges of remote files, shared by processes. Beyond `limit_bytes` the least recently used go.

    A mapped range stays usable after its removal.
    """

    def __init__(self, folder: Path, limit_bytes: int) -> None:
        self.folder = folder
        self.limit_bytes = limit_bytes
        with file_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)

    def map(self, key: str, fetch: Callable[[], memoryview], size: int, crc32: int) -> memoryview:
        """The range `key`, from the cache or from `fetch`, which one process calls for all. Raises StoreError."""
        path = self.folder / f"{key}.range"
        try:
            with suppress(FileNotFoundError, DamagedError):
                os.utime(path)  # used now
                return _map(path, 0, size, crc32)
            with self._locked(f"lock-{int(key[:8], 16) % LOCKS}"):
                with suppress(FileNotFoundError, DamagedError):  # another process may have fetched it meanwhile
                    os.utime(path)
                    return _map(path, 0, size, crc32)
                temporary = self.folder / f"{key}.tmp"
                try:
                    temporary.write_bytes(fetch())
                    content = _map(temporary, 0, size, crc32)  # before other processes see it and may remove it
                    temporary.replace(path)
                finally:
                    temporary.unlink(missing_ok=True)
            self._shrink()
            return content
        except OSError as error:  # full, no permission, too many open files
            what = f"cannot be used: {error.strerror}; data.cache_gb = {self.limit_bytes / 1e9:g} must fit there"
            raise StoreError(f"data.cache_folder = {self.folder}: {what}") from None

    def _shrink(self) -> None:
        """Remove ranges down to the limit."""
        with self._locked("lock-shrink"):
            files = sorted(self.folder.glob("*.range"), key=lambda path: path.stat().st_mtime_ns)
            total = sum(path.stat().st_size for path in files)
            while total > self.limit_bytes:
                total -= files[0].stat().st_size
                files.pop(0).unlink()

    @contextmanager
    def _locked(self, name: str) -> Iterator[None]:
        with (self.folder / name).open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield
