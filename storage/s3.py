"""A store on object storage with the S3 API.

Endpoint and credentials come from the environment, as for any AWS tool: AWS_ENDPOINT_URL_S3,
AWS_REGION, AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, the `s3` section of ~/.aws/config. Calls
botocore (a dependency of s3fs) directly: its blocking client on several threads moves more bytes
per core than s3fs's one event loop, and lets us decide what to retry and for how long.
"""

import io
import os
import re
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from http.client import HTTPException
from typing import IO, Any, cast

import botocore.exceptions as aws
import botocore.session
import numpy as np
from botocore.config import Config
from botocore.parsers import ResponseParserError

from storage.errors import DamagedError, MissingError, OutageError, StoreError, join, retry

CONNECT_SECONDS = 10  # longest wait for a connection
ANSWER_SECONDS = 30  # longest wait for more of an answer
PART_BYTES = 16 << 20  # of an object being written
PARTS_IN_FLIGHT = 2  # of each object being written
READ_BYTES = 32 << 20  # larger ranges are read in pieces
READS_IN_FLIGHT = 4  # pieces of one range
# What a retry may cure: bodies that came late, incomplete or changed, a failing server that renews credentials, another
# request on the object (409), pages of a proxy, which botocore fails to read.
BOTOCORE_ERRORS = (aws.HTTPClientError, aws.ConnectionError, aws.CredentialRetrievalError, ResponseParserError)
PASSING_ERRORS = (*BOTOCORE_ERRORS, OSError, HTTPException, ValueError, KeyError)
PASSING_CODES = ("RequestTimeout", "IncompleteBody", "BadDigest", "XAmzContentSHA256Mismatch", "InvalidIdentityToken")
PASSING_STATUSES = (404, 408, 409, 429, 499, 500, *range(502, 600))
CLEANING = ("delete_object", "abort_multipart_upload")  # tried once: training must not wait
# First word of a request → the field that its answer must have. A page without it, even an empty one, is a proxy's.
FIELDS = {"put": "ETag", "upload": "ETag", "complete": "ETag", "create": "UploadId", "list": "IsTruncated"}
HINTS = {  # pattern in the text of an error → what to do about it
    "CERTIFICATE_VERIFY_FAILED": "name the certificate that signed the store's: AWS_CA_BUNDLE=/path/to/ca.pem",
    r"WRONG_VERSION|redirected|Invalid endpoint|\(400\)": "check AWS_ENDPOINT_URL_S3 (https or http?) and AWS_REGION",
    "ExpiredToken": "the credentials have expired, renew them",
    "RequestTimeTooSkewed": "set this machine's clock",
    "CredentialsError|InvalidAccessKeyId|SignatureDoes": "check AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
    r"\((AccessDenied|40[13])\)": "check what the credentials permit",
}


class S3Store:
    """The objects under `s3://bucket/prefix`. All methods raise StoreError, after `retry_seconds` if tries may help."""

    read_threads = 8  # parallel reads that it serves well

    def __init__(self, url: str, retry_seconds: float) -> None:
        self.url = url.rstrip("/")
        self.retry_seconds = retry_seconds
        self.bucket, _, prefix = self.url.removeprefix("s3://").partition("/")
        self.prefix = f"{prefix}/" if prefix else ""  # without the slash, a listing of `run` would also show `run-2`
        self.client: Any = None  # made by the first request

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"client": None}  # another process makes its own

    def connect(self) -> Any:
        """Make a client with the current settings and credentials. It reads their files only once."""
        config = Config(
            connect_timeout=CONNECT_SECONDS,
            read_timeout=ANSWER_SECONDS,
            max_pool_connections=64,
            retries={"total_max_attempts": 1},  # `_call` knows better which requests may be repeated
            request_checksum_calculation="when_required",  # not every S3 API knows the newer checksums
            response_checksum_validation="when_required",
        )
        session = botocore.session.get_session()  # it does not know AWS_REGION
        region = os.environ.get("AWS_REGION") or session.get_config_variable("region") or "us-east-1"
        client = session.create_client("s3", region_name=region, config=config)
        if client.meta.endpoint_url.startswith("https:"):  # TLS vouches for bodies, unless the user's config says more
            client.meta.config.s3 = {"payload_signing_enabled": False, **(client.meta.config.s3 or {})}
        return client

    def sizes(self, prefix: str = "") -> dict[str, int]:
        """Name → bytes of every file under the folder `prefix`; {} if there is none."""
        sizes: dict[str, int] = {}
        folder = f"{prefix}/" if prefix else ""
        further: dict[str, Any] = {}
        while True:
            page = self._call("list_objects_v2", folder, **further)
            for entry in page.get("Contents", ()):
                sizes[entry["Key"].removeprefix(self.prefix)] = entry["Size"]
            if not page["IsTruncated"]:
                return sizes
            further["ContinuationToken"] = page["NextContinuationToken"]

    def read(self, name: str, offset: int = 0, size: int | None = None) -> memoryview:
        """Read a file, which is not empty, or a range of it. Raises DamagedError if it is missing or too short."""
        if size is None:
            return self._read(name, offset, None)
        content = np.empty(size, np.uint8).data

        def read_piece(start: int) -> None:
            self._read(name, offset + start, content[start : start + READ_BYTES])

        with ThreadPoolExecutor(READS_IN_FLIGHT) as threads:
            list(threads.map(read_piece, range(0, size, READ_BYTES)))
        return content

    def _read(self, name: str, first: int, target: memoryview | None) -> memoryview:
        """Fill `target` with the bytes from `first` on, or return all of them."""
        last = "" if target is None else first + len(target) - 1
        wanted = f"bytes={first}-{last}"

        # Trusts an answer by its Content-Range: a gateway need not send an ETag, and a proxy's page would pass for
        # damaged bytes.
        def receive(answer: dict[str, Any]) -> memoryview:
            found = re.match(rf"bytes {first}-(\d+)/(\d+)", answer.get("ContentRange", ""))
            if not found:
                raise ConnectionError(f"asked for {wanted}, but the server sent other bytes")
            stop = int(found[1]) + 1
            size = int(found[2])
            end = size if target is None else first + len(target)
            if stop != min(end, size):
                raise ConnectionError(f"asked for {wanted}, but the server sent other bytes")
            if stop < end:
                raise DamagedError(f"{join(self.url, name)}: ends at byte {stop}, the rest is missing")
            content = np.empty(stop - first, np.uint8).data if target is None else target
            _fill(content, answer["Body"]._raw_stream)
            return content

        return self._call("get_object", name, receive=receive, Range=wanted)

    @contextmanager
    def create(self, name: str) -> Iterator[IO[bytes]]:
        """A stream to write. The file is durable and visible once the context ends well, otherwise gone."""
        with ThreadPoolExecutor(PARTS_IN_FLIGHT) as threads:
            upload = _Upload(self, name, threads)
            try:
                yield cast(IO[bytes], upload)
                upload.finish()
            except BaseException:
                threads.shutdown(cancel_futures=True)  # waits: a part that arrives after the abort would stay
                upload.abort()
                raise

    def put(self, name: str, data: bytes | bytearray) -> None:
        """Write a small file atomically and durably."""
        self._call("put_object", name, Body=data)

    def check_writable(self) -> None:
        """Refuse a place where nothing can be written or, on S3, not be read back. Leaves nothing behind."""
        probe = f".probe-{os.urandom(4).hex()}"
        self.put(probe, b"probe")
        try:
            self.read(probe)
        finally:
            with suppress(StoreError):  # the bucket may forbid it
                self.remove([probe])

    def remove(self, names: list[str]) -> None:
        """Remove files, the first before all others. Ignores those already gone. Tries each once."""
        delete = partial(self._call, "delete_object")  # DeleteObjects answers 200 even if it removed nothing
        for name in names[:1]:
            delete(name)
        with ThreadPoolExecutor(8) as threads:
            list(threads.map(delete, names[1:]))

    def _call(self, method: str, name: str, receive: Callable[..., Any] = dict, **arguments: Any) -> Any:
        """Make a request on an object or a listing and `receive` its answer, both again while that may help."""
        verb = method.partition("_")[0]
        arguments["Bucket"] = self.bucket
        arguments["Prefix" if verb == "list" else "Key"] = self.prefix + name
        retry_seconds = 0 if method in CLEANING else self.retry_seconds

        def attempt() -> Any:
            try:
                return receive(self._request(method, verb, arguments))
            except (*PASSING_ERRORS, aws.ClientError, aws.BotoCoreError, RecursionError) as error:
                reason = explain(error, join(self.url, name))
            if isinstance(reason, MissingError) and verb in ("delete", "abort"):
                return {}  # gone already, as some stores report
            raise reason

        return retry(attempt, retry_seconds)

    def _request(self, method: str, verb: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """Ask once. Raises ConnectionError for an answer that is none of the store's."""
        if self.client is None:
            self.client = self.connect()
        answer = getattr(self.client, method)(**arguments)
        field = FIELDS.get(verb, "ResponseMetadata")
        if field not in answer:
            raise ConnectionError(f"{method}: the answer has no {field}")
        return answer


def part_bytes(number: int) -> int:
    """The size of a part of an upload, counted from 0. They grow, since an upload has at most 10,000."""
    return PART_BYTES << number // 1000


class _Upload(io.RawIOBase):
    """A file being written: parts sent while the next is filled, or one request if it is small."""

    def __init__(self, store: S3Store, name: str, threads: ThreadPoolExecutor) -> None:
        self.store = store
        self.name = name
        self.threads = threads
        self.upload_id = ""  # of an upload in parts, which the first full part begins
        self.sent: list[Future[dict[str, Any]]] = []
        self.part = bytearray()  # the next part
        self.filled_bytes = 0  # of it
        self.written_bytes = 0

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.written_bytes

    def write(self, data: Any) -> None:
        """Copy `data` into parts, and send those that are full."""
        rest = np.frombuffer(data, np.uint8)
        self.written_bytes += len(rest)
        while len(rest):
            if not self.part:
                self.part = bytearray(part_bytes(len(self.sent)))
            room = np.frombuffer(self.part, np.uint8)[self.filled_bytes :]
            size = min(len(room), len(rest))
            room[:size] = rest[:size]  # numpy lets all other threads run meanwhile, such as the one that trains
            rest = rest[size:]
            self.filled_bytes += size
            if self.filled_bytes == len(self.part):
                self._send()

    def finish(self) -> None:
        """Send the rest, and make the file visible."""
        # A copy, since nothing can be cut off while another thread, such as Dask's profiler, looks at `write`'s frame.
        self.part = self.part[: self.filled_bytes]
        if not self.upload_id:
            self.store.put(self.name, self.part)
            return
        if self.part:
            self._send()
        tags = [{"PartNumber": i, "ETag": sent.result()["ETag"]} for i, sent in enumerate(self.sent, start=1)]
        try:
            self._call("complete_multipart_upload", MultipartUpload={"Parts": tags})
        except MissingError:  # no such upload: an attempt whose answer got lost completed it, or it was aborted
            self.store.read(self.name, 0, 1)

    def abort(self) -> None:
        """Drop what was sent."""
        if self.upload_id:
            with suppress(StoreError):
                self._call("abort_multipart_upload")

    def _send(self) -> None:
        if not self.upload_id:
            self.upload_id = self.store._call("create_multipart_upload", self.name)["UploadId"]
        number = len(self.sent) + 1
        self.sent.append(self.threads.submit(self._call, "upload_part", PartNumber=number, Body=self.part))
        self.part = bytearray()
        self.filled_bytes = 0
        if len(self.sent) > PARTS_IN_FLIGHT:
            self.sent[-PARTS_IN_FLIGHT - 1].result()

    def _call(self, method: str, **arguments: Any) -> Any:
        return self.store._call(method, self.name, UploadId=self.upload_id, **arguments)


def _fill(content: memoryview, body: Any) -> None:
    """Read a body straight from its connection: urllib3 would copy it, a quarter of the time."""
    done = 0
    try:
        while done < len(content):
            count = body._fp.readinto(content[done:])
            if not count:
                raise ConnectionError(f"{len(content) - done} bytes of {len(content)} did not come")
            done += count
    except BaseException:
        body.close()
        raise
    body.release_conn()


def explain(error: Exception, place: str) -> StoreError:
    """What an error of botocore's at `place` means, and what to do: an OutageError if a retry may help."""
    answer = error.response if isinstance(error, aws.ClientError) else {}
    status = answer.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    code = answer.get("Error", {}).get("Code", "")
    if status == 404 and code not in ("", "404", "NoSuchBucket"):  # without a code: a proxy does not find the store
        return MissingError(f"{place}: missing")
    if status == 416:
        return DamagedError(f"{place}: is cut short: ends before the bytes to be read")
    text = f"{type(error).__name__}: {error}"
    if 300 <= status < 400 or "maximum recursion" in text:  # botocore asks the same endpoint for the bucket's region
        text = f"redirected elsewhere: {text}"
    hints = [hint for pattern, hint in HINTS.items() if re.search(pattern, text)]
    message = "; ".join((f"{place}: {text}", *hints[:1]))
    passes = status in PASSING_STATUSES or code in PASSING_CODES
    if isinstance(error, PASSING_ERRORS) and not hints:
        passes = True
    if passes and code != "NoSuchBucket":
        return OutageError(message)
    return StoreError(message)
