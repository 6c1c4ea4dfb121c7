"""The tokens of one dataset as an endless stream that can be read at any place. Imports no torch."""

from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from data.order import Epoch, derive_key, permutation, plain_epoch, shuffled_epoch
from data.shards import Split


class Window(NamedTuple):
    """Blocks shuffled together. The document arrays are in the order of the stream."""

    blocks: np.ndarray  # [blocks] their numbers in the split
    values: list[np.ndarray]  # tokens of each block
    block: np.ndarray  # [documents] which of `values` holds the document
    row: np.ndarray  # [documents] its row in that block
    start: np.ndarray  # [documents] its first token there
    cumulative: np.ndarray  # [documents + 1] its first token in the window


class Stream:
    """A split as one stream of tokens, epoch after epoch; see data.order.

    With `shuffle=False` the documents come as they are stored, a block at a time. The window in use and the
    next one are kept, the next being opened by a background thread.
    """

    def __init__(self, split: Split, name: str, seed: int = 0, window_blocks: int = 1, shuffle: bool = True):
        self.split = split
        self.epoch_tokens = split.total_tokens
        self._key = (seed, name)
        self._window_blocks = window_blocks if shuffle else 1
        self._shuffle = shuffle
        self._epochs: dict[int, Epoch] = {}
        self._windows: dict[tuple[int, int], Future[Window]] = {}
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="window")

    def read(self, start: int, out: np.ndarray) -> list[int]:
        """Fill `out` [n] with tokens [start, start + n) of the stream.

        Returns the length of each document's part in `out`, in order. Raises DataError.
        """
        done = 0
        lengths: list[int] = []
        while done < len(out):
            window, token = self._locate(start + done)
            done = _copy(window, token, out, done, lengths)
        return lengths

    def documents(self, start: int, count: int) -> list[tuple[int, int, int, int]]:
        """(block, row, first, stop) of each document's part in tokens [start, start + count)."""
        found = []
        done = 0
        while done < count:
            window, token = self._locate(start + done)
            stop = min(token + count - done, int(window.cumulative[-1]))
            first = int(window.cumulative.searchsorted(token, side="right")) - 1
            last = int(window.cumulative.searchsorted(stop))
            for i in range(first, last):
                begin = int(window.cumulative[i])
                part = max(token - begin, 0), min(stop, int(window.cumulative[i + 1])) - begin
                found.append((int(window.blocks[window.block[i]]), int(window.row[i]), *part))
            done += stop - token
        return found

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)
        self._windows.clear()

    def _locate(self, token: int) -> tuple[Window, int]:
        """The window that holds a token of the stream, and the token's place in it."""
        number, token = divmod(token, self.epoch_tokens)
        epoch = self._epoch(number)
        index = epoch.window_of(token)
        following = (number, index + 1) if index + 2 < len(epoch.starts) else (number + 1, 0)
        wanted = ((number, index), following) if self._shuffle else ((number, index),)
        if self._windows.keys() != set(wanted):
            kept = {key: window for key, window in self._windows.items() if key in wanted}
            self._windows = {
                key: kept[key] if key in kept else self._executor.submit(self._open, self._blocks(*key), *key)
                for key in wanted
            }
        return self._windows[number, index].result(), token - int(epoch.starts[index])

    def _epoch(self, number: int) -> Epoch:
        if number not in self._epochs:
            if len(self._epochs) == 2:  # this one and the next
                del self._epochs[min(self._epochs)]
            tokens = self.split.tokens
            self._epochs[number] = (
                shuffled_epoch(tokens, self._window_blocks, derive_key(*self._key, number))
                if self._shuffle
                else plain_epoch(tokens)
            )
        return self._epochs[number]

    def _blocks(self, epoch: int, window: int) -> np.ndarray:
        first = window * self._window_blocks
        return self._epoch(epoch).blocks[first : first + self._window_blocks]

    def _open(self, numbers: np.ndarray, epoch: int, window: int) -> Window:
        blocks = [self.split.read(int(number)) for number in numbers]
        rows = [len(block.offsets) - 1 for block in blocks]
        block = np.repeat(np.arange(len(blocks), dtype=np.uint32), rows)
        row = np.concatenate([np.arange(n, dtype=np.uint32) for n in rows])
        start = np.concatenate([block.offsets[:-1] for block in blocks])
        length = np.concatenate([np.diff(block.offsets) for block in blocks])
        if self._shuffle:
            order = permutation(len(length), derive_key(*self._key, epoch, window))
            block, row, start, length = block[order], row[order], start[order], length[order]
        cumulative = np.append(np.int64(0), np.cumsum(length, dtype=np.int64))
        return Window(numbers, [block.values for block in blocks], block, row, start, cumulative)


def _copy(window: Window, token: int, out: np.ndarray, done: int, lengths: list[int]) -> int:
    """Fill `out[done:]` from the window's `token` on, as far as it goes; the tokens then done."""
    cumulative = window.cumulative
    stop = min(token + len(out) - done, int(cumulative[-1]))
    first = int(cumulative.searchsorted(token, side="right")) - 1
    last = int(cumulative.searchsorted(stop))
    begins = window.start[first:last].tolist()
    bounds = cumulative[first : last + 1].tolist()
    skipped = token - bounds[0]
    begins[0] += skipped
    bounds[0] = token
    bounds[-1] = stop
    sizes = [after - before for before, after in pairwise(bounds)]
    values = window.values
    parts = [
        values[block][begin : begin + size]
        for block, begin, size in zip(window.block[first:last].tolist(), begins, sizes, strict=True)
    ]
    filled = done + stop - token
    np.concatenate(parts, out=out[done:filled])
    lengths += sizes
    return filled
