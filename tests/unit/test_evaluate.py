"""Benchmarks by lm-evaluation-harness on a task of our own, against the harness's own transformers model; offline."""

import json
import random
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("lm_eval", reason="pip install -r requirements-eval.txt")
pytest.importorskip("accelerate", reason="the harness's transformers model needs it: pip install lm_eval[hf]")

from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from tokenizers import processors
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from config import ConfigError, TitaniteError
from tests.unit.test_generate import SPECIAL, byte_tokenizer, imported  # noqa: F401
from tools.evaluate import TASKS, HarnessModel, check_tasks, main
from trained import load_trained

CHOICES_TASK = """
task: colours
dataset_path: json
dataset_kwargs: {data_files: {validation: FOLDER/colours.jsonl}}
output_type: multiple_choice
validation_split: validation
num_fewshot: 2
fewshot_split: validation
doc_to_text: "Question: {{question}}\\nAnswer:"
doc_to_target: "{{answer}}"
doc_to_choice: "{{choices}}"
metric_list:
  - {metric: acc, aggregation: mean, higher_is_better: true}
  - {metric: acc_norm, aggregation: mean, higher_is_better: true}
"""
TEXT_TASK = """
task: sayings
dataset_path: json
dataset_kwargs: {data_files: {validation: FOLDER/sayings.jsonl}}
output_type: loglikelihood_rolling
validation_split: validation
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list:
  - {metric: word_perplexity, aggregation: weighted_perplexity, higher_is_better: false}
"""
CPU = torch.device("cpu")


@pytest.fixture
def tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two small tasks over local files, and a cache of their own for Hugging Face's datasets."""
    numbers = random.Random(1)
    words = ["red", "green", "dark blue", "yellow", "a very light grey"]
    questions = [
        {"question": f"Colour {i}?", "choices": numbers.sample(words, 4), "answer": numbers.randrange(4)}
        for i in range(12)
    ]
    texts = [{"text": " ".join(numbers.choices(words, k=numbers.randint(3, 30)))} for _ in range(4)]
    for name, rows in (("colours", questions), ("sayings", texts)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, task in (("colours", CHOICES_TASK), ("sayings", TEXT_TASK)):
        (tmp_path / f"{name}.yaml").write_text(task.replace("FOLDER", str(tmp_path)))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    return tmp_path


def both_models(place: Path, tokenizer_folder: Path | None = None) -> tuple[HarnessModel, HFLM]:
    hf = place.parent / "hf"
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder or hf)
    trained = load_trained(str(place), device=CPU, dtype=torch.float32, tokenizer=str(tokenizer_folder or ""))
    ours = HarnessModel(trained, batch_size=4, max_seq_len=100)
    model = AutoModelForCausalLM.from_pretrained(hf)
    return ours, HFLM(pretrained=model, tokenizer=tokenizer, batch_size=4, max_length=100, device="cpu")


@pytest.mark.parametrize("bos", ["", "<s>"])
def test_every_answer_is_what_the_harness_gives_for_transformers(
    imported: Path,  # noqa: F811
    tmp_path: Path,
    bos: str,
) -> None:
    if bos:
        raw = byte_tokenizer(*SPECIAL, bos).raw
        raw.post_processor = processors.TemplateProcessing(f"{bos} $A", special_tokens=[(bos, raw.token_to_id(bos))])
        PreTrainedTokenizerFast(tokenizer_object=raw, bos_token=bos, eos_token=SPECIAL[0]).save_pretrained(tmp_path)
    ours, theirs = both_models(imported, tmp_path if bos else None)
    pairs = [("Question: a\nAnswer:", " red"), ("x ", "y z"), ("long " * 40, "end"), ("", "no context")]
    requests = [Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(pairs)]
    for (value, greedy), (expected, expected_greedy) in zip(
        ours.loglikelihood(requests), theirs.loglikelihood(requests), strict=True
    ):
        assert abs(value - expected) < 1e-4
        assert greedy == expected_greedy
    texts = [Instance("loglikelihood_rolling", {}, (text,), 0) for text in ("short", "many words " * 30)]
    assert ours.loglikelihood_rolling(texts) == pytest.approx(theirs.loglikelihood_rolling(texts), abs=1e-3)
    options = {"until": ["\n"], "max_gen_toks": 12, "do_sample": False}
    prompts = [Instance("generate_until", {}, (text, options), 0) for text in ("Hello", "A somewhat longer one")]
    assert ours.generate_until(prompts) == theirs.generate_until(prompts)


def test_options_mean_what_the_harness_means_by_them(imported: Path) -> None:  # noqa: F811
    ours, _ = both_models(imported)
    asked = {"until": "\n", "max_new_tokens": 7}
    assert ours._request(asked).temperature == 0
    assert ours._request(asked).max_tokens == 7
    assert ours._request(asked | {"temperature": 0.7}).temperature == 0.7
    assert ours._request(asked | {"temperature": 0.7, "do_sample": False}).temperature == 0
    drawn = {"temperature": 2.0, "do_sample": True, "max_gen_toks": 12}
    repeats = [Instance("generate_until", {}, ("Hello", drawn), 0) for _ in range(10)]
    assert len(set(ours.generate_until(repeats))) > 7, "in batches of 4"
    for fewest_or_most in (1, 99):
        ours.generate_until([Instance("generate_until", {}, ("Hello", {"max_gen_toks": fewest_or_most}), 0)])
    with pytest.raises(ConfigError, match="--max-seq-len 100: must exceed the 100 tokens"):
        ours.generate_until([Instance("generate_until", {}, ("Hello", {"max_gen_toks": 100}), 0)])
    with pytest.raises(ConfigError, match="max_gen_toks = 0"):
        ours.generate_until([Instance("generate_until", {}, ("Hello", {"max_gen_toks": 0}), 0)])


def test_until_may_be_a_special_token(imported: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    ours, theirs = both_models(imported)
    text = ours.tok_encode("ab", add_special_tokens=False)
    drawn = [*text, ours.trained.tokenizer.raw.token_to_id("<|im_end|>"), *text]

    def as_transformers(input_ids: torch.Tensor, stopping_criteria: Any, **_: Any) -> torch.Tensor:
        for token in drawn:
            input_ids = torch.cat([input_ids, torch.tensor([[token]])], 1)
            if stopping_criteria(input_ids, None).all():
                break
        return input_ids

    monkeypatch.setattr("generate.generate", lambda *_: iter([[token] for token in drawn]))
    monkeypatch.setattr(theirs.model, "generate", as_transformers)
    asked = Instance("generate_until", {}, ("Hello", {"until": ["<|im_end|>"], "max_gen_toks": 5}), 0)
    assert ours.generate_until([asked]) == theirs.generate_until([asked]) == ["ab"]


def test_a_task_of_our_own_has_the_scores_of_the_harness(
    imported: Path,  # noqa: F811
    tasks: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And the eight benchmarks are known, and others refused: to index the harness's own tasks takes 15 s."""
    managers: list[TaskManager] = []

    def index(include_path: str) -> TaskManager:
        managers.append(TaskManager(include_path=include_path))
        return managers[-1]

    monkeypatch.setattr("tools.evaluate.TaskManager", index)
    names = "colours,sayings"
    command = [str(imported), "--tasks", names, "--include", str(tasks), "--batch-size=5", "--max-seq-len=100"]
    main([*command, "--num-fewshot=1", "--limit=7", "--output", str(tasks / "made" / "results.json")])
    _, *printed = (line.split() for line in capsys.readouterr().out.splitlines())
    facts = json.loads((tasks / "made" / "results.json").read_text())
    assert (facts["max_seq_len"], facts["limit"], facts["n-shot"]["colours"]) == (100, 7, 1)
    ours = facts["results"]
    _, hf = both_models(imported)
    only_these = TaskManager(include_path=str(tasks), include_defaults=False)
    theirs = simple_evaluate(model=hf, tasks=names.split(","), task_manager=only_these, num_fewshot=1, limit=7)
    expected = []
    for task, metrics in (("colours", ("acc", "acc_norm")), ("sayings", ("word_perplexity",))):
        for metric in metrics:
            score, error = (ours[task][f"{name},none"] for name in (metric, f"{metric}_stderr"))
            assert score == pytest.approx(theirs["results"][task][f"{metric},none"], rel=1e-5)
            expected.append([task, metric, f"{score:.4f}", "-" if task == "sayings" else f"{error:.4f}"])
    assert printed == expected

    check_tasks(TASKS.split(","), managers[0])
    with pytest.raises(ConfigError, match="did you mean hellaswag"):
        check_tasks(["helaswag"], managers[0])


@pytest.mark.parametrize("gone", [ConnectionError("Couldn't reach 'x/y' on the Hub"), "no such file"])
def test_data_that_cannot_be_had_are_named_in_one_line(
    imported: Path,  # noqa: F811
    tasks: Path,
    monkeypatch: pytest.MonkeyPatch,
    gone: Exception | str,
) -> None:
    only_these = partial(TaskManager, include_defaults=False)
    monkeypatch.setattr("tools.evaluate.TaskManager", only_these)
    if isinstance(gone, Exception):  # of a machine without network
        monkeypatch.setattr("datasets.load_dataset", mock.Mock(side_effect=gone))
    else:
        (tasks / "sayings.jsonl").unlink()
    command = [str(imported), "--tasks=sayings", "--include", str(tasks), "--max-seq-len=100"]
    with pytest.raises(ConfigError, match=r"^--tasks saying: no such task.*sayings"):  # before a model is looked for
        main(["nowhere", "--tasks=saying", *command[2:]])
    with pytest.raises(TitaniteError, match=r"^--tasks sayings: data cannot be loaded: .*(x/y|sayings).*HF_HOME"):
        main(command)


def test_a_folder_of_tasks_must_be_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["nowhere", "--tasks=mine", f"--include={tmp_path / 'taks'}"])
    assert "taks: no such folder" in capsys.readouterr().err


@pytest.mark.parametrize("word", ["--batch-size=0", "--limit=0", "--num-fewshot=-1", "--max-seq-len=-5"])
def test_numbers_that_mean_nothing_are_refused(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["nowhere", word])
    name, _, value = word.partition("=")
    assert f"{name} {value}: must be at least" in capsys.readouterr().err
