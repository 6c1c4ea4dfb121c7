"""Benchmarks by lm-evaluation-harness on tasks of our own, against its transformers model of the origin; offline."""

import json
import os
import random
import re
import runpy
import sys
from functools import partialmethod
from types import SimpleNamespace

import pytest

pytest.importorskip("lm_eval", reason="pip install -r requirements-eval.txt")
pytest.importorskip("accelerate", reason="the harness's transformers model needs it: pip install lm_eval[hf]")

import lm_eval
from lm_eval.tasks import TaskManager

from config import TitaniteError
from tests.harness import prepare_fork
from tests.unit.test_generate import imported  # noqa: F401
from tools.evaluate import main, read_scores

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
def tasks(tmp_path, monkeypatch):
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
    for key, value in {"HF_DATASETS_CACHE": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1"}.items():
        monkeypatch.setenv(key, value)
    return tmp_path


def run_forked(words, preexec_fn):
    """`python -m lm_eval ...` in a forked process, since importing it again takes longer than these tasks."""
    prepare_fork()
    pid = os.fork()
    if not pid:
        code = 1
        try:
            assert words[1:3] == ["-m", "lm_eval"]
            sys.argv = words[2:]
            runpy.run_module("lm_eval", run_name="__main__")
            code = 0
        finally:
            os._exit(code)
    return SimpleNamespace(returncode=os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


@pytest.fixture
def forked(monkeypatch):
    only_ours = partialmethod(TaskManager.__init__, include_defaults=False)  # the harness's own take seconds to list
    monkeypatch.setattr(TaskManager, "__init__", only_ours)
    monkeypatch.setattr("tools.evaluate.subprocess", SimpleNamespace(run=run_forked))


def test_scores_of_a_run_are_those_of_the_model_it_was_imported_from(
    imported,  # noqa: F811
    tasks,
    forked,
):
    """Questions are asked by the chat template of both."""
    own = ["--tasks=colours,sayings", "--num_fewshot=1", "--limit=7", f"--include_path={tasks}"]
    chat = ["--apply_chat_template", "--system_instruction", "Be kind."]
    main([str(imported), *own, *chat, "--model_args=max_length=200", f"--output_path={tasks}/made"])
    scores = read_scores(tasks / "made" / f"{imported.name}-step-0")
    expected = lm_eval.simple_evaluate(
        model="hf", model_args={"pretrained": str(imported.parent / "hf"), "dtype": "float32", "max_length": 200},
        tasks=["colours", "sayings"], task_manager=TaskManager(include_path=str(tasks)),
        num_fewshot=1, limit=7, device="cpu", apply_chat_template=True, system_instruction="Be kind.",
    )  # fmt: skip
    for task, metric in (("colours", "acc"), ("colours", "acc_norm"), ("sayings", "word_perplexity")):
        score = expected["results"][task][f"{metric},none"]
        assert scores[f"scores/{task}/{metric}"] == pytest.approx(score, rel=1e-5)


def test_tasks_are_checked_before_anything_is_exported(tasks, forked, monkeypatch):
    """Their names, and, as without network, whether their data can be reached."""
    far = TASKS_OF_OUR_OWN["sayings"].replace("sayings", "far").replace("dataset_path: json", "dataset_path: far/away")
    (tasks / "far.yaml").write_text(re.sub(r"dataset_kwargs: .*\n", "", far))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for task, message in (("colour", "did you mean colours"), ("far", r"far/away.* HF_HOME")):
        with pytest.raises(TitaniteError, match=f"--tasks {task}: .*{message}"):
            main(["nowhere", f"--tasks=sayings,{task}", f"--include_path={tasks}"])


def test_without_the_harness_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr("tools.evaluate.find_spec", {}.get)
    with pytest.raises(TitaniteError, match="evaluation needs: pip install"):
        main(["nowhere"])
