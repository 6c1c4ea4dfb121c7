"""Where a dataset is written: a folder or s3://, which all processes that prepare it share. Imports no torch."""

import fcntl
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from config import file_errors
from data.shards import DataError, digest
from data.tokenizer import FILES
from storage import LocalStore, MissingError, Store, open_store
from storage.records import written_whole

MANIFEST = "manifest.json"
BLOCKS = "blocks.arrow"
BAD_RECORDS = "bad_records.log"  # a line for each that was left out: place and reason. No suffix of a source's
SHARDS = re.compile(r"\.?(train|validation)-\d{5,}\.(arrow|lengths)(\.tmp)?")
PARTS = ".parts"  # folder of a preparation's finished work, until its end
PLAN = f"{PARTS}/plan.json"


def is_own(name: str) -> bool:
    """Whether a preparation writes a file of this name."""
    return name in (MANIFEST, BLOCKS, BAD_RECORDS, *FILES) or bool(SHARDS.fullmatch(name))


@dataclass(frozen=True)
class Output:
    """A folder or `s3://bucket/prefix`, and what may be written there."""

    url: str
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
    def create(self, name: str) -> Iterator[Any]:
        """A file that becomes `name` once the context ends well: whole, or not at all. Raises StoreError."""
        if self.folder is None:
            with self.store.create(name) as upload:
                yield upload
                self.check_plan()
            return
        temporary = None
        if self.plan:
            temporary = self.folder / PARTS / f"{secrets.token_hex(8)}.tmp"
        with written_whole(self.folder / name, temporary) as file:
            yield file
            self.check_plan()  # the next one removes PARTS, and with it the temporary file

    def check_plan(self) -> None:
        """Raises DataError if the plan there is another one, or none."""
        if not self.plan:
            return
        plan = self.read_if_there(PLAN)
        if plan is None or digest(bytes(plan)) != self.plan:
            other = "another preparation has begun or ended there, or not all machines share this place"
            raise DataError(f"{self.url}: {other}")

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Make a folder and lock it until the context ends. Raises DataError if another process writes there.

        Nothing on S3: each write asks for the plan there, so that of two commands the earlier one fails.
        """
        folder = self.folder
        if folder is None:
            yield
            return
        with file_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
            with (folder / ".lock").open("a") as file:  # writable, since NFS locks no others
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    raise DataError(f"{folder}: another process is writing there; wait until it has ended") from None
                except OSError:  # a file system without locks
                    pass
                yield


@lru_cache(maxsize=4)
def _open(url: str) -> Store:
    """One store for all that a process does at a place, as S3's needs a while to connect."""
    return open_store(url)
