"""Datasets prepared by a Dask cluster of three processes are those of one process, whatever is killed."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import fsspec
import pytest

from config import TitaniteError
from data.prepare import readers, workers
from data.prepare.output import PLAN, Output
from data.shards import digest
from data.tokenizer import train_tokenizer
from tests.corpus import prepare
from tests.dask_cluster import Cluster
from tests.s3.server import s3_environment

pytest.importorskip("distributed", reason="pip install -r requirements-cluster.txt")
# A client that kills itself at the third result of one pass.
KILLED_CLIENT = """
import os, sys
from data.prepare import main, readers, workers
real = workers.cluster_map
def killed_map(client):
    def run(function, tasks):
        for number, result in enumerate(real(client)(function, tasks)):
            if number == 2 and sys.argv[1] in repr(function): os.kill(os.getpid(), 9)
            yield result
    return run
workers.cluster_map = killed_map
readers.UNIT_BYTES = 4000
main(sys.argv[2:])
"""


@pytest.fixture(scope="module")
def clusters(s3_endpoint, tmp_path_factory):
    """One with three workers, and one without."""
    folders = [tmp_path_factory.mktemp("cluster") for _ in range(2)]
    one, other = (Cluster(folder, s3_environment(s3_endpoint)) for folder in folders)
    with one, other:
        one.add_workers(3)
        yield one, other


@pytest.fixture(scope="module")
def options(tmp_path_factory):
    """A source of many units, one bad record among it, and what makes several shards of it."""
    folder = tmp_path_factory.mktemp("in")
    texts = [f"{i} naïve 日本語 " * (1 + 7 * i % 19) for i in range(150)]
    lines = [json.dumps({"text": text}) for text in texts]
    (folder / "in.jsonl").write_text("\n".join([*lines, "bad\n"]))
    train_tokenizer(texts, 300).save(folder)
    sizes = {"shard_mb": 0.004, "block_mb": 0.001, "validation_fraction": 0.2, "skip_bad": 1}
    return {"source": f"{folder}/in.jsonl", "tokenizer": str(folder), **sizes}


@pytest.fixture(scope="module")
def expected(options, tmp_path_factory):
    """What one process makes of it."""
    folder = tmp_path_factory.mktemp("one")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(readers, "UNIT_BYTES", 4000)
        run(options, f"{folder}/out", processes=1)
    return contents(f"{folder}/out")


@pytest.fixture(params=["folder", "s3"])
def output(request, bucket, tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "UNIT_BYTES", 4000)
    return f"{bucket}/sets/out" if request.param == "s3" else f"{tmp_path}/out"


def run(options, output, **more):
    given = options | more
    prepare([given.pop("source")], output, **given)


def contents(output):
    """Everything there but the lock."""
    system, path = fsspec.core.url_to_fs(output, skip_instance_cache=True)
    return {name.removeprefix(path): system.cat_file(name) for name in system.find(path) if ".lock" not in name}


def test_a_killed_client_goes_on_and_a_killed_worker_costs_its_task(clusters, options, expected, output):
    function, trapped = ("_write_bucket", "_write_part") if "s3:" in output else ("_tokenise_unit", "write_shard")
    cluster = clusters[0]
    trap = cluster.folder / f"kill-{trapped}"
    trap.touch()
    given = options | {"output": output, "cluster": cluster.address}
    words = [f"--{name.replace('_', '-')}={value}" for name, value in given.items()]
    command = [sys.executable, "-c", KILLED_CLIENT, function, *words]
    killed = subprocess.run(command, env=cluster.environment, capture_output=True, text=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert "/manifest.json" not in contents(output)
    run(options, output, cluster=cluster.address)
    assert not trap.exists()
    assert contents(output) == expected
    assert len(expected) > 8


@pytest.mark.parametrize(
    ("given", "broken", "message"),
    [
        (
            {"cluster": "tcp://127.0.0.1:1"},
            {"SCHEDULER_SECONDS": 1},
            "--cluster tcp://127.0.0.1:1: no scheduler answers there",
        ),
        ({"cluster": "missing.json"}, {}, "--cluster missing.json: must be tcp://host:port, or the file that"),
        (
            {},
            {"code_digest": lambda: "other", "_run": lambda task, function, digest: function(task)},
            "worker tcp://.*: has another version of Titanite, or of numpy",
        ),
    ],
)
def test_what_would_fail_is_said_first(clusters, options, tmp_path, monkeypatch, given, broken, message):
    for name, stand_in in broken.items():
        monkeypatch.setattr(workers, name, stand_in)
    with pytest.raises(TitaniteError, match=message):
        run(options, **{"output": f"{tmp_path}/out", "cluster": clusters[0].address} | given)
    assert not [name for name in contents(f"{tmp_path}/out") if "/unit-" in name]


def test_a_late_writer_writes_nothing_where_another_preparation_has_begun(output, tmp_path):
    """Such as a worker that its scheduler had given up."""
    (tmp_path / "out" / ".parts").mkdir(parents=True)
    Output(output).put(PLAN, b"new")
    late = Output(output, plan=digest(b"old"))
    for act in (lambda: late.put("train-00000.arrow", b"old"), late.check_plan):
        with pytest.raises(TitaniteError, match="another preparation has begun or ended there, or not all machines"):
            act()
    assert contents(output) == {f"/{PLAN}": b"new"}


def test_a_worker_with_other_code_that_comes_late_is_named(clusters):
    from distributed import Client

    with Client(clusters[0].address, set_as_default=False) as client:
        task = client.submit(workers._run, -1, function=abs, digest=workers.code_digest())
        assert task.result() == 1
        late = client.submit(workers._run, -1, function=abs, digest="another")
        with pytest.raises(TitaniteError, match=r"worker tcp://.*another version"):
            late.result()


@pytest.mark.parametrize("output", ["s3"], indirect=True)
def test_a_lost_scheduler_is_one_line_and_the_command_goes_on_without(
    clusters, options, expected, output, monkeypatch, caplog
):
    cluster, other = clusters
    real = workers.cluster_map

    def losing_map(client):
        return lambda *work: (cluster.scheduler.kill() or result for result in real(client)(*work))

    with monkeypatch.context() as patch:
        patch.setattr(workers, "cluster_map", losing_map)
        with pytest.raises(TitaniteError, match="the cluster's scheduler is gone; the same command goes on from there"):
            run(options, output, cluster=cluster.address)
        assert "Traceback" not in caplog.text
        patch.setattr(workers, "WORKERS_SECONDS", 1)
        with pytest.raises(TitaniteError, match="has no worker after 1 s; start some"):
            run(options, output, cluster=other.address)
        assert "has no worker yet; waiting" in caplog.text
    run(options, output, processes=1)
    assert contents(output) == expected


def test_code_is_every_file_and_package_that_decides_bytes(monkeypatch):
    read = []

    def note(source):
        read.append(Path(source).name)
        return b""

    monkeypatch.setattr(Path, "read_bytes", note)
    monkeypatch.setattr(workers, "version", lambda package: note(package).decode())
    workers.code_digest.__wrapped__()
    assert {"config.py", "tokenizer.py", "passes.py", "s3.py", "numpy", "pyarrow", "tokenizers"} <= {*read}
