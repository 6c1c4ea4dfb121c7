"""Chat templates, rendered as transformers renders them, and examples for fine-tuning, of which only answers train."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from functools import cached_property, lru_cache, partial
from itertools import chain, pairwise, product, takewhile
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
    "{{ bos_token }}{% if tools %}{{ '<|tools|>\\n' + tools | tojson + '\\n' }}{% endif %}"
    "{% for message in messages %}{{ '<|' + message.role + '|>\\n' ~ message.content }}"
    "{% if message.tool_calls %}{{ message.tool_calls | tojson }}{% endif %}"
    "{% if message.role == 'assistant' %}{{ eos_token }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
)

Message = Mapping[str, Any]
Parts = list[tuple[list[int], bool]]  # (tokens, whether they are trained)
ARGUMENTS = '{"a": "b"}'
CALL = {"id": "call00000", "type": "function", "function": {"name": "f", "arguments": ARGUMENTS}}
ASKED = {"role": "user", "content": "a"}
ANSWER = {"role": "assistant", "content": "☃"}  # as no template's own text begins


class ChatTemplate:
    """A Jinja template for conversations ("": the built-in one), and the tokenizer of its text. Raises TitaniteError.

    `date` is the day that it is told if it asks: None for today, "" for none, so that a template uses its own default.
    """

    def __init__(self, source: str, tokenizer: Tokenizer, date: str | None = None):
        source = source or BUILT_IN
        words = {"role", "content", "weight", *re.findall(r"\w+", source)}
        self.keys = {"tools"} & words | {f"messages.{word}" for word in words}  # all that it reads, and more
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.globals |= {"raise_exception": _raise, "documents": None, "bos_token": "", **tokenizer.special}
        environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
        # Some templates put `{% generation %}` around the assistant's text, which is rendered all the same.
        for name, always in (("generation", "if true"), ("endgeneration", "endif")):
            source = re.sub(rf"({{%[-+]?\s*){name}\b", rf"\1{always}", source)
        try:
            if date != "":
                told = datetime.fromisoformat(date) if date else datetime.now()
                environment.globals["strftime_now"] = told.strftime
            self._template = environment.from_string(source)
        except ValueError:
            raise TitaniteError(f"--date {date}: must be a day such as 2026-01-31") from None
        except TemplateError as error:
            raise TitaniteError(f"not a chat template: {error}") from None
        # The template's own text may become special tokens. A message's text may not, see `_checked`.
        self._raw = RawTokenizer.from_str(tokenizer.raw.to_str())
        self._raw.encode_special_tokens = False
        self._raw.add_special_tokens([*filter(None, (tokenizer.special.get("bos_token"), tokenizer.eos_token))])
        added = self._raw.get_added_tokens_decoder()
        self._special = {token.content: id for id, token in added.items() if token.special}
        # What the template takes: no tools as None, as in transformers, or as []; contents as text or in parts.
        self._no_tools: list[Any] | None
        for self._no_tools, self._in_parts in product((None, []), (False, True)):
            with suppress(TitaniteError):
                if ANSWER["content"] in self.render([ASKED, ANSWER]):
                    break
        else:
            self._no_tools, self._in_parts = None, False

    def render(self, messages: Sequence[Message], tools: Any = None, *, add_generation_prompt: bool = False) -> str:
        """The conversation as text, with a generation prompt up to where an answer begins. Raises TitaniteError."""
        if self._in_parts:
            parts = [[{"type": "text", "text": message.get("content", "")}] for message in messages]
            messages = [{**message, "content": part} for message, part in zip(messages, parts, strict=True)]
        given = {"tools": tools or self._no_tools, "add_generation_prompt": add_generation_prompt}
        try:
            return self._template.render(messages=messages, **given)
        except Exception as error:  # a template is a program
            advice = "--date DAY tells it one" if "strftime_now" in str(error) else "--chat-template FILE takes another"
            raise TitaniteError(f"chat template: refuses the conversation: {error}; {advice}") from None

    def encode(self, messages: Sequence[Message], *, add_generation_prompt: bool = False) -> list[int]:
        """The token ids of the conversation. Raises TitaniteError."""
        return self._ids(self.render(self._checked(messages)[0], add_generation_prompt=add_generation_prompt))

    def _ids(self, text: str) -> list[int]:
        return self._raw.encode(text, add_special_tokens=False).ids

    def encode_parts(self, messages: Sequence[Message], tools: Any = None, train_eos: bool = False) -> list[Parts]:
        """The tokens of the conversation in parts. Those that the assistant wrote are trained, unless of weight 0.

        Text that the template puts after an answer, such as its end token, counts as the assistant's. Where the
        template changes earlier text when a turn is added, another example begins, as it does for each answer if eos
        is to be trained after it. Raises TitaniteError.
        """
        messages, tools = self._checked(messages, tools)
        examples: list[list[str]] = []  # the texts up to the end of each part
        for i, message in enumerate(messages):
            if message["role"] == "assistant" and message.get("weight", 1):
                asked, answered = self._ask_and_answer(messages[: i + 1], tools)
                if train_eos:
                    answered = asked + answered[len(asked) :].rstrip()
                if train_eos or not examples or not asked.startswith(examples[-1][-1]):
                    examples.append([""])
                examples[-1] += [asked, answered]
        if not examples:
            raise TitaniteError("no message from the assistant, or all of weight 0, so nothing to train")
        return [self._encode_texts(texts) for texts in examples]

    def _ask_and_answer(self, messages: Sequence[Message], tools: Any) -> tuple[str, str]:
        """The text before the answer, which is the last message, and the text with it. Raises TitaniteError."""
        before = messages[:-1]
        asked, answered = self.render(before, tools, add_generation_prompt=True), self.render(messages, tools)
        if not answered.startswith(asked):
            # As DeepSeek-R1's, which asks with "<think>" and drops thoughts: go back to where all answers begin.
            shared = _shared_beginning(asked, answered, self.render([*before, ANSWER], tools))
            if len(shared) < len(_shared_beginning(asked, self.render(before, tools))):
                advice = "so they cannot be separated; --chat-template FILE takes another"
                raise TitaniteError(f"chat template: an answer changes the text before it, {advice}")
            asked = shared
        return asked, answered

    def _encode_texts(self, texts: Sequence[str]) -> Parts:
        """The parts of the whole text's tokens. If the model, asked for some answer, would see others: each alone."""
        encoded = [self._ids(text) for text in texts]
        if all(encoded[-1][: len(ids)] == ids for ids in encoded):
            parts = [encoded[-1][len(before) : len(ids)] for before, ids in pairwise(encoded)]
        else:
            parts = [self._ids(text[len(before) :]) for before, text in pairwise(texts)]
        return [(part, number % 2 == 1) for number, part in enumerate(parts)]

    def _checked(self, messages: Sequence[Message], tools: Any = None) -> tuple[list[Message], Any]:
        """Copies as transformers gives them to templates: without nulls in messages, thoughts under both names.

        Tools and arguments that are JSON text become objects, except arguments that the template prints as they are.
        Raises TitaniteError for what is no conversation or spells out a special token.
        """
        if isinstance(tools, str):  # as in tables, whose rows cannot differ in their keys
            with suppress(ValueError):
                tools = json.loads(tools)
        if not isinstance(messages, list | tuple) or not messages:
            raise TitaniteError(f"messages = {repr(messages)[:80]}: must be a list of messages, at least one")
        if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
            raise TitaniteError(f"tools = {repr(tools)[:80]}: must be a list of objects")
        text = json.dumps([messages, tools], ensure_ascii=False)
        if spelt := [token for token in self._special if token in text]:
            raise TitaniteError(f"a message spells out {spelt[0]!r}, which would become that special token")
        checked: list[Message] = []
        for message in json.loads(text)[0]:
            items = message.items() if isinstance(message, dict) else ()
            given = {key: value for key, value in items if value is not None}
            content = given.get("content", "" if given.get("tool_calls") else None)
            if not (isinstance(given.get("role"), str) and isinstance(content, str)):
                raise TitaniteError(f'message {repr(message)[:80]}: must have a "role" and a string "content"')
            if given.get("weight", 1) not in (0, 1):
                raise TitaniteError(f"weight = {given['weight']!r}: must be 1, or 0 for an answer not to be trained")
            try:
                for call in given.get("tool_calls", ()):
                    function = call.get("function", call)
                    if isinstance(function.get("arguments"), str) and not self._prints_arguments:
                        function["arguments"] = json.loads(function["arguments"])
            except (AttributeError, TypeError, ValueError):
                calls = repr(given["tool_calls"])[:80]
                raise TitaniteError(f"tool_calls = {calls}: must be a list of objects with JSON as arguments") from None
            if thoughts := next(filter(None, map(given.get, ("reasoning_content", "thinking", "reasoning"))), None):
                given = {"thinking": thoughts, **given, "reasoning_content": thoughts}
            checked.append(given)
        return checked, tools

    @cached_property
    def _prints_arguments(self) -> bool:
        with suppress(TitaniteError):
            return ARGUMENTS in self.render([ASKED, {**ANSWER, "content": "", "tool_calls": [CALL]}])
        return False

    @cached_property
    def stop_ids(self) -> frozenset[int]:
        """The special token that ends an answer in the template, if any."""
        after = self._ids(self.render([ASKED, ANSWER]).rpartition(ANSWER["content"])[2])
        return frozenset([token for token in after if token in self._special.values()][-1:])

    def warnings(self, train_eos: bool) -> Iterator[str]:
        """What a model will not learn from examples of this template. Raises TitaniteError."""
        if not (self.stop_ids or train_eos):
            yield "the chat template ends answers with no special token, so no model learns to stop; give --train-eos"
        asked, answered = self.render([ASKED], add_generation_prompt=True), self.render([ASKED, ANSWER])
        if missing := asked[len(_shared_beginning(asked, answered)) :]:
            yield f"the chat template asks with {missing!r}, with which its answers do not begin, so it is not trained"


def _shared_beginning(*texts: str) -> str:
    same = takewhile(lambda letters: len(set(letters)) == 1, zip(*texts, strict=False))
    return "".join(letter for letter, *_ in same)


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


def encode_examples(
    texts: Sequence[str], format: str, tokenizer: Tokenizer, date: str = "", train_eos: bool = False
) -> list[list[np.ndarray]]:
    """The tokens of each text's examples, uint32 with the bits of data.packing. Each example ends with eos.

    A text is a JSON list: of format "sft" [prompt, response], whose eos is trained; of "chat" [messages] or
    [messages, tools], with `date` and `train_eos` as of ChatTemplate. The first token is never trained, since nothing
    comes before it. Raises TitaniteError quoting the text.
    """
    made: list[list[np.ndarray]] = []
    for text in texts:
        try:
            first, second = (*json.loads(text), None)[:2]
            chat = chat_of(tokenizer, date) if format == "chat" else None
            examples = chat.encode_parts(first, second, train_eos) if chat else [_pair(tokenizer, first, second)]
        except TitaniteError as error:
            raise TitaniteError(f"{error}; in the example {text[:100]}") from None
        made.append([])
        for parts in examples:
            ids = list(chain.from_iterable(tokens for tokens, _ in parts))
            hidden = [not trained for tokens, trained in parts for _ in tokens]
            if not ids or ids[-1] != tokenizer.eos_id:
                ids, hidden = [*ids, tokenizer.eos_id], [*hidden, not train_eos]
            tokens = np.array(ids, np.uint32) | np.where(hidden, np.uint32(HIDDEN), np.uint32(0))
            tokens[0] |= np.uint32(START | HIDDEN)
            made[-1].append(tokens)
    return made


@lru_cache(maxsize=1)  # ChatTemplate copies the whole tokenizer
def chat_of(tokenizer: Tokenizer, date: str | None = None) -> ChatTemplate:
    """The tokenizer's chat template, or the built-in one. Raises TitaniteError."""
    return ChatTemplate(tokenizer.chat_template, tokenizer, date)


def _pair(tokenizer: Tokenizer, prompt: Any, response: Any) -> Parts:
    if not (isinstance(prompt, str) and isinstance(response, str)):
        raise TitaniteError("prompt and response must be strings")
    asked, answer = tokenizer.raw.encode_batch_fast([prompt, response], add_special_tokens=False)
    return [([*tokenizer.prefix, *asked.ids], False), ([*answer.ids, tokenizer.eos_id], True)]
