"""Generation: transformers' greedy tokens for prompts of unequal lengths, its sampling, stops, streams and chat."""

import json
import random
import re
from unittest import mock

import pytest
import torch
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as RawTokenizer
from transformers import (
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from config import TitaniteError
from data.tokenizer import Tokenizer, load_tokenizer
from generate import encode_record, main, messages_of
from models.generation import Request, TextStream, generate, sample
from tests.unit.test_families import FAMILIES, SHAPE, hf_model, ours_from
from tools.hf import main as checkpoint_hf

CPU = torch.device("cpu")
CHATML = (
    "{{ bos_token }}{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% for message in messages %}\n  {% if message.role == 'nobody' %}{% break %}{% endif %}"
    "{{ '<|im_start|>' + message.role + '\n' }}{% if message.role == 'assistant' %}"
    "{% generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}"
    "{% elif message.role == 'tool' %}{{ message.content | tojson + '<|im_end|>' }}"
    "{% else %}{{ message.content + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def prompts_of(*lengths):
    numbers = random.Random(3)
    return [[numbers.randrange(96) for _ in range(n)] for n in lengths]


def tokens_of(model, prompts, n, **options):
    """The tokens of each row, by default the likeliest."""
    request = Request(**(options or {"temperature": 0}), max_tokens=n)
    return [list(row) for row in zip(*generate(model, prompts, CPU, request), strict=True)]


def test_greedy_tokens_equal_transformers_in_a_batch_of_unequal_lengths(monkeypatch):
    monkeypatch.setattr("models.generation.PREFILL_TOKENS", 16)  # the longer prompts come in pieces
    monkeypatch.setattr("models.llama.model.CACHE_STEP", 8)
    hf, prompts = hf_model("llama3.2"), prompts_of(9, 1, 40, 16, 17)
    hf.generation_config.eos_token_id = None
    expected = []
    for prompt in prompts:
        tokens = torch.tensor([prompt])
        mask = torch.ones_like(tokens)  # no token is padding
        out = hf.generate(tokens, attention_mask=mask, max_new_tokens=24, do_sample=False, pad_token_id=0)
        expected.append(out[0, len(prompt) :].tolist())
    model = ours_from(hf)
    assert tokens_of(model, prompts, 24) == expected
    assert tokens_of(model, prompts[:1], 24) == expected[:1]


def test_a_row_is_drawn_as_it_would_be_alone_and_attention_reads_what_is_filled(
    monkeypatch,
):
    monkeypatch.setattr("models.llama.model.CACHE_STEP", 8)
    model = ours_from(hf_model("llama3"))
    prompts = prompts_of(5, 12, 3)
    alone = [tokens_of(model, [prompt], 6, seed=row)[0] for row, prompt in enumerate(prompts)]
    assert alone[0] != tokens_of(model, prompts[:1], 6, seed=8)[0]
    read = []
    layer, attend = model.layers["0"].attention, model.layers["0"].attention.attend
    monkeypatch.setattr(layer, "attend", lambda q, k, *rest: read.append(k.shape[2]) or attend(q, k, *rest))
    assert tokens_of(model, prompts, 6, seed=0) == alone
    assert read == [16] * 6 + [24], "the prompts, then the 12th to 17th place of row 1"


@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (3, 1.0), (4, 0.6), (0, 0.01)])
def test_sampling_follows_the_probabilities_that_transformers_leaves(top_k, top_p):
    logits = torch.tensor([1.0, 3.0, 2.0, -1.0, 2.5, 0.0])
    generators = [torch.Generator().manual_seed(row) for row in range(4000)]
    draws = sample(logits.expand(4000, -1), Request(temperature=0.7, top_k=top_k, top_p=top_p), generators)
    warped = TemperatureLogitsWarper(0.7)(torch.empty(1, 0), logits[None])
    if top_k:
        warped = TopKLogitsWarper(top_k)(torch.empty(1, 0), warped)
    if top_p < 1:
        warped = TopPLogitsWarper(top_p)(torch.empty(1, 0), warped)
    expected = warped[0].softmax(-1)
    share = torch.bincount(draws, minlength=6) / len(draws)
    torch.testing.assert_close(share, expected, rtol=0, atol=0.03)
    assert (share[expected == 0] == 0).all()


# ---------------------------------------------------------------- text


def byte_tokenizer(*special):
    """A token for each byte, and the special ones; no merges."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())[: SHAPE["vocab_size"] * 3]
    raw = RawTokenizer(models.BPE({token: i for i, token in enumerate(alphabet)}, []))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special or SPECIAL])
    return Tokenizer(raw, "<|endoftext|>")


def metaspace_tokenizer():
    """As Llama 2's: words with a leading ▁, whose decoder drops the first one, and bytes for all else, from id 6 on."""
    words = ["<unk>", "</s>", "▁Hello", "▁world", "!", "<|tool|>", *(f"<0x{byte:02X}>" for byte in range(256))]
    raw = RawTokenizer(models.BPE({word: i for i, word in enumerate(words)}, [], unk_token="<unk>", byte_fallback=True))
    raw.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    raw.add_special_tokens(["</s>", "<|tool|>"])
    raw.add_tokens(["!"])  # as any text
    return Tokenizer(raw, "</s>")


def feed(stream, tokens):
    """What comes out after each token, and at the end."""
    pieces = [stream.push(token) for token in tokens if not stream.done]
    return pieces if stream.done else [*pieces, stream.finish()]


def test_a_stream_gives_whole_characters_and_all_of_them():
    tokenizer, text = byte_tokenizer(), "naïve 中文 👍 é"
    pieces = feed(TextStream(tokenizer, tokenizer.encode("ü"), frozenset(), ()), tokenizer.encode(text))
    assert "".join(pieces) == text
    assert all("\ufffd" not in piece for piece in pieces)
    cut = feed(TextStream(tokenizer, [], frozenset(), ()), tokenizer.encode("a中")[:-1])
    assert cut == ["a", "", "", "\ufffd"], "half a character is shown at the end only"


def test_a_stream_goes_on_from_its_prompt():
    """With the space after tokens without text: a special one, and an id of the model alone."""
    pieces = ["", " world", "", "", " world", ""]
    assert feed(TextStream(metaspace_tokenizer(), [2], frozenset(), ()), [5, 3, 999, 5, 3]) == pieces


@pytest.mark.parametrize(
    ("text", "stops", "expected"),
    [
        ("ENENDx", ("EN!", "END"), "EN"),
        ("no stop EN", ("END",), "no stop EN"),
        ("中文。more", ("。",), "中文"),
        ("x<|endoftext|>y", (), "x"),
    ],
)
def test_stops(text, stops, expected):
    tokenizer = byte_tokenizer()
    before, eos, after = text.partition("<|endoftext|>")
    tokens = tokenizer.encode(before) + ([tokenizer.eos_id, *tokenizer.encode(after)] if eos else [])
    stream = TextStream(tokenizer, [], frozenset({tokenizer.eos_id}), stops)
    pieces = feed(stream, tokens)
    assert "".join(pieces) == expected
    assert all(expected.startswith("".join(pieces[:i])) for i in range(len(pieces))), "nothing is taken back"


# ---------------------------------------------------------------- command line


@pytest.fixture(scope="module")
def imported(tmp_path_factory):
    """A random Llama with a byte tokenizer and a chat template, imported as a checkpoint."""
    folder = tmp_path_factory.mktemp("imported")
    tokenizer = byte_tokenizer()
    torch.manual_seed(1)
    config = LlamaConfig(**(SHAPE | FAMILIES["llama3.2"]))
    LlamaForCausalLM(config).save_pretrained(folder / "hf")
    tokenizer.save(folder / "hf")
    (folder / "hf" / "chat_template.jinja").write_text(CHATML)
    checkpoint_hf(["import", str(folder / "hf"), str(folder / "imported")])
    return folder / "imported"


def test_one_prompt_and_many_prompts(imported, tmp_path, capsys):
    prompts = ["Hello", "A somewhat longer prompt", "x"]
    alone = []
    for prompt in prompts:
        main([str(imported), "--prompt", prompt, "--temperature=0", "--max-tokens=20"])
        out = capsys.readouterr().out
        assert out.startswith(prompt)
        alone.append(out.removeprefix(prompt)[:-1])
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    several = [argument for prompt in prompts for argument in ("--prompt", prompt)]
    file = ["--prompts-file", str(tmp_path / "prompts.jsonl"), "--batch-size=2"]
    for source in ([*several, "--temperature=0"], [*file, "--top-k=0", "--top-p=1e-9"]):
        main([str(imported), *source, "--max-tokens=20"])
        lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert lines == [{"prompt": p, "completion": c} for p, c in zip(prompts, alone, strict=True)]
    drawn = set()
    for size in (1, 2):
        main([str(imported), *several, f"--batch-size={size}", "--seed=7", "--max-tokens=20"])
        drawn.add(capsys.readouterr().out)
    assert len(drawn) == 1, "a prompt's seed goes by its place among all"


def answered(imported, *messages, tools=None):
    """What transformers' likeliest tokens say to a conversation."""
    tokenizer = AutoTokenizer.from_pretrained(imported.parent / "hf")
    model = LlamaForCausalLM.from_pretrained(imported.parent / "hf")
    ends = tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_end|>"])
    options = {"tools": tools, "add_generation_prompt": True, "return_tensors": "pt"}
    prompt = tokenizer.apply_chat_template(messages, **options)["input_ids"]
    made = model.generate(prompt, max_new_tokens=12, do_sample=False, eos_token_id=ends, pad_token_id=0)
    return tokenizer.decode(made[0, prompt.shape[1] :], skip_special_tokens=True)


def test_a_chat_goes_on_from_what_was_said(imported, capsys, monkeypatch):
    lines = ["Hi", "not <|im_end|> this", "nor \udcff", "Go on", EOFError]
    monkeypatch.setattr("builtins.input", mock.Mock(side_effect=lines))
    main([str(imported), "--chat", "--system=Be kind.", "--temperature=0", "--max-tokens=12"])
    out, err = capsys.readouterr()
    assert "spells out '<|im_end|>'" in err
    assert "error: 'utf-8' codec can't encode character '\\udcff'" in err
    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}]
    first = answered(imported, *messages)
    messages += [{"role": "assistant", "content": first}, {"role": "user", "content": "Go on"}]
    assert first
    assert out == f"{first}\n{answered(imported, *messages)}\n"


def test_conversations_of_a_file_are_answered_as_by_transformers(imported, tmp_path, capsys):
    tools = [{"type": "function", "function": {"name": "clock", "parameters": {}}}]
    asked = [{"messages": [{"role": "user", "content": text}]} for text in ("Hi", "A longer question", "x")]
    asked.append({**asked[0], "tools": tools})
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in asked))
    words = ["--chats-file", str(tmp_path / "chats.jsonl"), "--temperature=0", "--max-tokens=12", "--batch-size=2"]
    main([str(imported), *words])
    answers = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    for row, found in zip(asked, answers, strict=True):
        answer = answered(imported, *row["messages"], tools=row.get("tools"))
        assert found == {**row, "messages": [*row["messages"], {"role": "assistant", "content": answer}]}
    theirs = AutoTokenizer.from_pretrained(imported.parent / "hf")
    expected = theirs.apply_chat_template(asked[0]["messages"], tools, add_generation_prompt=True)["input_ids"]
    assert encode_record(load_tokenizer(imported.parent / "hf"), messages_of(asked[3])) == expected
    assert "clock" in theirs.decode(expected)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--prompt=a", "--temperature=nan"], "--temperature = NaN: must be a number >= 0"),
        (["--prompt=a", "--top-p=0"], "--top-p = 0.0: must be a number above 0, at most 1"),
        (["--prompt=a", "--max-tokens=0"], "--max-tokens = 0: must be an integer >= 1"),
        (["--prompt=a", "--batch-size=0"], "--batch-size = 0: must be an integer >= 1"),
        (["--prompt=a", "--stop="], "--stop: must not be empty"),
        (["--prompts-file=empty.jsonl"], r"empty\.jsonl: holds no line"),
        (["--prompt=a", "--system=b"], "--system is for --chat"),
        (["--prompt="], "prompt = '': the tokenizer makes no token of it"),
        (["--prompts-file=bad.jsonl"], r"bad\.jsonl, line 2: must be an object with a text "),
    ],
)
def test_mistakes_on_the_command_line(imported, tmp_path, words, message, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.jsonl").write_text('{"prompt": "a"}\n{"text": "b"}\n')
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises((SystemExit, TitaniteError)) as ended:
        main([str(imported), *words])
    assert re.search(message, capsys.readouterr().err + str(ended.value))
