"""Where a run stands in its data, and which samples a step takes next. Imports no torch."""

import json
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from config import Config, ConfigError, Training
from data.order import Segment
from data.shards import DataError, Dataset

STATE_VERSION = 3
SAME_SHARE = 1e-12


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
        raise ConfigError(
            f"training.global_batch_size = {training.global_batch_size}: must be a multiple of "
            f"training.local_batch_size x data-parallel ranks = {training.local_batch_size} x {dp} = {per_microbatch}"
        )
    return accumulation


class Place(NamedTuple):
    """A place in the order: what decides the order, and how far it has been consumed."""

    seed: int
    window_blocks: int
    piece_tokens: int  # size of the pieces permuted in a window; 0: samples are not shuffled
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

    def state(self, masked: Mapping[str, Collection[int]]) -> dict[str, Any]:
        """The place as plain JSON, with the masked blocks of each dataset."""
        segment = self.segment
        parts = zip(segment.datasets, segment.starts, segment.weights, strict=True)
        return {
            "version": STATE_VERSION,
            "seed": self.seed,
            "window_blocks": self.window_blocks,
            "piece_tokens": self.piece_tokens,
            "seq_len": segment.seq_len,
            "samples": self.samples,
            "datasets": [[name, start, weight] for name, start, weight in parts],  # their order is part of the place
            "earlier": dict(self.earlier),
            "masked": {name: sorted(blocks) for name, blocks in masked.items() if blocks},
        }

    def resumed(self, saved: "Place") -> "Place":
        """The place at which a run with this place's settings continues from `saved`.

        A change of seq_len, weights or datasets begins a new segment there, in which no token
        comes again. Raises DataError if the order itself would change.
        """
        for name, old, new in (
            ("run.seed", saved.seed, self.seed),
            ("data.window_blocks", saved.window_blocks, self.window_blocks),
            ("data.shuffle_samples", saved.piece_tokens > 0, self.piece_tokens > 0),
        ):
            if old != new:
                raise DataError(
                    f"{name} = {json.dumps(new)}: the checkpoint was trained with {json.dumps(old)}, another order "
                    f"of the data; resume with {json.dumps(old)} or start a new run"
                )
        asked, begun = self.segment, saved.segment
        asked = asked._replace(starts=begun.starts)
        if asked._replace(weights=begun.weights) == begun and _are_close(asked.weights, begun.weights):
            return saved
        tokens = saved.consumed
        starts = tuple(tokens.pop(name, 0) for name in self.segment.datasets)
        segment = self.segment._replace(starts=starts)
        return saved._replace(segment=segment, samples=0, earlier=tokens)


def _are_close(shares: Sequence[float], others: Sequence[float]) -> bool:
    """Whether shares, equally many, differ at most by the rounding of another Python version."""
    return all(math.isclose(*pair, rel_tol=SAME_SHARE) for pair in zip(shares, others, strict=True))


def first_place(config: Config, datasets: Sequence[Dataset]) -> Place:
    """The beginning of a new run."""
    weights = config.data.weights or [dataset.split("train").total_tokens for dataset in datasets]
    total = math.fsum(weights)  # exact; `sum` rounds differently since Python 3.12, and the last bit decides ties
    shares = tuple(weight / total for weight in weights)
    names = tuple(dataset.hash for dataset in datasets)
    segment = Segment(names, shares, (0,) * len(names), config.training.seq_len)
    piece_tokens = config.training.seq_len if config.data.shuffle_samples else 0
    return Place(config.run.seed, config.data.window_blocks, piece_tokens, segment, 0, {})


def saved_place(state: Mapping[str, Any]) -> Place:
    """The place that `Place.state` recorded. Raises DataError for another version of the state."""
    if state.get("version") != STATE_VERSION:
        raise DataError(
            f"data state: version {state.get('version')}; this code reads version {STATE_VERSION}; resume with the "
            "code that began the run, the first git_commit in its starts.jsonl, or start a new run, with "
            "checkpoint.initial_load to keep its weights"
        )
    names, starts, weights = zip(*state["datasets"], strict=True)
    segment = Segment(names, weights, starts, state["seq_len"])
    order = state["seed"], state["window_blocks"], state["piece_tokens"]
    return Place(*order, segment, state["samples"], dict(state["earlier"]))
