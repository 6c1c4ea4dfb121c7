"""data.prepare from hf:// URLs, over HTTP from a server that answers as the Hub does.

The paths and answers are those that huggingface_hub's HfApi and HfFileSystem ask for:
https://huggingface.co/docs/hub/api and huggingface_hub/hf_api.py, hf_file_system.py.
"""

import gzip
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data.prepare import prepare

ROOT = Path(__file__).parents[2]
TOKEN = "hf_let_me_in"


class Hub(BaseHTTPRequestHandler):
    """Datasets below a folder, ROOT/OWNER/NAME/REVISION/...; the files of `gated` ones need TOKEN."""

    protocol_version = "HTTP/1.1"
    server: "HubServer"

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        path = unquote(url.path)
        if found := re.fullmatch(r"/api/datasets/([^/]+/[^/]+)(?:/revision/([^/]+))?", path):
            if self._revision(found[1], found[2] or "main"):
                self._json({"id": found[1], "sha": "0" * 40, "siblings": []})
        elif found := re.fullmatch(r"/api/datasets/([^/]+/[^/]+)/tree/([^/]+)(?:/(.*))?", path):
            recursive = parse_qs(url.query).get("recursive", ["False"])[0].lower() in ("true", "1")
            if (revision := self._revision(found[1], found[2])) and (top := self._entry(revision, found[3] or "")):
                entries = sorted(top.rglob("*") if recursive else top.iterdir())
                self._json([_described(revision, entry) for entry in entries])
        elif found := re.fullmatch(r"/datasets/([^/]+/[^/]+)/resolve/([^/]+)/(.*)", path):
            if found[1].endswith("gated") and self.headers.get("Authorization") != f"Bearer {TOKEN}":
                self._fail(401, "GatedRepo")
            elif (revision := self._revision(found[1], found[2])) and (entry := self._entry(revision, found[3])):
                self._range(entry.read_bytes())
        else:
            self._fail(404, "EntryNotFound")

    def do_POST(self) -> None:
        form = parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode())
        found = re.fullmatch(r"/api/datasets/([^/]+/[^/]+)/paths-info/([^/]+)", unquote(self.path))
        assert found, self.path
        if revision := self._revision(found[1], found[2]):
            entries = [revision / path for path in form["paths"]]
            self._json([_described(revision, entry) for entry in entries if entry.exists()])

    def _revision(self, repository: str, revision: str) -> Path | None:
        folder = self.server.root / repository
        if not folder.is_dir():
            return self._fail(404, "RepoNotFound")
        return folder / revision if (folder / revision).is_dir() else self._fail(404, "RevisionNotFound")

    def _entry(self, revision: Path, path: str) -> Path | None:
        return revision / path if (revision / path).exists() else self._fail(404, "EntryNotFound")

    def _range(self, content: bytes) -> None:
        found = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", f"bytes=0-{len(content)}"))
        assert found, self.headers["Range"]
        first, stop = int(found[1]), min(int(found[2]) + 1, len(content))
        self.server.bytes_sent += stop - first
        self._answer(206, content[first:stop], {"Content-Range": f"bytes {first}-{stop - 1}/{len(content)}"})

    def _json(self, value: object) -> None:
        self._answer(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _fail(self, status: int, code: str) -> None:
        self._answer(status, b"", {"X-Error-Code": code})

    def _answer(self, status: int, content: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


class HubServer(ThreadingHTTPServer):
    def __init__(self, root: Path):
        super().__init__(("127.0.0.1", 0), Hub)
        self.root = root
        self.bytes_sent = 0


def _described(revision: Path, entry: Path) -> dict[str, object]:
    kind = {"type": "file", "size": entry.stat().st_size} if entry.is_file() else {"type": "directory"}
    return {**kind, "path": str(entry.relative_to(revision)), "oid": "0" * 40}


@pytest.fixture(scope="module")
def hub(tmp_path_factory) -> Iterator[HubServer]:
    root = tmp_path_factory.mktemp("hub")
    texts = [f"document {i} " + "of the hub " * (i % 17) for i in range(300)]
    for repository, revision, part in (
        ("me/corpus", "main", texts[:200]),
        ("me/corpus", "v1", texts[200:]),
        ("me/gated", "main", texts[:20]),
    ):
        folder = root / repository / revision
        (folder / "data").mkdir(parents=True)
        lines = ["".join(json.dumps({"text": text}) + "\n" for text in part[i::3]).encode() for i in range(3)]
        (folder / "README.md").write_bytes(b"a card")
        (folder / "data" / "a b.jsonl").write_bytes(lines[0])
        (folder / "data" / "c.jsonl.gz").write_bytes(gzip.compress(lines[1]))
        rows = [json.loads(line)["text"] for line in lines[2].splitlines()]
        pq.write_table(pa.table({"text": rows}), folder / "data" / "d.parquet", row_group_size=16)
    server = HubServer(root)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def run_prepare(hub: HubServer, cache: Path, *options: str, token: str = "") -> subprocess.CompletedProcess[str]:
    """`python -m data.prepare` with that Hub, which is read from the environment when a process starts."""
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("HF_")},
        "HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}",
        "HF_HOME": str(cache),
        "HF_HUB_DISABLE_TELEMETRY": "1",
        **({"HF_TOKEN": token} if token else {}),
    }
    command = [sys.executable, "-m", "data.prepare", *options]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir())}


@pytest.mark.parametrize(
    ("source", "local", "processes"),
    [
        ("me/corpus", "me/corpus/main", 2),
        ("me/corpus@v1/data/*.jsonl*", "me/corpus/v1/data/*.jsonl*", 1),
    ],
)
def test_what_is_prepared_from_the_hub_is_what_its_files_give(hub, tmp_path, source, local, processes):
    options = {"vocab_size": 300, "validation_fraction": 0.2}
    prepare([str(hub.root / local)], str(tmp_path / "local"), processes=1, **options)
    sent = hub.bytes_sent
    words = [f"--output={tmp_path / 'out'}", "--vocab-size=300", "--validation-fraction=0.2"]
    words += ["--source", f"hf://datasets/{source}", f"--processes={processes}"]
    result = run_prepare(hub, tmp_path / "cache", *words)
    assert result.returncode == 0, result.stderr
    assert contents(tmp_path / "out") == contents(tmp_path / "local")
    assert hub.bytes_sent > sent


def test_a_gated_dataset_needs_the_token_of_the_environment(hub, tmp_path):
    command = ["--source", "hf://datasets/me/gated", "--output", str(tmp_path / "out"), "--processes=1"]
    refused = run_prepare(hub, tmp_path / "cache", *command)
    assert refused.returncode == 1
    assert re.search(r"^error: hf://datasets/me/gated/README.md: cannot be read: .* 401 .*$", refused.stderr, re.M)
    assert "Traceback" not in refused.stderr
    assert run_prepare(hub, tmp_path / "cache", *command, token=TOKEN).returncode == 0


@pytest.mark.parametrize("source", ["me/corpus@v9", "me/corpus/data/*.txt"])
def test_what_is_not_on_the_hub_is_named(hub, tmp_path, source):
    source = f"hf://datasets/{source}"
    result = run_prepare(hub, tmp_path / "cache", "--source", source, "--output", str(tmp_path / "out"))
    assert result.returncode == 1
    assert result.stderr.startswith(f"error: --source {source}: ")
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "out").exists()
