"""One store for datasets and checkpoints: a local folder, or object storage with the S3 API.

Names are relative to the store and use `/`.
"""

from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from storage.errors import DamagedError, MissingError, OutageError, StoreError, join, retry
from storage.local import LocalStore

if TYPE_CHECKING:
    from storage.s3 import S3Store

__all__ = (
    "DamagedError", "LocalStore", "MissingError", "OutageError", "Store", "StoreError", "join", "open_store", "retry",
)  # fmt: skip

Store: TypeAlias = "LocalStore | S3Store"


def open_store(url: str | Path, retry_seconds: float = 180) -> Store:
    """The store at a path or `s3://bucket/prefix`. Raises StoreError."""
    scheme, separator, _ = str(url).partition("://")
    if not scheme or (separator and scheme != "s3"):
        raise StoreError(f"{str(url)!r}: must be a folder or s3://bucket/prefix")
    if separator:
        from storage.s3 import S3Store  # with botocore, which a run in local folders does not need

        return S3Store(str(url), retry_seconds)
    return LocalStore(url, retry_seconds)
