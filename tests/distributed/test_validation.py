"""Validation sets by name, in a run and of its checkpoint, against the loss worked out from the stored documents."""

import json
import math
import random
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import models
from transformers import AutoModelForCausalLM, AutoTokenizer

from checkpoint import CheckpointError
from config import Config, ConfigError, Data, Model, TitaniteError, Training, load_config
from data.answers import encode_answer
from data.loader import IGNORED, validation_batches
from data.packing import HIDDEN, START
from data.shards import open_dataset
from data.tokenizer import Tokenizer
from models import build_model, find_model
from models.llama.model import FeedForward
from models.trained import Trained, load_trained
from models.weights import init_weights
from tests.corpus import stored_blocks, write_dataset
from tests.harness import run_ranks
from tests.runs import final_weights, flat, launch, read, same, validated
from tests.unit.test_data_tuning import folder as tuning  # noqa: F401
from tools.average import main as average
from tools.compare import read_charts
from tools.hf import export_model
from train import train
from validate import as_packed, measure
from validate import main as validate

SEQ_LEN = 16


def train_as(words):
    train(load_config(words))


def trained_model(run):
    return load_trained(str(run), device=torch.device("cpu"), dtype=torch.float32).model


def untrained(flavor, dataset):
    tokenizer = open_dataset(str(dataset)).tokenizer()
    model = build_model(*find_model(Model(flavor=flavor), tokenizer.vocab_size)).to_empty(device="cpu")
    init_weights(model, torch.device("cpu"), seed=4)
    return Trained(model, tokenizer, {}, "", torch.device("cpu"))


def expected_loss(folder, model):
    """(mean loss, tokens) of the held-out documents, one after the other, cut into sequences."""
    stream = torch.tensor([t for block in stored_blocks(folder, "validation") for document in block for t in document])
    losses = []
    with torch.no_grad():
        for tokens, labels in zip(stream[:-1].split(SEQ_LEN), stream[1:].split(SEQ_LEN), strict=True):
            losses.append(F.cross_entropy(model(tokens[None])[0].double(), labels, reduction="none"))
    return torch.cat(losses).mean().item(), len(stream) - 1


def documents(numbers, n):
    return [[*(numbers.randrange(1, 500) for _ in range(numbers.randint(3, 60))), 0] for _ in range(n)]


def held_out_set(folder, numbers, n):
    """A dataset that holds out `n` documents."""
    return write_dataset(folder, [documents(numbers, 60)], documents(numbers, n))


def arguments(run, *datasets):
    words = ["--data.datasets=" + ",".join(map(str, datasets)), f"--run.folder={run}", "--training.steps=4"]
    words += [f"--training.seq_len={SEQ_LEN}", "--training.local_batch_size=4", "--training.param_dtype=float32"]
    words += ["--model.flavor=tiny"]
    words += ["--validation.interval=2", "--validation.max_samples=0", "--metrics.tensorboard=false"]
    return [*words, "--lr_scheduler.warmup_steps=1"]


def last_validation(run, key):
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if row.get(key) is not None][-1]


def drop_some(self, x):
    return self.w2(F.dropout(F.silu(self.w1(x)) * self.w3(x), 0.5, self.training))


def test_named_sets_are_measured_in_a_run_and_afterwards(tmp_path, capsys):
    """Of a model with dropout, which a run then leaves out as well. Sets of one name have their paths for names."""
    numbers = random.Random(0)
    main_set = held_out_set(tmp_path / "main", numbers, 3)
    sets = [held_out_set(tmp_path / name, numbers, n) for name, n in (("a/few", 9), ("b/few", 5), ("many", 30))]
    run = tmp_path / "run"
    words = [*arguments(run, main_set), "--validation.datasets=" + ",".join(map(str, sets))]
    with mock.patch.object(FeedForward, "forward", drop_some):
        run_ranks(2, train_as, words, start_group=False)
    last = last_validation(run, f"validation_loss/{sets[0]}")
    assert last["step"] == 4
    assert last["validation_loss"] is None
    capsys.readouterr()
    validate([str(run)])
    lines = dict(line.split("  ", 1) for line in capsys.readouterr().out.splitlines())
    for folder in sets:
        loss, tokens = expected_loss(folder, trained_model(run))
        assert last[f"validation_loss/{folder}"] == pytest.approx(loss, abs=1e-5)
        assert lines[str(folder)].startswith(f"loss {loss:.4f}")
        assert lines[str(folder)].endswith(f"{tokens:,} tokens")

    other = write_dataset(tmp_path / "other", [documents(numbers, 1)], documents(numbers, 2), vocab_size=600)
    with pytest.raises(TitaniteError, match="was made with tokenizer"):
        validate([str(run), "--datasets", str(other)])
    with pytest.raises(TitaniteError, match="other was made with another tokenizer"):
        train(load_config([*words[:1], f"--validation.datasets={other}", f"--training.seq_len={SEQ_LEN}"]))


PAIRS = [(f"{word} ka ki", f" {word}{'é' * (i % 3)} mo") for i, word in enumerate(["ba", "do", "fi", "gu", "le"])]
SPLITS = [["--parallelism.tp=2"], ["--parallelism.cp=2", "--data.mask_documents"]]


def bits_per_byte(folder, pairs):
    """Of answers, by transformers, for the tokens for which lm-evaluation-harness asks."""
    TemplateLM = pytest.importorskip("lm_eval.api.model").TemplateLM
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    bits = 0.0
    for prompt, answer in pairs:
        asked, ids = [tokenizer.eos_token_id], tokenizer(answer)["input_ids"]
        if prompt:
            harness = SimpleNamespace(backend="causal", tok_encode=lambda text: tokenizer(text)["input_ids"])
            asked, ids = TemplateLM._encode_pair(harness, prompt, answer)
        with torch.no_grad():
            logits = model(torch.tensor([asked + ids])).logits[0, len(asked) - 1 : -1].double()
        bits -= logits.log_softmax(-1)[range(len(ids)), ids].sum().item() / math.log(2)
    return bits / sum(len(answer.encode()) for _, answer in pairs)


@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_answers_are_measured_as_transformers_and_the_harness_would(split, small, dataset, tmp_path, capsys):
    file, other, run, exported = (tmp_path / name for name in ("mine.jsonl", "asked.jsonl", "run", "hf"))
    pairs = [*PAIRS, ("", "ba na"), ("ka " * 30 + "ka", " mo")]  # the last fills a sequence
    for name, these in ((file, pairs), (other, PAIRS)):
        name.write_text("\n".join(json.dumps({"prompt": asked, "answer": gold, "id": 1}) for asked, gold in these))
    places = [file, other]
    words = [*small, *split, "--training.steps=2", "--validation.answers=" + ",".join(map(str, places))]
    words += [f"--run.folder={run}", "--checkpoint.interval=2", "--validation.interval=2", "--validation.max_samples=2"]
    run_ranks(2, train_as, words, start_group=False)
    export_model(str(run), exported, dtype="float32")
    expected = {"mine": bits_per_byte(exported, pairs), "asked": bits_per_byte(exported, PAIRS)}
    found = last_validation(run, "validation_loss")
    capsys.readouterr()
    validate([str(run)])
    printed = capsys.readouterr().out.splitlines()[1:]
    for place, line in zip(places, printed, strict=True):
        assert found[f"bits_per_byte/{place.stem}"] == pytest.approx(expected[place.stem], rel=1e-5)
        assert line.startswith(f"{place.stem}  {expected[place.stem]:.4f} bits per byte of answers")
    assert {f"bits_per_byte/{place.stem}" for place in places} <= {*read_charts(run)}, "curves of the compare page"


def test_the_mean_of_checkpoints_is_measured_and_changes_no_bit_of_the_training(small, dataset, tmp_path):
    words = [*small, "--training.steps=4", "--checkpoint.interval=2", "--validation.interval=1"]
    words += ["--parallelism.pp=2", "--checkpoint.mode=async"]
    plain, run, out = (tmp_path / name for name in ("plain", "run", "mean"))
    launch(2, plain, words)
    launch(2, run, [*words, "--validation.average=2"])
    saved = [flat(final_weights(folder, tmp_path)) for folder in (run, plain)]
    assert same(*saved)
    rows = [row for row in read(run, "metrics.jsonl") if row["validation_loss"] is not None]
    found = {row["step"]: row.get("validation_loss/average") for row in rows}
    assert found[1] is None
    assert found[3] == pytest.approx(validated(plain)[2], rel=1e-6), "of the only one"
    average([f"{run}@2", f"{run}@4", str(out)])
    trained = load_trained(str(out), device=torch.device("cpu"), dtype=torch.float32)
    config = load_config([*small, "--validation.max_samples=8"])
    nats, tokens, _ = measure(trained, config).tolist()
    assert found[4] == pytest.approx(nats / tokens, rel=1e-5)


def test_an_average_has_the_mean_of_its_checkpoints(small, tmp_path):
    """One that is named twice counts twice. A run begins from it."""
    run, out = tmp_path / "run", tmp_path / "mean"
    words = [*small, "--training.steps=3", "--checkpoint.interval=1"]
    launch(1, run, words)
    average([f"{run}@{step}" for step in (1, 2, 3, 3)] + [str(out)])
    trained = [trained_model(Path(f"{run}@{step}")).state_dict() for step in (1, 2, 3)]
    for name, weight in trained_model(out).state_dict().items():
        one, two, three = (weights[name].double() for weights in trained)
        assert torch.equal(weight, ((one + two + 2 * three) / 4).float()), name
    launch(1, tmp_path / "next", [*words, f"--checkpoint.initial_load={out}", "--training.steps=1"])
    launch(1, tmp_path / "other", [*words, "--model.n_layers=1", "--training.steps=1"])
    with pytest.raises(CheckpointError, match="another model: n_layers is 1 there and 2 here"):
        average([str(tmp_path / "other"), str(run), str(tmp_path / "mixed")])
    with pytest.raises(TitaniteError, match="nowhere: no tokenizer"):
        average([str(run), str(tmp_path / "mixed"), "--tokenizer=nowhere"])


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (None, "mine.jsonl: No such file"),
        ([], "holds no line"),
        (
            ['{"prompt": "a", "answer": "b"}', '{"prompt": "a", "response": "b"}'],
            "line 2: has no .* keys prompt, resp",
        ),
        (['{"prompt": "a", "answer": ""}'], "line 1: the answer is empty"),
        (['{"prompt": "a", "answer": 3}'], 'line 1: must be an object with texts "prompt" and "answer"'),
        (["{"], "line 1: must be an object with texts"),
        ([json.dumps({"prompt": "ka " * 40, "answer": "b"})], "line 1: has 41 tokens, more than training.seq_len = 32"),
    ],
)
def test_answers_that_cannot_be_measured_are_refused(lines, said, small, tmp_path):
    file = tmp_path / "mine.jsonl"
    if lines is not None:
        file.write_text("\n".join(lines))
    with pytest.raises(TitaniteError, match=said):
        train(load_config([*small, f"--validation.answers={file}", f"--run.folder={tmp_path / 'run'}"]))
    assert not (tmp_path / "run").exists()


def test_a_token_of_prompt_and_answer_is_the_answers():
    raw = RawTokenizer(models.BPE({"<e>": 0, "a": 1, "b": 2, "c": 3, "bc": 4}, [("b", "c")]))
    tokenizer = Tokenizer(raw, "<e>")
    first = START | HIDDEN
    assert encode_answer(tokenizer, "ab", "c").tolist() == [1 | first, 4]
    assert encode_answer(tokenizer, "b", "c").tolist() == [0 | first, 4], "a document follows the end of another"


def test_packed_examples_are_measured_whole_and_apart(tuning):  # noqa: F811
    url = str(tuning)
    config = Config(data=Data(datasets=(url,)), training=Training(seq_len=20, local_batch_size=3))  # of a pre-training
    trained = untrained("debug", tuning)
    with pytest.raises(ConfigError, match="--seq-len 20: must be 32"):
        as_packed(config, 20, True)
    packed = as_packed(config, None, False)
    assert packed.training.seq_len == 32, "rows are not cut"
    losses = []
    for batch in validation_batches(packed, 0, 1):
        for tokens, labels, positions in zip(*batch, strict=True):
            starts = positions.eq(0).nonzero()[1:, 0].tolist()
            for part, expected in zip(tokens.tensor_split(starts), labels.tensor_split(starts), strict=True):
                logits = trained.model(part[None])[0].detach().double()
                losses.append(
                    F.cross_entropy(logits[expected != IGNORED], expected[expected != IGNORED], reduction="none")
                )
    nats, count, _ = measure(trained, packed).tolist()
    assert count == len(torch.cat(losses))
    assert nats == pytest.approx(torch.cat(losses).sum().item(), rel=1e-6)
