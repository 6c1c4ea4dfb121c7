"""Prompts with gold answers, whose bits per byte validations report: from a JSONL file or a folder of tuning data."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import torch

from config import Config, ConfigError, TitaniteError
from data.chat import encode_answer
from data.loader import IGNORED, Batch, padded_batches, validation_batches
from data.packing import PackedRows, pack
from data.shards import DataError, check_dataset, open_dataset
from data.tokenizer import Tokenizer
from storage.records import read_lines


class Answers(NamedTuple):
    """A set of answers. `batches(dp_rank, dp_size)`, as many on every rank, have the answers' tokens as labels."""

    name: str
    batches: Callable[[int, int], Iterator[Batch]]
    n_bytes: int = 0  # of the answers in UTF-8; 0: those of the labels


def load_answers(config: Config, tokenizer: Tokenizer) -> list[Answers]:
    """The sets of validation.answers. Raises ConfigError, DataError, StoreError."""
    validation = config.validation
    if validation.answers and not validation.enable:
        needed = "needs validation.enable = true, and data that holds documents out"
        raise ConfigError(f"validation.answers = {list(validation.answers)}: {needed}")
    names = name_sets(*validation.answers, *validation.datasets)
    sets = []
    for name, place in zip(names, validation.answers, strict=False):
        is_folder = "://" in place or Path(place).is_dir()
        load = _load_folder if is_folder else _load_file
        sets.append(load(name, place, config, tokenizer))
    return sets


def name_sets(*places: str) -> list[str]:
    """The last parts of their names, without .jsonl, or the whole ones if two share one."""
    names = [place.rstrip("/").rpartition("/")[2].removesuffix(".jsonl") for place in places]
    return names if len(set(names)) == len(names) else list(places)


def _load_folder(name: str, url: str, config: Config, tokenizer: Tokenizer) -> Answers:
    """All held-out examples of prepared tuning data."""
    dataset = open_dataset(url, config)
    if dataset.tokenizer_fingerprint != tokenizer.fingerprint:
        raise DataError(f"{url}: was made with another tokenizer than the model's")
    check_dataset(dataset, dataset, config)
    dataset.split("validation")
    data = replace(config.data, datasets=(url,), weights=())
    own = replace(config, data=data, validation=replace(config.validation, max_samples=0))
    return Answers(name, partial(_folder_batches, own, torch.from_numpy(tokenizer.byte_lengths)))


def _folder_batches(config: Config, byte_lengths: torch.Tensor, dp_rank: int, dp_size: int) -> Iterator[Batch]:
    """What is trained, but for special tokens such as an answer's end, which are no text."""
    for batch in validation_batches(config, dp_rank, dp_size):
        is_text = byte_lengths[batch.labels.clamp(min=0)] > 0
        yield batch._replace(labels=torch.where(is_text, batch.labels, IGNORED))


def _load_file(name: str, file: str, config: Config, tokenizer: Tokenizer) -> Answers:
    """The examples of a JSONL file: one in a sequence or, if documents are told apart, as many as fit."""
    seq_len = config.training.max_seq_len

    def read(record: Any) -> tuple[np.ndarray, int]:
        if not {"prompt", "answer"} <= record.keys():
            raise TitaniteError(f'has no "prompt" or no "answer", but the keys {", ".join(record)}')
        answer = record["answer"]
        if not answer:
            raise TitaniteError("the answer is empty")
        tokens = encode_answer(tokenizer, record["prompt"], answer)
        if len(tokens) > seq_len:
            raise TitaniteError(f"has {len(tokens)} tokens, more than training.seq_len = {seq_len}")
        return tokens, len(answer.encode())

    found = read_lines(Path(file), 'texts "prompt" and "answer"', read)
    examples = [tokens for tokens, _ in found]
    groups = [examples] if config.data.mask_documents else [[example] for example in examples]
    rows = [pack(pa.array(group), seq_len, tokenizer.eos_id).values.to_numpy() for group in groups]
    stream = PackedRows(np.concatenate(rows))
    samples = [(stream, first) for first in range(0, len(stream.values), seq_len)]
    return Answers(name, partial(padded_batches, samples, config), sum(n_bytes for _, n_bytes in found))
