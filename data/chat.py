"""Chat templates, rendered and tokenised by transformers, and the conversations that they take."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

from tokenizers import Tokenizer as RawTokenizer

from config import TitaniteError
from data.shards import DataError
from data.tokenizer import NAMED, NEEDED, Tokenizer, content_of

# For tokenizers without a template: roles in plain text, each answer ended by the tokenizer's eos.
BUILT_IN = (
    "{{ bos_token }}{% if tools %}{{ '<|tools|>\\n' + tools | tojson + '\\n' }}{% endif %}"
    "{% for message in messages %}{{ '<|' + message.role + '|>\\n' }}"
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content }}"
    "{% if message.tool_calls %}{{ message.tool_calls | tojson }}{% endif %}{{ eos_token }}{% endgeneration %}"
    "{% else %}{{ message.content }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
)
ADVICE = "--chat-template FILE takes another"
ASKED = {"role": "user", "content": "a"}
ANSWERED = {"role": "assistant", "content": "☃"}  # as no template's own text begins
# Columns of other projects → what to write in place of them.
CONVERSIONS = {
    "conversations": 'of ShareGPT: make it "messages" of "role" (user, assistant, ...) and "content"',
    "completion": "of lists of messages: join prompt and completion to one list `messages`",
    "instruction": "of Alpaca: write a prompt and a response, with --format sft",
}

Message = dict[str, Any]


# ---------------------------------------------------------------- conversations


def without_nulls(value: Any) -> Any:
    """Drop keys that hold None, in objects of any depth."""
    if isinstance(value, dict):
        return {key: without_nulls(part) for key, part in value.items() if part is not None}
    if isinstance(value, list):
        return [without_nulls(part) for part in value]
    return value


def read_conversation(record: Mapping[str, Any], key: str = "messages") -> tuple[list[Message], list[Any] | None]:
    """(messages, tools) of a record, as templates expect them. Raises DataError for what is no conversation."""
    messages = record.get(key)
    if messages is None:
        raise DataError(f"no value under {key!r}; it has {', '.join(record)}{conversion(record)}")
    if not isinstance(messages, list) or not messages:
        raise DataError(f"{key} = {repr(messages)[:80]}: must be a list of messages, at least one")
    if record.get("system"):
        raise DataError(f"system = {repr(record['system'])[:80]}: must be the first of the messages, not a column")
    return [_message(message) for message in messages], _tools(record.get("tools"))


def conversion(record: Mapping[str, Any]) -> str:
    """How to convert the columns of another project, "" if there are none."""
    return next((f"; {column} {how}" for column, how in CONVERSIONS.items() if column in record), "")


def _message(given: Any) -> Message:
    """A message without what is null: an object has a content, "" beside calls, and calls have objects as arguments."""
    if not isinstance(given, dict):
        raise DataError(f'message {repr(given)[:80]}: must have a "role" and a string "content"')
    message = {key: value for key, value in given.items() if value is not None}
    if message.get("tool_calls"):
        message.setdefault("content", "")
        message["tool_calls"] = [_call(call) for call in message["tool_calls"]]
    if not (isinstance(message.get("role"), str) and isinstance(message.get("content"), str)):
        raise DataError(f'message {repr(given)[:80]}: must have a "role" and a string "content"')
    if message.get("weight", 1) != 1:
        raise DataError(f"weight = {message['weight']!r}: must be 1, as every answer is trained")
    return message


def _call(call: Any) -> Any:
    """A call whose arguments are an object, as transformers documents them. OpenAI's are its JSON."""
    try:
        function = call.get("function", call)
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            arguments = json.loads(arguments)
    except (AttributeError, ValueError):
        raise DataError(f"tool_calls: {repr(call)[:80]}: must be an object with JSON as arguments") from None
    if arguments is None:
        return call
    function = {**function, "arguments": arguments}
    return {**call, "function": function} if "function" in call else function


def _tools(tools: Any) -> list[Any] | None:
    """Tools as objects. A table whose rows cannot differ in their keys holds their JSON. Raises ValueError, too."""
    if isinstance(tools, str):
        tools = json.loads(tools or "null")
    if tools and not all(isinstance(tool, dict) for tool in tools):
        raise DataError(f"tools = {repr(tools)[:80]}: must be a list of objects, or its JSON")
    return tools or None


def _texts(value: Any) -> Iterator[str]:
    """All strings in a value, keys of objects as well, but not what says a role or a type."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for part in value:
            yield from _texts(part)
    elif isinstance(value, dict):
        for key, part in value.items():
            if key not in ("role", "type"):
                yield from _texts(part)


# ---------------------------------------------------------------- templates


@lru_cache(maxsize=1)
def load_transformers(tokenizer: Tokenizer) -> Any:
    """transformers' tokenizer with the same ids. Raises TitaniteError if transformers is missing."""
    try:
        from transformers import PreTrainedTokenizerFast, logging
    except ImportError:
        raise TitaniteError(NEEDED) from None
    logging.set_verbosity_error()
    raw = RawTokenizer.from_str(tokenizer.raw.to_str())
    named = {name: content_of(tokenizer.declared.get(name)) for name in NAMED}
    named["eos_token"] = tokenizer.eos_token
    extra = tokenizer.declared.get("extra_special_tokens")
    if isinstance(extra, dict):
        named["extra_special_tokens"] = extra
    given = {name: token for name, token in named.items() if token}
    return PreTrainedTokenizerFast(tokenizer_object=raw, clean_up_tokenization_spaces=False, **given)


class ChatTemplate:
    """A chat template in Jinja, rendered and tokenised by transformers. All methods raise TitaniteError."""

    def __init__(self, source: str, tokenizer: Tokenizer):
        self.source = source or BUILT_IN
        self._theirs = load_transformers(tokenizer)
        added = self._theirs.added_tokens_decoder
        self.added = frozenset(added)  # ids
        self._special = [token.content for token in added.values() if token.special]

    def render(self, messages: Sequence[Message], tools: Any = None, *, add_generation_prompt: bool = False) -> str:
        """The conversation as text, with a generation prompt up to where an answer begins."""
        return self._apply(messages, tools, tokenize=False, add_generation_prompt=add_generation_prompt)

    def encode(
        self, messages: Sequence[Message], tools: Any = None, *, add_generation_prompt: bool = False
    ) -> list[int]:
        """The token ids of the conversation."""
        self.check_spelling(messages, tools)
        return self._apply(messages, tools, return_dict=False, add_generation_prompt=add_generation_prompt)

    def encode_with_mask(self, messages: Sequence[Message], tools: Any = None) -> tuple[list[int], list[bool]]:
        """The token ids of the conversation, and which of them the template marks as the assistant's."""
        made = self._apply(messages, tools, return_dict=True, return_assistant_tokens_mask=True)
        return made["input_ids"], [bool(own) for own in made["assistant_masks"]]

    def check_spelling(self, messages: Sequence[Message], tools: Any = None) -> None:
        """Refuse a conversation whose texts spell out a special token, which would become that token."""
        texts = list(_texts([messages, tools]))
        for token in self._special:
            if any(token in text for text in texts):
                raise TitaniteError(f"a message spells out {token!r}, which would become that special token")

    def _apply(self, messages: Sequence[Message], tools: Any, **options: Any) -> Any:
        try:
            return self._theirs.apply_chat_template(list(messages), tools=tools, chat_template=self.source, **options)
        except Exception as error:  # a template is a program
            if type(error).__name__ == "TemplateSyntaxError":
                raise TitaniteError(f"not a chat template: {error}") from None
            raise TitaniteError(f"chat template: refuses the conversation: {error}; {ADVICE}") from None

    @property
    def stop_ids(self) -> frozenset[int]:
        """The added token that ends an answer in the template, if any."""
        after = self.render([ASKED, ANSWERED]).rpartition(ANSWERED["content"])[2]
        ids: Iterable[int] = self._theirs(after, add_special_tokens=False)["input_ids"]
        return frozenset([token for token in ids if token in self.added][:1])


@lru_cache(maxsize=1)  # it holds a tokenizer of its own
def chat_of(tokenizer: Tokenizer) -> ChatTemplate:
    """The tokenizer's chat template, or the built-in one. Raises TitaniteError."""
    return ChatTemplate(tokenizer.chat_template, tokenizer)
