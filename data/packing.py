"""Rows of examples for fine-tuning. Two bits of each token say what is trained. Imports no torch.

A row of a packed dataset has exactly `packed_seq_len` tokens (uint32): whole examples, then padding. A sample of
that length is therefore a whole row, wherever data.order puts it, and no example is ever cut.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

TOKEN_BITS = 2**30 - 1  # the token's id
START = 2**30  # an example, or the padding, begins here
HIDDEN = 2**31  # never a label, so not trained
MAX_OPEN_ROWS = 256  # rows with room left that packing considers


def marked(ids: Sequence[int], trained: Sequence[bool]) -> np.ndarray:
    """An example, uint32 with the bits above. Its first token is never trained, since nothing comes before it."""
    tokens = np.array(ids, np.uint32)
    tokens[~np.array(trained, bool)] |= np.uint32(HIDDEN)
    tokens[0] |= np.uint32(START | HIDDEN)
    return tokens


def shared_length(one: Sequence[Any], other: Sequence[Any]) -> int:
    """How many tokens, or letters, at the beginning are the same."""
    shortest = min(len(one), len(other))
    return next((i for i in range(shortest) if one[i] != other[i]), shortest)


def pack(examples: pa.ListArray, seq_len: int, eos_id: int) -> pa.ListArray:
    """Pack whole examples, each of at most `seq_len` tokens, into rows of `seq_len` tokens (list<uint32>).

    Uses best fit, in the order of the examples. Hidden eos tokens fill the rest of a row.
    """
    offsets = examples.offsets.to_numpy()
    values = examples.values.to_numpy()
    rows: list[list[int]] = []  # the examples of each
    room: list[tuple[int, int]] = []  # (tokens left, row), sorted
    for i, size in enumerate(np.diff(offsets).tolist()):
        fitting = bisect_left(room, (size, 0))
        if fitting == len(room):
            room.append((seq_len, len(rows)))
            rows.append([])
        left, row = room.pop(fitting)
        rows[row].append(i)
        insort(room, (left - size, row))
        if len(room) > MAX_OPEN_ROWS:
            room.pop(0)
    packed = np.full((len(rows), seq_len), eos_id | HIDDEN, np.uint32)
    for out, members in zip(packed, rows, strict=True):
        whole = np.concatenate([values[offsets[i] : offsets[i + 1]] for i in members])
        out[: len(whole)] = whole
        if len(whole) < seq_len:
            out[len(whole)] |= START  # the padding begins here
    bounds = np.arange(0, packed.size + 1, seq_len, dtype=np.int32)
    return pa.ListArray.from_arrays(bounds, packed.ravel(), type=examples.type)


def unpack(values: np.ndarray) -> tuple[list[int], list[slice]]:
    """Turn stored tokens into plain ids in place. Returns the lengths of the examples' parts and the hidden slices."""
    starts = np.flatnonzero(values & START)
    bounds = np.unique(np.concatenate(([0], starts, [len(values)])))
    hidden = np.concatenate(([False], values >= HIDDEN, [False]))
    edges = np.flatnonzero(hidden[1:] != hidden[:-1]).tolist()
    values &= TOKEN_BITS
    return np.diff(bounds).tolist(), [slice(*edge) for edge in zip(edges[::2], edges[1::2], strict=True)]


class PackedRows(NamedTuple):
    """Packed rows in memory, to be read as a `data.stream.Stream` is."""

    values: np.ndarray

    def read(self, start: int, count: int) -> tuple[np.ndarray, list[int], list[slice]]:
        tokens = self.values[start : start + count]
        missing = np.full(count - len(tokens), START | HIDDEN, np.uint32)
        tokens = np.concatenate((tokens, missing))
        return tokens, *unpack(tokens)
