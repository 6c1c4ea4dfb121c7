"""The files of a dataset, in a folder or behind any URL that fsspec knows. Imports no torch.

Both kinds of folder map byte ranges into memory and check them. A remote range is first
fetched into a cache on the node's own disk, which the node's processes share. Endpoint
and credentials come from the environment, as for any client of the store.
"""

import errno
import fcntl
import hashlib
import logging
import os
import random
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import fsspec
import pyarrow as pa
from fsspec.implementations.local import LocalFileSystem
from isal import isal_zlib

from config import Data, TitaniteError

T = TypeVar("T")

LOCKS = 64  # lock files of a cache; each fetch holds one
CHECKSUM_ATTEMPTS = 3  # fetches of a range before it counts as damaged
LONGEST_PAUSE_SECONDS = 5.0
FULL = (errno.ENOSPC, errno.EDQUOT)  # the disk or the user's quota is full
# A retry would not help. botocore raises RecursionError when it asks the same endpoint for the bucket's region.
FATAL = (PermissionError, ImportError, ValueError, TypeError, RecursionError)

log = logging.getLogger(__name__)


class StorageError(TitaniteError):
    """Data could not be read, for a reason that says nothing about the data."""


class DamagedError(Exception):
    """A range of a file is missing or wrong; the message says how."""


def open_folder(url: str, data: Data) -> "Folder":
    """The files at a path or a URL. Raises StorageError."""
    if not url:
        raise StorageError("'': must be a folder or a URL")
    url = url.rstrip("/") or "/"
    if "://" not in url:
        return LocalFolder(url)
    own = Path(tempfile.gettempdir()) / f"titanite-data-{os.getuid()}"
    cache = Cache(Path(data.cache_folder or own), int(data.cache_gb * 1e9))
    if not data.cache_folder and (own.is_symlink() or own.stat().st_uid != os.getuid()):
        raise StorageError(f"data.cache_folder: {own} was made by another user, who can write there; set another")
    return RemoteFolder(url, cache, data.retry_seconds)


def file_system(url: str, s3_options: Mapping[str, Any] | None = None) -> tuple[fsspec.AbstractFileSystem, str]:
    """The file system of a path or URL, and the path there. The environment sets it up; S3 also takes `s3_options`."""
    if "://" not in url:
        return LocalFileSystem(), LocalFileSystem._strip_protocol(f"file://{url}")  # so `::` in a name chains no URLs
    options: dict[str, Any] = {}
    if url.startswith("s3://"):
        # Names in the profile and in the environment. botocore by itself does not know AWS_REGION.
        region = ("region", ["AWS_REGION", "AWS_DEFAULT_REGION"], None, None)
        options = {"session_vars": {"region": region}, **(s3_options or {})}
    return fsspec.core.url_to_fs(url, **options)


class LocalFolder:
    """Files on a mounted file system."""

    def __init__(self, url: str) -> None:
        self.url = url

    def read(self, name: str, offset: int = 0, size: int | None = None) -> bytes:
        """Read a file or a range of it, without a check. Raises DamagedError, StorageError."""
        with self._errors(name), (Path(self.url) / name).open("rb") as file:
            file.seek(offset)
            return file.read(size)

    def map(self, name: str, offset: int, size: int, crc32: int) -> memoryview:
        """Map a range of a file and check it. Raises DamagedError, StorageError."""
        with self._errors(name):
            return _checked(_map(Path(self.url) / name, offset, size), size, crc32)

    def size(self, name: str) -> int | None:
        """Bytes of a file, None if it is missing or no regular file."""
        try:
            status = (Path(self.url) / name).stat()
        except (FileNotFoundError, NotADirectoryError):
            return None
        return status.st_size if stat.S_ISREG(status.st_mode) else None

    def close(self) -> None:
        """Do nothing: nothing is open."""

    @contextmanager
    def _errors(self, name: str) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError:
            raise DamagedError("is missing") from None
        except OSError as error:
            hint = "; raise the limit with `ulimit -n`" if error.errno == errno.EMFILE else ""
            raise StorageError(f"{self.url}/{name}: cannot be read: {error.strerror}{hint}") from None


def _map(path: Path, offset: int, size: int) -> memoryview:
    """Map part of a file, read-only; shorter if the file ends early. Keeps no file open, unlike Python's mmap."""
    try:
        with pa.memory_map(str(path)) as file:
            if offset >= file.size():
                return memoryview(b"")
            file.seek(offset)
            return memoryview(file.read_buffer(size)).cast("B")
    except OSError as error:  # Arrow puts the path into its text, and gives no errno for a folder
        number = error.errno or errno.EIO
        raise OSError(number, os.strerror(number)) from None


def _checked(content: memoryview, size: int, crc32: int) -> memoryview:
    if len(content) != size:
        raise DamagedError(f"is cut short, {size - len(content)} of {size} bytes missing")
    if isal_zlib.crc32(content) != crc32:
        raise DamagedError("is damaged, its checksum does not match")
    return content


class RemoteFolder:
    """Files behind a URL, with a cache of their ranges. The methods are those of LocalFolder.

    A failed request is retried with growing pauses for `retry_seconds`.
    """

    def __init__(self, url: str, cache: "Cache", retry_seconds: float) -> None:
        self.url = url
        self._cache = cache
        self._retry_seconds = retry_seconds
        self._closed = threading.Event()
        self._renewal = threading.Lock()
        try:
            self._system, self._root = self._open()
        except (ValueError, ImportError, OSError) as error:
            raise StorageError(f"{url}: cannot be opened: {error}") from None

    def _open(self) -> tuple[fsspec.AbstractFileSystem, str]:
        options = {
            "use_listings_cache": False,
            "max_concurrency": 1,  # else a HEAD precedes each GET, and errors of a HEAD do not say what they are
            # Short, and retried only here: the defaults would wait minutes for an answer that never comes.
            "config_kwargs": {
                "connect_timeout": 5,
                "read_timeout": 20,
                "retries": {"max_attempts": 0},
                "max_pool_connections": 32,
            },
        }
        # fsspec caches its file systems. Without that, each validation would leave an S3 client that is freed late.
        system, root = file_system(self.url, options)
        if hasattr(system, "retries"):
            system.retries = 1
        return system, root

    def _renew(self, used: fsspec.AbstractFileSystem) -> None:
        """Reopen the store, unless another thread has, since a client reads its credentials file only once.

        s3fs could refresh its client in place, but would keep the old one for ever.
        """
        with self._renewal:
            if self._system is used:
                type(used).clear_instance_cache()
                self._system, _ = self._open()

    def read(self, name: str, offset: int = 0, size: int | None = None) -> bytes:
        path, part = f"{self._root}/{name}", {} if size is None else {"start": offset, "end": offset + size}

        def fetch() -> bytes:
            content = self._system.cat_file(path, **part)
            least = size or 1
            if len(content) < least:
                info = self._system.info(path)
                # A partial answer, or a proxy's empty page. Not damage, which could be masked.
                if info.get("ETag") == "" or (info["size"] or 0) >= offset + least:
                    raise OSError(errno.EIO, "the server sent less than was asked for")
            return content

        return self._repeated(name, fetch)

    def map(self, name: str, offset: int, size: int, crc32: int) -> memoryview:
        key = hashlib.sha256(f"{self.url}/{name}:{offset}:{size}:{crc32}".encode()).hexdigest()[:24]

        def fetch() -> bytes:
            for _ in range(CHECKSUM_ATTEMPTS):
                content = self.read(name, offset, size)
                if len(content) > size:  # not damage, which could be masked
                    raise StorageError(f"{self.url}/{name}: the server sent more than the range asked for")
                if isal_zlib.crc32(content) == crc32:
                    break
            else:
                _checked(memoryview(content), size, crc32)  # says what is wrong
            return content

        return self._cache.map(key, fetch, size, crc32)

    def size(self, name: str) -> int | None:
        try:
            return self._repeated(name, lambda: self._system.size(f"{self._root}/{name}"))
        except DamagedError:
            return None

    def close(self) -> None:
        """Make requests fail instead of being retried further."""
        self._closed.set()

    def _repeated(self, name: str, request: Callable[[], T]) -> T:
        begin, pause, told, renewed = time.monotonic(), 0.1, False, False
        if self._closed.is_set():
            raise StorageError(f"{self.url}/{name}: cannot be read: the loader is closed")
        while True:
            system = self._system
            try:
                return request()
            except Exception as error:  # every kind of store raises its own
                status, code = _s3_answer(error)
                if isinstance(error, FileNotFoundError) and code not in ("404", "NoSuchBucket"):  # 404: a proxy
                    raise DamagedError("is missing") from None
                if status == 416:
                    raise DamagedError("is cut short") from None
                waited = time.monotonic() - begin
                denied = isinstance(error, PermissionError)
                fatal = isinstance(error, FATAL) and code != "ExpiredToken" and (renewed or not denied)
                if fatal or code == "NoSuchBucket" or type(error).__name__.endswith("CredentialsError"):
                    self._give_up(name, error)
                if waited >= self._retry_seconds or self._closed.is_set():
                    self._give_up(name, error, f" for {waited:.0f} s")
                if waited > 2 and not told:
                    told = True
                    log.warning("%s/%s: %s; retrying for up to %s s", self.url, name, error, self._retry_seconds)
            if denied:
                self._renew(system)
                renewed = True
            self._closed.wait(pause * random.uniform(0.5, 1.5))
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)

    def _give_up(self, name: str, error: Exception, duration: str = "") -> NoReturn:
        said = f"{type(error).__name__}: {error}"
        if isinstance(error, RecursionError):
            said = "redirected elsewhere; check AWS_ENDPOINT_URL_S3 (https?) and AWS_REGION"
        raise StorageError(f"{self.url}/{name}: cannot be read{duration}: {said}") from None


Folder = LocalFolder | RemoteFolder


def _s3_answer(error: Exception) -> tuple[int, str]:
    """HTTP status and S3 error code of the answer behind `error`; (0, "") if there was none."""
    # s3fs turns many answers into EINVAL, and not every server sends a message.
    response = getattr(error.__cause__, "response", None)
    if not isinstance(response, dict):
        return 0, ""
    status = response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    return status, response.get("Error", {}).get("Code", "")


class Cache:
    """A folder with ranges of remote files, at most `limit_bytes`, shared by processes.

    Removes the least recently used ranges first. A mapped range stays usable after its removal.
    """

    def __init__(self, folder: Path, limit_bytes: int) -> None:
        self.folder = folder
        self.limit_bytes = limit_bytes
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StorageError(f"data.cache_folder: {folder} cannot be made: {error.strerror}") from None

    def map(self, key: str, fetch: Callable[[], bytes], size: int, crc32: int) -> memoryview:
        """The range `key`, from the cache or from `fetch`, which one process calls for all. Raises StorageError."""
        try:
            content = self._lookup(key, size, crc32)
            if content is not None:
                return content
            with self._locked(f"lock-{int(key[:8], 16) % LOCKS}"):
                content = self._lookup(key, size, crc32)  # another process may have fetched it meanwhile
                if content is None:
                    content = self._store(key, fetch(), size, crc32)
            self._shrink()
        except OSError as error:  # full, no permission, too many open files
            hint = "; it needs room for the blocks in use, whatever data.cache_gb says" if error.errno in FULL else ""
            raise StorageError(f"data.cache_folder = {self.folder}: cannot be used: {error.strerror}{hint}") from None
        return content

    def _lookup(self, key: str, size: int, crc32: int) -> memoryview | None:
        path = self.folder / f"{key}.range"
        try:
            content = _checked(_map(path, 0, size), size, crc32)
            os.utime(path)
            return content
        except (FileNotFoundError, DamagedError):
            return None

    def _store(self, key: str, content: bytes, size: int, crc32: int) -> memoryview:
        temporary = self.folder / f"{key}.tmp"
        try:
            self._write(temporary, content)
            mapped = _checked(_map(temporary, 0, size), size, crc32)  # before other processes see it and may remove it
            temporary.replace(self.folder / f"{key}.range")
            return mapped
        except DamagedError:
            raise StorageError(f"data.cache_folder = {self.folder}: returns other bytes than were written") from None
        finally:
            temporary.unlink(missing_ok=True)

    def _write(self, path: Path, content: bytes) -> None:
        """Write a file, and make room if the disk is full: it may be smaller than the cache's limit."""
        while True:
            try:
                path.write_bytes(content)
                return
            except OSError as error:
                if error.errno not in FULL or not self._shrink(len(content)):
                    raise

    def _shrink(self, room: int = 0) -> bool:
        """Remove ranges down to the limit, and at least `room` bytes. Returns whether any was removed."""
        with self._locked("lock-shrink"):
            entries = []
            for entry in os.scandir(self.folder):
                if entry.name.endswith(".range"):
                    status = entry.stat()
                    entries.append((status.st_mtime_ns, status.st_size, entry.path))
            total = before = sum(size for _, size, _ in entries)
            for _, size, path in sorted(entries):
                if total <= min(self.limit_bytes, before - room):
                    break
                Path(path).unlink(missing_ok=True)
                total -= size
            return total < before

    @contextmanager
    def _locked(self, name: str) -> Iterator[None]:
        with (self.folder / name).open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield
