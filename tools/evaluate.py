"""Benchmarks on a trained model, by EleutherAI's lm-evaluation-harness, so that scores compare with published ones.

    python -m tools.evaluate outputs/NAME --tasks arc_easy,hellaswag --output_path results/
    python -m tools.evaluate --follow outputs/NAME --tasks arc_easy,hellaswag

Exports the model to a temporary folder in Hugging Face's format (`tools.hf`) and runs `lm-eval run --model hf` on it;
with `--follow` each checkpoint of a run, as it appears, until the run has ended. Of the run's files it only reads; a
row for each checkpoint goes to RUN/scores/scores.jsonl. All further options are the harness's (`lm-eval run --help`).
Needs `pip install -r requirements-eval.txt`.
"""

import argparse
import json
import logging
import math
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

from checkpoint.loading import load_place, open_place
from checkpoint.manifest import Opened, committed, open_checkpoint, step_of
from config import TitaniteError, close_match, command_line, recorded_config
from metrics import configure_logging, quiet_noisy_loggers
from models.trained import add_place_arguments
from parallel.device import device_type
from run.folder import hold, read_exit
from run.processes import end_with_parent
from storage import DamagedError
from storage.records import open_records, read_records
from tools.hf import export_opened

# What IBM's and PyTorch's float8 study compares models by.
TASKS = "mmlu,arc_easy,arc_challenge,hellaswag,sciq,openbookqa,piqa,winogrande"
SCORES = "scores.jsonl"
POLL_SECONDS = 30

logger = logging.getLogger(__name__)


def evaluate(opened: Opened, arguments: argparse.Namespace, options: Sequence[str], results: Path | None) -> None:
    """Run lm-eval on the export of a checkpoint, with its results to the folder `results`.

    Raises DamagedError if the checkpoint is damaged or removed, another TitaniteError if lm-eval fails.
    """
    with TemporaryDirectory() as temporary:
        folder = Path(temporary, "exported")
        export_opened(opened, arguments.place, folder, dtype=arguments.dtype, tokenizer=arguments.tokenizer)
        model = ["--model=hf", f"--model_args=pretrained={folder},dtype={arguments.dtype}", f"--device={device_type()}"]
        words = [*model, f"--tasks={arguments.tasks}", "--batch_size=16", *options]
        if results:
            words.append(f"--output_path={results}")
        command = [sys.executable, "-m", "lm_eval", "run", *words]
        code = subprocess.run(command, preexec_fn=end_with_parent).returncode
    if code:
        raise TitaniteError(f"{opened.url}: lm-eval ended with exit code {code}")


def evaluate_place(arguments: argparse.Namespace, options: Sequence[str]) -> None:
    """Evaluate the newest intact checkpoint of a place. Raises TitaniteError."""
    name = arguments.place.rstrip("/").rpartition("/")[2].partition("@")[0]

    def evaluate_opened(opened: Opened) -> None:
        results = None
        if arguments.output_path:
            results = Path(arguments.output_path, f"{name}-step-{opened.manifest['step']}")
        evaluate(opened, arguments, options, results)

    load_place(arguments.place, evaluate_opened)


def follow(arguments: argparse.Namespace, options: Sequence[str]) -> None:
    """Evaluate each checkpoint of a run once, as it appears, until the run has ended. Raises TitaniteError."""
    run = Path(arguments.place)
    config = recorded_config(run)
    if config is None:
        others = [str(file.parent) for file in run.parent.glob("*/config.toml")]
        raise TitaniteError(f"--follow {run}: no run is there{close_match(str(run), others)}")
    output = Path(arguments.output_path or run / "scores")
    output.mkdir(parents=True, exist_ok=True)
    holder = hold(output / ".following")
    if holder:
        raise TitaniteError(f"{output}: process {holder} adds scores there already; give this one an --output_path")
    asked = " ".join([arguments.tasks, arguments.dtype, arguments.tokenizer, *options])
    decided = {row["checkpoint"] for row in read_records(output / SCORES) if row["asked"] == asked}
    store = open_place(config, run)
    ended = False
    while not ended:
        ended = has_ended(run)  # asked first: what was saved before the end is then found
        names = {*committed(store)} - decided
        for name in sorted(names, key=lambda name: (name[-12:-4], name)):  # by time, then by step
            decided.add(name)
            shutil.rmtree(output / name, ignore_errors=True)  # of a follower that was killed
            try:
                evaluate(open_checkpoint(store, name), arguments, options, output / name)
            except DamagedError as error:
                logger.warning(f"{name}: skipped, since it was removed or is damaged: {error}")
                continue
            row = {"step": step_of(name), "checkpoint": name, "asked": asked, **read_scores(output / name)}
            with open_records(output / SCORES) as file:
                file.write(json.dumps(row) + "\n")
        if not ended:
            time.sleep(POLL_SECONDS)
    logger.info(f"{run}: has ended; scores of its checkpoints: {output / SCORES}")


def has_ended(run: Path) -> bool:
    """Whether a run has ended and no scheduler is to start it again.

    A start that was killed with all its ranks leaves no record, and counts as still running.
    """
    record = read_exit(run) or {}
    return not record.get("start_again", True)


def read_scores(results: Path) -> dict[str, float]:
    """lm-eval's scores as "scores/TASK/METRIC" → score: finite ones, and of a group of tasks only its own."""
    (file,) = results.rglob("results_*.json")
    found = json.loads(file.read_text(encoding="utf-8"))
    parts = set().union(*found.get("group_subtasks", {}).values())
    scores = {}
    for task in sorted(found["results"].keys() - parts):
        for key, value in found["results"][task].items():
            is_score = "," in key and "_stderr" not in key and isinstance(value, float | int)
            if is_score and math.isfinite(value):
                scores[f"scores/{task}/{key.removesuffix(',none')}"] = value
    return scores


def check_tasks(tasks: str, include_path: str | None) -> None:
    """Refuse tasks that lm-eval does not know or whose data it cannot reach, before an export. Raises TitaniteError."""
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=include_path)
    for task in tasks.split(","):
        if not manager.match_tasks([task]) and not Path(task).exists():
            raise TitaniteError(f"--tasks {task}: lm-eval has no such task{close_match(task, manager.all_tasks)}")
        try:
            manager.load(manager.match_tasks([task]))
        except OSError as error:
            hint = "without network set HF_HUB_OFFLINE=1, and HF_HOME to a folder that has the data"
            raise TitaniteError(f"--tasks {task}: {error}; {hint}") from None
        except Exception:
            pass  # ruler and babilong also need the model: lm-eval says what is wrong


def main(argv: Sequence[str]) -> None:
    """The command line. Raises TitaniteError."""
    about = "Benchmarks on a trained model. Further options are lm-eval's."
    parser = argparse.ArgumentParser(prog="python -m tools.evaluate", description=about, allow_abbrev=False)
    add_place_arguments(parser)
    parser.add_argument("--tasks", default=TASKS, help="names of lm-eval's tasks, by commas (default %(default)s)")
    parser.add_argument("--include_path", help="folder of tasks of your own")
    parser.add_argument("--output_path", help="folder of the results (default: none, with --follow RUN/scores)")
    parser.add_argument("--follow", action="store_true", help="evaluate each checkpoint of a run as it appears")
    arguments, options = parser.parse_known_args(argv)
    if find_spec("lm_eval") is None:
        raise TitaniteError("lm_eval is not installed; evaluation needs: pip install -r requirements-eval.txt")
    configure_logging((0,), 0)
    check_tasks(arguments.tasks, arguments.include_path)
    if arguments.include_path:
        options.append(f"--include_path={arguments.include_path}")
    if arguments.follow:
        follow(arguments, options)
    else:
        evaluate_place(arguments, options)


if __name__ == "__main__":
    quiet_noisy_loggers()  # from torchao, which transformers imports
    with command_line():
        main(sys.argv[1:])
