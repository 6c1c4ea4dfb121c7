"""What a first start decides and says by itself: the type to compute in, bits per byte, one's own text."""

import json
import math
from pathlib import Path
from unittest import mock

import pytest
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models, normalizers

from config import load_config, tomllib
from data.loader import DataLoader
from data.prepare import main as prepare
from data.tokenizer import Tokenizer, train_tokenizer
from parallel.device import fast_dtype
from storage.records import read_records
from tests.corpus import stored_blocks
from tests.harness import run_ranks
from tools.own_text import prepare_own_text
from train import train
from validate import main as validate

TEXT = "Naïve 日本: a\tb 🙂\n\n  return x\n"
WORDS = [f"def f{i}(x):\n    return x * {i} + {i % 7}  # number {i}\n" for i in range(400)]


def spelt_in_bytes():
    return train_tokenizer(WORDS, 300)


def spelt_in_text():
    """As Llama 2's: ▁ for a space, and a byte on its own as <0x0A>."""
    letters = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdefnrtuvï日", "▁r"]
    vocabulary = {letter: id for id, letter in enumerate(letters)}
    raw = RawTokenizer(models.BPE(vocabulary, [("▁", "r")], unk_token="<unk>", byte_fallback=True))
    raw.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    raw.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    raw.add_special_tokens(["</s>"])
    return Tokenizer(raw, "</s>")


@pytest.mark.parametrize(("make", "before"), [(spelt_in_bytes, 0), (spelt_in_text, 1)])
def test_the_bytes_of_the_ids_are_those_of_their_text(make, before):
    """`before`: bytes that the tokenizer puts before a text."""
    tokenizer = make()
    for text in (TEXT, "x", "return 日"):
        ids = tokenizer.encode(text)
        assert tokenizer.byte_lengths[ids].sum() == len(text.encode()) + before
        assert min(tokenizer.byte_lengths[ids]) > 0
    assert tokenizer.byte_lengths[tokenizer.eos_id] == 0


def train_as(words, dtype):
    with mock.patch("parallel.device.fast_dtype", return_value=dtype):
        train(load_config(words))


def test_bits_per_byte_and_the_type_to_compute_in(tmp_path, capsys):
    """Bits are counted by hand, over the ranks of a run and afterwards: all of the held-out text but the first token,
    none for ends. The type is the one that is fast, and a resume keeps it."""
    texts, data, run = tmp_path / "texts", tmp_path / "data", tmp_path / "run"
    texts.mkdir()
    for i, word in enumerate(WORDS):
        (texts / f"{i}.py").write_text(word)
    prepare([f"--source={texts}", f"--output={data}", "--vocab-size=400", "--validation-fraction=0.1"])
    words = [f"--data.datasets={data}", f"--run.folder={run}", "--training.seq_len=16", "--model.flavor=tiny"]
    words += ["--training.local_batch_size=3", "--validation.max_samples=0", "--metrics.tensorboard=false"]
    words += ["--lr_scheduler.warmup_steps=0", "--lr_scheduler.schedule=constant", "--training.steps=2"]
    run_ranks(2, train_as, words, "float32", start_group=False)
    (row,) = (row for row in read_records(run / "metrics.jsonl") if row["validation_loss"])
    stored = [[*document] for block in stored_blocks(data, "validation") for document in block]
    decode = RawTokenizer.from_file(str(data / "tokenizer.json")).decode
    held_out = [decode(ids[:-1]) for ids in stored]
    assert {*held_out} < {*WORDS}
    n_bytes = sum(map(len, held_out)) - len(decode(stored[0][:1]))
    n_tokens = sum(map(len, stored)) - 1
    assert row["bits_per_byte"] == pytest.approx(row["validation_loss"] * n_tokens / math.log(2) / n_bytes, rel=1e-9)
    capsys.readouterr()
    validate([str(run), "--dtype=float32"])
    assert f" {row['bits_per_byte']:.4f} bits per byte" in capsys.readouterr().out

    chosen = "--training.param_dtype=bfloat16"
    for steps, fast, given, dtype in ((3, "bfloat16", [], "float32"), (4, "", [chosen], "bfloat16")):
        run_ranks(2, train_as, [*words, f"--training.steps={steps}", *given], fast, start_group=False)
        assert tomllib.loads((run / "config.toml").read_text())["training"]["param_dtype"] == dtype


@pytest.mark.parametrize(("has_bf16", "dtype"), [(False, "float32"), (True, "bfloat16")])
def test_bfloat16_is_fast_where_the_cpu_multiplies_it(has_bf16, dtype, monkeypatch):
    monkeypatch.setattr("torch.cpu._is_amx_tile_supported", lambda: False)
    monkeypatch.setattr("torch.cpu._is_avx512_bf16_supported", lambda: has_bf16)
    assert fast_dtype() == dtype


def test_own_text_is_prepared_once_and_again_if_it_changes(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    text = tmp_path / "my text.txt"
    text.write_text("".join(WORDS * 4))  # one file, held out in pieces
    (first,) = prepare_own_text(["my text.txt"])
    (folder,) = json.loads(first.partition("=")[2])
    assert Path(folder).name.startswith("my-text-")
    train, validation = (
        sum(len(ids) for block in stored_blocks(Path(folder), split) for ids in block)
        for split in ("train", "validation")
    )
    assert 0.02 < validation / (train + validation) < 0.5
    assert prepare_own_text(["my text.txt"]) == [first]
    said = capsys.readouterr()
    assert said.out == "", "only settings go to the run script"
    assert f"warning: {validation:,} tokens are held out" in said.err
    loader = DataLoader(load_config([first, "--training.seq_len=64", "--training.local_batch_size=2"]), 0, 1)
    often = -(-11 * train // 128)  # steps, of 128 tokens
    assert "more text" in loader.describe(often)
    assert "more text" not in loader.describe(often // 2)
    loader.close()
    text.write_text("".join(WORDS * 5))
    assert prepare_own_text(["my text.txt"])[0] != first
