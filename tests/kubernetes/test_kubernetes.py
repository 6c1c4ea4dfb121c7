"""launch/kubernetes without a cluster: its image is built, and its pods train, are killed and evicted.

./run_tests.sh long
"""

import json
import os
import subprocess
import time
from base64 import b64encode
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from s3fs import S3FileSystem

from storage.records import read_records
from tests.corpus import write_dataset
from tests.s3.server import create_bucket, s3_environment, s3_server
from tests.unit.test_manifests import WRAPPER, load, pod_and_arguments
from tools.audit import prove

HERE = Path(__file__).parent
STORE = Path(os.environ.get("TEST_CONTAINERS", HERE.parents[1] / ".cache" / "containers"))
PODMAN = ("podman", "--root", STORE / "store", "--runroot", STORE / "runroot")
IMAGE = "localhost/titanite"
GATEWAY = "10.231.77.1"  # this machine, as pods see it
JOB = "llama3-8b"
STEPS = 120
OPERATORS = yaml.safe_load((HERE / "operators.yaml").read_text())
pytestmark = [pytest.mark.long, pytest.mark.timeout(3600)]


def call(*words: object) -> str:
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module", autouse=True)
def image() -> None:
    os.environ["CONTAINERS_CONF"] = str(STORE / "containers.conf")
    built = subprocess.run([HERE / "image.sh", STORE], capture_output=True, text=True)
    if built.returncode == 77:
        pytest.skip(built.stdout)
    assert built.returncode == 0, built.stderr[-3000:]


@pytest.fixture
def secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """Two nodes, and an S3 server with data; the credentials that the secret holds."""
    nodes = [HERE / "nodes.sh", tmp_path / "hosts"]
    monkeypatch.setenv("S3_TEST_SERVER", "moto")
    with subprocess.Popen(nodes, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout
        assert process.stdout.readline() == b"ready\n"
        with s3_server(GATEWAY) as endpoint:
            for name, value in s3_environment(endpoint).items():
                monkeypatch.setenv(name, value)
            S3FileSystem.clear_instance_cache()  # of the test before, whose server is gone
            create_bucket(endpoint, "bucket")
            documents = [[[1 + (i * j) % 90 for j in range(40)] + [0] for i in range(2000)]]
            S3FileSystem().put(
                f"{write_dataset(tmp_path / 'set', documents, vocab_size=100)}/", "bucket/data/web/", True
            )
            yield s3_environment(endpoint)


def small(arguments: list[str]) -> list[str]:
    """A pod's arguments for a small model on a CPU."""
    kept = [word.replace("BUCKET", "bucket").replace("node=8", "node=2") for word in arguments]
    return [*kept, *OPERATORS["small"]]


class Pod:
    """A pod of two, with the environment that its operator gives it."""

    def __init__(self, kind: str, node: int, folder: Path, environment: dict[str, str]):
        spec, arguments = pod_and_arguments(kind)
        (container,) = spec["containers"]
        self.grace_seconds = spec["terminationGracePeriodSeconds"]
        self.name = f"{OPERATORS[kind]['name']}{node}"
        self.log = folder / f"{self.name}.log"
        words = [HERE / "pod.sh", STORE, self.name, node, folder / "hosts", "--entrypoint=launch/node.sh"]
        for mount in container["volumeMounts"]:
            place = folder / self.name / mount["name"]
            if kind == "PyTorchJob" and mount["name"] == "runs":  # all pods see it; a TrainJob's have one each here
                place = folder / "runs"
            place.mkdir(parents=True, exist_ok=True)
            place.chmod(0o777)
            words.append(f"--volume={place}:{mount['mountPath']}")
        words += [f"--env={name}={value}" for name, value in environment.items()]
        for name in environment:
            arguments = [word.replace(f"$({name})", environment[name]) for word in arguments]
        self.command = [str(word) for word in (*words, IMAGE, *small(arguments))]
        self.start()

    def start(self) -> None:
        with open(self.log, "a") as log:
            self.process = subprocess.Popen(self.command, stdout=log, stderr=log)

    def kill(self) -> int:
        """As where its machine is gone."""
        call(*PODMAN, "kill", "--signal=KILL", self.name)
        return self.process.wait()

    def evict(self) -> int:
        """SIGTERM, and SIGKILL after the grace period."""
        subprocess.run([*PODMAN, "stop", f"--time={self.grace_seconds}", self.name], capture_output=True)
        return self.process.wait()


def start_pods(kind: str, folder: Path, secret: dict[str, str]) -> list[Pod]:
    return [Pod(kind, node, folder, OPERATORS[kind]["environment"] | secret) for node in range(2)]


def wait(ready: Callable[[], bool], pods: list[Pod]) -> None:
    """Until it is so. Fails if a pod ends."""
    while not ready():
        assert [pod.process.poll() for pod in pods] == [None, None], [pod.log.read_text() for pod in pods]
        time.sleep(0.1)


def steps(run: Path) -> int:
    """How many are logged, with those that a kill made void."""
    return len(read_records(run / "metrics.jsonl"))


def how_it_ended(run: Path) -> dict[str, Any]:
    return json.loads((run / "exit.json").read_text())


def test_the_image_starts_and_holds_no_more_than_it_needs() -> None:
    assert "--training.steps=" in call(*PODMAN, "run", "--rm", IMAGE, "--standalone", "train.py", "--help")
    found = call(*PODMAN, "run", "--rm", "--entrypoint=ls", IMAGE, "-A").split()
    assert {"train.py", "launch", "train_configs", ".venv"} <= set(found)
    assert not {"tests", "benchmarks", "docs", ".git"} & set(found)


def test_an_appwrapper_goes_on_after_every_loss_of_a_pod(secret: dict[str, str], tmp_path: Path) -> None:
    """Its controller ends all pods when one fails, and starts all again, unless with a terminal code."""
    run = tmp_path / "runs" / JOB
    terminal = int(WRAPPER["metadata"]["annotations"]["workload.codeflare.dev.appwrapper/terminalExitCodes"])
    for hit, step, code in ((1, 0, 137), (1, 15, 137), (1, 35, 75), (0, 60, 137)):  # step 0: while they still meet
        pods = start_pods("PyTorchJob", tmp_path, secret)
        wait(lambda: len(call(*PODMAN, "ps", "--quiet").split()) == 2, pods)
        wait(lambda: steps(run) >= step, pods)  # noqa: B023
        gone = pods.pop(hit)
        assert (gone.kill() if code == 137 else gone.evict()) == code != terminal
        assert pods[0].evict() == 75
    pods = start_pods("PyTorchJob", tmp_path, secret)
    assert [pod.process.wait() for pod in pods] == [0, 0]
    after = [record["after"]["kind"] for record in read_records(run / "starts.jsonl")[1:]]
    assert (after[1], how_it_ended(run)["kind"]) == ("stopped", "finished")
    assert {after[0], after[2]} <= {"lost", "stopped"}
    assert prove(run)[0].startswith(f"{STEPS} steps")


def test_a_trainjob_goes_on_with_a_pod_that_is_started_again(secret: dict[str, str], tmp_path: Path) -> None:
    pods = start_pods("TrainJob", tmp_path, secret)
    runs = [tmp_path / pod.name / "runs" / JOB for pod in pods]
    wait(lambda: steps(runs[0]) >= 20, pods)
    assert pods[1].kill() == 137
    pods[1].start()
    assert [pod.process.wait() for pod in pods] == [0, 0]
    assert [how_it_ended(run)["kind"] for run in runs] == ["finished", "finished"]
    assert [record["after"]["kind"] for record in read_records(runs[0] / "starts.jsonl")[1:]] == ["lost"]
    assert "resumed from" in pods[0].log.read_text()


def test_podman_plays_the_pod_of_one_node(secret: dict[str, str], tmp_path: Path) -> None:
    """Podman 4.3 wants the secret's data as JSON. What is wrong is terminal."""
    manifest = load("kubernetes/pod.yaml")
    (container,) = manifest["spec"]["containers"]
    container["image"] = IMAGE
    del container["resources"]
    encoded = {name: b64encode(value.encode()).decode() for name, value in secret.items()}
    (tmp_path / "secret").write_text(json.dumps(encoded))
    call(*PODMAN, "secret", "create", "--driver=file", "titanite-s3", tmp_path / "secret")
    try:
        for more, code in (([], "0"), (["--training.stepz=9"], "100")):
            container["args"] = [*small(container["args"]), *more]
            (tmp_path / "pod.yaml").write_text(yaml.safe_dump(manifest))
            call(*PODMAN, "kube", "play", "--replace", "--network=host", tmp_path / "pod.yaml")
            assert call(*PODMAN, "wait", f"{JOB}-{container['name']}").strip() == code
    finally:
        call(*PODMAN, "pod", "rm", "--force", JOB)
        call(*PODMAN, "secret", "rm", "titanite-s3")
