"""The store of datasets and checkpoints: on a real S3 server, behind a faulty proxy, and against single answers."""

import itertools
import os
import pickle
from contextlib import suppress
from pathlib import Path

import pytest

import storage
from storage import DamagedError, LocalStore, MissingError, OutageError, StoreError, open_store
from storage.s3 import S3Store
from tests.ports import free_port
from tests.s3.server import s3_environment
from tests.s3.stub import answering


def store_at(url, retry_seconds=2):
    store = open_store(url, retry_seconds)
    assert isinstance(store, S3Store)
    store.client = store.connect()  # takes a while on a busy machine, of which no wait is part
    return store


@pytest.fixture(autouse=True)
def small_parts_and_pauses(monkeypatch):
    monkeypatch.setattr(storage.s3, "PART_BYTES", 5 << 20)  # the least that S3 takes
    monkeypatch.setattr(storage.errors.random, "uniform", lambda low, high: 0.05)


@pytest.fixture
def endpoint(monkeypatch):
    """A function that makes a store at a made-up server."""

    def use(url, retry_seconds=1):
        for name, value in s3_environment(url).items():
            monkeypatch.setenv(name, value)
        return store_at("s3://bucket/run", retry_seconds)

    return use


# ---------------------------------------------------------------- on a real server


def test_an_object_of_several_parts_comes_back(bucket, monkeypatch):
    monkeypatch.setattr(storage.s3, "READ_BYTES", 3 << 20)
    data = os.urandom(23 << 20)
    store = store_at(bucket + "/a/b")
    with store.create("folder/object") as stream:
        for start in range(0, len(data), 3_000_001):
            stream.write(data[start : start + 3_000_001])
    assert store.sizes() == store.sizes("folder") == {"folder/object": len(data)}
    assert store.read("folder/object") == data
    assert store.read("folder/object", 1, 20 << 20) == data[1:][: 20 << 20]
    assert pickle.loads(pickle.dumps(store)).read("folder/object") == data  # as another rank does
    with pytest.raises(DamagedError, match=f"a/b/folder/object: ends at byte {len(data)}, the rest"):
        store.read("folder/object", 7, len(data))
    for missing in ("folder", "other/object"):
        with pytest.raises(MissingError, match=f"a/b/{missing}: missing"):
            store.read(missing)


def test_listings_of_many_pages_are_read_to_the_end(bucket):
    store, names = store_at(f"{bucket}/run"), {f"{number}/x" for number in range(5)}
    store_at(f"{bucket}/run-2").put("x", b"x")
    for name in names:
        store.put(name, b"x")
    events = store.client.meta.events
    events.register("before-parameter-build.s3.ListObjectsV2", lambda params, **_: params.update(MaxKeys=2))
    assert store.sizes() == dict.fromkeys(names, 1)


@pytest.mark.parametrize("forbidden", [None, "put", "get"])
def test_a_place_is_probed_by_a_write_and_a_read_and_the_probe_removed(bucket, proxy, forbidden):
    if forbidden:
        proxy.fault("403", forbidden)
        with pytest.raises(StoreError, match=r"\.probe-.*AccessDenied.*check what the credentials permit") as caught:
            store_at(bucket).check_writable()
        assert not isinstance(caught.value, OutageError)
    else:
        store_at(bucket).check_writable()
        counts = proxy.counts()
        assert (counts["put"], counts["get"], counts["delete"]) == (1, 1, 1)
    assert store_at(bucket).sizes() == {}


# ---------------------------------------------------------------- faults that pass


@pytest.mark.parametrize(
    ("fault", "operation"),
    [
        ("empty", "upload_part"),
        ("complete_error", "complete_multipart"),
        ("reset_after", "complete_multipart"),
    ],
)
def test_passing_faults_of_a_write_are_survived(bucket, proxy, fault, operation):
    data, store = os.urandom(12 << 20), store_at(bucket, 30)
    proxy.fault(fault, operation, times=2)
    with store.create("object") as stream:
        stream.write(data)
    assert store.read("object") == data
    assert proxy.counts()[f"fault:{fault}"] == 2


def test_a_request_that_is_never_answered_ends_in_a_clear_error(bucket, proxy, monkeypatch):
    store_at(bucket).put("object", b"abc")
    monkeypatch.setattr(storage.s3, "ANSWER_SECONDS", 0.3)
    proxy.fault("hang", "get")
    with pytest.raises(OutageError, match=r"s3://.*[Tt]imeout.*tried for"):
        store_at(bucket, 0.5).read("object")
    assert proxy.counts()["fault:hang"] >= 2  # tried again, at least once


def test_removals_are_tried_once_each_and_the_first_name_before_the_others(bucket, proxy):
    store = store_at(bucket, 60)
    for name in "abc":
        store.put(name, b"x")
    proxy.fault("503", "delete", "/a$")
    with pytest.raises(OutageError):
        store.remove(["a", "b", "c"])
    assert proxy.counts()["delete"] == 1
    store.remove(["b", "c", "gone"])
    assert set(store.sizes()) == {"a"}


# ---------------------------------------------------------------- single answers


def xml(code):
    return f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>told so</Message></Error>".encode()


@pytest.mark.parametrize(
    ("status", "body", "kind", "match"),
    [
        (301, b"<html></html>", StoreError, r"redirected .* AWS_ENDPOINT_URL_S3 \(https or http"),
        (404, xml("NoSuchKey"), MissingError, "run/x: missing"),
        (404, xml("NoSuchBucket"), StoreError, "NoSuchBucket"),
        (404, b"404 page not found", OutageError, "tried for"),  # of a proxy that does not find the store
        (416, xml("InvalidRange"), DamagedError, "cut short"),
        (403, xml("AccessDenied"), StoreError, "check what the credentials permit"),
        (403, xml("SignatureDoesNotMatch"), StoreError, "check AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"),
        (400, xml("ExpiredToken"), StoreError, "the credentials have expired, renew them"),
        (501, xml("NotImplemented"), StoreError, "NotImplemented"),
        (503, xml("SlowDown"), OutageError, "SlowDown.*tried for"),
    ],
)
def test_what_an_answer_means_and_what_to_do_is_said(endpoint, status, body, kind, match):
    """An answer that cannot change is not waited for."""
    asked = itertools.count()

    def answer(request):
        next(asked)
        return status, {"Location": "https://127.0.0.1:9/x"}, body

    with answering(answer) as url:
        store = endpoint(url)
        with pytest.raises(StoreError, match=rf"^s3://bucket/run/x: .*{match}|^s3://bucket/{match}$") as caught:
            store.read("x")
    assert type(caught.value) is kind
    assert status == 301 or next(asked) == 1 or kind is OutageError


def test_requests_refused_at_times_are_taken_at_last(endpoint, caplog):
    """A body came late, in part or changed, the store was asked for too much, a token unconfirmed, a page garbled."""
    passing = [(status, b"") for status in (408, 409, 429, 499, 500, 503)]
    codes = "RequestTimeout", "IncompleteBody", "BadDigest", "XAmzContentSHA256Mismatch", "InvalidIdentityToken"
    answers = iter([*passing, *((400, xml(code)) for code in codes)])

    def answer(request):
        status, body = next(answers, (200, b""))
        return status, {"ETag": '"e"'}, body

    with answering(answer) as url:
        endpoint(url, 60).put("x", b"abc")
    assert next(answers, None) is None
    assert "retrying for up to 60 s" in caplog.text
    with pytest.raises(OutageError, match="tried for"):
        endpoint(f"http://127.0.0.1:{free_port()}", 0.3).sizes()  # nothing listens there
    page = "<ListBucketResult><IsTruncated>false</IsTruncated><Contents><Key>run/x</Key><Size>%s</Size></Contents>"
    sizes = iter(("2=", "29"))
    with answering(lambda request: (200, {}, f"{page % next(sizes)}</ListBucketResult>".encode())) as url:
        assert endpoint(url, 5).sizes() == {"x": 29}


def test_the_parts_of_an_upload_suffice_for_the_largest_object(monkeypatch):
    """By the limits of S3: 10,000 parts of up to 5 GiB, 5 TiB in all."""
    monkeypatch.undo()  # the size of parts is the real one
    total = 0
    for number in range(10_000):
        size = storage.s3.part_bytes(number)
        assert size <= 5 << 30 or total >= 5 << 40
        total += size
    assert total >= 5 << 40


# ---------------------------------------------------------------- settings and credentials


def test_mistakes_in_settings_are_named_at_once(monkeypatch, tmp_path):
    for name, value in s3_environment("http://s3.example.org:9").items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_REGION", "us-west-2")
    assert store_at("s3://bucket/x").client.meta.region_name == "us-west-2"
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("HOME", str(tmp_path))
    for name, value, said in (
        ("AWS_ACCESS_KEY_ID", "", "NoCredentialsError.*check AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"),
        ("AWS_ENDPOINT_URL_S3", "localhost:9000", "Invalid endpoint: localhost:9000; check AWS_ENDPOINT_URL_S3"),
        ("AWS_PROFILE", "nobody", "nobody"),
    ):
        monkeypatch.setenv(name, value)
        with pytest.raises(StoreError, match=f"s3://bucket/x: .*{said}") as caught:
            open_store("s3://bucket/x", 60).sizes()
        assert not isinstance(caught.value, OutageError)


# ---------------------------------------------------------------- folders


def test_a_folder_keeps_files_whole_or_not_at_all(tmp_path):
    store = LocalStore(tmp_path / "new")
    assert store.sizes() == {}
    store.put("a/b", b"abcde")
    with store.create("a/c") as file:
        file.write(b"xyz")
    with suppress(KeyError), store.create("a/cut") as file:
        file.write(b"xyz")
        raise KeyError
    (store.folder / "a" / "removed").symlink_to("nowhere")  # as a file that goes once it is listed
    assert store.sizes() == store.sizes("a") == {"a/b": 5, "a/c": 3}
    (store.folder / "a" / "removed").unlink()
    assert (store.read("a/b"), store.read("a/b", 1, 3)) == (b"abcde", b"bcd")
    with pytest.raises(DamagedError, match="a/b: ends at byte 5, the rest is missing"):
        store.read("a/b", 1, 5)
    with pytest.raises(MissingError, match="a/d: missing"):
        store.read("a/d")
    with pytest.raises(StoreError, match="a/c: File exists"), store.create("a/c"):
        pass
    with pytest.raises(StoreError, match="a/b: Not a directory"):
        store.sizes("a/b")
    store.remove(["a/b", "a/c", "a/gone"])
    assert list(Path(tmp_path / "new").iterdir()) == []


def test_a_full_disk_is_named(tmp_path):
    store = LocalStore(tmp_path)
    is_named = pytest.raises(StoreError, match=r"x: No space left on device; free some space")
    with is_named, store.create("x") as file:
        os.dup2(os.open("/dev/full", os.O_WRONLY), file.fileno())
        file.write(b"x")
    assert not (tmp_path / "x").exists()
