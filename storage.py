"""One store for datasets and checkpoints: a local folder, or object storage with the S3 API.

Names are relative to the store and use `/`. Endpoint and credentials come from the environment, as for any AWS tool:
AWS_ENDPOINT_URL_S3, AWS_REGION, AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, the `s3` section of ~/.aws/config.
Calls botocore (a dependency of s3fs) directly: its blocking client on several threads moves more bytes per core than
s3fs's one event loop, and lets us decide what to retry and for how long.
"""

import errno
import logging
import os
import random
import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from http.client import HTTPException
from pathlib import Path
from tempfile import NamedTemporaryFile
from types import SimpleNamespace
from typing import IO, Any, cast

import botocore.exceptions as aws
import numpy as np
from botocore.config import Config
from botocore.parsers import ResponseParserError

from config import TitaniteError
from records import write_atomically

CONNECT_SECONDS, ANSWER_SECONDS = 10, 30  # longest waits for a connection, and for more of an answer
PART_BYTES, PARTS_IN_FLIGHT = 16 << 20, 2  # of each object being written
READ_BYTES, READS_IN_FLIGHT = 32 << 20, 4  # larger ranges are read in pieces, in parallel
# What a retry may cure: bodies that came late, incomplete or changed, a failing server that renews credentials, another
# request on the object (409), pages of a proxy, which botocore fails to read.
BOTOCORE_ERRORS = (aws.HTTPClientError, aws.ConnectionError, aws.CredentialRetrievalError, ResponseParserError)
PASSING_ERRORS = (*BOTOCORE_ERRORS, OSError, HTTPException, ValueError, KeyError)
PASSING_CODES = ("RequestTimeout", "IncompleteBody", "BadDigest", "XAmzContentSHA256Mismatch", "InvalidIdentityToken")
PASSING_STATUSES = (404, 408, 409, 429, 499, 500, *range(502, 600))
CLEANING = ("delete_object", "abort_multipart_upload", "list_multipart_uploads")  # tried once: training must not wait
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

logger = logging.getLogger(__name__)


class StoreError(TitaniteError):
    """A store cannot be used: it refuses, its disk is full, or it is set up wrongly."""


class OutageError(StoreError):
    """A store failed or did not answer for as long as it was tried. No mistake of the user: a restart may help."""


class DamagedError(StoreError):
    """Bytes are missing or differ from those written."""


class MissingError(DamagedError):
    """There is no such file."""


class LocalStore:
    """A folder of a file system. The methods are those of S3Store, which documents them."""

    def __init__(self, folder: str | Path) -> None:
        self.url, self.folder, self.read_threads = str(folder), Path(folder), 1  # in order, as disks prefer

    def sizes(self, prefix: str = "") -> dict[str, int]:
        sizes, errors = dict[str, int](), list[OSError]()
        with _file_errors(join(self.url, prefix)):
            for folder, folders, names in os.walk(self.folder / prefix, onerror=errors.append, followlinks=True):
                folders[:] = [name for name in folders if name != "lost+found"]  # root's, at the top of a file system
                for file in (Path(folder) / name for name in names):
                    with suppress(FileNotFoundError):  # removed since it was listed
                        sizes[file.relative_to(self.folder).as_posix()] = file.stat().st_size
            if errors := [error for error in errors if not isinstance(error, FileNotFoundError)]:
                raise errors[0]
        return sizes

    def read(self, name: str, offset: int = 0, size: int | None = None) -> memoryview:
        with _file_errors(join(self.url, name)):
            content = np.fromfile(self.folder / name, np.uint8, -1 if size is None else size, offset=offset).data
        if len(content) < (size or 0):
            raise DamagedError(f"{join(self.url, name)}: ends at byte {offset + len(content)}, the rest is missing")
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
            NamedTemporaryFile(dir=next(filter(os.path.lexists, (self.folder, *self.folder.parents)))).close()

    def remove(self, names: list[str]) -> None:
        for path in (self.folder / name for name in names):
            is_linked = path.parent != self.folder and path.parent.is_symlink()  # its target is not ours to remove
            with _file_errors(str(path)):
                (path.parent if is_linked else path).unlink(missing_ok=True)
        for folder in {(self.folder / name).parent for name in names} - {self.folder}:
            with suppress(OSError):  # it still holds files
                folder.rmdir()


class S3Store:
    """The objects under `s3://bucket/prefix`. All methods raise StoreError, after `retry_seconds` if tries may help."""

    def __init__(self, url: str, retry_seconds: float) -> None:
        self.url, self.retry_seconds = url.rstrip("/"), retry_seconds
        self.bucket, _, prefix = self.url.removeprefix("s3://").partition("/")
        self.prefix = f"{prefix}/" if prefix else ""  # without the slash, a listing of `run` would also show `run-2`
        self.client: Any = None  # made by the first request
        self.read_threads = 8  # parallel reads that it serves well

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"client": None}  # of another process, which has its own

    def connect(self) -> Any:
        """Make a client with the current settings and credentials. It reads their files only once."""
        # Not every S3 API knows the newer checksums. `_call` knows better which requests may be repeated.
        checksums = dict.fromkeys(("request_checksum_calculation", "response_checksum_validation"), "when_required")
        waits = {"connect_timeout": CONNECT_SECONDS, "read_timeout": ANSWER_SECONDS}
        config = Config(**checksums, **waits, max_pool_connections=64, retries={"total_max_attempts": 1})
        import botocore.session  # slow, and most processes never need it

        session = botocore.session.get_session()  # it does not know AWS_REGION
        region = os.environ.get("AWS_REGION") or session.get_config_variable("region") or "us-east-1"
        client = session.create_client("s3", region_name=region, config=config)
        if client.meta.endpoint_url.startswith("https:"):  # TLS vouches for bodies, unless the user's config says more
            client.meta.config.s3 = {"payload_signing_enabled": False, **(client.meta.config.s3 or {})}
        return client

    def sizes(self, prefix: str = "") -> dict[str, int]:
        """Name → bytes of every file under the folder `prefix`; {} if there is none."""
        sizes, more = dict[str, int](), dict[str, Any]()
        while True:
            page = self._call("list_objects_v2", f"{prefix}/" if prefix else "", **more)
            sizes |= {entry["Key"].removeprefix(self.prefix): entry["Size"] for entry in page.get("Contents", ())}
            if not page["IsTruncated"]:
                return sizes
            more = {"ContinuationToken": page["NextContinuationToken"]}

    def read(self, name: str, offset: int = 0, size: int | None = None) -> memoryview:
        """Read a file, which is not empty, or a range of it. Raises DamagedError if it is missing or too short."""
        if size is None:
            return self._read(name, offset, None)
        content, starts = np.empty(size, np.uint8).data, range(0, size, READ_BYTES)
        with ThreadPoolExecutor(READS_IN_FLIGHT) as threads:
            list(threads.map(lambda at: self._read(name, offset + at, content[at : at + READ_BYTES]), starts))
        return content

    def _read(self, name: str, first: int, target: memoryview | None) -> memoryview:
        """Fill `target` with the bytes from `first` on, or return all of them."""
        wanted = f"bytes={first}-{'' if target is None else first + len(target) - 1}"

        # Trusts an answer by its Content-Range: a gateway need not send an ETag, and a proxy's page would pass for
        # damaged bytes. Reads straight from the connection: urllib3 would copy each body, a quarter of the time.
        def receive(answer: dict[str, Any]) -> memoryview:
            held = re.match(rf"bytes {first}-(\d+)/(\d+)", answer.get("ContentRange", ""))
            stop, size = (int(held[1]) + 1, int(held[2])) if held else (0, 0)
            end = size if target is None else first + len(target)
            if not held or stop != min(end, size):
                raise ConnectionError(f"asked for {wanted}, but the server sent other bytes")
            if stop < end:
                raise DamagedError(f"{join(self.url, name)}: ends at byte {stop}, the rest is missing")
            content = np.empty(stop - first, np.uint8).data if target is None else target
            body, done = answer["Body"]._raw_stream, 0
            try:
                while count := body._fp.readinto(content[done:]):
                    done += count
            finally:
                body.release_conn() if done == len(content) else body.close()
            if done < len(content):
                raise ConnectionError(f"{len(content) - done} bytes of {len(content)} did not come")
            return content

        return self._call("get_object", name, receive=receive, Range=wanted)

    @contextmanager
    def create(self, name: str) -> Iterator[IO[bytes]]:
        """A stream to write. The file is durable and visible once the context ends well, otherwise gone."""
        call, upload, parts = partial(self._call, name=name), dict[str, Any](), list[Future[dict[str, Any]]]()
        part, filled = bytearray(), 0  # the next part

        def send() -> None:
            nonlocal part, filled
            if not upload:
                upload["UploadId"] = call("create_multipart_upload")["UploadId"]
            parts.append(threads.submit(call, "upload_part", PartNumber=len(parts) + 1, Body=part, **upload))
            part, filled = bytearray(), 0
            if len(parts) > PARTS_IN_FLIGHT:
                parts[-PARTS_IN_FLIGHT - 1].result()

        def write(data: Any) -> None:
            nonlocal part, filled
            rest = np.frombuffer(data, np.uint8)
            while len(rest):
                part = part or bytearray(PART_BYTES << len(parts) // 1000)  # they grow: an upload has at most 10,000
                room = np.frombuffer(part, np.uint8)[filled:][: len(rest)]
                room[:] = rest[: len(room)]  # numpy lets all other threads run meanwhile, such as the one that trains
                rest, filled = rest[len(room) :], filled + len(room)
                if filled == len(part):
                    send()

        with ThreadPoolExecutor(PARTS_IN_FLIGHT) as threads:
            try:
                yield cast(IO[bytes], SimpleNamespace(write=write))
                del part[filled:]
                if not upload:
                    self.put(name, part)
                    return
                if part:
                    send()
                tags = [{"PartNumber": i, "ETag": sent.result()["ETag"]} for i, sent in enumerate(parts, start=1)]
                try:
                    call("complete_multipart_upload", MultipartUpload={"Parts": tags}, **upload)
                except MissingError:  # no such upload: an attempt whose answer got lost completed it, or it was aborted
                    self.read(name, 0, 1)
            except BaseException:
                threads.shutdown(cancel_futures=True)  # waits: a part that arrives after the abort would stay
                with suppress(StoreError):
                    call("abort_multipart_upload", **upload)
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
        list(map(delete, names[:1]))
        with ThreadPoolExecutor(8) as threads:
            list(threads.map(delete, names[1:]))

    def abort_uploads(self, belongs: Callable[[str], bool]) -> None:
        """Drop unfinished uploads, which nothing else shows, of files that `belongs` accepts; at most 1,000 at once."""
        for upload in self._call("list_multipart_uploads", "").get("Uploads", ()):
            if belongs(name := upload["Key"].removeprefix(self.prefix)):
                self._call("abort_multipart_upload", name, UploadId=upload["UploadId"])

    def _call(self, method: str, name: str, receive: Callable[..., Any] = dict, **arguments: Any) -> Any:
        """Make a request on an object or a listing and `receive` its answer, both again while that may help."""
        verb, begin, attempt, renewed = method.partition("_")[0], time.monotonic(), 0, False
        arguments |= {"Bucket": self.bucket, "Prefix" if verb == "list" else "Key": self.prefix + name}
        while True:
            try:
                client = self.client = self.client or self.connect()
                answer = getattr(client, method)(**arguments)
                if (field := FIELDS.get(verb, "ResponseMetadata")) not in answer:
                    raise ConnectionError(f"{method}: the answer has no {field}")
                return receive(answer)
            except (*PASSING_ERRORS, aws.ClientError, aws.BotoCoreError, RecursionError) as error:
                reason, waited = explain(error, join(self.url, name)), time.monotonic() - begin
            if isinstance(reason, MissingError) and verb in ("delete", "abort"):
                return {}  # gone already, as some stores report
            if not renewed and re.search("ExpiredToken|InvalidAccessKeyId", str(reason)):
                self.client, renewed = None, True
                continue
            seconds = 0 if method in CLEANING else self.retry_seconds
            if not isinstance(reason, OutageError) or waited >= seconds:
                raise type(reason)(f"{reason}; tried for {waited:.0f} s" if waited >= seconds > 0 else str(reason))
            if attempt == 5:  # after some seconds
                logger.warning(f"{reason}; retrying for up to {seconds:g} s")
            time.sleep(0.1 * 2 ** min(attempt, 6) * random.uniform(0.5, 1.0))
            attempt += 1


Store = LocalStore | S3Store


def open_store(url: str | Path, retry_seconds: float = 180) -> Store:
    """The store at a path or `s3://bucket/prefix`. Raises StoreError."""
    scheme, separator, _ = str(url).partition("://")
    if not scheme or (separator and scheme != "s3"):
        raise StoreError(f"{str(url)!r}: must be a folder or s3://bucket/prefix")
    return S3Store(str(url), retry_seconds) if separator else LocalStore(url)


def join(url: str | Path, name: str) -> str:
    """`name` inside the folder `url`."""
    return f"{str(url).rstrip('/')}/{name}".rstrip("/")


def explain(error: Exception, place: str) -> StoreError:
    """What an error of botocore's at `place` means, and what to do: an OutageError if a retry may help."""
    answer, text = error.response if isinstance(error, aws.ClientError) else {}, f"{type(error).__name__}: {error}"
    status, code = answer.get("ResponseMetadata", {}).get("HTTPStatusCode", 0), answer.get("Error", {}).get("Code", "")
    if 300 <= status < 400 or "maximum recursion" in text:  # botocore asks the same endpoint for the bucket's region
        text = f"redirected elsewhere: {text}"
    hint = next((f"; {hint}" for pattern, hint in HINTS.items() if re.search(pattern, text)), "")
    if status == 404 and code not in ("", "404", "NoSuchBucket"):  # without a code: a proxy does not find the store
        return MissingError(f"{place}: missing")
    if status == 416:
        return DamagedError(f"{place}: is cut short: ends before the bytes to be read")
    passes = status in PASSING_STATUSES or code in PASSING_CODES or (isinstance(error, PASSING_ERRORS) and not hint)
    return (OutageError if passes and code != "NoSuchBucket" else StoreError)(f"{place}: {text}{hint}")


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
