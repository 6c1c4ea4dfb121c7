"""One store for datasets and checkpoints: a local folder, or object storage with the S3 API.

Names are relative to the store and use `/`. Endpoint and credentials come from the environment, as for any AWS tool:
AWS_ENDPOINT_URL_S3, AWS_REGION, AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, the `s3` section of ~/.aws/config.

Calls botocore (a dependency of s3fs) directly: its blocking client on several threads moves more bytes per core
than s3fs's one event loop, and lets us decide what to retry and for how long.
"""

import errno
import io
import logging
import os
import random
import re
import secrets
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from functools import partial
from http.client import HTTPException
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import IO, Any, TypeVar, cast

import botocore.exceptions as aws
import botocore.session
import numpy as np
from botocore.config import Config
from botocore.parsers import ResponseParserError

from config import TitaniteError
from records import write_atomically

T = TypeVar("T")

CONNECT_SECONDS, ANSWER_SECONDS = 10, 30  # longest waits for a connection, and for more of an answer
LONGEST_PAUSE_SECONDS = 5.0  # between two tries
PART_BYTES, PARTS_IN_FLIGHT = 16 << 20, 2  # of each object being written
READ_BYTES, READS_IN_FLIGHT = 32 << 20, 4  # larger ranges are read in pieces, in parallel
# What a retry may cure: bodies that came late, incomplete or changed, a failing server that renews credentials, another
# request on the object (409), pages of a proxy, which botocore fails to read.
PASSING_ERRORS = (
    *(aws.HTTPClientError, aws.ConnectionError, aws.CredentialRetrievalError, aws.IncompleteReadError),
    *(ResponseParserError, ConnectionError, ValueError, KeyError),
)
PASSING_CODES = ("RequestTimeout", "SlowDown", "IncompleteBody", "BadDigest", "XAmzContentSHA256Mismatch")
PASSING_STATUSES = (404, 408, 409, 429, 499, 500, *range(502, 600))
# The field that an answer must have. A page without it, such as an empty one, is a proxy's.
FIELDS = dict.fromkeys(("put_object", "upload_part", "complete_multipart_upload"), "ETag")
FIELDS |= dict.fromkeys(("list_objects_v2", "list_multipart_uploads"), "IsTruncated")
FIELDS |= {"create_multipart_upload": "UploadId"}
UNTRUSTED = "CERTIFICATE_VERIFY_FAILED"  # in the text of an error
OTHER_PROTOCOL = r"WRONG_VERSION_NUMBER|redirected|\((30\d|400)\)"
HINTS = {  # pattern in the text of an error → what to do about it
    UNTRUSTED: "name the certificate that signed the store's: AWS_CA_BUNDLE=/path/to/ca.pem",
    OTHER_PROTOCOL: "check AWS_ENDPOINT_URL_S3 (https or http?) and AWS_REGION",
    "ExpiredToken": "the credentials have expired, renew them",
    "RequestTimeTooSkewed": "set this machine's clock",
    "CredentialsError": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
    "InvalidAccessKeyId|SignatureDoesNotMatch": "check AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
    r"\((AccessDenied|40[13])\)": "check what the credentials permit",
}

logger = logging.getLogger(__name__)


class StoreError(TitaniteError):
    """A store cannot be used: it refuses, its disk is full, or it is set up wrongly."""


class OutageError(StoreError):
    """A store failed or did not answer for as long as it was tried. No mistake of the user: a restart may help."""


class DamagedError(StoreError):
    """Bytes are missing or differ from those written."""


class MissingError(DamagedError):
    """There is no such file, or the store does not show it yet."""


class LocalStore:
    """A folder of a file system. The methods are those of S3Store, which documents them."""

    read_threads = 1  # in order, as disks prefer

    def __init__(self, folder: str | Path) -> None:
        self.url, self.folder = str(folder), Path(folder)

    def sizes(self, prefix: str = "") -> dict[str, int]:
        def report(error: OSError) -> None:
            if not isinstance(error, FileNotFoundError):
                raise error

        sizes = {}
        with _file_errors(join(self.url, prefix)):
            for folder, folders, names in os.walk(self.folder / prefix, onerror=report, followlinks=True):
                folders[:] = [name for name in folders if name != "lost+found"]  # root's, at the top of a file system
                for file in (Path(folder) / name for name in names):
                    with suppress(FileNotFoundError):  # removed since it was listed
                        sizes[file.relative_to(self.folder).as_posix()] = file.stat().st_size
        return sizes

    def read(self, name: str, offset: int = 0, size: int | None = None) -> memoryview:
        with _file_errors(join(self.url, name)), open(self.folder / name, "rb") as file:
            file.seek(offset)
            content = np.empty(os.fstat(file.fileno()).st_size - offset if size is None else size, np.uint8).data
            done = file.readinto(content)
        if done < len(content):
            raise DamagedError(f"{join(self.url, name)}: ends at byte {offset + done}, the rest is missing")
        return content

    @contextmanager
    def create(self, name: str) -> Iterator[IO[bytes]]:
        path = self.folder / name
        with _file_errors(join(self.url, name)):
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(path, "xb") as file:
                try:
                    yield file
                    file.flush()
                    os.fsync(file.fileno())
                except BaseException:
                    path.unlink(missing_ok=True)
                    raise

    def put(self, name: str, data: bytes) -> None:
        path = self.folder / name
        with _file_errors(join(self.url, name)):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, data)
            for folder in (path.parent, path.parent.parent):  # the names must survive a power cut, too
                descriptor = os.open(folder, os.O_RDONLY)
                os.fsync(descriptor)
                os.close(descriptor)

    def check_writable(self) -> None:
        with _file_errors(self.url):
            there = next(folder for folder in (self.folder, *self.folder.parents) if os.path.lexists(folder))
            NamedTemporaryFile(dir=there, prefix=".probe-").close()

    def remove(self, names: list[str]) -> None:
        for path in (self.folder / name for name in names):
            is_linked = path.parent != self.folder and path.parent.is_symlink()  # its target is not ours to remove
            with _file_errors(str(path)):
                (path.parent if is_linked else path).unlink(missing_ok=True)
        for folder in {(self.folder / name).parent for name in names} - {self.folder}:
            with suppress(OSError):  # it still holds files
                folder.rmdir()


class S3Store:
    """The objects under `s3://bucket/prefix`. All methods raise StoreError.

    A request that fails in a way that may pass is tried again for `retry_seconds`. An object that must exist but is not
    seen is waited for, up to `visibility_seconds`: some stores show new objects late.
    """

    read_threads = 8  # number of parallel reads that it serves well

    def __init__(self, url: str, retry_seconds: float, visibility_seconds: float) -> None:
        self.url = url.rstrip("/")
        self.bucket, _, self.prefix = self.url.removeprefix("s3://").partition("/")
        self.retry_seconds, self.visibility_seconds = retry_seconds, visibility_seconds
        self.client = self._connect()

    def _connect(self) -> Any:
        """Make a client with the current credentials. It reads their file only once."""
        waits = {"connect_timeout": CONNECT_SECONDS, "read_timeout": ANSWER_SECONDS, "max_pool_connections": 64}
        # Not every S3 API knows the newer checksums. `_retried` knows better which requests may be repeated.
        checksums = dict.fromkeys(("request_checksum_calculation", "response_checksum_validation"), "when_required")
        config = Config(**waits, **checksums, retries={"total_max_attempts": 1})
        try:
            session = botocore.session.get_session()  # it does not know AWS_REGION
            region = os.environ.get("AWS_REGION") or session.get_config_variable("region") or "us-east-1"
            client = session.create_client("s3", region_name=region, config=config)
            is_set = "payload_signing_enabled" in (client.meta.config.s3 or {})
            if is_set or not client.meta.endpoint_url.startswith("https:"):
                return client
            config = config.merge(Config(s3={"payload_signing_enabled": False}))  # TLS vouches for bodies
            return session.create_client("s3", region_name=region, config=config)
        except (aws.BotoCoreError, ValueError) as error:
            raise StoreError(f"{self.url}: {error}; check AWS_PROFILE, AWS_REGION and AWS_ENDPOINT_URL_S3") from None

    def sizes(self, prefix: str = "") -> dict[str, int]:
        """Name → bytes of every file under the folder `prefix`; {} if there is none."""
        sizes, more = dict[str, int](), dict[str, Any]()
        while True:
            page = self._call("list_objects_v2", f"{prefix}/" if prefix else "", **more)
            sizes |= {self._name(entry["Key"]): entry["Size"] for entry in page.get("Contents", ())}
            if not page["IsTruncated"]:
                return sizes
            more = {"ContinuationToken": page["NextContinuationToken"]}

    def read(self, name: str, offset: int = 0, size: int | None = None) -> memoryview:
        """Read a file, which is not empty, or a range of it. Raises DamagedError if it is missing or too short."""

        def receive(first: int, piece: memoryview | None) -> memoryview:
            request = partial(self._receive, name, first, piece)
            return self._retried(name, request, self.retry_seconds, self.visibility_seconds)

        if size is None:
            return receive(offset, None)
        content, starts = np.empty(size, np.uint8).data, range(0, size, READ_BYTES)
        with ThreadPoolExecutor(READS_IN_FLIGHT) as threads:
            list(threads.map(lambda start: receive(offset + start, content[start : start + READ_BYTES]), starts))
        return content

    @contextmanager
    def create(self, name: str) -> Iterator[IO[bytes]]:
        """A stream to write. The file is durable and visible once the context ends well, otherwise gone."""
        with ThreadPoolExecutor(PARTS_IN_FLIGHT) as threads:
            stream = _MultipartStream(partial(self._call, name=name), partial(self.read, name), threads)
            try:
                yield cast(IO[bytes], stream)
                stream.complete()
            except BaseException:
                stream.abort()
                raise

    def put(self, name: str, data: bytes) -> None:
        """Write a small file atomically and durably."""
        self._call("put_object", name, Body=data)

    def check_writable(self) -> None:
        """Refuse a place where nothing can be written or, on S3, not be read back. Leaves nothing behind."""
        name, content = f".probe-{secrets.token_hex(4)}", secrets.token_bytes(16)
        self.put(name, content)
        try:
            if self.read(name) != content:
                raise StoreError(f"{join(self.url, name)}: other bytes come back than were written")
        finally:
            with suppress(StoreError):  # the bucket may forbid it
                self.remove([name])

    def remove(self, names: list[str]) -> None:
        """Remove files, the first before all others. Ignores those already gone. Tries each once."""

        # One request each: DeleteObjects answers 200 even if it removed nothing.
        def delete(name: str) -> None:
            with suppress(MissingError):  # some stores report this
                self._call("delete_object", name, seconds=0)

        for name in names[:1]:
            delete(name)
        with ThreadPoolExecutor(8) as threads:
            list(threads.map(delete, names[1:]))

    def abort_uploads(self, belongs: Callable[[str], bool], older_than_seconds: float) -> None:
        """Drop unfinished uploads, which nothing else shows, of files that `belongs` accepts; at most 1,000 at once."""
        for upload in self._call("list_multipart_uploads", "", seconds=0).get("Uploads", ()):
            name, age_seconds = self._name(upload["Key"]), time.time() - upload["Initiated"].timestamp()
            if age_seconds > older_than_seconds and belongs(name):
                with suppress(MissingError):
                    self._call("abort_multipart_upload", name, seconds=0, UploadId=upload["UploadId"])

    def _name(self, key: str) -> str:
        return key.removeprefix(f"{self.prefix}/" if self.prefix else "")

    def _receive(self, name: str, first: int, view: memoryview | None) -> memoryview:
        """Fill `view` with the bytes from `first` on, or return all of them. Raises DamagedError, PASSING_ERRORS.

        Reads straight from the connection: urllib3 would allocate memory for each body and copy it, a quarter of the
        time. The sign of a true answer is its Content-Range: a gateway need not send an ETag, and a proxy's page would
        pass for damaged bytes.
        """
        wanted = f"bytes={first}-" if view is None else f"bytes={first}-{first + len(view) - 1}"
        answer = self._ask("get_object", name, Range=wanted)
        held = re.match(rf"bytes {first}-(\d+)/(\d+)", answer.get("ContentRange", ""))
        length, rest = (int(held[1]) + 1 - first, int(held[2]) - first) if held else (0, 0)
        if not length or length != (rest if view is None else min(rest, len(view))):
            raise ConnectionError(f"asked for {wanted}, but the server sent other bytes")
        if view is not None and length < len(view):
            raise DamagedError(f"{join(self.url, name)}: ends at byte {first + length}, the rest is missing")
        view = np.empty(length, np.uint8).data if view is None else view
        response, done = answer["Body"]._raw_stream, 0
        try:
            while count := response._fp.readinto(view[done:]):
                done += count
        except (OSError, HTTPException) as error:
            raise ConnectionError(f"{type(error).__name__}: {error}") from error
        finally:
            response.release_conn() if done == length else response.close()
        if done < length:
            raise ConnectionError(f"{length - done} bytes of {length} did not come")
        return view

    def _call(self, method: str, name: str, seconds: float | None = None, **arguments: Any) -> dict[str, Any]:
        """Make an S3 request, again for `seconds` (None: `retry_seconds`) while that may help."""
        request = partial(self._ask, method, name, **arguments)
        return self._retried(name, request, self.retry_seconds if seconds is None else seconds)

    def _ask(self, method: str, name: str, **arguments: Any) -> dict[str, Any]:
        """Make an S3 request on an object or a listing, once. Raises botocore's errors, ConnectionError."""
        # The key of "" ends with a slash: without it, a listing of `run` would also show `run-2`.
        which = {"Prefix" if method.startswith("list") else "Key": f"{self.prefix}/{name}" if self.prefix else name}
        answer = getattr(self.client, method)(Bucket=self.bucket, **which, **arguments)
        if (field := FIELDS.get(method, "ResponseMetadata")) not in answer:
            raise ConnectionError(f"{method}: the answer has no {field}")
        return cast(dict[str, Any], answer)

    def _retried(self, name: str, request: Callable[[], T], seconds: float, visibility_seconds: float = 0) -> T:
        """`request()`, repeated for `seconds` while that may help, or until a missing object is seen."""
        begin, pause, warned, renewed = time.monotonic(), 0.1, False, False
        while True:
            try:
                return request()
            except (*PASSING_ERRORS, aws.ClientError, aws.BotoCoreError, RecursionError) as error:
                reason, waited = explain(error, join(self.url, name)), time.monotonic() - begin
            if not renewed and re.search("ExpiredToken|InvalidAccessKeyId", str(reason)):
                self.client, renewed = self._connect(), True
                continue
            limits = {MissingError: visibility_seconds, OutageError: seconds}
            if waited >= (limit := limits.get(type(reason), 0)):
                raise type(reason)(f"{reason}; tried for {waited:.0f} s" if limit else str(reason))
            if waited > 2 and not warned:
                warned = True
                logger.warning(f"{reason}; retrying for up to {limit:g} s")
            time.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)


class _MultipartStream(io.RawIOBase):
    """An object being written in parts, a few at a time. It exists only once it is complete."""

    def __init__(self, call: Callable[..., Any], look: Callable[..., memoryview], threads: ThreadPoolExecutor) -> None:
        self.call, self.look, self.threads = call, look, threads  # requests on this object
        self.upload: dict[str, str] = {}
        self.parts: list[Future[dict[str, Any]]] = []
        # Reused, since new memory costs more than the copy into it. One is filled while the others are sent.
        self.buffers = [bytearray()] * (PARTS_IN_FLIGHT + 1)
        self.filled = self.size = 0

    def write(self, data: Any) -> int:
        rest = np.frombuffer(data, np.uint8)
        written = len(rest)
        while len(rest):
            number = len(self.parts) % len(self.buffers)
            part_bytes = PART_BYTES << (len(self.parts) // 1000)  # parts grow, as an upload has at most 10,000
            if len(self.buffers[number]) != part_bytes:
                self.buffers[number] = bytearray(part_bytes)
            room = np.frombuffer(self.buffers[number], np.uint8)[self.filled :][: len(rest)]
            room[:] = rest[: len(room)]  # a memoryview would block all other threads, including the one that trains
            rest, self.filled = rest[len(room) :], self.filled + len(room)
            if self.filled == part_bytes:
                self._send()
        self.size += written
        return written

    def _send(self) -> None:
        """Send the part being filled, and wait until the buffer of the next one is free."""
        if not self.upload:
            self.upload = {"UploadId": self.call("create_multipart_upload")["UploadId"]}
        buffer = self.buffers[len(self.parts) % len(self.buffers)]
        body = buffer if self.filled == len(buffer) else buffer[: self.filled]
        part = {**self.upload, "PartNumber": len(self.parts) + 1, "Body": body}
        self.parts.append(self.threads.submit(self.call, "upload_part", **part))
        self.filled = 0
        if len(self.parts) > PARTS_IN_FLIGHT:
            self.parts[-PARTS_IN_FLIGHT - 1].result()

    def complete(self) -> None:
        """Complete the object. It is durable once this returns."""
        if not self.upload:
            self.call("put_object", Body=bytes(memoryview(self.buffers[0])[: self.filled]))
            return
        if self.filled:
            self._send()
        tags = [{"PartNumber": i, "ETag": part.result()["ETag"]} for i, part in enumerate(self.parts, start=1)]
        try:
            self.call("complete_multipart_upload", **self.upload, MultipartUpload={"Parts": tags})
        except MissingError:  # no such upload: an attempt whose answer got lost completed it, or it was aborted
            self.look(self.size - 1, 1)

    def abort(self) -> None:
        """Leave nothing behind, if the store can still be reached."""
        for part in self.parts:
            part.cancel()
        wait(self.parts)  # a part that arrives after the abort would stay
        if self.upload:
            with suppress(StoreError):
                self.call("abort_multipart_upload", seconds=0, **self.upload)


Store = LocalStore | S3Store


def open_store(url: str | Path, retry_seconds: float = 180, visibility_seconds: float = 0) -> Store:
    """The store at a path or `s3://bucket/prefix`; the waits are S3Store's. Raises StoreError."""
    scheme, separator, _ = str(url).partition("://")
    if not scheme or (separator and scheme != "s3"):
        raise StoreError(f"{str(url)!r}: must be a folder or s3://bucket/prefix")
    return S3Store(str(url), retry_seconds, visibility_seconds) if separator else LocalStore(url)


def join(url: str | Path, name: str) -> str:
    """`name` inside the folder `url`."""
    return f"{str(url).rstrip('/')}/{name}".rstrip("/")


def explain(error: Exception, place: str) -> StoreError:
    """What an error of botocore's at `place` means, and what to do: an OutageError if a retry may help."""
    answer = error.response if isinstance(error, aws.ClientError) else {}
    status, code = answer.get("ResponseMetadata", {}).get("HTTPStatusCode", 0), answer.get("Error", {}).get("Code", "")
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, RecursionError) or isinstance(error.__context__, RecursionError):
        text = "redirected elsewhere"  # botocore asks the same endpoint for the bucket's region
    said = f"{place}: {text}" + next((f"; {hint}" for pattern, hint in HINTS.items() if re.search(pattern, text)), "")
    if status == 404 and code not in ("", "404"):  # one without a code comes from a proxy that does not find the store
        return StoreError(said) if code == "NoSuchBucket" else MissingError(f"{place}: missing")
    if status == 416:
        return DamagedError(f"{place}: is cut short: ends before the bytes to be read")
    passes = isinstance(error, PASSING_ERRORS) and not re.search(f"{UNTRUSTED}|{OTHER_PROTOCOL}", text)
    if isinstance(error, aws.ClientError):
        # AssumeRole: the credentials service cannot reach the identity provider, or a token is just being renewed.
        passes = status in PASSING_STATUSES or code in PASSING_CODES or (status == 400 and "AssumeRole" in text)
    return (OutageError if passes else StoreError)(said)


@contextmanager
def _file_errors(place: str) -> Iterator[None]:
    """Turn an OSError into a StoreError that names the file, MissingError if there is none."""
    try:
        yield
    except FileNotFoundError:
        raise MissingError(f"{place}: missing") from None
    except OSError as error:
        hint = "; free some space, or set the folder to one on another disk" if error.errno == errno.ENOSPC else ""
        raise StoreError(f"{error.filename or place}: {error.strerror or error}{hint}") from error
