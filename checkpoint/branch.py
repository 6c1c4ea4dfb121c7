"""A branch: a run that began from a checkpoint of another, its parent, which it only reads. Imports no torch."""

import json
import re
from pathlib import Path
from typing import NamedTuple

from config import ConfigError
from storage.records import write_atomically

PARENT = "parent.json"


class Parent(NamedTuple):
    """Where a branch began."""

    place: str  # of the parent, as checkpoint.branch_from named it
    step: int
    run: str  # the folder from which the parent saved that step
    tokens: int  # that it had consumed

    @property
    def folder(self) -> Path:
        """The parent's run folder: `place`, or the one from which it saved."""
        named = Path(self.place)
        return named if (named / "config.toml").is_file() else Path(self.run.rpartition(":")[2])


def read_parent(folder: Path) -> Parent | None:
    """The parent of the run in `folder`, None if it is no branch. Raises ConfigError."""
    file = folder / PARENT
    if not file.is_file():
        return None
    try:
        return Parent(**json.loads(file.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{file}: is damaged: {error}") from None


def record_parent(folder: Path, parent: Parent | None) -> Parent | None:
    """Write parent.json, unless it is there. Returns what it says."""
    if parent and not (folder / PARENT).exists():
        write_atomically(folder / PARENT, json.dumps(parent._asdict(), indent=2).encode())
    return read_parent(folder)


def find_fork(branch_from: str, parent: Parent | None) -> str:
    """The PLACE@STEP where a branch begins: where it began before, if it did; "" for no branch."""
    return f"{parent.place}@{parent.step}" if parent else branch_from


def split_place(place: str) -> tuple[str, str]:
    """(PLACE, the step) of PLACE@STEP; (place, "") of any other, and of an existing folder."""
    match = re.fullmatch(r"(.+)@(\d+)", place)
    if match is None or Path(place).exists():
        return place, ""
    return match[1], match[2]
