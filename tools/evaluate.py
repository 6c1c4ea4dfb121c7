"""Benchmarks on a trained model, by EleutherAI's lm-evaluation-harness, so that scores compare with published ones.

    python -m tools.evaluate outputs/NAME --tasks arc_easy,hellaswag

Needs `pip install -r requirements-eval.txt`. The harness downloads the tasks' data from Hugging Face; tasks of your
own, in its YAML format, may read local files (`--include`).
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from config import ConfigError, TitaniteError, close_match, command_line
from generate import Request, Timing, stream_texts
from records import output_file, write_output
from tools.hf import trained_positions
from tools.scoring import Pair, log_likelihoods
from trained import Trained, add_place_arguments, check_least, load_from_arguments

try:
    from lm_eval import simple_evaluate
    from lm_eval.api.model import TemplateLM
    from lm_eval.models.utils import normalize_gen_kwargs
    from lm_eval.tasks import TaskManager
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
except ImportError as error:
    sys.exit(f"error: {error}; evaluation needs: pip install -r requirements-eval.txt")

# What IBM's and PyTorch's float8 study compares models by.
TASKS = "mmlu,arc_easy,arc_challenge,hellaswag,sciq,openbookqa,piqa,winogrande"


class HarnessModel(TemplateLM):
    """A trained model as lm-evaluation-harness asks it: tokens as its HFLM encodes them, scores by `tools.scoring`."""

    def __init__(self, trained: Trained, *, batch_size: int, max_seq_len: int):
        super().__init__()
        self.trained, self.batch_size, self.max_seq_len = trained, batch_size, max_seq_len
        self._device = trained.device

    @property
    def eot_token_id(self) -> int:
        return self.trained.tokenizer.eos_id

    @property
    def prefix_token_id(self) -> int:
        """What a text without context is scored after: bos if the tokenizer begins texts with one, else eos."""
        bos = self.trained.tokenizer.bos_id
        return self.eot_token_id if bos is None else bos

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        tokenizer = self.trained.tokenizer
        if add_special_tokens is False:
            return tokenizer.raw.encode(string, add_special_tokens=False).ids
        return tokenizer.encode(string)

    def _loglikelihood_tokens(self, requests: Sequence[Any], **_: Any) -> list[tuple[float, bool]]:
        pairs = [Pair(context, continuation) for _, context, continuation in requests]
        return [tuple(score) for score in self._scores(pairs)]

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihood of whole texts, in windows that share no scored token."""
        sums = []
        for request in requests:
            (text,) = request.args
            windows = get_rolling_token_windows(
                self.tok_encode(text), prefix_token=self.prefix_token_id, max_seq_len=self.max_seq_len, context_len=1
            )
            pairs = [Pair(*make_disjoint_window(window)) for window in windows]
            sums.append(sum(score.log_likelihood for score in self._scores(pairs)))
        return sums

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Greedy or drawn continuations, one batch for each set of options.

        Raises ConfigError if a task generates no token, or so many that there is no room for a prompt.
        """
        answers: dict[int, str] = {}
        by_options: dict[str, list[int]] = {}
        for i, request in enumerate(requests):
            by_options.setdefault(json.dumps(request.args[1], sort_keys=True), []).append(i)
        for text, members in by_options.items():
            asked = self._request(json.loads(text))
            room = self.max_seq_len - asked.max_tokens
            if asked.max_tokens < 1:
                raise ConfigError(f"a task sets max_gen_toks = {asked.max_tokens}: must be at least 1")
            if room < 1:
                raise ConfigError(
                    f"--max-seq-len {self.max_seq_len}: must exceed the {asked.max_tokens} tokens that a task generates"
                )
            for first in range(0, len(members), self.batch_size):
                batch = members[first : first + self.batch_size]
                prompts = [self.tok_encode(requests[i].args[0])[-room:] for i in batch]
                texts = [""] * len(batch)
                # Repeats of a question differ: each has a seed of its own.
                seeded = replace(asked, seed=first)
                for row, piece, _ in stream_texts(self.trained, prompts, seeded, Timing()):
                    texts[row] += piece
                answers.update(zip(batch, texts, strict=True))
        return [answers[i] for i in range(len(requests))]

    def _request(self, options: dict[str, Any]) -> Request:
        options = normalize_gen_kwargs(options)
        return Request(
            temperature=options.get("temperature", 1.0) if options["do_sample"] else 0.0,
            top_k=options.get("top_k", 0),
            top_p=options.get("top_p", 1.0),
            max_tokens=options["max_gen_toks"],
            stop_ids=frozenset({self.eot_token_id}),
            stops=tuple(filter(None, options["until"])),
        )

    def _scores(self, pairs: Sequence[Pair]) -> list[Any]:
        model, size = self.trained.model, self.batch_size
        return log_likelihoods(model, pairs, batch_size=size, max_seq_len=self.max_seq_len, device=self.device)


def check_tasks(tasks: Sequence[str], manager: TaskManager) -> None:
    """Raises ConfigError for a task that the harness does not know."""
    for task in tasks:
        if task not in manager.all_tasks:
            hint = close_match(task, manager.all_tasks)
            raise ConfigError(f"--tasks {task}: no such task{hint} (lm-eval ls tasks lists them)")


def table(results: dict[str, dict[str, Any]]) -> str:
    """Task, metric, score and standard error, a line each."""
    lines = [f"{'task':<32} {'metric':<16} {'score':>10} {'± stderr':>10}"]
    for task, scores in results.items():
        for key, value in scores.items():
            metric, _, how = key.partition(",")
            if not how or metric.endswith("_stderr") or not isinstance(value, (int, float)):
                continue
            error = scores.get(f"{metric}_stderr,{how}")
            shown = f"{error:.4f}" if isinstance(error, float) else "-"
            lines.append(f"{scores.get('alias', task):<32} {metric:<16} {value:>10.4f} {shown:>10}")
    return "\n".join(lines)


def main(argv: list[str]) -> None:
    """The command line. Raises TitaniteError."""
    parser = argparse.ArgumentParser(prog="python -m tools.evaluate", description="Benchmarks on a trained model.")
    add_place_arguments(parser)
    parser.add_argument("--tasks", default=TASKS, help="names of the harness's tasks, by commas (default %(default)s)")
    parser.add_argument("--include", type=Path, help="folder of further tasks, YAML files in the harness's format")
    parser.add_argument("--num-fewshot", type=int, help="examples before each question; default: each task's own")
    parser.add_argument("--limit", type=int, help="questions per task; default: all")
    parser.add_argument("--batch-size", type=int, default=16, help="sequences in a forward (default %(default)s)")
    parser.add_argument("--max-seq-len", type=int, default=0, help="longest context; default: the training's seq_len")
    parser.add_argument("--output", type=output_file, help="JSON file for the results and all that they depend on")
    arguments = parser.parse_args(argv)
    check_least(parser, arguments, batch_size=1, limit=1, num_fewshot=0, max_seq_len=0)
    if arguments.include and not arguments.include.is_dir():  # the harness would pass over it
        parser.error(f"--include {arguments.include}: no such folder")
    manager = TaskManager(include_path=str(arguments.include) if arguments.include else None)
    tasks = arguments.tasks.split(",")
    check_tasks(tasks, manager)
    trained = load_from_arguments(arguments)
    max_seq_len = arguments.max_seq_len or trained_positions(trained.manifest, "--max-seq-len")
    model = HarnessModel(trained, batch_size=arguments.batch_size, max_seq_len=max_seq_len)
    try:
        results = simple_evaluate(
            model=model,
            tasks=tasks,
            num_fewshot=arguments.num_fewshot,
            limit=arguments.limit,
            task_manager=manager,
            log_samples=False,
        )
    except OSError as error:  # also what the Hub's libraries raise where there is no network, or no such dataset
        raise TitaniteError(
            f"--tasks {arguments.tasks}: data cannot be loaded: {error}. Without network: set HF_HUB_OFFLINE=1, and "
            "HF_HOME to a folder that this command filled on a machine with network; or use tasks over local files "
            "(--include)"
        ) from None
    print(table(results["results"]))
    if arguments.output:
        kept = ("results", "groups", "versions", "n-shot", "n-samples", "higher_is_better", "lm_eval_version")
        facts = {"checkpoint": trained.place, "step": trained.manifest.get("step"), "max_seq_len": max_seq_len}
        facts |= {"tokenizer": trained.tokenizer.fingerprint, "limit": arguments.limit}
        facts |= {key: results[key] for key in kept if key in results}
        write_output(arguments.output, json.dumps(facts, indent=2, default=str) + "\n")


if __name__ == "__main__":
    with command_line():
        main(sys.argv[1:])
