"""Where a dataset is written: a folder or s3://, which all processes that prepare it share. Imports no torch."""

import secrets
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import IO

from data.shards import DataError, digest
from storage import LocalStore, MissingError, Store, open_store
from storage.records import written_whole

PARTS = ".parts"  # folder of a preparation's finished work, until its end
PLAN = f"{PARTS}/plan.json"
COPIED_BYTES = 2**24  # at once


@dataclass(frozen=True)
class Place:
    """A folder or `s3://bucket/prefix`, and what may be written there."""

    url: str
    scratch: str = ""  # folder for what becomes a file on S3, on this machine's own disk; "": the system's
    # Digest of the plan that PLAN must hold for a write to count. Several processes may then write a file, and one that
    # its cluster has given up may come late: when another preparation has begun.
    plan: str = ""

    @property
    def store(self) -> Store:
        return _open(self.url)

    @property
    def folder(self) -> Path | None:
        """None: on S3."""
        if isinstance(self.store, LocalStore):
            return self.store.folder
        return None

    def read_if_there(self, name: str, offset: int = 0, size: int | None = None) -> memoryview | None:
        """Asks for the file itself, as a listing may lag behind."""
        try:
            return self.store.read(name, offset, size)
        except MissingError:
            return None

    def put(self, name: str, data: bytes | memoryview) -> None:
        with self.create(name) as file:
            file.write(data)

    @contextmanager
    def create(self, name: str) -> Iterator[IO[bytes]]:
        """A file on a disk that becomes `name` once the context ends well: whole, or not at all. Raises StoreError."""
        if self.folder is not None:
            temporary = None
            if self.plan:
                temporary = self.folder / PARTS / f"{secrets.token_hex(8)}.tmp"
            with written_whole(self.folder / name, temporary) as file:
                yield file
                self._check_plan()  # the next one removes PARTS, and with it the temporary file
            return
        with tempfile.TemporaryFile(dir=self.scratch or None) as file:  # has no name: a kill leaves nothing
            yield file
            file.seek(0)
            self._check_plan()
            with self.store.create(name) as upload:
                for chunk in iter(partial(file.read, COPIED_BYTES), b""):
                    upload.write(chunk)

    def _check_plan(self) -> None:
        if not self.plan:
            return
        plan = self.read_if_there(PLAN)
        if plan is None or digest(bytes(plan)) != self.plan:
            raise DataError(f"{self.url}: another preparation has begun or ended there meanwhile")


@lru_cache(maxsize=4)
def _open(url: str) -> Store:
    """One store for all that a process does at a place, as S3's needs a while to connect."""
    return open_store(url)
