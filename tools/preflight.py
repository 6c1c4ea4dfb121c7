"""Test in a minute whether a cluster is fit to train on, and name the ranks that are not.

    torchrun --nnodes=2 --nproc-per-node=8 ... -m tools.preflight --storage=s3://bucket/preflight --expect-gbits=100

Run it as the job will be run. It compares all ranks' software, writes to the storage (on S3, also reads that back),
times a matrix product on every device and checks it bit for bit, and times transfers between pairs of ranks, half of
all apart. Exits with 1 and a line per fault.
"""

import argparse
import logging
import platform
import socket
import sys
import time
from collections.abc import Callable, Sequence
from statistics import median_high, median_low
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from config import Comm, TitaniteError, command_line
from parallel.device import synchronize
from run.code import PACKAGES, package_versions
from run.processes import init_distributed, launch_environment, shut_down
from storage import open_store

STORAGE_SECONDS = 15.0  # how long requests to the storage are repeated; the other ranks wait for this
TRANSFER_BYTES = 16 * 2**20
SLOW = 1.5  # times the usual time, for compute and transfers
TRIES = 6


class Report(NamedTuple):
    """What a rank found out."""

    host: str
    storage_error: str
    alike: dict[str, Any]  # what must be the same on all ranks
    gemm_seconds: float
    source: int  # the rank half of all before it
    gbits: float  # received from there


def try_storage(storage: str) -> str:
    """Why the storage cannot be used, "" if it can: a finding, not a failure of this test."""
    try:
        if storage:
            open_store(storage, STORAGE_SECONDS).check_writable()
    except TitaniteError as error:
        return str(error)
    return ""


def best_seconds(work: Callable[[], object], device: torch.device) -> float:
    """Seconds of `work`, which all ranks begin together. The best of several tries: the first may have to connect."""
    times = []
    for _ in range(TRIES):
        dist.barrier()
        synchronize(device)
        begin = time.perf_counter()
        work()
        synchronize(device)
        times.append(time.perf_counter() - begin)
    return min(times)


def time_gemm(device: torch.device) -> tuple[float, int]:
    """Seconds of a matrix product of whole numbers and its checksum, which rounding cannot change."""
    size = 8192
    dtype = torch.bfloat16
    if device.type == "cpu":
        size = 1024
        dtype = torch.float32
    matrix = torch.randint(-2, 3, (size, size), generator=torch.Generator().manual_seed(0)).to(device, dtype)
    seconds = best_seconds(lambda: matrix @ matrix, device)
    product = (matrix @ matrix).to(torch.float32)
    return seconds, int(product.view(torch.int32).sum(dtype=torch.int64))


def time_transfer(source: int, to: int, device: torch.device) -> float:
    """Gbit/s from the rank `source`, while this one sends to the rank `to`; 0 for one rank alone."""
    sent = torch.ones(TRANSFER_BYTES // 4, device=device)
    received = torch.empty_like(sent)

    def exchange() -> None:
        operations = [dist.P2POp(dist.isend, sent, to), dist.P2POp(dist.irecv, received, source)]
        for work in dist.batch_isend_irecv(operations):
            work.wait()

    if source == dist.get_rank():
        return 0.0
    return 8e-9 * TRANSFER_BYTES / best_seconds(exchange, device)


def find_faults(reports: Sequence[Report], expect_gbits: float) -> list[str]:
    """A line per fault, with its rank. What most ranks have counts as right."""
    gemm = median_low([report.gemm_seconds for report in reports])
    wanted = expect_gbits or median_high([report.gbits for report in reports])  # of two rates the better
    usual = {}
    for what in reports[0].alike:
        values = [report.alike[what] for report in reports]
        usual[what] = max(values, key=values.count)
    faults = []
    for rank, report in enumerate(reports):
        found = []
        for what, value in report.alike.items():
            if value != usual[what]:
                found.append(f"{what} is {value}, the others have {usual[what]}")
        if report.storage_error:
            found.append(report.storage_error)
        if report.gemm_seconds > SLOW * gemm:
            found.append(f"a matrix product takes {1e3 * report.gemm_seconds:.2f} ms, usual are {1e3 * gemm:.2f} ms")
        if len(reports) > 1 and report.gbits * SLOW < wanted:
            found.append(f"{report.gbits:.2f} Gbit/s from rank {report.source}, wanted {wanted:.2f}")
        faults += [f"fault: rank {rank} ({report.host}): {fault}" for fault in found]
    return faults


def main(argv: Sequence[str]) -> int:
    """The command line. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tools.preflight", description="Is this cluster fit to train on?")
    parser.add_argument("--storage", default="", help="folder or s3://bucket/prefix to write to and read from")
    parser.add_argument("--expect-gbits", type=float, default=0.0, help="between two ranks (default: what most have)")
    arguments = parser.parse_args(argv)
    environment = launch_environment()
    logging.disable(logging.WARNING)
    device = init_distributed(environment, Comm(init_timeout_seconds=120))
    storage_error = try_storage(arguments.storage)
    gemm_seconds, checksum = time_gemm(device)
    size = environment.world_size
    source = (environment.rank - size // 2) % size
    gbits = time_transfer(source, (environment.rank + size // 2) % size, device)
    versions = {"python": platform.python_version(), "torch": torch.__version__, **package_versions()}
    alike = {**dict.fromkeys(PACKAGES), **versions, "the result of a matrix product": checksum}
    reports: list[Any] = [None] * size
    dist.all_gather_object(reports, Report(socket.gethostname(), storage_error, alike, gemm_seconds, source, gbits))
    faults = find_faults(reports, arguments.expect_gbits)
    if environment.rank == 0:
        hosts = {report.host for report in reports}
        print(f"ranks: {len(reports)}, hosts: {len(hosts)}, {device.type}, {versions}")
        print(f"this rank: a matrix product in {1e3 * gemm_seconds:.2f} ms, {gbits:.2f} Gbit/s from another rank")
        print(*faults, f"faults found: {len(faults)}", sep="\n")
    dist.barrier()  # until rank 0 has printed
    shut_down()
    return int(bool(faults))


if __name__ == "__main__":
    with command_line():
        sys.exit(main(sys.argv[1:]))
