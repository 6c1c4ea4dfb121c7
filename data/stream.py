"""The tokens of one dataset as an endless stream that can be read at any place. Imports no torch."""

import logging
from collections.abc import Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np

from config import Config
from data.order import Epoch, build_epoch, derive_key, permutation, window_pieces
from data.packing import unpack
from data.shards import BadBlockError, Block, Dataset, Split
from data.storage import StorageError

log = logging.getLogger(__name__)


class Window(NamedTuple):
    """Blocks shuffled together. The document arrays are in the order of the stream."""

    blocks: np.ndarray  # [blocks] their numbers in the split
    values: list[np.ndarray]  # tokens of each block
    block: np.ndarray  # [documents] which of `values` holds the document
    row: np.ndarray  # [documents] its row in that block
    start: np.ndarray  # [documents] its first token there
    cumulative: np.ndarray  # [documents + 1] its first token in the window
    masked: frozenset[int]  # indices of those in `values` that are zeros in place of a bad block


class Reading(NamedTuple):
    """The blocks of a window, on their way."""

    blocks: np.ndarray
    results: list[Future[Block]]


class Stream:
    """A split as one stream of tokens, epoch after epoch; see data.order.

    `masked` holds the blocks that are read as zeros; with `mask_bad_blocks` those that turn
    out to be bad join it, otherwise the first of them raises BadBlockError.

    With `shuffle=False` the documents come as they are stored, a block at a time. Two windows
    are kept: the one in use, and with `read_ahead` the next, whose blocks `readers` fetch in the background.
    """

    def __init__(
        self,
        split: Split,
        name: str,
        readers: ThreadPoolExecutor,
        seed: int = 0,
        window_blocks: int = 1,
        shuffle: bool = True,
        mask_bad_blocks: bool = False,
        read_ahead: bool = True,
    ):
        self.split = split
        self.name = name
        self.epoch_tokens = split.total_tokens
        self.masked: set[int] = set()
        self._mask_bad_blocks = mask_bad_blocks
        self._read_ahead = read_ahead
        self._readers = readers
        self._key = (seed, name)
        self._window_blocks = window_blocks if shuffle else 1
        self._shuffle = shuffle
        self._epochs: dict[int, Epoch] = {}
        self._reading: dict[tuple[int, int], Reading] = {}
        self._window: Window | None = None
        self._window_start = 0  # its first token in the stream
        self._pieces: tuple[int, range, list[int]] = (0, range(0), [])  # piece_tokens, those of a window, their order

    def read(self, start: int, out: np.ndarray) -> tuple[list[int], list[slice]]:
        """Fill `out` [n] with tokens [start, start + n) of the stream.

        Returns the length of each document's (or packed example's) part in `out`, in order, and where `out` is
        masked: not to be trained.
        Raises DataError, StorageError.
        """
        done = 0
        lengths: list[int] = []
        masked: list[slice] = []
        while done < len(out):
            window, token = self._locate(start + done)
            done = _copy(window, token, out, done, lengths, masked)
        if self.split.packed_seq_len:
            lengths, hidden = unpack(out)
            masked += hidden
        return lengths, masked

    def runs(self, place: int, count: int, piece_tokens: int) -> list[tuple[int, int]]:
        """Places [place, place + count) of the order as runs of the stream, (first token, tokens).

        Each run is in one piece; `piece_tokens` 0: the order is the stream itself.
        """
        if not piece_tokens:
            return [(place, count)]
        found = []
        while count:
            piece, skipped = divmod(place, piece_tokens)
            size = min(piece_tokens - skipped, count)
            found.append((self._piece(piece, piece_tokens) * piece_tokens + skipped, size))
            place, count = place + size, count - size
        return found

    def _piece(self, piece: int, piece_tokens: int) -> int:
        """The piece of the stream that stands at this place of the order."""
        known, pieces, order = self._pieces
        if known == piece_tokens and piece in pieces:
            return pieces[order[piece - pieces.start]]
        number, in_epoch = divmod(piece * piece_tokens, self.epoch_tokens)
        epoch = self._epoch(number)
        index = epoch.window_of(in_epoch)
        start, stop = (number * self.epoch_tokens + int(epoch.starts[i]) for i in (index, index + 1))
        pieces = window_pieces(start, stop, piece_tokens)
        if piece not in pieces:
            return piece
        order = permutation(len(pieces), derive_key(*self._key, number, index, "pieces")).tolist()
        self._pieces = piece_tokens, pieces, order
        return pieces[order[piece - pieces.start]]

    def mask(self, blocks: set[int]) -> None:
        """Read these blocks as zeros from now on."""
        self.masked |= blocks
        self._window = None
        self._reading.clear()

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

    def _locate(self, token: int) -> tuple[Window, int]:
        """The window that holds a token of the stream, and the token's place in it."""
        place = token - self._window_start
        if self._window is None or not 0 <= place < self._window.cumulative[-1]:
            self._window = None
            number, in_epoch = divmod(token, self.epoch_tokens)
            epoch = self._epoch(number)
            index = epoch.window_of(in_epoch)
            place = in_epoch - int(epoch.starts[index])
            self._window = self._open(number, index)
            self._window_start = token - place
        return self._window, place

    def _open(self, number: int, index: int) -> Window:
        """Take the blocks of a window and start reading the next one's."""
        last = index + 2 == len(self._epoch(number).starts)
        following = (number + 1, 0) if last else (number, index + 1)
        for key in self._reading.keys() - {(number, index), following}:
            for result in self._reading.pop(key).results:
                result.cancel()
        reading = self._reading.pop((number, index), None)
        reading = self._read_again(reading) if reading else self._start_reading(number, index)
        try:
            contents = [result.result() for result in reading.results]
        except CancelledError:
            raise self._closed() from None
        order_key = derive_key(*self._key, number, index) if self._shuffle else None
        window = _shuffled_window(reading.blocks, contents, order_key, self.masked)
        # Not before: the first batch of a start would wait for cores.
        if self._read_ahead and following not in self._reading:
            self._reading[following] = self._start_reading(*following)
        return window

    def _read_block(self, block: int) -> Block:
        if block in self.masked:
            return self.split.read_zeros(block)
        try:
            return self.split.read(block)
        except BadBlockError as error:
            if not self._mask_bad_blocks:
                raise
            log.warning("%s; its tokens are masked", error)
            self.masked.add(block)
            return self.split.read_zeros(block)

    def _start_reading(self, number: int, index: int) -> Reading:
        first = index * self._window_blocks
        blocks = self._epoch(number).blocks[first : first + self._window_blocks]
        return Reading(blocks, [self._submit(block) for block in blocks])

    def _read_again(self, reading: Reading) -> Reading:
        """With what was out of reach when it was read ahead asked for once more: that may be long ago."""
        results = [
            self._submit(block) if _was_out_of_reach(result) else result
            for block, result in zip(reading.blocks, reading.results, strict=True)
        ]
        return reading._replace(results=results)

    def _submit(self, block: int) -> Future[Block]:
        try:
            return self._readers.submit(self._read_block, int(block))
        except RuntimeError as error:  # no more tasks, or no more threads
            raise self._closed(f", or has no thread: {error}") from None

    def _closed(self, otherwise: str = "") -> StorageError:
        """What to raise once another thread has closed the loader."""
        return StorageError(f"{self.split.folder.url}: cannot be read: the loader is closed{otherwise}")

    def _epoch(self, number: int) -> Epoch:
        if number not in self._epochs:
            if len(self._epochs) == 2:  # this one and the next
                del self._epochs[min(self._epochs)]
            key = derive_key(*self._key, number) if self._shuffle else None
            self._epochs[number] = build_epoch(self.split.tokens, self._window_blocks, key)
        return self._epochs[number]


def _was_out_of_reach(result: Future[Block]) -> bool:
    return result.done() and not result.cancelled() and isinstance(result.exception(), StorageError)


def open_streams(config: Config, datasets: Sequence[Dataset], readers: ThreadPoolExecutor) -> list[Stream]:
    """The training stream of each dataset, in the order of the config's seed."""
    seed, window_blocks, mask = config.run.seed, config.data.window_blocks, config.data.on_bad_block == "mask"
    return [
        Stream(dataset.split("train"), dataset.hash, readers, seed, window_blocks, mask_bad_blocks=mask)
        for dataset in datasets
    ]


def _shuffled_window(blocks: np.ndarray, contents: list[Block], key: int | None, masked: set[int]) -> Window:
    """The documents of some blocks in the order of `key`, or as they are stored when that is None."""
    rows = [len(content.offsets) - 1 for content in contents]
    block = np.repeat(np.arange(len(contents), dtype=np.uint32), rows)
    row = np.concatenate([np.arange(n, dtype=np.uint32) for n in rows])
    start = np.concatenate([content.offsets[:-1] for content in contents])
    length = np.concatenate([np.diff(content.offsets) for content in contents])
    if key is not None:
        order = permutation(len(length), key)
        block, row, start, length = block[order], row[order], start[order], length[order]
    cumulative = np.append(np.int64(0), np.cumsum(length, dtype=np.int64))
    zeros = frozenset(i for i, number in enumerate(blocks.tolist()) if number in masked)
    return Window(blocks, [content.values for content in contents], block, row, start, cumulative, zeros)


def _copy(window: Window, token: int, out: np.ndarray, done: int, lengths: list[int], masked: list[slice]) -> int:
    """Fill `out[done:]` from the window's `token` on, as far as it goes; the tokens then done.

    Appends the lengths of the documents' parts, and what of `out` is masked.
    """
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
    blocks = window.block[first:last].tolist()
    parts = [values[block][begin : begin + size] for block, begin, size in zip(blocks, begins, sizes, strict=True)]
    filled = done + stop - token
    np.concatenate(parts, out=out[done:filled])
    lengths += sizes
    if window.masked:
        ends = list(accumulate(sizes, initial=done))
        masked += [slice(ends[i], ends[i + 1]) for i, block in enumerate(blocks) if block in window.masked]
    return filled
