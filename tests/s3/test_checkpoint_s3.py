"""Checkpoints on a real S3 server, and on one that misbehaves."""

import os

from checkpoint import s3
from checkpoint.manager import committed
from checkpoint.stores import Store, open_store
from tests.distributed.checkpoint_runs import load_run, same, train_run
from tests.harness import run_ranks


def store_at(url: str) -> Store:
    return open_store(url, request_seconds=2, visibility_seconds=0.5)


def test_an_object_of_several_parts_comes_back(bucket, monkeypatch):
    monkeypatch.setattr(s3, "PART_BYTES", 5 << 20)  # the least that S3 takes
    data = os.urandom(23 << 20)
    store = store_at(bucket + "/a/b")
    with store.create("folder/object") as stream:
        for start in range(0, len(data), 3_000_001):
            stream.write(data[start : start + 3_000_001])
    assert store.sizes() == {"folder/object": len(data)}
    assert store.read("folder/object") == data
    view = memoryview(bytearray(1000))
    store.read_into("folder/object", 6 << 20, view)
    assert view == data[6 << 20 :][:1000]


def test_resume_from_s3_at_any_mesh(bucket):
    written = run_ranks(2, train_run, bucket + "/run", (2,), 0, 3, {"interval": 1, "keep": 2})[0]
    assert [int(name.split("-")[1]) for name in committed(store_at(bucket + "/run"))] == [3, 2]
    for mesh, size in (((2,), 2), ((3,), 3), ((2, 2), 4), ((), 1)):
        for step, loaded in run_ranks(size, load_run, bucket + "/run", mesh):
            assert step == 3
            assert same(loaded, written, but=["random"]) == []
