"""How many chat templates conversations can be tuned with, of those that transformers renders.

    python -m benchmarks.chat_templates FOLDER [FOLDER ...] [--trl] [--check] [--json=FILE]

Each *.jinja file below the folders counts, such as those of llama.cpp (models/templates) and TRL (trl/chat_templates).
The tokenizer has the template's own special tokens. A conversation counts as trained if the last example has the ids
that transformers gives the whole, its mask where the template has marks, otherwise each answer once, the last from
where the ids of its question part from the whole's, as TRL does it.
"""

import io
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import redirect_stdout, suppress
from importlib import import_module
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as RawTokenizer

from benchmarks.report import build_parser, finish, print_row
from config import TitaniteError
from data.chat import ChatTemplate, Example, load_transformers
from data.packing import HIDDEN, START, TOKEN_BITS
from data.prepare import main as prepare
from data.shards import open_dataset
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

MARKS = re.compile(r"{%-?\s*generation\s*-?%}")
COUNT = 60  # conversations, and pairs, compared with TRL's
TEXTS = (
    "what is 2 + 2?",
    "naïve 中文 🙂",
    "def f(x):\n    return x\n",
    "  spaces around  ",
    "a 'quoted' \"text\"\nof two lines",
    "1,234.5 €\n\n",
    "the quick brown fox",
)
SEAMS = ("", " ", "\n", "\nAnswer:", "\n\n ")
Examples = Counter[tuple[tuple[int, ...], tuple[bool, ...]]]  # (ids, whether each is trained) → how often


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
    marked = MARKS.search(template) is not None
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


# ---------------------------------------------------------------- against TRL


def conversations() -> Iterator[dict[str, Any]]:
    """Conversations of one to three turns, every fourth with a system message and every sixth with a call."""
    for n in range(COUNT):
        messages = [SYSTEM] if n % 4 == 3 else []
        for turn in range(1 + n % 3):
            messages.append({"role": "user", "content": f"{TEXTS[(n + turn) % 7]} {n}"})
            if n % 6 == 5:
                messages += USED
            messages.append({"role": "assistant", "content": f"{n}: {TEXTS[(n // 7 + 3 * turn) % 7]}"})
        yield {"messages": messages, "tools": TOOLS if n % 6 == 5 else None}


def pairs(eos_token: str) -> Iterator[dict[str, str]]:
    """Prompts with responses that meet in each way, every tenth response with an eos of its own."""
    for n in range(COUNT):
        prompt = f"{n}: {TEXTS[n % 7]}{SEAMS[n % 5]}"
        end = eos_token if n % 10 == 9 else ""
        yield {"prompt": prompt, "response": f"{SEAMS[n % 3]}{TEXTS[n // 7 % 7]}{end}"}


def tokenizers_of_pairs() -> Iterator[tuple[str, Tokenizer]]:
    """(name, tokenizer) of each kind: byte-level BPE without and with a bos, SentencePiece's BPE, and Unigram."""
    texts = [*TEXTS, str(CASES)] * 3
    yield "byte-level BPE", train_tokenizer(texts, 400)
    begun = train_tokenizer(texts, 400).raw
    begun.add_special_tokens([AddedToken("<s>", special=True)])
    begun.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", begun.token_to_id("<s>"))])
    yield "byte-level BPE with a bos", Tokenizer(begun, "<|endoftext|>", bos_token="<s>")
    spaces = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    pieces = RawTokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    pieces.normalizer = normalizers.Sequence(spaces)
    pieces.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    special = ["<unk>", "<s>", "</s>"]
    all_bytes = [f"<0x{byte:02X}>" for byte in range(256)]
    pieces.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=500, special_tokens=special + all_bytes, show_progress=False)
    )
    pieces.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    yield "SentencePiece's BPE", Tokenizer(pieces, "</s>", bos_token="<s>", unk_token="<unk>")
    unigram = RawTokenizer(models.Unigram())
    unigram.pre_tokenizer = pre_tokenizers.Metaspace()
    unigram.decoder = decoders.Metaspace()
    unk = "<unk>"
    trainer = trainers.UnigramTrainer(vocab_size=150, special_tokens=[unk], unk_token=unk, show_progress=False)
    unigram.train_from_iterator(texts, trainer)
    unigram.add_special_tokens([AddedToken("</s>", special=True)])
    yield "Unigram", Tokenizer(unigram, "</s>", unk_token="<unk>")


def prepared(folder: Path, rows: list[dict[str, Any]], format: str, tokenizer: Tokenizer) -> Examples:
    """What data.prepare makes of the rows that it does not refuse."""
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    tokenizer.save(folder)
    command = [f"--source={folder / 'rows.jsonl'}", f"--tokenizer={folder}", f"--format={format}", "--seq-len=8192"]
    command += ["--validation-fraction=0", f"--skip-bad={COUNT - 1}", "--processes=1", f"--output={folder / 'set'}"]
    try:
        with redirect_stdout(io.StringIO()):
            prepare(command)
    except SystemExit:  # all are refused
        return Counter()
    split = open_dataset(str(folder / "set")).split("train")
    examples: Examples = Counter()
    for block in range(len(split.documents)):
        values = split.read(block).values
        for part in np.split(values, np.flatnonzero(values & START)[1:]):
            trained = part < HIDDEN
            if trained.any():  # the rest is padding
                examples[tuple((part & TOKEN_BITS).tolist()), tuple(trained.tolist())] += 1
    return examples


def collated(folder: Path, rows: list[dict[str, Any]], tokenizer: Tokenizer, **options: bool) -> Examples:
    """What TRL's trainer makes of the rows, in the tensors that its collator gives the model."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from trl import SFTConfig, SFTTrainer

    datasets = import_module("datasets")  # an import statement would be checked against our folder of that name
    datasets.disable_progress_bars()
    theirs = load_transformers(tokenizer)
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=len(theirs), hidden_size=8, num_hidden_layers=1, num_attention_heads=1)
    )
    words: dict[str, Any] = {"output_dir": str(folder), "report_to": "none", "use_cpu": True, "bf16": False}
    config = SFTConfig(**words, max_length=None, **options)
    trainer = SFTTrainer(model, config, train_dataset=datasets.Dataset.from_list(rows), processing_class=theirs)
    examples: Examples = Counter()
    for example in trainer.train_dataset:
        batch = trainer.data_collator([example])
        trained = [False, *(batch["labels"][0, 1:] != -100).tolist()]  # nothing predicts the first
        examples[tuple(batch["input_ids"][0].tolist()), tuple(trained)] += 1
    return examples


def row_of(name: str, given: int, ours: Examples, theirs: Examples) -> dict[str, Any]:
    equal = (ours & theirs).total()
    return {
        "of TRL": name,
        "given": given,
        "equal": equal,
        "refused": given - ours.total(),
        "unequal": (ours - theirs).total(),
    }


def taken(theirs: Any, row: dict[str, Any]) -> dict[str, Any] | None:
    """The conversation in the form that the template renders with its last answer: contents as text, or in parts."""
    in_parts = [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in row["messages"]]
    answer = row["messages"][-1]["content"].strip()
    options = {"return_dict": True, "return_assistant_tokens_mask": True}
    for messages in (row["messages"], in_parts):
        with suppress(Exception):  # a template is a program
            made = theirs.apply_chat_template(messages, row["tools"], **options)
            if any(made["assistant_masks"]) and answer in theirs.decode(made["input_ids"]):
                return {**row, "messages": messages}
    return None


def compare_conversations(template: str, name: str) -> dict[str, Any]:
    """How many of the conversations that TRL takes are equal with a template that has marks."""
    tokenizer = tokenizer_of(template)
    theirs = load_transformers(tokenizer)
    forms = [(row, taken(theirs, row)) for row in conversations()]
    rows = [row for row, form in forms if form]
    given = [form for _, form in forms if form]
    with TemporaryDirectory() as folder:
        ours = prepared(Path(folder), rows, "chat", tokenizer)
        return row_of(name, len(rows), ours, collated(Path(folder), given, tokenizer, assistant_only_loss=True))


def compare_pairs(name: str, tokenizer: Tokenizer) -> dict[str, Any]:
    rows = list(pairs(tokenizer.eos_token))
    theirs = [{"prompt": row["prompt"], "completion": row["response"]} for row in rows]
    with TemporaryDirectory() as folder:
        ours = prepared(Path(folder), rows, "sft", tokenizer)
        return row_of(name, COUNT, ours, collated(Path(folder), theirs, tokenizer, completion_only_loss=True))


def compare_with_trl(templates: dict[str, str]) -> list[dict[str, Any]]:
    rows = []
    for name, tokenizer in tokenizers_of_pairs():
        rows.append(compare_pairs(name, tokenizer))
        print_row(rows[-1])
    for name, template in templates.items():
        if MARKS.search(template):
            rows.append(compare_conversations(template, name))
            print_row(rows[-1])
    return rows


def main() -> int:
    parser = build_parser(__doc__ or "")
    parser.add_argument("folder", nargs="+", type=Path)
    parser.add_argument("--trl", action="store_true", help="compare prepared data with what TRL makes of it")
    arguments = parser.parse_args()
    paths = sorted({path for folder in arguments.folder for path in folder.rglob("*.jinja")})
    templates = {path.name: path.read_text(encoding="utf-8") for path in paths}
    if arguments.trl:
        compared = compare_with_trl(templates)
        text = "each is equal that is not refused"
        return finish(arguments, compared, [(text, not any(row["unequal"] for row in compared))])
    rows: list[dict[str, Any]] = []
    for name, template in templates.items():
        faults = {case: fault(template, *given) or "yes" for case, given in CASES.items()}
        rows.append({"template": name, **faults})
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
