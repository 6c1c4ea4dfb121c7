"""Chat templates, rendered as transformers renders them, and examples for fine-tuning, of which only answers train."""

import json
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import chain, pairwise
from typing import Any, NoReturn

import numpy as np
from jinja2 import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer as RawTokenizer

from config import TitaniteError
from data.packing import HIDDEN, START
from data.tokenizer import Tokenizer

# For tokenizers without a template: roles in plain text, each answer ended by the tokenizer's eos.
BUILT_IN = (
    "{{ bos_token }}{% for message in messages %}{{ '<|' + message.role + '|>\\n' + message.content }}"
    "{% if message.role == 'assistant' %}{{ eos_token }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
)

Message = Mapping[str, str]
Parts = list[tuple[list[int], bool]]  # (tokens, whether they are trained)


class ChatTemplate:
    """A Jinja template for conversations ("": the built-in one), and the tokenizer of its text. Raises TitaniteError.

    The template sees no date: a conversation is the same text every day.
    """

    def __init__(self, source: str, tokenizer: Tokenizer):
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        bos_token = "" if tokenizer.bos_id is None else tokenizer.raw.id_to_token(tokenizer.bos_id)
        environment.globals |= {"raise_exception": _raise, "bos_token": bos_token, "eos_token": tokenizer.eos_token}
        environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
        # Some templates put `{% generation %}` around the assistant's text, which is rendered all the same.
        for name, always in (("generation", "if true"), ("endgeneration", "endif")):
            source = re.sub(rf"({{%[-+]?\s*){name}\b", rf"\1{always}", source)
        try:
            self._template = environment.from_string(source or BUILT_IN)
        except TemplateError as error:
            raise TitaniteError(f"not a chat template: {error}") from None
        # The template's own text may become special tokens. A message's text may not, see `check_messages`.
        self._raw = RawTokenizer.from_str(tokenizer.raw.to_str())
        self._raw.encode_special_tokens = False
        added = self._raw.get_added_tokens_decoder()
        self._special = {token.content: id for id, token in added.items() if token.special}

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = False) -> str:
        """The conversation as text, with a generation prompt up to where an answer begins. Raises TitaniteError."""
        try:
            return self._template.render(messages=messages, add_generation_prompt=add_generation_prompt)
        except (TemplateError, TypeError) as error:
            raise TitaniteError(f"chat template: refuses the conversation: {error}") from None

    def encode(self, messages: Sequence[Message], *, add_generation_prompt: bool = False) -> list[int]:
        """The token ids of the conversation. Raises TitaniteError."""
        self.check_messages(messages)
        return self._ids(self.render(messages, add_generation_prompt=add_generation_prompt))

    def _ids(self, text: str) -> list[int]:
        return self._raw.encode(text, add_special_tokens=False).ids

    def encode_parts(self, messages: Sequence[Message]) -> Parts:
        """The tokens of the conversation in parts, of which what the assistant wrote is trained.

        Text that the template puts after an answer, such as its end token, counts as the assistant's. The parts are
        those of the whole text's tokens, unless the model, asked with the text up to some answer, would see others:
        then each part is encoded alone. Raises TitaniteError.
        """
        self.check_messages(messages)
        texts = [""]  # up to the end of each part
        for i, message in enumerate(messages):
            if message["role"] == "assistant":
                texts += [self.render(messages[:i], add_generation_prompt=True), self.render(messages[: i + 1])]
        if not texts[1:]:
            raise TitaniteError("no message from the assistant, so nothing to train")
        if not all(text.startswith(before) for before, text in pairwise(texts)):
            raise TitaniteError("chat template: an answer changes the text before it, so they cannot be separated")
        encoded = [self._ids(text) for text in texts]
        if all(encoded[-1][: len(ids)] == ids for ids in encoded):
            parts = [encoded[-1][len(before) : len(ids)] for before, ids in pairwise(encoded)]
        else:
            parts = [self._ids(text[len(before) :]) for before, text in pairwise(texts)]
        return [(part, number % 2 == 1) for number, part in enumerate(parts)]

    def check_messages(self, messages: Sequence[Message]) -> None:
        """Raise TitaniteError for messages that are no conversation or spell out a special token."""
        if not isinstance(messages, list | tuple) or not messages:
            raise TitaniteError(f"messages = {repr(messages)[:80]}: must be a list of messages, at least one")
        for message in messages:
            keys = ("role", "content") if isinstance(message, Mapping) else ()
            if not keys or not all(isinstance(message.get(key), str) for key in keys):
                raise TitaniteError(f'message {repr(message)[:80]}: must have a "role" and a string "content"')
            if spelt := [token for token in self._special if token in message["content"]]:
                raise TitaniteError(f"a message spells out {spelt[0]!r}, which would become that special token")

    @property
    def stop_ids(self) -> frozenset[int]:
        """The special token that ends an answer in the template, if any."""
        *_, (answer, _) = self.encode_parts([{"role": role, "content": "a"} for role in ("user", "assistant")])
        return frozenset([token for token in answer if token in self._special.values()][-1:])


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


def encode_examples(texts: Sequence[str], format: str, tokenizer: Tokenizer) -> list[np.ndarray]:
    """The tokens of examples, uint32 with the bits of data.packing. Each example ends with eos.

    A text is a JSON list: of format "sft" [prompt, response], whose eos is trained; of "chat" [messages]. The first
    token is never trained, since nothing comes before it. Raises TitaniteError quoting the example.
    """
    examples = []
    for text in texts:
        try:
            values = json.loads(text)
            parts = _pair(tokenizer, *values) if format == "sft" else chat_of(tokenizer).encode_parts(*values)
        except TitaniteError as error:
            raise TitaniteError(f"{error}; in the example {text[:100]}") from None
        ids = list(chain.from_iterable(tokens for tokens, _ in parts))
        hidden = [not trained for tokens, trained in parts for _ in tokens]
        if not ids or ids[-1] != tokenizer.eos_id:
            ids, hidden = [*ids, tokenizer.eos_id], [*hidden, True]
        tokens = np.array(ids, np.uint32) | np.where(hidden, np.uint32(HIDDEN), np.uint32(0))
        tokens[0] |= np.uint32(START | HIDDEN)
        examples.append(tokens)
    return examples


@lru_cache(maxsize=1)  # ChatTemplate copies the whole tokenizer
def chat_of(tokenizer: Tokenizer) -> ChatTemplate:
    """The tokenizer's chat template, or the built-in one. Raises TitaniteError."""
    return ChatTemplate(tokenizer.chat_template, tokenizer)


def _pair(tokenizer: Tokenizer, prompt: Any, response: Any) -> Parts:
    if not (isinstance(prompt, str) and isinstance(response, str)):
        raise TitaniteError("prompt and response must be strings")
    asked, answer = tokenizer.raw.encode_batch_fast([prompt, response], add_special_tokens=False)
    return [([*tokenizer.prefix, *asked.ids], False), ([*answer.ids, tokenizer.eos_id], True)]
