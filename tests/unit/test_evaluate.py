"""Benchmarks by lm-evaluation-harness on tasks of our own, against its transformers model of the origin; offline."""

import json
import random
from functools import partial
from pathlib import Path
from unittest import mock

import pytest

pytest.importorskip("lm_eval", reason="pip install -r requirements-eval.txt")
pytest.importorskip("accelerate", reason="the harness's transformers model needs it: pip install lm_eval[hf]")

from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager

from config import ConfigError, TitaniteError
from tests.unit.test_generate import imported  # noqa: F401
from tools.evaluate import TASKS, main

TASKS_OF_OUR_OWN = {
    "colours": """
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
""",
    "sayings": """
task: sayings
dataset_path: json
dataset_kwargs: {data_files: {validation: FOLDER/sayings.jsonl}}
output_type: loglikelihood_rolling
validation_split: validation
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list:
  - {metric: word_perplexity, aggregation: weighted_perplexity, higher_is_better: false}
""",
}


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
        (tmp_path / f"{name}.yaml").write_text(TASKS_OF_OUR_OWN[name].replace("FOLDER", str(tmp_path)))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    return tmp_path


def test_scores_of_a_run_are_those_of_the_model_it_was_imported_from(
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
    output = tasks / "made" / "results.json"
    command = [str(imported), "--tasks", "colours,sayings", "--include", str(tasks), "--batch-size=5"]
    main([*command, "--max-seq-len=100", "--num-fewshot=1", "--limit=7", "--output", str(output)])
    printed, results = capsys.readouterr().out, json.loads(output.read_text())
    assert results["config"]["model_args"]["pretrained"] == str(imported)
    assert results["n-shot"]["colours"] == 1
    hf = {"pretrained": str(imported.parent / "hf"), "dtype": "float32", "max_length": 100}
    only_these = TaskManager(include_path=str(tasks), include_defaults=False)
    expected = simple_evaluate(
        model="hf", model_args=hf, tasks=["colours", "sayings"], task_manager=only_these, num_fewshot=1, limit=7,
        device="cpu",
    )  # fmt: skip
    for task, metric in (("colours", "acc"), ("colours", "acc_norm"), ("sayings", "word_perplexity")):
        score = results["results"][task][f"{metric},none"]
        assert score == pytest.approx(expected["results"][task][f"{metric},none"], rel=1e-5)
        assert f"{score:.4f}" in printed

    assert set(TASKS.split(",")) <= set(managers[0].all_tasks)
    monkeypatch.setattr("tools.evaluate.TaskManager", lambda include_path: managers[0])
    with pytest.raises(ConfigError, match="did you mean hellaswag"):
        main(["nowhere", "--tasks=helaswag"])


def test_data_that_cannot_be_had_are_named_in_one_line(
    imported: Path,  # noqa: F811
    tasks: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on a machine without network."""
    monkeypatch.setattr("tools.evaluate.TaskManager", partial(TaskManager, include_defaults=False))
    gone = mock.Mock(side_effect=ConnectionError("Couldn't reach 'x/y' on the Hub"))
    monkeypatch.setattr("datasets.load_dataset", gone)
    with pytest.raises(TitaniteError, match=r"^--tasks sayings: data cannot be loaded: .*x/y.*HF_HOME"):
        main([str(imported), "--tasks=sayings", "--include", str(tasks), "--max-seq-len=100"])


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("--batch-size=0", "--batch-size 0: must be at least 1"),
        ("--limit=0", "--limit 0: must be at least 1"),
    ],
)
def test_a_mistake_is_named_before_a_model_is_looked_for(
    word: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["nowhere", word])
    assert message in capsys.readouterr().err
