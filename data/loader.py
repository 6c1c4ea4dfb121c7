"""Batches for training and validation, in the order of data.order, read ahead by a thread."""

import itertools
import json
import logging
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import cached_property, partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from config import Config, ConfigError, differences, file_errors
from data.ledger import Ledger, StepShape, first_place, grad_accum_steps, saved_place
from data.shards import DataError, check_datasets, open_dataset, with_chat_template
from data.stream import Stream
from data.tokenizer import TOKENIZER, Tokenizer, load_tokenizer

log = logging.getLogger(__name__)

IGNORED = -100  # the label that torch's cross-entropy skips
LOCATED_AHEAD = 1024  # samples; affects the cost, never the order
READERS = 8  # threads that fetch and check blocks
OF_THE_NODE = (  # settings that may differ between nodes
    "data.datasets",  # the datasets' hashes are compared instead
    "validation.datasets",
    "data.cache_folder",
    "data.cache_gb",
    "run.folder",  # rank 0's counts
    "run.outputs",
)


class Batch(NamedTuple):
    """One microbatch of one data-parallel rank. Every tensor is int64 [local_batch_size, seq_len]."""

    tokens: torch.Tensor
    labels: torch.Tensor  # the next token; IGNORED where nothing is trained
    positions: torch.Tensor | None  # restart at each document with data.mask_documents, None without

    def to(self, device: torch.device) -> "Batch":
        """The batch on `device`. A copy from pinned memory does not make the host wait."""
        return Batch._make(None if x is None else x.to(device, non_blocking=True) for x in self)


class DataLoader:
    """The batches of data-parallel rank `dp_rank` of `dp_size`, as a function of the number of samples consumed.

    The place counts only what `next_step` has returned, not what was read ahead. It is the same
    on all ranks, so its state fits any number of ranks and any batch size.

    Raises DataError if the data cannot be used, ConfigError if the batch sizes do not divide.
    """

    def __init__(self, config: Config, dp_rank: int, dp_size: int, pin_memory: bool = False):
        self._datasets, held_out = check_datasets(config)
        self._config = config
        if config.run.folder:
            self.check_run(Path(config.run.folder))
        self._place = first_place(config, self._datasets)
        self._hashes = [(dataset.url, dataset.hash) for dataset in (*self._datasets, *held_out)]
        self.vocab_size: int = self._datasets[0].vocab_size  # of the tokenizer that all datasets share
        self.wait_seconds: float = 0.0
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="reader")
        order = self._readers, config.run.seed, config.data.window_blocks
        self._streams = [Stream(dataset.split("train"), dataset.hash, *order) for dataset in self._datasets]
        accumulation = grad_accum_steps(config.training, dp_size)
        self._shape = StepShape(dp_size, config.training.local_batch_size, accumulation)
        self.tokens_per_step: int = self._shape.samples * config.training.seq_len  # over all ranks
        self._dp_rank = dp_rank
        self._pin_memory = pin_memory
        self._upcoming: Iterator[list[Batch]] | None = None  # each step's microbatches, from the place on
        self._ahead: deque[Future[list[Batch]]] = deque()  # the next steps, which a thread makes
        self._prefetcher = _one_thread()
        self._ledger: Ledger | None = None

    def check_run(self, folder: Path) -> None:
        """Refuse to go on with a run that began with another tokenizer. Raises ConfigError."""
        if not (folder / TOKENIZER).is_file() or not (folder / "model.json").is_file():
            return  # not the folder of a run
        data, began = self._datasets[0], load_tokenizer(folder).fingerprint
        # Both, since another version of tokenizers may write the same tokenizer differently.
        if began != data.tokenizer_fingerprint and began != self.tokenizer.fingerprint:
            raise ConfigError(
                f"{folder}: this run began with tokenizer {began}, but the data in {data.url} was made with "
                f"{data.tokenizer_fingerprint}; prepare that data with --tokenizer {folder}, or begin a new run"
            )

    def check_place(self, state: dict[str, Any]) -> None:
        """Refuse a place of another run that this one cannot go on from. Raises DataError."""
        self._place.resumed(saved_place(state))

    def check_ranks(self) -> None:
        """Refuse to start if ranks would read different data or use it differently. Collective.

        Raises ConfigError, alike on all ranks, naming the dataset or the setting.
        """
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, (self._hashes, self._config))
        first_hashes, first_config = everyone[0]
        for rank, (hashes, config) in enumerate(everyone):
            if (hashes, config) == everyone[0]:  # quick, unlike the following on thousands of ranks
                continue
            facts: dict[str, tuple[Any, Any]] = {"number of datasets": (len(first_hashes), len(hashes))}
            pairs = zip(first_hashes, hashes, strict=False)  # equally many, or the numbers above differ
            facts |= {f"dataset {url}": (first, own) for (_, first), (url, own) in pairs}
            facts |= {key: pair for key, pair in differences(first_config, config).items() if key not in OF_THE_NODE}
            for what, (first, own) in facts.items():
                if first != own:
                    raise ConfigError(
                        f"{what}: {json.dumps(own)} on rank {rank}, {json.dumps(first)} on rank 0; every node needs "
                        "the same copy of the data and the same config",
                        agreed=True,
                    )

    def next_step(self) -> list[Batch]:
        """This rank's microbatches of the next optimizer step. Raises DataError, StoreError."""
        begin = time.perf_counter()
        try:
            batches = self._take_step()
            if self._ledger:
                self._ledger.step(self._place.samples, (batch.tokens.numpy() for batch in batches))
        except BaseException:
            self._stop_prefetch()  # the next call tries the same step again
            raise
        self._place = self._place._replace(samples=self._place.samples + self._shape.samples)
        self.wait_seconds = time.perf_counter() - begin
        return batches

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that made the data, shared by all datasets."""
        return with_chat_template(self._datasets).tokenizer()

    @property
    def tokens_seen(self) -> int:
        """Tokens consumed by the whole run so far, including earlier starts."""
        return self._place.tokens

    def state_dict(self) -> dict[str, Any]:
        """The current place as plain JSON, the same on all ranks."""
        return self._place.state()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from the place `state`.

        World size, batch sizes and prefetch may have changed freely. A change of seq_len, of
        the weights or of the set of datasets starts a new segment, in which no token comes again.

        Raises DataError if the order itself would change.
        """
        saved = saved_place(state)
        place = self._place.resumed(saved)
        for dataset in self._datasets:
            packed = dataset.packed_seq_len
            if packed and place.piece_tokens % packed:
                raise DataError(
                    f"data.shuffle_samples = true: this run began with training.seq_len = {place.piece_tokens}, and "
                    f"pieces of that length would cut the rows of {dataset.url}, packed with --seq-len {packed}; "
                    "start a new run, with checkpoint.initial_load to keep its weights"
                )
        for name in sorted(place.earlier.keys() - saved.earlier.keys()):
            log.warning(f"data: dataset {name} is dropped after {place.earlier[name]:,} tokens: not in data.datasets")
        for dataset in self._datasets:
            if dataset.hash not in saved.consumed:
                log.warning(f"data: {dataset.url} (dataset {dataset.hash}) is new to this run: from its first token")
        self._stop_prefetch()
        self._place = place
        if self._ledger:
            self._ledger.start(self.state_dict())

    def open_ledger(self, run_folder: Path, writing: Callable[..., AbstractContextManager[None]] = file_errors) -> None:
        """From here on, record in the run's folder what this rank is given, for `python -m tools.audit --prove`.

        Call it after loading the state, on one of the ranks that share a dp_rank.
        """
        urls = {dataset.hash: dataset.url for dataset in self._datasets}
        self._ledger = Ledger(run_folder, self._dp_rank, self._shape, self.state_dict(), urls, writing)

    def close(self) -> None:
        """Stop reading. Afterwards none of its threads touches a file or the cache."""
        self._stop_prefetch()
        if self._ledger:
            self._ledger.close()
        self._readers.shutdown(cancel_futures=True)

    def _take_step(self) -> list[Batch]:
        if self._upcoming is None:
            self._upcoming = self._steps()
        depth = self._config.data.prefetch_steps
        if not depth:
            return next(self._upcoming)
        while len(self._ahead) <= depth:  # the step to return and `depth` more
            self._ahead.append(self._prefetcher.submit(next, self._upcoming))
        return self._ahead.popleft().result()

    def _stop_prefetch(self) -> None:
        self._prefetcher.shutdown(cancel_futures=True)  # waits for the step being made
        self._prefetcher = _one_thread()
        self._ahead.clear()
        self._upcoming = None

    def _steps(self) -> Iterator[list[Batch]]:
        """Yield steps from the current place on. Locates many samples at a time, which costs little more than one."""
        segment, shape = self._place.segment, self._shape
        ahead = shape.samples * max(1, LOCATED_AHEAD // shape.samples)
        for begin in itertools.count(self._place.samples, ahead):
            datasets, starts = (array.tolist() for array in segment.locate(begin, ahead))
            for first in range(0, ahead, shape.samples):
                own = [slice(at, at + shape.local_batch_size) for at in shape.microbatches(first, self._dp_rank)]
                yield [self._batch(datasets[part], starts[part]) for part in own]

    def _batch(self, datasets: list[int], starts: list[int]) -> Batch:
        """A batch whose row i is the sample at place `starts[i]` in the order of stream `datasets[i]`."""
        seq_len, piece_tokens = self._place.segment.seq_len, self._place.piece_tokens
        empty = partial(torch.empty, len(datasets), seq_len, dtype=torch.int64, pin_memory=self._pin_memory)
        batch = Batch(empty(), empty(), empty() if self._config.data.mask_documents else None)
        for i, stream in enumerate(self._streams):
            rows = [row for row, dataset in enumerate(datasets) if dataset == i]
            if piece_tokens:
                for row in rows:
                    begin = 0
                    for token, count in stream.runs(starts[row], seq_len, piece_tokens):
                        _fill(batch, [row], range(begin, begin + count), stream, token)
                        begin += count
            elif rows:  # the rows follow each other in the stream
                _fill(batch, rows, range(seq_len), stream, starts[rows[0]])
        return batch


def _one_thread() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, thread_name_prefix="prefetch")


def _fill(batch: Batch, rows: list[int], columns: range, stream: Stream, start: int) -> None:
    """Fill `columns` of `rows`, row after row, with the tokens of a stream from `start` on.

    Each label is the next token of the stream. Positions restart in each row and document.
    """
    width, count = len(columns), len(rows) * len(columns)
    tokens, lengths, hidden = stream.read(start, count + 1)
    labels = tokens[1:]
    if hidden:
        labels = labels.astype(np.int64)
        for part in hidden:  # shifted by one: the label of a token is the next token
            labels[max(part.start - 1, 0) : max(part.stop - 1, 0)] = IGNORED
    filled = [(batch.tokens, tokens), (batch.labels, labels)]
    if batch.positions is not None:
        begins = sorted({*range(0, count, width), *accumulate(lengths[:-1])} - {count})
        ramp = np.arange(width)
        positions = np.concatenate([ramp[: stop - begin] for begin, stop in pairwise([*begins, count])])
        filled.append((batch.positions, positions))
    for tensor, values in filled:
        array = tensor.numpy()
        for i, row in enumerate(rows):
            array[row, columns.start : columns.stop] = values[i * width : (i + 1) * width]


def validation_batches(config: Config, dp_rank: int, dp_size: int) -> Iterator[Batch]:
    """Yield the held-out documents as batches of local_batch_size, in a fixed order.

    Takes at most validation.max_samples samples, evenly spread over all (0: all). Neither dp_size
    nor the training affects which. Every rank gets the same number of batches; missing rows are
    padding with labels IGNORED. Raises DataError, StoreError.
    """
    datasets = [open_dataset(url, config) for url in config.data.datasets]
    splits = [dataset.split("validation") for dataset in datasets]
    seq_len, size = config.training.seq_len, config.training.local_batch_size
    starts = [range(0, max(split.total_tokens - 1, 0), seq_len) for split in splits]  # first token of each sample
    bounds = list(accumulate(map(len, starts), initial=0))
    total = bounds[-1]
    if not total:
        raise DataError(f"data.datasets = {list(config.data.datasets)}: no held-out document has two tokens")
    chosen = min(total, config.validation.max_samples or total)
    with ThreadPoolExecutor(READERS, thread_name_prefix="reader") as readers:
        streams = [
            Stream(split, dataset.hash, readers, seed=None, read_ahead=chosen == total)
            for split, dataset in zip(splits, datasets, strict=True)
        ]
        for first in range(0, chosen, size * dp_size):
            own = range(first + dp_rank * size, min(first + (dp_rank + 1) * size, chosen))
            tokens = torch.zeros(size, seq_len, dtype=torch.int64)
            positions = torch.arange(seq_len).repeat(size, 1) if config.data.mask_documents else None
            batch = Batch(tokens, torch.full_like(tokens, IGNORED), positions)  # padding until it is filled
            for row, i in enumerate(own):
                sample = i * total // chosen
                number = bisect_right(bounds, sample) - 1
                start = starts[number][sample - bounds[number]]
                _fill(batch, [row], range(seq_len), streams[number], start)
            yield batch
