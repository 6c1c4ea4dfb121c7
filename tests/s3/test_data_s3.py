"""Training data from a real S3 server, sound and misbehaving."""

import os
import zlib
from contextlib import closing
from pathlib import Path

import fsspec
import pytest
import torch

from data.files import Cache
from data.loader import DataLoader, validation_batches
from data.shards import DataError
from storage import OutageError
from tests.corpus import data_config, prepare, write_dataset
from tests.harness import run_ranks
from tools import verify

DOCUMENTS = [[[*range(20 * i + 1, 20 * i + 20), 0] for i in range(first, first + 24)] for first in (0, 24)]


@pytest.fixture
def local(tmp_path):
    return write_dataset(tmp_path / "dataset", DOCUMENTS, validation=[[5, 6, 7, 0]] * 5)


@pytest.fixture
def remote(local, bucket):
    system, _ = fsspec.core.url_to_fs(bucket, skip_instance_cache=True)
    for file in local.iterdir():
        system.pipe_file(f"{bucket}/data/set/{file.name}", file.read_bytes())
    return f"{bucket}/data/set"


def config_of(url, tmp_path, **overrides):
    overrides = {"data__window_blocks": 3, "comm__store_retry_seconds": 20, **overrides}
    return data_config(
        url, training__seq_len=8, training__local_batch_size=4, data__cache_folder=str(tmp_path / "cache"), **overrides
    )


def epoch_of(config, rank=0, size=1):
    """A little more than one epoch of batches."""
    with closing(DataLoader(config, rank, size)) as loader:
        return [loader.next_step()[0].tokens.flatten().tolist() for _ in range(35 // size)]


def test_the_same_batches_as_from_a_folder_also_while_many_requests_fail(local, remote, tmp_path, proxy):
    assert epoch_of(config_of(remote, tmp_path)) == epoch_of(config_of(local, tmp_path))
    held_out = [list(validation_batches(config_of(url, tmp_path), 0, 1)) for url in (local, remote)]
    assert all(torch.equal(a.labels, b.labels) for a, b in zip(*held_out, strict=True))
    faults = ("503", "reset", "cut", "flip")
    for i, fault in enumerate(faults * 10):
        proxy.fault(fault, operation="get", key="arrow", skip=2 * i, times=1)
    assert epoch_of(config_of(remote, tmp_path / "other")) == epoch_of(config_of(local, tmp_path))
    assert all(proxy.counts()[f"fault:{fault}"] for fault in faults)


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


def ranks_epoch(config):
    return epoch_of(config, torch.distributed.get_rank(), 3)


def test_damage_in_the_cache_is_fetched_again(remote, tmp_path):
    expected = epoch_of(config_of(remote, tmp_path))
    for path in (tmp_path / "cache").glob("*.range"):
        path.write_bytes(path.read_bytes()[:-5] + b"xxxxx")
    assert epoch_of(config_of(remote, tmp_path)) == expected


def test_the_cache_keeps_its_bound_and_the_least_recently_used_goes_first(tmp_path):
    cache = Cache(tmp_path / "cache", 250)
    content = os.urandom(100)
    fetched = []

    def get(key):
        assert cache.map(24 * key, lambda: fetched.append(key) or content, 100, zlib.crc32(content)) == content

    for key in "aba":
        get(key)
    os.utime(cache.folder / f"{24 * 'b'}.range", (1, 1))
    for key in "cab":
        get(key)
    assert fetched == ["a", "b", "c", "b"]
    assert len(list(cache.folder.glob("*.range"))) == 2


def test_what_another_process_removes_at_once_can_still_be_used(tmp_path, monkeypatch):
    cache, other = Cache(tmp_path / "cache", 10**9), Cache(tmp_path / "cache", 0)
    replace = Path.replace

    def replace_and_remove(path, target):
        replace(path, target)
        other._shrink()

    monkeypatch.setattr(Path, "replace", replace_and_remove)
    content = os.urandom(100)
    assert cache.map(24 * "a", lambda: content, 100, zlib.crc32(content)) == content
    assert not [*cache.folder.glob("*.range")]


@pytest.mark.parametrize(
    ("fault", "kind", "match"),
    [
        ("503", OutageError, r"s3://.*/train-0000\d\.arrow: .*tried for \d+ s"),
        ("flip", DataError, r"s3://.*train-0000\d\.arrow: is damaged, .* \(block \d+\)"),  # as if on the server
    ],
)
def test_what_does_not_pass_stops_the_run_and_names_the_file(remote, tmp_path, proxy, fault, kind, match):
    loader = DataLoader(config_of(remote, tmp_path, comm__store_retry_seconds=1), 0, 1)
    proxy.fault(fault, operation="get", key="arrow")
    with pytest.raises(kind, match=match):
        loader.next_step()
    loader.close()


def test_prepare_reads_s3_and_verify_checks_what_lies_there(bucket, remote, tmp_path):
    (tmp_path / "a.jsonl").write_text("".join(f'{{"text": "document {i}"}}\n' for i in range(200)))
    system, _ = fsspec.core.url_to_fs(bucket, skip_instance_cache=True)
    system.pipe_file(f"{bucket}/in/a.jsonl", (tmp_path / "a.jsonl").read_bytes())
    for name, source in (("s3", f"{bucket}/in"), ("local", f"{tmp_path}/a.jsonl")):
        prepare([source], str(tmp_path / name), vocab_size=300, processes=1)
    manifests = [(tmp_path / name / "manifest.json").read_bytes() for name in ("s3", "local")]
    assert manifests[0] == manifests[1], "which have the checksums of all"
    verify.main([remote])
    shard = f"{remote}/train-00000.arrow"
    system.pipe_file(shard, system.cat_file(shard).replace(b"\1\0\2\0", b"\1\0\3\0"))
    with pytest.raises(SystemExit, match="faults: 1"):
        verify.main([remote])
