"""Run tasks on all cores, with a progress bar, in a folder locked against other writers. Imports no torch."""

import ctypes
import errno
import fcntl
import logging
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tqdm import tqdm

from config import file_errors
from data.shards import DataError

AT_ONCE = 1024  # tasks given to a pool: more than processes, but submitting thousands may block (cpython 105829)
PR_SET_PDEATHSIG = 1  # linux/prctl.h: the signal that this process gets when its parent ends

log = logging.getLogger(__name__)

Map = Callable[..., Iterator[int]]


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Make a folder and lock it until the context ends. Raises DataError if another process has locked it."""
    with file_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / ".lock").open("a")  # writable, since NFS locks no others
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DataError(f"{folder}: another process is writing there; wait until it has ended") from None
        except OSError as error:
            if error.errno != errno.ENOSYS:
                raise
            log.warning("%s: on a file system without locks; make sure that nothing else writes there", folder)
        yield


@contextmanager
def worker_pool(count: int) -> Iterator[Map]:
    """The `map` of a pool of `count` processes, each started when it gets a task. For 1: Python's own."""
    if count == 1:
        yield map
        return
    pool = ProcessPoolExecutor(count, multiprocessing.get_context("spawn"), _start_worker)
    try:
        yield pool.map
    except BrokenProcessPool:
        raise DataError(
            "the system killed a worker, most often for lack of memory; run the same command again to "
            "continue, best with fewer --processes, or start over with a smaller --shard-mb"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


def run_all(
    pool_map: Map, function: Callable[..., int], tasks: list[tuple[Any, ...]], title: str, weights: list[int]
) -> int:
    """Run `function(*task)` for every task and return the sum of its results, tokens. The bar shows tokens/s."""
    tokens, begin = 0, time.monotonic()
    with tqdm(total=sum(weights), desc=title, unit="B" if title == "tokenise" else " shards", unit_scale=True) as bar:
        for first in range(0, len(tasks), AT_ONCE):
            results = pool_map(function, *zip(*tasks[first : first + AT_ONCE], strict=True))
            for weight, result in zip(weights[first:], results, strict=False):
                tokens += result
                bar.set_postfix_str(f"{tokens / max(time.monotonic() - begin, 1e-9):,.0f} tokens/s", refresh=False)
                bar.update(weight)
    return tokens


def _start_worker() -> None:
    """Let this worker end with its parent. Otherwise it would outlive a killed parent and go on writing."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes share the cores
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    parent = multiprocessing.parent_process()
    if not parent or not parent.is_alive():
        os._exit(1)
