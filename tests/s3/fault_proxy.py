"""An HTTP proxy before an S3 server that misbehaves on demand.

What it can do, by rule, to the requests that match an operation and a key:

    503, 500, 409, 403   answered so, without reaching the server
    404, empty      as by a proxy that does not reach the server: 404 without XML, 200 without a body
    reset           the connection is cut before the server sees the request
    reset_after     the server has done it, the connection is cut before the answer
    hang            never answered
    cut             half of the answer's body, then the connection is cut
    flip            one bit of the answer's body is wrong
    complete_error  CompleteMultipartUpload answers 200 with an error in its body
"""

import json
import os
import re
import socket
import subprocess
import sys
import threading
import urllib.request
from collections import Counter
from contextlib import closing, contextmanager
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote

from tests.ports import free_port

CONTROL = "/__control"
ERROR = "<?xml version='1.0'?><Error><Code>{0}</Code><Message>injected {0}</Message></Error>"
ANSWERS = {  # fault → status and body
    "503": (503, ERROR.format("SlowDown")),
    "500": (500, ERROR.format("InternalError")),
    "409": (409, ERROR.format("OperationAborted")),
    "403": (403, ERROR.format("AccessDenied")),
    "complete_error": (200, ERROR.format("InternalError")),
    "404": (404, "404 page not found"),
    "empty": (200, ""),
}
HOP_HEADERS = ("content-length", "transfer-encoding", "connection", "expect")


class FaultProxy:
    """Steers a running proxy."""

    def __init__(self, endpoint):
        self.endpoint = endpoint

    def reset(self):
        """No faults, counts from zero."""
        self._control({"reset": True})

    def fault(self, fault, operation=".*", key="", skip=0, times=10**6):
        """From now on `fault` for requests whose operation and key match these regular expressions.

        The first `skip` of them pass, the next `times` are hit. Operations: put, upload_part, create_multipart,
        complete_multipart, abort_multipart, get, head, list, delete, post_bucket (of several deletions).
        """
        rule = {"fault": fault, "operation": operation, "key": key, "skip": skip, "times": times}
        self._control({"rule": rule})

    def counts(self):
        """Requests by operation, faults as `fault:NAME`, and `bytes_out` of the answers' bodies."""
        return self._control({})

    def _control(self, message):
        request = urllib.request.Request(self.endpoint + CONTROL, json.dumps(message).encode(), method="POST")
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.load(answer)


@contextmanager
def fault_proxy(upstream):
    """Start a proxy before the server at `upstream`. It ends with its input: with this process, even if killed."""
    port, pipe = free_port(), subprocess.PIPE
    command = [sys.executable, "-m", "tests.s3.fault_proxy", upstream, str(port)]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, start_new_session=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        yield FaultProxy(f"http://127.0.0.1:{port}")


# ---------------------------------------------------------------- the proxy's own process

RULES = []
COUNTS = Counter()
LOCK = threading.Lock()


class _Proxy(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def handle_request(self):
        body = self.rfile.read(int(self.headers["Content-Length"] or 0))
        if self.path == CONTROL:
            self.answer(200, {}, _control(json.loads(body)))
        else:
            self.misbehave(_matching_fault(*_operation(self.command, self.path)), body)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = handle_request

    def misbehave(self, fault, body):
        if fault == "hang":
            threading.Event().wait()
        status, text = ANSWERS.get(fault, (0, ""))
        headers = {}
        answer = text.encode()
        if not status and fault != "reset":
            status, headers, answer = self.forward(body)
        if fault == "flip":
            answer = _flipped(answer)
        if fault == "cut":
            headers["Content-Length"] = str(len(answer))
            answer = answer[: len(answer) // 2]
        if fault not in ("reset", "reset_after"):
            self.answer(status, headers, answer)
        if fault in ("reset", "reset_after", "cut"):
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)

    def forward(self, body):
        headers = {name: value for name, value in self.headers.items() if name.lower() not in HOP_HEADERS}
        with closing(HTTPConnection(sys.argv[1].removeprefix("http://"))) as upstream:
            upstream.request(self.command, self.path, body or None, headers)
            answer = upstream.getresponse()
            kept = {name: value for name, value in answer.getheaders() if name.lower() not in HOP_HEADERS}
            if self.command == "HEAD":
                kept["Content-Length"] = answer.headers.get("Content-Length", "0")
            content = answer.read()
        with LOCK:
            COUNTS["bytes_out"] += len(content)
        return answer.status, kept, content

    def answer(self, status, headers, body):
        self.send_response_only(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _control(message):
    with LOCK:
        if message.pop("reset", False):
            RULES.clear()
            COUNTS.clear()
        RULES.extend(message.values())
        return json.dumps(COUNTS).encode()


def _matching_fault(operation, key):
    with LOCK:
        COUNTS[operation] += 1
        for rule in RULES:
            fits = re.fullmatch(rule["operation"], operation) and re.search(rule["key"], key)
            if not fits or not rule["times"]:
                continue
            if rule["skip"]:
                rule["skip"] -= 1
                continue
            rule["times"] -= 1
            COUNTS[f"fault:{rule['fault']}"] += 1
            return str(rule["fault"])
    return ""


def _flipped(body):
    """`body` with one bit changed, in its middle."""
    changed = bytearray(body)
    if body:
        changed[len(body) // 2] ^= 16
    return bytes(changed)


def _operation(method, url):
    """(operation, bucket/key)"""
    path, _, query = url.partition("?")
    path = unquote(path).lstrip("/")
    if "/" not in path.rstrip("/"):
        return "list" if method == "GET" else f"{method.lower()}_bucket", path
    if "uploadId=" in query:
        kinds = {"PUT": "upload_part", "POST": "complete_multipart", "DELETE": "abort_multipart"}
        return kinds[method], path
    if method == "POST":
        return "create_multipart", path
    return method.lower(), path


class _Server(ThreadingHTTPServer):
    request_queue_size = 128


if __name__ == "__main__":
    server = _Server(("127.0.0.1", int(sys.argv[2])), _Proxy)
    threading.Thread(target=server.serve_forever).start()
    print("ready", flush=True)
    sys.stdin.read()
    os._exit(0)  # also in the middle of a request
