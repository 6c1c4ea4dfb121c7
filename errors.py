"""How a mistake of the user's is told: in one line, without a traceback."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

MISTAKE = 2  # exit code of ranks that have explained in one line what is wrong
EXPLAINED = "TITANITE_EXPLAINED"  # in the environment: a file for such a rank to make, see run/torchrun.py


class TitaniteError(Exception):
    """A mistake that the user can fix. The message says what, where and how; no traceback is shown.

    `agreed`: every rank raises the same error, so only one needs to print it.
    """

    def __init__(self, message: str, agreed: bool = False):
        super().__init__(message)
        self.agreed = agreed


class ConfigError(TitaniteError):
    """A setting, or a combination of settings, that cannot be run."""


@contextmanager
def command_line(exit_code: int = 1) -> Iterator[None]:
    """Wrap the work of a command: a mistake of the user's ends it with one line and `exit_code`, Ctrl-C with 130."""
    try:
        with file_errors():
            yield
    except KeyboardInterrupt:
        sys.exit(130)
    except (TitaniteError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(exit_code)


@contextmanager
def file_errors(written: object = None) -> Iterator[None]:
    """Turn an OSError that names a file, or any while the file `written` is written, into a one-line TitaniteError."""
    try:
        yield
    except OSError as error:
        if written is not None:
            raise TitaniteError(f"{written}: cannot be written: {error.strerror or error}") from None
        if error.filename is None:
            raise
        raise TitaniteError(f"{error.filename}: {error.strerror}") from None
