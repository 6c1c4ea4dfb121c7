"""Conversations and pairs as examples for fine-tuning, tokenised by transformers, of which only answers train."""

import json
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from functools import cached_property, lru_cache
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from operator import itemgetter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np

from config import TitaniteError
from data.conversations import read_conversation
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
NO_TEMPLATE = "not a chat template"
NEEDED = "transformers is not installed; chats and pairs need: pip install -r requirements-tuning.txt"

Message = Mapping[str, Any]
ARGUMENTS = '{"a": "b"}'
CALL = {"id": "call00000", "type": "function", "function": {"name": "f", "arguments": ARGUMENTS}}
ASKED = {"role": "user", "content": "a"}
ANSWER = {"role": "assistant", "content": "☃"}  # as no template's own text begins
THOUGHTS = ("reasoning_content", "thinking", "reasoning")  # a message's, as transformers knows them
END_OF_THOUGHTS = "</think>"  # of those in an answer's own text


class Example(NamedTuple):
    """Token ids, and whether each is trained."""

    ids: list[int]
    trained: list[bool]


class Turn(NamedTuple):
    """An answer in a conversation, as three texts."""

    asked: str  # all before it, and the generation prompt
    answered: str  # all up to it
    closed: str  # that without what ends only a whole conversation


@lru_cache(maxsize=1)
def load_transformers(tokenizer: Tokenizer) -> Any:
    """transformers' tokenizer of the same files. Raises TitaniteError."""
    try:
        from transformers import AutoTokenizer, logging
    except ImportError:
        raise TitaniteError(NEEDED) from None
    logging.set_verbosity_error()
    with TemporaryDirectory() as folder:
        for name, content in tokenizer.files().items():
            Path(folder, name).write_bytes(content)
        try:
            return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        except Exception as error:  # of any kind, from any of its classes
            raise TitaniteError(f"transformers cannot read the tokenizer: {' '.join(str(error).split())}") from None


class ChatTemplate:
    """A chat template in Jinja, rendered and tokenised by transformers. Raises TitaniteError.

    `source` "" is the built-in one.
    """

    def __init__(self, source: str, tokenizer: Tokenizer):
        self._theirs = load_transformers(tokenizer)
        self._eos_id = tokenizer.eos_id
        # None: the tokenizer's own, which may have another text for conversations with tools.
        self._source = source or BUILT_IN
        own = source and source == tokenizer.chat_template
        self._template = None if own else self._source
        added = self._theirs.added_tokens_decoder
        self._added = frozenset(added)
        self._special = [token.content for token in added.values() if token.special]
        self._vanishing: dict[tuple[Any, ...], set[int]] = {}  # see `_unprinted`
        self._no_tools, self._in_parts = self._find_forms()

    def _find_forms(self) -> tuple[list[Any] | None, bool]:
        """What the template takes: no tools as None or as [], and whether it wants contents in parts."""
        forms: list[tuple[list[Any] | None, bool]] = [(None, False), (None, True), ([], False), ([], True)]
        for form in forms:
            self._no_tools, self._in_parts = form
            try:
                if ANSWER["content"] in self.render([ASKED, ANSWER]):
                    return form
            except TitaniteError as error:
                if str(error).startswith(NO_TEMPLATE):
                    raise
        return forms[0]

    def render(self, messages: Sequence[Message], tools: Any = None, *, add_generation_prompt: bool = False) -> str:
        """The conversation as text, with a generation prompt up to where an answer begins. Raises TitaniteError."""
        return self._apply(messages, tools, tokenize=False, add_generation_prompt=add_generation_prompt)

    def encode(
        self, messages: Sequence[Message], tools: Any = None, *, add_generation_prompt: bool = False
    ) -> list[int]:
        """The token ids of the conversation. Raises TitaniteError."""
        messages, tools = self._checked(messages, tools)
        return self._apply(messages, tools, return_dict=False, add_generation_prompt=add_generation_prompt)

    def _apply(self, messages: Sequence[Message], tools: Any, **options: Any) -> Any:
        if self._in_parts:
            messages = [_in_parts(message) for message in messages]
        options |= {"tools": tools or self._no_tools, "chat_template": self._template}
        try:
            return self._theirs.apply_chat_template(list(messages), **options)
        except Exception as error:  # a template is a program
            if type(error).__name__ == "TemplateSyntaxError":
                raise TitaniteError(f"{NO_TEMPLATE}: {error}") from None
            advice = "--chat-template FILE takes another"
            raise TitaniteError(f"chat template: refuses the conversation: {error}; {advice}") from None

    def _ids(self, texts: list[str]) -> list[list[int]]:
        return self._theirs(texts, add_special_tokens=False)["input_ids"]

    # ---------------------------------------------------------------- examples

    def examples(
        self,
        messages: Sequence[Message],
        tools: Any = None,
        *,
        train_eos: bool = False,
        counts: Counter[str] | None = None,
    ) -> list[Example]:
        """The conversation as examples, in which its answers are trained, except those of weight 0.

        Where the template has `{% generation %}` marks, they say what is trained. Otherwise it is what the assistant
        wrote and the end of its turn: the tokens of the whole text from where those of the question, with the
        generation prompt, part from it. A conversation is one example, unless the template changes earlier text when
        a turn is added, or eos is to be trained after each answer. What follows the last answer is left out.
        `counts` is increased by what this costs. Raises TitaniteError.
        """
        counts = Counter() if counts is None else counts
        messages, tools = self._checked(messages, tools)
        answers = [i for i, message in enumerate(messages) if _is_trained(message)]
        if not answers:
            raise TitaniteError("no message from the assistant, or all of weight 0, so nothing to train")
        if not all(_says_something(messages[i]) for i in answers):
            raise TitaniteError("an answer of the assistant is empty, so there is nothing to train")
        messages = messages[: answers[-1] + 1]
        if self._marked and not train_eos:
            texts = [self.render(messages, tools)]
            examples = [self._marked_example(messages, tools, texts[0])]
        else:
            groups = self._grouped([self._turn(messages, tools, i) for i in answers], train_eos)
            texts = [turns[-1].answered for turns in groups]
            examples = [self._example(turns, train_eos) for turns in groups]
        self._check_all_there(messages, tools, texts, counts)
        lengths = [len(example.ids) for example in examples]
        counts["repeated"] += sum(lengths[:-1])
        counts["split"] += len(lengths) > 1
        return examples

    def _turn(self, messages: Sequence[Message], tools: Any, place: int) -> Turn:
        """The answer that is the message at `place`. Raises TitaniteError if its text cannot be separated."""
        before = messages[:place]
        answered = self.render(messages[: place + 1], tools)
        closed = answered.removesuffix(self._closing)
        if not before:  # no question: the assistant begins
            return Turn(_common(answered, self.render([ANSWER], tools)), answered, closed)
        asked = self.render(before, tools, add_generation_prompt=True)
        if not answered.startswith(asked):
            # As DeepSeek-R1's, which asks with "<think>" and drops thoughts: answers begin where the texts part.
            begun = _common(asked, self.render(before, tools))
            if not answered.startswith(begun):
                advice = "so they cannot be separated; --chat-template FILE takes another"
                raise TitaniteError(f"chat template: an answer changes the text before it, {advice}")
        return Turn(asked, answered, closed)

    def _grouped(self, turns: list[Turn], each_alone: bool) -> list[list[Turn]]:
        """The turns of each example: those whose text stands unchanged in that of the next one."""
        groups = [turns[:1]]
        for before, turn in pairwise(turns):
            if each_alone or not turn.answered.startswith(before.closed):
                groups.append([])
            groups[-1].append(turn)
        return groups

    def _example(self, turns: list[Turn], train_eos: bool) -> Example:
        whole = turns[-1].answered
        if train_eos:
            whole = whole.rstrip()
        bounds = [text for turn in turns for text in (turn.asked, turn.closed)]
        ids, counts = self._beginnings(whole, bounds[:-1])
        trained = [False] * len(ids)
        for start, stop in zip(counts[::2], [*counts[1::2], len(ids)], strict=True):
            trained[start:stop] = [True] * (stop - start)
        if train_eos and ids[-1] != self._eos_id:
            return Example([*ids, self._eos_id], [*trained, True])
        return Example(ids, trained)

    def _beginnings(self, whole: str, texts: Sequence[str]) -> tuple[list[int], list[int]]:
        """The token ids of `whole`, and how many of them are also the first ones of each of `texts`.

        Added tokens divide a text before anything else looks at it, so what precedes one cannot change what follows:
        of each text only the end, from the last one in what it shares with `whole`, is tokenised again.
        """
        encoding = self._theirs(whole, add_special_tokens=False).encodings[0]
        ids = encoding.ids
        places = [place for place, token in enumerate(ids) if token in self._added]
        spans = [(0, 0), *(encoding.token_to_chars(place) for place in places)]
        kept = []
        ends = []
        for text in texts:
            last = bisect_right(spans, _shared(whole, text), key=itemgetter(1)) - 1  # added token in what is shared
            kept.append([0, *places][last])
            ends.append(text[spans[last][0] :])
        return ids, [place + _shared(ids[place:], end) for place, end in zip(kept, self._ids(ends), strict=True)]

    @cached_property
    def _marked(self) -> bool:
        return re.search(r"{%-?\s*generation\s*-?%}", self._theirs.get_chat_template(self._template)) is not None

    def _marked_example(self, messages: Sequence[Message], tools: Any, text: str) -> Example:
        """What transformers' mask of the assistant's tokens trains, without answers of weight 0."""
        made = self._apply(messages, tools, return_dict=True, return_assistant_tokens_mask=True)
        ids = made["input_ids"]
        trained = [bool(own) for own in made["assistant_masks"]]
        for place, message in enumerate(messages):
            if message["role"] == "assistant" and not _is_trained(message):
                turn = self._turn(messages, tools, place)
                _, (start, stop) = self._beginnings(text, [turn.asked, turn.closed])
                trained[start:stop] = [False] * (stop - start)
        if not any(trained):
            raise TitaniteError("chat template: its {% generation %} marks hold no token, so nothing to train")
        return Example(ids, trained)

    # ---------------------------------------------------------------- what a template does not print

    def _check_all_there(
        self, messages: Sequence[Message], tools: Any, texts: Sequence[str], counts: Counter[str]
    ) -> None:
        """Refuse a conversation of which something is in none of `texts`. Thoughts of earlier turns are counted."""

        def is_there(words: str) -> bool:
            return any(_holds(text, words) for text in texts)

        unprinted = self._unprinted(messages, tools)
        missing = []
        for place, message in enumerate(messages):
            thoughts, content = _thoughts_and_content(message)
            says = message["content"] or message.get("tool_calls")
            lost = ""
            if says and place in unprinted:
                lost = json.dumps(says, ensure_ascii=False)
            elif not is_there(content):
                lost = content
            elif not is_there(thoughts):
                counts["thoughts"] += 1
                lost = thoughts if place == len(messages) - 1 else ""
            if lost:
                missing.append(f"the message of role {message['role']!r}: {lost[:60]!r}")
        if tools and not all(is_there(str(_function(tool).get("name", ""))) for tool in tools):
            missing.append("the tools")
        if missing:
            advice = "--chat-template FILE takes another"
            raise TitaniteError(f"chat template: does not print {', '.join(missing)}; {advice}")

    def _unprinted(self, messages: Sequence[Message], tools: Any) -> set[int]:
        """Places of messages that the template never prints, whatever they say or call.

        The same words may stand in another message, so each gets words of its own. Once for conversations of a shape.
        """
        shape = (bool(tools), *((m["role"], bool(m["content"]), len(m.get("tool_calls", ()))) for m in messages))
        if shape not in self._vanishing:
            marked = [_with_own_words(message, f"zq{place}zq") for place, message in enumerate(messages)]
            found = ""
            for i, message in enumerate(messages, start=1):
                if message["role"] == "assistant":
                    with suppress(TitaniteError):  # of a template that reads what it prints
                        found += self.render(marked[:i], tools)
            lost = {place for place in range(len(messages)) if f"zq{place}zq" not in found}
            self._vanishing[shape] = lost if found else set()
        return self._vanishing[shape]

    # ---------------------------------------------------------------- conversations as templates expect them

    def _checked(self, messages: Any, tools: Any = None) -> tuple[list[Message], Any]:
        """The conversation as read, the arguments of calls as objects unless the template prints them as they are.

        Raises TitaniteError for what is no conversation, or for one that spells out a special token.
        """
        read = read_conversation({"messages": messages or [], "tools": tools})
        text = json.dumps(read, ensure_ascii=False)
        spelt = [token for token in self._special if token in text]
        if spelt:
            raise TitaniteError(f"a message spells out {spelt[0]!r}, which would become that special token")
        messages, tools = [*read, None][:2]
        for message in messages:
            if message["role"] == "function" and self._knows_tools:
                message["role"] = "tool"
            if not self._prints_arguments:
                _parse_arguments(message.get("tool_calls", ()))
        return messages, tools

    @cached_property
    def _knows_tools(self) -> bool:
        return re.search(r"""["']tool["']""", self._source) is not None

    @cached_property
    def _prints_arguments(self) -> bool:
        with suppress(TitaniteError):
            return ARGUMENTS in self.render([ASKED, {**ANSWER, "content": "", "tool_calls": [CALL]}])
        return False

    @cached_property
    def keys(self) -> frozenset[str]:
        """All keys of a row and, as messages.KEY, of its messages that the template reads, and more."""
        words = {"role", "content", "weight", *re.findall(r"\w+", self._source)}
        return frozenset({"tools", "system"} | words | {f"messages.{word}" for word in words})

    # ---------------------------------------------------------------- how answers begin and end

    @cached_property
    def _closing(self) -> str:
        """What the template prints at the end of a conversation alone, such as eos, beside each answer's end token."""
        answered = self.render([ASKED, ANSWER])
        with suppress(TitaniteError):
            more = self.render([ASKED, ANSWER, ASKED])
            closing = answered.removeprefix(_common(answered, more))
            if closing and ANSWER["content"] not in closing and self._end_of(answered.removesuffix(closing)):
                return closing
        return ""

    def _end_of(self, answered: str) -> list[int]:
        """The added tokens that a text has after ANSWER."""
        (ids,) = self._ids([answered.rpartition(ANSWER["content"])[2]])
        return [token for token in ids if token in self._added]

    @cached_property
    def stop_ids(self) -> frozenset[int]:
        """The added token that ends an answer in the template, if any."""
        answered = self.render([ASKED, ANSWER]).removesuffix(self._closing)
        return frozenset(self._end_of(answered)[-1:])

    def warnings(self, train_eos: bool) -> Iterator[str]:
        """What a model will not learn from examples of this template. Raises TitaniteError."""
        (example,) = self.examples([ASKED, ANSWER], train_eos=train_eos)
        trained = {token for token, own in zip(*example, strict=True) if own}
        if not self.stop_ids and not train_eos:
            yield "the chat template ends answers with no special token, so no model learns to stop; give --train-eos"
        elif not train_eos and not self.stop_ids & trained:
            yield "the chat template's {% generation %} marks leave out what ends an answer, so no model learns to stop"
        asked = self.render([ASKED], add_generation_prompt=True)
        answered = self.render([ASKED, ANSWER])
        missing = asked.removeprefix(_common(asked, answered))
        if missing:
            yield f"the chat template asks with {missing!r}, with which its answers do not begin, so it is not trained"


def _is_trained(message: Message) -> bool:
    return message["role"] == "assistant" and bool(message.get("weight", 1))


def _says_something(message: Message) -> bool:
    return bool(message["content"].strip() or message.get("tool_calls"))


def _in_parts(message: Message) -> Message:
    return {**message, "content": [{"type": "text", "text": message.get("content", "")}]}


def _shared(one: Sequence[Any], other: Sequence[Any]) -> int:
    """How many tokens, or letters, at the beginning are the same."""
    shortest = min(len(one), len(other))
    if one[:shortest] == other[:shortest]:
        return shortest
    return next(i for i in range(shortest) if one[i] != other[i])


def _common(one: str, other: str) -> str:
    return one[: _shared(one, other)]


def _holds(text: str, words: str) -> bool:
    """Whether a text has the words: as they are, with other spaces, or as JSON has them."""
    if words.strip() in text:
        return True
    in_json = json.dumps(words, ensure_ascii=False)[1:-1]
    squeezed = "".join(text.split())
    return any("".join(form.split()) in squeezed for form in (words, in_json))


def _parse_arguments(calls: Any) -> None:
    """Turn the arguments of calls that are JSON text into objects, in place."""
    try:
        for call in calls:
            function = _function(call)
            if isinstance(function.get("arguments"), str):
                function["arguments"] = json.loads(function["arguments"])
    except (AttributeError, TypeError, ValueError):
        asked = "must be a list of objects with JSON as arguments"
        raise TitaniteError(f"tool_calls = {repr(calls)[:80]}: {asked}") from None


def _thoughts_and_content(message: Message) -> tuple[str, str]:
    """The thoughts of a message, also those that its text begins with, and the rest of its text."""
    thoughts = next((message[key] for key in THOUGHTS if message.get(key)), "")
    content = message["content"]
    if message["role"] == "assistant" and END_OF_THOUGHTS in content:
        own, _, content = content.rpartition(END_OF_THOUGHTS)
        thoughts = thoughts or own.strip().removeprefix("<think>")
    return str(thoughts), content


def _function(given: dict[str, Any]) -> dict[str, Any]:
    """What is called, or offered: of a tool or a call, which may be the bare function."""
    return given.get("function", given)


def _with_own_words(message: Message, words: str) -> Message:
    """A message of the same shape that says, or calls, only `words`."""
    if not message.get("tool_calls"):
        return {**message, "content": words}
    copy = deepcopy({**message, "content": ""})
    for call in copy["tool_calls"]:
        function = _function(call)
        function["name"] = words
        arguments = function.get("arguments")
        function["arguments"] = f'"{words}"'
        if isinstance(arguments, dict):
            function["arguments"] = dict.fromkeys(arguments, words)
    return copy


# ---------------------------------------------------------------- examples of a dataset


def encode_examples(
    texts: Iterable[str],
    format: str,
    tokenizer: Tokenizer,
    train_eos: bool = False,
    counts: Counter[str] | None = None,
) -> list[list[np.ndarray]]:
    """The tokens of each text's examples, uint32 with the bits of data.packing.

    A text is a JSON list: of format "sft" [prompt, response], whose eos is trained; of "chat" [messages] or
    [messages, tools], see `ChatTemplate.examples`. The first token is never trained, since nothing comes before it.
    Raises TitaniteError quoting the text.
    """
    made = []
    for text in texts:
        values = json.loads(text)
        try:
            if format == "chat":
                examples = chat_of(tokenizer).examples(*values, train_eos=train_eos, counts=counts)
            else:
                examples = [_pair(tokenizer, *values)]
        except TitaniteError as error:
            raise TitaniteError(f"{error}; in the example {text[:100]}") from None
        made.append([_with_bits(example) for example in examples])
    return made


def _with_bits(example: Example) -> np.ndarray:
    tokens = np.array(example.ids, np.uint32)
    tokens[~np.array(example.trained, bool)] |= np.uint32(HIDDEN)
    tokens[0] |= np.uint32(START | HIDDEN)
    return tokens


@lru_cache(maxsize=1)  # it holds a tokenizer of its own
def chat_of(tokenizer: Tokenizer) -> ChatTemplate:
    """The tokenizer's chat template, or the built-in one. Raises TitaniteError."""
    return ChatTemplate(tokenizer.chat_template, tokenizer)


def use_template(tokenizer: Tokenizer, template: str, arguments: Sequence[str]) -> None:
    """Make `template`, or the tokenizer's own, or the built-in one, the tokenizer's, with arguments NAME=VALUE.

    They become what the template takes where it is not told otherwise, so runs and exports use the same. Raises
    TitaniteError.
    """
    template = template or tokenizer.chat_template or BUILT_IN
    defaults = ""
    for argument in arguments:
        name, separator, text = argument.partition("=")
        if not separator or not re.search(rf"\b{re.escape(name)}\b", template):
            raise TitaniteError(f"--template-argument {argument}: must be NAME=VALUE with a name in the chat template")
        defaults += f"{{% if {name} is not defined %}}{{% set {name} = {_in_jinja(text)} %}}{{% endif %}}"
    if defaults:
        template = f"{defaults}\n{template}"  # Jinja drops this line end
    tokenizer.chat_template = template


def _in_jinja(text: str) -> str:
    """A JSON value, otherwise a text, as Jinja spells it."""
    try:
        value = json.loads(text)
    except ValueError:
        value = text
    return "none" if value is None else json.dumps(value, ensure_ascii=False)


def transformers_version() -> str:
    """The version of the package that tokenises. Raises TitaniteError if it is missing."""
    try:
        return version("transformers")
    except PackageNotFoundError:
        raise TitaniteError(NEEDED) from None


def _pair(tokenizer: Tokenizer, prompt: Any, response: Any) -> Example:
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
    start = _shared(ids, asked)
    return Example(ids, [False] * start + [True] * (len(ids) - start))


def encode_answer(tokenizer: Tokenizer, prompt: str, answer: str) -> np.ndarray:
    """Prompt and answer as an example, uint32 with the bits of data.packing: one text, as a model reads it.

    The answer begins where its tokens part from those of the prompt. These are the tokens of lm-evaluation-harness,
    unless the prompt ends in spaces, all of which it counts. Where nothing comes before the first, the end of another
    document does, as in training. Raises TitaniteError.
    """
    ids = tokenizer.encode(prompt + answer)
    start = _shared(ids, tokenizer.encode(prompt))
    if start == len(ids):
        raise TitaniteError("the tokenizer makes no token of the answer")
    if start == 0:
        ids = [tokenizer.eos_id, *ids]
        start = 1
    return _with_bits(Example(ids, [False] * start + [True] * (len(ids) - start)))
