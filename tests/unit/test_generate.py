"""Generation: transformers' greedy tokens for prompts of unequal lengths, its sampling, stops, streams and chat."""

import argparse
import dataclasses
import json
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as RawTokenizer
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

import trained
from checkpoint.files import read_state
from config import TitaniteError
from data.chat import ChatTemplate
from data.tokenizer import Tokenizer
from generate import (
    CACHE_STEP,
    Request,
    Sampling,
    TextStream,
    Timing,
    compile_blocks,
    continue_many,
    generate,
    main,
    read_prompts,
    sample,
    stream_texts,
)
from models.llama.model import Llama
from tests.unit.test_llama import FAMILIES, SMALL, hf_model, ours_from
from tools.hf import main as checkpoint_hf
from trained import load_trained

CPU = torch.device("cpu")
GREEDY = Sampling(temperature=0)
CHATML = (
    "{{ bos_token }}{% for message in messages %}\n  {% if message.role == 'nobody' %}{% break %}{% endif %}"
    "{{ '<|im_start|>' + message.role + '\n' }}{% if message.role == 'assistant' %}"
    "{% generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}"
    "{% elif message.role == 'tool' %}{{ message.content | tojson + '<|im_end|>' }}"
    "{% else %}{{ message.content + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def prompts_of(*lengths: int) -> list[list[int]]:
    numbers = random.Random(3)
    return [[numbers.randrange(96) for _ in range(n)] for n in lengths]


def tokens_of(model: Llama, prompts: list[list[int]], n: int, sampling: Sampling = GREEDY) -> list[list[int]]:
    """The tokens of each row."""
    return [list(row) for row in zip(*generate(model, prompts, n, CPU, sampling), strict=True)]


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_equal_transformers_in_a_batch_of_unequal_lengths(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("generate.PREFILL_TOKENS", 16)  # the longer prompts come in pieces
    hf, prompts = hf_model(family), prompts_of(9, 1, 40, 16, 17)
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


def test_a_row_is_drawn_as_it_would_be_alone() -> None:
    model, prompts = ours_from(hf_model("llama3")), prompts_of(5, 12, 3)
    together = tokens_of(model, prompts, 12, Sampling(seed=7))
    assert together == [tokens_of(model, [prompt], 12, Sampling(seed=7 + i))[0] for i, prompt in enumerate(prompts)]
    assert together != tokens_of(model, prompts, 12, Sampling(seed=8))


def test_compiled_blocks_give_the_same_tokens_and_are_compiled_once() -> None:
    model, prompts = ours_from(hf_model("llama3.2")), prompts_of(4, 11)
    expected = tokens_of(model, prompts, 10)
    compiled = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> torch.fx.GraphModule:
        compiled.append(graph)
        return graph

    compile_blocks(model, backend)
    assert tokens_of(model, prompts, 10) == expected
    assert len(compiled) == 1, "one graph for all layers and places"
    for rooms in range(2, 11):  # more than torch._dynamo's own limit
        tokens_of(model, [[1] * (CACHE_STEP * (rooms - 1))], 2)
    assert len(compiled) == 10


@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (3, 1.0), (0, 0.7), (4, 0.6), (0, 0.01), (0, 1e-300)])
def test_sampling_follows_the_probabilities_that_transformers_leaves(top_k: int, top_p: float) -> None:
    logits = torch.tensor([1.0, 3.0, 2.0, -1.0, 2.5, 0.0])
    generator = torch.Generator().manual_seed(0)
    draws = torch.stack([sample(logits, Sampling(temperature=0.7, top_k=top_k, top_p=top_p), generator)
                         for _ in range(4000)])  # fmt: skip
    warped = TemperatureLogitsWarper(0.7)(torch.empty(1, 0), logits[None])
    if top_k:
        warped = TopKLogitsWarper(top_k)(torch.empty(1, 0), warped)
    if top_p < 1:
        warped = TopPLogitsWarper(top_p)(torch.empty(1, 0), warped)
    expected = warped[0].softmax(-1)
    share = torch.bincount(draws, minlength=6) / len(draws)
    torch.testing.assert_close(share, expected, rtol=0, atol=0.03)
    assert (share[expected == 0] == 0).all()
    for temperature in (0.0, 1e-20, 1e-40, 1e-300):
        cold = Sampling(temperature=temperature, top_k=top_k, top_p=top_p)
        assert sample(logits, cold, generator) == 1, temperature


# ---------------------------------------------------------------- text


def byte_tokenizer(*special: str) -> Tokenizer:
    """A token for each byte, and the special ones; no merges."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())[: SMALL["vocab_size"] * 3]
    raw = RawTokenizer(models.BPE({token: i for i, token in enumerate(alphabet)}, []))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special or SPECIAL])
    return Tokenizer(raw, "<|endoftext|>")


def metaspace_tokenizer() -> Tokenizer:
    """As Llama 2's: words with a leading ▁, whose decoder drops the first one, and bytes for all else, from id 6 on."""
    words = ["<unk>", "</s>", "▁Hello", "▁world", "!", "<|tool|>", *(f"<0x{byte:02X}>" for byte in range(256))]
    raw = RawTokenizer(models.BPE({word: i for i, word in enumerate(words)}, [], unk_token="<unk>", byte_fallback=True))
    raw.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    raw.add_special_tokens(["</s>", "<|tool|>"])
    raw.add_tokens(["!"])  # as any text
    return Tokenizer(raw, "</s>")


def feed(stream: TextStream, tokens: list[int]) -> list[str]:
    """What comes out after each token, and at the end."""
    pieces = [stream.push(token) for token in tokens if not stream.done]
    return pieces if stream.done else [*pieces, stream.finish()]


def test_a_stream_gives_whole_characters_and_all_of_them() -> None:
    tokenizer, text = byte_tokenizer(), "naïve 中文 👍 é"
    stream = TextStream(tokenizer, tokenizer.encode("ü"), frozenset(), ())
    pieces = feed(stream, tokenizer.encode(text))
    assert "".join(pieces) == text
    assert all("\ufffd" not in piece for piece in pieces)
    cut = feed(TextStream(tokenizer, [], frozenset(), ()), tokenizer.encode("a中")[:-1])
    assert cut == ["a", "", "", "\ufffd"], "half a character is shown at the end only"


def test_a_stream_keeps_the_space_of_the_first_word() -> None:
    stream = TextStream(metaspace_tokenizer(), [2], frozenset(), ())
    assert feed(stream, [3, 4, 3]) == [" world", "!", " world", ""]


def test_a_stream_keeps_the_space_after_tokens_without_text() -> None:
    """Special ones, and 999, by which a model may have more than its tokenizer."""
    stream = TextStream(metaspace_tokenizer(), [2], frozenset(), ())
    assert feed(stream, [5, 3, 999, 5, 3]) == ["", " world", "", "", " world", ""]


def test_special_tokens_decode_nothing() -> None:
    """Else each would decode the whole prompt anew."""
    tokenizer = mock.Mock(wraps=metaspace_tokenizer())
    stream = TextStream(tokenizer, [2] * 1000, frozenset(), ())
    assert [stream.push(5) for _ in range(9)] == [""] * 9
    assert not tokenizer.decode.called


def test_a_stream_goes_on_from_a_prompt_of_bytes() -> None:
    prompt, text = ([6 + byte for byte in text.encode()] for text in ("ሰላም", "ን🙂"))
    stream = TextStream(metaspace_tokenizer(), prompt, frozenset(), ())
    assert feed(stream, text) == ["", "", "ን", "", "", "", "🙂", ""]


def test_a_special_token_is_a_stop_too_and_each_row_has_its_own_end(monkeypatch: pytest.MonkeyPatch) -> None:
    trained, steps = SimpleNamespace(tokenizer=metaspace_tokenizer(), model=None, device=CPU), [[3, 5], [5, 3], [3, 3]]
    apart = [(0, " world", False), (1, "", True), (0, "", True)]
    together = [(0, " world", False), (1, " world", False), (0, " world", True), (1, " world", True)]
    for stops, expected, unmade, tokens in ((("<|tool|>",), apart, [[3, 3]], 1), (("<|other|>",), together, [], 4)):
        made, timing = iter(steps), Timing()
        monkeypatch.setattr("generate.generate", lambda *_, made=made: made)
        request = Request(max_tokens=3, stops=stops)
        pieces = stream_texts(trained, [[2, 4], [2]], request, timing)  # type: ignore[arg-type]
        assert list(pieces) == expected
        assert list(made) == unmade, "once all rows have ended"
        assert (timing.prompt_tokens, timing.tokens) == (3, tokens), "the first of each row comes with its prompt"
    assert str(Timing(3, 1.5, 30, 2.0)).endswith("then 30 in 2.00 s: 15.0 tokens/s")


def test_prompts_are_printed_in_order_though_they_end_apart(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    batches, seeds = iter([[[5, 3, 5]] * 3, [[5]]]), []

    def steps(*asked: Any) -> Iterator[list[int]]:
        seeds.append(asked[-1].seed)
        return iter(next(batches))

    monkeypatch.setattr("generate.generate", steps)
    trained = SimpleNamespace(tokenizer=metaspace_tokenizer(), model=None, device=CPU)
    request = Request(seed=7, max_tokens=3, stops=("<|tool|>",))
    continue_many(trained, ["▁Hello"] * 4, request, Timing(), 3)  # type: ignore[arg-type]
    completions = [json.loads(line)["completion"] for line in capsys.readouterr().out.splitlines()]
    assert completions == ["", " world world world", "", ""]
    assert seeds == [7, 10], "a prompt's seed goes by its place among all"


@pytest.mark.parametrize(
    ("text", "stops", "expected"),
    [
        ("one\ntwo\n\nthree", ("\n\n",), "one\ntwo"),
        ("a END b", ("EN!", "END"), "a "),
        ("ENENDx", ("END",), "EN"),
        ("no stop EN", ("END",), "no stop EN"),
        ("中文。more", ("。",), "中文"),
        ("x<|endoftext|>y", (), "x"),
    ],
)
def test_stops(text: str, stops: tuple[str, ...], expected: str) -> None:
    tokenizer = byte_tokenizer()
    before, eos, after = text.partition("<|endoftext|>")
    tokens = tokenizer.encode(before) + ([tokenizer.eos_id, *tokenizer.encode(after)] if eos else [])
    stream = TextStream(tokenizer, [], frozenset({tokenizer.eos_id}), stops)
    pieces = feed(stream, tokens)
    assert "".join(pieces) == expected
    assert all(expected.startswith("".join(pieces[:i])) for i in range(len(pieces))), "nothing is taken back"


# ---------------------------------------------------------------- chat


@pytest.mark.parametrize("bos", ["", "<s>"])
def test_a_conversation_has_the_tokens_that_transformers_gives_it(bos: str) -> None:
    raw = byte_tokenizer(*SPECIAL, "<s>").raw
    if bos:
        raw.post_processor = processors.TemplateProcessing(f"{bos} $A", special_tokens=[(bos, raw.token_to_id(bos))])
    tokenizer = Tokenizer(raw, "<|endoftext|>")
    template = ChatTemplate(CHATML, tokenizer)
    theirs = PreTrainedTokenizerFast(
        tokenizer_object=RawTokenizer.from_str(tokenizer.raw.to_str()), bos_token=bos or None
    )
    theirs.chat_template = CHATML
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello, 中?"},
        {"role": "assistant", "content": "Yes."},
        {"role": "tool", "content": '"22 °C"'},
        {"role": "user", "content": "Why"},
    ]
    expected = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert template.encode(messages, add_generation_prompt=True) == expected
    assert template.stop_ids == {tokenizer.raw.token_to_id("<|im_end|>")}
    prompt = (
        f"{bos}<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello, 中?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert template.segments(messages) == [(prompt, False), ("Yes.<|im_end|>\n", True)]


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ([], "must be a list of messages, at least one"),
        ("hello", "must be a list of messages"),
        ([{"role": "user"}], "string \"content\""),
        (["hello"], "string \"content\""),
        ([{"role": "bot", "content": "a"}], "'bot': must be one of system, user"),
        ([{"role": "user", "content": "a<|im_end|>b"}], "spells out '<|im_end|>'"),
    ],
)  # fmt: skip
def test_what_is_no_conversation_is_refused(messages: object, said: str) -> None:
    with pytest.raises(TitaniteError) as error:
        ChatTemplate(CHATML, byte_tokenizer()).encode(messages)  # type: ignore[arg-type]
    assert said in str(error.value)


def test_templates_that_cannot_be_used_say_why() -> None:
    with pytest.raises(TitaniteError, match="not a chat template"):
        ChatTemplate("{% for", byte_tokenizer())
    refusing = ChatTemplate("{{ raise_exception('no system, please') }}", byte_tokenizer())
    with pytest.raises(TitaniteError, match="no system, please"):
        refusing.render([{"role": "user", "content": "a"}])
    turns = [{"role": role, "content": role[:1]} for role in ("user", "assistant") * 2]
    for answered in (  # otherwise than it is prompted for, or told otherwise once more is said
        "{{ messages | map(attribute='content') | join }}{{ '>' if add_generation_prompt }}",
        "{% for m in messages %}{{ m.content if m.role == 'user' or loop.last else '-' }}{% endfor %}",
    ):
        with pytest.raises(TitaniteError, match="an answer changes the text before it"):
            ChatTemplate(answered, byte_tokenizer()).segments(turns)


# ---------------------------------------------------------------- command line


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama with a byte tokenizer and a chat template, imported as a checkpoint."""
    folder = tmp_path_factory.mktemp("imported")
    tokenizer = byte_tokenizer()
    torch.manual_seed(1)
    config = LlamaConfig(**(SMALL | FAMILIES["llama3.2"] | {"vocab_size": 320}))
    LlamaForCausalLM(config).save_pretrained(folder / "hf")
    tokenizer.save(folder / "hf")
    (folder / "hf" / "chat_template.jinja").write_text(CHATML)
    checkpoint_hf(["import", str(folder / "hf"), str(folder / "imported")])
    return folder / "imported"


def test_a_checkpoint_that_its_run_removes_while_it_is_read_is_no_damage(
    imported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (old, new) = (tmp_path / f"step-0000000{step}-6b0441aca867" for step in (1, 2))
    shutil.copytree(imported, old)

    def read(*arguments: Any) -> None:
        if old.exists():  # the run saves its next checkpoint now, of which it keeps one
            old.rename(new)
        read_state(*arguments)

    monkeypatch.setattr("trained.read_state", read)
    found = load_trained(str(tmp_path), device=torch.device("cpu"), dtype=torch.float32, tokenizer=str(imported))
    assert found.place == str(new)


def test_one_prompt_and_many_prompts(
    imported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("generate.compile_blocks", compiled := mock.Mock())
    prompts = ["Hello", "A somewhat longer prompt", "x"]
    alone = []
    for prompt in prompts:
        main([str(imported), "--prompt", prompt, "--temperature=0", "--max-tokens=20"])
        out, err = capsys.readouterr()
        assert out.startswith(prompt)
        assert "tokens/s" in err
        alone.append(out.removeprefix(prompt)[:-1])
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    several = [argument for prompt in prompts for argument in ("--prompt", prompt)]
    file = ["--prompts-file", str(tmp_path / "prompts.jsonl"), "--batch-size=2"]
    assert not compiled.called
    for source in (
        [*several, "--temperature=0"],
        [*several, "--top-k=1", "--compile"],
        [*file, "--top-k=0", "--top-p=1e-9"],
    ):
        main([str(imported), *source, "--max-tokens=20"])
        lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert lines == [{"prompt": p, "completion": c} for p, c in zip(prompts, alone, strict=True)]
    assert compiled.call_count == 1


def test_a_chat_goes_on_from_what_was_said(
    imported: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    typed = iter(["Hi", "not <|im_end|> this", "caf\udce9", "Go on"])
    asked, prompts = [], []

    def read_line(prompt: str) -> str:
        try:
            return next(typed)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", read_line)
    original = ChatTemplate.encode

    def encode(self: ChatTemplate, messages: list[dict[str, str]], **options: bool) -> list[int]:
        asked.append([dict(message) for message in messages])
        prompts.append(original(self, messages, **options))
        return prompts[-1]

    monkeypatch.setattr(ChatTemplate, "encode", encode)
    main([str(imported), "--chat", "--system=Be kind.", "--temperature=0", "--max-tokens=12"])
    out, err = capsys.readouterr()
    assert "spells out '<|im_end|>'" in err
    assert "error: what was typed is not valid text" in err
    assert [message["role"] for message in asked[-1]] == ["system", "user", "assistant", "user"]
    answer = asked[-1][2]["content"]
    assert answer
    assert out.startswith(f"{answer}\n")
    assert "tokens/s" in err
    assert "tokens/s" not in out
    assert byte_tokenizer().decode(prompts[-1]).endswith("Go on\nassistant\n")


def test_a_chat_without_an_input_ends(
    imported: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", None)  # as Python has it after `<&-`
    main([str(imported), "--chat"])
    assert capsys.readouterr().out == ""


def test_a_prompt_may_hold_any_line_end(tmp_path: Path) -> None:
    prompts = ["a\u2028b", "c\u0085d", "e\r\nf"]
    text = "".join(json.dumps({"prompt": prompt}, ensure_ascii=False) + "\n" for prompt in prompts)
    (tmp_path / "prompts.jsonl").write_text(text, encoding="utf-8")
    assert read_prompts(tmp_path / "prompts.jsonl") == prompts


def test_mistakes_are_explained(imported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for seed in (2**63, -(2**63) - 1):
        with pytest.raises(SystemExit):
            main([str(imported), "--prompt=a", f"--seed={seed}"])
        assert f"--seed {seed}: must fit in 64 bits" in capsys.readouterr().err
    for too_low in ("--max-tokens=0", "--batch-size=0", "--temperature=-1", "--temperature=nan", "--top-k=-1"):
        with pytest.raises(SystemExit):
            main([str(imported), "--prompt=a", too_low])
        assert "must be at least 1, --temperature and --top-k at least 0" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([str(imported), "--prompt=a", "--system=b"])
    assert "--system is for --chat" in capsys.readouterr().err
    (tmp_path / "half.jsonl").write_text('{"prompt": "\\ud800 a"}\n')
    with pytest.raises(TitaniteError, match=r"half.jsonl, line 1: holds a lone surrogate"):
        main([str(imported), "--prompts-file", str(tmp_path / "half.jsonl")])
    (tmp_path / "bad.jsonl").write_text('{"prompt": "a"}\n{"text": "b"}\n')
    with pytest.raises(TitaniteError, match=r'bad.jsonl, line 2: must be an object with a string "prompt"'):
        main([str(imported), "--prompts-file", str(tmp_path / "bad.jsonl")])
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(TitaniteError, match=r"--prompts-file .*empty\.jsonl: is empty"):
        main([str(imported), "--prompts-file", str(tmp_path / "empty.jsonl")])
    with pytest.raises(TitaniteError, match=r"--prompts-file .*none\.jsonl: cannot be read: .*No such file"):
        main([str(imported), "--prompts-file", str(tmp_path / "none.jsonl")])
    with pytest.raises(TitaniteError, match="prompt = '': the tokenizer makes no token of it"):
        main([str(imported), "--prompt", ""])
    with pytest.raises(TitaniteError, match="no checkpoint here"):
        main([str(tmp_path), "--prompt", "a"])


def test_a_reader_that_has_enough_ends_it_without_a_traceback(imported: Path) -> None:
    command = [sys.executable, "generate.py", str(imported), "--prompt", "a", "--prompt", "b", "--max-tokens=4"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout
        assert process.stderr
        process.stdout.close()  # as `| head` does
        said = process.stderr.read()
    assert process.returncode == 1
    assert said.splitlines()[-1:] in ([], ["error: [Errno 32] Broken pipe"])
    assert "Traceback" not in said


def test_a_checkpoint_of_stock_dcp_in_a_run(tmp_path: Path) -> None:
    model = ours_from(hf_model("llama3.1"))
    dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path / "checkpoints")
    described = {"name": "llama", **dataclasses.asdict(model.config)}
    (tmp_path / "model.json").write_text(json.dumps(described))
    byte_tokenizer().save(tmp_path)
    trained = load_trained(str(tmp_path), device=CPU, dtype=torch.float32)
    prompts = prompts_of(5)
    assert tokens_of(trained.model, prompts, 5) == tokens_of(model, prompts, 5)
    (tmp_path / "model.json").write_text(json.dumps(described | {"n_layers": 1}))
    with pytest.raises(TitaniteError, match=r"has tensors that the model lacks \(\d+\), such as model\.layers\.1\."):
        load_trained(str(tmp_path), device=CPU, dtype=torch.float32)


def test_the_built_in_template_is_used_where_there_is_none(imported: Path, tmp_path: Path) -> None:
    byte_tokenizer().save(tmp_path)
    trained = load_trained(str(imported), device=CPU, dtype=torch.bfloat16, tokenizer=str(tmp_path))
    assert trained.chat.render([{"role": "user", "content": "a"}], add_generation_prompt=True) == (
        "<|user|>\na\n<|assistant|>\n"
    )
    assert next(trained.model.parameters()).dtype == torch.bfloat16


def test_weights_are_of_the_type_that_is_asked_for_or_fits_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    parser, load = argparse.ArgumentParser(), mock.Mock()
    monkeypatch.setattr(trained, "load_trained", load)
    trained.add_place_arguments(parser)
    for words, device, dtype in (
        ([], "cpu", torch.float32),
        ([], "cuda", torch.bfloat16),
        (["--dtype=bfloat16"], "cpu", torch.bfloat16),
    ):
        monkeypatch.setattr(trained, "device_type", lambda device=device: device)
        trained.load_from_arguments(parser.parse_args(["place", *words]))
        assert load.call_args.kwargs["dtype"] == dtype
    with pytest.raises(SystemExit):
        parser.parse_args(["place", "--dtype=int8"])
