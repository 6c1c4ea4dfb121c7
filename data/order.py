"""The order of the data, as pure functions of integers. Imports numpy only.

An epoch of a dataset permutes its blocks. Every `window_blocks` consecutive blocks form a window, whose documents are
permuted. All documents laid end to end, epoch after epoch, are one endless stream of tokens. Sample j is its tokens
[j * seq_len, (j + 1) * seq_len], both ends included. The last one is only a label and comes again as the first input of
sample j + 1, so every token of an epoch is an input exactly once.

Several datasets are interleaved by weight. A sample's index in a `Segment` determines its tokens.
"""

import hashlib
from typing import NamedTuple

import numpy as np

GOLDEN_GAMMA = 0x9E3779B97F4A7C15


def derive_key(*parts: int | str) -> int:
    """A 64-bit key that depends on every part."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "little")


def random_words(size: int, key: int, first: int = 0) -> np.ndarray:
    """Words [first, first + size) of SplitMix64 seeded with `key`: distinct uint64 [size].

    Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators" (OOPSLA 2014).
    """
    x = np.arange(first, first + size, dtype=np.uint64) * np.uint64(GOLDEN_GAMMA) + np.uint64(key)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def permutation(size: int, key: int | None) -> np.ndarray:
    """A permutation of range(size) that depends only on `size` and `key`; int64 [size]. `key` None: range(size).

    Sorts distinct random words: without ties every sorting algorithm, so every numpy on every machine, gives the same.
    """
    return np.arange(size) if key is None else np.argsort(random_words(size, key))


class Epoch(NamedTuple):
    """Where the windows of one epoch lie in the stream."""

    blocks: np.ndarray  # [blocks] uint32, in this epoch's order
    starts: np.ndarray  # [windows + 1] int64, the first token of each window in the epoch, and the epoch's end

    def window_of(self, token: int) -> int:
        """The window that holds `token` of the epoch."""
        return int(self.starts.searchsorted(token, side="right")) - 1


def build_epoch(block_tokens: np.ndarray, window_blocks: int, key: int | None) -> Epoch:
    """The order of an epoch, from the tokens of each block. `key` None: as stored."""
    size = len(block_tokens)
    blocks = permutation(size, key).astype(np.uint32)
    ends = np.cumsum(block_tokens[blocks], dtype=np.int64)
    last = np.append(np.arange(window_blocks, size, window_blocks), size) - 1
    return Epoch(blocks, np.append(np.int64(0), ends[last]))


def mixture_counts(total: int, weights: np.ndarray) -> np.ndarray:
    """How many of the first `total` samples come from each dataset; int64 [datasets].

    Sample j of dataset i falls due at time (j + 1/2) / weights[i], and samples come in the order of (time, i)
    (Sainte-Laguë's apportionment). So in every prefix each dataset is within 1 + datasets * weight / 2 samples of its
    share, without any table or history.
    """
    counts = np.floor(total * weights + 0.5).astype(np.int64)  # a guess; rounding makes it a few samples off
    while True:
        due = (counts + 0.5) / weights  # when the next sample of each dataset comes
        done = np.where(counts > 0, (counts - 0.5) / weights, -np.inf)  # when its last one came
        first_out = int(np.argmin(due))
        last_in = len(done) - 1 - int(np.argmax(done[::-1]))  # of several, the last
        missing = total - counts.sum()
        if not missing and (due[first_out], first_out) >= (done[last_in], last_in):
            return counts
        counts[first_out] += missing >= 0
        counts[last_in] -= missing <= 0


def interleave(start: int, count: int, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(dataset, number in that dataset), int64 [count] each, of the samples [start, start + count), however cut."""
    first = mixture_counts(start, weights)
    taken = mixture_counts(start + count, weights) - first
    dataset = np.repeat(np.arange(len(weights)), taken)
    offset = np.arange(count) - np.repeat(np.cumsum(taken) - taken, taken)
    index = first[dataset] + offset
    order = np.argsort((index + 0.5) / weights[dataset], kind="stable")
    return dataset[order], index[order]


class Segment(NamedTuple):
    """A stretch of a run with the same mixture and seq_len."""

    datasets: tuple[str, ...]  # hashes of their manifests
    weights: tuple[float, ...]  # shares of the samples, summing to 1
    starts: tuple[int, ...]  # tokens of each dataset consumed before the segment
    seq_len: int

    def locate(self, start: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """(dataset, first token in its stream), int64 [count] each, of the segment's samples [start, start + count)."""
        dataset, index = interleave(start, count, np.array(self.weights))
        return dataset, np.array(self.starts, np.int64)[dataset] + index * self.seq_len

    def consumed(self, samples: int) -> tuple[int, ...]:
        """Tokens of each dataset consumed after `samples` samples of the segment."""
        counts = mixture_counts(samples, np.array(self.weights))
        return tuple(start + int(n) * self.seq_len for start, n in zip(self.starts, counts, strict=True))
