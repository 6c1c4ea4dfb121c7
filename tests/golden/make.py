"""Golden runs: losses, gradient norms and data of whole runs in several layouts, which later code must give again.

    python -m tests.golden.make              the dataset, the run folder and runs.json, all anew
    python -m tests.golden.make run runs     only these, with the dataset that is there

Run it in a clone without changes, whose commit the run folder then names. `tests/distributed/test_golden.py` holds
later code to these files. Make them again only where a change is meant to change these numbers, and say so in its
commit. The dataset is made of documents as they stand here, so at another commit it is another one.

The runs know of the code the command line of train.py and metrics.jsonl. All else they lean on is in `given` and
`make_run`.
"""

import hashlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import tests.conftest  # noqa: F401  # no GPU and one thread, as in the tests; before torch

# isort: split

import numpy as np
import torch
import torchao.float8  # noqa: F401  # once, not in every forked rank

from checkpoint.manifest import encode_manifest
from config import load_config
from data.loader import Batch, DataLoader
from data.prepare import main as prepare
from tests.harness import run_ranks
from train import train

ROOT, GOLDEN = Path(__file__).parents[2], Path(__file__).parent
COMMAND = "python -m tests.golden.make"
FIGURES = ("losses", "grad_norms", "validation_losses")
DIGITS = 8  # that are stored
UP_TO = (1, 10, 50)  # steps; differences grow from one to the next
GLOBAL_BATCH, SEQ_LEN = 8, 64

# Small blocks, so that the order has several windows. The 50 steps go a little way into the second epoch.
PREPARE = (
    "--source",
    *("README.md", "CONTRIBUTING.md", *(f"docs/{name}.md" for name in ("config", "metrics", "model", "training"))),
    "--vocab-size=320",
    "--validation-fraction=0.1",
    "--max-characters=1000",
    "--block-mb=0.008",
    "--overwrite",
)
COMMON = (
    "--data.datasets=tests/golden/dataset",
    "--data.window_blocks=2",
    "--model.flavor=tiny",
    f"--training.seq_len={SEQ_LEN}",
    f"--training.global_batch_size={GLOBAL_BATCH}",
    "--training.max_norm=1",
    "--optimizer.lr=1e-3",
    "--optimizer.weight_decay=1",  # strong, so that 50 steps show it
    "--optimizer.eps=1e-6",  # with less, AdamW makes large steps of the rounding of gradients near 0
    "--lr_scheduler.schedule=wsd",
    "--metrics.log_interval=1",
    "--metrics.log_ranks=",
    "--metrics.tensorboard=false",
)
STRAIGHT = (
    *COMMON,
    "--model.n_layers=2",
    "--training.steps=50",
    "--lr_scheduler.warmup_steps=5",
    "--lr_scheduler.decay_fraction=0.2",
    "--validation.interval=25",
    "--checkpoint.enable=false",
)
# Of the run folder, which ends half way, in order. One layer and half the bytes of moments keep it small.
RESUMED = (
    *COMMON,
    "--model.n_layers=1",
    "--training.steps=12",
    "--training.param_dtype=float32",
    "--training.local_batch_size=2",
    "--optimizer.state_dtype=bfloat16",
    "--lr_scheduler.warmup_steps=2",
    "--lr_scheduler.decay_fraction=0.5",
    "--validation.interval=4",
    "--checkpoint.interval=200",
    "--checkpoint.keep=1",
)
STOP_AFTER = 6
RUN = "fsdp2-resumed-float32"  # its name among the cases, where it is run to its end at once
FLOAT8 = ("--float8.enable", "--float8.recipe=tensorwise", "--float8.filter=all")


class Case(NamedTuple):
    """A run: its ranks, among how many of them each step's samples are divided, and its arguments of train.py."""

    world_size: int
    dp_size: int
    arguments: tuple[str, ...]


def _cases() -> Iterator[tuple[str, Case]]:
    """All runs. Those that take long do not accumulate gradients; one process, the pipeline and the run folder do."""
    for dtype in ("float32", "bfloat16"):
        for name, world_size, dp_size, local_batch_size, layout in (
            ("one", 1, 1, 4, ()),
            ("fsdp2", 2, 2, 4, ("--parallelism.dp_shard=2",)),
            ("tp2-cp2", 4, 1, 8, ("--parallelism.tp=2", "--parallelism.cp=2")),
            ("pp2", 2, 1, 4, ("--parallelism.pp=2", "--parallelism.pp_microbatch_size=2")),
            ("fsdp2-float8", 2, 2, 4, ("--parallelism.dp_shard=2", *FLOAT8)),
        ):
            if dtype == "bfloat16" and name in ("tp2-cp2", "pp2"):
                continue  # take long
            sizes = (f"--training.param_dtype={dtype}", f"--training.local_batch_size={local_batch_size}")
            yield f"{name}-{dtype}", Case(world_size, dp_size, (*STRAIGHT, *sizes, *layout))
    yield RUN, Case(2, 2, RESUMED)


# ---------------------------------------------------------------- running

Given = list[list[np.ndarray]]  # by step and microbatch: int32 [local_batch_size, 2, seq_len], tokens and labels


def given(arguments: list[str], stop_after: int = 0) -> Given:
    """Train on this rank, a forked process, in the root of the repository. Returns what the run's loader gave it.

    With `stop_after` the run is asked to stop, so that this is its last step.
    """
    os.chdir(ROOT)
    config, next_step, steps = load_config(arguments), DataLoader.next_step, []

    def watched(loader: DataLoader) -> list[Batch]:
        batches = next_step(loader)
        steps.append(_arrays(batches))
        return batches

    def after_step(step: int) -> None:
        if step == stop_after - 1:  # a request counts after the step that begins then
            (Path(config.run.folder) / "stop").touch()

    DataLoader.next_step = watched  # this process ends with the run
    train(config, after_step)
    return steps


def _arrays(batches: list[Batch]) -> list[np.ndarray]:
    return [np.stack((batch.tokens.numpy(), batch.labels.numpy()), axis=1).astype("<i4") for batch in batches]


def data_hash(ranks: list[Given], dp_size: int) -> str:
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


def figures(folder: Path) -> dict[str, list[float]]:
    """What a run has written into its metrics: the figures of each step, from the first on."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    trained = [row for row in rows if row["loss"] is not None]
    assert [row["step"] for row in trained] == [*range(1, len(trained) + 1)]
    assert [row["tokens"] for row in trained] == [row["step"] * GLOBAL_BATCH * SEQ_LEN for row in trained]
    held_out = [row["validation_loss"] for row in rows if row["validation_loss"] is not None]
    columns = [[row[name] for row in trained] for name in ("loss", "grad_norm")]
    return dict(zip(FIGURES, (*columns, held_out), strict=True))


def run_case(case: Case, folder: Path) -> dict[str, Any]:
    """A fresh run in a new folder: its figures, and the hash of its data."""
    ranks = run_ranks(case.world_size, given, [*case.arguments, f"--run.folder={folder}"], start_group=False)
    return {"data": data_hash(ranks, case.dp_size), **figures(folder)}


def stored() -> dict[str, Any]:
    """The content of runs.json."""
    return json.loads((GOLDEN / "runs.json").read_text())


def stored_case(entry: dict[str, Any]) -> Case:
    return Case(entry["world_size"], entry["dp_size"], tuple(entry["arguments"]))


def distances(values: list[float], golden: list[float]) -> list[float]:
    """The largest relative differences up to each of the steps UP_TO."""
    each = [abs(a - b) / abs(b) for a, b in zip(values, golden, strict=True)]
    return [max(each[:steps]) for steps in UP_TO]


# ---------------------------------------------------------------- making


def make_dataset() -> None:
    """The dataset."""
    folder = GOLDEN / "dataset"
    prepare([*PREPARE, f"--output={folder}"])
    (folder / ".lock").unlink()


def make_run() -> None:
    """The run folder, without the name of this machine."""
    folder, name = GOLDEN / "run", "golden:/golden/run"
    shutil.rmtree(folder, ignore_errors=True)
    run_ranks(2, given, [*RESUMED, f"--run.folder={folder.relative_to(ROOT)}"], STOP_AFTER, start_group=False)
    (folder / ".running").unlink()
    if (folder / ".run_name").exists():
        (folder / ".run_name").write_text(f"{name}\n")
    (manifest,) = folder.glob("checkpoints/*/MANIFEST.json")
    manifest.write_bytes(encode_manifest({**json.loads(manifest.read_bytes())["manifest"], "run": name}))


def make_runs() -> None:
    """runs.json."""
    entries = {}
    for name, case in _cases():
        with tempfile.TemporaryDirectory() as folder:
            found = run_case(case, Path(folder) / "run")
        rounded = {key: [float(f"{value:.{DIGITS}g}") for value in found[key]] for key in FIGURES}
        entries[name] = {**case._asdict(), "data": found["data"], **rounded}
    content = {"command": COMMAND, "torch": torch.__version__, "prepare": PREPARE, "cases": entries}
    (GOLDEN / "runs.json").write_text(_to_json(content) + "\n")


def _to_json(value: Any, indent: str = "") -> str:
    """JSON with one line for each list."""
    if not isinstance(value, dict):
        return json.dumps(value)
    lines = [f"{indent} {json.dumps(key)}: {_to_json(entry, indent + ' ')}" for key, entry in value.items()]
    return "{\n" + ",\n".join(lines) + f"\n{indent}}}"


if __name__ == "__main__":
    for part in sys.argv[1:] or ("dataset", "run", "runs"):
        {"dataset": make_dataset, "run": make_run, "runs": make_runs}[part]()
