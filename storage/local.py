"""A store in a folder of a file system."""

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial, wraps
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import IO, Any, TypeVar, cast

import numpy as np

from storage.errors import DamagedError, MissingError, StoreError, join, passing_errors, retry
from storage.records import write_atomically

Method = TypeVar("Method", bound=Callable[..., Any])


def retried(method: Method) -> Method:
    """A decorator: the method is called again for `retry_seconds` while the file system's trouble may pass."""

    @wraps(method)
    def call(store: "LocalStore", *args: Any) -> Any:
        return retry(partial(method, store, *args), store.retry_seconds)

    return cast(Method, call)


class LocalStore:
    """A folder of a file system. The methods are those of S3Store, which documents them."""

    read_threads = 1  # in order, as disks prefer

    def __init__(self, folder: str | Path, retry_seconds: float = 180) -> None:
        self.url = str(folder)
        self.folder = Path(folder)
        self.retry_seconds = retry_seconds

    @retried
    def sizes(self, prefix: str = "") -> dict[str, int]:
        sizes: dict[str, int] = {}
        with _file_errors(join(self.url, prefix)):
            for folder, _, names in os.walk(self.folder / prefix, onerror=_raise, followlinks=True):
                for name in names:
                    file = Path(folder, name)
                    with suppress(FileNotFoundError):  # removed since it was listed
                        sizes[file.relative_to(self.folder).as_posix()] = file.stat().st_size
        return sizes

    @retried
    def read(self, name: str, offset: int = 0, size: int | None = None) -> memoryview:
        count = -1 if size is None else size
        with _file_errors(join(self.url, name)):
            content = np.fromfile(self.folder / name, np.uint8, count, offset=offset).data
        if len(content) < count:
            raise DamagedError(f"{join(self.url, name)}: ends at byte {offset + len(content)}, the rest is missing")
        return content

    @contextmanager
    def create(self, name: str) -> Iterator[IO[bytes]]:
        path = self.folder / name
        with _file_errors(join(self.url, name)):
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(path, "xb") as file:
                try:
                    yield file
                    file.flush()
                    os.fsync(file.fileno())
                except BaseException:
                    path.unlink(missing_ok=True)
                    raise

    @retried
    def put(self, name: str, data: bytes) -> None:
        path = self.folder / name
        with _file_errors(join(self.url, name)):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, data)
            for folder in (path.parent, path.parent.parent):  # the names must survive a power cut, too
                descriptor = os.open(folder, os.O_RDONLY)
                os.fsync(descriptor)
                os.close(descriptor)

    def check_writable(self) -> None:
        places = (self.folder, *self.folder.parents)
        nearest = next(place for place in places if os.path.lexists(place))
        with _file_errors(self.url):
            NamedTemporaryFile(dir=nearest).close()

    @retried
    def remove(self, names: list[str]) -> None:
        folders = set()
        for name in names:
            path = self.folder / name
            folders.add(path.parent)
            if path.parent != self.folder and path.parent.is_symlink():  # its target is not ours to remove
                path = path.parent
            with _file_errors(str(path)):
                path.unlink(missing_ok=True)
        for folder in folders - {self.folder}:
            with suppress(OSError):  # it still holds files
                folder.rmdir()


def _raise(error: OSError) -> None:
    """Raise what a walk met, but for a folder that was removed meanwhile."""
    if not isinstance(error, FileNotFoundError):
        raise error


@contextmanager
def _file_errors(place: str) -> Iterator[None]:
    """Turn an OSError into a StoreError that names the file, MissingError if there is none."""
    try:
        with passing_errors(place):
            yield
    except FileNotFoundError:
        raise MissingError(f"{place}: missing") from None
    except OSError as error:
        message = f"{error.filename or place}: {error.strerror or error}"
        if error.errno == errno.ENOSPC:
            message += "; free some space, or set the folder to one on another disk"
        raise StoreError(message) from error
