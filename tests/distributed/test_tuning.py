"""Imported models are tuned by train.py itself: one is cut, resumed, proven, and does its task, one is exported."""

import json
from pathlib import Path
from unittest import mock

import pytest
import torch
from tokenizers import AddedToken, models, pre_tokenizers
from tokenizers import Tokenizer as RawTokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from config import load_config
from data.prepare import main as prepare
from data.tokenizer import Tokenizer, train_tokenizer
from generate import Request, generate
from generate import main as generate_text
from models.llama import FLAVORS
from models.trained import load_trained
from tests.corpus import write_dataset
from tests.harness import run_ranks
from tools.audit import prove
from tools.hf import main as checkpoint_hf
from train import train

NUMBERS = 20
VOCAB = 64
SETTINGS = (
    "--training.seq_len=32",
    "--training.local_batch_size=4",
    "--training.param_dtype=float32",
    "--lr_scheduler.warmup_steps=2",
    "--lr_scheduler.decay_fraction=0",
    "--optimizer.lr=1e-3",
    "--validation.enable=false",
    "--metrics.tensorboard=false",
    "--metrics.log_interval=1",
)
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def train_as(words: list[str]) -> None:
    train(load_config(words))


def save_model(folder: Path, vocab_size: int) -> None:
    """A random Llama of transformers', of the shape of "debug"."""
    shape = FLAVORS["debug"]
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=shape.dim,
        intermediate_size=shape.hidden_dim,
        num_hidden_layers=shape.n_layers,
        num_attention_heads=shape.n_heads,
        num_key_value_heads=shape.n_kv_heads,
        rms_norm_eps=shape.norm_eps,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def test_an_imported_model_learns_to_answer(tmp_path: Path) -> None:
    words = {"<eos>": 0, "after": 1, "?": 2} | {f"n{i}": 3 + i for i in range(NUMBERS)}
    raw = RawTokenizer(models.WordLevel(words, unk_token="?"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    raw.add_special_tokens([AddedToken("<eos>", special=True)])
    (tmp_path / "hf").mkdir()
    Tokenizer(raw, "<eos>").save(tmp_path / "hf")
    save_model(tmp_path / "hf", VOCAB)
    checkpoint_hf(["import", str(tmp_path / "hf"), str(tmp_path / "imported")])

    lines = [{"prompt": f"after n{i} ?", "response": f"n{(i + 1) % NUMBERS}"} for i in range(NUMBERS)] * 30
    (tmp_path / "task.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    command = ["--source", str(tmp_path / "task.jsonl"), "--tokenizer", str(tmp_path / "hf"), "--format=sft"]
    prepare([*command, "--seq-len=32", "--validation-fraction=0", "--output", str(tmp_path / "set")])

    run = tmp_path / "run"
    arguments = [f"--data.datasets={tmp_path / 'set'}", "--data.mask_documents", f"--run.folder={run}"]
    arguments += [f"--checkpoint.initial_load={tmp_path / 'imported'}", f"--model.vocab_size={VOCAB}"]
    arguments += [*SETTINGS, "--training.global_batch_size=8"]
    other = f"--data.datasets={write_dataset(tmp_path / 'other', [[[1] * 40 + [0]] * 40], vocab_size=VOCAB)}"
    with pytest.raises(AssertionError, match=r"imported: \d+ of the 64 token ids in the data are other tokens"):
        run_ranks(1, train_as, [*arguments[2:], other, "--training.steps=15"], start_group=False)
    run_ranks(2, train_as, [*arguments, "--training.steps=15"], start_group=False)
    run_ranks(1, train_as, [*arguments, "--training.steps=30"], start_group=False)  # goes on at another world size

    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["step"] == 30
    # The answer to each question can be known, and so can the eos after it; nothing else is trained.
    assert rows[-1]["loss"] < 0.1 < 3 < rows[0]["loss"]
    assert "without gap or overlap" in prove(run)[0]
    trained = load_trained(str(run), device=torch.device("cpu"), dtype=torch.float32)
    prompts = [trained.tokenizer.encode(f"after n{i} ?") for i in range(NUMBERS)]
    answers = generate(trained.model, prompts, torch.device("cpu"), Request(temperature=0, max_tokens=2))
    assert list(zip(*answers, strict=True)) == [(words[f"n{(i + 1) % NUMBERS}"], 0) for i in range(NUMBERS)]


def test_a_tuned_import_answers_in_transformers_as_here(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = {"Hi": "Yes.", "Who?": "It is me."}
    turns = [[{"role": "user", "content": q}, {"role": "assistant", "content": a}] for q, a in answers.items()]
    raw = train_tokenizer([str(turns), "user assistant"] * 9, 290).raw
    raw.add_special_tokens([AddedToken(token, special=True) for token in ("<|im_start|>", "<|im_end|>")])
    theirs, imported, run, exported = (tmp_path / name for name in ("hf", "imported", "run", "exported"))
    save_model(theirs, 320)
    Tokenizer(raw, "<|endoftext|>", chat_template=CHATML).save(theirs)
    checkpoint_hf(["import", str(theirs), str(imported)])

    (tmp_path / "chats.jsonl").write_text("".join(json.dumps({"messages": turn}) + "\n" for turn in turns) * 20)
    command = ["--source", str(tmp_path / "chats.jsonl"), "--tokenizer", str(theirs), "--format=chat"]
    prepare([*command, "--seq-len=32", "--validation-fraction=0", "--output", str(tmp_path / "set")])
    arguments = [*SETTINGS, f"--data.datasets={tmp_path / 'set'}", "--data.mask_documents", f"--run.folder={run}"]
    arguments += [f"--checkpoint.initial_load={imported}", "--model.vocab_size=320", "--training.steps=12"]
    run_ranks(1, train_as, arguments, start_group=False)
    checkpoint_hf(["export", str(run), str(exported), "--dtype=float32"])

    model = AutoModelForCausalLM.from_pretrained(exported)
    assert model.config.max_position_embeddings == 2048, "the import's, not the run's 32"
    tokenizer = AutoTokenizer.from_pretrained(exported)
    ends = [2, *tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_end|>"])]
    assert model.generation_config.eos_token_id == ends, (
        "that of transformers' LlamaConfig, the tokenizer's, the template's"
    )
    for question, *_ in turns:
        monkeypatch.setattr("builtins.input", mock.Mock(side_effect=[question["content"], EOFError]))
        capsys.readouterr()
        generate_text([str(run), "--chat", "--temperature=0", "--max-tokens=30"])
        here = capsys.readouterr().out
        asked = tokenizer.apply_chat_template([question], add_generation_prompt=True, return_tensors="pt")["input_ids"]
        made = model.generate(asked, max_new_tokens=30, do_sample=False)[0, asked.shape[1] :]
        assert tokenizer.decode(made) == f"{answers[question['content']]}<|im_end|>"
        assert here == f"{answers[question['content']]}\n"
