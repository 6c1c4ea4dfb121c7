"""Tokenizers: where a document begins and ends, and one segmentation everywhere, that of transformers."""

import json
import random
import sys
from pathlib import Path

import pytest
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as RawTokenizer
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from checkpoint.companions import COMPANIONS
from config import TitaniteError
from data.answers import encode_answer
from data.chat import chat_of, load_transformers
from data.packing import TOKEN_BITS
from data.prepare.tuning import encode_conversation, encode_pair
from data.tokenizer import Tokenizer, load_tokenizer, parse_tokenizer, read_files, train_tokenizer
from tests.corpus import prepare, stored_blocks

ROOT = Path(__file__).parents[2]
END = AddedToken("<|end_of_text|>", special=True)
WORDS = ["the", "quick", "naïve", "日本語", "def f(x):\n    return x\n", "🙂", "2023", "1999", "100000", "  "]


@pytest.fixture(scope="module")
def texts():
    rng = random.Random(0)
    return [" ".join(rng.choices(WORDS, k=rng.randint(1, 60))) for _ in range(200)]


def with_template(texts, eos, template):
    """A byte-level BPE with <|begin_of_text|>, <|endoftext|>, `eos` and a template."""
    raw = train_tokenizer(texts, 300).raw
    raw.add_tokens([AddedToken("<|begin_of_text|>", special=True), eos])
    names = [name for name in template.split() if name != "$A"]
    raw.post_processor = TemplateProcessing(template, special_tokens=[(name, raw.token_to_id(name)) for name in names])
    return raw


@pytest.mark.parametrize(
    ("template", "bos"),
    [
        ("<|begin_of_text|> $A", "<|begin_of_text|>"),
        ("<|begin_of_text|> $A <|end_of_text|>", "<|begin_of_text|>"),  # adds an eos itself
        ("<|end_of_text|> $A", None),  # OPT's and GPT-2's bos is their eos
        ("<|end_of_text|> <|endoftext|> $A <|end_of_text|>", "<|endoftext|>"),
    ],
)
def test_documents_have_the_bos_of_the_template_and_one_eos(texts, template, bos):
    """Also where the text spells special tokens out, or is longer than its tokenizer was told to cut and pad it to."""
    raw = with_template(texts, END, template)
    raw.enable_truncation(4)
    raw.enable_padding(length=9)
    tokenizer = Tokenizer(raw, END.content)
    assert [raw.id_to_token(token) for token in tokenizer.prefix] == [bos][: bos is not None]
    for text in ["a", "<|begin_of_text|>spelt out<|end_of_text|>", "", texts[0] * 3]:
        document = tokenizer.encode_documents([text])[0].tolist()
        assert document.index(tokenizer.eos_id) == len(document) - 1
        assert document.count(raw.token_to_id("<|begin_of_text|>")) == (bos == "<|begin_of_text|>")
        assert tokenizer.decode(document) == text
        assert tokenizer.encode(text) == document[:-1]


def test_which_token_ends_a_document_and_which_template_a_tokenizer_has(texts, tmp_path, caplog):
    """A template in a file of its own goes first, as in transformers."""
    with_template(texts, END, "$A").save(str(tmp_path / "tokenizer.json"))
    for declared, eos, template in (
        ({}, "<|end_of_text|>", ""),
        ({"eos_token": {"content": "<|endoftext|>"}, "chat_template": "one"}, "<|endoftext|>", "one"),
        ({"eos_token": None}, "<|end_of_text|>", ""),
    ):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(declared))
        tokenizer = load_tokenizer(tmp_path)
        assert (tokenizer.eos_token, tokenizer.chat_template) == (eos, template)
    (tmp_path / "chat_template.jinja").write_text("file")
    (tmp_path / "additional_chat_templates").mkdir()
    tokenizer = load_tokenizer(tmp_path, "<|begin_of_text|>")
    assert (tokenizer.eos_token, tokenizer.chat_template) == ("<|begin_of_text|>", "file")
    assert "additional_chat_templates are not read" in caplog.text
    with pytest.raises(TitaniteError, match=r"'<pad>'; .*<\|end_of_text\|>"):
        load_tokenizer(tmp_path, "<pad>")


@pytest.mark.parametrize("kind", ["not special", "Unigram", "between spaces"])
def test_a_token_that_a_text_can_spell_out_does_not_end_documents(texts, kind):
    if kind == "not special":
        raw = with_template(texts, AddedToken("</s>", special=False), "$A")
    elif kind == "Unigram":
        pieces = [("<unk>", 0.0), ("</s>", 0.0), *((letter, -5.0) for letter in "▁a</s>")]
        raw = RawTokenizer(models.Unigram(pieces, unk_id=0))
    else:
        raw = RawTokenizer(models.WordLevel({"</s>": 0, "a": 1}, unk_token="a"))
        raw.normalizer, raw.pre_tokenizer = normalizers.Prepend("_"), pre_tokenizers.Split(" ", "isolated")
    if kind != "not special":
        raw.add_special_tokens([AddedToken("</s>", special=True)])
    with pytest.raises(TitaniteError, match=r"^mine: .*'</s>'"):
        Tokenizer(raw, "</s>", "mine")


def test_a_tokenizer_is_learnt_from_pieces_of_a_very_long_word():
    """The time to learn from a word grows with the square of its length: 40,000 letters took a second."""
    text = "x" * 2**14
    learnt = train_tokenizer([text], 300)
    assert max(map(len, learnt.raw.get_vocab())) == 2000
    assert learnt.decode(learnt.encode(text)) == text


def test_dropout_is_off(texts, tmp_path, caplog):
    """Otherwise a text has other ids each time."""
    train_tokenizer(texts, 400).save(tmp_path)
    expected = load_tokenizer(tmp_path).encode(texts[0])
    content = json.loads((tmp_path / "tokenizer.json").read_bytes())
    content["model"]["dropout"] = 0.5
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    tokenizer = load_tokenizer(tmp_path)
    assert "dropout" in caplog.text
    assert tokenizer.encode(texts[0]) == expected
    assert tokenizer.encode_documents([texts[0]])[0].tolist()[:-1] == expected
    assert load_transformers(tokenizer)(texts[0])["input_ids"] == expected


# ---------------------------------------------------------------- one segmentation

DIGITS = Regex(r"\p{N}{1,3}| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+")  # numbers in threes, as OLMo 2 and others have them
SPOKEN = "in 2023 and 1999, 100000 日本語\n naïve"
MESSAGES = [{"role": "user", "content": SPOKEN}, {"role": "assistant", "content": f"{SPOKEN}!"}]


def write_model(folder, texts, tokenizer_class, model_type):
    """A folder of Hugging Face's without weights, whose tokenizer.json splits numbers in its own way."""
    raw = RawTokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(DIGITS, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    learnt = train_tokenizer(texts * 5, 600).raw
    content = json.loads(learnt.to_str()) | {"pre_tokenizer": json.loads(raw.to_str())["pre_tokenizer"]}
    folder.mkdir(parents=True)
    (folder / "tokenizer.json").write_text(json.dumps(content))
    declared = {"tokenizer_class": tokenizer_class, "eos_token": "<|endoftext|>", "unk_token": "<|endoftext|>"}
    declared |= {"bos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(declared))
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))


PAIRS = [
    ("GPT2Tokenizer", "olmo2"),
    ("GPT2TokenizerFast", "granite"),
    ("GPT2Tokenizer", "gpt2"),
    ("LlamaTokenizerFast", "mistral"),
    ("LlamaTokenizer", "llama"),
    ("Qwen2Tokenizer", "qwen2"),
    ("PreTrainedTokenizerFast", "llama"),
]


@pytest.mark.parametrize(("tokenizer_class", "model_type"), PAIRS)
def test_every_way_to_ids_is_that_of_transformers_on_the_model_s_folder(tokenizer_class, model_type, texts, tmp_path):
    """Text, pairs, conversations, answers and prompts, from the folder, a dataset of it, and what an import keeps."""
    folder = tmp_path / "model"
    write_model(folder, texts, tokenizer_class, model_type)
    theirs = AutoTokenizer.from_pretrained(folder)
    expected = theirs(SPOKEN, add_special_tokens=False)["input_ids"]
    (tmp_path / "a.txt").write_text(SPOKEN)
    prepare([str(tmp_path / "a.txt")], str(tmp_path / "set"), tokenizer=str(folder), validation_fraction=0)
    assert stored_blocks(tmp_path / "set") == [[[*expected, theirs.eos_token_id]]]
    kept = parse_tokenizer(read_files(folder, COMPANIONS), "checkpoint")
    for tokenizer in (load_tokenizer(folder), load_tokenizer(tmp_path / "set"), kept):
        assert tokenizer.encode(SPOKEN) == theirs(SPOKEN)["input_ids"]
        pair = theirs(f"{SPOKEN} {SPOKEN}")["input_ids"]
        assert encode_pair(tokenizer, SPOKEN, f" {SPOKEN}").ids == [*pair, theirs.eos_token_id]
        answered = encode_answer(tokenizer, SPOKEN, f" {SPOKEN}")
        assert [int(token) & TOKEN_BITS for token in answered] == pair
        text = chat_of(tokenizer).render(MESSAGES)
        assert encode_conversation(tokenizer, MESSAGES).ids == theirs(text, add_special_tokens=False)["input_ids"]


def test_a_model_s_tokenizer_is_refused_without_transformers(texts, tmp_path, monkeypatch):
    """Its files alone are read."""
    write_model(tmp_path / "gpt2", texts, "GPT2Tokenizer", "gpt2")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(TitaniteError, match=r"gpt2: .*requirements-tuning"):
        load_tokenizer(tmp_path / "gpt2")
    (tmp_path / "gpt2" / "config.json").unlink()
    load_tokenizer(tmp_path / "gpt2" / "tokenizer.json")


def test_a_tokenizer_that_transformers_cannot_read_is_its_tokenizer_json(texts, tmp_path, caplog):
    write_model(tmp_path / "model", texts, "OwnTokenizer", "own")
    declared = {"eos_token": "<|endoftext|>", "auto_map": {"AutoTokenizer": ["own.OwnTokenizer", None]}}
    (tmp_path / "model" / "tokenizer_config.json").write_text(json.dumps(declared))
    expected = RawTokenizer.from_file(str(tmp_path / "model" / "tokenizer.json")).encode(SPOKEN).ids
    assert load_tokenizer(tmp_path / "model").encode(SPOKEN) == expected
    assert "tokenizer.json counts alone" in caplog.text
