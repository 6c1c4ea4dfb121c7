"""Kill workers, the command and the scheduler while a Dask cluster prepares a dataset on S3, and compare its bytes.

    python -m benchmarks.prepare_kills [--workers 20] [--commands 5] [--schedulers 5]

The cluster has three worker processes and the S3 server is the tests', all on this machine. Each row is one
preparation in which one process gets SIGKILL at a random moment. A command that has ended is given again. At the end
the dataset must be that of one process, file for file, with nothing beside it.
"""

import hashlib
import os
import random
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import fsspec

from benchmarks.report import build_parser, finish, print_row
from tests.dask_cluster import Cluster
from tests.s3.server import create_bucket, s3_environment, s3_server

WORKERS = 3
SOURCES = ("--source", "checkpoint", "data", "docs", "models", "run", "storage", "tools")  # of this repository
SIZES = ("--shard-mb=0.1", "--block-mb=0.02")
SMALL_UNITS = "from data import prepare, sources; sources.UNIT_BYTES = 50_000; prepare.main()"


def command_of(output: str, *words: str) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-c", SMALL_UNITS, *SOURCES, f"--output={output}", *SIZES, *words]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


def digests(output: str) -> dict[str, str]:
    """Name → digest of everything there but the lock."""
    system, path = fsspec.core.url_to_fs(output, skip_instance_cache=True)
    names = [name for name in system.find(path) if not name.endswith(".lock")]
    return {name.removeprefix(path): hashlib.sha256(system.cat_file(name)).hexdigest() for name in names}


def prepare_with_kill(folder: Path, output: str, victim: str, moment: float, tokenizer: str) -> dict[str, Any]:
    """Prepare, kill the victim after `moment` seconds, and give the command again until it has succeeded."""
    starts = 0
    error = ""  # of the first start
    with ExitStack() as kept:
        cluster = kept.enter_context(Cluster(folder, {}))
        workers = cluster.add_workers(WORKERS)
        command = command_of(output, f"--cluster={cluster.address}", tokenizer)
        kept.callback(command.kill)
        time.sleep(moment)
        was_running = command.poll() is None
        killed = {"worker": random.choice(workers), "command": command, "scheduler": cluster.scheduler}[victim]
        killed.kill()
        while True:
            starts += 1
            said = command.communicate()[1]
            if command.returncode == 0:
                row = {"killed": victim, "after_s": moment, "was_running": was_running}
                return {**row, "starts": starts, "error": error}
            error = error or said.decode().rpartition("error: ")[2].strip()
            if starts == 3:
                raise RuntimeError(said.decode())
            if victim == "scheduler" and starts == 1:
                cluster = kept.enter_context(Cluster(folder, {}))
                cluster.add_workers(WORKERS)
            command = command_of(output, f"--cluster={cluster.address}", tokenizer)


def main() -> int:
    parser = build_parser(__doc__ or "")
    parser.add_argument("--workers", type=int, default=20)
    parser.add_argument("--commands", type=int, default=5)
    parser.add_argument("--schedulers", type=int, default=5)
    arguments = parser.parse_args()
    times = {"worker": arguments.workers, "command": arguments.commands, "scheduler": arguments.schedulers}
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name, s3_server() as endpoint:
        os.environ.update(s3_environment(endpoint))
        create_bucket(endpoint, "kills")
        folder = Path(name)
        command_of(f"{name}/tokenizer", "--vocab-size=1000").communicate()
        tokenizer = f"--tokenizer={name}/tokenizer"
        command_of(f"{name}/one", tokenizer).communicate()
        expected = digests(f"{name}/one")
        began = time.perf_counter()
        prepare_with_kill(folder, "s3://kills/whole", "worker", 0, tokenizer)
        seconds = time.perf_counter() - began
        for victim, count in times.items():
            kills = 0
            while kills < count:  # one that comes after the end does not count
                output = f"s3://kills/{len(rows)}"
                row = prepare_with_kill(folder, output, victim, random.uniform(0, seconds), tokenizer)
                row["same_bytes"] = digests(output) == expected
                rows.append(row)
                print_row(row)
                kills += row["was_running"]
    return finish(arguments, rows, [("kills: the bytes of one process", all(row["same_bytes"] for row in rows))])


if __name__ == "__main__":
    sys.exit(main())
