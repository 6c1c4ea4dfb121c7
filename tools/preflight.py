"""Test in a minute whether a cluster is fit to train on, and name the ranks that are not.

    torchrun --nnodes=2 --nproc-per-node=8 ... -m tools.preflight --storage=s3://bucket/preflight --expect-gbits=100

Run it as the job will be run. It compares all ranks' software, clocks and disks, writes to and reads from the storage,
times a matrix product on every device and checks it bit for bit, and times transfers between pairs of ranks and an
all-reduce. Exits with 1 and a line per fault. It also ends a torchrun that has restarts left.
"""

import argparse
import logging
import math
import os
import platform
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from importlib import metadata
from statistics import median_low
from typing import Any, NamedTuple

import fsspec
import torch
import torch.distributed as dist

from config import Comm, command_line
from parallel.device import best_seconds, synchronize
from run.processes import init_distributed, launch_environment, shut_down

PACKAGES = ("torch", "torchao", "numpy", "pyarrow", "tokenizers", "s3fs")
CLOCK_SECONDS = 2.0  # clocks may differ by this; S3 refuses requests 900 s off
FREE_GB = 20.0
STORAGE_BYTES = 8 * 2**20
STORAGE_SECONDS = 30.0  # limit for the storage to answer: half the time that other ranks would wait
TRANSFER_BYTES = 16 * 2**20
SLOW = 1.5  # times the usual time, for compute and transfers
REPEATS = 5


class Report(NamedTuple):
    """What a rank found out by itself."""

    host: str
    versions: dict[str, str]
    clock_seconds: float
    free_gb: float  # nan: unknown
    storage_seconds: float | None
    gemm_seconds: float
    gemm_checksum: int
    errors: list[str]  # of the storage and the folder


def look_around(device: torch.device, folder: str, storage: str, rank: int) -> Report:
    """Make this rank's report."""
    seconds: float | None = None
    free_gb, errors = math.nan, list[str]()
    if storage:
        try:
            url = f"{storage.rstrip('/')}/preflight-{rank}-{os.urandom(4).hex()}"
            seconds = within(STORAGE_SECONDS, lambda: time_storage(url))
        except Exception as failure:  # whatever a store raises is a finding, not a failure of this test
            errors.append(f"storage: {type(failure).__name__}: {failure}")
    try:
        free_gb = shutil.disk_usage(folder).free / 1e9
    except OSError as failure:
        errors.append(f"--folder {folder}: {failure.strerror}")
    gemm_seconds, checksum = time_gemm(device)
    return Report(
        host=socket.gethostname(),
        versions={name: _version(name) for name in PACKAGES} | {"python": platform.python_version()},
        clock_seconds=time.time(),
        free_gb=free_gb,
        storage_seconds=seconds,
        gemm_seconds=gemm_seconds,
        gemm_checksum=checksum,
        errors=errors,
    )


def within(seconds: float, work: Callable[[], float]) -> float:
    """What `work` returns or raises. Raises TimeoutError if it takes longer, since the other ranks wait for this."""
    outcome: Future[float] = Future()

    def run() -> None:
        try:
            outcome.set_result(work())
        except Exception as error:
            outcome.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    if not wait([outcome], timeout=seconds).done:
        raise TimeoutError(f"no answer within {seconds:g} s")
    return outcome.result()


def time_storage(url: str) -> float:
    """Seconds to write an object and read it back; also removes it. Raises OSError if it comes back changed."""
    filesystem, path = fsspec.core.url_to_fs(url)
    content, begin = os.urandom(STORAGE_BYTES), time.perf_counter()
    with fsspec.open(url, "wb") as file:
        file.write(content)
    try:
        with fsspec.open(url, "rb") as file:
            if file.read() != content:
                raise OSError(f"{url}: what was read is not what was written")
    except BaseException:
        with suppress(Exception):  # the first error is the finding
            filesystem.rm(path)
        raise
    seconds = time.perf_counter() - begin
    filesystem.rm(path)
    return seconds


def time_gemm(device: torch.device) -> tuple[float, int]:
    """(seconds, sum of the bits) of a product of whole numbers, which is exact in any order of summation."""
    size, dtype = (512, torch.float32) if device.type == "cpu" else (8192, torch.bfloat16)
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randint(-2, 3, (size, size), generator=generator).to(device, dtype) for _ in range(2))
    seconds = best_seconds(lambda: left @ right, device, REPEATS)
    product = (left @ right).to(torch.float32)
    return seconds, int(product.view(torch.int32).sum(dtype=torch.int64))


def time_transfers(device: torch.device) -> tuple[dict[tuple[int, int], float], float]:
    """Bytes per second from every rank to its neighbour and to the rank half of all away, and of an all-reduce."""
    rank, size = dist.get_rank(), dist.get_world_size()
    own: dict[tuple[int, int], float] = {}
    buffer = torch.ones(TRANSFER_BYTES // 4, device=device)
    for shift in sorted({1, size // 2} if size > 1 else ()):
        target, source = (rank + shift) % size, (rank - shift) % size
        received = torch.empty_like(buffer)
        times = []
        for _ in range(1 + REPEATS):  # the first connects
            dist.barrier()
            begin = time.perf_counter()
            operations = [dist.P2POp(dist.isend, buffer, target), dist.P2POp(dist.irecv, received, source)]
            for work in dist.batch_isend_irecv(operations):
                work.wait()
            synchronize(device)
            times.append(time.perf_counter() - begin)
        # The best time: ranks leave a barrier one after another, and GPUs transfer in a fraction of a millisecond.
        own[source, rank] = TRANSFER_BYTES / min(times[1:])
    gathered: list[Any] = [None] * size
    dist.all_gather_object(gathered, own)
    seconds = best_seconds(lambda: dist.all_reduce(buffer), device, REPEATS)
    return {pair: rate for rates in gathered for pair, rate in rates.items()}, TRANSFER_BYTES / seconds


def find_faults(reports: Sequence[Report], pairs: dict[tuple[int, int], float], expect_gbits: float) -> list[str]:
    """A line per fault, with its rank. What most ranks have counts as right."""
    faults = []

    def odd_ones(what: str, values: Sequence[Any]) -> None:
        usual = max(values, key=values.count)
        for rank, value in enumerate(values):
            if value != usual:
                faults.append(f"rank {rank} ({reports[rank].host}): {what} is {value}, the others have {usual}")

    for name in reports[0].versions:
        odd_ones(name, [report.versions[name] for report in reports])
    odd_ones("the result of a matrix product", [report.gemm_checksum for report in reports])
    clock = median_low([report.clock_seconds for report in reports])
    gemm = median_low([report.gemm_seconds for report in reports])
    for rank, report in enumerate(reports):
        where = f"rank {rank} ({report.host})"
        if abs(report.clock_seconds - clock) > CLOCK_SECONDS:
            faults.append(f"{where}: its clock is {report.clock_seconds - clock:+.1f} s off")
        if report.free_gb < FREE_GB:
            faults.append(f"{where}: {report.free_gb:.1f} GB free on its disk, {FREE_GB:.0f} wanted")
        faults += [f"{where}: {error}" for error in report.errors]
        if report.gemm_seconds > SLOW * gemm:
            faults.append(
                f"{where}: a matrix product takes {1e3 * report.gemm_seconds:.2f} ms, half the ranks at most "
                f"{1e3 * gemm:.2f} ms"
            )
    usual = median_low(list(pairs.values())) if pairs else 0.0
    wanted = expect_gbits * 1e9 / 8 if expect_gbits else usual
    for (source, target), rate in pairs.items():
        if rate * SLOW < wanted:
            hosts = f"{reports[source].host} to {reports[target].host}"
            faults.append(
                f"rank {source} to {target} ({hosts}): {8e-9 * rate:.2f} Gbit/s, wanted {8e-9 * wanted:.2f} Gbit/s"
            )
    return faults


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"


def main(argv: Sequence[str]) -> int:
    """The command line. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tools.preflight", description="Is this cluster fit to train on?")
    parser.add_argument("--storage", default="", help="folder or URL to write to and read from, such as s3://bucket/x")
    parser.add_argument("--folder", default=".", help="folder whose disk is looked at (default: this one)")
    parser.add_argument(
        "--expect-gbits", type=float, default=0.0, help="between two ranks; default: what most pairs have"
    )
    arguments = parser.parse_args(argv)
    if not 0 <= arguments.expect_gbits < math.inf:
        parser.error(f"--expect-gbits {arguments.expect_gbits}: must be at least 0")
    begin, environment = time.monotonic(), launch_environment()
    logging.disable(logging.WARNING)
    device = init_distributed(environment, Comm(init_timeout_seconds=60))
    own = look_around(device, arguments.folder, arguments.storage, environment.rank)
    dist.barrier()  # read all clocks together
    own = own._replace(clock_seconds=time.time())
    reports: list[Any] = [None] * environment.world_size
    dist.all_gather_object(reports, own)
    pairs, all_reduce = time_transfers(device)
    faults = find_faults(reports, pairs, arguments.expect_gbits)
    if environment.rank == 0:
        gemm = sorted(report.gemm_seconds for report in reports)
        print(
            f"ranks: {len(reports)}, hosts: {len({report.host for report in reports})}, {device.type}, {own.versions}"
        )
        print(f"matrix product {1e3 * gemm[0]:.2f} to {1e3 * gemm[-1]:.2f} ms")
        if pairs:
            rates = sorted(8e-9 * rate for rate in pairs.values())
            print(
                f"pairs {rates[0]:.2f} to {rates[-1]:.2f} Gbit/s; all-reduce {8e-9 * all_reduce:.2f} Gbit/s of its size"
            )
        if arguments.storage:
            took = [report.storage_seconds for report in reports if report.storage_seconds]
            print(f"storage: {STORAGE_BYTES / 2**20:.0f} MiB there and back in at most {max(took, default=0):.2f} s")
        for fault in faults:
            print(f"fault: {fault}")
        print(f"faults found: {len(faults)}, in {time.monotonic() - begin:.1f} s")
    dist.barrier()  # until rank 0 has printed
    if faults and environment.restarts < environment.max_restarts and environment.local_rank == 0:
        os.kill(os.getppid(), signal.SIGQUIT)  # so that torchrun ends: a restart would only test again
    shut_down()
    return int(bool(faults))


if __name__ == "__main__":
    with command_line():
        sys.exit(main(sys.argv[1:]))
