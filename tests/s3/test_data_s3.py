"""Training data from a real S3 server, sound and misbehaving."""

import errno
import gzip
import json
import os
import tempfile
import threading
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fsspec
import pytest
import torch

from config import Config
from data.files import Cache, Files
from data.loader import DataLoader, validation_batches
from data.prepare import prepare
from data.shards import DataError
from storage import OutageError, StoreError
from tests.corpus import data_config, write_dataset
from tests.harness import run_ranks
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
    overrides = {"data__window_blocks": 3, "comm__store_retry_seconds": 20, **overrides}
    return data_config(
        url, training__seq_len=8, training__local_batch_size=4, data__cache_folder=str(tmp_path / "cache"), **overrides
    )


def epoch_of(config: Config, rank: int = 0, size: int = 1) -> list[list[int]]:
    """A little more than one epoch of batches."""
    loader = DataLoader(config, rank, size)
    batches = [loader.next_step()[0].tokens.flatten().tolist() for _ in range(35 // size)]
    loader.close()
    return batches


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
    with pytest.raises(StoreError, match="cannot be used: No space left on device; it needs room for the blocks in"):
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
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    with pytest.raises(StoreError, match=rf"data\.cache_folder: {own} was made by another user"):
        Files("s3://bucket/set", data_config("s3://bucket/set"))
    Files("s3://bucket/set", data_config("s3://bucket/set", data__cache_folder=str(own)))


def test_a_damaged_cache_is_fetched_again(remote, tmp_path):
    config = config_of(remote, tmp_path)
    expected = epoch_of(config)
    for path in (tmp_path / "cache").glob("*.range"):
        path.write_bytes(path.read_bytes()[:-5] + b"xxxxx")
    assert epoch_of(config) == expected


def test_many_of_the_requests_fail(local, remote, tmp_path, proxy):
    faults = ("503", "expired", "reset", "cut", "flip")
    for i in range(40):
        proxy.fault(faults[i % 5], operation="get", key="arrow", skip=2 * i, times=1)
    assert epoch_of(config_of(remote, tmp_path)) == epoch_of(config_of(local, tmp_path))
    assert all(proxy.counts()[f"fault:{fault}"] for fault in faults)


def test_an_outage_is_waited_for(local, remote, tmp_path, proxy):
    loader = DataLoader(config_of(remote, tmp_path), 0, 1)
    batches = [loader.next_step()[0].tokens.flatten().tolist()]
    proxy.fault("reset")
    hit: list[int] = []

    def recover() -> None:
        hit.append(proxy.counts()["fault:reset"])
        proxy.reset()

    over = threading.Timer(1, recover)
    over.start()
    batches += [loader.next_step()[0].tokens.flatten().tolist() for _ in range(34)]
    loader.close()
    over.join()
    assert hit[0] > 0
    assert batches == epoch_of(config_of(local, tmp_path))


@pytest.mark.parametrize(
    ("fault", "kind", "match"),
    [
        ("503", OutageError, r"s3://.*/train-0000\d\.arrow: .*tried for \d+ s"),
        ("empty", OutageError, r"s3://.*/train-0000\d\.arrow: .*tried for \d+ s"),
        ("flip", DataError, r"s3://.*train-0000\d\.arrow: is damaged, .* \(block \d+\)"),  # as if on the server
    ],
)
def test_what_does_not_pass_stops_the_run_and_names_the_file(remote, tmp_path, proxy, fault, kind, match):
    loader = DataLoader(config_of(remote, tmp_path, comm__store_retry_seconds=1), 0, 1)
    proxy.fault(fault, operation="get", key="arrow")
    with pytest.raises(kind, match=match):
        loader.next_step()
    loader.close()


def test_missing_files_are_named(remote, bucket, tmp_path):
    with pytest.raises(DataError, match=r"s3://.*/nothing/manifest\.json: missing. Make a dataset with"):
        DataLoader(config_of(f"{bucket}/nothing", tmp_path), 0, 1)
    system, _ = fsspec.core.url_to_fs(remote, skip_instance_cache=True)
    system.rm_file(f"{remote}/train-00000.arrow")
    loader = DataLoader(config_of(remote, tmp_path), 0, 1)
    with pytest.raises(DataError, match=r"train-00000\.arrow: missing \(block \d+\)"):
        [loader.next_step() for _ in range(35)]
    loader.close()


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
