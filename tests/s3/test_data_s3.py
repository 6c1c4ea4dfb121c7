"""Training data from a real S3 server, sound and misbehaving."""

import errno
import gc
import gzip
import json
import os
import re
import tempfile
import threading
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import botocore.session
import fsspec
import pytest
import torch
from s3fs import S3FileSystem

from config import Config
from data import sources
from data.loader import DataLoader, validation_batches
from data.prepare import prepare
from data.shards import BadBlockError, DataError
from data.storage import Cache, DamagedError, RemoteFolder, StorageError, open_folder
from tests.corpus import data_config, write_dataset
from tests.harness import run_ranks
from tests.s3.stub import answering, only_for
from tools import verify

DOCUMENTS = [[[*range(20 * i + 1, 20 * i + 20), 0] for i in range(first, first + 24)] for first in (0, 24)]


@pytest.fixture
def local(tmp_path) -> Path:
    return write_dataset(tmp_path / "dataset", DOCUMENTS, validation=[[5, 6, 7, 0]] * 5)


@pytest.fixture
def remote(local, bucket) -> str:
    system, _ = fsspec.core.url_to_fs(bucket, skip_instance_cache=True)
    for file in local.iterdir():
        system.pipe_file(f"{bucket}/data/set/{file.name}", file.read_bytes())
    return f"{bucket}/data/set"


def config_of(url, tmp_path, **overrides) -> Config:
    overrides = {"data__window_blocks": 3, "data__retry_seconds": 20, **overrides}
    return data_config(
        url, training__seq_len=8, training__local_batch_size=4, data__cache_folder=str(tmp_path / "cache"), **overrides
    )


def epoch_of(config: Config, rank: int = 0, size: int = 1) -> list[list[int]]:
    """A little more than one epoch of batches."""
    loader = DataLoader(config, rank, size)
    batches = [loader.next_step()[0].tokens.flatten().tolist() for _ in range(35 // size)]
    loader.close()
    return batches


def steps_of(loader) -> None:
    for _ in range(35):
        loader.next_step()


def test_the_same_batches_as_from_a_folder(local, remote, tmp_path):
    assert epoch_of(config_of(remote, tmp_path)) == epoch_of(config_of(local, tmp_path))
    held_out = [list(validation_batches(config_of(url, tmp_path), 0, 1)) for url in (local, remote)]
    assert all(torch.equal(a.labels, b.labels) for a, b in zip(*held_out, strict=True))


def test_each_block_is_fetched_once_for_all_ranks_of_a_node(remote, tmp_path, proxy):
    config = config_of(remote, tmp_path)
    proxy.reset()
    alone = epoch_of(config)
    once = proxy.counts()["get"]
    assert epoch_of(config) == alone
    small = 3  # every start reads manifest.json and the tokenizer's two files
    assert proxy.counts()["get"] == once + small
    proxy.reset()
    shared = config_of(remote, tmp_path / "other")
    results = run_ranks(3, ranks_epoch, shared)
    assert [batch for turn in zip(*results, strict=True) for batch in turn] == alone[:33]
    assert proxy.counts()["get"] == once + 2 * small


def ranks_epoch(config: Config) -> list[list[int]]:
    return epoch_of(config, torch.distributed.get_rank(), 3)


def test_the_cache_keeps_its_bound_and_what_was_used_last(remote, tmp_path):
    limit = 4000
    unbounded = epoch_of(config_of(remote, tmp_path / "a"))
    assert epoch_of(config_of(remote, tmp_path, data__cache_gb=limit / 1e9)) == unbounded
    kept = list((tmp_path / "cache").glob("*.range"))
    assert 0 < sum(path.stat().st_size for path in kept) <= limit
    assert sum(path.stat().st_size for path in (tmp_path / "a" / "cache").glob("*.range")) > limit


def test_the_least_recently_used_goes_first(tmp_path):
    cache = Cache(tmp_path / "cache", 250)
    contents = {key * 24: os.urandom(100) for key in "abc"}

    def get(key):
        fetched = []
        content = cache.map(key, lambda: fetched.append(key) or contents[key], 100, zlib.crc32(contents[key]))
        assert content == contents[key]
        return bool(fetched)

    a, b, c = contents
    assert [get(a), get(b), get(a)] == [True, True, False]
    os.utime(cache.folder / f"{b}.range", (1, 1))
    assert get(c)
    assert [get(a), get(b)] == [False, True]


def test_a_disk_smaller_than_the_cache_may_be_loses_the_least_recently_used(tmp_path, monkeypatch):
    """Also what another process put there; only where nothing is left to remove is a full disk an error."""
    caches, write = [Cache(tmp_path, 10**9), Cache(tmp_path, 10**9)], Path.write_bytes

    def write_to_small_disk(path, content):
        if sum(file.stat().st_size for file in tmp_path.glob("*.range")) + len(content) > 250:
            write(path, content[:10])
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(path, content)

    def get(number, size):
        content = os.urandom(size)
        key = f"{number:024x}"
        assert caches[number % 2].map(key, lambda: content, size, zlib.crc32(content)) == content
        os.utime(tmp_path / f"{key}.range", (number, number))

    monkeypatch.setattr(Path, "write_bytes", write_to_small_disk)
    for number in range(5):
        get(number, 100)
    assert sorted(int(file.stem, 16) for file in tmp_path.glob("*.range")) == [3, 4]
    get(5, 220)
    with pytest.raises(StorageError, match="cannot be used: No space left on device; it needs room for the blocks in"):
        get(6, 300)
    assert not list(tmp_path.glob("*.tmp"))


def test_what_another_process_removes_at_once_can_still_be_used(tmp_path):
    cache, other = Cache(tmp_path / "cache", 10**9), Cache(tmp_path / "cache", 0)
    done = threading.Event()

    def remove_all():
        while not done.is_set():
            other._shrink()

    with ThreadPoolExecutor(1) as pool:
        removal = pool.submit(remove_all)
        try:
            for i in range(500):
                content = os.urandom(100)
                assert cache.map(f"{i:024x}", lambda content=content: content, 100, zlib.crc32(content)) == content
        finally:
            done.set()
        removal.result()


@pytest.mark.parametrize("kind", ["another user's", "a link"])
def test_a_cache_folder_that_another_user_made_is_not_used(tmp_path, monkeypatch, kind):
    user = os.getuid() + (kind == "another user's")
    own = tmp_path / f"titanite-data-{user}"
    own.symlink_to(tmp_path) if kind == "a link" else own.mkdir()
    monkeypatch.setattr(os, "getuid", lambda: user)
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    with pytest.raises(StorageError, match=rf"data\.cache_folder: {own} was made by another user"):
        open_folder("memory://set", data_config("memory://set").data)
    open_folder("memory://set", data_config("memory://set", data__cache_folder=str(own)).data)


def test_a_damaged_cache_is_fetched_again(remote, tmp_path):
    config = config_of(remote, tmp_path)
    expected = epoch_of(config)
    for path in (tmp_path / "cache").glob("*.range"):
        path.write_bytes(path.read_bytes()[:-5] + b"xxxxx")
    assert epoch_of(config) == expected


@pytest.mark.parametrize("fault", ["503", "500", "404", "409", "expired", "reset", "cut", "flip"])
def test_a_fifth_of_the_requests_fail(local, remote, tmp_path, proxy, fault):
    for i in range(1, 40):
        proxy.fault(fault, operation="get", key="arrow", skip=4 * i, times=1)
    assert epoch_of(config_of(remote, tmp_path)) == epoch_of(config_of(local, tmp_path))
    assert proxy.counts()[f"fault:{fault}"] >= 3


@pytest.mark.parametrize("file", ["manifest.json", "tokenizer.json", "tokenizer_config.json"])
def test_a_small_file_that_a_proxy_answers_with_an_empty_page_is_asked_for_again(remote, tmp_path, proxy, file):
    proxy.fault("empty", operation="get", key=file, times=1)
    DataLoader(config_of(remote, tmp_path), 0, 1).close()
    assert proxy.counts()["fault:empty"] == 1


def test_an_outage_is_waited_for(local, remote, tmp_path, proxy):
    loader = DataLoader(config_of(remote, tmp_path), 0, 1)
    batches = [loader.next_step()[0].tokens.flatten().tolist()]
    proxy.fault("reset")
    hit: list[int] = []

    def recover() -> None:
        hit.append(proxy.counts()["fault:reset"])
        proxy.reset()

    over = threading.Timer(3, recover)
    over.start()
    batches += [loader.next_step()[0].tokens.flatten().tolist() for _ in range(34)]
    loader.close()
    over.join()
    assert hit[0] > 0
    assert batches == epoch_of(config_of(local, tmp_path))


@pytest.mark.parametrize(("fault", "duration"), [("503", r" for \d+ s"), ("empty", r" for \d+ s"), ("bucket", "")])
def test_an_outage_that_lasts_stops_the_run_even_when_bad_blocks_are_masked(remote, tmp_path, proxy, fault, duration):
    loader = DataLoader(config_of(remote, tmp_path, data__retry_seconds=2, data__on_bad_block="mask"), 0, 1)
    proxy.fault(fault)
    with pytest.raises(StorageError, match=rf"s3://.*/train-0000\d\.arrow: cannot be read{duration}: "):
        loader.next_step()
    loader.close()


def test_a_loader_can_be_closed_during_an_outage(remote, tmp_path, proxy):
    loader = DataLoader(config_of(remote, tmp_path, data__retry_seconds=10_000), 0, 1)
    loader.next_step()
    proxy.fault("503")
    for path in (tmp_path / "cache").glob("*.range"):
        path.unlink()
    loader.load_state_dict(loader.state_dict() | {"samples": 200})  # blocks that are not here yet
    step = loader._prefetcher.submit(next, loader._steps())  # as next_step does; the read-ahead asks for blocks as well
    while not step.running() or proxy.counts().get("fault:503", 0) < 2:
        assert not step.done()
    loader.close()  # does not wait for the end of the retries
    with pytest.raises(StorageError, match="cannot be read"):
        step.result()


def test_a_block_that_is_damaged_on_the_server(local, remote, tmp_path, proxy):
    proxy.fault("flip", operation="get", key="train-00001.arrow")
    loader = DataLoader(config_of(remote, tmp_path), 0, 1)
    with pytest.raises(BadBlockError, match=r"s3://.*train-00001\.arrow, block \d+: is damaged"):
        steps_of(loader)
    loader.close()


def test_a_range_behind_the_end_of_a_cut_object_is_bad_at_once(local, remote, tmp_path, proxy):
    config = config_of(remote, tmp_path, data__retry_seconds=2, data__on_bad_block="mask")
    loader = DataLoader(config, 0, 1)
    system, _ = fsspec.core.url_to_fs(remote, skip_instance_cache=True)
    for content in ((local / "train-00001.arrow").read_bytes()[:600], b""):
        system.pipe_file(f"{remote}/train-00001.arrow", content)
        proxy.reset()
        with pytest.raises(DamagedError, match="is cut short"):
            open_folder(remote, config.data).map("train-00001.arrow", 600, 100, 0)
        assert proxy.counts()["get"] == 1
    steps_of(loader)
    loader.close()
    assert len(*loader.state_dict()["masked"].values()) > 1


def test_other_requests_that_s3_finds_invalid_say_nothing_about_the_data(bucket, tmp_path):
    folder = RemoteFolder(bucket, Cache(tmp_path, 0), retry_seconds=0)
    call, place = folder._system.call_s3, {"Bucket": bucket.removeprefix("s3://"), "Key": "x"}
    upload = call("create_multipart_upload", **place)["UploadId"]
    parts = {"Parts": [{"PartNumber": 1, "ETag": "never sent"}]}
    with pytest.raises(StorageError, match=r"Errno 22"):  # EINVAL, as for a range behind the end
        folder._repeated(
            "x", lambda: call("complete_multipart_upload", **place, UploadId=upload, MultipartUpload=parts)
        )


def test_missing_files_are_named(remote, bucket, tmp_path):
    with pytest.raises(DataError, match=r"s3://.*/nothing/manifest\.json: is missing. Make a dataset with"):
        DataLoader(config_of(f"{bucket}/nothing", tmp_path), 0, 1)
    system, _ = fsspec.core.url_to_fs(remote, skip_instance_cache=True)
    system.rm_file(f"{remote}/train-00000.arrow")
    loader = DataLoader(config_of(remote, tmp_path), 0, 1)
    with pytest.raises(BadBlockError, match=r"train-00000\.arrow, block \d+: is missing"):
        steps_of(loader)
    loader.close()


def test_validations_leave_no_clients_behind(remote, tmp_path):
    config, counts = config_of(remote, tmp_path), []
    gc.disable()
    try:
        for _ in range(3):
            assert list(validation_batches(config, 0, 1))
            gc.collect(1)  # as train.py does
            counts.append(sum(type(thing).__name__ == "AioSession" for thing in gc.get_objects()))
    finally:
        gc.enable()
    assert counts[0] == counts[1] == counts[2]


def test_without_credentials_nothing_is_retried(remote, tmp_path, monkeypatch):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    with pytest.raises(StorageError, match="Unable to locate credentials"):
        DataLoader(config_of(remote, tmp_path, data__retry_seconds=10_000), 0, 1)


@pytest.mark.parametrize("refusal", [(400, "ExpiredToken"), (403, "InvalidAccessKeyId")])
def test_credentials_that_were_renewed_in_their_file_are_used(tmp_path, monkeypatch, refusal):
    """By all readers together: a client of S3 for each, at each renewal, took 100 MB that were never given back."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))

    def write(key):
        lines = ("[default]", f"aws_access_key_id={key}", "aws_secret_access_key=s", "aws_session_token=t")
        (tmp_path / "credentials").write_text("\n".join(lines))

    key, counts = ["first"], []
    with answering(only_for(key, *refusal)) as endpoint, ThreadPoolExecutor(8) as readers:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", endpoint)
        write("first")
        S3FileSystem.clear_instance_cache()
        folder = RemoteFolder("s3://bucket/set", Cache(tmp_path, 0), retry_seconds=0)
        assert folder.read("x") == b"abc"
        key[0] = "second"
        with pytest.raises(StorageError, match=r"cannot be read for \d+ s: PermissionError"):
            folder.read("x")
        folder = RemoteFolder("s3://bucket/set", Cache(tmp_path, 0), retry_seconds=20)
        for key[0] in ("second", "third", "fourth"):
            write(key[0])
            assert set(readers.map(folder.read, "x" * 8)) == {b"abc"}
            gc.collect()
            counts.append(sum(type(thing).__name__ == "AioSession" for thing in gc.get_objects()))
    assert counts[2] < counts[0] + 8


def test_an_endpoint_that_redirects_is_named(tmp_path, monkeypatch):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "key")
    with answering(lambda request: (301, {}, b"<Error><Code>PermanentRedirect</Code></Error>")) as endpoint:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", endpoint)
        S3FileSystem.clear_instance_cache()
        with pytest.raises(StorageError, match=r"^s3://bucket/set/x: cannot be read: redirected .* AWS_ENDPOINT_URL"):
            RemoteFolder("s3://bucket/set", Cache(tmp_path, 0), retry_seconds=10_000).read("x")


@pytest.mark.parametrize(("default", "region", "signed_for"), [("", "", "us-east-1"), ("a", "", "a"), ("a", "b", "b")])
def test_requests_are_signed_for_the_region_of_the_environment(tmp_path, monkeypatch, default, region, signed_for):
    for name, value in (("AWS_DEFAULT_REGION", default), ("AWS_REGION", region)):
        monkeypatch.setenv(name, value) if value else monkeypatch.delenv(name, raising=False)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "key")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    regions = []

    def answer(request):
        regions.append(request.headers["Authorization"].split("/")[2])
        return 200, {"ETag": '"e"'}, b"abc"

    with answering(answer) as endpoint:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", endpoint)
        S3FileSystem.clear_instance_cache()
        assert RemoteFolder("s3://bucket/set", Cache(tmp_path, 0), retry_seconds=0).read("x") == b"abc"
        (unit,) = sources.plan_units(sources.list_files(["s3://bucket/a.txt"]))
        assert list(sources.documents(unit, "text")) == ["abc"]
    assert len(regions) >= 3
    assert set(regions) == {signed_for}


def test_prepare_reads_s3_and_verify_checks_what_lies_there(bucket, tmp_path, capsys):
    texts = [f"document {i} " + "words and more words " * (i % 7) for i in range(200)]
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
    system, _ = fsspec.core.url_to_fs(bucket, skip_instance_cache=True)
    (tmp_path / "in").mkdir()
    for name, content in (("a.jsonl", lines), ("b.jsonl.gz", gzip.compress(lines))):
        system.pipe_file(f"{bucket}/in/{name}", content)
        (tmp_path / "in" / name).write_bytes(content)
    prepare([f"{bucket}/in"], str(tmp_path / "s3"), vocab_size=300, processes=2)
    prepare([str(tmp_path / "in")], str(tmp_path / "local"), vocab_size=300, processes=1)
    made = [{file.name: file.read_bytes() for file in (tmp_path / name).iterdir()} for name in ("s3", "local")]
    assert made[0] == made[1]
    for name, content in made[0].items():
        system.pipe_file(f"{bucket}/out/{name}", content)
    verify.main([f"{bucket}/out"])
    assert "no faults" in capsys.readouterr().out
    damaged = bytearray(made[0]["train-00000.arrow"])
    damaged[1000] ^= 1
    system.pipe_file(f"{bucket}/out/train-00000.arrow", bytes(damaged))
    with pytest.raises(SystemExit, match="faults: 1"):
        verify.main([f"{bucket}/out"])


def test_a_source_that_is_written_anew_while_it_is_prepared_is_refused(bucket):
    """A unit that is read by another process than the one that listed it would be of the other file."""
    system, _ = fsspec.core.url_to_fs(bucket, skip_instance_cache=True)
    system.pipe_file(f"{bucket}/in/a.txt", b"first")
    (unit,) = sources.plan_units(sources.list_files([f"{bucket}/in"]))
    assert list(sources.documents(unit, "text")) == ["first"]
    system.pipe_file(f"{bucket}/in/a.txt", b"other")
    S3FileSystem.clear_instance_cache()
    with pytest.raises(DataError, match=f"^{bucket}/in/a.txt: was changed while it was read"):
        list(sources.documents(unit, "text"))


@pytest.mark.parametrize("key", ["in/a::b.txt", "in/a.txt?versionId=1.txt"])
def test_a_key_that_a_url_cannot_spell_is_refused(bucket, key):
    name, endpoint = bucket.removeprefix("s3://"), os.environ["AWS_ENDPOINT_URL_S3"]
    client = botocore.session.get_session().create_client("s3", region_name="us-east-1", endpoint_url=endpoint)
    client.put_object(Bucket=name, Key=key, Body=b"x")
    with pytest.raises(DataError, match=re.escape(f"--source {bucket}/in: {name}/{key}: cannot be named by a URL")):
        sources.list_files([f"{bucket}/in"])
