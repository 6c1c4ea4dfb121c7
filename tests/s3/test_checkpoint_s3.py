"""Checkpoints on a real S3 server, and behind a proxy that makes it misbehave."""

import concurrent.futures
import hashlib
import io
import itertools
import os
import random
import shutil
import sys
import threading
import time
from contextlib import nullcontext, suppress
from datetime import datetime, timezone
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from botocore.exceptions import ClientError, EndpointConnectionError
from urllib3.exceptions import SSLError
from urllib3.util import connection

from checkpoint import s3
from checkpoint.manager import check_initial_load, check_places
from checkpoint.retention import committed, remove_checkpoints
from checkpoint.s3 import S3Store
from checkpoint.stores import CheckpointError, DamagedError, LocalStore, open_store
from config import Checkpoint
from data.tokenizer import train_tokenizer
from tests.corpus import write_dataset
from tests.distributed.checkpoint_kills import survive_kills
from tests.distributed.checkpoint_runs import Run, load_run, same, train_run
from tests.distributed.test_train import call
from tests.harness import run_ranks
from tests.s3.server import s3_environment
from tests.s3.stub import answering, only_for
from tests.unit.test_llama import hf_model
from tools.hf import export_model, import_model

# Short waits, so that what is never answered is soon given up.
WAITS = {"request_timeout_seconds": 10, "visibility_seconds": 1.0, "interval": 1, "keep": 2}
INITIATED = datetime(2020, 1, 1, tzinfo=timezone.utc)
DAMAGES = int(os.environ.get("DAMAGES", "12"))


def store_at(url: str) -> S3Store:
    store = open_store(url, Checkpoint(request_timeout_seconds=2, visibility_seconds=0.5))
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
    view, connects = memoryview(bytearray(1000)), []
    connect = connection.create_connection
    monkeypatch.setattr(connection, "create_connection", lambda *a, **k: connects.append(a) or connect(*a, **k))
    places = (6 << 20, 0, *range(20))  # more than there are connections since the upload
    for _ in places:
        store.sizes()
    needed = len(connects)  # moto's server keeps none open
    for start in places:
        store.read_into("folder/object", start, view)
        assert view == data[start:][:1000]
    assert len(connects) == 2 * needed, "a body that has been read gives its connection back"


def test_what_is_written_keeps_no_other_thread_waiting(bucket, monkeypatch):
    """An async save must not stop the thread that trains for the copy of each part."""
    monkeypatch.setattr(s3, "PART_BYTES", 256 << 20)  # never full, so nothing but the copy is done here
    store, data = store_at(bucket), bytes(128 << 20)
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
            stream.write(data[:-1])
            during = next(turns) - before
            raise InterruptedError
    finally:
        sys.setswitchinterval(interval)
        done.set()
    other.join()
    assert during > 10, f"the other thread had {during} turns"


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


# ---------------------------------------------------------------- without a server


class Client:
    """Answers as `answers` say, by method, and keeps the requests."""

    def __init__(self, **answers):
        self.answers, self.requests = answers, []

    def __getattr__(self, method):
        def call(**arguments):
            self.requests.append((method, arguments))
            return self.answers[method](arguments)

        return call


def error(code, status):
    return ClientError({"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}, "method")


@pytest.fixture
def stubbed(monkeypatch):
    """A function that makes a store with such a client."""
    for name, value in s3_environment("http://127.0.0.1:9").items():
        monkeypatch.setenv(name, value)

    def build(**answers):
        store = store_at("s3://bucket/run")
        store.client = Client(**answers)
        return store

    return build


def test_listings_of_many_pages_are_read_to_the_end(stubbed):
    def page(kind, names, arguments):
        start = int(arguments.get("ContinuationToken", arguments.get("KeyMarker", 0)))
        entries = [{"Key": f"run/{name}", "Size": 1, "Initiated": INITIATED, "UploadId": name} for name in names]
        more = {"IsTruncated": start + 2 < len(names), "NextContinuationToken": f"{start + 2}"}
        return {kind: entries[start : start + 2], **more, "NextKeyMarker": f"{start + 2}", "NextUploadIdMarker": "x"}

    names = [f"step-0000000{i}-0123456789ab/x" for i in range(5)]
    store = stubbed(
        list_objects_v2=partial(page, "Contents", names),
        list_multipart_uploads=partial(page, "Uploads", names),
        abort_multipart_upload=lambda arguments: {},
    )
    assert store.sizes() == dict.fromkeys(names, 1)
    store.abort_uploads(10)
    assert [sent["UploadId"] for method, sent in store.client.requests if method.startswith("abort")] == names


def test_an_upload_that_may_not_be_aborted_is_named_by_its_address(stubbed):
    def refuse(arguments):
        raise error("AccessDenied", 403)

    begun = {"Key": "run/step-00000001-0123456789ab/x", "Initiated": INITIATED, "UploadId": "u"}
    listed = {"IsTruncated": False, "Uploads": [begun]}
    store = stubbed(list_multipart_uploads=lambda arguments: listed, abort_multipart_upload=refuse)
    with pytest.raises(CheckpointError, match=r"^s3://bucket/run/step-00000001-0123456789ab/x: not allowed"):
        store.abort_uploads(10)


def test_initial_load_is_looked_for_with_the_waits_that_are_set(stubbed, monkeypatch, quick):
    """By both: the check before anything is written, and the load."""
    stubbed()  # its endpoint, where nobody answers
    connect, waits = S3Store._connect, []

    def watch(store):
        client = connect(store)
        waits.append(client.meta.config.read_timeout)
        return client

    monkeypatch.setattr(S3Store, "_connect", watch)
    settings = {"initial_load": "s3://bucket/other", "request_timeout_seconds": 3, "enable": False}
    with pytest.raises(CheckpointError, match="failed 5 times"):
        check_initial_load(Checkpoint(**settings), {}, Path("unused"))
    with pytest.raises(CheckpointError, match="failed 5 times"):
        Run("unused", **settings).checkpoint.load()
    assert waits == [3, 3]


def test_the_folders_of_a_store_are_asked_for_without_their_files(stubbed):
    def page(arguments):
        assert (arguments["Prefix"], arguments["Delimiter"]) == ("run/", "/")
        start = int(arguments.get("ContinuationToken", 0))
        more = {"IsTruncated": start < 2, "NextContinuationToken": f"{start + 1}"}
        return {"CommonPrefixes": [{"Prefix": f"run/step-0000000{start}-0123456789ab/"}], **more}

    assert stubbed(list_objects_v2=page).folders() == {f"step-0000000{i}-0123456789ab" for i in range(3)}


def test_a_place_that_may_only_be_read_is_found_before_anything_is_written(stubbed, monkeypatch):
    """One that keeps all that was ever written to it is none of those."""

    def refuse(arguments):
        raise error("AccessDenied", 403)

    settings = Checkpoint(folder="here", upload="s3://bucket/run")
    for answers, match in (({"put_object": refuse}, "AccessDenied"), ({"delete_object": refuse}, "")):
        store = stubbed(**{"put_object": lambda arguments: {"ETag": "x"}} | answers)
        monkeypatch.setattr("checkpoint.manager._open_stores", lambda *_, store=store: [LocalStore("here"), store])
        monkeypatch.setattr(LocalStore, "check_writable", lambda self: None)
        with pytest.raises(CheckpointError, match=f"checkpoint.upload = .*{match}") if match else nullcontext():
            check_places(settings, Path("unused"))


@pytest.mark.parametrize("token", [{}, {"NextContinuationToken": "same"}])
def test_a_listing_that_does_not_go_on_is_refused(stubbed, token):
    store = stubbed(list_objects_v2=lambda arguments: {"IsTruncated": True, **token})
    with pytest.raises(CheckpointError, match="s3://bucket/run: its listing breaks off"):
        store.sizes()
    assert len(store.client.requests) == 1 + len(token)


def test_a_bucket_that_is_gone_is_no_damage_of_an_object(stubbed):
    def get(arguments):
        raise error("NoSuchBucket", 404)

    with pytest.raises(CheckpointError, match="no such object or bucket") as caught:
        stubbed(get_object=get).read("x")
    assert not isinstance(caught.value, DamagedError)


def test_parts_grow_so_that_no_upload_has_too_many(stubbed, monkeypatch):
    monkeypatch.setattr(s3, "PART_BYTES", 8)
    data, parts = os.urandom(8 * 1000 + 16 * 1000 + 32 + 5), {}

    def keep(arguments):
        parts[arguments["PartNumber"]] = bytes(arguments["Body"])
        return {"ETag": str(arguments["PartNumber"])}

    store = stubbed(
        create_multipart_upload=lambda arguments: {"UploadId": "u"},
        upload_part=keep,
        complete_multipart_upload=lambda arguments: {"ETag": "whole"},
    )
    with store.create("file") as stream:
        for start in range(0, len(data), 1001):
            stream.write(data[start : start + 1001])
    assert [len(parts[number]) for number in sorted(parts)] == [8] * 1000 + [16] * 1000 + [32, 5]
    assert b"".join(parts[number] for number in sorted(parts)) == data
    (tags,) = [sent["MultipartUpload"]["Parts"] for method, sent in store.client.requests if method.startswith("compl")]
    assert tags == [{"PartNumber": number, "ETag": str(number)} for number in sorted(parts)]


def test_a_part_under_way_is_not_written_over(stubbed, monkeypatch):
    """All that may be under way are held back, and sent a second time, while the next one is filled."""
    monkeypatch.setattr(s3, "PART_BYTES", 8)
    monkeypatch.setattr(s3.time, "sleep", lambda seconds: None)
    filled, tried, parts = threading.Event(), set(), {}

    def keep(arguments):
        number = arguments["PartNumber"]
        filled.wait()
        if number not in tried:
            tried.add(number)
            raise error("SlowDown", 503)
        parts[number] = bytes(arguments["Body"])
        return {"ETag": str(number)}

    store = stubbed(
        create_multipart_upload=lambda arguments: {"UploadId": "u"},
        upload_part=keep,
        complete_multipart_upload=lambda arguments: {"ETag": "whole"},
    )
    data = os.urandom(8 * 3 * (s3.PARTS_IN_FLIGHT + 1) + 5)
    with store.create("file") as stream:
        ahead = 8 * s3.PARTS_IN_FLIGHT + 7
        stream.write(data[:ahead])
        filled.set()
        stream.write(data[ahead:])
    assert b"".join(parts[number] for number in sorted(parts)) == data


def test_a_large_range_is_read_in_pieces(stubbed, monkeypatch):
    monkeypatch.setattr(s3, "READ_BYTES", 10)
    data = bytes(range(200))

    def get(arguments):
        first, last = map(int, arguments["Range"].removeprefix("bytes=").split("-"))
        body = data[first : last + 1]
        held = f"bytes {first}-{first + len(body) - 1}/200"
        return {"Body": mock.Mock(_raw_stream=mock.Mock(_fp=io.BytesIO(body))), "ContentRange": held, "ETag": "e"}

    store, view = stubbed(get_object=get), memoryview(bytearray(95))
    store.read_into("file", 50, view)
    assert view == data[50:145]
    assert len(store.client.requests) == 10
    with pytest.raises(DamagedError, match="ends at byte 200"):
        store.read_into("file", 120, view)


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
        self.send_response(200 if self.kind == "range ignored" else 206)
        self.send_header("ETag", '"e"')
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


@pytest.mark.parametrize("kind", ["length", "chunked", "no length"])
def test_a_body_is_received_however_its_end_is_told(monkeypatch, quick, kind):
    """And one that is cut is asked for again: it says nothing of the object."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        for name, value in s3_environment(f"http://127.0.0.1:{server.server_port}").items():
            monkeypatch.setenv(name, value)
        store, view = store_at("s3://bucket/run"), memoryview(bytearray(1234))
        for way, requests in ((kind, 1), (f"{kind}, cut", 2)):
            monkeypatch.setattr(Answers, "kind", way)
            monkeypatch.setattr(Answers, "asked", 0)
            view[:] = bytes(1234)
            store.read_into("file", 1000, view)
            assert view == CONTENT[1000:2234]
            assert Answers.asked == requests
        for way in ("range ignored", "range cut"):
            monkeypatch.setattr(Answers, "kind", way)
            with pytest.raises(CheckpointError, match="run/file: asked for bytes=1000-2233, but the") as caught:
                store.read_into("file", 1000, view)
            assert not isinstance(caught.value, DamagedError), "the object may well be whole"
        server.shutdown()


def test_an_upload_is_aborted_once_no_part_is_under_way(stubbed, monkeypatch):
    monkeypatch.setattr(s3, "PART_BYTES", 8)
    sent, arrives, order = threading.Event(), threading.Event(), []

    def part(arguments):
        if arguments["PartNumber"] == 1:
            assert sent.wait(20)
            raise error("AccessDenied", 403)
        sent.set()
        assert arrives.wait(20)
        order.append("part")
        return {"ETag": "e"}

    def abort(arguments):
        order.append("abort")
        arrives.set()
        return {}

    def wait(parts):
        arrives.set()
        return concurrent.futures.wait(parts)

    monkeypatch.setattr(s3, "wait", wait, raising=False)
    create = {"create_multipart_upload": lambda arguments: {"UploadId": "u"}}
    store = stubbed(**create, upload_part=part, abort_multipart_upload=abort)
    with pytest.raises(CheckpointError, match="not allowed"), store.create("file") as stream:
        stream.write(bytes(16))
    assert order == ["part", "abort"]


@pytest.mark.parametrize(("heads", "whole"), [([404, 20], True), ([19], False), ([404] * 99, False)])
def test_a_completion_whose_answer_got_lost_is_looked_for_until_it_is_seen(stubbed, monkeypatch, quick, heads, whole):
    monkeypatch.setattr(s3, "PART_BYTES", 8)
    monkeypatch.setattr(s3.time, "monotonic", partial(next, itertools.count()))
    answers = iter(heads)

    def complete(arguments):
        raise error("NoSuchUpload", 404)

    def head(arguments):
        if (answer := next(answers)) == 404:
            raise error("NotFound", 404)
        return {"ContentLength": answer}

    store = stubbed(
        create_multipart_upload=lambda arguments: {"UploadId": "u"},
        upload_part=lambda arguments: {"ETag": "e"},
        complete_multipart_upload=complete,
        head_object=head,
        abort_multipart_upload=lambda arguments: {},
    )
    store.visibility_seconds = 5
    expected = nullcontext() if whole else pytest.raises(CheckpointError, match="NoSuchUpload")
    with expected, store.create("file") as stream:
        stream.write(bytes(20))


def test_what_is_gone_already_is_removed(stubbed):
    def delete(arguments):
        if arguments["Key"] != "run/c":
            raise error("NoSuchKey", 404)
        return {}

    store = stubbed(delete_object=delete)
    store.remove(["a", "b", "c"])
    assert sorted(sent["Key"] for _, sent in store.client.requests) == ["run/a", "run/b", "run/c"]


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
        with pytest.raises(CheckpointError, match=rf"s3://bucket/x: .*{value}.*check AWS_PROFILE"):
            store_at("s3://bucket/x")


@pytest.fixture
def profile(monkeypatch, tmp_path):
    """A function that writes a file of AWS's, from which alone credentials come."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name, raising=False)

    def write(variable, *lines):
        (tmp_path / variable).write_text("\n".join(("[default]", *lines)))
        monkeypatch.setenv(variable, str(tmp_path / variable))

    return write


@pytest.mark.parametrize(
    ("status", "code", "refused"),
    [(400, "ExpiredToken", "failed 5 times"), (403, "InvalidAccessKeyId", "not allowed")],
)
def test_credentials_that_were_renewed_in_their_file_are_used(monkeypatch, profile, quick, status, code, refused):
    def write(key):
        lines = (f"aws_access_key_id={key}", "aws_secret_access_key=s", "aws_session_token=t")
        profile("AWS_SHARED_CREDENTIALS_FILE", *lines)

    key = ["first"]
    with answering(only_for(key, status, code)) as endpoint:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", endpoint)
        write("first")
        store = store_at("s3://bucket/run")
        assert store.read("x") == b"abc"
        key[0] = "second"
        with pytest.raises(CheckpointError, match=f"{refused}.*{code}"):
            store.put("x", b"abc")
        write("second")
        store.put("x", b"abc")


def test_a_command_for_credentials_that_fails_once_is_asked_again(monkeypatch, profile, quick, tmp_path):
    key = '{"Version": 1, "AccessKeyId": "key", "SecretAccessKey": "s", "SessionToken": "t", "Expiration": "%s"}'
    soon = datetime.fromtimestamp(time.time() + 300, timezone.utc).isoformat()  # renewed before each request
    (tmp_path / "key").write_text(key % soon)
    with answering(only_for(["key"])) as endpoint:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", endpoint)
        # Each time but for the second, for which there is no file any more.
        again = f"mv {tmp_path}/away {tmp_path}/key"
        command = f"cat {tmp_path}/key || {{ {again}; false; }}"
        (tmp_path / "command").write_text(command)
        profile("AWS_CONFIG_FILE", f"credential_process = sh {tmp_path}/command")
        profile("AWS_SHARED_CREDENTIALS_FILE")
        store = store_at("s3://bucket/run")
        (tmp_path / "key").rename(tmp_path / "away")
        store.put("x", b"abc")


@pytest.mark.parametrize(
    "failure",
    [(400, b"<ErrorResponse><Error><Code>InvalidIdentityToken</Code></Error></ErrorResponse>"), (200, b"<html/>")],
)
def test_a_role_that_is_not_given_once_is_asked_for_again(monkeypatch, profile, quick, tmp_path, failure):
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
    with answering(only_for(["key"])) as endpoint, answering(sts) as sts_endpoint:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", endpoint)
        monkeypatch.setenv("AWS_ENDPOINT_URL_STS", sts_endpoint)
        monkeypatch.setenv("AWS_ROLE_ARN", "arn:aws:iam::123456789012:role/trains")
        monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", str(tmp_path / "token"))
        profile("AWS_SHARED_CREDENTIALS_FILE")
        store = store_at("s3://bucket/run")
        store.put("x", b"abc")
        store.put("x", b"abc")
    assert next(answers, None) is None


PASSING_CODES = ("RequestTimeout", "IncompleteBody", "BadDigest", "XAmzContentSHA256Mismatch", "SlowDown")


@pytest.mark.parametrize(
    ("status", "code"), [*((400, code) for code in PASSING_CODES), *((status, "") for status in (408, 409, 429, 499))]
)
def test_a_request_that_is_refused_once_may_be_taken_the_next_time(stubbed, quick, status, code):
    """Its body came late, in part or changed, or the store was asked for too much at a time."""
    put = mock.Mock(side_effect=[error(code, status), {"ETag": "e"}])
    stubbed(put_object=put).put("x", b"")
    assert put.call_count == 2


@pytest.mark.parametrize("page", [b"404 page not found", b"<html><body>not found</body></html>"])
def test_a_proxy_that_does_not_find_the_store_is_no_damage(monkeypatch, stubbed, quick, page):
    with answering(lambda request: (404, {}, page)) as endpoint:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", endpoint)
        with pytest.raises(CheckpointError, match="failed 5 times") as caught:
            store_at("s3://bucket/run").read("x")
        assert not isinstance(caught.value, DamagedError)


def test_a_listing_with_a_number_that_is_none_is_asked_for_again(monkeypatch, stubbed, quick):
    page = "<ListBucketResult><IsTruncated>false</IsTruncated><Contents><Key>run/x</Key><Size>%s</Size></Contents>"
    sizes = iter(("2=", "29"))
    with answering(lambda request: (200, {}, f"{page % next(sizes)}</ListBucketResult>".encode())) as endpoint:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", endpoint)
        assert store_at("s3://bucket/run").sizes() == {"x": 29}


def test_a_bit_that_flips_in_a_body_under_tls_is_asked_for_again(stubbed, quick):
    body = mock.Mock(read=mock.Mock(side_effect=[SSLError("bad record mac"), b"abc"]))
    assert stubbed(get_object=lambda arguments: {"Body": body, "ETag": "e"}).read("x") == b"abc"


def test_an_endpoint_that_redirects_is_named(monkeypatch, stubbed):
    with answering(lambda request: (301, {"Location": "https://127.0.0.1:9/x"}, b"<html></html>")) as endpoint:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", endpoint)
        with pytest.raises(CheckpointError, match=r"s3://bucket/run: redirected .* AWS_ENDPOINT_URL_S3"):
            store_at("s3://bucket/run").sizes()


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
        ("404", ".*"),
        ("409", ".*"),
        ("reset", ".*"),
        ("reset_after", "put|get|list|delete"),
        ("cut", "get|list"),
        ("flip", "get"),
        ("empty", "put|get"),
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
        ("empty", "create_multipart"),
        ("empty", "upload_part"),
        ("empty", "complete_multipart"),
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


@pytest.mark.skipif(os.environ.get("S3_TEST_SERVER") == "moto", reason="moto's server checks no signatures")
@pytest.mark.parametrize(("operation", "size"), [("put", 1000), ("upload_part", 12 << 20)])
def test_bytes_changed_on_their_way_to_the_store_are_sent_again(bucket, proxy, monkeypatch, quick, operation, size):
    monkeypatch.setattr(s3, "PART_BYTES", 5 << 20)
    data = os.urandom(size)
    proxy.fault("flip_sent", operation, times=2)
    store = store_at(bucket)
    with store.create("object") as stream:
        stream.write(data)
    assert store.read("object") == data
    assert proxy.counts()["fault:flip_sent"] == 2


@pytest.mark.parametrize(("scheme", "signed"), [("http", True), ("https", False)])
def test_bodies_are_signed_where_tls_does_not_vouch_for_them(monkeypatch, quick, tmp_path, scheme, signed):
    for name, value in s3_environment(f"{scheme}://127.0.0.1:9").items():
        monkeypatch.setenv(name, value)
    checksums = []

    def refuse(request, **_):
        checksums.append(request.headers["x-amz-content-sha256"].decode())
        raise EndpointConnectionError(endpoint_url=request.url)

    def sent():
        checksums.clear()
        store = store_at("s3://bucket/run")
        store.client.meta.events.register("before-send.s3", refuse)
        with pytest.raises(CheckpointError, match="failed 5 times"):
            store.put("object", b"abc")
        return set(checksums)

    whole = hashlib.sha256(b"abc").hexdigest()
    assert sent() == {whole if signed else "UNSIGNED-PAYLOAD"}
    (tmp_path / "config").write_text("[default]\ns3 =\n  payload_signing_enabled = true\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    assert sent() == {whole}, "what the user says comes first"


def test_without_signed_bodies_bytes_changed_on_their_way_are_found_by_a_load(
    bucket, proxy, monkeypatch, tmp_path, caplog
):
    """AWS's own setting for more speed: the store keeps what it got, and a resume takes the checkpoint before."""
    (tmp_path / "config").write_text("[default]\ns3 =\n  payload_signing_enabled = false\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    run = Run(bucket, **WAITS)
    run.train(0, 1)
    proxy.fault("flip_sent", "put", key="distcp")
    run.train(1, 2)
    proxy.reset()
    resumed = Run(bucket, seed=3, **WAITS)
    assert resumed.checkpoint.load() == 1
    assert "damaged checkpoint skipped: " in caplog.text


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
    assert time.monotonic() - started < 5 * WAITS["request_timeout_seconds"], "5 attempts of 1 s, not of the others"
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


@pytest.mark.parametrize("fault", ["503", "404"])
def test_a_store_that_cannot_be_reached_is_no_reason_to_fall_back(two_steps, proxy, quick, fault):
    """Falling back is for damage: an outage must not cost steps."""
    proxy.fault(fault, "get", key="distcp")
    with pytest.raises(CheckpointError, match="failed 5 times"):
        Run(two_steps, **WAITS).checkpoint.load()
    proxy.reset()
    assert Run(two_steps, **WAITS).checkpoint.load() == 2


def test_an_empty_answer_is_no_empty_folder(two_steps, proxy, quick):
    """A run that believed it would begin anew."""
    proxy.fault("empty", "list", times=2)
    assert Run(two_steps, **WAITS).checkpoint.load() == 2
    assert proxy.counts()["fault:empty"] == 2


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


def test_a_save_that_removes_one_lists_three_times(two_steps, proxy):
    Run(two_steps, **WAITS).train(2, 3)
    assert steps_in(two_steps) == [3, 2]
    counts = proxy.counts()
    assert (counts["list"] - 1, counts["list_uploads"]) == (3, 1)  # one is the test's own


def test_beside_another_runs_a_save_reads_once_whose_they_are_and_removes_only_its_own(two_steps, proxy):
    store, run = store_at(two_steps), Run(two_steps, **WAITS, run_folder=Path("other"))
    store.client.create_multipart_upload(Bucket=store.bucket, Key="step-00000001-0123456789ab/x")  # in 2010, by moto
    run.train(2, 3)
    assert proxy.counts()["get"] == 2  # two manifests
    run.train(3, 5)
    counts = proxy.counts()
    assert (counts["get"], "list_uploads" in counts) == (2, False)
    assert steps_in(two_steps) == [5, 4, 2, 1]


def test_a_bucket_is_one_runs_which_may_be_lost_and_made_again(bucket, tmp_path, monkeypatch):
    """Whole runs of train.py, as by SkyPilot: the run folder goes with the machine, the bucket stays."""
    data = write_dataset(tmp_path / "data", [[[1 + i % 90] * 60 + [0] for i in range(60)]], vocab_size=100)
    monkeypatch.chdir(tmp_path)
    arguments = ["--model.flavor=tiny", "--model.vocab_size=128", "--training.seq_len=32", "--validation.enable=false"]
    arguments += ["--training.local_batch_size=2", "--training.param_dtype=float32", "--lr_scheduler.warmup_steps=1"]
    arguments += ["--metrics.tensorboard=false", f"--data.datasets={data}", f"--checkpoint.folder={bucket}/run"]
    assert call(tmp_path, *arguments, "--run.folder=a", "--training.steps=2").returncode == 0
    before = store_at(bucket).sizes()
    refused = call(tmp_path, *arguments, "--run.folder=b", "--training.steps=3")
    assert (refused.returncode, store_at(bucket).sizes(), Path("b").exists()) == (2, before, False)
    assert f"error: checkpoint.folder = '{bucket}/run': its newest checkpoint, step-00000002-" in refused.stderr
    assert f"{Path('a').absolute()}: set another checkpoint.folder." in refused.stderr
    assert f"checkpoint.initial_load = '{bucket}/run'" in refused.stderr
    shutil.rmtree("a")
    again = call(tmp_path, *arguments, "--run.folder=a", "--training.steps=3")
    assert again.returncode == 0, again.stderr
    assert f"resumed from {bucket}/run/step-00000002-" in again.stderr


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
    import_model(tmp_path, f"{bucket}/models/imported")
    export_model(f"{bucket}/models/imported", tmp_path / "back", dtype="float32", file_gb=1e-4)
    assert len(list((tmp_path / "back").glob("*.safetensors"))) > 1
