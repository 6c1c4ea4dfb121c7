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
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from tokenizers import AddedToken, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as RawTokenizer

from benchmarks.report import build_parser, finish, print_row
from config import TitaniteError
from data.chat import ChatTemplate, load_transformers
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
WORDS = ("be brief.", "1st one.", "1st answer.", "2nd one.", "2nd answer.", "clock", "oslo", "nine", "let me see.")
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


def rendered(
    theirs: Any, messages: list[dict[str, Any]], *tools: list[Any] | None, **options: Any
) -> Iterator[tuple[Any, Any]]:
    """Yield (messages, what transformers makes of them), with contents as text and in parts, with each of `tools`."""
    in_parts = [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in messages]
    for form, given in product((messages, in_parts), tools):
        with suppress(Exception):  # a template is a program
            yield form, theirs.apply_chat_template(form, given, return_dict=True, **options)


def verdict(template: str, messages: list[dict[str, Any]], tools: Any) -> str:
    """Why a conversation cannot be trained with a template, or "yes".

    "not rendered" if transformers fails or drops some of it.
    """
    tokenizer = tokenizer_of(template)
    theirs = load_transformers(tokenizer)
    marked = MARKS.search(template) is not None
    said = json.dumps([messages, tools])
    wholes = []
    for _, made in rendered(theirs, messages, tools, tools or [], return_assistant_tokens_mask=marked):
        text = theirs.decode(made["input_ids"])
        if all(word in text for word in WORDS if word in said):
            wholes.append(made)
    if not wholes:
        return "not rendered"
    try:
        examples = ChatTemplate(template, tokenizer).examples(messages, tools)
    except TitaniteError as error:
        return str(error)[:150]
    last = examples[-1]
    same = [made for made in wholes if made["input_ids"] == last.ids]
    if not same:
        return "other ids than transformers'"
    if marked:
        equal = last.trained in [made["assistant_masks"] for made in same]
        return "yes" if equal else "another mask than transformers'"
    pairs = [pair for example in examples for pair in zip(*example, strict=True)]
    trained = theirs.decode([token for token, own in pairs if own])
    for message in messages:
        words = message["content"].rpartition("</think>")[2].strip()
        if words and trained.count(words) != (message["role"] == "assistant"):
            return f"{words!r} is trained {trained.count(words)} times"
    start = len(last.ids) - last.trained[::-1].index(False)
    for _, made in rendered(theirs, messages[:-1], tools, tools or [], add_generation_prompt=True):
        asked = made["input_ids"]
        if asked[:start] == last.ids[:start] and asked[start : start + 1] != last.ids[start : start + 1]:
            return "yes"
    return f"the last answer is trained from elsewhere: {theirs.decode(last.ids[start:])!r}"


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
        response = f"{SEAMS[n % 3]}{TEXTS[n // 7 % 7]}{end}"
        yield {"prompt": prompt, "response": response, "completion": response}  # here, and in TRL


def tokenizers_of_pairs() -> Iterator[tuple[str, Tokenizer]]:
    """(name, tokenizer) of each kind: byte-level BPE without and with a bos, SentencePiece's BPE, and Unigram."""
    texts = [*TEXTS, str(CASES)] * 3
    yield "byte-level BPE", train_tokenizer(texts, 400)
    begun = train_tokenizer(texts, 400).raw
    begun.add_special_tokens(["<s>"])
    yield "byte-level BPE with a bos", Tokenizer(with_bos(begun), "<|endoftext|>", bos_token="<s>")
    pieces = RawTokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    pieces.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    train: dict[str, Any] = {"special_tokens": special, "show_progress": False}
    pieces.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=500, **train))
    yield "SentencePiece's BPE", Tokenizer(with_bos(pieces), "</s>", bos_token="<s>", unk_token="<unk>")
    unigram = RawTokenizer(models.Unigram())
    unigram.pre_tokenizer = pre_tokenizers.Metaspace()
    train["special_tokens"] = ["<unk>"]
    unigram.train_from_iterator(texts, trainers.UnigramTrainer(vocab_size=150, unk_token="<unk>", **train))
    unigram.add_special_tokens(["</s>"])
    yield "Unigram", Tokenizer(unigram, "</s>", unk_token="<unk>")


def with_bos(raw: RawTokenizer) -> RawTokenizer:
    raw.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", raw.token_to_id("<s>"))])
    return raw


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


def compare(
    name: str, tokenizer: Tokenizer, format: str, rows: list[Any], given: list[Any], **options: bool
) -> dict[str, Any]:
    """How many examples that data.prepare makes of `rows` are equal to those that TRL makes of `given`."""
    with TemporaryDirectory() as folder:
        ours = prepared(Path(folder), rows, format, tokenizer)
        theirs = collated(Path(folder), given, tokenizer, **options)
    counts = {"equal": (ours & theirs).total(), "refused": len(rows) - ours.total()}
    row = {"of TRL": name, "given": len(rows), **counts, "unequal": (ours - theirs).total()}
    print_row(row)
    return row


def compare_pairs(name: str, tokenizer: Tokenizer) -> dict[str, Any]:
    rows = list(pairs(tokenizer.eos_token))
    return compare(name, tokenizer, "sft", rows, rows, completion_only_loss=True)


def compare_conversations(name: str, template: str) -> dict[str, Any]:
    """Of a template that has marks, the conversations whose last answer it renders for TRL, as text or in parts."""
    tokenizer = tokenizer_of(template)
    theirs = load_transformers(tokenizer)
    rows = []
    given = []
    for row in conversations():
        answer = row["messages"][-1]["content"].strip()
        for form, made in rendered(theirs, row["messages"], row["tools"], return_assistant_tokens_mask=True):
            if any(made["assistant_masks"]) and answer in theirs.decode(made["input_ids"]):
                rows.append(row)
                given.append({**row, "messages": form})
                break
    return compare(name, tokenizer, "chat", rows, given, assistant_only_loss=True)


def main() -> int:
    parser = build_parser(__doc__ or "")
    parser.add_argument("folder", nargs="+", type=Path)
    parser.add_argument("--trl", action="store_true", help="compare prepared data with what TRL makes of it")
    arguments = parser.parse_args()
    paths = sorted({path for folder in arguments.folder for path in folder.rglob("*.jinja")})
    templates = {path.name: path.read_text(encoding="utf-8") for path in paths}
    rows: list[dict[str, Any]] = []
    if arguments.trl:
        rows = [compare_pairs(*kind) for kind in tokenizers_of_pairs()]
        rows += [compare_conversations(*item) for item in templates.items() if MARKS.search(item[1])]
        return finish(arguments, rows, [("each is equal that is not refused", not any(row["unequal"] for row in rows))])
    for name, template in templates.items():
        rows.append({"template": name} | {case: verdict(template, *given) for case, given in CASES.items()})
        print_row(rows[-1])
    bars = []
    for case in CASES:
        found = Counter(row[case] for row in rows)
        whole = len(rows) - found["not rendered"]
        text = f"{case}: {found['yes']} trained of {whole} that transformers renders whole, of {len(rows)}"
        print(text)
        bars.append((text, found["yes"] == whole))
    return finish(arguments, rows, bars)


if __name__ == "__main__":
    sys.exit(main())
