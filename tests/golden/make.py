"""Golden runs: losses, gradient norms and data of whole runs, which later code must give again.

    python -m tests.golden.make run runs     the run folder, and the figures of the cases in runs.json, anew

Run it in a clone without changes, whose commit the run folder then names. `tests/distributed/test_golden.py` holds
later code to these files. Make them again only where a change is meant to change these numbers, and say so in its
commit. The dataset was made by `python -m data.prepare` with the arguments in runs.json, of documents as they stood.

The runs know of the code the command line of train.py and metrics.jsonl. Everything else they need is in `given` and
`make_run`.
"""

import hashlib
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import tests.conftest  # noqa: F401  # no GPU and one thread, as in the tests; before torch

# isort: split

import numpy as np
import torch
import torchao.float8  # noqa: F401  # once, not in every forked rank

from checkpoint.manifest import encode_manifest
from config import load_config
from data.loader import DataLoader
from tests.harness import run_ranks
from train import train

ROOT, GOLDEN = Path(__file__).parents[2], Path(__file__).parent
STORED = json.loads((GOLDEN / "runs.json").read_text())
RUN = "fsdp2-resumed-float32"  # the case of the run folder, which ends half way; here it is run to its end at once
STOP_AFTER = 6


class Case(NamedTuple):
    """A run: its ranks, among how many of them each step's samples are divided, and its arguments of train.py."""

    world_size: int
    dp_size: int
    arguments: list[str]


CASES = {name: Case(*(entry[field] for field in Case._fields)) for name, entry in STORED["cases"].items()}


def given(arguments, stop_after=0):
    """Train on this rank, a forked process, in the root of the repository. Returns what the run's loader gave it.

    With `stop_after` the run is asked to stop, so that this is its last step.
    """
    os.chdir(ROOT)
    config = load_config(arguments)
    next_step = DataLoader.next_step
    steps = []

    def watched(loader):
        batches = next_step(loader)
        steps.append([np.stack((x.tokens.numpy(), x.labels.numpy()), axis=1).astype("<i4") for x in batches])
        return batches

    def after_step(step):
        if step == stop_after - 1:  # a request counts after the step that begins then
            (Path(config.run.folder) / "stop").touch()

    DataLoader.next_step = watched  # this process ends with the run
    train(config, after_step)
    return steps


def data_hash(ranks, dp_size):
    """BLAKE2b of the samples of all steps in their order, each its tokens and then its labels. The same in any layout.

    Raises AssertionError if ranks that share a dp_rank were given different samples.
    """
    copies = len(ranks) // dp_size  # neighbours
    digest = hashlib.blake2b(digest_size=16)
    for step in zip(*ranks, strict=True):
        for microbatch in zip(*step, strict=True):
            for first in range(0, len(ranks), copies):
                own, *others = microbatch[first : first + copies]
                assert all(np.array_equal(own, other) for other in others)
                digest.update(own.tobytes())
    return digest.hexdigest()


def figures(folder):
    """What a run has written into its metrics: the figures of each step, from the first on."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    trained = [row for row in rows if row["loss"] is not None]
    assert [row["step"] for row in trained] == [*range(1, len(trained) + 1)]
    return {
        "losses": [row["loss"] for row in trained],
        "grad_norms": [row["grad_norm"] for row in trained],
        "validation_losses": [row["validation_loss"] for row in rows if row["validation_loss"] is not None],
    }


def run_case(case, folder):
    """A fresh run in a new folder: its figures, and the hash of its data."""
    ranks = run_ranks(case.world_size, given, [*case.arguments, f"--run.folder={folder}"], start_group=False)
    return {"data": data_hash(ranks, case.dp_size), **figures(folder)}


def make_run():
    """The run folder, without the name of this machine."""
    folder, name = GOLDEN / "run", "golden:/golden/run"
    shutil.rmtree(folder, ignore_errors=True)
    arguments = [*CASES[RUN].arguments, f"--run.folder={folder.relative_to(ROOT)}"]
    run_ranks(CASES[RUN].world_size, given, arguments, STOP_AFTER, start_group=False)
    (folder / ".running").unlink()
    (folder / ".run_id").write_text(f"{name}\n")
    (folder / "checkpoints" / ".lease").unlink()
    (manifest,) = folder.glob("checkpoints/*/MANIFEST.json")
    manifest.write_bytes(encode_manifest({**json.loads(manifest.read_bytes())["manifest"], "run": name}))


def make_runs():
    """The figures in runs.json."""
    for name, case in CASES.items():
        with tempfile.TemporaryDirectory() as folder:
            STORED["cases"][name] |= run_case(case, Path(folder) / "run")
    STORED["torch"] = torch.__version__
    (GOLDEN / "runs.json").write_text(json.dumps(STORED, indent=1) + "\n")


if __name__ == "__main__":
    for part in sys.argv[1:]:
        {"run": make_run, "runs": make_runs}[part]()
