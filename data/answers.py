"""Prompts with gold answers in a JSONL file, whose bits per byte validations report."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from config import Config, ConfigError, TitaniteError
from data.loader import Batch, padded_batches
from data.packing import PackedRows, marked, pack, shared_length
from data.tokenizer import Tokenizer
from storage.records import read_lines


class Answers(NamedTuple):
    """A set of answers. `batches(dp_rank, dp_size)`, as many on every rank, have the answers' tokens as labels."""

    name: str
    batches: Callable[[int, int], Iterator[Batch]]
    n_bytes: int  # of the answers in UTF-8


def load_answers(config: Config, tokenizer: Tokenizer) -> list[Answers]:
    """The sets of validation.answers. Raises ConfigError, DataError, StoreError."""
    validation = config.validation
    if validation.answers and not validation.enable:
        needed = "needs validation.enable = true, and data that holds documents out"
        raise ConfigError(f"validation.answers = {list(validation.answers)}: {needed}")
    names = name_sets(*validation.answers, *validation.datasets)
    sets = []
    for name, file in zip(names, validation.answers, strict=False):
        if "://" in file or Path(file).is_dir():
            raise ConfigError(f"validation.answers: {file}: must be a .jsonl file; validation.datasets takes folders")
        sets.append(_load_file(name, file, config, tokenizer))
    return sets


def name_sets(*places: str) -> list[str]:
    """The last parts of their names, without .jsonl, or the whole ones if two share one."""
    names = [place.rstrip("/").rpartition("/")[2].removesuffix(".jsonl") for place in places]
    return names if len(set(names)) == len(names) else list(places)


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


def encode_answer(tokenizer: Tokenizer, prompt: str, answer: str) -> np.ndarray:
    """Prompt and answer as an example, uint32 with the bits of data.packing: one text, as a model reads it.

    The answer begins where its tokens part from those of the prompt. These are the tokens of lm-evaluation-harness,
    unless the prompt ends in spaces, all of which it counts. Where nothing comes before the first, the end of another
    document does, as in training. Raises TitaniteError.
    """
    ids = tokenizer.encode(prompt + answer)
    start = shared_length(ids, tokenizer.encode(prompt))
    if start == len(ids):
        raise TitaniteError("the tokenizer makes no token of the answer")
    if start == 0:
        ids = [tokenizer.eos_id, *ids]
        start = 1
    return marked(ids, [place >= start for place in range(len(ids))])
