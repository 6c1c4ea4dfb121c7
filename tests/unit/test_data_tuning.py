"""Fine-tuning data: which tokens are trained, worked out by hand; packing; and datasets that verify and fit."""

import json
import random
import subprocess
import sys
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import AddedToken, models, pre_tokenizers
from tokenizers import Tokenizer as RawTokenizer

from config import Config, TitaniteError, from_dict
from data.loader import IGNORED, DataLoader, validation_batches
from data.packing import HIDDEN, START, TOKEN_BITS, pack
from data.prepare import main as prepare
from data.prepare.tuning import encode_example
from data.shards import DataError, open_dataset
from data.tokenizer import Tokenizer
from tests.corpus import documents_in, stored_blocks, word_tokenizer, write_dataset

WORDS = ("<eos>", "<|u|>", "<|a|>", "<|end|>", "two", "plus", "is", "four", "five", "what", "?", "so")
EOS, USER, ASSISTANT, END, TWO, PLUS, IS, FOUR, FIVE, WHAT, ASK, SO = range(len(WORDS))
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'user' %}<|u|> {{ m.content }} <|end|>"
    "{% else %}<|a|> {% generation %}{{ m.content }} <|end|>{% endgeneration %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|a|> {% endif %}"
)


ASKED = {"role": "user", "content": "what ?"}
ANSWERED = {"role": "assistant", "content": "four"}


def tokenizer() -> Tokenizer:
    raw = RawTokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="so"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    raw.add_special_tokens([AddedToken(token, special=True) for token in WORDS[:4]])
    return Tokenizer(raw, "<eos>", chat_template=TEMPLATE)


def shown(tokens: Iterable[int]) -> list[tuple[int, bool]]:
    """(id, whether it is trained)."""
    return [(int(token) & TOKEN_BITS, token < HIDDEN) for token in tokens]


def prepared(folder: Path, tokenizer: Tokenizer, rows: list[Any], *options: str, kind: str = "jsonl") -> Path:
    """The dataset that data.prepare makes of these rows."""
    tokenizer.save(folder)
    if kind == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), folder / "a.parquet")
    else:
        (folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = [f"--source={folder}/a.{kind}", f"--tokenizer={folder}", f"--output={folder}/set"]
    prepare([*command, "--validation-fraction=0", *options])
    return folder / "set"


def trained_from(first: int, *ids: int) -> list[tuple[int, bool]]:
    return [(token, place >= first) for place, token in enumerate(ids)]


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


@pytest.mark.parametrize(
    ("format", "values", "expected"),
    [
        ("sft", ["two plus two", " is four"], trained_from(3, TWO, PLUS, TWO, IS, FOUR, EOS)),
        # A token of both is the response's.
        ("sft", ["two plu", "s two"], trained_from(1, TWO, PLUS, TWO, EOS)),
        # As TRL: one eos, not its characters.
        ("sft", ["two", " is<eos>"], trained_from(1, TWO, IS, EOS)),
        # Nothing comes before the first token.
        ("sft", ["", "is four"], trained_from(1, IS, FOUR, EOS)),
        (
            "chat",
            [[ASKED, ANSWERED, user("so ?"), ANSWERED | {"content": "five"}]],
            trained_from(5, USER, WHAT, ASK, END, ASSISTANT, FOUR, END)
            + trained_from(5, USER, SO, ASK, END, ASSISTANT, FIVE, END),
        ),
    ],
)
def test_only_responses_are_trained(format: str, values: list[Any], expected: list[tuple[int, bool]]) -> None:
    assert shown(encode_example(json.dumps(values), format, tokenizer())) == expected


@pytest.mark.parametrize(
    ("format", "row", "named"),
    [
        ("sft", {"prompt": "two", "response": " "}, "response is empty"),
        ("sft", {"prompt": "two"}, "it has prompt"),
        ("sft", {"instruction": "two", "output": "four"}, "Alpaca"),
        ("chat", {"messages": [ASKED]}, "no message from the assistant"),
        ("chat", {"messages": []}, "at least one"),
        ("chat", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 'a string "content"'),
        ("chat", {"messages": [ANSWERED | {"weight": 0}]}, "weight = 0"),
        ("chat", {"messages": [{"role": "assistant", "tool_calls": ["two"]}]}, "tool_calls: 'two'"),
        ("chat", {"messages": [ANSWERED], "tools": "two"}, "must be JSON"),
        ("chat", {"messages": [ANSWERED], "tools": ["two"]}, "tools = ['two']"),
        ("chat", {"messages": [ASKED, ANSWERED], "system": "so"}, "system = 'so'"),
        ("chat", {"messages": [user("<eos>"), ANSWERED]}, "spells out '<eos>'"),
        ("chat", {"messages": [ASKED, ANSWERED | {"content": " "}]}, "answer of the assistant is empty"),
        ("chat", {"conversations": [{"from": "human", "value": "a"}]}, "ShareGPT"),
        ("chat", {"prompt": [ASKED], "completion": [ANSWERED]}, "join prompt and completion"),
    ],
)
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_rows_that_cannot_be_used_are_refused_by_name(
    format: str, row: Any, named: str, kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        prepared(tmp_path, tokenizer(), [row], f"--format={format}", "--seq-len=9", kind=kind)
    assert named in capsys.readouterr().err
    assert not (tmp_path / "set").exists()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.csv", 'completion,prompt\n" is ""four""","what, so ?"\n'),
        ("a.json", '[{"prompt": "what, so ?", "response": " is \\"four\\""}]'),
    ],
)
def test_pairs_are_read_by_either_name(name: str, content: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(content)
    (text,) = documents_in(tmp_path / name, ["prompt", "response"], "sft")
    assert json.loads(text) == ["what, so ?", ' is "four"']


def test_nulls_with_which_a_table_pads_its_objects_are_left_out(tmp_path: Path) -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    rows = [[ASKED | {"name": "Bob"}, {"role": "assistant", "content": "", "tool_calls": [call]}], [ASKED, ANSWERED]]
    pq.write_table(pa.Table.from_pylist([{"messages": row} for row in rows]), tmp_path / "a.parquet")
    found = documents_in(tmp_path / "a.parquet", ["messages"], "chat")
    assert [json.loads(text) for text in found] == [[row] for row in rows]


def test_packing_wastes_little() -> None:
    numbers = random.Random(1)
    examples = [[START | HIDDEN | 5] * numbers.randint(2, 41) for _ in range(500)]
    rows = pack(pa.array(examples, pa.list_(pa.uint32())), 64, EOS)
    assert len(rows) * 64 < 1.1 * sum(map(len, examples))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A packed dataset of 300 prompts and responses, each with a number of its own in it."""
    folder = tmp_path_factory.mktemp("tuning")
    numbers = random.Random(2)

    def words(first: int) -> str:
        return " ".join(f"w{numbers.randint(first, first + 200)}" for _ in range(numbers.randint(1, 8)))

    rows = [{"q": f"w{i} {words(400)}", "a": f" {words(700)} w{i}"} for i in range(1, 301)]
    options = ["--format=sft", "--keys=q,a", "--seq-len=32", "--validation-fraction=0.1", "--block-mb=0.002"]
    prepared(folder, word_tokenizer(1000), rows, *options)
    return folder


def settings(folder: Path) -> Config:
    data = {"datasets": [str(folder / "set")], "mask_documents": True, "window_blocks": 2}
    return from_dict({"data": data, "training": {"seq_len": 32, "local_batch_size": 4}})


def check_row(tokens: list[int], labels: list[int], positions: list[int]) -> list[int]:
    """Every rule of a packed row; the numbers of its examples."""
    found = []
    starts = [i for i, position in enumerate(positions) if position == 0]
    for first, stop in zip(starts, [*starts[1:], len(tokens)], strict=True):
        part = tokens[first:stop]
        assert positions[first:stop] == list(range(stop - first))
        if set(part) == {0}:  # padding
            assert labels[first:stop] == [IGNORED] * (stop - first)
            continue
        assert part[-1] == 0
        number = part[0]
        assert part[-2] == number, "whole: its number is at its beginning and at its end"
        expected = [
            t if t >= 700 or t == 0 or (t == number and i == stop - first - 2) else IGNORED for i, t in enumerate(part)
        ]
        assert labels[first:stop] == [*expected[1:], IGNORED]
        found.append(number)
    return found


def test_batches_hold_whole_examples_each_seen_once_per_epoch(folder: Path) -> None:
    config = settings(folder)
    dataset = open_dataset(str(folder / "set"))
    rows = dataset.split("train").total_tokens // 32
    loaders = [DataLoader(config, rank, 2) for rank in range(2)]
    numbers: list[int] = []
    seen = 0
    while seen < rows:
        for loader in loaders:
            (batch,) = loader.next_step()
            for row in zip(*(tensor.tolist() for tensor in batch), strict=True):
                examples = check_row(*row)
                numbers += examples if seen < rows else []  # the last batch reaches into the second epoch
                seen += 1
    for batch in validation_batches(config, 0, 1):
        for row in zip(*(tensor.tolist() for tensor in batch), strict=True):
            numbers += check_row(*row)
    assert sorted(numbers) == list(range(1, 301))
    for loader in loaders:
        loader.close()


def test_epochs_are_steps_and_a_set_that_holds_nothing_out_is_not_validated(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    plain = write_dataset(tmp_path / "plain", [[[1] * 39 + [0]] * 40], vocab_size=64)  # 1,600 tokens, none held out
    training = {"seq_len": 32, "local_batch_size": 4, "epochs": 3}
    config = from_dict({"data": {"datasets": [str(plain)]}, "training": training})
    loader = DataLoader(config, 0, 1)
    settled = loader.settle(config)
    assert (settled.training.steps, settled.validation.enable) == (38, False)  # of 128 tokens each
    loader.close()
    assert "the data holds nothing out, so nothing is validated" in caplog.text


@pytest.mark.parametrize("section", ["data", "validation"])
def test_settings_that_would_cut_or_mix_examples_are_refused(folder: Path, tmp_path: Path, section: str) -> None:
    plain = write_dataset(tmp_path / "plain", [[[1, 2, 0]] * 20])
    values = {"data": {"datasets": [str(plain)]}} | {section: {"datasets": [str(folder / "set")]}}
    with pytest.raises(TitaniteError, match=r"training.seq_len = 16: must be 32, the --seq-len"):
        DataLoader(from_dict(values | {"training": {"seq_len": 16}}), 0, 1)
    with pytest.raises(TitaniteError, match=r"data.mask_documents = false: must be true"):
        DataLoader(from_dict(values | {"training": {"seq_len": 32}}), 0, 1)


def test_long_examples_are_left_out_and_counted(tmp_path: Path) -> None:
    """And so are bad ones, each with its place."""
    rows: list[Any] = [{"prompt": question, "response": " is four"} for question in ("two", "what ?")]
    rows.insert(1, {"prompt": "two", "response": ""})
    folder = prepared(tmp_path, tokenizer(), rows, "--format=sft", "--seq-len=4", "--skip-bad=1")
    ((row,),) = stored_blocks(folder)
    assert shown(row) == trained_from(1, TWO, IS, FOUR, EOS)
    manifest = json.loads((folder / "manifest.json").read_bytes())
    counts = [manifest[name] for name in ("conversations", "dropped", "bad_records", "trained_tokens")]
    assert counts == [2, 1, 1, 3]
    begin = len(json.dumps(rows[0])) + 1
    assert (folder / "bad_records.log").read_text().startswith(f"{tmp_path}/a.jsonl, line at byte {begin}: ")


def test_examples_that_are_all_too_long_make_no_dataset(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        prepared(tmp_path, tokenizer(), [{"prompt": "two " * 9, "response": "so"}], "--format=sft", "--seq-len=4")
    assert "--seq-len" in capsys.readouterr().err


def test_training_on_prepared_conversations_needs_no_transformers(tmp_path: Path) -> None:
    """And a preparation without it ends in one line."""
    rows = [{"messages": [ASKED, ANSWERED]}] * 20
    folder = prepared(tmp_path, tokenizer(), rows, "--format=chat", "--seq-len=14")
    data = {"datasets": [str(folder)], "mask_documents": True}
    words = [f"--source={tmp_path}/a.jsonl", f"--tokenizer={tmp_path}", "--format=chat", "--seq-len=14"]
    code = (
        "import sys; sys.modules['transformers'] = None\n"
        "import start, data.prepare; from config import from_dict\n"
        f"config = from_dict({{'data': {data}, 'training': {{'seq_len': 14, 'local_batch_size': 2}}}})\n"
        "loader = start.DataLoader(config, 0, 1)\n"
        "print(loader.next_step()[0].tokens.tolist(), loader.tokenizer.vocab_size); loader.close()\n"
        f"data.prepare.main({[*words, f'--output={tmp_path}/other']})\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    row = [USER, WHAT, ASK, END, ASSISTANT, FOUR, END] * 2
    assert ended.stdout == f"{[row, row]} {len(WORDS)}\n"
    last = ended.stderr.splitlines()[-1]
    assert last.startswith("error: transformers is not installed")
    assert "requirements-tuning.txt" in last


def test_a_mixture_has_the_template_of_its_conversations(tmp_path: Path) -> None:
    own = tokenizer()
    text = {"plain": TEMPLATE + "{# plain #}", "one": TEMPLATE, "other": TEMPLATE + "{# another #}"}
    for name, template in text.items():
        own.chat_template = template
        row = {"text": "two so", "messages": [user("two"), ANSWERED | {"content": "so"}]}
        options = [] if name == "plain" else ["--format=chat", "--seq-len=32"]
        (tmp_path / name).mkdir()
        prepared(tmp_path / name, own, [row] * 30, *options)

    def loader_of(*names: str) -> DataLoader:
        data = {"datasets": [str(tmp_path / name / "set") for name in names], "mask_documents": True}
        config = from_dict({"data": data, "training": {"seq_len": 32}, "validation": {"enable": False}})
        return DataLoader(config, 0, 1)

    for names in (("plain", "one"), ("other", "plain")):  # the plain set's own is its tokenizer's
        with closing(loader_of(*names)) as loader:
            assert loader.tokenizer.chat_template == text[min(names)]
    with pytest.raises(TitaniteError, match=r"other/set was made with another chat template than .*/one/set"):
        loader_of("plain", "one", "other")
    (tmp_path / "one" / "set" / "chat_template.jinja").write_text("another")
    with pytest.raises(DataError, match=r"chat_template\.jinja is not the one that made the data"):
        loader_of("one")
