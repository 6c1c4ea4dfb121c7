"""How many chat templates conversations can be tuned with, of those that transformers renders.

    python -m benchmarks.chat_templates FOLDER [FOLDER ...] [--check] [--json=FILE]

Each *.jinja file below the folders counts, such as those of llama.cpp (models/templates) and TRL (trl/chat_templates).
The tokenizer has the template's own special tokens. A conversation counts as trained if the last example has the ids
that transformers gives the whole, its mask where the template has marks, otherwise each answer once, the last from
where the ids of its question part from the whole's, as TRL does it.
"""

import json
import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

from tokenizers import AddedToken

from benchmarks.report import build_parser, finish, print_row
from config import TitaniteError
from data.chat import ChatTemplate, Example, load_transformers
from data.tokenizer import Tokenizer, train_tokenizer

TOKENS = re.compile(r"</?[|｜]?[A-Za-z_▁0-9-]+[|｜]?>|\[/?[A-Z_]{3,}\]|<\|[^|<>\s]{1,40}\|>")
OF_ANSWERS = re.compile(r"think|tool|arg|function|param|response|observation", re.IGNORECASE)  # models write them
ASKED = [{"role": "user", "content": f"ask for the {n} one."} for n in ("1st", "2nd")]
ANSWERS = [{"role": "assistant", "content": f"the {n} answer."} for n in ("1st", "2nd")]
SYSTEM = {"role": "system", "content": "be brief."}
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "clock",
            "description": "the time in a town",
            "parameters": {"type": "object", "properties": {"town": {"type": "string", "description": "which"}}},
        },
    }
]
CALLS = [{"id": "call00001", "type": "function", "function": {"name": "clock", "arguments": {"town": "oslo"}}}]
USED: list[dict[str, Any]] = [
    {"role": "assistant", "content": "", "tool_calls": CALLS},
    {"role": "tool", "name": "clock", "tool_call_id": "call00001", "content": "it is nine"},
]
THOUGHT = {**ANSWERS[0], "reasoning_content": "let me see."}
THINKING = {**ANSWERS[0], "content": "<think>\nlet me see.\n</think>\n\nthe 1st answer."}
WORDS = ("be brief.", "1st one.", "1st answer.", "2nd one.", "2nd answer.", "clock", "nine", "let me see.")
CASES: dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]] | None]] = {
    "one turn": ([ASKED[0], ANSWERS[0]], None),
    "two turns": ([ASKED[0], ANSWERS[0], ASKED[1], ANSWERS[1]], None),
    "system": ([SYSTEM, ASKED[0], ANSWERS[0]], None),
    "tools": ([ASKED[0], *USED, ANSWERS[0]], TOOLS),
    "reasoning_content": ([ASKED[0], THOUGHT], None),
    "thoughts in content": ([ASKED[0], THINKING], None),
}


def tokenizer_of(template: str) -> Tokenizer:
    """A tokenizer with the tokens that a template spells. Those that models write are not special."""
    raw = train_tokenizer([str(CASES)], 400).raw
    for token in sorted(set(TOKENS.findall(template)) | {"<s>", "</s>"}):
        raw.add_tokens([AddedToken(token, special=OF_ANSWERS.search(token) is None, normalized=False)])
    return Tokenizer(raw, "</s>", "", chat_template=template, bos_token="<s>", pad_token="<s>", unk_token="<s>")


def rendered(theirs: Any, messages: list[dict[str, Any]], tools: Any, **options: Any) -> Iterator[Any]:
    """Yield what transformers makes of a conversation, with contents as text and in parts, and no tools as []."""
    in_parts = [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in messages]
    for form, given in ((messages, tools), (in_parts, tools), (messages, tools or []), (in_parts, tools or [])):
        with suppress(Exception):  # a template is a program
            yield theirs.apply_chat_template(form, given, return_dict=True, **options)


def fault(template: str, messages: list[dict[str, Any]], tools: Any) -> str:
    """Why a conversation cannot be trained with a template, or "".

    "not rendered" if transformers fails or drops some of it.
    """
    tokenizer = tokenizer_of(template)
    theirs = load_transformers(tokenizer)
    marked = re.search(r"{%-?\s*generation\s*-?%}", template) is not None
    said = json.dumps([messages, tools])
    words = [word for word in WORDS if word in said]
    wholes = []
    for made in rendered(theirs, messages, tools, return_assistant_tokens_mask=marked):
        text = theirs.decode(made["input_ids"])
        if all(word in text for word in words):
            wholes.append(made)
    if not wholes:
        return "not rendered"
    try:
        examples = ChatTemplate(template, tokenizer).examples(messages, tools)
    except TitaniteError as error:
        return str(error)[:150]
    same = [made for made in wholes if made["input_ids"] == examples[-1].ids]
    if not same:
        return "other ids than transformers'"
    if marked:
        masks = [[bool(own) for own in made["assistant_masks"]] for made in same]
        return "" if examples[-1].trained in masks else "another mask than transformers'"
    return fault_of_mask(theirs, examples, messages, tools)


def fault_of_mask(theirs: Any, examples: list[Example], messages: list[dict[str, Any]], tools: Any) -> str:
    """What is wrong with the trained tokens of a template without marks."""
    trained = "".join(text for example in examples for text, own in texts_of(theirs, example) if own)
    for message in messages:
        words = message["content"].rpartition("</think>")[2].strip()
        if words and trained.count(words) != (message["role"] == "assistant"):
            return f"{words!r} is trained {trained.count(words)} times"
    ids = examples[-1].ids
    starts = []
    for made in rendered(theirs, messages[:-1], tools, add_generation_prompt=True):
        asked = made["input_ids"]
        start = 0
        while start < min(len(asked), len(ids)) and asked[start] == ids[start]:
            start += 1
        starts.append(start)
    last = texts_of(theirs, examples[-1])[-1][0]
    found = [start for start in starts if theirs.decode(ids[start:]) == last]
    return "" if found else f"the last answer is trained from elsewhere: {last[:40]!r}"


def texts_of(theirs: Any, example: Example) -> list[tuple[str, bool]]:
    """(text, whether it is trained) of each part of an example."""
    runs = groupby(zip(*example, strict=True), key=itemgetter(1))
    return [(theirs.decode([token for token, _ in run]), own) for own, run in runs]


def main() -> int:
    parser = build_parser(__doc__ or "")
    parser.add_argument("folder", nargs="+", type=Path)
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for path in sorted({path for folder in arguments.folder for path in folder.rglob("*.jinja")}):
        template = path.read_text(encoding="utf-8")
        faults = {case: fault(template, *given) or "yes" for case, given in CASES.items()}
        rows.append({"template": path.name, **faults})
        print_row(rows[-1])
    bars = []
    for case in CASES:
        found = [row[case] for row in rows if row[case] != "not rendered"]
        text = f"{case}: {found.count('yes')} trained of {len(found)} that transformers renders whole, of {len(rows)}"
        print(text)
        bars.append((text, found.count("yes") == len(found)))
    return finish(arguments, rows, bars)


if __name__ == "__main__":
    sys.exit(main())
