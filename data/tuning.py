"""Tokenise prompts with responses, and conversations, so that only the responses are trained. Imports no torch."""

import json
from bisect import bisect_right
from collections.abc import Sequence
from functools import lru_cache
from itertools import chain, pairwise
from typing import Any

import numpy as np

from config import TitaniteError
from data.chat import ChatTemplate
from data.packing import HIDDEN, START
from data.shards import DataError
from data.tokenizer import Tokenizer

# Format → the keys of an example in JSON lines or Parquet.
KEYS = {"sft": "prompt,response", "chat": "messages"}

Segments = list[tuple[list[int], bool]]  # (tokens, whether they are trained)


def encode_examples(texts: Sequence[str], format: str, tokenizer: Tokenizer) -> list[np.ndarray]:
    """The tokens of examples, uint32 with the bits of data.packing. Each example ends with eos.

    A text is the JSON list of an example's values. Format "sft" has [prompt, response] and trains the eos as part of
    the response. Format "chat" has [messages] and uses the tokenizer's template. The first token of an example is never
    trained, since nothing comes before it. Raises DataError quoting the example.
    """
    template = _chat_template(tokenizer.chat_template, tokenizer)
    segments: list[list[tuple[str, bool]]] = []
    for text in texts:
        try:
            values = json.loads(text)
            segments.append(_prompt_and_response(*values) if format == "sft" else template.segments(*values))
            if not any(trained for _, trained in segments[-1]):
                raise DataError("no message from the assistant, so nothing to train")
        except TitaniteError as error:
            raise DataError(f"{error}; in the example {text[:100]}") from None
    if format == "sft":
        flat = [text for parts in segments for text, _ in parts]
        encodings = iter(tokenizer.raw.encode_batch_fast(flat, add_special_tokens=False))
        begin, end = (tokenizer.prefix, False), ([tokenizer.eos_id], True)
        encoded = [[begin, *((next(encodings).ids, trained) for _, trained in parts), end] for parts in segments]
    else:
        encoded = [_split(parts, template) for parts in segments]
    return [_marked(parts, tokenizer.eos_id) for parts in encoded]


@lru_cache(maxsize=1)  # ChatTemplate copies the whole tokenizer
def _chat_template(source: str, tokenizer: Tokenizer) -> ChatTemplate:
    return ChatTemplate(source, tokenizer)


def check_examples(tokenizer: str, seq_len: int, max_characters: int, keys: Sequence[str], format: str) -> None:
    """Refuse options of data.prepare that do not suit examples. Raises DataError."""
    if not tokenizer:
        raise DataError(f"--format {format}: give the --tokenizer of the model to be tuned")
    if seq_len < 2:
        raise DataError(f"--format {format}: --seq-len {seq_len} must be at least 2, the later training.seq_len")
    if max_characters:
        raise DataError("--max-characters: examples are never cut")
    wanted = KEYS[format].count(",") + 1
    if len(keys) != wanted:
        raise DataError(f"--example-keys {','.join(keys)}: --format {format} needs {wanted}, such as {KEYS[format]}")


def _prompt_and_response(prompt: Any, response: Any) -> list[tuple[str, bool]]:
    if not isinstance(prompt, str) or not isinstance(response, str):
        raise DataError("prompt and response must be strings")
    return [(prompt, False), (response, True)]


def _split(parts: Sequence[tuple[str, bool]], template: ChatTemplate) -> Segments:
    """Encode a conversation's whole text and cut its tokens into the parts.

    A part alone may give other tokens, since Llama 2's tokenizer begins each text with a space. Still, all parts are
    encoded alone if the text up to the end of some part does not encode to the beginning of the whole: the model is
    asked with that text.
    """
    text = "".join(part for part, _ in parts)
    whole = template.raw.encode(text, add_special_tokens=False)
    ids, spans = whole.ids, whole.offsets  # each access copies
    cuts = [i for i, id in enumerate(ids) if id in template.cuts and text.startswith(template.cuts[id], spans[i][0])]
    places = [(0, 0, 0), *((spans[i][1], spans[i][0], i) for i in cuts)]  # (end, begin, index) of the token
    ends, done, starts = [end for end, _, _ in places], 0, [0]
    for part, _ in parts:
        done += len(part)
        _, begin, first = places[bisect_right(ends, done) - 1]  # until there the tokens are those of the whole
        own = template.encode_text(text[begin:done])
        starts.append(first + len(own))
        if ids[first : starts[-1]] != own:
            return [(template.encode_text(part), trained) for part, trained in parts]
    return [(ids[a:b], trained) for (a, b), (_, trained) in zip(pairwise(starts), parts, strict=True)]


def _marked(parts: Segments, eos_id: int) -> np.ndarray:
    """The tokens of one example with their bits. Adds a hidden eos if they do not end with one."""
    ids = list(chain.from_iterable(tokens for tokens, _ in parts))
    hidden = [not trained for tokens, trained in parts for _ in tokens]
    if not ids or ids[-1] != eos_id:
        ids, hidden = [*ids, eos_id], [*hidden, True]
    tokens = np.array(ids, np.uint32) | np.where(hidden, np.uint32(HIDDEN), np.uint32(0))
    tokens[0] |= np.uint32(START | HIDDEN)
    return tokens
