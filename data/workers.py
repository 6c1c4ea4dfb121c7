"""Run tasks on all cores, with a progress bar, in a folder locked against other writers. Imports no torch."""

import errno
import fcntl
import logging
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from itertools import islice
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tqdm import tqdm

from data.shards import DataError

LOCK = ".lock"
IN_FLIGHT = 1000  # tasks: more than processes, but so few that submitting them never blocks (cpython 105829)
LOCK_SECONDS = 10.0  # within which the workers of a killed process end
Function = Callable[..., int]

log = logging.getLogger(__name__)


@contextmanager
def locked(folder: Path) -> Iterator[Connection]:
    """Make a folder and lock it for this process and the workers that are given the lock.

    The lock is held until the last of them ends. Raises DataError.
    """
    folder.mkdir(parents=True, exist_ok=True)
    # A writable file, since NFS locks no others. A Connection, since spawned processes inherit its descriptor.
    with Connection(os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o666)) as lock:
        begin = time.monotonic()
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() - begin > LOCK_SECONDS:
                    raise DataError(f"{folder}: another process is writing there; wait until it has ended") from None
                time.sleep(0.05)
            except OSError as error:
                if error.errno not in (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP):
                    raise DataError(f"{folder / LOCK}: cannot be locked: {error.strerror}") from None
                log.warning("%s: on a file system without locks; make sure that nothing else writes there", folder)
                break
        yield lock


@contextmanager
def worker_pool(count: int, lock: Connection) -> Iterator[ProcessPoolExecutor | None]:
    """A pool of `count` processes, each started when it gets a task. None for 1: this process does the work."""
    if count == 1:
        yield None
        return
    pool = ProcessPoolExecutor(count, multiprocessing.get_context("spawn"), _start_worker, (lock,))
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


def run_all(
    pool: ProcessPoolExecutor | None, function: Function, tasks: list[tuple[Any, ...]], title: str, weights: list[int]
) -> int:
    """Run `function(*task)` for every task and return the sum of its results, tokens. The bar shows tokens/s."""
    tokens, begin = 0, time.monotonic()
    with tqdm(total=sum(weights), desc=title, unit="B" if title == "tokenise" else " shards", unit_scale=True) as bar:
        for number, result in _results(pool, function, tasks):
            tokens += result
            bar.set_postfix_str(f"{tokens / max(time.monotonic() - begin, 1e-9):,.0f} tokens/s", refresh=False)
            bar.update(weights[number])
    return tokens


def _results(
    pool: ProcessPoolExecutor | None, function: Function, tasks: list[tuple[Any, ...]]
) -> Iterator[tuple[int, int]]:
    """Yield (number of the task, its result) as tasks finish, with at most IN_FLIGHT under way."""
    if pool is None or len(tasks) <= 1:
        for number, task in enumerate(tasks):
            yield number, function(*task)
        return
    running: dict[Future[int], int] = {}
    waiting = iter(enumerate(tasks))
    try:
        while True:
            for number, task in islice(waiting, IN_FLIGHT - len(running)):
                running[pool.submit(function, *task)] = number
            if not running:
                return
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                yield running.pop(future), future.result()
    except BrokenProcessPool:
        raise DataError(
            "the system killed a worker, most often for lack of memory; run the same command again to "
            "continue, best with fewer --processes, or start over with a smaller --shard-mb"
        ) from None


def _start_worker(lock: Connection) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes share the cores
    threading.Thread(target=_end_with_parent, args=(lock,), daemon=True).start()


def _end_with_parent(lock: Connection) -> None:
    """End this worker when its parent ends. Otherwise it would outlive a killed parent and go on writing."""
    parent = multiprocessing.parent_process()
    assert parent
    parent.join()
    os._exit(1)
