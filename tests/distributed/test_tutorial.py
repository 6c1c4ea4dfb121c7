"""docs/tutorial.md, executed as written but for the amount of text."""

import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from storage.records import read_records

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```bash\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PACKAGES = ("asyncio", "email", "encodings", "http", "unittest")
PATH = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
ENVIRONMENT = {**os.environ, "PATH": PATH, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def call(folder, *command, **more):
    return subprocess.run(command, cwd=folder, env=ENVIRONMENT | more, capture_output=True, text=True)


@pytest.fixture
def checkout(tmp_path):
    """The repository, but for what its commands write."""
    for entry in ROOT.iterdir():
        if entry.name not in ("outputs", "datasets") and not entry.name.startswith("."):
            (tmp_path / entry.name).symlink_to(entry)
    return tmp_path


@pytest.mark.long
def test_the_tutorial_works_as_written(checkout):
    blocks = BLOCK.findall((ROOT / "docs" / "tutorial.md").read_text())
    script = "\n".join(["set -euo pipefail", *blocks])
    packages = [f"{sysconfig.get_path('stdlib')}/{name}" for name in PACKAGES]
    config = "--config=train_configs/tutorial.toml"
    replaced = {
        "--source stdlib ": f"--source {' '.join(packages)} ",
        config: f"{config} --training.seq_len=32 --model.n_layers=2 --training.steps=40",
    }
    for old, new in replaced.items():
        assert old in script
        script = script.replace(old, new)
    done = call(checkout, "bash", "-c", script)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]

    run = checkout / "outputs" / "tutorial"
    assert [start["world_size"] for start in read_records(run / "starts.jsonl")] == [1, 2]
    losses = [row["loss"] for row in read_records(run / "metrics.jsonl") if row["loss"] is not None]
    assert losses[-1] < losses[0] - 0.5
    assert "resumed from" in done.stderr
    assert "\nproven\n" in done.stdout
    assert "\ntutorial  loss " in done.stdout, "validate.py names the dataset"
    assert done.stdout.count('{"prompt": "') == 2
    assert "logits equal those of transformers" in done.stderr + done.stdout
    assert (checkout / "outputs" / "tutorial-hf" / "model.safetensors").is_file()
    assert '"outputs/tutorial-slow"' in (checkout / "outputs" / "compare.html").read_text()


def test_the_run_script_trains_on_text_and_says_what_to_do_next(checkout):
    """./run_llama_train.sh, which is the README's first command, in a checkout that is set up."""
    for name in ("run_llama_train.sh", "setup.sh"):  # a script that is a link works where it leads
        (checkout / name).unlink()
    shutil.copy(ROOT / "run_llama_train.sh", checkout)
    (checkout / "setup.sh").write_text("#!/bin/sh\n")
    (checkout / "setup.sh").chmod(0o755)
    (checkout / ".venv").symlink_to(sys.prefix)
    script = str(checkout / "run_llama_train.sh")

    for words, said in (
        (["--training.steps=3", "--config"], "error: --config: needs a value, as in --config=PATH\n"),
        (["--data"], "error: --data: must name folders, files or globs of text\n"),
    ):
        wrong = call(checkout, script, *words)
        assert (wrong.returncode, wrong.stderr) == (2, said)
    wrong = call(checkout, script, NGPU="auto")
    assert (wrong.returncode, wrong.stderr) == (2, "error: NGPU=auto: must be a number of processes, at least 1\n")
    assert call(checkout, script, "--help").stdout.startswith("usage: train.py")

    # On text named from where one stands; then the commands that the run names at its end.
    mine = checkout / "mine"
    mine.mkdir()
    for number in range(9):
        (mine / f"{number} note.md").write_text(f"# Note {number}\n\n" + f"Words of note {number}.\n" * 300)
    # A trial, shorter than the warm-up.
    words = ["--model.flavor=tiny", "--training.epochs=0.1", "--training.local_batch_size=2"]
    done = call(mine, script, "--data", "*note.md", "0 note.md", *words, "--run.folder=outputs/my run")
    assert done.returncode == 0, done.stderr[-3000:]
    end = done.stderr[done.stderr.index("done: step") :].splitlines()
    assert "bits per byte" in end[1]
    assert len(end) == 5
    for line in end[2:]:
        again = call(checkout, *shlex.split(line.split(":  ", 1)[1]))
        assert again.returncode == 0, again.stderr[-3000:]
