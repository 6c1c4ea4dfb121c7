"""Read data at a given rate from a real S3 server that misbehaves."""

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec

from config import Config
from data.loader import DataLoader
from tests.s3.fault_proxy import FaultProxy, fault_proxy
from tests.s3.server import create_bucket, s3_environment, s3_server

TOKENS_PER_SECOND = 180_000
WINDOW_BLOCKS = 2


def measure_s3(dataset: Path, config: Callable[..., Config], seconds: float, outage_seconds: float) -> dict[str, Any]:
    """Consume TOKENS_PER_SECOND for `seconds`. In the middle the server is gone for `outage_seconds`."""
    with s3_server() as endpoint, fault_proxy(endpoint) as proxy:
        os.environ.update(s3_environment(endpoint))
        create_bucket(endpoint, "data")
        system, _ = fsspec.core.url_to_fs("s3://data", skip_instance_cache=True)
        for file in dataset.iterdir():
            system.pipe_file(f"s3://data/set/{file.name}", file.read_bytes())
        os.environ["AWS_ENDPOINT_URL_S3"] = proxy.endpoint
        _fail_a_fifth(proxy)
        cache = dataset.parent / "cache"
        remote = config(["s3://data/set"], window_blocks=WINDOW_BLOCKS, cache_folder=str(cache))
        loader = DataLoader(remote, 0, 1)
        batches = [loader.next_step()[0].tokens.sum().item()]
        steps = int(seconds * TOKENS_PER_SECOND / remote.training.max_seq_len / remote.training.local_batch_size)
        step_seconds = seconds / steps
        outage = threading.Timer(seconds / 3, lambda: proxy.fault("reset"))
        over = threading.Timer(seconds / 3 + outage_seconds, lambda: _fail_a_fifth(proxy))
        outage.start()
        over.start()
        waited = 0.0
        begin = time.monotonic()
        for step in range(steps):
            time.sleep(max(0.0, begin + step * step_seconds - time.monotonic()))
            batches.append(loader.next_step()[0].tokens.sum().item())
            waited += loader.wait_seconds
        elapsed = time.monotonic() - begin
        over.join()
        loader.close()
    local = DataLoader(config([dataset], window_blocks=WINDOW_BLOCKS), 0, 1)
    identical = batches == [local.next_step()[0].tokens.sum().item() for _ in batches]
    local.close()
    return {
        "tokens/s": (steps * remote.training.max_seq_len * remote.training.local_batch_size) / elapsed,
        "wait_pct": 100 * waited / elapsed,
        "outage_s": outage_seconds,
        "identical": identical,
    }


def _fail_a_fifth(proxy: FaultProxy) -> None:
    """Fail a fifth of all requests from now on, and end earlier faults."""
    proxy.reset()
    for i in range(1, 100):
        proxy.fault("503", operation="get", skip=4 * i, times=1)
