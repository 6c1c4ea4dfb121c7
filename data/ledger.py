"""Where a run stands in its data, and the ledger of what each data-parallel rank was given. Imports no torch.

A ledger such as `data/rank-00000.jsonl` in the run folder has a line for every start, with the position it continues
from, another where a schedule changes the steps, and one for every step: the tokens that the run had consumed before
it, and a checksum of the rank's own.
tools.audit proves by it what a run was trained on.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from isal import isal_zlib

from config import Config, ConfigError, Training, file_errors, parse_schedule
from data.order import Segment
from data.shards import DataError, Dataset
from storage.records import append_record, open_records, read_records

STATE_VERSION = 3
ENDLESS = 2**62  # more steps and tokens than any run has


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


class Phase(NamedTuple):
    """A part of a run with one batch size: steps that begin before token `end` of the run, and in no phase before."""

    end: int
    shape: StepShape
    longest: int  # tokens of a sample

    @property
    def tokens_per_step(self) -> int:
        """Over all ranks and microbatches."""
        return self.shape.samples * self.longest

    def steps_from(self, tokens: int) -> int:
        """Its steps if the first begins at `tokens`; the last may go beyond its end."""
        return max(0, -(-(self.end - tokens) // self.tokens_per_step))


def build_phases(training: Training, dp: int) -> list[Phase]:
    """The phases of a run on `dp` data-parallel ranks, by the tokens that it has seen. Raises ConfigError."""
    for seq_len in training.seq_lens:
        if training.max_seq_len % seq_len:
            raise ConfigError(f"training.seq_len = {seq_len}: must divide the longest, {training.max_seq_len}")
    schedule = parse_schedule(training.global_batch_size)
    ends = [begin for begin, _ in schedule[1:]]
    phases = []
    for (_, batch), end in zip(schedule, [*ends, ENDLESS], strict=True):
        per_microbatch = training.local_batch_size * dp
        accumulation, rest = divmod(batch or per_microbatch, per_microbatch)
        if rest or not accumulation:
            needed = f"training.local_batch_size x data-parallel ranks = {training.local_batch_size} x {dp}"
            raise ConfigError(f"training.global_batch_size = {batch}: must be a multiple of {needed}")
        shape = StepShape(dp, training.local_batch_size, accumulation)
        phases.append(Phase(end, shape, training.max_seq_len))
    return phases


def phase_at(phases: Sequence[Phase], tokens: int) -> Phase:
    """The phase of a step that begins at token `tokens` of the run."""
    return next(phase for phase in phases if tokens < phase.end)


def count_steps(phases: Sequence[Phase], steps: int = ENDLESS, tokens: int = ENDLESS) -> list[int]:
    """Steps of each phase until a run has taken `steps` steps or seen `tokens`, whichever comes first."""
    counts: list[int] = []
    seen = 0
    for phase in phases:
        in_phase = phase._replace(end=min(phase.end, tokens)).steps_from(seen)
        count = min(in_phase, steps - sum(counts))
        counts.append(count)
        seen += count * phase.tokens_per_step
    return counts


class Position(NamedTuple):
    """A position in the data: what decides the order, and how far it has been consumed."""

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
        """The position as plain JSON. The order of the datasets is part of it."""
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

    def resumed(self, saved: "Position") -> "Position":
        """The position from which a run with these settings continues `saved`. Raises DataError for another order.

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


def first_position(config: Config, datasets: Sequence[Dataset]) -> Position:
    """The beginning of a new run."""
    weights = config.data.weights or [dataset.split("train").total_tokens for dataset in datasets]
    total = math.fsum(weights)  # exact; `sum` rounds differently since Python 3.12, and the last bit decides ties
    shares = tuple(weight / total for weight in weights)
    names = tuple(dataset.hash for dataset in datasets)
    segment = Segment(names, shares, (0,) * len(names), config.training.max_seq_len)
    return Position(config.run.seed, config.data.window_blocks, segment, 0, {})


def saved_position(state: Mapping[str, Any]) -> Position:
    """The position that `Position.state` recorded. Raises DataError for another version's."""
    version = state.get("version")
    if version != STATE_VERSION:
        advice = "start a new run, with checkpoint.initial_load"
        raise DataError(f"data state: of version {version}, this code reads {STATE_VERSION}; {advice}")
    names, starts, weights = zip(*state["datasets"], strict=True)
    segment = Segment(names, weights, starts, state["seq_len"])
    return Position(state["seed"], state["window_blocks"], segment, state["samples"], dict(state["earlier"]))


class Ledger:
    """Appends to the file of one rank. Every line is flushed to the operating system at once."""

    def __init__(self, path: Path, start: Mapping[str, Any]):
        """Record a start, whose position makes void earlier records beyond it."""
        with file_errors(path):  # on nodes other than rank 0's this is the first that is written
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open_records(path)
        self._start = start
        self._id = start["id"]
        self._write(start)

    def begin_phase(self, position: Position, shape: StepShape) -> None:
        """Record that from `position` on steps have another shape: as another start."""
        self._id = f"{self._start['id']}@{position.tokens}"
        self._write({**self._start, "start": position.state(), "shape": shape._asdict(), "id": self._id})

    def step(self, begin: int, tokens: Iterable[np.ndarray]) -> None:
        """Record a step that begins at token `begin` of the run, with `tokens` of the rank's microbatches."""
        self._write({"tokens": begin, "crc32": checksum(tokens), "id": self._id})

    def close(self) -> None:
        with file_errors(self._file.name):
            self._file.close()

    def _write(self, line: Mapping[str, Any]) -> None:
        with file_errors(self._file.name):
            append_record(self._file, line)


def checksum(tokens: Iterable[np.ndarray], crc: int = 0) -> int:
    """CRC-32 of the microbatches' token ids as little-endian int64, one after the other, continuing from `crc`."""
    for microbatch in tokens:
        crc = isal_zlib.crc32(np.ascontiguousarray(microbatch, dtype="<i8").data, crc)
    return crc


class Start(NamedTuple):
    """A start in the ledger of a rank, or the part of one in which all steps have this shape."""

    id: str  # the same on all ranks
    began: Position  # where it continued from
    shape: StepShape
    urls: dict[str, str]  # hash → URL of its datasets
    checksums: list[int]  # of the rank's tokens in each step

    @property
    def tokens_per_step(self) -> int:
        return self.shape.samples * self.began.segment.seq_len


def read_ledger(path: Path) -> dict[str, Start]:
    """Id → start, in order, of one rank; {} without a file. Raises DataError unless a start's steps are consecutive."""
    starts: dict[str, Start] = {}
    try:
        for line in read_records(path):
            start_id = line["id"]
            if "start" in line:
                began = saved_position(line["start"])
                starts[start_id] = Start(start_id, began, StepShape(**line["shape"]), line["urls"], [])
                continue
            start = starts[start_id]
            due = start.began.tokens + len(start.checksums) * start.tokens_per_step
            if line["tokens"] != due:
                found = f"a step from token {line['tokens']:,} on, where the one from {due:,} on is due"
                raise DataError(f"{path}: {found}")
            start.checksums.append(int(line["crc32"]))
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path}: not a ledger: {type(error).__name__} {error}") from None
    return starts
