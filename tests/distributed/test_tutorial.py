"""docs/tutorial.md, executed as written but for the amount of text."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```bash\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def test_the_tutorial_works_as_written(tmp_path: Path) -> None:
    for entry in ROOT.iterdir():  # the repository, but for what its commands write
        if entry.name not in ("outputs", "datasets") and not entry.name.startswith("."):
            (tmp_path / entry.name).symlink_to(entry)
    blocks = BLOCK.findall((ROOT / "docs" / "tutorial.md").read_text())
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    packages = " ".join(
        f"{sysconfig.get_path('stdlib')}/{name}" for name in ("asyncio", "email", "encodings", "http", "unittest")
    )
    script = "set -euo pipefail\n" + "\n".join(blocks)
    assert "--source stdlib " in script
    script = script.replace("--source stdlib ", f"--source {packages} ")
    config = "--config=train_configs/tutorial.toml"
    script = script.replace(config, f"{config} --training.seq_len=32 --model.n_layers=2")
    done = subprocess.run(["bash", "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]

    run = tmp_path / "outputs" / "tutorial"
    starts = [json.loads(line) for line in (run / "starts.jsonl").read_text().splitlines()]
    assert [start["world_size"] for start in starts] == [1, 2]
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in rows if row["loss"] is not None]
    assert losses[-1] < losses[0] - 0.5
    assert "resumed from" in done.stderr
    assert "\nproven\n" in done.stdout
    assert "\ntutorial  loss " in done.stdout, "validate.py names the dataset"
    assert done.stdout.count('{"prompt": "') == 2
    assert "logits equal those of transformers" in done.stderr + done.stdout
    assert (tmp_path / "outputs" / "tutorial-hf" / "model.safetensors").is_file()
    page = (tmp_path / "outputs" / "compare.html").read_text()
    assert '"tutorial-slow"' in page

    check_run_script(tmp_path, environment)


def check_run_script(folder: Path, environment: dict[str, str]) -> None:
    """./run_llama_train.sh, which is the README's first command, in a checkout that is set up."""
    for name in ("run_llama_train.sh", "setup.sh"):  # a script that is a link works where it leads
        (folder / name).unlink()
    shutil.copy(ROOT / "run_llama_train.sh", folder)
    (folder / "setup.sh").write_text("#!/bin/sh\n")
    (folder / "setup.sh").chmod(0o755)
    (folder / ".venv").symlink_to(sys.prefix)

    def start(*words: str, **more: str) -> subprocess.CompletedProcess[str]:
        environ = {**environment, "NGPU": "1", **more}
        return subprocess.run(["./run_llama_train.sh", *words], cwd=folder, env=environ, capture_output=True, text=True)

    assert start("--help").stdout.startswith("usage: train.py")
    wrong = start("--training.stpes=3")
    assert (wrong.returncode, wrong.stderr.count("\n")) == (2, 1)
    assert "did you mean --training.steps" in wrong.stderr
    wrong = start(NGPU="auto")
    assert (wrong.returncode, wrong.stderr) == (2, "error: NGPU=auto: must be a number of processes, at least 1\n")
    wrong = start("--training.steps=3", "--config")
    assert (wrong.returncode, wrong.stderr) == (2, "error: --config: needs a value, as in --config=PATH\n")
    words = ["--data.datasets=datasets/tutorial", "--run.folder=outputs/script", "--training.steps=2"]
    words += ["--lr_scheduler.warmup_steps=0", "--validation.enable=false", "--validation.sample_tokens=0"]
    # The file named last is the one that counts, however it is named; and as many processes as share its batch.
    done = start("--config", "train_configs/tutorial.toml", *words, CONFIG_FILE="train_configs/no_such.toml", NGPU="")
    assert done.returncode == 0, done.stderr[-3000:]
    assert "done: step 2 of 2" in done.stderr
    # On text of one's own, named from where one stands; then the commands that the run names at its end.
    mine = folder / "mine"
    mine.mkdir()
    for number in range(9):
        (mine / f"{number} note.md").write_text(f"# Note {number}\n\n" + f"Words of note {number}.\n" * 300)
    assert "error: --data: must name" in start("--data").stderr
    words = ["--model.flavor=tiny", "--training.steps=2", "--training.local_batch_size=2", "--run.folder=outputs/mine"]
    words += ["--lr_scheduler.warmup_steps=0"]
    command = [str(folder / "run_llama_train.sh"), "--data", "*note.md", "0 note.md", *words]
    done = subprocess.run(command, cwd=mine, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    start, end = done.stderr.split("step 1/2")[0], done.stderr[done.stderr.index("done: step 2 of 2") :]
    assert len(start.partition("starting: ")[2].splitlines()) <= 12, start
    assert "bits per byte" in end
    assert len(end.splitlines()) <= 8
    for line in end.splitlines()[2:]:
        command = shlex.split(line.split(":  ", 1)[1].replace("steps=4", "steps=3"))
        again = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
        assert again.returncode == 0, again.stderr[-3000:]
