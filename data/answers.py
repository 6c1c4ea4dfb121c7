"""Prompts with gold answers, whose bits per byte validations report: from a JSONL file or a folder of tuning data."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from config import Config, ConfigError, file_errors
from data.loader import IGNORED, Batch, validation_batches
from data.shards import DataError, check_dataset, open_dataset
from data.tokenizer import Tokenizer

KEYS = ("prompt", "answer")


class Answers(NamedTuple):
    """A set of answers. `batches(dp_rank, dp_size)`, as many on every rank, have the answers' tokens as labels."""

    name: str
    batches: Callable[[int, int], Iterator[Batch]]
    n_bytes: int  # of the answers in UTF-8; 0: those of the labels
    summary: str


class Example(NamedTuple):
    """The tokens of a prompt and its answer, which begins at token `start`."""

    ids: list[int]
    start: int


def load_answers(config: Config, tokenizer: Tokenizer) -> list[Answers]:
    """The sets of validation.answers. Raises ConfigError, DataError, StoreError."""
    places = config.validation.answers
    if places and not config.validation.enable:
        needed = "validation.enable = true, and data that holds documents out"
        raise ConfigError(f"validation.answers = {list(places)}: needs {needed}")
    names = [_last_name(place) for place in (*places, *config.validation.datasets)]
    if len(set(names)) < len(names):
        names = list(places)
    sets = []
    for name, place in zip(names, places, strict=False):  # those of datasets come last
        is_folder = "://" in place or Path(place).is_dir()
        load = _load_folder if is_folder else _load_file
        sets.append(load(name, place, config, tokenizer))
    return sets


def _last_name(place: str) -> str:
    return place.rstrip("/").rpartition("/")[2].removesuffix(".jsonl")


def _load_folder(name: str, url: str, config: Config, tokenizer: Tokenizer) -> Answers:
    """The held-out examples of prepared tuning data."""
    refused = f"validation.answers: {url}:"
    if url.endswith(".jsonl"):
        raise ConfigError(f"{refused} a JSONL file must be on the disk of every node")
    dataset = open_dataset(url, config)
    if not dataset.packed_seq_len:
        raise DataError(f"{refused} holds documents; answers are in what --format=sft or chat has prepared")
    if dataset.tokenizer_fingerprint != tokenizer.fingerprint:
        raise DataError(f"{refused} was made with another tokenizer than the model's")
    check_dataset(dataset, dataset, config)
    rows = dataset.split("validation").total_tokens // dataset.packed_seq_len
    byte_lengths = torch.from_numpy(tokenizer.byte_lengths)
    if not byte_lengths.any():
        raise DataError(f"{refused} the bytes of its tokens are not known with this tokenizer; name a JSONL file")
    data = replace(config.data, datasets=(url,), weights=())
    own = replace(config, data=data, validation=replace(config.validation, max_samples=0))
    return Answers(name, partial(_folder_batches, own, byte_lengths), 0, f"answers {name}: {rows:,} sequences")


def _folder_batches(config: Config, byte_lengths: torch.Tensor, dp_rank: int, dp_size: int) -> Iterator[Batch]:
    """What was trained on, but for special tokens, such as the end of an answer: they are no text."""
    for batch in validation_batches(config, dp_rank, dp_size):
        is_text = byte_lengths[batch.labels.clamp(min=0)] > 0
        yield batch._replace(labels=torch.where(is_text, batch.labels, IGNORED))


def _load_file(name: str, file: str, config: Config, tokenizer: Tokenizer) -> Answers:
    """The examples of a JSONL file."""
    seq_len = config.training.seq_len
    examples = []
    n_bytes = 0
    with file_errors(), open(file, "rb") as lines:  # as bytes, since JSON may hold other line ends
        for number, line in enumerate(lines, start=1):
            where = f"validation.answers: {file}, line {number}:"
            if not line.strip():
                continue
            prompt, answer = _read_pair(line, where)
            example = encode_pair(tokenizer, prompt, answer)
            length = len(example.ids)
            if example.start == length:
                raise ConfigError(f"{where} answer = {answer!r}: the tokenizer makes no token of it")
            if length > seq_len:
                raise ConfigError(f"{where} has {length} tokens, more than training.seq_len = {seq_len}")
            examples.append(example)
            n_bytes += len(answer.encode())
    if not examples:
        raise ConfigError(f"validation.answers: {file}: holds no answers")
    rows = _rows(examples, config)
    summary = f"answers {name}: {len(examples):,} of {n_bytes:,} bytes in {len(rows):,} sequences"
    return Answers(name, partial(_file_batches, rows, config), n_bytes, summary)


def _read_pair(line: bytes, where: str) -> tuple[str, str]:
    """Prompt and answer of a line. Raises ConfigError."""
    try:
        record = json.loads(line)
    except ValueError as error:  # also bytes that are not UTF-8
        raise ConfigError(f"{where} not valid JSON: {error}") from None
    if not isinstance(record, dict):
        raise ConfigError(f"{where} must be an object with {' and '.join(KEYS)}")
    texts = []
    for key in KEYS:
        if key not in record:
            raise ConfigError(f"{where} has no {key!r}, but the keys {', '.join(map(repr, record)) or 'of nothing'}")
        text = record[key]
        if not isinstance(text, str) or not _is_utf8(text):
            raise ConfigError(f"{where} {key} = {repr(text)[:80]}: must be a text")
        texts.append(text)
    prompt, answer = texts
    if not answer:
        raise ConfigError(f"{where} the answer is empty")
    return prompt, answer


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:  # half a surrogate pair, as JSON may spell it
        return False
    return True


def encode_pair(tokenizer: Tokenizer, prompt: str, answer: str) -> Example:
    """Both as one text, as a model reads it. The answer begins where its tokens part from those of the prompt alone.

    A token of both texts counts, too. These are the tokens of lm-evaluation-harness, unless the prompt ends in spaces,
    all of which it counts. Where nothing comes before the first of them, the end of a document does, as in training.
    """
    ids = tokenizer.encode(prompt + answer)
    asked = tokenizer.encode(prompt)
    start = 0
    while start < min(len(ids), len(asked)) and ids[start] == asked[start]:
        start += 1
    if start == 0:
        return Example([tokenizer.eos_id, *ids], 1)
    return Example(ids, start)


def _rows(examples: Sequence[Example], config: Config) -> list[list[Example]]:
    """The examples of each sequence: one or, if documents are told apart, as many as fit, in order."""
    rows: list[list[Example]] = []
    room = 0
    for example in examples:
        if len(example.ids) > room or not config.data.mask_documents:
            rows.append([])
            room = config.training.seq_len
        rows[-1].append(example)
        room -= len(example.ids)
    return rows


def _file_batches(rows: Sequence[Sequence[Example]], config: Config, dp_rank: int, dp_size: int) -> Iterator[Batch]:
    """Yield the rows, the same ones whatever dp_size, as batches. What is missing is padding without labels."""
    size = config.training.local_batch_size
    seq_len = config.training.seq_len
    for turn in range(0, len(rows), size * dp_size):
        first = turn + dp_rank * size
        tokens = torch.zeros(size, seq_len, dtype=torch.int64)
        labels = torch.full_like(tokens, IGNORED)
        positions = torch.arange(seq_len).repeat(size, 1)
        for row, examples in enumerate(rows[first : first + size]):
            at = 0
            for ids, start in examples:
                end = at + len(ids)
                tokens[row, at:end] = torch.tensor(ids)
                labels[row, at + start - 1 : end - 1] = torch.tensor(ids[start:])
                positions[row, at:] = torch.arange(seq_len - at)
                at = end
            positions[row, at:] = torch.arange(seq_len - at)
        yield Batch(tokens, labels, positions if config.data.mask_documents else None)
