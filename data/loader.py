"""Batches for training and validation, in the order of data.order, read ahead by a thread."""

import logging
import math
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from functools import cached_property
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from config import Config, ConfigError, flatten
from data.ledger import Ledger, build_phases, count_steps, first_position, phase_at, saved_position
from data.packing import PackedRows
from data.shards import DataError, Split, check_datasets, digest, open_dataset, with_chat_template
from data.stream import Stream
from data.tokenizer import TOKENIZER, Tokenizer, load_tokenizer

log = logging.getLogger(__name__)

MANY_EPOCHS = 10  # so many that a model learns the text by heart
IGNORED = -100  # the label that torch's cross-entropy skips
LOCATED_AHEAD = 1024  # samples; affects the cost, never the order
PROMPT_TOKENS = 64  # of a document, at most, for the prompt of a sample, and
PROMPT_BYTES = 40  # of that
READERS = 8  # threads that fetch and check blocks
# Settings that may differ between nodes. For the run's folder rank 0's settings count.
OF_THE_NODE = ("data.cache_folder", "data.cache_gb", "run.folder", "run.outputs")


class Batch(NamedTuple):
    """A microbatch of one data-parallel rank. Every tensor is int64 [local_batch_size, seq_len]; more rows if cut."""

    tokens: torch.Tensor
    labels: torch.Tensor  # the next token; IGNORED where nothing is trained
    positions: torch.Tensor | None = None  # restart at each document with data.mask_documents, None without

    def to(self, device: torch.device) -> "Batch":
        """The batch on `device`. A copy from pinned memory does not make the host wait."""
        return Batch._make(None if x is None else x.to(device, non_blocking=True) for x in self)

    def cut(self, seq_len: int) -> "Batch":
        """The same tokens in rows of `seq_len` tokens, into which each row is cut."""
        if seq_len == self.tokens.shape[1]:
            return self
        positions = self.positions
        if positions is not None:  # of a document that began in the row before: from this row's start on
            positions = positions.view(-1, seq_len).minimum(torch.arange(seq_len, device=positions.device))
        return Batch(self.tokens.view(-1, seq_len), self.labels.view(-1, seq_len), positions)


class DataLoader:
    """The batches of data-parallel rank `dp_rank` of `dp_size`, as a function of the number of samples consumed.

    The position counts only what `next_step` has returned, not what was read ahead. It is the same on all ranks, so its
    state fits any number of ranks and any batch size. Raises DataError, ConfigError.
    """

    def __init__(self, config: Config, dp_rank: int, dp_size: int, pin_memory: bool = False):
        self._datasets, self._held_out = check_datasets(config)
        self._config = config
        if config.run.folder:
            self.check_run(Path(config.run.folder))
        self._position = first_position(config, self._datasets)
        self.vocab_size: int = self._datasets[0].vocab_size  # of the tokenizer that all datasets share
        self.wait_seconds: float = 0.0
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="reader")
        order = config.run.seed, config.data.window_blocks
        self._streams = [Stream(own.split("train"), own.hash, self._readers, *order) for own in self._datasets]
        self._phases = build_phases(config.training, dp_size)
        self._phase = self._phases[0]  # of the last step; before any, of the run's first
        self.seq_len: int = config.training.seq_lens[0]  # of its sequences
        self._dp_rank = dp_rank
        self._pin_memory = pin_memory
        self._upcoming: Iterator[list[Batch]] | None = None  # each step's microbatches, from the position on
        self._ahead: deque[Future[list[Batch]]] = deque()  # the next steps, which a thread makes
        self._prefetcher = ThreadPoolExecutor(1, thread_name_prefix="prefetch")
        self._ledger: Ledger | None = None

    def check_run(self, folder: Path) -> None:
        """Refuse to go on with a run that began with another tokenizer. Raises ConfigError."""
        if not (folder / TOKENIZER).is_file() or not (folder / "model.json").is_file():
            return  # not the folder of a run
        if load_tokenizer(folder).fingerprint != self.tokenizer.fingerprint:
            data = f"{self._datasets[0].url} was made with; prepare the data with --tokenizer {folder}"
            raise ConfigError(f"{folder}: this run began with another tokenizer than {data}, or begin a new run")

    def check_position(self, state: dict[str, Any]) -> None:
        """Raise DataError for the position of another run that this one cannot go on from."""
        self._position.resumed(saved_position(state))

    def check_ranks(self) -> None:
        """Raise ConfigError on all ranks, naming the setting, if ranks have different data or settings. Collective."""
        facts = {key: str(value) for key, value in flatten(self._config).items()}
        facts["data.datasets"] = str([dataset.hash for dataset in self._datasets])
        facts["validation.datasets"] = str([dataset.hash for dataset in self._held_out])
        answers = [digest(Path(file).read_bytes()) for file in self._config.validation.answers]
        facts["validation.answers"] = str(answers)
        for key in OF_THE_NODE:
            del facts[key]
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, facts)
        for rank, own in enumerate(everyone):
            for key, value in sorted(own.items() - everyone[0].items()):
                found = f"{value} on rank {rank}, {everyone[0][key]} on rank 0"
                raise ConfigError(f"{key}: {found}; every node needs the same data and config", agreed=True)

    def next_step(self) -> list[Batch]:
        """This rank's microbatches of the next optimizer step. Raises DataError, StoreError."""
        begin = time.perf_counter()
        depth = self._config.data.prefetch_steps
        self._upcoming = self._upcoming or self._steps()
        self._enter_phase()
        try:
            while len(self._ahead) <= depth > 0:  # the step to return and `depth` more
                self._ahead.append(self._prefetcher.submit(next, self._upcoming))
            batches = self._ahead.popleft().result() if depth else next(self._upcoming)
            if self._ledger:
                self._ledger.step(self._position.tokens, (batch.tokens.numpy() for batch in batches))
        except BaseException:
            self._stop_prefetch()  # the next call tries the same step again
            raise
        self._position = self._position._replace(samples=self._position.samples + self._phase.shape.samples)
        self.wait_seconds = time.perf_counter() - begin
        return [batch.cut(self.seq_len) for batch in batches]

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that made the data, shared by all datasets."""
        return with_chat_template(self._datasets).tokenizer()

    @property
    def tokens_seen(self) -> int:
        """Tokens consumed by the whole run so far, including earlier starts."""
        return self._position.tokens

    @property
    def tokens_per_step(self) -> int:
        """Tokens of the step returned last, over all ranks; before any, of the run's first."""
        return self._phase.tokens_per_step

    @property
    def _total_tokens(self) -> int:
        """Tokens of the training data."""
        return sum(dataset.split("train").total_tokens for dataset in self._datasets)

    @property
    def is_chat(self) -> bool:
        """Whether the run learns conversations by a chat template."""
        return any(dataset.kind == "chat" for dataset in self._datasets)

    def settle(self, config: Config) -> Config:
        """`config` with the steps of `training.epochs` and a prompt for its sample.

        Without validation if the data holds nothing out.
        """
        epochs = config.training.epochs
        if epochs:
            steps = sum(count_steps(self._phases, tokens=math.ceil(epochs * self._total_tokens)))
            config = replace(config, training=replace(config.training, steps=steps))
        held_out = [dataset for dataset in self._held_out or self._datasets if dataset.splits["validation"].shards]
        if config.validation.enable and not held_out:
            log.info("the data holds nothing out, so nothing is validated; --validation-fraction holds out more")
            config = replace(config, validation=replace(config.validation, enable=False))
        if config.validation.sample_tokens and not config.validation.sample_prompt:
            name = "validation" if held_out else "train"
            dataset = [*held_out, *self._datasets][0]
            longest = min(PROMPT_TOKENS, config.training.max_seq_len // 2)
            prompt = _first_words(dataset.splits[name], self.tokenizer, longest)
            config = replace(config, validation=replace(config.validation, sample_prompt=prompt))
        return config

    def describe(self, steps: int) -> str:
        """What a run of `steps` reads, in words."""
        total = self._total_tokens
        sizes = [phase.tokens_per_step for phase in self._phases]
        counts = count_steps(self._phases, steps)
        times = np.dot(counts, sizes) / total
        parts = [f"{count:,} steps of {size:,}" for count, size in zip(counts, sizes, strict=True)]
        line = f"data: {total:,} tokens; {', '.join(parts)} read them {times:.3g} times"
        if times > MANY_EPOCHS:
            line += "; more text, or fewer steps, may give a lower validation loss"
        return line

    def state_dict(self) -> dict[str, Any]:
        """The current position as plain JSON, the same on all ranks."""
        return self._position.state()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`, as `Position.resumed` says. Raises DataError if the order would change."""
        saved = saved_position(state)
        position = self._position.resumed(saved)
        for name in sorted(position.earlier.keys() - saved.earlier.keys()):
            log.warning(
                f"data: dataset {name} is dropped after {position.earlier[name]:,} tokens: not in data.datasets"
            )
        for dataset in self._datasets:
            if dataset.hash not in saved.consumed:
                log.warning(f"data: {dataset.url} (dataset {dataset.hash}) is new to this run: from its first token")
        self._stop_prefetch()
        self._position = position

    def open_ledger(self, run_folder: Path, start_id: str) -> None:
        """Record from here on what this rank is given, in the run's folder. For one rank of each dp_rank."""
        urls = {dataset.hash: dataset.url for dataset in self._datasets}
        self._enter_phase()
        start = {"start": self.state_dict(), "shape": self._phase.shape._asdict(), "urls": urls, "id": start_id}
        self._ledger = Ledger(run_folder / "data" / f"rank-{self._dp_rank:05}.jsonl", start)

    def close(self) -> None:
        """Stop reading. Afterwards none of its threads touches a file or the cache."""
        self._stop_prefetch()
        self._prefetcher.shutdown()
        if self._ledger:
            self._ledger.close()
        self._readers.shutdown(cancel_futures=True)

    def _enter_phase(self) -> None:
        """Take the next step's batch and length from their schedules."""
        tokens = self._position.tokens
        phase = phase_at(self._phases, tokens)
        seq_len = self._config.training.seq_len_at(tokens)
        if (phase, seq_len) == (self._phase, self.seq_len):
            return
        rows = phase.tokens_per_step // seq_len
        log.info(f"data: from token {tokens:,} on a step has {rows:,} x {seq_len:,} tokens")
        self.seq_len = seq_len
        self._phase = phase
        if self._ledger:
            self._ledger.begin_phase(self._position, phase.shape)

    def _stop_prefetch(self) -> None:
        for step in self._ahead:
            step.cancel()
        wait(self._ahead)  # one may be in the making
        self._ahead.clear()
        self._upcoming = None

    def _steps(self) -> Iterator[list[Batch]]:
        """Yield steps from the position on. Locates many samples at a time, which costs little more than one."""
        position = self._position
        while True:
            phase = phase_at(self._phases, position.tokens)
            shape = phase.shape
            steps = min(phase.steps_from(position.tokens), max(1, LOCATED_AHEAD // shape.samples))
            ahead = shape.samples * steps
            datasets, starts = position.segment.locate(position.samples, ahead)
            position = position._replace(samples=position.samples + ahead)
            for first in range(0, ahead, shape.samples):
                batches = []
                for at in shape.microbatches(first, self._dp_rank):
                    own = slice(at, at + shape.local_batch_size)
                    batches.append(self._batch(datasets[own], starts[own]))
                yield batches

    def _batch(self, datasets: np.ndarray, starts: np.ndarray) -> Batch:
        """A batch whose row i is the sample at token `starts[i]` of stream `datasets[i]`."""
        batch = _empty(len(datasets), self._config, self._pin_memory)
        for dataset in np.unique(datasets):
            rows = np.flatnonzero(datasets == dataset)  # consecutive in its stream
            _fill(batch, rows, self._streams[dataset], int(starts[rows[0]]))
        return batch


def _first_words(split: Split, tokenizer: Tokenizer, longest: int) -> str:
    """Up to three words with which a document begins, of its first `longest` tokens."""
    block = split.read(0)
    for begin, end in pairwise(block.offsets):
        tokens = split.ids(block.values[begin : min(end, begin + longest)])
        words = tokenizer.decode(tokens.tolist()).split(maxsplit=3)[:3]
        if words:
            return " ".join(words).encode()[:PROMPT_BYTES].decode(errors="ignore")
    return ""


def _empty(rows: int, config: Config, pin_memory: bool = False) -> Batch:
    """A batch to be filled."""
    shape = rows, config.training.max_seq_len
    fields = [
        torch.empty(shape, dtype=torch.int64, pin_memory=pin_memory) for _ in range(2 + config.data.mask_documents)
    ]
    return Batch(*fields)


def _fill(batch: Batch, rows: Sequence[int] | np.ndarray, stream: Stream | PackedRows, start: int) -> None:
    """Fill `rows` with the tokens of a stream from `start` on, labels with the next token of each."""
    seq_len = batch.tokens.shape[1]
    count = len(rows) * seq_len
    tokens, lengths, hidden = stream.read(start, count + 1)
    labels = tokens[1:]
    if hidden:
        labels = labels.astype(np.int64)
        for part in hidden:  # shifted by one: the label of a token is the next token
            labels[max(part.start - 1, 0) : max(part.stop - 1, 0)] = IGNORED
    filled = [(batch.tokens, tokens), (batch.labels, labels)]
    if batch.positions is not None:
        begins = sorted({*range(0, count, seq_len), *accumulate(lengths[:-1])} - {count})
        ramp = np.arange(seq_len)
        positions = np.concatenate([ramp[: stop - begin] for begin, stop in pairwise([*begins, count])])
        filled.append((batch.positions, positions))
    for tensor, values in filled:
        tensor.numpy()[rows] = values[:count].reshape(-1, seq_len)


def validation_batches(config: Config, dp_rank: int, dp_size: int) -> Iterator[Batch]:
    """Yield validation.max_samples held-out samples (0: all), evenly spread, the same whatever dp_size, as batches.

    Every rank gets equally many batches; missing rows are padding with labels IGNORED. Raises DataError, StoreError.
    """
    splits = [open_dataset(url, config).splits["validation"] for url in config.data.datasets]
    splits = [split for split in splits if split.shards]
    seq_len = config.training.max_seq_len
    total, datasets, starts = _held_out_samples(splits, seq_len, config.validation.max_samples)
    if not total:
        raise DataError(f"data.datasets = {list(config.data.datasets)}: no held-out document has two tokens")
    with ThreadPoolExecutor(READERS, thread_name_prefix="reader") as readers:
        streams = [Stream(split, "", readers, None, 1, read_ahead=len(starts) == total) for split in splits]
        samples = [(streams[dataset], start) for dataset, start in zip(datasets, starts, strict=True)]
        yield from padded_batches(samples, config, dp_rank, dp_size)


def padded_batches(
    samples: Sequence[tuple[Stream | PackedRows, int]], config: Config, dp_rank: int, dp_size: int
) -> Iterator[Batch]:
    """Yield samples, each a stream and the first token there, as batches. Missing ones are rows with labels IGNORED."""
    size = config.training.local_batch_size
    for turn in range(0, len(samples), size * dp_size):
        first = turn + dp_rank * size
        batch = _empty(size, config)
        batch.tokens.zero_()  # padding
        batch.labels.fill_(IGNORED)
        if batch.positions is not None:
            batch.positions.copy_(torch.arange(config.training.max_seq_len))
        for row, (stream, start) in enumerate(samples[first : first + size]):
            _fill(batch, [row], stream, start)
        yield batch


def _held_out_samples(splits: list[Split], seq_len: int, max_samples: int) -> tuple[int, list[int], list[int]]:
    """How many samples there are, and the split and first token there of each one to validate on."""
    counts = [math.ceil(max(split.total_tokens - 1, 0) / seq_len) for split in splits]
    bounds = np.cumsum([0, *counts])
    total = int(bounds[-1])
    count = min(total, max_samples or total)
    chosen = np.arange(count) * total // max(count, 1)
    split = bounds.searchsorted(chosen, side="right") - 1
    starts = (chosen - bounds[split]) * seq_len
    return total, split.tolist(), starts.tolist()
