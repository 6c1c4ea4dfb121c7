"""docs/tutorial.md, executed as written."""

import json
import os
import re
import subprocess
import sys
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
    script = "set -euo pipefail\n" + "\n".join(blocks)
    done = subprocess.run(["bash", "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]

    run = tmp_path / "outputs" / "tutorial"
    starts = [json.loads(line) for line in (run / "starts.jsonl").read_text().splitlines()]
    assert [start["world_size"] for start in starts] == [1, 2]
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in rows if row["loss"] is not None]
    assert losses[-1] < losses[0] - 0.7
    assert "resumed from" in done.stderr
    assert "\nproven\n" in done.stdout
    assert "\ntutorial  loss " in done.stdout, "validate.py names the dataset"
    assert done.stdout.count('{"prompt": "') == 2
    assert "logits equal transformers'" in done.stderr + done.stdout
    assert (tmp_path / "outputs" / "tutorial-hf" / "model.safetensors").is_file()
    page = (tmp_path / "outputs" / "compare.html").read_text()
    assert '"tutorial-slow"' in page
