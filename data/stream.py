"""The tokens of one dataset as an endless stream, readable from any token on. Imports no torch."""

from collections.abc import Iterator
from concurrent.futures import Executor, Future
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from data.order import build_epoch, derive_key, permutation
from data.packing import unpack
from data.shards import Block, Split


class Window(NamedTuple):
    """Blocks shuffled together. The [documents] arrays are in the order of the stream."""

    blocks: np.ndarray  # [blocks] their numbers in the split
    values: list[np.ndarray]  # tokens of each block
    block: np.ndarray  # [documents] which of `values` holds the document
    row: np.ndarray  # [documents] its row in that block
    start: np.ndarray  # [documents] its first token there
    cumulative: np.ndarray  # [documents + 1] its first token in the window


class Stream:
    """A split as one stream of tokens, epoch after epoch, ordered by `seed` and `name`. Seed None: once, as stored.

    Keeps the window in use and, with `read_ahead`, the next one, whose blocks `readers` fetch meanwhile.
    """

    def __init__(
        self, split: Split, name: str, readers: Executor, seed: int | None, window_blocks: int, read_ahead: bool = True
    ):
        self.split = split
        self._name = name
        self._seed = seed
        self._window_blocks = window_blocks
        self._readers = readers
        self._read_ahead = read_ahead
        self._epoch = lru_cache(2)(lambda number: build_epoch(split.tokens, window_blocks, self._key(number)))
        self._ahead: dict[tuple[int, int], list[Future[Block]]] = {}  # (epoch, window) → its blocks
        self._window: Window | None = None
        self._window_start = 0  # its first token in the stream

    def read(self, start: int, count: int) -> tuple[np.ndarray, list[int], list[slice]]:
        """Read tokens [start, start + count) of the stream. Beyond its end they are zeros and hidden.

        Returns the tokens [count], the length of each document's (or packed example's) part in order, and the hidden
        slices, which must not be trained. Raises DataError, StoreError.
        """
        there = count if self._seed is not None else min(count, self.split.total_tokens - start)
        parts: list[np.ndarray] = []
        for window, documents, begins, ends in self._parts(start, there):
            blocks = window.block[documents].tolist()
            starts = window.start[documents].tolist()
            for block, first, begin, end in zip(blocks, starts, begins, ends, strict=True):
                parts.append(window.values[block][first + begin : first + end])
        if there < count:
            parts.append(np.zeros(count - there, self.split.dtype))
        tokens = np.concatenate(parts)
        lengths = [len(part) for part in parts]
        hidden: list[slice] = []
        if self.split.packed_seq_len:
            lengths, hidden = unpack(tokens)
        if there < count:
            hidden.append(slice(there, count))
        return tokens, lengths, hidden

    def documents(self, start: int, count: int) -> list[tuple[int, int, int, int]]:
        """(block, row, first token, end) of each document's part in tokens [start, start + count)."""
        found: list[tuple[int, int, int, int]] = []
        for window, documents, begins, ends in self._parts(start, count):
            blocks = window.blocks[window.block[documents]].tolist()
            rows = window.row[documents].tolist()
            found += zip(blocks, rows, begins, ends, strict=True)
        return found

    def _parts(self, start: int, count: int) -> Iterator[tuple[Window, slice, list[int], list[int]]]:
        """Yield (window, slice of its documents, first token of each part, end of each part) of a range of tokens."""
        end = start + count
        while start < end:
            window, token = self._locate(start)
            cumulative = window.cumulative
            stop = min(token + end - start, int(cumulative[-1]))
            first = int(cumulative.searchsorted(token, side="right")) - 1
            last = int(cumulative.searchsorted(stop))
            bounds = cumulative[first : last + 1].tolist()
            begins = [0] * (last - first)
            ends = [after - before for before, after in pairwise(bounds)]
            begins[0] = token - bounds[0]
            ends[-1] -= bounds[-1] - stop
            yield window, slice(first, last), begins, ends
            start += stop - token

    def _locate(self, token: int) -> tuple[Window, int]:
        """The window that holds a token of the stream, and the token's number there."""
        if self._window is None or not 0 <= token - self._window_start < self._window.cumulative[-1]:
            self._window = None  # frees its memory before the next is opened
            number, in_epoch = divmod(token, self.split.total_tokens)
            epoch = self._epoch(number)
            index = epoch.window_of(in_epoch)
            self._window = self._open(number, index)
            self._window_start = number * self.split.total_tokens + int(epoch.starts[index])
        return self._window, token - self._window_start

    def _open(self, number: int, index: int) -> Window:
        """Get the blocks of a window and start to read those of the next."""
        reading = self._ahead.pop((number, index), None)
        self._ahead.clear()
        # What failed when it was read ahead, perhaps long ago, is tried again.
        if reading is None or any(block.done() and block.exception() for block in reading):
            reading = self._read(number, index)
        contents = [result.result() for result in reading]
        window = _open_window(self._blocks(number, index), contents, self._key(number, index))
        # Not earlier: the first batch of a start would wait for cores.
        if self._read_ahead:
            is_last = index + 2 == len(self._epoch(number).starts)
            following = (number + 1, 0) if is_last else (number, index + 1)
            self._ahead[following] = self._read(*following)
        return window

    def _read(self, number: int, index: int) -> list[Future[Block]]:
        return [self._readers.submit(self.split.read, block) for block in self._blocks(number, index).tolist()]

    def _blocks(self, number: int, index: int) -> np.ndarray:
        first = index * self._window_blocks
        return self._epoch(number).blocks[first : first + self._window_blocks]

    def _key(self, *part: int | str) -> int | None:
        """The key for the order of an epoch's blocks, or of a window's documents. None: as stored."""
        return None if self._seed is None else derive_key(self._seed, self._name, *part)


def _open_window(blocks: np.ndarray, contents: list[Block], key: int | None) -> Window:
    """The window of these blocks, with their documents in the order of `key`."""
    rows = [len(content.offsets) - 1 for content in contents]
    block = np.repeat(np.arange(len(contents), dtype=np.uint32), rows)
    row = np.concatenate([np.arange(n, dtype=np.uint32) for n in rows])
    start = np.concatenate([content.offsets[:-1] for content in contents])
    length = np.concatenate([np.diff(content.offsets) for content in contents])
    order = permutation(len(length), key)
    cumulative = np.append(np.int64(0), np.cumsum(length[order], dtype=np.int64))
    values = [content.values for content in contents]
    return Window(blocks, values, block[order], row[order], start[order], cumulative)
