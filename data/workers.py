"""Tasks on all cores, under a progress bar. Imports no torch."""

import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from itertools import islice
from typing import Any

from tqdm import tqdm

Function = Callable[[str, Any], int]


def run_all(workers: int, function: Function, folder: str, tasks: list[Any], title: str, weights: list[int]) -> None:
    """Run `function(folder, task)`, which returns tokens, for every task; the bar shows tokens/s and the time left."""
    tokens, begin = 0, time.monotonic()
    with tqdm(total=sum(weights), desc=title, unit="B" if title == "tokenise" else " shards", unit_scale=True) as bar:
        for number, result in _results(workers, function, folder, tasks):
            tokens += result
            bar.set_postfix_str(f"{tokens / max(time.monotonic() - begin, 1e-9):,.0f} tokens/s", refresh=False)
            bar.update(weights[number])


def _results(workers: int, function: Function, folder: str, tasks: list[Any]) -> Iterator[tuple[int, int]]:
    """(number of the task, its result) as they finish, a few tasks in flight at a time."""
    if workers == 1 or len(tasks) == 1:
        for number, task in enumerate(tasks):
            yield number, function(folder, task)
        return
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(workers, len(tasks)), spawn, _start_worker) as pool:
        running: dict[Future[int], int] = {}
        waiting = iter(enumerate(tasks))
        try:
            while True:
                for number, task in islice(waiting, 2 * workers - len(running)):
                    running[pool.submit(function, folder, task)] = number
                if not running:
                    return
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    yield running.pop(future), future.result()
        finally:
            pool.shutdown(cancel_futures=True)


def _start_worker() -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes share the cores
