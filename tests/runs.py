"""Whole runs of train.py in forked ranks, and what they leave in their folders."""

import contextlib
import json
import os
import sys
import traceback
from pathlib import Path
from typing import NamedTuple

import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from config import load_config
from run.run import run_and_leave
from tests.harness import prepare_fork, run_ranks
from train import main, train

STEPS = 12
SMALL = (  # of two words for a setting the last counts
    "--model.flavor=tiny",
    "--model.n_layers=2",
    "--training.seq_len=32",
    "--training.local_batch_size=2",
    "--training.global_batch_size=8",
    "--training.param_dtype=float32",
    f"--training.steps={STEPS}",
    "--lr_scheduler.warmup_steps=2",
    "--optimizer.lr=1e-3",
    "--metrics.log_interval=1",
    "--metrics.tensorboard=false",
    "--validation.interval=6",
    "--validation.max_samples=8",
    "--checkpoint.interval=5",
    "--checkpoint.keep=0",
)


class Stop(Exception):
    """Ends a run between two steps."""


def run(arguments, stop_after=0):
    """train.py in this process; with `stop_after`, cut off after that step, as a crash would."""

    def after_step(step):
        if step == stop_after:
            raise Stop

    with contextlib.suppress(Stop):
        train(load_config(arguments), after_step)


def launch(world_size, folder, words, *rest, function=run):
    """`function` of the arguments of a run in `folder`, and of `rest`, on forked ranks."""
    return run_ranks(world_size, function, [*words, f"--run.folder={folder}"], *rest, start_group=False)


class Ended(NamedTuple):
    """A process that ended."""

    returncode: int
    stderr: str


def call(tmp_path, *arguments):
    """train.py's main in a process of its own, forked after one import of torch."""
    log = tmp_path / "stderr.txt"
    prepare_fork()
    pid = os.fork()
    if not pid:
        try:
            sys.stderr, sys.argv = log.open("w"), ["train.py", *arguments]  # pytest's own is not this process's
            run_and_leave(main)
        finally:
            traceback.print_exc()
            os._exit(1)
    returncode = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return Ended(returncode, log.read_text())


def read(folder, name):
    """The records of a file of a run."""
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def how_it_ended(folder):
    """The record of a run's end."""
    return json.loads((folder / "exit.json").read_text())


def rows(folder):
    """The last row of each trained step."""
    return {row["step"]: row for row in read(folder, "metrics.jsonl") if row["loss"] is not None}


def column(folder, name):
    return [row[name] for _, row in sorted(rows(folder).items())]


def validated(folder):
    """Step → loss of every validation."""
    found = read(folder, "metrics.jsonl")
    return {row["step"]: row["validation_loss"] for row in found if row["validation_loss"] is not None}


def saved_steps(folder):
    """The steps of all complete checkpoints."""
    return sorted(int(path.parent.name.split("-")[1]) for path in folder.glob("checkpoints/*/MANIFEST.json"))


def content(folder):
    """Every file of a folder."""
    return {path: path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}


def final_weights(folder, tmp_path):
    """Everything in the newest checkpoint, read by torch's own tool."""
    newest = max(path for path in (folder / "checkpoints").iterdir() if path.is_dir())
    dcp_to_torch_save(newest, tmp_path / "all.pt")
    return torch.load(tmp_path / "all.pt", weights_only=True)


def flat(tree, prefix=""):
    """The tensors of nested dicts by their path."""
    if isinstance(tree, torch.Tensor):
        return {prefix: tree}
    if not isinstance(tree, dict):
        return {}
    return {key: value for name, part in tree.items() for key, value in flat(part, f"{prefix}/{name}").items()}


def same(left, right):
    """Whether the names and the bits are equal."""
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)
