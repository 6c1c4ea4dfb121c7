"""Checkpoints on object storage with the S3 API.

Uses only what every such store guarantees. An object is written once, whole, under its own name. There are no
directories, renames, appends or tests for existence. Endpoint and credentials come from the environment, as for
any AWS tool: AWS_ENDPOINT_URL_S3 or AWS_ENDPOINT_URL, AWS_REGION, AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY.

Calls botocore (a dependency of s3fs) directly: its blocking client on several threads moves more bytes per core
than s3fs's one event loop, and lets us decide what to retry and for how long.
"""

import io
import os
import random
import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from functools import partial
from http.client import HTTPException
from typing import IO, Any, TypeVar, cast

import botocore.session
import numpy as np
from botocore.config import Config
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConnectionError,
    CredentialRetrievalError,
    HTTPClientError,
    IncompleteReadError,
    NoCredentialsError,
    PartialCredentialsError,
    ResponseStreamingError,
)
from botocore.parsers import ResponseParserError
from botocore.response import StreamingBody
from urllib3.exceptions import HTTPError

from checkpoint.names import is_checkpoint_name
from checkpoint.stores import CheckpointError, DamagedError, join
from config import Checkpoint

T = TypeVar("T")

PART_BYTES = 16 << 20
PARTS_IN_FLIGHT = 2  # per file being written
READ_BYTES = 32 << 20  # larger ranges are read in pieces, in parallel
READS_IN_FLIGHT = 4  # per such range
CONNECT_SECONDS = 10
REQUEST_ATTEMPTS = 5
# Error codes that a retry may cure: the body came late, incomplete or not as signed, or the credentials expired and
# somebody may have renewed them.
PASSING = ("RequestTimeout", "SlowDown", "IncompleteBody", "BadDigest", "XAmzContentSHA256Mismatch", "ExpiredToken")
PASSING_STATUS = (404, 408, 409, 429, 499)  # 409: another request on the object is under way; 499: incomplete body
PASSING_ERRORS = (
    ClientError,
    HTTPClientError,
    ConnectionError,
    CredentialRetrievalError,  # from a command or server that renews credentials
    IncompleteReadError,
    ResponseParserError,
    ValueError,  # from botocore, if a bit of a number in an answer flipped
    KeyError,  # from botocore, if the credentials service answers with a proxy's page
    HTTPError,  # from urllib3, if TLS finds a flipped bit in a body
)
PROBE = ".probe"
# Argument that requests the next page of a listing → the field of a page with its value.
OBJECTS = {"ContinuationToken": "NextContinuationToken"}
UPLOADS = {"KeyMarker": "NextKeyMarker", "UploadIdMarker": "NextUploadIdMarker"}
# The field that each of these answers must have. A page without it, such as an empty one, is a proxy's.
SAID = {
    "put_object": "ETag",
    "get_object": "ETag",
    "list_objects_v2": "IsTruncated",
    "list_multipart_uploads": "IsTruncated",
    "create_multipart_upload": "UploadId",
    "upload_part": "ETag",
    "complete_multipart_upload": "ETag",
}


class S3Store:
    """The objects under `s3://bucket/prefix`.

    A request without an answer for `request_timeout_seconds` is retried, up to REQUEST_ATTEMPTS tries in all. An object
    that must exist but is not seen is waited for, up to `visibility_seconds`: some stores show new objects late.
    """

    read_threads = 8

    def __init__(self, url: str, settings: Checkpoint) -> None:
        self.url = url.rstrip("/")
        self.bucket, _, self.prefix = self.url.removeprefix("s3://").partition("/")
        self.visibility_seconds = settings.visibility_seconds
        self.request_timeout_seconds = settings.request_timeout_seconds
        self.client = self._connect()

    def _connect(self) -> Any:
        """Make a client with the current credentials."""
        config = Config(
            connect_timeout=CONNECT_SECONDS,
            read_timeout=self.request_timeout_seconds,
            retries={"total_max_attempts": 1},  # `_repeated` retries, as it knows which requests may be
            max_pool_connections=64,
            request_checksum_calculation="when_required",  # not every S3 API knows the newer checksums
            response_checksum_validation="when_required",
        )
        try:
            session = botocore.session.get_session()  # it does not know AWS_REGION
            region = os.environ.get("AWS_REGION") or session.get_config_variable("region") or "us-east-1"
            client = session.create_client("s3", region_name=region, config=config)
            said = (client.meta.config.s3 or {}).get("payload_signing_enabled")
            if said is None and client.meta.endpoint_url.startswith("https:"):  # TLS vouches for bodies
                unsigned = config.merge(Config(s3={"payload_signing_enabled": False}))
                client = session.create_client("s3", region_name=region, config=unsigned)
            return client
        except (BotoCoreError, ValueError) as error:
            raise CheckpointError(
                f"{self.url}: {error}; check AWS_PROFILE, AWS_REGION and AWS_ENDPOINT_URL_S3"
            ) from None

    def sizes(self, prefix: str = "") -> dict[str, int]:
        sizes: dict[str, int] = {}
        for page in self._pages("list_objects_v2", f"{prefix}/" if prefix else "", OBJECTS):
            sizes |= {self._name(entry["Key"]): entry["Size"] for entry in page.get("Contents", ())}
        return sizes

    def folders(self) -> set[str]:
        pages = self._pages("list_objects_v2", "", OBJECTS, Delimiter="/")
        return {self._name(entry["Prefix"]).rstrip("/") for page in pages for entry in page.get("CommonPrefixes", ())}

    def read(self, name: str) -> bytes:
        return self._visible(name, lambda: self._ask("get_object", Key=self._key(name))["Body"].read())

    def read_into(self, name: str, offset: int, view: memoryview, alone: bool = False) -> None:
        def fetch(start: int) -> None:
            piece = view[start : start + READ_BYTES]
            first, last = offset + start, offset + start + len(piece) - 1

            def get() -> int:
                part = f"bytes={first}-{last}"
                answer = self._ask("get_object", Key=self._key(name), Range=part)
                held = re.match(rf"bytes {first}-(\d+)/(\d+)", answer.get("ContentRange", ""))
                # The whole object, for example, or less than it has: its bytes would pass for damaged ones.
                if not held or int(held[1]) < min(last, int(held[2]) - 1):
                    raise CheckpointError(f"{join(self.url, name)}: asked for {part}, but the server sent other bytes")
                return _receive(answer["Body"], int(held[1]) + 1 - first, piece)

            done = self._visible(name, get)
            if done != len(piece):
                raise DamagedError(f"{join(self.url, name)}: ends at byte {first + done}, the rest is missing")

        with ThreadPoolExecutor(READS_IN_FLIGHT) as threads:
            list(threads.map(fetch, range(0, len(view), READ_BYTES)))

    @contextmanager
    def create(self, name: str) -> Iterator[IO[bytes]]:
        with ThreadPoolExecutor(PARTS_IN_FLIGHT) as threads:
            stream = _MultipartStream(self, name, threads)
            try:
                yield cast(IO[bytes], stream)
                stream.complete()
            except BaseException:
                stream.abort()
                raise

    def put(self, name: str, data: bytes) -> None:
        self._call("put_object", name, Body=data)

    def check_writable(self) -> None:
        self.put(PROBE, b"")
        with suppress(CheckpointError):  # the bucket may forbid it; the next start overwrites the probe
            self.remove([PROBE])

    def remove(self, names: list[str]) -> None:
        # One request each: DeleteObjects answers 200 even if it removed nothing.
        def delete(name: str) -> None:
            with suppress(_NotFoundError):  # some stores report this
                self._call("delete_object", name)

        for name in names[:1]:
            delete(name)
        with ThreadPoolExecutor(8) as threads:
            list(threads.map(delete, names[1:]))

    def abort_uploads(self, older_than_seconds: float) -> None:
        for page in self._pages("list_multipart_uploads", "", UPLOADS):
            for upload in page.get("Uploads", ()):
                name = self._name(upload["Key"])
                old = time.time() - upload["Initiated"].timestamp() > older_than_seconds
                if old and is_checkpoint_name(name.partition("/")[0]):
                    with suppress(_NotFoundError):
                        self._call("abort_multipart_upload", name, UploadId=upload["UploadId"])

    def _pages(self, method: str, folder: str, following: dict[str, str], **options: str) -> Iterator[dict[str, Any]]:
        """Yield all pages of a listing of `folder`, which is "" or ends with a slash."""
        more: dict[str, str] = {}
        while True:
            page = self._repeated(folder, partial(self._ask, method, Prefix=self._key(folder), **options, **more))
            yield page
            if not page["IsTruncated"]:
                return
            before, more = more, {argument: page.get(field, "") for argument, field in following.items()}
            if more == before or not any(more.values()):
                raise CheckpointError(f"{join(self.url, folder)}: its listing breaks off after a page")

    def _key(self, name: str) -> str:
        """The key of `name`. Has a slash after the prefix even for "": without it, `run` would also list `run-2`."""
        return f"{self.prefix}/{name}" if self.prefix else name

    def _name(self, key: str) -> str:
        return key.removeprefix(self._key(""))

    def _call(self, method: str, name: str, **arguments: Any) -> dict[str, Any]:
        """Make an S3 request on the object `name`, and retry if that can help. Raises CheckpointError naming it."""
        return self._repeated(name, lambda: self._ask(method, Key=self._key(name), **arguments))

    def _ask(self, method: str, **arguments: Any) -> dict[str, Any]:
        """Make an S3 request once. Raises botocore's errors."""
        answer = getattr(self.client, method)(Bucket=self.bucket, **arguments)
        if method in SAID and SAID[method] not in answer:
            raise ResponseParserError(f"{method}: the answer has no {SAID[method]}")
        return cast(dict[str, Any], answer)

    def _visible(self, name: str, fetch: Callable[[], T]) -> T:
        """Try `fetch()` until the object is seen. Raises DamagedError after `visibility_seconds`."""
        deadline = time.monotonic() + self.visibility_seconds
        pause = 0.1
        while True:
            try:
                return self._repeated(name, fetch)
            except _NotFoundError:
                if time.monotonic() > deadline:
                    raise DamagedError(f"{join(self.url, name)}: missing") from None
                time.sleep(pause)
                pause = min(2 * pause, 5.0)

    def _repeated(self, name: str, call: Callable[[], T]) -> T:
        place = join(self.url, name)
        for attempt in range(1, REQUEST_ATTEMPTS + 1):
            try:
                return call()
            except (NoCredentialsError, PartialCredentialsError) as error:
                raise CheckpointError(f"{place}: {error}; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY") from None
            except (RecursionError, *PASSING_ERRORS) as error:
                if isinstance(error, RecursionError) or isinstance(error.__context__, RecursionError):
                    # From botocore, which asks the same endpoint for the bucket's region.
                    raise CheckpointError(
                        f"{place}: redirected elsewhere; check AWS_ENDPOINT_URL_S3 (https?) and AWS_REGION"
                    ) from None
                if isinstance(error, ClientError):
                    code = error.response["Error"]["Code"]
                    if code == "ExpiredToken" or (code == "InvalidAccessKeyId" and attempt == 1):
                        self.client = self._connect()  # a client reads its credentials file once
                    else:
                        _raise_if_final(place, error)
                if attempt == REQUEST_ATTEMPTS:
                    raise CheckpointError(f"{place}: failed {REQUEST_ATTEMPTS} times; the last time: {error}") from None
                time.sleep((2**attempt / 2) * random.uniform(0.5, 1.0))
            except BotoCoreError as error:
                raise CheckpointError(f"{place}: {error}") from None
        raise AssertionError("unreachable")


def _receive(body: StreamingBody, length: int, view: memoryview) -> int:
    """Read a body of `length` bytes into `view` and return how many of them went there.

    Reads straight from the connection: urllib3 would allocate memory for each body and copy it, a quarter of the time.
    Raises HTTPClientError, or IncompleteReadError if the body is cut short.
    """
    response, done = body._raw_stream, 0
    try:
        while count := response._fp.readinto(view[done:]):
            done += count
    except (OSError, HTTPException) as error:
        response.close()
        raise ResponseStreamingError(error=error) from error
    if done == length:
        response.release_conn()
        return done
    response.close()
    if done < len(view):
        raise IncompleteReadError(actual_bytes=done, expected_bytes=length)
    return done


def _raise_if_final(place: str, error: ClientError) -> None:
    """Raise what the answer means, unless a retry may get another answer."""
    status, code = error.response["ResponseMetadata"]["HTTPStatusCode"], error.response["Error"]["Code"]
    # AssumeRole: the credentials service cannot reach the identity provider, or a token is just being renewed.
    if code in PASSING or (status == 400 and error.operation_name.startswith("AssumeRole")):
        return
    # A store's 404 has a code, except for a HEAD. One without comes from a proxy that does not find the store.
    if status == 404 and (code not in ("", "404") or error.operation_name == "HeadObject"):
        kind = CheckpointError if code == "NoSuchBucket" else _NotFoundError
        raise kind(f"{place}: {error}: no such object or bucket") from None
    if status in (401, 403):
        raise CheckpointError(f"{place}: not allowed: {error}; check the credentials and what they permit") from None
    if status == 416:
        raise DamagedError(f"{place}: is cut short: ends before the bytes to be read") from None
    if 300 <= status < 500 and status not in PASSING_STATUS:
        raise CheckpointError(f"{place}: refused: {error}") from None


class _NotFoundError(CheckpointError):
    """The store has no such object, upload or bucket, or does not show it yet."""


class _MultipartStream(io.RawIOBase):
    """An object being written in parts, a few at a time. It exists only once it is complete."""

    def __init__(self, store: S3Store, name: str, threads: ThreadPoolExecutor) -> None:
        self.store, self.name, self.threads = store, name, threads
        self.upload_id = ""
        self.parts: list[Future[dict[str, Any]]] = []
        # Reused, since new memory costs more than the copy into it. One is filled while the others are sent.
        self.buffers = [bytearray() for _ in range(PARTS_IN_FLIGHT + 1)]
        self.filled = 0
        self.size = 0

    def write(self, data: Any) -> int:
        bytes_ = np.frombuffer(data, np.uint8)
        self.size += len(bytes_)
        done = 0
        while done < len(bytes_):
            buffer = self._buffer()
            taken = min(len(bytes_) - done, len(buffer) - self.filled)
            # With numpy: a memoryview would block all other threads, including the one that trains.
            np.frombuffer(buffer, np.uint8)[self.filled : self.filled + taken] = bytes_[done : done + taken]
            self.filled += taken
            done += taken
            if self.filled == len(buffer):
                self._send(buffer)
        return len(bytes_)

    def complete(self) -> None:
        """Complete the object. It is durable once this returns."""
        if not self.upload_id:
            self.store.put(self.name, bytes(memoryview(self._buffer())[: self.filled]))
            return
        if self.filled:
            self._send(self._buffer()[: self.filled])
        tags = [{"PartNumber": i, "ETag": part.result()["ETag"]} for i, part in enumerate(self.parts, start=1)]
        try:
            self._call("complete_multipart_upload", UploadId=self.upload_id, MultipartUpload={"Parts": tags})
        except _NotFoundError:
            # No such upload: an attempt whose answer got lost has completed it, or somebody aborted it.
            look = partial(self.store._ask, "head_object", Key=self.store._key(self.name))
            with suppress(DamagedError):
                if self.store._visible(self.name, look)["ContentLength"] == self.size:
                    return
            raise

    def abort(self) -> None:
        """Leave nothing behind, if the store can still be reached."""
        for part in self.parts:
            part.cancel()
        wait(self.parts)  # a part that arrives after the abort would stay
        if self.upload_id:
            with suppress(CheckpointError):
                self._call("abort_multipart_upload", UploadId=self.upload_id)

    def _buffer(self) -> bytearray:
        """The buffer of the part being filled. The part that used it before has been sent."""
        place = len(self.parts) % len(self.buffers)
        # An upload has at most 10,000 parts. They grow, so that any size fits.
        part_bytes = PART_BYTES << (len(self.parts) // 1000)
        if len(self.buffers[place]) != part_bytes:
            self.buffers[place] = bytearray(part_bytes)
        return self.buffers[place]

    def _send(self, body: bytearray) -> None:
        if not self.upload_id:
            self.upload_id = self._call("create_multipart_upload")["UploadId"]
        arguments = {"UploadId": self.upload_id, "PartNumber": len(self.parts) + 1, "Body": body}
        self.parts.append(self.threads.submit(self._call, "upload_part", **arguments))
        self.filled = 0
        if len(self.parts) > PARTS_IN_FLIGHT:
            self.parts[-PARTS_IN_FLIGHT - 1].result()

    def _call(self, method: str, **arguments: Any) -> dict[str, Any]:
        return self.store._call(method, self.name, **arguments)
