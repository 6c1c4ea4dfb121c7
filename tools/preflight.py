"""Test in a minute whether a cluster is fit to train on, and name the ranks that are not.

    torchrun --nnodes=2 --nproc-per-node=8 ... -m tools.preflight --storage=s3://bucket/preflight --expect-gbits=100

Run it as the job will be run. It compares all ranks' software, clocks and disks, writes to the storage (on S3, also
reads that back), times a matrix product on every device and checks it bit for bit, and times transfers between pairs of
ranks and an all-reduce. Exits with 1 and a line per fault.
"""

import argparse
import logging
import platform
import shutil
import socket
import sys
import time
from collections.abc import Callable, Sequence
from statistics import median_low
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from config import Comm, TitaniteError, command_line
from parallel.device import synchronize
from records import package_versions
from run.processes import init_distributed, launch_environment, shut_down
from storage import open_store

CLOCK_SECONDS = 2.0  # clocks may differ by this; S3 refuses requests 900 s off
FREE_GB = 20.0
STORAGE_SECONDS = 15.0  # how long requests to the storage are repeated; the other ranks wait for this
TRANSFER_BYTES = 16 * 2**20
SLOW = 1.5  # times the usual time, for compute and transfers
REPEATS = 5


class Report(NamedTuple):
    """What a rank found out by itself."""

    host: str
    versions: dict[str, str]
    clock_seconds: float
    free_gb: float
    storage_error: str
    gemm_seconds: float
    gemm_checksum: int


def make_report(device: torch.device, storage: str) -> Report:
    """This rank's report. Whatever the storage raises is a finding, not a failure of this test."""
    error = ""
    if storage:
        try:
            open_store(storage, STORAGE_SECONDS).check_writable()
        except TitaniteError as raised:
            error = str(raised)
    versions = package_versions() | {"python": platform.python_version(), "torch": torch.__version__}
    free_gb = shutil.disk_usage(".").free / 1e9
    return Report(socket.gethostname(), versions, time.time(), free_gb, error, *time_gemm(device))


def best_seconds(work: Callable[[], object], device: torch.device, tries: int) -> float:
    """Seconds of `work` on the device, the best of several tries."""
    times = []
    for _ in range(tries):
        synchronize(device)
        begin = time.perf_counter()
        work()
        synchronize(device)
        times.append(time.perf_counter() - begin)
    return min(times)


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
    seconds = best_seconds(lambda: dist.all_reduce(buffer), device, REPEATS)
    return {pair: rate for rates in gather(own) for pair, rate in rates.items()}, TRANSFER_BYTES / seconds


def gather(own: Any) -> list[Any]:
    """The objects of all ranks."""
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, own)
    return gathered


def find_faults(reports: Sequence[Report], pairs: dict[tuple[int, int], float], expect_gbits: float) -> list[str]:
    """A line per fault, with its rank. What most ranks have counts as right."""
    clock = median_low([report.clock_seconds for report in reports])
    gemm = median_low([report.gemm_seconds for report in reports])
    equal = [{**report.versions, "the result of a matrix product": report.gemm_checksum} for report in reports]
    faults = []
    for rank, report in enumerate(reports):
        found = [report.storage_error] if report.storage_error else []
        for what in sorted({name for values in equal for name in values}):
            values = [values.get(what) for values in equal]
            if values[rank] != (usual := max(values, key=values.count)):
                found.append(f"{what} is {values[rank]}, the others have {usual}")
        if abs(report.clock_seconds - clock) > CLOCK_SECONDS:
            found.append(f"its clock is {report.clock_seconds - clock:+.1f} s off")
        if report.free_gb < FREE_GB:
            found.append(f"{report.free_gb:.1f} GB free on its disk, {FREE_GB:.0f} wanted")
        if report.gemm_seconds > SLOW * gemm:
            found.append(f"a matrix product takes {1e3 * report.gemm_seconds:.2f} ms, usual are {1e3 * gemm:.2f} ms")
        faults += [f"rank {rank} ({report.host}): {fault}" for fault in found]
    wanted = expect_gbits * 1e9 / 8 or (median_low(list(pairs.values())) if pairs else 0.0)
    for (source, target), rate in pairs.items():
        if rate * SLOW < wanted:
            hosts = f"{reports[source].host} to {reports[target].host}"
            rates = f"{8e-9 * rate:.2f} Gbit/s, wanted {8e-9 * wanted:.2f} Gbit/s"
            faults.append(f"rank {source} to {target} ({hosts}): {rates}")
    return faults


def main(argv: Sequence[str]) -> int:
    """The command line. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tools.preflight", description="Is this cluster fit to train on?")
    parser.add_argument("--storage", default="", help="folder or s3://bucket/prefix to write to and read from")
    help_text = "between two ranks; default: what most pairs have"
    parser.add_argument("--expect-gbits", type=float, default=0.0, help=help_text)
    arguments = parser.parse_args(argv)
    begin, environment = time.monotonic(), launch_environment()
    logging.disable(logging.WARNING)
    device = init_distributed(environment, Comm(init_timeout_seconds=120))
    own = make_report(device, arguments.storage)
    dist.barrier()  # read all clocks together
    reports: list[Report] = gather(own._replace(clock_seconds=time.time()))
    pairs, all_reduce = time_transfers(device)
    faults = find_faults(reports, pairs, arguments.expect_gbits)
    if environment.rank == 0:
        gemm, rates = [1e3 * report.gemm_seconds for report in reports], [8e-9 * rate for rate in pairs.values()]
        hosts = len({report.host for report in reports})
        print(f"ranks: {len(reports)}, hosts: {hosts}, {device.type}, {own.versions}")
        print(f"matrix product {min(gemm):.2f} to {max(gemm):.2f} ms")
        if rates:
            print(f"pairs {min(rates):.2f} to {max(rates):.2f}, all-reduce {8e-9 * all_reduce:.2f} Gbit/s")
        print(*(f"fault: {fault}" for fault in faults), f"faults found: {len(faults)}", sep="\n")
        print(f"in {time.monotonic() - begin:.1f} s")
    dist.barrier()  # until rank 0 has printed
    shut_down()
    return int(bool(faults))


if __name__ == "__main__":
    with command_line():
        sys.exit(main(sys.argv[1:]))
