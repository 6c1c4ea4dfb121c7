"""A real S3 server on loopback, for tests: Ceph's gateway where it is installed, else moto's server.

`S3_TEST_SERVER=ceph|moto` chooses. By hand, it prints the variables to export and runs until interrupted:

    python -m tests.s3.server
"""

import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import contextmanager, suppress
from pathlib import Path

import botocore.session
from botocore.config import Config

from tests.ports import free_port

ACCESS_KEY, SECRET_KEY = "testing", "testing-secret"
START_SECONDS = 300


@contextmanager
def s3_server(host="127.0.0.1"):
    """Start the server; yields its endpoint, `http://HOST:PORT`. It ends with this process, even if killed.

    Ceph's is on loopback only.
    """
    kind, port = os.environ.get("S3_TEST_SERVER") or ("ceph" if shutil.which("radosgw") else "moto"), free_port()
    moto = f"{sys.executable} -m moto.server -H {host} -p {port} > /dev/null 2>&1 & echo ready; cat; kill -9 $!"
    command = {"ceph": [str(Path(__file__).with_name("ceph.sh")), str(port)], "moto": ["sh", "-c", moto]}[kind]
    # The end of its input, a pipe from here, is what ends it. A session of its own, so that no Ctrl-C ends it earlier.
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, start_new_session=True) as server:
        assert server.stdout
        server.stdout.readline()
        yield _answering(f"http://{host}:{port}", server)


def s3_environment(endpoint):
    """Environment variables that make S3 clients use the server at `endpoint`."""
    return {
        "AWS_ENDPOINT_URL_S3": endpoint,
        "AWS_ACCESS_KEY_ID": ACCESS_KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
        "AWS_REGION": "us-east-1",
    }


def create_bucket(endpoint, name):
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


def _answering(endpoint, server):
    """The endpoint, once something answers there."""
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            urllib.request.urlopen(endpoint, timeout=5).close()
            return endpoint
        except urllib.error.HTTPError:
            return endpoint
        except OSError:
            if server.poll() is not None or time.monotonic() > deadline:
                raise
            time.sleep(0.1)


if __name__ == "__main__":
    with s3_server() as url:
        print("\n".join(f"export {name}={value}" for name, value in s3_environment(url).items()), flush=True)
        with suppress(KeyboardInterrupt):
            signal.pause()
