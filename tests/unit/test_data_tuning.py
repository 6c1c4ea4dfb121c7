"""Fine-tuning data: which tokens are trained, worked out by hand; packing; and datasets that verify and fit."""

import json
import shutil
import sys
from contextlib import closing
from itertools import pairwise

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import AddedToken, models, pre_tokenizers
from tokenizers import Tokenizer as RawTokenizer

from config import TitaniteError, from_dict
from data.chat import load_transformers
from data.loader import IGNORED, DataLoader, validation_batches
from data.packing import HIDDEN, TOKEN_BITS
from data.prepare import main as prepare
from data.prepare.tuning import encode_example
from data.shards import DataError, check_datasets, open_dataset, with_chat_template
from data.tokenizer import Tokenizer
from tests.corpus import data_config, documents_in, stored_blocks, word_tokenizer, write_dataset

WORDS = ("<eos>", "<|u|>", "<|a|>", "<|end|>", "two", "plus", "is", "four", "five", "what", "?", "so")
EOS, USER, ASSISTANT, END, TWO, PLUS, IS, FOUR, FIVE, WHAT, ASK, SO = range(len(WORDS))
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'user' %}<|u|> {{ m.content }} <|end|>"
    "{% else %}<|a|> {% generation %}{{ m.content }} <|end|>{% endgeneration %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|a|> {% endif %}"
)


ASKED = {"role": "user", "content": "what ?"}
ANSWERED = {"role": "assistant", "content": "four"}
CHAT = ("--format=chat", "--seq-len=32")


def tokenizer():
    raw = RawTokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="so"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    raw.add_special_tokens([AddedToken(token, special=True) for token in WORDS[:4]])
    return Tokenizer(raw, "<eos>", chat_template=TEMPLATE)


def shown(tokens):
    """(id, whether it is trained)."""
    return [(int(token) & TOKEN_BITS, token < HIDDEN) for token in tokens]


def prepared(folder, tokenizer, rows, *options):
    """The dataset that data.prepare makes of these rows."""
    tokenizer.save(folder)
    (folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = [f"--source={folder}/a.jsonl", f"--tokenizer={folder}", f"--output={folder}/set"]
    prepare([*command, "--validation-fraction=0", *options])
    return folder / "set"


def trained_from(first, *ids):
    return [(token, place >= first) for place, token in enumerate(ids)]


def user(content):
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
def test_only_responses_are_trained(format, values, expected):
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
        ("chat", {"messages": [ANSWERED], "tools": ["two"]}, "tools = ['two']"),
        ("chat", {"messages": [ASKED, ANSWERED], "system": "so"}, "system = 'so'"),
        ("chat", {"messages": [user("<eos>"), ANSWERED]}, "spells out '<eos>'"),
        ("chat", {"messages": [ASKED, ANSWERED | {"content": " "}]}, "answer of the assistant is empty"),
        ("chat", {"conversations": [{"from": "human", "value": "a"}]}, "ShareGPT"),
        ("chat", {"prompt": [ASKED], "completion": [ANSWERED]}, "join prompt and completion"),
    ],
)
def test_rows_that_cannot_be_used_are_refused_by_name(format, row, named, tmp_path, capsys):
    with pytest.raises(SystemExit):
        prepared(tmp_path, tokenizer(), [row], f"--format={format}", "--seq-len=9")
    assert named in capsys.readouterr().err
    assert not (tmp_path / "set").exists()


def test_pairs_are_read_by_trl_s_name_too_from_csv_and_tables(tmp_path):
    (tmp_path / "a.csv").write_text('completion,prompt\n" is ""four""","what, so ?"\n')
    pq.write_table(pa.table({"completion": [' is "four"'], "prompt": ["what, so ?"]}), tmp_path / "a.parquet")
    for name in ("a.csv", "a.parquet"):
        (text,) = documents_in(tmp_path / name, ["prompt", "response"], "sft")
        assert json.loads(text) == ["what, so ?", ' is "four"']


def test_nulls_with_which_a_table_pads_its_objects_are_left_out(tmp_path):
    calls = [{"function": {"name": name, "arguments": {name: 1}}} for name in ("f", "g")]
    messages = [ASKED, {"role": "assistant", "content": "", "tool_calls": calls}]
    pq.write_table(pa.Table.from_pylist([{"messages": messages}]), tmp_path / "a.parquet")
    (text,) = documents_in(tmp_path / "a.parquet", ["messages"], "chat")
    assert json.loads(text) == [messages]


EXAMPLES = [([i] * (1 + i % 8), [300 + i] * (1 + i % 5)) for i in range(1, 301)]  # ids of prompt and response


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A packed dataset of them."""
    rows = [
        {"q": f"w{asked[0]} " * len(asked), "a": f"w{answered[0]} " * len(answered)} for asked, answered in EXAMPLES
    ]
    options = ["--format=sft", "--keys=q,a", "--seq-len=32", "--validation-fraction=0.1", "--block-mb=0.002"]
    return prepared(tmp_path_factory.mktemp("tuning"), word_tokenizer(1000), rows, *options)


def parts_of(batch):
    """(tokens, labels) of all whose positions begin at 0, but for the padding."""
    tokens, labels, positions = (tensor.flatten().tolist() for tensor in batch)
    bounds = [place for place, position in enumerate(positions) if position == 0] + [len(tokens)]
    parts = []
    for first, stop in pairwise(bounds):
        assert positions[first:stop] == [*range(stop - first)]
        parts.append((tokens[first:stop], labels[first:stop]))
    return [part for part in parts if any(part[0])]


def test_batches_hold_whole_examples_each_seen_once_per_epoch(folder):
    data = {"datasets": [str(folder)], "mask_documents": True, "window_blocks": 2}
    config = from_dict({"data": data, "training": {"seq_len": 32, "local_batch_size": 2}})
    size = open_dataset(str(folder)).split("train").total_tokens // 32
    expected = []
    for asked, answered in EXAMPLES:
        expected.append(([*asked, *answered, 0], [*[IGNORED] * (len(asked) - 1), *answered, 0, IGNORED]))
    assert size * 32 < 1.1 * sum(len(tokens) for tokens, _ in expected), "packing wastes little"
    loaders = [DataLoader(config, rank, 2) for rank in range(2)]
    found = []
    for batch in [loader.next_step()[0] for _ in range(size // 4) for loader in loaders]:
        found += parts_of(batch)
    for batch in validation_batches(config, 0, 1):
        found += parts_of(batch)
    for loader in loaders:
        loader.close()
    assert size % 4 == 0
    assert sorted(found) == sorted(expected)


def test_epochs_are_steps_and_a_set_that_holds_nothing_out_is_not_validated(tmp_path):
    plain = write_dataset(tmp_path / "plain", [[[1] * 39 + [0]] * 40], vocab_size=64)  # 1,600 tokens, none held out
    training = {"seq_len": 32, "local_batch_size": 4, "epochs": 3}
    config = from_dict({"data": {"datasets": [str(plain)]}, "training": training})
    with closing(DataLoader(config, 0, 1)) as loader:
        settled = loader.settle(config)
    assert (settled.training.steps, settled.validation.enable) == (38, False)  # of 128 tokens each


@pytest.mark.parametrize("section", ["data", "validation"])
def test_settings_that_would_cut_or_mix_examples_are_refused(folder, tmp_path, section):
    plain = write_dataset(tmp_path / "plain", [[[1, 2, 0]] * 20])
    values = {"data": {"datasets": [str(plain)]}} | {section: {"datasets": [str(folder)]}}
    for seq_len, named in ((16, "training.seq_len = 16: .* 32"), (32, "data.mask_documents = false")):
        with pytest.raises(TitaniteError, match=named):
            check_datasets(from_dict(values | {"training": {"seq_len": seq_len}}))


def test_long_examples_are_left_out_and_counted(tmp_path, capsys):
    """And so are bad ones. If all are too long, there is no dataset."""
    rows = [
        {"prompt": prompt, "response": answer}
        for prompt, answer in (("two", " is four"), ("a", ""), ("what ?", "so so"))
    ]
    options = "--format=sft", "--seq-len=4", "--skip-bad=1"
    folder = prepared(tmp_path, tokenizer(), rows, *options)
    ((row,),) = stored_blocks(folder)
    assert shown(row) == trained_from(1, TWO, IS, FOUR, EOS)
    manifest = json.loads((folder / "manifest.json").read_bytes())
    counts = [manifest[name] for name in ("conversations", "dropped", "bad_records", "trained_tokens")]
    assert counts == [2, 1, 1, 3]
    shutil.rmtree(folder)
    with pytest.raises(SystemExit):
        prepared(tmp_path, tokenizer(), rows[2:], *options)
    assert "--seq-len" in capsys.readouterr().err


def test_training_on_prepared_conversations_needs_no_transformers(tmp_path, monkeypatch):
    """And a preparation without it ends in one line."""
    folder = prepared(tmp_path, tokenizer(), [{"messages": [ASKED, ANSWERED]}] * 20, *CHAT)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with closing(DataLoader(data_config(folder, data__mask_documents=True, training__seq_len=32), 0, 1)) as loader:
        tokens = loader.next_step()[0].tokens[0].tolist()
    assert tokens[:7] == [USER, WHAT, ASK, END, ASSISTANT, FOUR, END]
    with pytest.raises(TitaniteError, match="requirements-tuning"):
        load_transformers(tokenizer())


def test_a_mixture_has_the_template_of_its_conversations(tmp_path):
    def template_of(*folders):
        config = data_config(*folders, data__mask_documents=True, training__seq_len=32)
        return with_chat_template(check_datasets(config)[0]).tokenizer().chat_template

    own = tokenizer()
    rows = [{"text": "two so", "messages": [ASKED, ANSWERED]}] * 30
    sets = []
    for name, options in (("plain", []), ("one", CHAT), ("other", CHAT)):
        (tmp_path / name).mkdir()
        own.chat_template = TEMPLATE + f"{{# {name} #}}"
        sets.append(prepared(tmp_path / name, own, rows, *options))
    plain, one, other = sets
    assert template_of(plain, one) == TEMPLATE + "{# one #}"  # the plain set's own is its tokenizer's
    assert template_of(other, plain) == TEMPLATE + "{# other #}"
    with pytest.raises(TitaniteError, match=r"other/set .*/one/set"):
        template_of(plain, one, other)
    (one / "chat_template.jinja").write_text("another")
    with pytest.raises(DataError, match=r"chat_template\.jinja"):
        template_of(one)
