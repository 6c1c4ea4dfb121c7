"""A real S3 server on loopback, for tests: Ceph's gateway where it is installed, else moto's server.

`S3_TEST_SERVER=ceph|moto` chooses. By hand, it prints the variables to export and runs until interrupted:

    python -m tests.s3.server
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import botocore.session
from botocore.config import Config

from tests.ports import free_port

ACCESS_KEY, SECRET_KEY = "testing", "testing-secret"
START_SECONDS = 300


@contextmanager
def s3_server() -> Iterator[str]:
    """Start the server; yields its endpoint, `http://127.0.0.1:PORT`; stops it at the end."""
    kind = os.environ.get("S3_TEST_SERVER") or ("ceph" if shutil.which("radosgw") else "moto")
    start = {"ceph": _ceph, "moto": _moto}[kind]
    with tempfile.TemporaryDirectory(prefix="s3-") as folder, start(Path(folder), free_port()) as endpoint:
        yield endpoint


def s3_environment(endpoint: str) -> dict[str, str]:
    """Environment variables that make S3 clients use the server at `endpoint`."""
    return {
        "AWS_ENDPOINT_URL_S3": endpoint,
        "AWS_ACCESS_KEY_ID": ACCESS_KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
        "AWS_REGION": "us-east-1",
    }


def create_bucket(endpoint: str, name: str) -> None:
    """An empty bucket on the server at `endpoint`."""
    session = botocore.session.get_session()
    client = session.create_client(
        "s3",
        endpoint_url=endpoint,
        region_name="us-east-1",
        aws_access_key_id=ACCESS_KEY,
        aws_secret_access_key=SECRET_KEY,
        config=Config(s3={"addressing_style": "path"}),
    )
    client.create_bucket(Bucket=name)


@contextmanager
def _ceph(folder: Path, port: int) -> Iterator[str]:
    script = Path(__file__).with_name("ceph.sh")
    try:
        started = subprocess.run([script, folder / "1", str(port)], stderr=subprocess.PIPE, timeout=START_SECONDS)
        if started.returncode:  # seen once, without its reason
            print(f"ceph.sh failed, again: {started.stderr.decode()}", file=sys.stderr)
            port = free_port()
            subprocess.run([script, folder / "2", str(port)], timeout=START_SECONDS, check=True)
        yield _answering(port)
    finally:
        pids = [int(file.read_text()) for file in folder.glob("*/*.pid")]
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in pids:
            while Path(f"/proc/{pid}").exists() and "Z" not in Path(f"/proc/{pid}/stat").read_text().split()[2]:
                time.sleep(0.05)


@contextmanager
def _moto(folder: Path, port: int) -> Iterator[str]:
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with open(folder / "log", "wb") as log, subprocess.Popen(command, stdout=log, stderr=log) as server:
        try:
            yield _answering(port)
        finally:
            server.kill()


def _answering(port: int) -> str:
    """The endpoint, once something answers there."""
    endpoint = f"http://127.0.0.1:{port}"
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            urllib.request.urlopen(endpoint, timeout=5).close()
        except urllib.error.HTTPError:
            return endpoint
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)
        else:
            return endpoint


if __name__ == "__main__":
    with s3_server() as url:
        print("\n".join(f"export {name}={value}" for name, value in s3_environment(url).items()), flush=True)
        with suppress(KeyboardInterrupt):
            signal.pause()
