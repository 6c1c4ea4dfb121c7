"""The processes that prepare a dataset: of this machine, or the workers of a Dask cluster. Both are a `Map`.

Dask's `distributed` is imported with --cluster only.
"""

import ctypes
import hashlib
import logging
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

from data.prepare.output import Output
from data.shards import DataError

log = logging.getLogger(__name__)
T = TypeVar("T")
# Of a function and tasks: yields the results, in any order.
Map = Callable[[Callable[[Any], Any], Sequence[Any]], Iterator[Any]]
AT_ONCE = 1024  # tasks given to a pool: more than processes, but submitting thousands may block (cpython 105829)
PR_SET_PDEATHSIG = 1  # linux/prctl.h: the signal that this process gets when its parent ends
SCHEDULER_SECONDS = 20  # until it must have answered
WORKERS_SECONDS = 120  # until the first must be there
CODE = ("data/**/*.py", "storage/*.py", "config.py")  # what decides a dataset's bytes
PACKAGES = ("numpy", "pyarrow", "tokenizers")  # and those, too
SMALLER = "continue with the same command, best with fewer --processes, or begin with a smaller --shard-mb"
CONTINUE = "the same command goes on from there, once a cluster runs"


# ---------------------------------------------------------------- processes of this machine


@contextmanager
def pool_of_processes(count: int) -> Iterator[Map]:
    """The map of a pool of `count` processes, each started when it gets a task. For 1: Python's own."""
    if count == 1:
        yield map
        return
    pool = ProcessPoolExecutor(count, multiprocessing.get_context("spawn"), _start_process)

    def pool_map(function: Callable[[Any], Any], tasks: Sequence[Any]) -> Iterator[Any]:
        for first in range(0, len(tasks), AT_ONCE):
            yield from pool.map(function, tasks[first : first + AT_ONCE])

    try:
        yield pool_map
    except BrokenProcessPool:
        raise DataError(f"the system killed a worker, most often for lack of memory; {SMALLER}") from None
    finally:
        pool.shutdown(cancel_futures=True)


def _start_process() -> None:
    """Let this worker end with its parent. Otherwise it would outlive a killed parent and go on writing."""
    _share_cores()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    parent = multiprocessing.parent_process()
    if not parent or not parent.is_alive():
        os._exit(1)


def _share_cores() -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def read_ahead(items: Iterator[T]) -> Iterator[T]:
    """Yield the items, the next of which a thread makes meanwhile."""
    with ThreadPoolExecutor(1) as thread:
        ahead = thread.submit(next, items, None)
        while True:
            item = ahead.result()
            if item is None:
                return
            ahead = thread.submit(next, items, None)
            yield item


# ---------------------------------------------------------------- a Dask cluster


@contextmanager
def connected(address: str) -> Iterator[Any]:
    """A client of the cluster at `address`, tcp://host:port or the scheduler's file; None for "".

    Raises DataError if there is no such cluster, or none of its workers is there in time.
    """
    if not address:
        yield None
        return
    try:
        from distributed import Client
        from distributed.comm import CommClosedError
    except ImportError:
        advice = "--cluster needs: pip install -r requirements-cluster.txt"
        raise DataError(f"distributed is not installed; {advice}") from None
    where = {"address": address}
    if "://" not in address:
        where = {"scheduler_file": address}
        if not os.path.isfile(address):
            raise DataError(f"--cluster {address}: must be tcp://host:port, or the file that the scheduler wrote")
    for logger in ("distributed", "distributed.client"):
        logging.getLogger(logger).setLevel(logging.CRITICAL)  # what it reports becomes our one line
    try:
        client = Client(**where, timeout=SCHEDULER_SECONDS, set_as_default=False)
    except (OSError, ValueError, TimeoutError) as error:
        raise DataError(f"--cluster {address}: no scheduler answers there: {' '.join(str(error).split())}") from None
    with client:
        if not client.scheduler_info()["workers"]:
            log.warning(f"--cluster {address}: has no worker yet; waiting for one, at most {WORKERS_SECONDS} s")
        try:
            client.wait_for_workers(1, timeout=WORKERS_SECONDS)
        except TimeoutError:
            raise DataError(f"--cluster {address}: has no worker after {WORKERS_SECONDS} s; start some") from None
        try:
            yield client
        except CommClosedError:
            raise DataError(f"the cluster's scheduler is gone; {CONTINUE}") from None


def check_workers(output: Output, client: Any) -> None:
    """Raises DataError for a worker of `client` that has other code than this process, or does not see the plan."""
    faults = client.run(_check_here, output, code_digest(), on_error="return")
    for worker, fault in sorted(faults.items()):
        if fault is None or isinstance(fault, OSError):  # it has died meanwhile, and others do its work
            continue
        raise DataError(f"worker {worker}: {fault}")


def _check_here(output: Output, digest: str) -> None:
    _check_code(digest)
    output.check_plan()


def _check_code(digest: str) -> None:
    if code_digest() != digest:
        raise DataError(f"has another version of Titanite, or of {', '.join(PACKAGES)}, than this command")


@lru_cache(maxsize=1)
def code_digest() -> str:
    """Digest of everything that decides the bytes of a dataset, apart from its input."""
    root = Path(__file__).parents[2]
    code = hashlib.sha256()
    for pattern in CODE:
        for path in sorted(root.glob(pattern)):
            code.update(path.read_bytes())
    for package in PACKAGES:
        code.update(version(package).encode())
    return code.hexdigest()


def cluster_map(client: Any) -> Map:
    """The map of a cluster. Its scheduler gives the tasks of a worker that died to others."""
    from distributed import as_completed
    from distributed.scheduler import KilledWorker

    def map_tasks(function: Callable[[Any], Any], tasks: Sequence[Any]) -> Iterator[Any]:
        # A task, so that it travels once to each worker, and again should a worker die.
        held = client.submit(_same, function, pure=False)
        futures = client.map(_run, tasks, function=held, digest=code_digest(), pure=False)
        try:
            for _, result in as_completed(futures, loop=client.loop, with_results=True):
                if isinstance(result, CancelledError):
                    raise DataError(f"the cluster's scheduler is gone; {CONTINUE}")
                yield result
        except KilledWorker as error:
            advice = "most often for lack of memory; start workers with more, or begin with a smaller --shard-mb"
            raise DataError(f"a task has lost its worker {error.allowed_failures + 1} times, {advice}") from None
        finally:
            client.cancel(futures)

    return map_tasks


def _same(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return function


def _run(task: Any, function: Callable[[Any], Any], digest: str) -> Any:
    try:
        _check_code(digest)  # of a worker that came later than `check_output`
    except DataError as error:
        from distributed import get_worker

        raise DataError(f"worker {get_worker().address}: {error}") from None
    _share_cores()
    return function(task)
