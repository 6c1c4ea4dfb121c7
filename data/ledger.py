"""The ledger: what each data-parallel rank was given, recorded for the proof of tools.audit. Imports no torch.

Each data-parallel rank has a file in the run folder, such as `data/rank-00000.jsonl`. Every start,
and every return to a checkpoint within one, writes a line with the place it continues from and
where its datasets are. Every step writes a line with the samples of the segment consumed before
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
    """Appends to the file of one rank. Every line is flushed to the operating system at once."""

    def __init__(self, folder: Path, dp_rank: int, shape: StepShape, state: Mapping[str, Any], urls: Mapping[str, str]):
        path = folder / "data" / f"rank-{dp_rank:05}.jsonl"
        with file_errors(path):  # on nodes other than rank 0's this is the first that is written
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open_records(path)
        self._begins = {"shape": shape._asdict(), "urls": dict(urls)}
        self.start(state)

    def start(self, state: Mapping[str, Any]) -> None:
        """Record that the next steps continue from the place `state`. This makes void earlier records beyond it."""
        self._write({"start": dict(state)} | self._begins)

    def step(self, first: int, tokens: Iterable[np.ndarray], masked: Mapping[str, list[int]]) -> None:
        """Record a step that begins at sample `first` of the segment, with `tokens` of the rank's microbatches."""
        line: dict[str, Any] = {"first": first, "crc32": checksum(tokens)}
        self._write(line | ({"masked": dict(masked)} if masked else {}))

    def close(self) -> None:
        self._file.close()

    def _write(self, line: Mapping[str, Any]) -> None:
        with file_errors(self._file.name):
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()


def checksum(tokens: Iterable[np.ndarray], crc: int = 0) -> int:
    """CRC-32 of the microbatches' token ids as little-endian int64, one after the other, continuing from `crc`."""
    for microbatch in tokens:
        crc = isal_zlib.crc32(np.ascontiguousarray(microbatch, dtype="<i8").data, crc)
    return crc


class Step(NamedTuple):
    """A step in the ledger."""

    began: Place  # where its start continued from: the same object for all steps of a start
    shape: StepShape
    urls: dict[str, str]  # hash → URL of the start's datasets; empty in ledgers of an older version
    first: int  # samples of the segment consumed before it
    crc32: int
    masked: dict[str, list[int]]

    @property
    def place(self) -> Place:
        """Where the run stood before the step."""
        return self.began._replace(samples=self.first)

    @property
    def end(self) -> Place:
        """Where the run stood after the step."""
        return self.began._replace(samples=self.first + self.shape.samples)


class Records(NamedTuple):
    """The content of a rank's ledger."""

    steps: list[Step]  # in the order in which they ran
    last_began: Place | None  # where the last start continued from, even if it ran no step; None without a start


def read_ledger(path: Path) -> Records:
    """Read the ledger of one rank, empty if there is no file. Leaves out a last line that a kill cut.

    Raises ValueError, KeyError or TypeError for a file that is otherwise no ledger.
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
