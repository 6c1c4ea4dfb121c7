"""launch/slurm.sh on a real Slurm of two nodes: a preemption, a hang, a study.

./run_tests.sh long -k slurm; without `long` a preemption only.
"""

import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from storage.records import read_records
from tests.corpus import write_dataset
from tests.slurm.lab import missing, slurm
from tools.audit import prove
from tools.study import conduct
from tools.sweep import main as sweep
from tools.sweep import read_sweep

ROOT = Path(__file__).parents[2]
PATIENCE_SECONDS = 300
DEAD = {"FAILED", "CANCELLED", "TIMEOUT", "PREEMPTED", "NODE_FAIL", "OUT_OF_MEMORY"}
SETTINGS = (
    "--training.seq_len=16",
    "--training.local_batch_size=1",
    "--training.param_dtype=float32",
    "--validation.enable=false",
    "--metrics.tensorboard=false",
    "--metrics.log_interval=1",
    "--checkpoint.interval=1000",
)
pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())


class Cluster:
    """A Slurm of two nodes, and one job on it."""

    def __init__(self, folder, environment, dataset):
        self.folder, self.environment, self.dataset, self.job = folder, environment, dataset, ""

    def call(self, *command):
        done = subprocess.run(command, cwd=ROOT, env=self.environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def submit(self, run, *settings, **environment):
        self.log = self.folder / f"{run.name}.log"
        export = ",".join(["ALL", f"RUN_FOLDER={run}", *(f"{name}={value}" for name, value in environment.items())])
        options = ["--partition=low", "--gpus-per-node=0", f"--output={self.log}", f"--export={export}"]
        words = [*SETTINGS, "--model.flavor=tiny", f"--data.datasets={self.dataset}", *settings]
        self.job = self.call("sbatch", "--parsable", *options, "launch/slurm.sh", *words)

    def field(self, name):
        return self.call("scontrol", "show", "job", self.job).partition(f"{name}=")[2].split()[0]

    def wait(self, ready, what, dead=DEAD):
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not ready():
            if time.monotonic() > deadline or self.field("JobState") in dead:
                job = self.call("scontrol", "show", "job", self.job)
                tail = ["tail", "--bytes=3000", self.log, self.folder / "slurm" / "slurmctld.log"]
                said = subprocess.run(tail, capture_output=True, text=True).stdout  # the job may have no log yet
                raise AssertionError(f"waited for {what}\n{job}\n{said}")
            time.sleep(0.5)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cluster")
    documents = [[[1 + (i * j) % 90 for j in range(40)] + [0] for i in range(300)]]
    dataset = write_dataset(folder / "set", documents, vocab_size=100)
    with slurm(folder / "slurm") as environment:
        yield Cluster(folder, environment, dataset)


def steps(run):
    return [row["step"] for row in read_records(run / "metrics.jsonl")]


def test_a_preempted_job_is_requeued_and_resumes(cluster, tmp_path):
    run = tmp_path / "run"
    cluster.submit(run, "--training.steps=100000")
    cluster.wait(lambda: max(steps(run), default=0) >= 5, "five steps")
    cluster.call("sbatch", "--partition=high", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=true")
    cluster.wait(lambda: cluster.field("Restarts") == "1", "the job to be requeued")
    # Slurm starts it again two minutes later, which it need not do here. But a node refuses a job that it was told to
    # kill in the same second ("Job credential revoked"). So the nodes are to be done with it, and the start is to be in
    # a later second.
    idle = ("sinfo", "-h", "-o", "%T", "-p", "low")
    cluster.wait(lambda: cluster.field("JobState") == "PENDING" and cluster.call(*idle) == "idle", "idle nodes")
    cluster.call("scontrol", "update", f"jobid={cluster.job}", "StartTime=now+2")
    preempted_at = max(steps(run))
    cluster.wait(lambda: max(steps(run)) >= preempted_at + 5, "five steps more")
    (run / "stop").touch()
    cluster.wait(lambda: cluster.field("JobState") == "COMPLETED", "the job to be done")
    assert "resumed from" in cluster.log.read_text()
    starts = read_records(run / "starts.jsonl")
    assert [start["world_size"] for start in starts] == [2, 2]
    assert (starts[1]["after"]["kind"], starts[1]["after"]["start_again"]) == ("stopped", True)
    assert json.loads((run / "exit.json").read_text())["kind"] == "stopped"
    trained = steps(run)
    assert trained == list(range(1, len(trained) + 1)), "no step was trained twice"
    assert prove(run)[0].startswith(f"{len(trained)} steps")


@pytest.mark.long
def test_a_hang_is_requeued_where_torchrun_may_not_start_the_job_again(cluster, tmp_path):
    run = tmp_path / "run"
    cluster.submit(run, "--training.steps=100000", "--comm.train_timeout_seconds=5", MAX_RESTARTS="0")
    cluster.wait(lambda: max(steps(run), default=0) >= 5, "five steps")
    ranks = [path for path in Path("/proc").glob("[0-9]*") if str(run).encode() in _read(path / "cmdline")]
    (stopped,) = (path for path in ranks if b"\0RANK=1\0" in _read(path / "environ"))
    os.kill(int(stopped.name), signal.SIGSTOP)
    cluster.wait(lambda: cluster.field("Restarts") == "1", "the job to be requeued")
    cluster.call("scancel", cluster.job)
    record = json.loads((run / "exit.json").read_text())
    assert (record["kind"], record["start_again"]) in (("hung", True), ("lost", True))


@pytest.mark.long
def test_a_study_is_an_array_of_jobs(cluster, tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("SLURM_CONF", cluster.environment["SLURM_CONF"])
    settings = [setting.removeprefix("--") for setting in SETTINGS if "param_dtype" not in setting]
    (tmp_path / "base.toml").write_text(
        f'training = {{steps = 20, param_dtype = "float32"}}\ndata.datasets = ["{cluster.dataset}"]'
    )
    file = tmp_path / "sweep.toml"
    lines = ['base = "base.toml"', f'folder = "{tmp_path / "runs"}"', *settings, "[grid]", "run.seed = [0, 1, 2]"]
    file.write_text("\n".join(lines))
    words = [str(file), "--slurm=--nodes=1 --partition=low --gpus-per-node=0", "--at-once=2"]
    folder, chains = read_sweep(file)
    runs = [run for (run,) in chains]
    plan = folder, [runs[:2], runs[2:]]
    assert conduct("ladder", "", words, lambda file: plan, print) == 0
    assert conduct("ladder", "", words, lambda file: plan, print) == 0, "it waits for the first, and finds all done"
    cluster.job = capfd.readouterr().out.rpartition("batch job ")[2].partition("\n")[0]
    done = ("squeue", "--noheader", f"--jobs={cluster.job}", "--states=all", "--format=%T")
    cluster.log = folder / f"slurm-{cluster.job}_1.log"
    cluster.wait(lambda: set(cluster.call(*done).split()) == {"COMPLETED"}, "all runs", dead=set())
    assert [len(read_records(run.folder / "starts.jsonl")) for run in runs] == [1, 1, 1]
    assert [steps(run.folder) for run in runs] == [list(range(1, 21))] * 3
    ended = [(run.folder / "exit.json").stat().st_mtime for run in runs[:2]]
    assert ended[0] < (runs[1].folder / "config.toml").stat().st_mtime < ended[1], "one after another"
    assert sweep([str(file), "--page"]) == 0
    assert re.search("^all +3 ", capfd.readouterr().out, re.MULTILINE), "all are in the mean"


def _read(file):
    try:
        return file.read_bytes()
    except OSError:  # the process has ended
        return b""
