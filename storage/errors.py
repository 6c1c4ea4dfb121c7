"""What a store reports, what is tried again, and how its places are joined."""

import errno
import logging
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from config import TitaniteError

T = TypeVar("T")
WARN_AT_ATTEMPT = 5  # after some seconds
# Of a network file system that is away for a while.
PASSING = (errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ECONNRESET)

logger = logging.getLogger(__name__)


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


@contextmanager
def passing_errors(place: object) -> Iterator[None]:
    """Turn an OSError that may pass into an OutageError."""
    try:
        yield
    except OSError as error:
        if error.errno not in PASSING:
            raise
        raise OutageError(f"{error.filename or place}: {error.strerror}") from error


def retry(call: Callable[[], T], seconds: float) -> T:
    """What `call` returns. After an OutageError it is called again, for `seconds`; then the error is raised."""
    began = time.monotonic()
    attempt = 0
    while True:
        try:
            return call()
        except OutageError as error:
            waited_seconds = time.monotonic() - began
            if not seconds:
                raise
            if waited_seconds >= seconds:
                raise OutageError(f"{error}; tried for {waited_seconds:.0f} s") from None
            if attempt == WARN_AT_ATTEMPT:
                logger.warning(f"{error}; retrying for up to {seconds:g} s")
        time.sleep(0.1 * 2 ** min(attempt, 6) * random.uniform(0.5, 1.0))
        attempt += 1
