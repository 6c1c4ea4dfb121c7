"""Pairs and conversations as examples for fine-tuning, of which only answers are trained."""

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from config import TitaniteError
from data.chat import (
    ADVICE,
    ANSWERED,
    ASKED,
    BUILT_IN,
    ChatTemplate,
    Message,
    chat_of,
    conversion,
    load_transformers,
)
from data.packing import marked, shared_length
from data.shards import DataError
from data.tokenizer import Tokenizer

PAIR = ("prompt", "response")
# Format → columns that are read beside those that --keys names.
BESIDE = {"chat": ("tools", "system"), "sft": ("completion",)}
MARKED_ONES = "marked ones are in TRL's folder trl/chat_templates, named *_training.jinja"
TEXTS = ("content", "reasoning_content", "thinking", "reasoning")  # of a message, as transformers knows them
END_OF_THOUGHTS = "</think>"  # of those in an answer's own text

log = logging.getLogger(__name__)


class Example(NamedTuple):
    """Token ids, and whether each is trained."""

    ids: list[int]
    trained: list[bool]


def read_pair(record: Mapping[str, Any], keys: Sequence[str]) -> list[Any]:
    """[prompt, response] of a record. TRL's name for the response is `completion`. Raises DataError."""
    if tuple(keys) == PAIR and record.get("response") is None:
        keys = ("prompt", "completion")
    pair = [record.get(key) for key in keys]
    if None in pair:
        raise DataError(f"no value under {','.join(keys)!r}; it has {', '.join(record)}{conversion(record)}")
    return pair


def encode_example(text: str, format: str, tokenizer: Tokenizer) -> np.ndarray:
    """The tokens of an example, uint32 with the bits of data.packing.

    `text` is a JSON list: of format "sft" [prompt, response], of "chat" [messages] or [messages, tools]. The first
    token is never trained, since nothing comes before it. Raises TitaniteError.
    """
    values = json.loads(text)
    if format == "sft":
        return marked(*encode_pair(tokenizer, *values))
    return marked(*encode_conversation(tokenizer, *values))


def encode_pair(tokenizer: Tokenizer, prompt: Any, response: Any) -> Example:
    """Prompt and response in one text. It is trained from where its tokens part from those of the prompt."""
    if not (isinstance(prompt, str) and isinstance(response, str)):
        raise TitaniteError("prompt and response must be strings")
    response = response.removesuffix(tokenizer.eos_token)  # it is added below, as TRL does it
    if not response.strip():
        raise TitaniteError("the response is empty, so there is nothing to train")
    theirs = load_transformers(tokenizer)
    # A special token that a text spells out stays characters.
    asked, ids = theirs([prompt, prompt + response], split_special_tokens=True)["input_ids"]
    if ids[-1] != tokenizer.eos_id:
        ids = [*ids, tokenizer.eos_id]
    start = shared_length(ids, asked)
    return Example(ids, [place >= start for place in range(len(ids))])


def encode_conversation(tokenizer: Tokenizer, messages: Sequence[Message], tools: Any = None) -> Example:
    """The conversation in transformers' ids. Trained is what the template marks.

    Refuses what the template does not print, and an answer that reads otherwise once another turn follows: the model
    would be trained on text that it is never asked to continue. Raises TitaniteError.
    """
    template = chat_of(tokenizer)
    template.check_spelling(messages, tools)
    answers = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
    if not answers:
        raise TitaniteError("no message from the assistant, so nothing to train")
    for place in answers:
        if not (messages[place]["content"].strip() or messages[place].get("tool_calls")):
            raise TitaniteError("an answer of the assistant is empty, so there is nothing to train")
    _check_printed(template, messages, tools)
    ids, trained = template.encode_with_mask(messages, tools)
    start = 0  # after the tokens of the answer before
    for place in answers:
        seen, own = template.encode_with_mask(messages[: place + 1], tools)
        end = max((i + 1 for i, is_own in enumerate(own) if is_own), default=0)
        stop = min(shared_length(ids, seen), end)
        if not template.added.issuperset(seen[stop:end]):  # more than the token that ends a whole conversation
            what = f"changes message {place + 1} once others follow, such as its thoughts or its end"
            raise TitaniteError(f"chat template: {what}, so it cannot be trained; {ADVICE}")
        if not any(trained[start:stop]):
            raise TitaniteError(f"chat template: marks no token of the answer that is message {place + 1}; {ADVICE}")
        start = stop
        while start < len(ids) and trained[start]:
            start += 1
    return Example(ids, trained)


def _check_printed(template: ChatTemplate, messages: Sequence[Message], tools: Any) -> None:
    """Refuse a conversation that reads the same without one of its contents, thoughts, calls or tools."""
    whole = template.render(messages, tools)
    for what, fewer_messages, fewer_tools in _with_less(messages, tools):
        try:
            is_printed = template.render(fewer_messages, fewer_tools) != whole
        except TitaniteError:  # a template that misses it has read it
            is_printed = True
        if not is_printed:
            raise TitaniteError(f"chat template: does not print {what}; {ADVICE}")


def _with_less(messages: Sequence[Message], tools: Any) -> Iterator[tuple[str, list[Message], Any]]:
    """Yield (what is missing, messages, tools) for all that can be taken from a conversation."""
    for place, message in enumerate(messages):
        for what, fewer in _messages_with_less(message):
            yield f"{what} of message {place + 1}", [*messages[:place], fewer, *messages[place + 1 :]], tools
    for place, tool in enumerate(tools or ()):
        fewer_tools = [*tools[:place], *tools[place + 1 :]]
        yield f"the tool {json.dumps(tool)[:60]}", list(messages), fewer_tools or None


def _messages_with_less(message: Message) -> Iterator[tuple[str, Message]]:
    """Yield (what is missing, message)."""
    for key in TEXTS:
        text = str(message.get(key) or "")
        if text.strip():
            yield f"the {key} {text[:60]!r} (role {message['role']!r})", {**message, key: ""}
    thoughts, end, answer = message["content"].rpartition(END_OF_THOUGHTS)
    if end and message["role"] == "assistant":
        yield f"the thoughts {thoughts[:60]!r}", {**message, "content": answer}
    calls = message.get("tool_calls") or []
    for place, call in enumerate(calls):
        yield f"the call {json.dumps(call)[:60]}", {**message, "tool_calls": [*calls[:place], *calls[place + 1 :]]}


# ---------------------------------------------------------------- the template of a preparation


def use_template(tokenizer: Tokenizer, template: str) -> None:
    """Make `template`, or the tokenizer's own, or the built-in one, the tokenizer's.

    Raises TitaniteError for a template that does not mark what the assistant says.
    """
    tokenizer.chat_template = template or tokenizer.chat_template or BUILT_IN
    own = chat_of(tokenizer)
    ids, trained = own.encode_with_mask([ASKED, ANSWERED])
    learnt = {token for token, is_trained in zip(ids, trained, strict=True) if is_trained}
    if not learnt:
        needed = "has no {% generation %} marks, which say what is trained"
        raise TitaniteError(f"the chat template {needed}: give --chat-template FILE; {MARKED_ONES}")
    if not own.stop_ids & learnt:
        log.warning("the chat template marks no special token that ends an answer, so no model learns to stop")
