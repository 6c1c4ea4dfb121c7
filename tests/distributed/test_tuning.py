"""An imported model is tuned by train.py itself: cut, resumed, proven and exported."""

import json
import shutil

import torch
from tokenizers import AddedToken, models, pre_tokenizers
from tokenizers import Tokenizer as RawTokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from data.prepare import main as prepare
from data.tokenizer import Tokenizer
from tests.runs import column, launch
from tools.audit import prove
from tools.hf import main as checkpoint_hf

NUMBERS = 20
SETTINGS = (
    "--training.seq_len=64",
    "--training.local_batch_size=4",
    "--training.global_batch_size=8",
    "--training.param_dtype=float32",
    "--lr_scheduler.warmup_steps=2",
    "--lr_scheduler.decay_fraction=0",
    "--optimizer.lr=3e-3",
    "--validation.enable=false",
    "--metrics.tensorboard=false",
    "--metrics.log_interval=1",
    "--data.mask_documents",
)
TEMPLATE = (
    "{% for m in messages %}<|im_start|> {{ m.role }} {% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }} <|im_end|>{% endgeneration %}{% else %}{{ m.content }} <|im_end|>{% endif %}"
    " {% endfor %}"
    "{% if add_generation_prompt %}<|im_start|> assistant {% endif %}"
)


def save_model(folder):
    """A random Llama of transformers', with a tokenizer of words."""
    torch.manual_seed(0)
    shape = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=64, **shape, **heads)).save_pretrained(folder)
    special = ["<eos>", "<|im_start|>", "<|im_end|>"]
    words = [*special, "?", "user", "assistant", "after", *(f"n{i}" for i in range(NUMBERS))]
    raw = RawTokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="?"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    raw.add_special_tokens([AddedToken(token, special=True) for token in special])
    Tokenizer(raw, "<eos>", chat_template=TEMPLATE).save(folder)


def turns(number):
    """A question of which nothing can be known, and its answer, which can."""
    answer = f"n{(number + 1) % NUMBERS}"
    return [{"role": "user", "content": f"after n{number} ?"}, {"role": "assistant", "content": answer}]


def test_a_tuned_import_does_its_task_in_transformers(tmp_path):
    theirs, imported, run, exported = (tmp_path / name for name in ("hf", "imported", "run", "exported"))
    save_model(theirs)
    checkpoint_hf(["import", str(theirs), str(imported)])
    lines = [json.dumps({"messages": turns(i)}) + "\n" for i in range(NUMBERS)] * 30
    (tmp_path / "chats.jsonl").write_text("".join(lines))
    command = ["--source", str(tmp_path / "chats.jsonl"), "--tokenizer", str(theirs), "--format=chat"]
    prepare([*command, "--seq-len=64", "--validation-fraction=0", "--output", str(tmp_path / "set")])

    words = [*SETTINGS, f"--data.datasets={tmp_path / 'set'}", f"--checkpoint.initial_load={imported}"]
    launch(2, run, [*words, "--training.steps=15"])
    shutil.rmtree(imported)  # the run has a record of its shape
    launch(1, run, [*words, "--training.steps=40"])  # goes on at another world size
    losses = column(run, "loss")
    assert len(losses) == 40
    # Only the answer and the end of its turn are trained.
    assert losses[-1] < 0.1 < 3 < losses[0]
    assert "without gap or overlap" in prove(run)[0]

    checkpoint_hf(["export", str(run), str(exported), "--dtype=float32"])
    model = AutoModelForCausalLM.from_pretrained(exported)
    tokenizer = AutoTokenizer.from_pretrained(exported)
    for number in range(NUMBERS):
        question, answer = turns(number)
        asked = tokenizer.apply_chat_template([question], add_generation_prompt=True, return_tensors="pt")["input_ids"]
        made = model.generate(asked, max_new_tokens=9, do_sample=False)[0, asked.shape[1] :]
        assert tokenizer.decode(made) == f"{answer['content']} <|im_end|>"
