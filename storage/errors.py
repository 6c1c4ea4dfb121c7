"""What a store reports, and how its places are joined."""

from pathlib import Path

from config import TitaniteError


class StoreError(TitaniteError):
    """A store cannot be used: it refuses, its disk is full, or it is set up wrongly."""


class OutageError(StoreError):
    """A store failed or did not answer for as long as it was tried. No mistake of the user: a restart may help."""


class DamagedError(StoreError):
    """Bytes are missing or differ from those written."""


class MissingError(DamagedError):
    """There is no such file."""


def join(url: str | Path, name: str) -> str:
    """`name` inside the folder `url`."""
    folder = str(url).rstrip("/")
    return f"{folder}/{name}".rstrip("/")
