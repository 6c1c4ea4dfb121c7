"""How many chat templates a model can be tuned with, for conversations of one turn and of two.

    python -m benchmarks.chat_templates FOLDER [FOLDER ...] [--check] [--json=FILE]

Each *.jinja file below the folders counts, such as those of llama.cpp (models/templates) and TRL (trl/chat_templates).
A template is trained if each answer is trained once and the last example's text is what transformers renders.
"""

import sys
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as RawTokenizer
from transformers import PreTrainedTokenizerFast

from benchmarks.report import build_parser, finish, print_row
from config import TitaniteError
from data.chat import ChatTemplate
from data.tokenizer import Tokenizer, train_tokenizer

ANSWERS = "the 1st answer.", "the 2nd answer."
WANTED = 75 / 81  # of all templates, for two turns


def fault(template: str, tokenizer: Tokenizer, turns: int) -> str:
    """Why a conversation of so many turns cannot be trained with a template; "" if it can."""
    messages: list[dict[str, Any]] = []
    for answer in ANSWERS[:turns]:
        messages += [{"role": "user", "content": f"ask for {answer}"}, {"role": "assistant", "content": answer}]
    theirs = PreTrainedTokenizerFast(
        tokenizer_object=RawTokenizer.from_str(tokenizer.raw.to_str()), bos_token="<s>", eos_token=tokenizer.eos_token
    )
    try:
        chat = ChatTemplate(template, tokenizer, datetime.now().strftime("%Y-%m-%d"))
        examples = chat.encode_parts(messages)
        decoded = [[(tokenizer.raw.decode(ids, skip_special_tokens=False), own) for ids, own in x] for x in examples]
    except TitaniteError as error:
        return str(error)[:100]
    # Some templates want contents in parts, or tools.
    in_parts = [{**turn, "content": [{"type": "text", "text": turn["content"]}]} for turn in messages]
    expected: list[Any] = []
    for form, tools in ((messages, None), (in_parts, None), (messages, [])):
        with suppress(Exception):
            expected.append(theirs.apply_chat_template(form, tools, chat_template=template, tokenize=False))
    trained = [text for example in decoded for text, own in example if own]
    for answer in ANSWERS[:turns]:
        if sum(answer in text for text in trained) != 1:
            return f"{answer!r} is trained {sum(answer in text for text in trained)} times"
    return "" if "".join(text for text, _ in decoded[-1]) in expected else "another text than transformers'"


def main() -> int:
    parser = build_parser(__doc__ or "")
    parser.add_argument("folder", nargs="+", type=Path)
    arguments = parser.parse_args()
    plain = train_tokenizer(iter([" ".join(ANSWERS)]), 300)
    plain.raw.add_special_tokens(["<s>"])
    tokenizer = Tokenizer(plain.raw, plain.eos_token, "", bos_token="<s>")
    rows = []
    for path in sorted({path for folder in arguments.folder for path in folder.rglob("*.jinja")}):
        template = path.read_text(encoding="utf-8")
        rows.append({"template": path.name, **{f"{n} turns": fault(template, tokenizer, n) or "yes" for n in (1, 2)}})
        print_row(rows[-1])
    trained = {n: sum(row[f"{n} turns"] == "yes" for row in rows) for n in (1, 2)}
    text = f"of {len(rows)} templates {trained[1]} can be trained for one turn and {trained[2]} for two"
    print(text)
    return finish(arguments, rows, [(f"{text}, at least {WANTED:.0%}", trained[2] >= WANTED * len(rows))])


if __name__ == "__main__":
    sys.exit(main())
