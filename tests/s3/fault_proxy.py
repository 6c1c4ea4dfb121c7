"""An HTTP proxy before an S3 server that misbehaves on demand.

What it can do, by rule, to the requests that match an operation and a key:

    503, 501, 500, 409, 403, expired   answered so, without reaching the server
    404, empty      as by a proxy that does not reach the server: 404 without XML, 200 without a body
    reset           the connection is cut before the server sees the request
    reset_after     the server has done it, the connection is cut before the answer
    hang            never answered
    cut             half of the answer's body, then the connection is cut
    flip, flip_sent    one bit of the answer's body is wrong, or of the request's once it reaches the server
    complete_error  CompleteMultipartUpload answers 200 with an error in its body
"""

import asyncio
import json
import os
import re
import subprocess
import sys
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import unquote

from aiohttp import ClientSession, ClientTimeout, TCPConnector, web
from yarl import URL

from tests.ports import free_port

CONTROL = "/__control"
CODES = {  # of S3's errors
    "503": (503, "SlowDown"),
    "501": (501, "NotImplemented"),
    "500": (500, "InternalError"),
    "409": (409, "OperationAborted"),
    "403": (403, "AccessDenied"),
    "expired": (400, "ExpiredToken"),
}
HOP_HEADERS = ("content-length", "transfer-encoding", "connection", "expect", "date", "server")


class FaultProxy:
    """Steers a running proxy."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint

    def reset(self) -> None:
        """No faults, counts from zero."""
        self._control({"reset": True})

    def fault(self, fault: str, operation: str = ".*", key: str = "", skip: int = 0, times: int = 10**6) -> None:
        """From now on `fault` for requests whose operation and key match these regular expressions.

        The first `skip` of them pass, the next `times` are hit. Operations: put, upload_part, create_multipart,
        complete_multipart, abort_multipart, get, head, list, delete, post_bucket (of several deletions).
        """
        rule = {"fault": fault, "operation": operation, "key": key, "skip": skip, "times": times}
        self._control({"rule": rule})

    def counts(self) -> dict[str, int]:
        """Requests by operation, faults as `fault:NAME`, and `bytes_out` of the answers' bodies."""
        return self._control({})

    def _control(self, message: dict[str, Any]) -> dict[str, int]:
        request = urllib.request.Request(self.endpoint + CONTROL, json.dumps(message).encode(), method="POST")
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.load(answer)


@contextmanager
def fault_proxy(upstream: str) -> Iterator[FaultProxy]:
    """Start a proxy before the server at `upstream`. It ends with its input: with this process, even if killed."""
    port, pipe = free_port(), subprocess.PIPE
    command = [sys.executable, "-m", "tests.s3.fault_proxy", upstream, str(port)]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, start_new_session=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        yield FaultProxy(f"http://127.0.0.1:{port}")


# ---------------------------------------------------------------- the proxy's own process


class _Proxy:
    def __init__(self, upstream: str, port: int) -> None:
        self.upstream = upstream
        self.port = port
        self.clear()

    def clear(self) -> None:
        self.rules: list[dict[str, Any]] = []
        self.counts: Counter[str] = Counter()

    async def control(self, request: web.Request) -> web.Response:
        message = await request.json()
        if message.pop("reset", False):
            self.clear()
        if "rule" in message:
            self.rules.append(message["rule"])
        return web.json_response(self.counts)

    def matching_fault(self, operation: str, key: str) -> str:
        for rule in self.rules:
            fits = re.fullmatch(rule["operation"], operation) and re.search(rule["key"], key)
            if not fits or not rule["times"]:
                continue
            if rule["skip"]:
                rule["skip"] -= 1
                continue
            rule["times"] -= 1
            fault: str = rule["fault"]
            self.counts[f"fault:{fault}"] += 1
            return fault
        return ""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        if request.path == CONTROL:
            return await self.control(request)
        assert request.transport is not None
        operation, key = _operation(request)
        body = await request.read()
        self.counts[operation] += 1
        fault = self.matching_fault(operation, key)
        if fault in CODES:
            return _error(*CODES[fault])
        if fault == "404":
            return web.Response(status=404, text="404 page not found")
        if fault == "empty":
            return web.Response()
        if fault == "reset":
            request.transport.abort()
        if fault == "hang":
            await asyncio.sleep(3600)
        if fault == "complete_error":
            return _error(200, "InternalError")
        if fault == "flip_sent":
            body = _flipped(body)
        status, headers, answer = await self.forward(request, body)
        self.counts["bytes_out"] += len(answer)
        if fault == "reset_after":
            request.transport.abort()
        if fault == "flip":
            answer = _flipped(answer)
        if fault == "cut":
            headers["Content-Length"] = str(len(answer))
            response = web.StreamResponse(status=status, headers=headers)
            await response.prepare(request)
            await response.write(answer[: len(answer) // 2])
            request.transport.close()
            return response
        if request.method == "HEAD":
            return web.Response(status=status, headers=headers)
        headers.pop("Content-Length", None)
        return web.Response(status=status, headers=headers, body=answer)

    async def forward(self, request: web.Request, body: bytes) -> tuple[int, dict[str, str], bytes]:
        headers = {name: value for name, value in request.headers.items() if name.lower() not in HOP_HEADERS}
        url = URL(self.upstream + request.raw_path, encoded=True)
        skip = ("User-Agent", "Content-Type", "Accept-Encoding", "Accept")
        data = body if body or request.method in ("PUT", "POST") else None
        async with self.session.request(
            request.method, url, data=data, headers=headers, allow_redirects=False, skip_auto_headers=skip
        ) as answer:
            kept = {name: value for name, value in answer.headers.items() if name.lower() not in HOP_HEADERS}
            if request.method == "HEAD":
                kept["Content-Length"] = answer.headers.get("Content-Length", "0")
            return answer.status, kept, await answer.read()

    async def serve(self) -> None:
        timeout = ClientTimeout(total=None)
        async with ClientSession(timeout=timeout, connector=TCPConnector(limit=0), auto_decompress=False) as session:
            self.session = session
            app = web.Application(client_max_size=1 << 33)
            app.router.add_route("*", "/{path:.*}", self.handle)
            runner = web.AppRunner(app, access_log=None)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", self.port).start()
            print("ready", flush=True)
            await asyncio.to_thread(sys.stdin.read)
            os._exit(0)  # also in the middle of a request


def _flipped(body: bytes) -> bytes:
    """`body` with one bit changed, in its middle."""
    middle = len(body) // 2
    return body[:middle] + bytes(byte ^ 16 for byte in body[middle : middle + 1]) + body[middle + 1 :]


def _operation(request: web.Request) -> tuple[str, str]:
    """(operation, bucket/key)"""
    path = unquote(request.path).lstrip("/")
    method = request.method
    _, _, key = path.partition("/")
    if not key:
        return "list" if method == "GET" else f"{method.lower()}_bucket", path
    if "uploadId" in request.query:
        kinds = {"PUT": "upload_part", "POST": "complete_multipart", "DELETE": "abort_multipart"}
        return kinds[method], path
    if method == "POST":
        return "create_multipart", path
    return method.lower(), path


def _error(status: int, code: str) -> web.Response:
    text = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>injected {code}</Message></Error>"
    return web.Response(status=status, text=text, content_type="application/xml")


if __name__ == "__main__":
    asyncio.run(_Proxy(sys.argv[1], int(sys.argv[2])).serve())
