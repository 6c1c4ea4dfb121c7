"""Checkpoints on a real S3 server, and behind a proxy that makes it misbehave."""

import os
import random
import time

import pytest
import torch
import torch.distributed as dist

from checkpoint import s3
from checkpoint.hf import export_model, import_model
from checkpoint.retention import committed, remove_checkpoints
from checkpoint.s3 import S3Store
from checkpoint.stores import CheckpointError, open_store
from data.tokenizer import train_tokenizer
from tests.distributed.checkpoint_kills import survive_kills
from tests.distributed.checkpoint_runs import Run, load_run, same, train_run
from tests.harness import run_ranks
from tests.unit.test_llama import hf_model

# Short waits, so that what is never answered is soon given up.
WAITS = {"request_timeout_seconds": 10, "visibility_seconds": 1.0, "interval": 1, "keep": 2}
DAMAGES = int(os.environ.get("DAMAGES", "12"))


def store_at(url: str) -> S3Store:
    store = open_store(url, request_seconds=2, visibility_seconds=0.5)
    assert isinstance(store, S3Store)
    return store


def steps_in(url: str) -> list[int]:
    return [int(name.split("-")[1]) for name in committed(store_at(url))]


@pytest.fixture
def two_steps(bucket):
    """A bucket with checkpoints of step 1 and 2."""
    Run(bucket, **WAITS).train(0, 2)
    return bucket


@pytest.fixture
def quick(monkeypatch):
    """No pause between the attempts of a request."""
    monkeypatch.setattr(s3.time, "sleep", lambda seconds: None)


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
    written = run_ranks(2, train_run, bucket + "/run", (2,), 0, 3, {"interval": 1, "keep": 2, "mode": "async"})[0]
    assert steps_in(bucket + "/run") == [3, 2]
    for mesh, size in (((3,), 3), ((), 1)):
        for step, loaded in run_ranks(size, load_run, bucket + "/run", mesh):
            assert step == 3
            assert same(loaded, written, but=["random"]) == []


def test_killed_at_random_moments_of_saves(bucket):
    kills = int(os.environ.get("KILLS", "6"))
    assert survive_kills(bucket, kills, "sync") >= kills // 6  # kills between saves prove nothing


def test_every_damage_is_found_and_named_and_the_one_before_is_used(two_steps, caplog):
    """Flipped, cut off, deleted, in turn, in any file, anywhere; loaded by one run again and again."""
    store, rng, run = store_at(two_steps), random.Random(0), Run(two_steps, **{**WAITS, "visibility_seconds": 0.0})
    newest = committed(store)[0]
    before = Run(two_steps + "/reference", interval=100)
    before.train(0, 1)
    expected = before.everything()
    files = sorted(store.sizes(newest))
    for number in range(DAMAGES):
        file, kind = files[number % len(files)], ("flip", "cut", "delete")[number // len(files) % 3]
        if kind == "delete" and file.endswith("MANIFEST.json"):
            continue  # then it does not exist
        intact = store.read(file)
        position = rng.randrange(len(intact))
        damaged = intact[:position] + bytes([intact[position] ^ 1 << rng.randrange(8)]) + intact[position + 1 :]
        if kind == "delete":
            store.remove([file])
        else:
            store.put(file, damaged if kind == "flip" else intact[:position])
        caplog.clear()
        assert run.checkpoint.load() == 1, (kind, file, position)
        assert same(run.everything(), expected) == []
        assert file in caplog.text
        store.put(file, intact)
    assert run.checkpoint.load() == 2


# ---------------------------------------------------------------- a store that shows things late


def _on_own_view(endpoints, function, *arguments):
    os.environ["AWS_ENDPOINT_URL_S3"] = endpoints[dist.get_rank()]
    return function(*arguments)


@pytest.mark.parametrize("views", ["others", "all"])
def test_late_views_of_writes_and_removals(bucket, proxy, views):
    """Every rank sees the others' (or even its own) objects 2 s late: saves, retention and loads go on alike."""
    straight = run_ranks(2, train_run, bucket + "/straight", (2,), 0, 5, {"interval": 100})
    proxy.lag(2.0, views)
    settings = {**WAITS, "visibility_seconds": 10.0}
    run_ranks(2, _on_own_view, proxy.endpoints, train_run, bucket + "/run", (2,), 0, 3, settings)
    time.sleep(2.1)  # the manifest; until it is seen, a new run would rightly take the one before
    resumed = run_ranks(2, _on_own_view, proxy.endpoints, train_run, bucket + "/run", (2,), 3, 5, settings)
    for ours, theirs in zip(resumed, straight, strict=True):
        assert same(ours, theirs) == []
    assert proxy.counts()["stale"] > 0


def test_data_seen_later_than_its_manifest_is_waited_for(bucket, proxy):
    proxy.lag(2.0)
    run_ranks(2, _on_own_view, proxy.endpoints, _save_then_load_on_the_other_view, proxy.endpoints, bucket)
    assert proxy.counts()["stale"] > 0


def _save_then_load_on_the_other_view(endpoints, url):
    """Rank 1 loads, through a view that lags, what rank 0 tells it of."""
    settings = {**WAITS, "visibility_seconds": 10.0}
    Run(url, (2,), **settings).train(0, 1)
    again = Run(url, (2,), seed=9, **settings)
    assert again.checkpoint.load() == 1


# ---------------------------------------------------------------- requests that fail


@pytest.mark.parametrize(
    ("fault", "operation"),
    [
        ("503", ".*"),
        ("500", ".*"),
        ("reset", ".*"),
        ("reset_after", "put|get|list|delete"),
        ("cut", "get|list"),
        ("flip", "get"),
    ],
)
def test_passing_faults_are_survived(bucket, proxy, quick, fault, operation):
    """Every third request or so fails, in bursts of two; the result is as if none had."""
    straight = Run(bucket + "/straight", interval=100)
    straight.train(0, 3)
    for skip in range(2, 60, 7):
        proxy.fault(fault, operation, skip=skip, times=1 if fault == "flip" else 2)
    run = Run(bucket + "/run", **WAITS)
    run.train(0, 2)
    resumed = Run(bucket + "/run", seed=3, **WAITS)
    assert resumed.checkpoint.load() == 2
    resumed.train(2, 3)
    assert same(resumed.everything(), straight.everything()) == []
    assert proxy.counts()[f"fault:{fault}"] > 0


@pytest.mark.parametrize(
    ("fault", "operation"),
    [
        ("503", "upload_part"),
        ("reset_after", "upload_part"),
        ("complete_error", "complete_multipart"),
        ("reset_after", "complete_multipart"),
    ],
)
def test_passing_faults_of_large_objects_are_survived(bucket, proxy, monkeypatch, quick, fault, operation):
    monkeypatch.setattr(s3, "PART_BYTES", 5 << 20)
    data = os.urandom(12 << 20)
    proxy.fault(fault, operation, times=2)
    store = store_at(bucket)
    with store.create("object") as stream:
        stream.write(data)
    assert store.read("object") == data
    assert proxy.counts()[f"fault:{fault}"] == 2


@pytest.mark.parametrize("operation", ["upload_part", "complete_multipart"])
def test_a_failed_large_object_leaves_nothing(bucket, proxy, monkeypatch, quick, operation):
    monkeypatch.setattr(s3, "PART_BYTES", 5 << 20)
    store = store_at(bucket)
    proxy.fault("500", operation)
    with pytest.raises(CheckpointError, match="failed 5 times"), store.create("object") as stream:
        stream.write(os.urandom(12 << 20))
    assert store.sizes() == {}
    assert "Uploads" not in store.client.list_multipart_uploads(Bucket=store.bucket)


def test_begun_uploads_are_dropped_once_old_and_none_of_others(bucket):
    store = store_at(f"{bucket}/run")
    own = {f"run/{kind}-00000001-0123456789ab/x" for kind in ("step", "model")}
    others = {"run-2/step-00000001-0123456789ab/x", "run/notes/x"}
    for key in own | others:
        store.client.create_multipart_upload(Bucket=store.bucket, Key=key)

    def begun():
        return store.client.list_multipart_uploads(Bucket=store.bucket)["Uploads"]

    ages = [time.time() - upload["Initiated"].timestamp() for upload in begun()]  # moto's clock stands still in 2010
    store.abort_uploads(max(ages) + 3600)
    assert {upload["Key"] for upload in begun()} == own | others
    store.abort_uploads(min(ages) - 3600)
    assert {upload["Key"] for upload in begun()} == others


@pytest.mark.parametrize("operation", ["put", "get", "list"])
def test_requests_never_answered_end_in_a_clear_error_in_bounded_time(bucket, proxy, quick, operation):
    run = Run(bucket, **WAITS)
    run.train(0, 1)
    proxy.fault("hang", operation)
    impatient = {**WAITS, "request_timeout_seconds": 1}
    started = time.monotonic()
    with pytest.raises(CheckpointError, match=r"s3://.*failed 5 times.*[Tt]imeout"):
        Run(bucket, **impatient).train(1, 2) if operation == "put" else Run(bucket, **impatient).checkpoint.load()
    assert time.monotonic() - started < 5 * 1 + 10  # 5 attempts of 1 s, and much slack
    assert proxy.counts()["fault:hang"] >= 5
    proxy.reset()
    assert Run(bucket, **WAITS).checkpoint.load() == 1


@pytest.mark.parametrize("failing_rank", [0, 1])
def test_a_store_that_fails_for_one_rank_fails_the_save_on_all(bucket, proxy, failing_rank):
    proxy.fault("403", "put", view=failing_rank)
    messages = run_ranks(2, _on_own_view, proxy.endpoints, _failing_save, bucket)
    assert messages[0] == messages[1]
    assert "not allowed" in messages[0]
    assert steps_in(bucket) == []


def _failing_save(url):
    with pytest.raises(CheckpointError) as caught:
        Run(url, (2,), **WAITS).train(0, 1)
    return str(caught.value)


def test_a_store_that_cannot_be_reached_is_no_reason_to_fall_back(two_steps, proxy, quick):
    """Falling back is for damage: an outage must not cost steps."""
    proxy.fault("503", "get", key="distcp")
    with pytest.raises(CheckpointError, match="failed 5 times"):
        Run(two_steps, **WAITS).checkpoint.load()
    proxy.reset()
    assert Run(two_steps, **WAITS).checkpoint.load() == 2


def test_a_lost_answer_to_the_commit_is_harmless(bucket, proxy, quick):
    """The manifest was written, the answers got lost: the save fails, the checkpoint is there, and whole."""
    proxy.fault("reset_after", "put", key="MANIFEST")
    run = Run(bucket, **WAITS)
    with pytest.raises(CheckpointError):
        run.train(0, 1)
    proxy.reset()
    resumed = Run(bucket, seed=3, **WAITS)
    assert resumed.checkpoint.load() == 1
    assert torch.equal(resumed.model.head.weight, run.model.head.weight)


def test_what_cannot_be_removed_is_said(bucket, proxy, caplog):
    proxy.fault("403", "delete")
    Run(bucket, **WAITS).train(0, 3)
    assert "old checkpoints could not be removed" in caplog.text
    assert steps_in(bucket) == [3, 2, 1]


def test_a_save_that_removes_one_lists_twice(two_steps, proxy):
    Run(two_steps, **WAITS).train(2, 3)
    assert steps_in(two_steps) == [3, 2]
    counts = proxy.counts()
    assert (counts["list"] - 1, counts["list_uploads"]) == (2, 1)  # one is the test's own


def test_removal_takes_the_manifest_first(two_steps, proxy):
    store = store_at(two_steps)
    proxy.fault("403", "delete", skip=1)
    with pytest.raises(CheckpointError, match="not allowed"):
        remove_checkpoints(store, [committed(store)[1]], store.sizes())
    assert steps_in(two_steps) == [2]


def test_no_credentials_and_no_bucket_are_told_apart(bucket, monkeypatch, tmp_path):
    with pytest.raises(CheckpointError, match="no such object or bucket"):
        Run(bucket + "-of-nobody", **WAITS).checkpoint.load()
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(CheckpointError, match="AWS_ACCESS_KEY_ID"):
        Run(bucket, **WAITS).checkpoint.load()


def test_stock_fsspec_reader_reads_ours(two_steps):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

    run = Run(two_steps, **WAITS)
    run.checkpoint.load()
    state = {"model": {name: torch.zeros_like(value) for name, value in run.model.state_dict().items()}}
    place = f"{two_steps}/{committed(store_at(two_steps))[0]}"
    reader = FsspecReader(place, endpoint_url=os.environ["AWS_ENDPOINT_URL_S3"])
    dcp.load(state, storage_reader=reader, no_dist=True)
    assert all(torch.equal(state["model"][name], value) for name, value in run.model.state_dict().items())


def test_a_hugging_face_model_goes_in_and_out(bucket, tmp_path):
    train_tokenizer(["some text"], 300).save(tmp_path)
    hf_model("llama3").save_pretrained(tmp_path, max_shard_size="100KB")
    import_model(tmp_path, f"{bucket}/models/imported", check="tensors")
    export_model(
        f"{bucket}/models/imported",
        tmp_path / "back",
        dtype="float32",
        file_bytes=100_000,
        tokenizer=None,
        max_positions=0,
        check="logits",
    )
    assert len(list((tmp_path / "back").glob("*.safetensors"))) > 1
