"""launch/kubernetes without a cluster: its image is built, and its pods train, are killed and evicted.

./run_tests.sh long
"""

import base64
import copy
import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from s3fs import S3FileSystem

from storage.records import read_records
from tests.corpus import write_dataset
from tests.kubernetes.pods import FOLDER, GATEWAY, IMAGE, PODMAN, Pod, build_image, call, configure, missing, network
from tests.ports import free_port
from tests.s3.server import ACCESS_KEY, SECRET_KEY, create_bucket, s3_environment
from tools.audit import prove

PATIENCE_SECONDS = 400
STEPS = 150
BUCKET = "titanite-pods"
JOB = "llama3-8b"
# In place of an 8B model on GPUs; nothing else of the manifests is changed.
SMALL = (
    "--config=train_configs/debug.toml",
    "--model.flavor=tiny",
    f"--training.steps={STEPS}",
    "--training.seq_len=16",
    "--training.local_batch_size=1",
    "--training.global_batch_size=8",
    "--training.param_dtype=float32",
    "--model.vocab_size=0",
    "--compile.enable=false",
    "--validation.enable=false",
    "--metrics.log_interval=1",
    "--checkpoint.interval=20",
)
pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(bool(missing()), reason=missing()),
]


@pytest.fixture(scope="module", autouse=True)
def image(tmp_path_factory: pytest.TempPathFactory) -> None:
    configure()
    # build_image(tmp_path_factory.mktemp("image"))


@pytest.fixture
def secret(tmp_path: Path) -> Iterator[dict[str, str]]:
    """Two nodes with their DNS in tmp_path/hosts, and an S3 server with data; what the secret holds."""
    endpoint = f"http://{GATEWAY}:{free_port()}"
    server = [sys.executable, "-m", "moto.server", "-H", GATEWAY, "-p", endpoint.rpartition(":")[2]]
    documents = [[[1 + (i * j) % 90 for j in range(40)] + [0] for i in range(2000)]]
    dataset = write_dataset(tmp_path / "set", documents, vocab_size=100)
    pods = [[f"{JOB}-worker-{i}", f"{JOB}-node-0-{i}", f"{JOB}-node-0-{i}.{JOB}"] for i in range(2)]
    with (
        network(pods, tmp_path / "hosts"),
        subprocess.Popen(server, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process,
    ):
        try:
            wait(lambda: answers(endpoint), "the S3 server")
            create_bucket(endpoint, BUCKET)
            store = S3FileSystem(key=ACCESS_KEY, secret=SECRET_KEY, endpoint_url=endpoint, use_listings_cache=False)
            store.put(f"{dataset}/", f"{BUCKET}/data/web/", recursive=True)
            yield s3_environment(endpoint)
        finally:
            process.kill()


def answers(endpoint: str) -> bool:
    try:
        urllib.request.urlopen(endpoint, timeout=5).close()
    except OSError as error:
        return isinstance(error, urllib.error.HTTPError)
    return True


def wait(ready: Callable[[], bool], what: str, pods: Sequence[Pod] = ()) -> None:
    """Until it is so. Fails if that takes long, or a pod ends."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not ready():
        if time.monotonic() > deadline or any(pod.process.poll() is not None for pod in pods):
            raise AssertionError("\n".join([f"waited for {what}", *(pod.log.read_text()[-3000:] for pod in pods)]))
        time.sleep(0.1)


def load(name: str) -> dict[str, Any]:
    return yaml.safe_load((FOLDER / name).read_text().replace("BUCKET", BUCKET))


def volumes_of(folder: Path, hosts: Path, runs: Path) -> dict[str, Path]:
    """Of one pod. Any user may write there, as into a volume of OpenShift the pod's group."""
    volumes = {"scratch": folder / "scratch", "runs": runs}
    for place in volumes.values():
        place.mkdir(parents=True, exist_ok=True)
        place.chmod(0o777)
    return volumes | {"hosts": hosts}


def small(arguments: list[str]) -> list[str]:
    """A pod's arguments for a small model on a CPU."""
    kept = [word for word in arguments if not word.startswith(("--config=", "--training.global_batch_size="))]
    return [*kept, *SMALL]


def pods_of_pytorchjob(manifest: dict[str, Any], secret: dict[str, str], folder: Path) -> list[Pod]:
    """What the training operator makes of a PyTorchJob with two workers (its envvar.go, elastic.go)."""
    job = manifest["spec"]["components"][0]["template"]
    elastic = job["spec"]["elasticPolicy"]
    spec = copy.deepcopy(job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"])
    (container,) = spec["containers"]
    container["args"] = small(container["args"])
    assert container["envFrom"] == [{"secretRef": {"name": "titanite-s3"}}]
    environment = secret | {
        "PYTHONUNBUFFERED": "0",
        "PET_RDZV_BACKEND": elastic["rdzvBackend"],
        "PET_RDZV_ENDPOINT": f"{job['metadata']['name']}-worker-0:23456",
        "PET_RDZV_ID": elastic["rdzvId"],
        "PET_NNODES": "2:2",
        "PET_NPROC_PER_NODE": "1",
        "PET_MAX_RESTARTS": str(elastic["maxRestarts"]),
    }
    pods = []
    for number in range(2):
        volumes = volumes_of(folder / f"worker-{number}", folder / "hosts", folder / "runs")
        pods.append(Pod(f"{job['metadata']['name']}-worker-{number}", number, spec, environment, volumes))
    return pods


def pods_of_trainjob(manifest: dict[str, Any], secret: dict[str, str], folder: Path) -> list[Pod]:
    """What Kubeflow Trainer makes of a TrainJob with two nodes (its plugin torch.go). Each has a disk for its runs."""
    trainer = manifest["spec"]["trainer"]
    (replicated,) = manifest["spec"]["runtimePatches"][0]["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    spec = copy.deepcopy(replicated["template"]["spec"]["template"]["spec"])
    (container,) = spec["containers"]
    container["command"] = trainer["command"]
    container["args"] = small(trainer["args"])
    name = manifest["metadata"]["name"]
    environment = {
        "PET_NNODES": "2",
        "PET_NPROC_PER_NODE": "1",
        "PET_MASTER_ADDR": f"{name}-node-0-0.{name}",
        "PET_MASTER_PORT": "29500",
    }
    for entry in trainer["env"]:
        environment[entry["name"]] = secret[entry["valueFrom"]["secretKeyRef"]["key"]]
    pods = []
    for number in range(2):
        volumes = volumes_of(folder / f"node-{number}", folder / "hosts", folder / f"node-{number}" / "runs")
        more = {"PET_NODE_RANK": str(number)}
        pods.append(Pod(f"{name}-node-0-{number}", number, spec, environment | more, volumes))
    return pods


def start(pods: Sequence[Pod], folder: Path) -> None:
    for pod in pods:
        pod.start(folder / f"{pod.name}.log")


def reached(run: Path, step: int) -> Callable[[], bool]:
    return lambda: max((row["step"] for row in read_records(run / "metrics.jsonl")), default=0) >= step


def ended(run: Path) -> dict[str, Any]:
    return json.loads((run / "exit.json").read_text())


def test_the_image_starts_and_holds_no_more_than_it_needs() -> None:
    said = call(*PODMAN, "run", "--rm", "--network=none", IMAGE, "--standalone", "train.py", "--help")
    assert "--training.steps=" in said
    found = call(*PODMAN, "run", "--rm", "--network=none", "--entrypoint=ls", IMAGE, "-A").split()
    assert {"train.py", "launch", "train_configs", ".venv"} <= set(found)
    assert not {"tests", "benchmarks", "docs", ".git"} & set(found)


def test_an_appwrapper_goes_on_after_every_loss_of_a_pod(secret: dict[str, str], tmp_path: Path) -> None:
    """The controller ends all pods when one fails, and starts all again unless it ended with a terminal code."""
    manifest = load("pytorchjob-appwrapper.yaml")
    run = tmp_path / "runs" / JOB
    terminal = manifest["metadata"]["annotations"]["workload.codeflare.dev.appwrapper/terminalExitCodes"].split(",")
    ends = []
    for hit, until_step, evicts in ((1, 0, False), (1, 25, False), (1, 60, True), (0, 100, False)):
        pods = pods_of_pytorchjob(manifest, secret, tmp_path)
        start(pods, tmp_path)
        wait(lambda: all(pod.is_running() for pod in pods), "two pods", pods)  # noqa: B023
        if until_step:  # otherwise while they still meet
            wait(reached(run, until_step), f"step {until_step}", pods)
        if evicts:
            codes = [pods[hit].evict()]
        else:
            pods[hit].kill()
            codes = [pods[hit].process.wait()]
        codes += [pod.evict() for pod in pods if pod is not pods[hit]]
        assert not set(map(str, codes)) & set(terminal)
        assert codes == [75 if evicts else 137, 75]
        if until_step:
            ends.append(ended(run)["kind"])
    assert ends[1] == "stopped"
    assert {ends[0], ends[2]} <= {"lost", "stopped"}
    pods = pods_of_pytorchjob(manifest, secret, tmp_path)
    start(pods, tmp_path)
    assert [pod.process.wait(PATIENCE_SECONDS) for pod in pods] == [0, 0]
    assert ended(run)["kind"] == "finished"
    assert [record["world_size"] for record in read_records(run / "starts.jsonl")] == [2] * 4
    for name, value in secret.items():
        os.environ[name] = value
    assert prove(run)[0].startswith(f"{STEPS} steps")


def test_a_trainjob_goes_on_with_a_pod_that_is_started_again(secret: dict[str, str], tmp_path: Path) -> None:
    manifest = load("trainjob.yaml")
    run = tmp_path / "node-0" / "runs" / JOB
    pods = pods_of_trainjob(manifest, secret, tmp_path)
    start(pods, tmp_path)
    wait(reached(run, 30), "step 30", pods)
    pods[1].kill()
    assert pods[1].process.wait() == 137
    pods[1].start(pods[1].log)
    assert [pod.process.wait(PATIENCE_SECONDS) for pod in pods] == [0, 0]
    assert ended(run)["kind"] == ended(tmp_path / "node-1" / "runs" / JOB)["kind"] == "finished"
    starts = read_records(run / "starts.jsonl")
    assert len(starts) == 2
    assert starts[1]["after"]["kind"] == "lost"
    assert "resumed from" in pods[0].log.read_text()


def test_a_mistake_is_terminal(secret: dict[str, str], tmp_path: Path) -> None:
    manifest = load("pytorchjob-appwrapper.yaml")
    container = manifest["spec"]["components"][0]["template"]["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]
    container["spec"]["containers"][0]["args"].append("--training.stepz=9")
    pods = pods_of_pytorchjob(manifest, secret, tmp_path)
    start(pods, tmp_path)
    assert [pod.process.wait(PATIENCE_SECONDS) for pod in pods] == [100, 100]
    assert "training.stepz" in pods[0].log.read_text()


def test_podman_plays_the_pod_of_one_node(secret: dict[str, str], tmp_path: Path) -> None:
    """Podman 4.3 wants the secret's data as JSON, which other versions read as well."""
    manifest = load("pod.yaml")
    (container,) = manifest["spec"]["containers"]
    container["args"] = [word.replace("nproc-per-node=8", "nproc-per-node=2") for word in small(container["args"])]
    container["image"] = IMAGE
    del container["resources"]
    (tmp_path / "pod.yaml").write_text(yaml.safe_dump(manifest))
    encoded = {name: base64.b64encode(value.encode()).decode() for name, value in secret.items()}
    (tmp_path / "secret").write_text(json.dumps(encoded))
    call(*PODMAN, "secret", "create", "titanite-s3", tmp_path / "secret")
    try:
        call(*PODMAN, "kube", "play", "--network=ns:/run/netns/titanite-0", tmp_path / "pod.yaml")
        code = call(*PODMAN, "wait", f"{JOB}-{container['name']}").strip()
        said = subprocess.run([*PODMAN, "logs", f"{JOB}-{container['name']}"], capture_output=True, text=True).stderr
        assert code == "0", said
        assert f"done: step {STEPS} of {STEPS}" in said
    finally:
        call(*PODMAN, "pod", "rm", "--force", JOB)
        call(*PODMAN, "secret", "rm", "titanite-s3")
