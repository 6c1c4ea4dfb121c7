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

from config import file_errors
from data.shards import DataError

IN_FLIGHT = 256  # tasks: more than processes, but few, since submitting thousands may block (cpython 105829)
LOCK_SECONDS = 10.0  # within which the workers of a killed process end

log = logging.getLogger(__name__)


@contextmanager
def locked(folder: Path) -> Iterator[Connection]:
    """Make a folder and lock it for this process and the workers that are given the lock.

    The lock is held until the last of them ends. Raises DataError.
    """
    with file_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        file = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o666)  # writable, since NFS locks no others
    with Connection(file) as lock:  # a Connection, since spawned processes inherit its descriptor
        give_up = time.monotonic() + LOCK_SECONDS
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > give_up:
                    raise DataError(f"{folder}: another process is writing there; wait until it has ended") from None
                time.sleep(0.05)
            except OSError as error:
                if error.errno != errno.ENOSYS:
                    raise
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
    except BrokenProcessPool:
        raise DataError(
            "the system killed a worker, most often for lack of memory; run the same command again to "
            "continue, best with fewer --processes, or start over with a smaller --shard-mb"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


def run_all(
    pool: ProcessPoolExecutor | None,
    function: Callable[..., int],
    tasks: list[tuple[Any, ...]],
    title: str,
    weights: list[int],
) -> int:
    """Run `function(*task)` for every task and return the sum of its results, tokens. The bar shows tokens/s."""
    tokens, begin = 0, time.monotonic()
    running: dict[Future[int], int] = {}  # → its number
    waiting = iter(enumerate(tasks))
    with tqdm(total=sum(weights), desc=title, unit="B" if title == "tokenise" else " shards", unit_scale=True) as bar:
        for _ in tasks:
            if pool:
                for number, task in islice(waiting, IN_FLIGHT - len(running)):
                    running[pool.submit(function, *task)] = number
                done = next(iter(wait(running, return_when=FIRST_COMPLETED).done))
                number, result = running.pop(done), done.result()
            else:
                number, task = next(waiting)
                result = function(*task)
            tokens += result
            bar.set_postfix_str(f"{tokens / max(time.monotonic() - begin, 1e-9):,.0f} tokens/s", refresh=False)
            bar.update(weights[number])
    return tokens


def _start_worker(lock: Connection) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes share the cores
    threading.Thread(target=_end_with_parent, args=(lock,), daemon=True).start()


def _end_with_parent(lock: Connection) -> None:
    """End this worker when its parent ends. Otherwise it would outlive a killed parent and go on writing."""
    parent = multiprocessing.parent_process()
    assert parent
    parent.join()
    os._exit(1)
