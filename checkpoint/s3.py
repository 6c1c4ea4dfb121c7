"""Checkpoints on object storage with the S3 API, by s3fs.

Nothing but what every such store keeps: an object is written once, whole, under a name of its own; there are
no directories, renames, appends or tests for existence. Endpoint and credentials come from the environment, as
for any AWS tool: AWS_ENDPOINT_URL_S3 or AWS_ENDPOINT_URL, AWS_REGION, AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY.
"""

import errno
import io
import os
import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import IO, Any, TypeVar, cast

import aiohttp
import s3fs
from botocore.exceptions import BotoCoreError, HTTPClientError, NoCredentialsError, PartialCredentialsError

from checkpoint.stores import CheckpointError, DamagedError, join

T = TypeVar("T")

ATTEMPTS = 5  # of each request; the waits between them add up to less than 20 s
PART_BYTES = 16 << 20
PARTS_IN_FLIGHT = 4  # per file that is being written
CONNECT_SECONDS = 10


class S3Store:
    """The objects under `s3://bucket/prefix`.

    A request that is not answered for `request_seconds` is repeated, ATTEMPTS times in all. An object that must
    exist and is not seen is waited for, `visibility_seconds` long: some stores show a new object late.
    """

    def __init__(self, url: str, *, request_seconds: float, visibility_seconds: float) -> None:
        self.url = url.rstrip("/")
        self.bucket, _, self.prefix = self.url.removeprefix("s3://").partition("/")
        self.visibility_seconds = visibility_seconds
        self.fs = s3fs.S3FileSystem(
            client_kwargs={"region_name": os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")},
            config_kwargs={
                "connect_timeout": CONNECT_SECONDS,
                "read_timeout": request_seconds,
                "retries": {"max_attempts": 0},
                "max_pool_connections": 64,
                "request_checksum_calculation": "when_required",  # not every S3 API knows the newer checksums
                "response_checksum_validation": "when_required",
            },
            skip_instance_cache=True,
        )
        self.fs.retries = 1  # repeated here, where what may be repeated is known

    def sizes(self, prefix: str = "") -> dict[str, int]:
        sizes: dict[str, int] = {}
        root = f"{self.prefix}/" if self.prefix else ""
        more: dict[str, str] = {}
        while True:
            page = self._call("list_objects_v2", prefix, Prefix=self._key(prefix) + "/" if prefix else root, **more)
            sizes |= {entry["Key"].removeprefix(root): entry["Size"] for entry in page.get("Contents", ())}
            if not page.get("IsTruncated"):
                return sizes
            more = {"ContinuationToken": page["NextContinuationToken"]}

    def read(self, name: str) -> bytes:
        return self._visible(name, lambda: self.fs.cat_file(f"{self.bucket}/{self._key(name)}"))

    def read_into(self, name: str, offset: int, view: memoryview) -> None:
        def fetch() -> bytes:
            return self.fs.cat_file(f"{self.bucket}/{self._key(name)}", start=offset, end=offset + len(view))

        data = self._visible(name, fetch)
        if len(data) != len(view):
            raise DamagedError(
                f"{join(self.url, name)}: ends at byte {offset + len(data)}, {len(view) - len(data)} missing"
            )
        view[:] = data

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
        self._call("put_object", name, Key=self._key(name), Body=data)

    def remove(self, names: list[str]) -> None:
        # One request each: DeleteObjects answers 200 even where it removed nothing.
        if names:
            self._call("delete_object", names[0], Key=self._key(names[0]))
        with ThreadPoolExecutor(8) as threads:
            list(threads.map(lambda name: self._call("delete_object", name, Key=self._key(name)), names[1:]))

    def abort_uploads(self, older_than_seconds: float) -> None:
        page = self._call("list_multipart_uploads", "", Prefix=self.prefix)
        for upload in page.get("Uploads", ()):
            if time.time() - upload["Initiated"].timestamp() > older_than_seconds:
                with suppress(_NotFoundError):
                    self._call("abort_multipart_upload", upload["Key"], Key=upload["Key"], UploadId=upload["UploadId"])

    def _key(self, name: str) -> str:
        return f"{self.prefix}/{name}" if self.prefix else name

    def _call(self, method: str, name: str, **arguments: Any) -> dict[str, Any]:
        """One S3 request on `name`, repeated where that can help. Raises CheckpointError naming it."""
        return self._repeated(name, lambda: self.fs.call_s3(method, Bucket=self.bucket, **arguments), method)

    def _visible(self, name: str, fetch: Callable[[], T]) -> T:
        """`fetch()`, waited for while the object is not seen. Raises DamagedError if it stays so."""
        deadline = time.monotonic() + self.visibility_seconds
        pause = 0.1
        while True:
            try:
                return self._repeated(name, fetch, "get_object")
            except _NotFoundError:
                if time.monotonic() > deadline:
                    raise DamagedError(f"{join(self.url, name)}: missing") from None
                time.sleep(pause)
                pause = min(2 * pause, 5.0)

    def _repeated(self, name: str, call: Callable[[], T], method: str) -> T:
        place = join(self.url, name)
        for attempt in range(1, ATTEMPTS + 1):
            try:
                return call()
            except FileNotFoundError as error:
                raise _NotFoundError(f"{place}: {error}: no such object or bucket") from None
            except PermissionError as error:
                raise CheckpointError(f"{place}: {method} is not allowed: {error}; check credentials") from None
            except (NoCredentialsError, PartialCredentialsError) as error:
                raise CheckpointError(f"{place}: {error}; set AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY") from None
            except (OSError, BotoCoreError, HTTPClientError, aiohttp.ClientError) as error:
                if isinstance(error, OSError) and error.errno == errno.EINVAL:
                    if method == "get_object":
                        raise DamagedError(f"{place}: ends before the bytes that should be there: {error}") from None
                    raise CheckpointError(f"{place}: {method} was refused: {error}") from None
                if attempt == ATTEMPTS:
                    raise CheckpointError(
                        f"{place}: {method} failed {ATTEMPTS} times; the last time: {type(error).__name__}: {error}"
                    ) from None
                time.sleep((2**attempt / 2) * random.uniform(0.5, 1.0))
        raise AssertionError("unreachable")


class _NotFoundError(CheckpointError):
    """The store knows no such object, upload or bucket, or does not show it yet."""


class _MultipartStream(io.RawIOBase):
    """An object being written in parts, a few of them under way; it exists only once it is complete."""

    def __init__(self, store: S3Store, name: str, threads: ThreadPoolExecutor) -> None:
        self.store, self.name, self.threads = store, name, threads
        self.upload_id = ""
        self.parts: list[Future[dict[str, Any]]] = []
        self.buffer = bytearray()
        self.size = 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self.size += len(view)
        done = 0
        while done < len(view):
            # An upload has at most 10,000 parts: they grow, so that no size is out of reach.
            part_bytes = PART_BYTES << (len(self.parts) // 1000)
            taken = min(len(view) - done, part_bytes - len(self.buffer))
            self.buffer += view[done : done + taken]
            done += taken
            if len(self.buffer) == part_bytes:
                self._send()
        return len(view)

    def complete(self) -> None:
        """The object as a whole, durable once this returns."""
        if not self.upload_id:
            self.store.put(self.name, bytes(self.buffer))
            return
        if self.buffer:
            self._send()
        tags = [{"PartNumber": i, "ETag": part.result()["ETag"]} for i, part in enumerate(self.parts, start=1)]
        try:
            self._call("complete_multipart_upload", UploadId=self.upload_id, MultipartUpload={"Parts": tags})
        except _NotFoundError:
            # No such upload: it was completed by an attempt whose answer got lost, or it was aborted by somebody.
            if self._call("head_object")["ContentLength"] != self.size:
                raise

    def abort(self) -> None:
        """Leave nothing behind, as far as the store can still be reached."""
        for part in self.parts:
            part.cancel()
        if self.upload_id:
            with suppress(CheckpointError):
                self._call("abort_multipart_upload", UploadId=self.upload_id)

    def _send(self) -> None:
        if not self.upload_id:
            self.upload_id = self._call("create_multipart_upload")["UploadId"]
        if len(self.parts) >= PARTS_IN_FLIGHT:
            self.parts[-PARTS_IN_FLIGHT].result()
        number, body, self.buffer = len(self.parts) + 1, self.buffer, bytearray()
        arguments = {"UploadId": self.upload_id, "PartNumber": number, "Body": body}
        self.parts.append(self.threads.submit(self._call, "upload_part", **arguments))

    def _call(self, method: str, **arguments: Any) -> dict[str, Any]:
        return self.store._call(method, self.name, Key=self.store._key(self.name), **arguments)
