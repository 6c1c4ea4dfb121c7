"""Why a start of a run ended: whoever knows first writes `exit.json` in the run's folder, and a line."""

import errno
import json
import os
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from config import TitaniteError

FILE = "exit.json"
NO_LINKS = (errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP)  # from file systems without links: FAT, some network disks
AGAIN = 75  # exit code of ranks that torchrun must start again; sysexits.h: EX_TEMPFAIL
HUNG = AGAIN  # of the ranks of a job that hung
SPEAKER_TIMEOUT_SECONDS = 20  # for ranks to wait until they are ended, while local rank 0 says what is wrong


class Exit(NamedTuple):
    """The end of a start."""

    kind: str  # finished, stopped, rolled back, error, failed, lost, hung
    cause: str
    rank: int | None  # where it began; None if that is not one rank
    section: str  # where in the step that rank was
    step: int  # that was being trained
    last_checkpoint: int | None  # step of the newest that this start has read or written
    next_action: str

    @property
    def steps_repeated(self) -> int:
        """Steps begun since the last checkpoint. Their tokens come again in the same order, so none are lost."""
        return 0 if self.kind == "finished" else self.step - (self.last_checkpoint or 0)

    def line(self) -> str:
        """Everything in one line."""
        who = "" if self.rank is None else f"rank {self.rank}, "
        if self.step == 0:  # not known yet whether there is a checkpoint to resume from
            return f"exit: {self.cause} ({who}{self.section}, before any step); next: {self.next_action}"
        last = "no checkpoint yet" if self.last_checkpoint is None else f"last checkpoint step {self.last_checkpoint}"
        return (
            f"exit: {self.cause} ({who}{self.section} of step {self.step}); {last}, "
            f"steps to repeat: {self.steps_repeated}, no tokens lost; next: {self.next_action}"
        )


def record_exit(folder: Path, ended: Exit) -> bool:
    """Write `exit.json`, unless this start has one: its writer knew the cause. Returns whether it had none."""
    record = ended._asdict() | {"steps_repeated": ended.steps_repeated, "tokens_lost": 0}
    record["time"] = datetime.now(timezone.utc).isoformat(timespec="seconds")

    def write(path: Path) -> None:
        with open(path, "x", encoding="utf-8") as file:
            file.write(json.dumps(record, indent=2) + "\n")
            file.flush()
            os.fsync(file.fileno())  # a power cut must not leave an empty file

    temporary = folder / f".exit-{os.urandom(8).hex()}"  # not tempfile's, which others of a team could not read
    try:
        try:
            write(temporary)
            os.link(temporary, folder / FILE)  # the file is whole, and only one process succeeds
        except OSError as error:
            if error.errno not in NO_LINKS:
                raise
            write(folder / FILE)  # only one process succeeds
        finally:
            temporary.unlink(missing_ok=True)
    except FileExistsError:
        return False
    except OSError as error:  # on a full disk the caller must still print its line
        print(f"exit.json could not be written: {error}", file=sys.stderr, flush=True)
    return True


def read_exit(folder: Path) -> dict[str, Any] | None:
    """How the last start ended; None if no process could write it. For a damaged `exit.json` the kind is "unknown"."""
    path = folder / FILE
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as error:
        return {"kind": "unknown", "cause": f"unknown, {path} is damaged: {error}"}


def run_and_leave(main: Callable[[], None]) -> NoReturn:
    """Run a program, flush its output and end the process with Python's exit codes, 130 after Ctrl-C.

    A mistake of the user ends it with one line and exit code 2. It skips Python's normal exit, which takes most of a
    second, sometimes aborts in a thread of torch, and after an error waits for threads that query a store that may be
    gone.
    """
    code = 0
    try:
        main()
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
    except TitaniteError as error:
        print(f"error: {error}", file=sys.stderr)
        code = 2
    except KeyboardInterrupt:
        code = 130
    except BaseException:
        traceback.print_exc()
        code = 1
    for stream in filter(None, (sys.stdout, sys.stderr)):  # None: closed from the start
        with suppress(OSError):  # a closed pipe must not change the exit code
            stream.flush()
    os._exit(code)
