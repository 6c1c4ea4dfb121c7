"""The record of what each data-parallel rank was given, for data.audit to prove. Imports no torch.

`data/rank-00000.jsonl` in the run folder, one file for each data-parallel rank: a line for
every start, and for every return to a checkpoint within one, with the place it goes on from and
where its datasets are, then a line for every step with the samples of the segment consumed before
it and a checksum of the rank's tokens.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from isal import isal_zlib

from config import file_errors
from data.place import Place, StepShape, saved_place
from records import open_records, read_records


class Ledger:
    """Appends to the file of one rank; every line is handed to the system at once."""

    def __init__(self, folder: Path, dp_rank: int, shape: StepShape, state: Mapping[str, Any], urls: Mapping[str, str]):
        path = folder / "data" / f"rank-{dp_rank:05}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open_records(path)
        self._begins = {"shape": shape._asdict(), "urls": dict(urls)}
        self.start(state)

    def start(self, state: Mapping[str, Any]) -> None:
        """What comes goes on from the place `state`, and makes void what was recorded beyond it."""
        self._write({"start": dict(state)} | self._begins)

    def step(self, first: int, tokens: Iterable[np.ndarray], masked: Mapping[str, list[int]]) -> None:
        """A step whose first sample of the segment is `first`, with the rank's microbatches."""
        line: dict[str, Any] = {"first": first, "crc32": checksum(tokens)}
        self._write(line | ({"masked": dict(masked)} if masked else {}))

    def close(self) -> None:
        self._file.close()

    def _write(self, line: Mapping[str, Any]) -> None:
        with file_errors(self._file.name):
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()


def checksum(tokens: Iterable[np.ndarray], crc: int = 0) -> int:
    """CRC-32 of the microbatches' token ids, as little-endian int64, one after the other; after those of `crc`."""
    for microbatch in tokens:
        crc = isal_zlib.crc32(np.ascontiguousarray(microbatch, dtype="<i8").data, crc)
    return crc


class Step(NamedTuple):
    """A step as the ledger has it."""

    began: Place  # where its start went on from: the same object for all steps of a start
    shape: StepShape
    urls: dict[str, str]  # of the datasets of that start, by hash; empty where an older version began it
    first: int  # samples of the segment consumed before it
    crc32: int
    masked: dict[str, list[int]]

    @property
    def place(self) -> Place:
        """Where the run stood before it."""
        return self.began._replace(samples=self.first)

    @property
    def end(self) -> Place:
        """Where the run stood after it."""
        return self.began._replace(samples=self.first + self.shape.samples)


class Records(NamedTuple):
    """What the ledger of a rank holds."""

    steps: list[Step]  # in the order in which they ran
    last_began: Place | None  # where the last start went on from, which may have come to no step; None without one


def read_ledger(path: Path) -> Records:
    """The ledger of one rank, empty if there is none; a last line cut by a kill is left out.

    Raises ValueError, KeyError or TypeError for anything else that is not a ledger.
    """
    steps: list[Step] = []
    begins: dict[str, Any] = {}
    for line in read_records(path):
        if "start" in line:
            shape, urls = StepShape(**line["shape"]), line.get("urls", {})
            begins = {"began": saved_place(line["start"]), "shape": shape, "urls": urls}
        else:
            steps.append(Step(**begins, first=line["first"], crc32=int(line["crc32"]), masked=line.get("masked", {})))
    return Records(steps, begins.get("began"))
