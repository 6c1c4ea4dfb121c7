"""Scores of a run's checkpoints while it trains: `python -m tools.evaluate --follow`. Of the run's files it only reads.

It writes to a folder of its own, RUN/scores: `scores.jsonl`, with a row for each checkpoint, a folder with what lm-eval
says of each, and `exported`, the model that is evaluated now.
"""

import argparse
import json
import logging
import math
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from checkpoint.loading import open_place
from checkpoint.manifest import committed, open_checkpoint, step_of
from config import Config, TitaniteError, close_match, recorded_config
from run.folder import hold, read_exit
from run.processes import end_with_parent
from storage import DamagedError
from storage.records import open_records, read_records
from tools.hf import export_opened

SCORES = "scores.jsonl"
RECENT = 5  # checkpoints over which the spread of scores is reported

logger = logging.getLogger(__name__)


def follow(arguments: argparse.Namespace, asked: str, command: Callable[[Path], list[str]]) -> None:
    """Evaluate each checkpoint of the run in `arguments.place` once, as it appears, until the run has ended.

    `command` evaluates an exported model, as `asked` says in words. Raises TitaniteError.
    """
    run = Path(arguments.place)
    output = Path(arguments.output_path or run / "scores")
    wait = partial(time.sleep, arguments.poll_seconds)
    config = wait_for_start(run, wait)
    output.mkdir(parents=True, exist_ok=True)
    holder = hold(output / ".following")
    if holder:
        raise TitaniteError(f"{output}: process {holder} adds scores there already; give this one an --output_path")
    exported = output / "exported"
    for left in output.glob("exported*"):  # by a follower that was killed
        shutil.rmtree(left)
    rows = [row for row in read_records(output / SCORES) if row["asked"] == asked]
    decided = {row["checkpoint"] for row in rows}
    ended = False
    while not ended:
        ended = has_ended(run)  # asked first: what was saved before the end is then found
        store = open_place(config, run)
        names = {*committed(store)} - decided
        for name in sorted(names, key=lambda name: (name[-12:-4], name)):  # by time, then by step
            decided.add(name)
            try:
                opened = open_checkpoint(store, name)
                export_opened(opened, str(run), exported, dtype=arguments.dtype, tokenizer=arguments.tokenizer)
            except DamagedError as error:
                logger.warning(f"{name}: skipped, since it was removed or is damaged: {error}")
                continue
            scores = evaluate(command(exported), output / name)
            rows.append({"step": step_of(name), "checkpoint": name, "asked": asked, **scores})
            report(rows[-RECENT:], scores, output)
            shutil.rmtree(exported)
        if not ended:
            wait()
    logger.info(f"{run}: has ended; checkpoints evaluated: {len(rows)}, see {output / SCORES}")


def wait_for_start(run: Path, wait: Callable[[], None]) -> Config:
    """The run's config, once it has one; before that its folder must hold nothing."""
    if run.exists():
        logger.info(f"{run}: its checkpoints are evaluated as they appear")
    else:
        others = [str(other.parent) for other in run.parent.glob("*/config.toml")]
        logger.warning(f"{run}: there is no such run; waiting until it starts{close_match(str(run), others)}")
    while True:
        config = recorded_config(run)
        if config is not None:
            return config
        wait()


def has_ended(run: Path) -> bool:
    """Whether a run has ended and no scheduler is to start it again.

    A start that was killed with all its ranks leaves no record, and counts as still running.
    """
    record = read_exit(run) or {}
    return not record.get("start_again", True)


def evaluate(command: list[str], results: Path) -> dict[str, float]:
    """Run lm-eval, with its output to files in the new folder `results`. Returns "scores/TASK/METRIC" → score.

    Finite ones, and of a group of tasks only its own. Raises TitaniteError if it fails.
    """
    shutil.rmtree(results, ignore_errors=True)
    results.mkdir()
    log = results / "lm-eval.log"
    with log.open("wb") as file:
        words = [*command, f"--output_path={results}"]
        code = subprocess.run(words, stdout=file, stderr=file, preexec_fn=end_with_parent).returncode
    if code:
        raise TitaniteError(f"{log}: lm-eval ended with exit code {code}; start this command again to go on")
    (file_of_results,) = results.rglob("results_*.json")
    found = json.loads(file_of_results.read_text(encoding="utf-8"))
    parts = set().union(*found.get("group_subtasks", {}).values())
    scores = {}
    for task in sorted(found["results"].keys() - parts):
        for key, value in found["results"][task].items():
            is_score = "," in key and "_stderr" not in key and isinstance(value, float | int)
            if is_score and math.isfinite(value):
                scores[f"scores/{task}/{key.removesuffix(',none')}"] = value
    return scores


def report(rows: Sequence[dict[str, Any]], scores: Mapping[str, float], output: Path) -> None:
    """Log the `scores` of the last row, with their spread over all `rows`, and add it to the file."""
    row = rows[-1]
    for name, score in scores.items():
        values = [other[name] for other in rows if name in other]
        line = f"step {row['step']}  {name.removeprefix('scores/')} {score:.4f}"
        if len(values) > 1:
            line += f"  last {len(values)}: {fmean(values):.4f} ± {stdev(values):.4f}"
        logger.info(line)
    with open_records(output / SCORES) as file:
        file.write(json.dumps(row) + "\n")
