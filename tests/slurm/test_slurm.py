"""launch/slurm.sh on a real Slurm of two nodes: with a mistake; submitted, preempted, requeued, resumed, done.

python -m pytest tests/slurm
"""

import json
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.corpus import write_dataset
from tests.slurm.lab import missing, slurm
from tools.audit import prove

ROOT = Path(__file__).parents[2]
PATIENCE_SECONDS = 600
DEAD = {"FAILED", "CANCELLED", "TIMEOUT", "PREEMPTED", "NODE_FAIL", "OUT_OF_MEMORY"}


@pytest.mark.skipif(bool(missing()), reason=missing())
def test_a_preempted_job_is_requeued_and_resumes(tmp_path: Path) -> None:
    documents = [[[1 + (i * j) % 90 for j in range(40)] + [0] for i in range(300)]]
    dataset = write_dataset(tmp_path / "set", documents, vocab_size=100)
    arguments = ["--training.seq_len=16", "--training.local_batch_size=1", "--training.steps=150"]
    arguments += ["--training.param_dtype=float32"]
    arguments += ["--validation.enable=false", "--metrics.tensorboard=false", "--metrics.log_interval=1"]
    arguments += ["--checkpoint.interval=1000", f"--data.datasets={dataset}", f"--run.outputs={tmp_path / 'out'}"]
    with slurm(tmp_path / "slurm") as environment:

        def call(*command: str) -> str:
            done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
            return done.stdout.strip()

        def steps() -> list[int]:
            files = list((tmp_path / "out").glob("*/metrics.jsonl"))
            return [json.loads(line)["step"] for file in files for line in file.read_text().split("\n")[:-1]]

        def state() -> str:
            """Of the job, as squeue and sacct name it."""
            return call("scontrol", "show", "job", job).partition("JobState=")[2].split()[0]

        def wait(ready: Callable[[], bool], what: str) -> None:
            deadline = time.monotonic() + PATIENCE_SECONDS
            while not ready():
                if time.monotonic() > deadline or state() in DEAD:
                    logs = [
                        tmp_path / "log",
                        tmp_path / "slurm" / "slurmctld.log",
                        tmp_path / "slurm" / "slurmd-n1.log",
                    ]
                    texts = [path.read_text()[-3000:] for path in logs if path.exists()]
                    raise AssertionError(
                        "\n".join([f"waited for {what}", call("scontrol", "show", "job", job), *texts])
                    )
                time.sleep(0.1)

        options = ["--partition=low", "--gpus-per-node=0", f"--output={tmp_path / 'log'}"]
        mistyped = ["sbatch", "--wait", *options, "launch/slurm.sh", "--training.stepz=150"]
        ended = subprocess.run(mistyped, cwd=ROOT, env=environment, capture_output=True, timeout=PATIENCE_SECONDS)
        assert ended.returncode == 2, "it is not queued again, though Slurm ended one of its torchruns by SIGTERM"
        job = call("sbatch", "--parsable", *options, "launch/slurm.sh", *arguments)
        wait(lambda: max(steps(), default=0) >= 5, "five steps")
        call("sbatch", "--partition=high", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=true")
        wait(lambda: "Restarts=1" in call("scontrol", "show", "job", job), "the job to be requeued")
        # Slurm starts it again two minutes later, which it need not do here. But a node refuses a job that it
        # was told to kill in the same second ("Job credential revoked"): so the nodes are to be done with it, and the
        # start is to be in a later second.
        wait(lambda: state() == "PENDING" and call("sinfo", "-h", "-o", "%T", "-p", "low") == "idle", "idle nodes")
        call("scontrol", "update", f"jobid={job}", "StartTime=now+2")
        wait(lambda: state() == "COMPLETED", "the job to be done")

    log = (tmp_path / "log").read_text()
    assert "stopped after step" in log, "asked to stop, it saved"
    assert "resumed from" in log
    (run,) = (tmp_path / "out").iterdir()
    starts = [json.loads(line) for line in (run / "starts.jsonl").read_text().splitlines()]
    assert [start["world_size"] for start in starts] == [2, 2]
    assert starts[1]["after"]["kind"] == "stopped"
    assert json.loads((run / "exit.json").read_text())["kind"] == "finished"
    assert steps() == list(range(1, 151)), "no step was trained twice"
    assert prove(run)[0].startswith("150 steps")
