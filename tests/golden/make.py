"""The run of an earlier commit, which later code must resume: `python -m tests.golden.make` makes it anew.

Run it in a clone without changes, whose commit the run's folder then names. Make it again only where a change is meant
to end such resumes, and say so in its commit. The dataset was made of documents as they stood, by `python -m
data.prepare --source README.md CONTRIBUTING.md docs/config.md docs/metrics.md docs/model.md docs/training.md
--vocab-size=320 --validation-fraction=0.1 --max-characters=1000 --block-mb=0.008`.
"""

import json
import shutil
from pathlib import Path

import tests.conftest  # noqa: F401  # no GPU and one thread, as in the tests; before torch

# isort: split

from checkpoint.manifest import encode_manifest
from config import load_config
from tests.harness import run_ranks
from train import train

FOLDER = Path("tests/golden/run")
NAME = "golden:/golden/run"  # in place of this machine's
ARGUMENTS = (
    "--data.datasets=tests/golden/dataset",
    "--data.window_blocks=2",
    "--model.flavor=tiny",
    "--model.n_layers=1",
    "--training.seq_len=64",
    "--training.local_batch_size=2",
    "--training.global_batch_size=8",
    "--training.steps=12",
    "--training.max_norm=1",
    "--training.param_dtype=float32",
    "--optimizer.lr=1e-3",
    "--optimizer.weight_decay=1",
    "--optimizer.eps=1e-6",
    "--optimizer.state_dtype=bfloat16",
    "--lr_scheduler.schedule=wsd",
    "--lr_scheduler.warmup_steps=2",
    "--lr_scheduler.decay_fraction=0.5",
    "--validation.interval=4",
    "--checkpoint.interval=200",
    "--checkpoint.keep=1",
    "--metrics.log_interval=1",
    "--metrics.log_ranks=",
    "--metrics.tensorboard=false",
)


def train_to_step_6(arguments):
    """Train on this rank. The run is asked to stop, which counts after the step that begins then."""
    config = load_config(arguments)

    def after_step(step):
        if step == 5:
            (Path(config.run.folder) / "stop").touch()

    train(config, after_step)


if __name__ == "__main__":
    shutil.rmtree(FOLDER, ignore_errors=True)
    run_ranks(2, train_to_step_6, [*ARGUMENTS, f"--run.folder={FOLDER}"], start_group=False)
    (FOLDER / ".running").unlink()
    (FOLDER / ".run_id").write_text(f"{NAME}\n")
    (FOLDER / "checkpoints" / ".lease").unlink()
    (manifest,) = FOLDER.glob("checkpoints/*/MANIFEST.json")
    manifest.write_bytes(encode_manifest({**json.loads(manifest.read_bytes())["manifest"], "run": NAME}))
