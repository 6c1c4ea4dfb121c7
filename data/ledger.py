"""Where a run stands in its data, and the ledger of what each data-parallel rank was given. Imports no torch.

A ledger such as `data/rank-00000.jsonl` in the run folder has a line for every start, with the place it continues from,
and one for every step, with a checksum of the rank's tokens. tools.audit proves by it what a run was trained on.
"""

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from isal import isal_zlib

from config import Config, ConfigError, Training, file_errors
from data.order import Segment
from data.shards import DataError, Dataset
from storage.records import open_records, read_records

STATE_VERSION = 3


class StepShape(NamedTuple):
    """How a step's samples are divided. Not part of the order, so it may change between any two steps."""

    dp_size: int
    local_batch_size: int
    accumulation: int

    @property
    def samples(self) -> int:
        """Samples per step, over all ranks and microbatches."""
        return self.dp_size * self.local_batch_size * self.accumulation

    def microbatches(self, first: int, dp_rank: int) -> list[int]:
        """The first sample of each of a rank's microbatches, in the step whose first sample is `first`."""
        per_microbatch = self.dp_size * self.local_batch_size
        own = first + dp_rank * self.local_batch_size
        return list(range(own, own + self.samples, per_microbatch))


def grad_accum_steps(training: Training, dp: int) -> int:
    """Number of microbatches per optimizer step, given `dp` data-parallel ranks. Raises ConfigError."""
    per_microbatch = training.local_batch_size * dp
    accumulation, rest = divmod(training.global_batch_size or per_microbatch, per_microbatch)
    if rest or not accumulation:
        needed = f"training.local_batch_size x data-parallel ranks = {training.local_batch_size} x {dp}"
        raise ConfigError(f"training.global_batch_size = {training.global_batch_size}: must be a multiple of {needed}")
    return accumulation


class Place(NamedTuple):
    """A place in the order: what decides the order, and how far it has been consumed."""

    seed: int
    window_blocks: int
    segment: Segment
    samples: int  # samples of the segment consumed
    earlier: dict[str, int]  # tokens consumed of datasets that have left the mixture

    @property
    def tokens(self) -> int:
        """Tokens consumed since the run began."""
        return sum(self.segment.starts) + sum(self.earlier.values()) + self.samples * self.segment.seq_len

    @property
    def consumed(self) -> dict[str, int]:
        """Tokens of each dataset consumed since the run began."""
        return self.earlier | dict(zip(self.segment.datasets, self.segment.consumed(self.samples), strict=True))

    def state(self) -> dict[str, Any]:
        """The place as plain JSON. The order of the datasets is part of it."""
        segment = self.segment
        return {
            "version": STATE_VERSION,
            "seed": self.seed,
            "window_blocks": self.window_blocks,
            "seq_len": segment.seq_len,
            "samples": self.samples,
            "datasets": [list(own) for own in zip(segment.datasets, segment.starts, segment.weights, strict=True)],
            "earlier": dict(self.earlier),
        }

    def resumed(self, saved: "Place") -> "Place":
        """The place from which a run with these settings continues `saved`. Raises DataError for another order.

        A change of seq_len, weights or datasets begins a new segment there, in which no token comes again.
        """
        for name, old, new in zip(("run.seed", "data.window_blocks"), saved[:2], self[:2], strict=True):
            if old != new:
                raise DataError(f"{name} = {new}: the checkpoint was trained with {old}, another order of the data")
        if self.segment._replace(starts=saved.segment.starts) == saved.segment:
            return saved
        tokens = saved.consumed
        starts = tuple(tokens.pop(name, 0) for name in self.segment.datasets)
        return saved._replace(segment=self.segment._replace(starts=starts), samples=0, earlier=tokens)


def first_place(config: Config, datasets: Sequence[Dataset]) -> Place:
    """The beginning of a new run."""
    weights = config.data.weights or [dataset.split("train").total_tokens for dataset in datasets]
    total = math.fsum(weights)  # exact; `sum` rounds differently since Python 3.12, and the last bit decides ties
    shares = tuple(weight / total for weight in weights)
    names = tuple(dataset.hash for dataset in datasets)
    segment = Segment(names, shares, (0,) * len(names), config.training.seq_len)
    return Place(config.run.seed, config.data.window_blocks, segment, 0, {})


def saved_place(state: Mapping[str, Any]) -> Place:
    """The place that `Place.state` recorded. Raises DataError for another version's."""
    version = state.get("version")
    if version != STATE_VERSION:
        advice = "start a new run, with checkpoint.initial_load"
        raise DataError(f"data state: of version {version}, this code reads {STATE_VERSION}; {advice}")
    names, starts, weights = zip(*state["datasets"], strict=True)
    segment = Segment(names, weights, starts, state["seq_len"])
    return Place(state["seed"], state["window_blocks"], segment, state["samples"], dict(state["earlier"]))


class Ledger:
    """Appends to the file of one rank. Every line is flushed to the operating system at once."""

    def __init__(self, path: Path, start: Mapping[str, Any], writing: Callable[..., AbstractContextManager[None]]):
        """Record a start, whose place makes void earlier records beyond it."""
        with file_errors(path):  # on nodes other than rank 0's this is the first that is written
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open_records(path)
        self._writing, self._start_id = writing, start["id"]
        self._write(start)

    def step(self, first: int, tokens: Iterable[np.ndarray]) -> None:
        """Record a step that begins at sample `first` of the segment, with `tokens` of the rank's microbatches."""
        self._write({"first": first, "crc32": checksum(tokens), "id": self._start_id})

    def close(self) -> None:
        with self._writing(self._file.name):
            self._file.close()

    def _write(self, line: Mapping[str, Any]) -> None:
        with self._writing(self._file.name):
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
    urls: dict[str, str]  # hash → URL of the start's datasets
    first: int  # samples of the segment consumed before it
    crc32: int

    @property
    def place(self) -> Place:
        """Where the run stood before the step."""
        return self.began._replace(samples=self.first)

    @property
    def end(self) -> Place:
        """Where the run stood after the step."""
        return self.began._replace(samples=self.first + self.shape.samples)


def read_ledger(path: Path) -> tuple[list[Step], Place | None]:
    """The steps of one rank, start by start, and where its last start continued from, even if it ran none.

    None: there was no start. A start that was taken for lost may have gone on beside the next one: its steps stand
    before that one's. Raises ValueError, KeyError or TypeError if the file is no ledger. Without a file nothing ran.
    """
    starts: list[list[Step]] = []
    by_id: dict[str, tuple[dict[str, Any], list[Step]]] = {}  # what a start's steps share, and its steps
    began = None
    for line in read_records(path):
        start_id = line.get("id", "")
        if "start" in line:
            began = saved_place(line["start"])
            shared = {"began": began, "shape": StepShape(**line["shape"]), "urls": line["urls"]}
            starts.append([])
            by_id[start_id] = shared, starts[-1]
        else:
            shared, steps = by_id[start_id]
            steps.append(Step(**shared, first=line["first"], crc32=int(line["crc32"])))
    return [*chain.from_iterable(starts)], began
