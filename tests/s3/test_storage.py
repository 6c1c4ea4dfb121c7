"""The store of datasets and checkpoints: on a real S3 server, behind a faulty proxy, and against single answers."""

import concurrent.futures
import hashlib
import itertools
import os
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime, timezone
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from unittest import mock

import pytest
from botocore.exceptions import ClientError, EndpointConnectionError
from urllib3.util import connection

import storage
from storage import DamagedError, LocalStore, MissingError, OutageError, S3Store, StoreError, open_store
from tests.ports import free_port
from tests.s3.server import s3_environment
from tests.s3.stub import answering, only_for


def store_at(url: str, retry_seconds: float = 2, visibility_seconds: float = 0.5) -> S3Store:
    store = open_store(url, retry_seconds, visibility_seconds)
    assert isinstance(store, S3Store)
    return store


@pytest.fixture
def endpoint(monkeypatch) -> Callable[[str], S3Store]:
    """A function that makes a store at a made-up server."""

    def use(url: str, retry_seconds: float = 0.5) -> S3Store:
        for name, value in s3_environment(url).items():
            monkeypatch.setenv(name, value)
        return store_at("s3://bucket/run", retry_seconds)

    return use


# ---------------------------------------------------------------- on a real server


def test_an_object_of_several_parts_comes_back(bucket, monkeypatch):
    monkeypatch.setattr(storage, "PART_BYTES", 5 << 20)  # the least that S3 takes
    monkeypatch.setattr(storage, "READ_BYTES", 3 << 20)
    data = os.urandom(23 << 20)
    store = store_at(bucket + "/a/b")
    with store.create("folder/object") as stream:
        for start in range(0, len(data), 3_000_001):
            stream.write(data[start : start + 3_000_001])
    assert store.sizes() == store.sizes("folder") == {"folder/object": len(data)}
    assert store.read("folder/object") == data
    assert store.read("folder/object", 1, 20 << 20) == data[1:][: 20 << 20]
    with pytest.raises(DamagedError, match=f"a/b/folder/object: ends at byte {len(data)}, the rest"):
        store.read("folder/object", 7, len(data))
    for missing in ("folder", "other/object"):
        with pytest.raises(MissingError, match=f"a/b/{missing}: missing"):
            store.read(missing)


def test_a_body_that_has_been_read_gives_its_connection_back(bucket, monkeypatch):
    store, connects = store_at(bucket), []
    store.put("object", os.urandom(5000))
    connect = connection.create_connection
    monkeypatch.setattr(connection, "create_connection", lambda *a, **k: connects.append(a) or connect(*a, **k))
    for _ in range(20):
        store.sizes()
    needed = len(connects)  # moto's server keeps none open
    for start in range(20):
        store.read("object", start, 1000)
    assert len(connects) <= 2 * needed + 1


def test_what_is_written_keeps_no_other_thread_waiting(bucket, monkeypatch):
    """An async save must not stop the thread that trains for the copy of each part."""
    monkeypatch.setattr(storage, "PART_BYTES", 256 << 20)  # never full, so nothing but the copy is done here
    store, data = store_at(bucket), bytes(28 << 20)
    turns, done = itertools.count(), threading.Event()

    def take_turns() -> None:
        while not done.is_set():
            next(turns)
            time.sleep(0)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(60)  # who has the interpreter keeps it until it lets go by itself
    try:
        with suppress(InterruptedError), store.create("object") as stream:
            stream.write(data)  # makes the buffer
            other = threading.Thread(target=take_turns)
            other.start()
            before = next(turns)
            for _ in range(8):
                stream.write(data)
            during = next(turns) - before
            raise InterruptedError
    finally:
        sys.setswitchinterval(interval)
        done.set()
    other.join()
    assert during > 1, "the other thread had no turn"


def test_listings_of_many_pages_are_read_to_the_end(bucket):
    store, names = store_at(f"{bucket}/run"), {f"{number}/x" for number in range(5)}
    store_at(f"{bucket}/run-2").put("x", b"x")
    for name in names:
        store.put(name, b"x")
    store.client.meta.events.register(
        "before-parameter-build.s3.ListObjectsV2", lambda params, **_: params.update(MaxKeys=2)
    )
    assert store.sizes() == dict.fromkeys(names, 1)


def test_unfinished_uploads_are_dropped_once_old_and_none_of_others(bucket):
    store, other = store_at(f"{bucket}/run"), store_at(f"{bucket}/run-2")
    for place, name in ((store, "mine/x"), (store, "notes/x"), (other, "mine/x")):
        place._call("create_multipart_upload", name)

    def begun():
        uploads = store.client.list_multipart_uploads(Bucket=store.bucket)["Uploads"]
        return {upload["Key"]: time.time() - upload["Initiated"].timestamp() for upload in uploads}

    ages = begun()  # moto's clock stands still in 2010
    store.abort_uploads(lambda name: name == "mine/x", max(ages.values()) + 3600)
    assert begun().keys() == ages.keys()
    store.abort_uploads(lambda name: name == "mine/x", min(ages.values()) - 3600)
    assert begun().keys() == {"run/notes/x", "run-2/mine/x"}


def test_a_probe_is_written_read_back_and_removed(bucket, proxy):
    store_at(bucket).check_writable()
    assert store_at(bucket).sizes() == {}
    counts = proxy.counts()
    assert (counts["put"], counts["get"], counts["delete"]) == (1, 1, 1)


@pytest.mark.parametrize(("fault", "operation", "kind"), [("403", "put", StoreError), ("403", "get", StoreError)])
def test_a_place_that_cannot_be_written_or_read_back_is_refused(bucket, proxy, fault, operation, kind):
    proxy.fault(fault, operation)
    with pytest.raises(kind, match=r"\.probe-.*AccessDenied.*check what the credentials permit") as caught:
        store_at(bucket).check_writable()
    assert not isinstance(caught.value, OutageError)
    assert store_at(bucket).sizes() == {}


# ---------------------------------------------------------------- faults that pass


@pytest.mark.parametrize(
    ("fault", "operation"),
    [
        ("503", "upload_part"),
        ("empty", "create_multipart"),
        ("empty", "upload_part"),
        ("empty", "complete_multipart"),
        ("reset_after", "upload_part"),
        ("complete_error", "complete_multipart"),
        ("reset_after", "complete_multipart"),
    ],
)
def test_passing_faults_of_large_objects_are_survived(bucket, proxy, monkeypatch, fault, operation):
    monkeypatch.setattr(storage, "PART_BYTES", 5 << 20)
    data = os.urandom(12 << 20)
    proxy.fault(fault, operation, times=2)
    store = store_at(bucket, 30)
    with store.create("object") as stream:
        stream.write(data)
    assert store.read("object") == data
    assert proxy.counts()[f"fault:{fault}"] == 2


@pytest.mark.skipif(os.environ.get("S3_TEST_SERVER") == "moto", reason="moto's server checks no signatures")
@pytest.mark.parametrize(("operation", "size"), [("put", 1000), ("upload_part", 12 << 20)])
def test_bytes_changed_on_their_way_to_the_store_are_sent_again(bucket, proxy, monkeypatch, operation, size):
    monkeypatch.setattr(storage, "PART_BYTES", 5 << 20)
    data = os.urandom(size)
    proxy.fault("flip_sent", operation, times=2)
    store = store_at(bucket, 30)
    with store.create("object") as stream:
        stream.write(data)
    assert store.read("object") == data
    assert proxy.counts()["fault:flip_sent"] == 2


@pytest.mark.parametrize("operation", ["upload_part", "complete_multipart"])
def test_a_failed_large_object_leaves_nothing(bucket, proxy, monkeypatch, operation):
    monkeypatch.setattr(storage, "PART_BYTES", 5 << 20)
    store = store_at(bucket, 0.5)
    proxy.fault("500", operation)
    with pytest.raises(OutageError, match=r"InternalError.*tried for 1 s"), store.create("object") as stream:
        stream.write(os.urandom(12 << 20))
    assert store.sizes() == {}
    assert "Uploads" not in store.client.list_multipart_uploads(Bucket=store.bucket)


def test_an_object_that_is_shown_late_is_waited_for(bucket, proxy):
    proxy.lag(1.0, "all")
    store = store_at(bucket, visibility_seconds=20)
    store.put("object", b"abc")
    assert store.read("object") == b"abc"
    assert proxy.counts()["stale"] > 0


@pytest.mark.parametrize("operation", ["put", "get", "list"])
def test_a_request_that_is_never_answered_ends_in_a_clear_error(bucket, proxy, monkeypatch, operation):
    store_at(bucket).put("object", b"abc")
    monkeypatch.setattr(storage, "ANSWER_SECONDS", 1)
    store, requests = store_at(bucket, 2), {"put": lambda: store.put("x", b"x"), "list": lambda: store.sizes()}
    proxy.fault("hang", operation)
    with pytest.raises(OutageError, match=r"s3://.*[Tt]imeout.*tried for"):
        requests.get(operation, lambda: store.read("object"))()
    assert proxy.counts()["fault:hang"] == 2


def test_refused_connections_are_retried_for_the_time_set(endpoint, caplog):
    """A server that restarts refuses for longer than five attempts last. An outage is no mistake of the user."""
    port = free_port()
    store = endpoint(f"http://127.0.0.1:{port}", 60)

    def start() -> None:
        time.sleep(4)
        server.server_bind()
        server.server_activate()
        server.serve_forever()

    server = ThreadingHTTPServer(("127.0.0.1", port), Answers, bind_and_activate=False)
    Answers.kind, Answers.asked = "length", 0
    threading.Thread(target=start, daemon=True).start()
    assert store.read("file", 0, 100) == CONTENT[:100]
    assert "retrying for up to 60 s" in caplog.text
    server.shutdown()
    server.server_close()
    with pytest.raises(OutageError, match="tried for"):
        endpoint(f"http://127.0.0.1:{port}", 0.3).sizes()


def test_removals_are_tried_once_each_and_the_first_name_before_the_others(bucket, proxy):
    store = store_at(bucket, 60)
    for name in "abc":
        store.put(name, b"x")
    proxy.fault("503", "delete", "/a$")
    with pytest.raises(OutageError):
        store.remove(["a", "b", "c"])
    assert (proxy.counts()["delete"], len(store.sizes())) == (1, 3)
    store.remove(["b", "c", "gone"])
    assert set(store.sizes()) == {"a"}


# ---------------------------------------------------------------- single answers


CONTENT = os.urandom(5000)


class Answers(BaseHTTPRequestHandler):
    """Answers a range in one of the ways that HTTP has; for `cut`, the first time only."""

    protocol_version = "HTTP/1.1"
    kind, asked = "", 0

    def do_GET(self):
        Answers.asked += 1
        first, last = map(int, self.headers["Range"].removeprefix("bytes=").split("-"))
        last -= 100 * (self.kind == "range cut")
        body = CONTENT if self.kind == "range ignored" else CONTENT[first : last + 1]
        self.send_response(200 if self.kind == "range ignored" else 206)  # and no ETag, as some gateways
        if self.kind != "range ignored":
            self.send_header("Content-Range", f"bytes {first}-{last}/{len(CONTENT)}")
        if "chunked" in self.kind:
            self.send_header("Transfer-Encoding", "chunked")
            body = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (body[:700], body[700:], b""))
        elif "no length" not in self.kind:
            self.send_header("Content-Length", str(len(body)))
        self.close_connection = "no length" in self.kind
        self.end_headers()
        if "cut" in self.kind and Answers.asked == 1:
            body, self.close_connection = body[: len(body) // 2], True
        self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.mark.parametrize("kind", ["length", "chunked", "no length"])
def test_a_body_is_received_however_its_end_is_told(monkeypatch, endpoint, kind):
    """And one that is cut is asked for again: it says nothing of the object."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        store = endpoint(f"http://127.0.0.1:{server.server_port}", 5)
        for way, requests in ((kind, 1), (f"{kind}, cut", 2)):
            monkeypatch.setattr(Answers, "kind", way)
            monkeypatch.setattr(Answers, "asked", 0)
            assert store.read("file", 1000, 1234) == CONTENT[1000:2234]
            assert Answers.asked == requests
        store.retry_seconds = 0
        for way in ("range ignored", "range cut"):
            monkeypatch.setattr(Answers, "kind", way)
            with pytest.raises(OutageError, match=r"run/file: .*asked for bytes=1000-2233, but the"):
                store.read("file", 1000, 1234)  # the object may well be whole
        server.shutdown()


def xml(code: str) -> bytes:
    return f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>told so</Message></Error>".encode()


@pytest.mark.parametrize(
    ("status", "body", "kind", "match"),
    [
        (404, xml("NoSuchKey"), MissingError, "run/x: missing"),
        (404, xml("NoSuchBucket"), StoreError, "NoSuchBucket"),
        (404, b"404 page not found", OutageError, "tried for"),  # of a proxy that does not find the store
        (416, xml("InvalidRange"), DamagedError, "cut short"),
        (403, xml("AccessDenied"), StoreError, "check what the credentials permit"),
        (403, xml("RequestTimeTooSkewed"), StoreError, "set this machine's clock"),
        (403, xml("SignatureDoesNotMatch"), StoreError, "check AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"),
        (400, xml("ExpiredToken"), StoreError, "the credentials have expired, renew them"),
        (400, b"Client sent an HTTP request to an HTTPS server.\n", StoreError, r"AWS_ENDPOINT_URL_S3 \(https or http"),
        (501, xml("NotImplemented"), StoreError, "NotImplemented"),
        (503, xml("SlowDown"), OutageError, "SlowDown.*tried for"),
    ],
)
def test_what_an_answer_means_and_what_to_do_is_said(endpoint, status, body, kind, match):
    """An answer that cannot change is not waited for."""
    asked = itertools.count()

    def answer(request):
        next(asked)
        return status, {}, body

    with answering(answer) as url:
        store = endpoint(url, 0.3)
        store.visibility_seconds = 0
        with pytest.raises(StoreError, match=rf"^s3://bucket/run/x: .*{match}|^s3://bucket/{match}$") as caught:
            store.read("x")
    assert type(caught.value) is kind
    renewed = b"ExpiredToken" in body  # by a new client, once
    assert next(asked) > 1 if kind is OutageError else next(asked) == 1 + renewed


@pytest.mark.parametrize(
    ("status", "code"),
    [
        *((400, code) for code in ("RequestTimeout", "IncompleteBody", "BadDigest", "XAmzContentSHA256Mismatch")),
        *((status, "") for status in (408, 409, 429, 499, 500)),
    ],
)
def test_a_request_that_is_refused_once_may_be_taken_the_next_time(endpoint, status, code):
    """Its body came late, in part or changed, or the store was asked for too much at a time."""
    answers = iter([(status, {}, xml(code)), (200, {"ETag": '"e"'}, b"")])
    with answering(lambda request: next(answers)) as url:
        endpoint(url, 5).put("x", b"abc")


def test_a_listing_with_a_number_that_is_none_is_asked_for_again(endpoint):
    page = "<ListBucketResult><IsTruncated>false</IsTruncated><Contents><Key>run/x</Key><Size>%s</Size></Contents>"
    sizes = iter(("2=", "29"))
    with answering(lambda request: (200, {}, f"{page % next(sizes)}</ListBucketResult>".encode())) as url:
        assert endpoint(url, 5).sizes() == {"x": 29}


def test_an_endpoint_that_redirects_is_named(endpoint):
    redirects = lambda request: (301, {"Location": "https://127.0.0.1:9/x"}, b"<html></html>")  # noqa: E731
    named = pytest.raises(StoreError, match=r"s3://bucket/run: redirected .* AWS_ENDPOINT_URL_S3")
    with answering(redirects) as url, named:
        endpoint(url).sizes()


def test_https_that_cannot_be_spoken_or_trusted_is_not_waited_for(endpoint, tmp_path, monkeypatch):
    """http behind an https address; a certificate that this machine does not know, until AWS_CA_BUNDLE names it."""
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    command = (
        "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -addext subjectAltName=IP:127.0.0.1"
    )
    subprocess.run([*command.split(), "-keyout", key, "-out", certificate], check=True, capture_output=True)
    with answering(lambda request: (200, {"ETag": '"e"'}, b"")) as url:
        with pytest.raises(StoreError, match=r"check AWS_ENDPOINT_URL_S3 \(https or http\?\)") as caught:
            endpoint(url.replace("http:", "https:"), 60).put("x", b"abc")
        assert not isinstance(caught.value, OutageError)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    with answering(lambda request: (200, {"ETag": '"e"'}, b""), context) as url:
        with pytest.raises(StoreError, match=r"AWS_CA_BUNDLE=/path/to/ca\.pem") as caught:
            endpoint(url, 60).put("x", b"abc")
        assert not isinstance(caught.value, OutageError)
        monkeypatch.setenv("AWS_CA_BUNDLE", str(certificate))
        endpoint(url).put("x", b"abc")


@pytest.mark.parametrize(("scheme", "signed"), [("http", True), ("https", False)])
def test_bodies_are_signed_where_tls_does_not_vouch_for_them(monkeypatch, endpoint, tmp_path, scheme, signed):
    checksums = []

    def refuse(request, **_):
        checksums.append(request.headers["x-amz-content-sha256"].decode())
        raise EndpointConnectionError(endpoint_url=request.url)

    def sent():
        checksums.clear()
        store = endpoint(f"{scheme}://127.0.0.1:9", 0)
        store.client.meta.events.register("before-send.s3", refuse)
        with pytest.raises(OutageError):
            store.put("object", b"abc")
        return checksums

    whole = hashlib.sha256(b"abc").hexdigest()
    assert sent() == [whole if signed else "UNSIGNED-PAYLOAD"]
    (tmp_path / "config").write_text("[default]\ns3 =\n  payload_signing_enabled = true\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    assert sent() == [whole], "what the user says comes first"


# ---------------------------------------------------------------- parts under way


@pytest.fixture
def stubbed(endpoint):
    """A function that makes a store whose client answers a method by calling the function of that name."""

    def build(**answers):
        store = endpoint("http://127.0.0.1:9")
        store.client = mock.Mock(spec=list(answers), **{name: mock.Mock(wraps=call) for name, call in answers.items()})
        return store

    return build


def refusal(code, status):
    return ClientError({"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}, "method")


def test_parts_grow_so_that_no_upload_has_too_many(stubbed, monkeypatch):
    monkeypatch.setattr(storage, "PART_BYTES", 8)
    data, parts = os.urandom(8 * 1000 + 16 * 1000 + 32 + 5), {}

    def keep(PartNumber, Body, **_):
        parts[PartNumber] = bytes(Body)
        return {"ETag": str(PartNumber)}

    store = stubbed(
        create_multipart_upload=lambda **_: {"UploadId": "u"},
        upload_part=keep,
        complete_multipart_upload=lambda **_: {"ETag": "whole"},
    )
    with store.create("file") as stream:
        for start in range(0, len(data), 1001):
            stream.write(data[start : start + 1001])
    assert [len(parts[number]) for number in sorted(parts)] == [8] * 1000 + [16] * 1000 + [32, 5]
    assert b"".join(parts[number] for number in sorted(parts)) == data
    tags = store.client.complete_multipart_upload.call_args.kwargs["MultipartUpload"]["Parts"]
    assert tags == [{"PartNumber": number, "ETag": str(number)} for number in sorted(parts)]


def test_a_part_under_way_is_not_written_over(stubbed, monkeypatch):
    """All that may be under way are held back, and sent a second time, while the next one is filled."""
    monkeypatch.setattr(storage, "PART_BYTES", 8)
    filled, tried, parts = threading.Event(), set(), {}

    def keep(PartNumber, Body, **_):
        filled.wait()
        if PartNumber not in tried:
            tried.add(PartNumber)
            raise refusal("SlowDown", 503)
        parts[PartNumber] = bytes(Body)
        return {"ETag": str(PartNumber)}

    store = stubbed(
        create_multipart_upload=lambda **_: {"UploadId": "u"},
        upload_part=keep,
        complete_multipart_upload=lambda **_: {"ETag": "whole"},
    )
    data = os.urandom(8 * 3 * (storage.PARTS_IN_FLIGHT + 1) + 5)
    with store.create("file") as stream:
        ahead = 8 * storage.PARTS_IN_FLIGHT + 7
        stream.write(data[:ahead])
        filled.set()
        stream.write(data[ahead:])
    assert b"".join(parts[number] for number in sorted(parts)) == data


def test_an_upload_is_aborted_once_no_part_is_under_way(stubbed, monkeypatch):
    monkeypatch.setattr(storage, "PART_BYTES", 8)
    sent, arrives, order = threading.Event(), threading.Event(), []

    def part(PartNumber, **_):
        if PartNumber == 1:
            assert sent.wait(20)
            raise refusal("AccessDenied", 403)
        sent.set()
        assert arrives.wait(20)
        order.append("part")
        return {"ETag": "e"}

    def abort(**_):
        order.append("abort")
        arrives.set()
        return {}

    def wait(parts):
        arrives.set()
        return concurrent.futures.wait(parts)

    monkeypatch.setattr(storage, "wait", wait)
    create = {"create_multipart_upload": lambda **_: {"UploadId": "u"}}
    store = stubbed(**create, upload_part=part, abort_multipart_upload=abort)
    with pytest.raises(StoreError, match="AccessDenied"), store.create("file") as stream:
        stream.write(bytes(16))
    assert order == ["part", "abort"]


# ---------------------------------------------------------------- settings and credentials


def test_the_region_of_the_profile_is_used_and_settings_that_do_not_fit_are_named(monkeypatch, tmp_path):
    (tmp_path / "config").write_text("[default]\nregion = eu-central-1\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    assert store_at("s3://bucket/x").client.meta.region_name == "eu-central-1"
    monkeypatch.setenv("AWS_REGION", "us-west-2")
    assert store_at("s3://bucket/x").client.meta.region_name == "us-west-2"
    for name, value in (("AWS_ENDPOINT_URL_S3", "localhost:9000"), ("AWS_PROFILE", "nobody")):
        monkeypatch.setenv(name, value)
        with pytest.raises(StoreError, match=rf"s3://bucket/x: .*{value}.*check AWS_PROFILE"):
            store_at("s3://bucket/x")


def test_a_bucket_is_addressed_by_path_or_as_a_host(monkeypatch, endpoint, tmp_path):
    def asked():
        urls, store = [], endpoint("http://s3.example.org:9", 0)

        def refuse(request, **_):
            urls.append(request.url)
            raise EndpointConnectionError(endpoint_url=request.url)

        store.client.meta.events.register("before-send.s3", refuse)
        with pytest.raises(OutageError):
            store.read("x")
        return urls[0]

    assert asked() == "http://s3.example.org:9/bucket/run/x"
    (tmp_path / "config").write_text("[default]\ns3 =\n  addressing_style = virtual\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    assert asked() == "http://bucket.s3.example.org:9/run/x"


@pytest.fixture
def profile(monkeypatch, tmp_path):
    """A function that writes a file of AWS's, from which alone credentials come."""

    def write(variable, *lines):
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.delenv(name, raising=False)
        (tmp_path / variable).write_text("\n".join(("[default]", *lines)))
        monkeypatch.setenv(variable, str(tmp_path / variable))

    return write


@pytest.mark.parametrize(("status", "code"), [(400, "ExpiredToken"), (403, "InvalidAccessKeyId")])
def test_credentials_that_were_renewed_in_their_file_are_used(monkeypatch, profile, status, code):
    def write(key):
        lines = (f"aws_access_key_id={key}", "aws_secret_access_key=s", "aws_session_token=t")
        profile("AWS_SHARED_CREDENTIALS_FILE", *lines)

    key = ["first"]
    with answering(only_for(key, status, code)) as url:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", url)
        write("first")
        store = store_at("s3://bucket/run")
        store.put("x", b"abc")
        key[0] = "second"
        with pytest.raises(StoreError, match=code):
            store.put("x", b"abc")
        write("second")
        store.put("x", b"abc")


def test_a_command_for_credentials_that_fails_once_is_asked_again(monkeypatch, profile, tmp_path):
    key = '{"Version": 1, "AccessKeyId": "key", "SecretAccessKey": "s", "SessionToken": "t", "Expiration": "%s"}'
    soon = datetime.fromtimestamp(time.time() + 300, timezone.utc).isoformat()  # renewed before each request
    (tmp_path / "key").write_text(key % soon)
    with answering(only_for(["key"])) as url:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", url)
        # Each time but for the second, for which there is no file any more.
        again = f"mv {tmp_path}/away {tmp_path}/key"
        command = f"cat {tmp_path}/key || {{ {again}; false; }}"
        (tmp_path / "command").write_text(command)
        profile("AWS_CONFIG_FILE", f"credential_process = sh {tmp_path}/command")
        profile("AWS_SHARED_CREDENTIALS_FILE")
        store = store_at("s3://bucket/run", 20)
        (tmp_path / "key").rename(tmp_path / "away")
        store.put("x", b"abc")


@pytest.mark.parametrize(
    "failure",
    [(400, b"<ErrorResponse><Error><Code>InvalidIdentityToken</Code></Error></ErrorResponse>"), (200, b"<html/>")],
)
def test_a_role_that_is_not_given_once_is_asked_for_again(monkeypatch, profile, tmp_path, failure):
    """As Kubernetes gives one to a pod, by a token that STS has the cluster's identity provider confirm."""
    soon = datetime.fromtimestamp(time.time() + 300, timezone.utc).isoformat()  # renewed before each request
    given = f"""<AssumeRoleWithWebIdentityResponse><AssumeRoleWithWebIdentityResult><Credentials>
        <AccessKeyId>key</AccessKeyId><SecretAccessKey>s</SecretAccessKey><SessionToken>t</SessionToken>
        <Expiration>{soon}</Expiration></Credentials></AssumeRoleWithWebIdentityResult></AssumeRoleWithWebIdentityResponse>
        """.encode()
    answers = iter(((200, given), failure, (200, given)))

    def sts(request):
        status, body = next(answers)
        return status, {}, body

    (tmp_path / "token").write_text("token")
    with answering(only_for(["key"])) as url, answering(sts) as sts_url:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", url)
        monkeypatch.setenv("AWS_ENDPOINT_URL_STS", sts_url)
        monkeypatch.setenv("AWS_ROLE_ARN", "arn:aws:iam::123456789012:role/trains")
        monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", str(tmp_path / "token"))
        profile("AWS_SHARED_CREDENTIALS_FILE")
        store = store_at("s3://bucket/run", 20)
        store.put("x", b"abc")
        store.put("x", b"abc")
    assert next(answers, None) is None


def test_no_credentials_and_no_bucket_are_told_apart(bucket, monkeypatch, tmp_path):
    with pytest.raises(StoreError, match="NoSuchBucket"):
        store_at(bucket + "-of-nobody").sizes()
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(StoreError, match="AWS_ACCESS_KEY_ID"):
        store_at(bucket).sizes()


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
    assert store.sizes() == store.sizes("a") == {"a/b": 5, "a/c": 3}
    assert (store.read("a/b"), store.read("a/b", 1, 3)) == (b"abcde", b"bcd")
    with pytest.raises(DamagedError, match="a/b: ends at byte 5, the rest is missing"):
        store.read("a/b", 1, 5)
    with pytest.raises(MissingError, match="a/d: missing"):
        store.read("a/d")
    with pytest.raises(StoreError, match="a/c: File exists"), store.create("a/c"):
        pass
    store.remove(["a/b", "a/c", "a/gone"])
    assert list(Path(tmp_path / "new").iterdir()) == []


def test_a_full_disk_is_named(tmp_path):
    store = LocalStore(tmp_path)
    is_named = pytest.raises(StoreError, match=r"x: No space left on device; free some space")
    with is_named, store.create("x") as file:
        os.dup2(os.open("/dev/full", os.O_WRONLY), file.fileno())
        file.write(b"x")
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("url", ["", "gs://bucket/x", "://x"])
def test_other_places_are_refused(url):
    with pytest.raises(StoreError, match=f"'{url}': must be a folder or s3://bucket/prefix"):
        open_store(url)
