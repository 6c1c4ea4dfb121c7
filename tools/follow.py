"""Scores of a run's checkpoints while it trains: `python -m tools.evaluate --follow`. Of the run's files it only reads.

It writes to a folder of its own, RUN/scores: `scores.jsonl`, with a row for each checkpoint, `tensorboard`, a folder
with what lm-eval says of each, and `exports-HASH`, whose models are removed once they are evaluated.
"""

import argparse
import ctypes
import json
import logging
import math
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from checkpoint.loading import by_age, open_stores
from checkpoint.manifest import committed, open_checkpoint, sha256, step_of
from checkpoint.owner import own_checkpoints, read_known
from config import TitaniteError, recorded_config
from run.folder import hold, read_exit
from run.processes import PR_SET_PDEATHSIG
from storage import DamagedError, OutageError, Store
from storage.records import open_records, read_records
from tools.hf import export_opened

Row = dict[str, Any]

logger = logging.getLogger(__name__)


def follow(arguments: argparse.Namespace, asked: str, command: Callable[[Path], list[str]]) -> None:
    """Evaluate each checkpoint of the run in `arguments.place` once, as it appears, until the run has ended.

    `command` evaluates an exported model, as `asked` says in words. Raises TitaniteError.
    """
    run = Path(arguments.place)
    output = Path(arguments.output_path or run / "scores")
    exports = output / f"exports-{sha256(asked.encode())[:8]}"
    logger.info(f"{run}: following it, with a look every {arguments.poll_seconds:g} s")
    while not (run / "config.toml").is_file():  # before that its folder must hold nothing
        time.sleep(arguments.poll_seconds)
    exports.mkdir(parents=True, exist_ok=True)
    holder = hold(output / ".following")
    if holder:
        raise TitaniteError(f"{output}: process {holder} adds scores there already; give this one an --output_path")
    rows = [row for row in read_records(output / "scores.jsonl") if row["asked"] == asked]
    decided = {row["checkpoint"] for row in rows}
    remove_leftovers(output, exports, decided)
    while True:
        try:
            ended = has_ended(run)  # asked first: what was saved before the end is then found
            names, stores = find_waiting(run, decided)
            for name in names:
                reason = export(arguments, name, stores, exports / name)
                if reason and name == names[-1] and not ended:
                    break  # it may be about to be committed
                decided.add(name)
                if reason:
                    logger.warning(f"{name}: skipped, since it was removed or is damaged: {reason}")
                else:
                    scores = evaluate(command(exports / name), output / name)
                    row = {"step": step_of(name), "checkpoint": name, "asked": asked, **scores, "time": time.time()}
                    rows.append(row)
                    add_row(output, row, rows, arguments.last)
                    shutil.rmtree(exports / name)
        except OutageError as error:
            ended = False
            logger.warning(f"{error}; looking again later")
        if ended:
            break
        time.sleep(arguments.poll_seconds)
    logger.info(f"{run}: has ended; checkpoints evaluated: {len(rows)}, see {output / 'scores.jsonl'}")


def remove_leftovers(output: Path, exports: Path, decided: set[str]) -> None:
    """Remove what a killed follower has left: half an export, one that was evaluated or is for other options."""
    for left in (*output.glob("exports-*/*.partial-*"), *output.glob("exports-*/step-*")):
        is_half = ".partial-" in left.name
        if is_half or left.parent != exports or left.name in decided:
            shutil.rmtree(left)


def has_ended(run: Path) -> bool:
    """Whether a run has ended and no scheduler is to start it again.

    A start that was killed with all its ranks leaves no record, and counts as still running.
    """
    record = read_exit(run) or {}
    return not record.get("start_again", True)


def find_waiting(run: Path, decided: set[str]) -> tuple[list[str], list[Store]]:
    """The run's checkpoints that are not in `decided`, the one saved first first, and the stores to look for them.

    Those that the run's folder knows may be removed, not listed yet or, the last one, about to be committed.
    """
    config = recorded_config(run)
    assert config is not None
    stores = [*open_stores(config, run).values()]
    found = by_age((store, committed(store)) for store in stores)
    names = {name for _, name in own_checkpoints(run, found)}
    names |= read_known(run) or set()
    waiting = [name for name in names - decided if step_of(name) is not None]
    return sorted(waiting, key=lambda name: (name[-12:-4], name)), stores  # by time, then by step


def export(arguments: argparse.Namespace, name: str, stores: Sequence[Store], folder: Path) -> str:
    """Export a checkpoint, unless it is, from the first store where it is whole. Returns why none is, or ""."""
    reason = ""
    for store in stores:
        try:
            if not folder.exists():
                opened = open_checkpoint(store, name)
                export_opened(opened, arguments.place, folder, dtype=arguments.dtype, tokenizer=arguments.tokenizer)
            return ""
        except DamagedError as error:  # also if it is removed meanwhile
            reason = str(error)
    return reason


def evaluate(command: list[str], results: Path) -> dict[str, float | None]:
    """Run lm-eval, with its output to files in the new folder `results`. Returns "scores/TASK/METRIC" → score.

    Of a group of tasks only its own scores; None is one that is not finite. Raises TitaniteError if it fails.
    """
    shutil.rmtree(results, ignore_errors=True)
    results.mkdir()
    end_with_this_process = partial(ctypes.CDLL(None).prctl, PR_SET_PDEATHSIG, signal.SIGKILL)
    words = [*command, f"--output_path={results}"]
    with open(results / "lm-eval.log", "wb") as log:
        code = subprocess.run(words, stdout=log, stderr=log, preexec_fn=end_with_this_process).returncode
    files = sorted(results.rglob("results_*.json"))
    if code or not files:
        hint = "its model is kept: start this command again"
        raise TitaniteError(f"{results / 'lm-eval.log'}: lm-eval failed, exit code {code}; {hint}")
    found = json.loads(files[-1].read_text(encoding="utf-8"))
    parts = set().union(*found.get("group_subtasks", {}).values())
    scores = {}
    for task in found["results"].keys() - parts:
        for key, value in found["results"][task].items():
            metric = key.partition(",")[0]
            if metric != key and not metric.endswith("_stderr") and isinstance(value, int | float):
                name = f"scores/{task}/{key.removesuffix(',none')}"
                scores[name] = value if math.isfinite(value) else None
    return scores


def add_row(output: Path, row: Row, rows: Sequence[Row], last: int) -> None:
    """Log a row, with the spread over the `last` of `rows`, and add it to TensorBoard and scores.jsonl."""
    from torch.utils.tensorboard import SummaryWriter  # takes a second to load

    by_step = {row["step"]: row for row in rows}  # of a step that was trained again the last one
    recent = [by_step[step] for step in sorted(by_step)][-last:]
    row["spread"] = {}
    with SummaryWriter(str(output / "tensorboard")) as board:
        for name in sorted(row):
            if name.startswith("scores/") and row[name] is not None:
                values = [other[name] for other in recent if other.get(name) is not None]
                line = f"step {row['step']}  {name.removeprefix('scores/')} {row[name]:.4f}"
                if len(values) > 1:
                    row["spread"][name] = {"checkpoints": len(values), "mean": fmean(values), "std": stdev(values)}
                    line += f"  last {len(values)}: {fmean(values):.4f} ± {stdev(values):.4f}"
                logger.info(line)
                board.add_scalar(name, row[name], row["step"])
    with open_records(output / "scores.jsonl") as file:  # after TensorBoard, so that a kill leaves no gap there
        print(json.dumps(row), file=file)
