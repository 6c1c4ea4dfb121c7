"""Chat templates: conversations as text and tokens, rendered as transformers renders them."""

import json
from collections.abc import Mapping, Sequence
from typing import NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer as RawTokenizer

from config import TitaniteError
from data.tokenizer import Tokenizer

# For tokenizers without a template: roles in plain text, each answer ended by the tokenizer's eos.
BUILT_IN = (
    "{{ bos_token }}{% for message in messages %}{{ '<|' + message.role + '|>\\n' + message.content }}"
    "{% if message.role == 'assistant' %}{{ eos_token }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
)
ROLES = ("system", "user", "assistant", "tool")

Message = Mapping[str, str]


class GenerationTag(Extension):
    """`{% generation %}`, which some templates put around the assistant's text; renders that text unchanged."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """A Jinja template for conversations, and the tokenizer of its text.

    The template sees `messages`, `add_generation_prompt`, `bos_token` and `eos_token`, but no date: a conversation is
    the same text every day.
    """

    def __init__(self, source: str, tokenizer: Tokenizer):
        """`source` "" takes the built-in template. Raises TitaniteError."""
        extensions = (loopcontrols, GenerationTag)
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
        environment.globals["raise_exception"] = _raise
        environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
        self.tokenizer = tokenizer
        try:
            self._template = environment.from_string(source or BUILT_IN)
        except TemplateError as error:
            raise TitaniteError(f"not a chat template: {error}") from None
        # The template's own text may become special tokens. A message's text may not, see `check_messages`.
        self.raw = RawTokenizer.from_str(tokenizer.raw.to_str())
        self.raw.encode_special_tokens = False
        added = self.raw.get_added_tokens_decoder()
        self._special = {token.content: id for id, token in added.items() if token.special}
        # Tokens at which the tokenizer cuts a text before anything else, so the text after one encodes the same
        # whatever precedes it. Empty if some token is for single words only: where it does not apply, it hides others.
        whole_words = any(token.single_word for token in added.values())
        self.cuts = {id: token.content for id, token in added.items() if not (token.normalized or whole_words)}
        self._bos = "" if tokenizer.bos_id is None else tokenizer.raw.id_to_token(tokenizer.bos_id)

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = False) -> str:
        """The conversation as text, with a generation prompt up to where an answer begins. Raises TitaniteError."""
        try:
            return self._template.render(
                messages=messages,
                add_generation_prompt=add_generation_prompt,
                bos_token=self._bos,
                eos_token=self.tokenizer.eos_token,
            )
        except (TemplateError, TypeError) as error:
            raise TitaniteError(f"chat template: refuses the conversation: {error}") from None

    def encode(self, messages: Sequence[Message], *, add_generation_prompt: bool = False) -> list[int]:
        """The token ids of the conversation. Raises TitaniteError."""
        self.check_messages(messages)
        return self.encode_text(self.render(messages, add_generation_prompt=add_generation_prompt))

    def encode_text(self, text: str) -> list[int]:
        """The token ids of a rendered text, which may spell out special tokens."""
        return self.raw.encode(text, add_special_tokens=False).ids

    def segments(self, messages: Sequence[Message]) -> list[tuple[str, bool]]:
        """The conversation as a list of (text, whether the assistant wrote it).

        Text that the template puts after an answer, such as its end token, counts as the assistant's. Raises
        TitaniteError.
        """
        self.check_messages(messages)
        found: list[tuple[str, bool]] = []
        done = ""
        for i, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            prompt = self.render(messages[:i], add_generation_prompt=True)
            through = self.render(messages[: i + 1])
            if not (prompt.startswith(done) and through.startswith(prompt)):
                raise TitaniteError("chat template: an answer changes the text before it, so they cannot be separated")
            found += [(prompt[len(done) :], False), (through[len(prompt) :], True)]
            done = through
        return found

    def check_messages(self, messages: Sequence[Message]) -> None:
        """Raise TitaniteError for messages that are no conversation or spell out a special token."""
        if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
            raise TitaniteError(f"messages = {repr(messages)[:80]}: must be a list of messages, at least one")
        for message in messages:
            if not isinstance(message, Mapping) or not isinstance(message.get("content"), str):
                raise TitaniteError(f'message {repr(message)[:80]}: must have a "role" and a string "content"')
            if message.get("role") not in ROLES:
                raise TitaniteError(f"role {message.get('role')!r}: must be one of {', '.join(ROLES)}")
            for token in self._special:
                if token in message["content"]:
                    raise TitaniteError(f"a message spells out {token!r}, which would become that special token")

    @property
    def stop_ids(self) -> frozenset[int]:
        """The special token that ends an answer in the template, if any."""
        question = {"role": "user", "content": "a"}
        *_, (answer, _) = self.segments([question, {"role": "assistant", "content": "a"}])
        special = set(self._special.values())
        return frozenset([token for token in self.encode_text(answer) if token in special][-1:])


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)
