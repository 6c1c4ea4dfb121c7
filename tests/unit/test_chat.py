"""Chats as examples: ids and masks are transformers', each answer is trained, and nothing disappears."""

import itertools
import json
import re
from importlib.util import find_spec
from operator import itemgetter
from pathlib import Path

import pytest
from jinja2 import UndefinedError
from tokenizers import Tokenizer as RawTokenizer
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from config import TitaniteError
from data.chat import ChatTemplate, chat_of, read_conversation
from data.packing import TOKEN_BITS
from data.prepare import main as prepare
from data.prepare.tuning import encode_conversation, use_template
from data.tokenizer import Tokenizer, load_tokenizer
from tests.corpus import stored_blocks
from tests.unit.test_generate import SPECIAL, byte_tokenizer

END = "<|im_end|>"
TURNS = [{"role": role, "content": f"{role[0]}{n}"} for n in (1, 2) for role in ("user", "assistant")]
BEGIN = "{% for m in messages %}<|im_start|>{{ m.role }}:"
ASK = "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant:{% endif %}"


def template(answer, other="{{ m.content }}<|im_end|>", begin=BEGIN):
    """A template that marks what `answer` prints."""
    marked = "{% generation %}" + answer + "{% endgeneration %}"
    return begin + "{% if m.role == 'assistant' %}" + marked + "{% else %}" + other + "{% endif %}" + ASK


PLAIN = template("{{ m.content }}<|im_end|>")
PHI = template("{{ m.content }}<|im_end|>{% if loop.last %}{{ eos_token }}{% endif %}")
CALLS = "{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}"
TOOLS = "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
WITH_TOOLS = TOOLS + template("{{ m.reasoning_content }}{{ m.content }}" + CALLS + "<|im_end|>")


def tokenizer(source):
    """It begins each text with a bos, which is not to be added to what a template prints."""
    raw = byte_tokenizer(*SPECIAL, "<s>").raw
    raw.post_processor = TemplateProcessing("<s> $A", special_tokens=[("<s>", raw.token_to_id("<s>"))])
    return Tokenizer(raw, "<|endoftext|>", bos_token="<s>", chat_template=source)


def expected(ours, turns, tools=None):
    """The ids and the mask of transformers."""
    raw = RawTokenizer.from_str(ours.raw.to_str())
    theirs = PreTrainedTokenizerFast(
        tokenizer_object=raw, bos_token=ours.declared["bos_token"], eos_token=ours.eos_token
    )
    options = {"chat_template": chat_of(ours).source, "return_dict": True, "return_assistant_tokens_mask": True}
    made = theirs.apply_chat_template(turns, tools=tools, **options)
    return made["input_ids"], made["assistant_masks"]


def trained_texts(ours, example):
    runs = itertools.groupby(zip(*example, strict=True), key=itemgetter(1))
    return [ours.raw.decode([id for id, _ in run], skip_special_tokens=False) for trained, run in runs if trained]


@pytest.mark.parametrize(
    ("source", "trained"),
    [
        (PLAIN, [f"a1{END}", f"a2{END}"]),
        ("{{ bos_token }}" + PLAIN, [f"a1{END}", f"a2{END}"]),
        (template("{{ m.content }}", "{{ m.content }}<|im_end|>"), ["a1", "a2"]),
        ("", ["a1<|endoftext|>", "a2<|endoftext|>"]),  # the built-in one
        (PHI, [f"a1{END}", f"a2{END}<|endoftext|>"]),
        (
            template("{{ m.content }}{% if loop.last %}{{ eos_token }}{% else %}<|im_end|>{% endif %}"),  # as gpt-oss's
            [f"a1{END}", "a2<|endoftext|>"],
        ),
    ],
)
def test_each_answer_is_trained_in_the_ids_of_transformers(source, trained):
    ours = tokenizer(source)
    example = encode_conversation(ours, TURNS)
    assert trained_texts(ours, example) == trained
    assert example == expected(ours, TURNS)


def test_a_conversation_may_end_with_a_question():
    ours = tokenizer(PHI)
    example = encode_conversation(ours, [*TURNS, TURNS[0]])
    assert trained_texts(ours, example) == [f"a1{END}", f"a2{END}"]  # the last answer does not end it
    assert example == expected(ours, [*TURNS, TURNS[0]])


CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": None, "y": "é"}}}
OTHER = {"type": "function", "function": {"name": "g", "arguments": {}}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CALLED = {"role": "assistant", "content": "Sure", "tool_calls": [CALL, OTHER]}
ANSWERED = {"role": "tool", "content": "noon"}
LAST = {"role": "assistant", "content": "Surely noon."}


@pytest.mark.parametrize(
    ("source", "turns", "tools", "lost"),
    [
        # Of two parallel calls, the second.
        (WITH_TOOLS.replace("m.tool_calls or []", "(m.tool_calls or [])[:1]"), [TURNS[0], CALLED, LAST], None, '"g"'),
        # Text beside calls, whose words an answer has again.
        (
            WITH_TOOLS.replace(
                "{{ m.content }}" + CALLS, "{% if m.tool_calls %}" + CALLS + "{% else %}{{ m.content }}{% endif %}"
            ),
            [TURNS[0], CALLED, LAST],
            None,
            "'Sure'",
        ),
        (WITH_TOOLS.replace(TOOLS, ""), TURNS, [TOOL], '"f"'),
        (WITH_TOOLS.replace("tools or []", "(tools or [])[:1]"), TURNS, [TOOL, OTHER], '"g"'),
        (PLAIN.replace("in messages", "in messages if m.role != 'tool'"), [TURNS[0], ANSWERED, LAST], None, "'noon'"),
        (PLAIN, [TURNS[0], LAST | {"reasoning_content": "hm"}], None, "reasoning_content"),
        (
            PLAIN.replace("{{ m.content }}<", "{{ m.content.split('</think>')[-1] }}<"),
            [TURNS[0], LAST | {"content": "<think>hm</think>noon"}],
            None,
            "hm",
        ),
    ],
)
def test_what_a_template_does_not_print_is_refused(source, turns, tools, lost):
    with pytest.raises(TitaniteError, match=rf"does not print .*{lost}.*--chat-template"):
        encode_conversation(tokenizer(source), turns, tools)


def test_calls_and_tools_are_printed_also_those_that_are_json_text():
    ours = tokenizer(WITH_TOOLS)
    turns = [TURNS[0], CALLED, ANSWERED, LAST]
    call = CALL | {"function": CALL["function"] | {"arguments": '{"x": null, "y": "é"}'}}
    record = {"messages": [TURNS[0], CALLED | {"tool_calls": [call, OTHER]}, *turns[2:]], "tools": json.dumps([TOOL])}
    example = encode_conversation(ours, *read_conversation(record))
    assert example == expected(ours, turns, [TOOL])
    assert '{"x": null, "y": "é"}' in ours.raw.decode(example.ids), "a null that is said stays"


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("{% for", "not a chat template"),
        ("{{ raise_exception('no system, please') }}", "no system, please"),
        # Thoughts of earlier answers are dropped once another turn follows.
        (template("{% if loop.last %}<think>{% endif %}{{ m.content }}<|im_end|>"), "changes message 2"),
        (
            PLAIN.replace(
                "{% if m.role == 'assistant' %}",
                "{% if m.role == 'assistant' and m.content != 'a2' %}",
            ),
            "marks no token of the answer that is message 4",
        ),
    ],
)
def test_templates_that_cannot_be_used_say_why(source, said):
    with pytest.raises(TitaniteError, match=said):
        encode_conversation(tokenizer(source), TURNS)


def test_a_template_without_marks_is_refused_and_one_that_never_stops_is_told(caplog):
    with pytest.raises(TitaniteError, match=r"--chat-template FILE; .*trl/chat_templates"):
        use_template(tokenizer(PLAIN.replace("{% generation %}", "").replace("{% endgeneration %}", "")), "")
    use_template(tokenizer(""), PLAIN)
    assert not caplog.messages
    use_template(tokenizer(""), template("{{ m.content }}"))
    assert "learns to stop" in caplog.text


TRL = find_spec("trl")  # pip install --no-deps trl
MARKED = sorted(Path(TRL.origin).parent.glob("chat_templates/*_training.jinja")) if TRL and TRL.origin else []
SPELT = r"<\|[^|<>'\"{}]{1,40}\|>|<(?:start|end)_of_turn>|</?s>|<eos>|<bos>|<｜[^<>]{1,40}｜>"
ARGUMENTS = CALL | {"id": "abcdefghi", "function": {"name": "f", "arguments": {"y": "é"}}}
DIALOGUES = {
    "plain": (TURNS, None),
    "system": ([{"role": "system", "content": "be kind"}, *TURNS], None),
    "tools": ([TURNS[0], {"role": "assistant", "content": "", "tool_calls": [ARGUMENTS]}, ANSWERED, LAST], [TOOL]),
    "thoughts": ([TURNS[0], LAST | {"reasoning_content": "hm"}], None),
}


@pytest.mark.parametrize("dialogue", DIALOGUES)
@pytest.mark.parametrize("file", MARKED, ids=lambda file: file.stem)
def test_trl_s_marked_templates_give_its_ids_and_masks_or_a_refusal(file, dialogue):
    source = file.read_text()
    raw = byte_tokenizer(*sorted({"<|endoftext|>", *re.findall(SPELT, source)})).raw
    ours = Tokenizer(raw, "<|endoftext|>", bos_token="<|endoftext|>", chat_template=source)
    try:
        example = encode_conversation(ours, *DIALOGUES[dialogue])
    except TitaniteError:
        if dialogue == "plain":
            with pytest.raises(UndefinedError):  # it wants contents in parts
                expected(ours, *DIALOGUES[dialogue])
        return
    assert example == expected(ours, *DIALOGUES[dialogue])


@pytest.mark.parametrize(
    ("turn", "tool"),
    [
        ({"role": "user", "content": 'so <a"b>'}, TOOL),
        (LAST | {"reasoning_content": 'so <a"b>'}, TOOL),
        (CALLED | {"tool_calls": [{"function": {"name": "f", "arguments": {"x": ['<a"b>']}}}]}, TOOL),
        (LAST, {"function": {"name": "f", "description": '<a"b>'}}),
    ],
)
def test_special_tokens_are_looked_for_in_what_is_said(turn, tool):
    """Not in roles, keys or types, and as the text has them, not as JSON spells them."""
    raw = byte_tokenizer(*SPECIAL, "user", "function", "object", '<a"b>').raw
    ours = Tokenizer(raw, "<|endoftext|>", chat_template=WITH_TOOLS)
    asked = {"role": "user", "content": "who?"}
    encode_conversation(ours, [asked, CALLED, ANSWERED, LAST], [TOOL])
    with pytest.raises(TitaniteError, match="spells out '<a\"b>'"):
        encode_conversation(ours, [asked, turn, LAST], [tool])


def test_template_and_special_tokens_of_a_folder_are_those_of_transformers(tmp_path):
    """Where tokenizer_config.json, an older file and chat templates with names hold them; in a dataset of it, too."""
    source = "{{ bos_token }}|{{ eos_token }}|{{ pad_token }}|{{ unk_token }}|" + PLAIN
    declared = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": {"__type": "AddedToken", "content": "<s>"}}
    declared |= {"pad_token": "<|im_end|>", "eos_token": "<|endoftext|>"}
    # Jinja may trim the spaces beside a tag.
    named = [{"name": "tool_use", "template": f"\n {TOOLS}{source}\n "}, {"name": "default", "template": source + "\n"}]
    tokenizer("").save(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(declared | {"chat_template": named}))
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"unk_token": {"content": "<|im_start|>"}}))
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": TURNS, "tools": [TOOL]}))
    command = ["--source", str(tmp_path / "a.jsonl"), "--format=chat", "--seq-len=512", "--validation-fraction=0"]
    prepare([*command, "--tokenizer", str(tmp_path), "--output", str(tmp_path / "set")])
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    plain, with_tools = [theirs.apply_chat_template(TURNS, tools=tools, return_dict=False) for tools in (None, [TOOL])]
    for folder in (tmp_path, tmp_path / "set"):
        found = chat_of(load_tokenizer(folder))
        assert (found.encode(TURNS), found.encode(TURNS, [TOOL])) == (plain, with_tools)
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        assert (tmp_path / "set" / name).read_bytes() == (tmp_path / name).read_bytes()
    ((row,),) = stored_blocks(tmp_path / "set")
    assert [token & TOKEN_BITS for token in row[: len(with_tools)]] == with_tools


@pytest.mark.parametrize(
    ("source", "stop"),
    [
        (PLAIN, END),
        (PLAIN.replace(ASK, "{% endfor %}{{ eos_token }}"), END),
        ("", "<|endoftext|>"),
        ("{{ messages[1].content }}", ""),
    ],
)
def test_the_token_that_ends_an_answer(source, stop):
    ours = tokenizer(source)
    found = ChatTemplate(source, ours).stop_ids
    assert [ours.raw.id_to_token(token) for token in found] == [stop] * bool(stop)
