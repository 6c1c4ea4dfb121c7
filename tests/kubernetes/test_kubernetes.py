"""launch/kubernetes without a cluster: its image is built, and its pods train, are killed and evicted.

./run_tests.sh long
"""

import json
import os
import subprocess
import time
from base64 import b64encode
from pathlib import Path

import pytest
import yaml
from s3fs import S3FileSystem

from storage.records import read_records
from tests.runs import how_it_ended
from tests.s3.server import create_bucket, s3_environment, s3_server
from tests.unit.test_manifests import load, pod_and_arguments
from tools.audit import prove

HERE = Path(__file__).parent
STORE = Path(os.environ.get("TEST_CONTAINERS", ".cache/containers")).absolute()
PODMAN = ("podman", "--root", STORE / "store", "--runroot", STORE / "runroot")
IMAGE = "localhost/titanite"
JOB = "llama3-8b"
OPERATORS = yaml.safe_load((HERE / "operators.yaml").read_text())
KILL = ("kill", "--signal=KILL")  # as where its machine is gone
EVICT = ("stop", "--time=120")  # SIGTERM, and SIGKILL after the manifests' grace period
pytestmark = [pytest.mark.long, pytest.mark.timeout(3600)]


def call(*words):
    return subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True).stdout


@pytest.fixture(scope="module", autouse=True)
def image():
    os.environ["CONTAINERS_CONF"] = str(STORE / "containers.conf")
    built = subprocess.run([HERE / "image.sh", STORE], stdout=subprocess.PIPE, text=True)
    if built.returncode == 77:
        pytest.skip(built.stdout)
    built.check_returncode()


@pytest.fixture
def secret(tmp_path, monkeypatch):
    """Two nodes, and an S3 server with data; the credentials that the secret holds."""
    nodes = [HERE / "nodes.sh", tmp_path / "hosts"]
    monkeypatch.setenv("S3_TEST_SERVER", "moto")
    with subprocess.Popen(nodes, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout and process.stdout.readline()  # noqa: PT018
        with s3_server("10.231.77.1") as endpoint:  # this machine, as pods see it
            for name, value in s3_environment(endpoint).items():
                monkeypatch.setenv(name, value)
            S3FileSystem.clear_instance_cache()  # of the test before, whose server is gone
            create_bucket(endpoint, "bucket")
            S3FileSystem().put("tests/golden/dataset/", "bucket/data/web/", True)
            yield s3_environment(endpoint)


def overlay(arguments):
    """A pod's arguments for a small model on a CPU, with the variables that Kubernetes fills in."""
    text = "\n".join([*arguments, *OPERATORS["small"]])
    for old, new in OPERATORS["filled in"].items():
        text = text.replace(old, new)
    return text.split("\n")


class Pod:
    """A pod of two, with the environment that its operator gives it."""

    def __init__(self, kind, node, runs, secret):
        _, arguments = pod_and_arguments(kind)
        self.name = OPERATORS[kind]["name"] + node
        environment = OPERATORS[kind]["environment"] | secret
        words = [HERE / "pod.sh", STORE, self.name, node, runs, runs.parent / "hosts"]
        words += [f"--env={name}={value}" for name, value in environment.items()]
        with runs.with_name(f"{self.name}.log").open("a") as log:
            self.process = subprocess.Popen([*words, IMAGE, *overlay(arguments)], stdout=log, stderr=log)

    def end(self, how):
        """KILL or EVICT it. Returns its exit code."""
        subprocess.run([*PODMAN, *how, self.name], capture_output=True)
        return self.process.wait()


def start_pods(kind, runs, secret, step):
    """Two pods, once the run has logged so many steps, with those that a kill made void. Fails if one ends before."""
    pods = [Pod(kind, node, folder, secret) for node, folder in zip("01", runs, strict=True)]
    while len(call(*PODMAN, "ps", "--quiet").split()) < 2 or len(read_records(runs[0] / JOB / "metrics.jsonl")) < step:
        assert [pod.process.poll() for pod in pods] == [None, None], "see their logs in the test's folder"
        time.sleep(0.1)
    return pods


def test_the_image_starts_and_holds_no_more_than_it_needs():
    assert "--training.steps=" in call(*PODMAN, "run", "--rm", IMAGE, "--standalone", "train.py", "--help")
    found = {*call(*PODMAN, "run", "--rm", "--entrypoint=ls", IMAGE, "-A").split()}
    assert {"train.py", "launch", "train_configs", ".venv"} <= found
    assert not {"tests", "benchmarks", "docs", ".git"} & found


def test_an_appwrapper_goes_on_after_every_loss_of_a_pod(secret, tmp_path):
    """Its controller ends all pods when one fails, and starts all again, unless with the terminal code, 100."""
    runs = tmp_path / "runs"
    ways = ((1, KILL, 0, 137), (1, KILL, 15, 137), (1, EVICT, 35, 75), (0, KILL, 60, 137), (0, EVICT, 80, 75))
    for node, how, step, code in ways:  # at step 0 they still meet
        pods = start_pods("PyTorchJob", [runs, runs], secret, step)
        assert pods.pop(node).end(how) == code
        assert pods[0].end(EVICT) == 75
    pods = start_pods("PyTorchJob", [runs, runs], secret, 0)
    assert [pod.process.wait() for pod in pods] == [0, 0]
    starts = read_records(runs / JOB / "starts.jsonl")
    assert starts[-1]["after"]["kind"] == starts[-3]["after"]["kind"] == "stopped", "after an eviction"
    assert how_it_ended(runs / JOB)["kind"] == "finished"
    assert prove(runs / JOB)[0].startswith("120 steps")


def test_a_trainjob_goes_on_with_a_pod_that_is_started_again(secret, tmp_path):
    """Each with its own disk."""
    runs = [tmp_path / "0", tmp_path / "1"]
    pods = start_pods("TrainJob", runs, secret, 20)
    assert pods[1].end(KILL) == 137
    pods[1] = Pod("TrainJob", "1", runs[1], secret)
    assert [pod.process.wait() for pod in pods] == [0, 0]
    assert how_it_ended(runs[1] / JOB)["kind"] == "finished"
    assert read_records(runs[0] / JOB / "starts.jsonl")[-1]["after"]["kind"] == "lost"
    assert "resumed from" in (tmp_path / "llama3-8b-node-0-0.log").read_text()


def test_podman_plays_the_pod_of_one_node(secret, tmp_path):
    """Podman 4.3 wants the secret's data as JSON. What is wrong is terminal."""
    manifest = load("kubernetes/pod.yaml")
    container = manifest["spec"]["containers"][0]
    del container["resources"]
    container |= {"image": IMAGE, "args": overlay(container["args"])}
    encoded = {name: b64encode(value.encode()).decode() for name, value in secret.items()}
    (tmp_path / "secret").write_text(json.dumps(encoded))
    call(*PODMAN, "secret", "create", "--driver=file", "titanite-s3", tmp_path / "secret")
    try:
        for code in ("0", "100"):
            (tmp_path / "pod.yaml").write_text(yaml.safe_dump(manifest))
            call(*PODMAN, "kube", "play", "--replace", "--network=host", tmp_path / "pod.yaml")
            assert call(*PODMAN, "wait", "llama3-8b-titanite").strip() == code
            container["args"].append("--training.stepz=9")
    finally:
        call(*PODMAN, "pod", "rm", "--force", JOB)
        call(*PODMAN, "secret", "rm", "titanite-s3")
