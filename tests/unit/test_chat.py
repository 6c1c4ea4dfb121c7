"""Conversations as examples: the texts are those that transformers renders, and each answer is trained once."""

import itertools
import json
from datetime import datetime
from operator import itemgetter
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from tokenizers import Tokenizer as RawTokenizer
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from config import TitaniteError
from data.chat import ChatTemplate, Example, chat_of, use_template
from data.conversations import read_conversation
from data.packing import HIDDEN, TOKEN_BITS
from data.prepare import main as prepare
from data.tokenizer import Tokenizer, load_tokenizer
from tests.corpus import stored_blocks
from tests.unit.test_generate import SPECIAL, byte_tokenizer

END = "<|im_end|>"
TURNS = [{"role": role, "content": f"{role[0]}{n}"} for n in (1, 2) for role in ("user", "assistant")]
LOOP = "{% for m in messages %}"
ROLE = LOOP + "<|im_start|>{{ m.role }}:"
ASK = "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant:"
PLAIN = ROLE + "{{ m.content }}<|im_end|>" + ASK + "{% endif %}"


def tokenizer() -> Tokenizer:
    """It begins each text with a bos, which is not to be added to what a template prints."""
    raw = byte_tokenizer(*SPECIAL, "<s>").raw
    raw.post_processor = TemplateProcessing("<s> $A", special_tokens=[("<s>", raw.token_to_id("<s>"))])
    return Tokenizer(raw, "<|endoftext|>", bos_token="<s>")


def rendered(template: str, messages: list[dict[str, Any]], **options: Any) -> Any:
    """The text that transformers makes of a conversation, or its ids and mask."""
    raw = RawTokenizer.from_str(tokenizer().raw.to_str())
    theirs = PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<s>", eos_token="<|endoftext|>")
    return theirs.apply_chat_template(messages, chat_template=template, **{"tokenize": False, **options})


def trained_texts(example: Example) -> list[str]:
    runs = itertools.groupby(zip(*example, strict=True), key=itemgetter(1))
    return [
        tokenizer().raw.decode([id for id, _ in run], skip_special_tokens=False) for trained, run in runs if trained
    ]


# Name → template, and the trained texts of its examples.
KINDS: dict[str, tuple[str, list[list[str]]]] = {
    "as it is asked": (PLAIN, [["a1" + END, "a2" + END]]),
    "with bos": ("{{ bos_token }}" + PLAIN, [["a1" + END, "a2" + END]]),
    "marked": (
        ROLE
        + "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}"
        + "{% else %}{{ m.content }}<|im_end|>{% endif %}"
        + ASK
        + "{% endif %}",
        [["a1" + END, "a2" + END]],
    ),
    "thoughts in the last answer": (
        ROLE
        + "{% if loop.last and m.role == 'assistant' %}<think></think>{% endif %}{{ m.content }}<|im_end|>"
        + ASK
        + "{% endif %}",
        [["<think></think>a1" + END], ["<think></think>a2" + END]],
    ),
    "asked to think, thoughts left out": (
        ROLE + "{{ m.content.split('</think>')[-1] }}<|im_end|>" + ASK + "<think>{% endif %}",
        [["a1" + END, "a2" + END]],
    ),
    "eos at the end of all": (
        PLAIN.removesuffix("{% endif %}") + "{% else %}{{ eos_token }}{% endif %}",
        [["a1<|im_end|>", "a2<|im_end|><|endoftext|>"]],
    ),
    "only the last question kept": (
        "{% set n = namespace(last=0) %}{% for m in messages if m.role == 'user' %}{% set n.last = loop.index0 * 2 %}"
        "{% endfor %}{% for m in messages[n.last:] %}{{ m.role[0] ~ '>' ~ m.content ~ eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}a>{% endif %}",
        [["a1<|endoftext|>"], ["a2<|endoftext|>"]],
    ),
    "contents in parts": (
        ROLE + "{% for part in m.content %}{{ part.text }}{% endfor %}<|im_end|>" + ASK + "{% endif %}",
        [["a1" + END, "a2" + END]],
    ),
    "for tools only": ("{% for tool in tools %}{% endfor %}" + PLAIN, [["a1" + END, "a2" + END]]),
    "a day": (
        "{{ strftime_now('%d %b %Y') }} {{ tools is none and documents is none }}\n" + PLAIN,
        [["a1" + END, "a2" + END]],
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_each_answer_is_trained_once_in_the_ids_of_transformers(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    template, trained = KINDS[kind]
    monkeypatch.setattr("transformers.utils.chat_template_utils.datetime", Mock(now=lambda: datetime(2026, 1, 31)))
    examples = ChatTemplate(template, tokenizer()).examples(TURNS)
    assert [trained_texts(example) for example in examples] == trained
    turns = TURNS
    if kind == "contents in parts":
        turns = [{**turn, "content": [{"type": "text", "text": turn["content"]}]} for turn in TURNS]
    options: dict[str, Any] = {"tools": [] if kind == "for tools only" else None, "tokenize": True, "return_dict": True}
    for example, end in zip(examples, (2, 4)[-len(trained) :], strict=True):
        made = rendered(template, turns[:end], return_assistant_tokens_mask=kind == "marked", **options)
        assert example.ids == made["input_ids"]
        assert made.get("assistant_masks", example.trained) == example.trained


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{% for", "not a chat template"),
        ("{{ raise_exception('no system, please') }}", "no system, please"),
        (
            "{{ messages | length }}{{ messages | map(attribute='content') | join }}",
            r"an answer changes the text before it.*; --chat-template FILE takes another",
        ),
    ],
)
def test_templates_that_cannot_be_used_say_why(template: str, said: str) -> None:
    with pytest.raises(TitaniteError, match=said):
        ChatTemplate(template, tokenizer()).examples(TURNS)


def test_arguments_of_a_template_are_what_it_takes_unless_it_is_told_otherwise() -> None:
    template = (
        "{% macro say() %}{{ mood | default('calm') }}{% endmacro %}\n\n  {% if mood %}{{ say() }}{% endif %}" + PLAIN
    )
    ours = tokenizer()
    use_template(ours, template, ['mood="gay"'])
    assert chat_of(ours).render(TURNS) == rendered(template, TURNS, mood="gay")
    assert rendered(ours.chat_template, TURNS, mood="sad") == rendered(template, TURNS, mood="sad")
    with pytest.raises(TitaniteError, match="--template-argument moo=1: must be NAME=VALUE with a name in the chat"):
        use_template(ours, template, ["moo=1"])


PRINTED = "{{ m.tool_calls[0].function.arguments }}"
ENCODED = "{{ m.tool_calls | tojson }}"


@pytest.mark.parametrize("call", [ENCODED, PRINTED, "{{ m.tool_calls[0].function.arguments.items() | list }}"])
def test_tools_and_their_calls_are_those_that_transformers_renders_from_objects(call: str) -> None:
    template = "{% if tools %}{{ tools | tojson(ensure_ascii=False) }}{% endif %}" + PLAIN.replace(
        "{{ m.content }}", "{{ m.reasoning_content }}{{ m.content }}{% if m.tool_calls %}" + call + "{% endif %}"
    )
    tools = [{"type": "function", "function": {"name": "clock", "parameters": {}}}]

    def turns(arguments: Any) -> list[dict[str, Any]]:
        calls = [{"id": "1", "type": "function", "function": {"name": "clock", "arguments": arguments}}]
        called = {"role": "assistant", "content": None, "reasoning": "hm", "tool_calls": calls}
        return [TURNS[0], called, {"role": "tool", "content": "noon"}, {**TURNS[1], "weight": 0}, *TURNS[2:]]

    def read(messages: list[dict[str, Any]], tools: Any) -> list[Any]:
        return read_conversation({"messages": messages, "tools": tools})

    text, given = '{"zone": "é"}', {"zone": "é"}
    expected = rendered(template, turns(text if call == PRINTED else given), tools=tools)
    for kept in (tools, json.dumps(tools)):
        (example,) = ChatTemplate(template, tokenizer()).examples(*read(turns(text), kept))
        trained = trained_texts(example)
        assert tokenizer().raw.decode(example.ids, skip_special_tokens=False) == expected
        assert trained[0].startswith("hm")
        assert trained[1:] == ["a2" + END], "a1 has weight 0"


def test_the_special_tokens_that_a_folder_declares_are_those_of_transformers(tmp_path: Path) -> None:
    template = "{{ bos_token }}|{{ eos_token }}|{{ pad_token }}|{{ unk_token }}|" + PLAIN
    declared = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": {"__type": "AddedToken", "content": "<s>"}}
    declared |= {"pad_token": "<|im_end|>", "model_max_length": 99, "eos_token": "<|endoftext|>"}
    tokenizer().save(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(declared | {"chat_template": template}))
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"unk_token": {"content": "<|im_start|>"}}))
    theirs = AutoTokenizer.from_pretrained(tmp_path).apply_chat_template(TURNS, return_dict=False)
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": TURNS}))
    command = ["--source", str(tmp_path / "a.jsonl"), "--format=chat", "--seq-len=256", "--validation-fraction=0"]
    prepare([*command, "--tokenizer", str(tmp_path), "--output", str(tmp_path / "set")])
    for folder in (tmp_path, tmp_path / "set"):
        assert chat_of(load_tokenizer(folder)).encode(TURNS) == theirs
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        assert (tmp_path / "set" / name).read_bytes() == (tmp_path / name).read_bytes()
    assert AutoTokenizer.from_pretrained(tmp_path / "set").apply_chat_template(TURNS, return_dict=False) == theirs
    assert [token & TOKEN_BITS for token in stored_blocks(tmp_path / "set")[0][0][: len(theirs)]] == theirs


def test_a_preparation_says_what_is_not_learnt_and_how_many_examples_a_conversation_makes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    endless = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant: "
    )
    (tmp_path / "endless.jinja").write_text(endless + "<think>{% endif %}")
    tokenizer().save(tmp_path)
    row = {"source": "web", "messages": [TURNS[0], {**TURNS[1], "mood": "kind"}, *TURNS[2:]]}
    for name in ("a", "b"):
        (tmp_path / f"{name}.jsonl").write_text((json.dumps(row) + "\n") * 2 + json.dumps({**row, "tools": []}) + "\n")
    command = ["--source", str(tmp_path / "*.jsonl"), "--format=chat", "--seq-len=256", "--validation-fraction=0"]
    command += ["--tokenizer", str(tmp_path), "--output", str(tmp_path / "set"), "--overwrite"]
    command += ["--chat-template", str(tmp_path / "endless.jinja")]
    prepare([*command, "--processes=1"])
    said = capsys.readouterr().out
    assert "conversations or pairs 6, examples 6, trained tokens 36\n" in said, "two letters and a line end, each"
    unread = ": keys that the chat template does not read: messages.mood, source"
    assert caplog.messages == [
        "the chat template ends answers with no special token, so no model learns to stop; give --train-eos",
        "the chat template asks with '<think>', with which its answers do not begin, so it is not trained",
        *(f"{tmp_path}/{name}.jsonl{unread}" for name in ("a", "b")),
    ]
    prepare([*command, "--train-eos"])
    assert "conversations or pairs 6, examples 12, trained tokens 36\n" in capsys.readouterr().out
    assert "no special token" not in "".join(caplog.messages[4:])
    (rows,) = stored_blocks(tmp_path / "set")
    kept = [token & TOKEN_BITS for token in itertools.chain(*rows) if token < HIDDEN]
    answers = tokenizer().raw.decode(kept, skip_special_tokens=False).split("<|endoftext|>")
    assert sorted(answers) == ["", *["a1"] * 6, *["a2"] * 6]
