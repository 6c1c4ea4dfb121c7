"""Saves and loads against stock DCP, on disk and on S3, by two ranks over gloo.

    python -m benchmarks.checkpoint [--quick] [--check] [--skip-s3]

State: float32 weights and two AdamW moments, FSDP2 over two ranks. Every round measures each way once, in turn; a row
is the median. `stock` is dcp.save and dcp.load with FileSystemWriter/-Reader or FsspecWriter/-Reader, with their
defaults. Before a read the files leave the page cache, or the S3 server's disk catches up. `read ratio`: bytes read by
all ranks over the bytes they need. `extra MB`: a rank's peak resident memory beyond that before.

`async` saves between the steps of a training loop. `blocking s`: time until the save returns. `stall s`: how much
longer the next step takes, up to where the optimizer may begin: the median of such steps less the median of the steps
between them, during which nothing is written. A step is a wait that takes neither cores nor memory bandwidth, as on an
accelerator. The S3 server runs on this machine (tests/s3/server.py) and shares its cores.
"""

import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from benchmarks.report import add_row, build_parser, finish
from checkpoint.lease import take_lease
from checkpoint.manager import CheckpointManager
from checkpoint.state import model_tensors, optimizer_tensors
from config import Checkpoint, Config
from optim import allocate_state
from storage import open_store
from tests.distributed.checkpoint_runs import build_manager
from tests.harness import run_ranks
from tests.s3.fault_proxy import fault_proxy
from tests.s3.server import create_bucket, s3_environment, s3_server

WAYS = ("stock", "ours", "async")
STEP_SECONDS = 0.4  # of an accelerator's step
STEPS = 6  # with a save, and as many without
BUCKET = "benchmark"


def build(layers: int, dim: int, url: str, **settings: Any) -> tuple[CheckpointManager, dict[str, Any], int]:
    """Build (manager, its state as stock DCP takes it, bytes of this rank's part)."""
    model = nn.Sequential(*(nn.Linear(dim, dim) for _ in range(layers)))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp_shard",))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    allocate_state(optimizer)
    for state in optimizer.state.values():
        state["exp_avg"].to_local().normal_()
        state["exp_avg_sq"].to_local().normal_()
    config = Config(checkpoint=Checkpoint(folder=url, keep=1, **settings))
    manager = build_manager(config, [model], optimizer)
    manager.ranks.from_rank_0(lambda: take_lease(manager.store, manager.start))
    state = {"model": model_tensors([model]), "optimizer": optimizer_tensors([model], optimizer)}
    tensors = [*state["model"].values(), *state["optimizer"].values()]
    return manager, state, sum((t.to_local() if isinstance(t, DTensor) else t).nbytes for t in tensors)


# ---------------------------------------------------------------- what is measured, on every rank


def measured(work: Callable[[], Any]) -> dict[str, float]:
    """Seconds until all ranks are done; and this process's bytes read, peak memory and its growth."""
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak of resident memory
    before = _status("VmRSS")
    read = _bytes_read()
    dist.barrier()
    started = time.perf_counter()
    work()
    dist.barrier()
    seconds = time.perf_counter() - started
    peak = _status("VmHWM")
    return {"seconds": seconds, "read": _bytes_read() - read, "peak": peak, "extra": peak - before}


def save_and_load(layers: int, dim: int, folder: str, way: str, s3: bool) -> dict[str, Any]:
    """Measure one save and one load of this rank in one way."""
    url = f"s3://{BUCKET}/{Path(folder).name}-{way}" if s3 else f"{folder}/{way}"
    if way == "async":
        return save_while_training(layers, dim, url)
    manager, state, size = build(layers, dim, url)
    save, load = lambda: manager.save(1), manager.load
    if way == "stock":
        save, load = _stock(url, state)
    result: dict[str, Any] = {"size": size, "save": measured(save)}
    manager.wait()
    if s3:
        os.sync()  # what the server has accepted but not yet written
    else:
        _forget(Path(url))
    result["load"] = measured(load)
    return result


def save_while_training(layers: int, dim: int, url: str) -> dict[str, Any]:
    """Measure steps of a training loop, in turn with and without a background save before them."""
    manager, _, size = build(layers, dim, url, mode="async")
    blocking = []

    def step() -> None:
        time.sleep(STEP_SECONDS)
        manager.wait_for_copies()

    def save_and_step() -> None:
        started = time.perf_counter()
        manager.save(1)
        blocking.append(time.perf_counter() - started)
        step()

    steps: dict[str, list[dict[str, float]]] = {"without": [], "with": []}
    for _ in range(1 + STEPS):
        for name, work in (("without", step), ("with", save_and_step)):
            steps[name].append(measured(work))
            manager.wait()
    # The first of each allocates what is allocated once.
    result: dict[str, Any] = {"size": size, "blocking": blocking[1:]}
    result |= {name: [each["seconds"] for each in found[1:]] for name, found in steps.items()}
    result["extra"] = steps["with"][0]["peak"] - steps["without"][0]["peak"]
    return result


def load_elsewhere(layers: int, dim: int, url: str, way: str) -> dict[str, Any]:
    """Measure a load by another number of ranks than saved."""
    manager, state, size = build(layers, dim, url)
    load = manager.load if way == "ours" else _stock(url, state)[1]
    _forget(Path(url))
    return {"size": size, "load": measured(load)}


def load_through(endpoint: str, layers: int, dim: int, url: str, way: str) -> int:
    """Load through a proxy that counts bytes. Returns the bytes of this rank's part."""
    os.environ["AWS_ENDPOINT_URL_S3"] = endpoint
    manager, state, size = build(layers, dim, url)
    manager.load() if way == "ours" else _stock(url, state)[1]()
    return size


def _stock(url: str, state: dict[str, Any]) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """How stock DCP saves and loads."""
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter

    writer: Any
    reader: Any
    if url.startswith("s3://"):
        # By default it calls os.sync(), which waits for all disks of the machine.
        writer, reader = FsspecWriter(url, sync_files=False), FsspecReader(url)
    else:
        writer, reader = dcp.FileSystemWriter(url), dcp.FileSystemReader(url)
    return lambda: dcp.save(state, storage_writer=writer), lambda: dcp.load(state, storage_reader=reader)


def _forget(folder: Path) -> None:
    """Drop the files of `folder` from the page cache."""
    for file in folder.rglob("*"):
        if file.is_file():
            with open(file, "rb") as opened:
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


def _bytes_read() -> int:
    return int(Path("/proc/self/io").read_text().split()[1])  # rchar: files and sockets


# ---------------------------------------------------------------- rounds and rows


def row_of(place: str, way: str, results: list[list[dict[str, Any]]]) -> dict[str, Any]:
    """Medians over rounds; `results` by round, then rank."""
    size = sum(rank["size"] for rank in results[0])
    row: dict[str, Any] = {"place": place, "way": way, "MB": round(size / 1e6)}
    if way == "async":
        steps = {}
        for name in ("blocking", "with", "without"):
            steps[name] = statistics.median(time for ranks in results for time in ranks[0][name])
        extra = max(rank["extra"] for ranks in results for rank in ranks)
        return row | {
            "step s": round(steps["without"], 3),
            "blocking s": round(steps["blocking"], 3),
            "stall s": round(steps["with"] - steps["without"], 3),
            "save extra MB": round(extra / 1e6),
        }
    for action in ("save", "load"):
        if action not in results[0][0]:
            continue
        rounds = [[rank[action] for rank in ranks] for ranks in results]
        seconds = statistics.median(max(rank["seconds"] for rank in ranks) for ranks in rounds)
        extra = max(rank["extra"] for ranks in rounds for rank in ranks)
        row[f"{action} s"] = round(seconds, 3)
        row[f"{action} MB/s"] = round(size / 1e6 / seconds, 1)
        row[f"{action} extra MB"] = round(extra / 1e6)
    if place != "s3":
        row["read ratio"] = round(sum(rank["load"]["read"] for rank in results[0]) / size, 3)
    return row


def measure_place(place: str, folder: Path, layers: int, dim: int, rounds: int) -> list[dict[str, Any]]:
    """A row for each way, measured once a round. What `stock` and `ours` have saved in the first round stays."""
    results: dict[str, list[Any]] = {way: [] for way in WAYS}
    for number in range(rounds):
        target = folder / str(number)
        target.mkdir(exist_ok=True)
        for way in WAYS:
            results[way].append(run_ranks(2, save_and_load, layers, dim, str(target), way, place == "s3"))
        if number:
            shutil.rmtree(target)
        for way in WAYS if place == "s3" else ():  # the server has room for only a few rounds
            if number or way == "async":
                store = open_store(f"s3://{BUCKET}/{number}-{way}")
                store.remove(list(store.sizes()))
    return [row_of(place, way, found) for way, found in results.items()]


def main() -> int:
    """Run everything; print rows and missed bars. Returns the exit code."""
    parser = build_parser(str(__doc__).splitlines()[0])
    parser.add_argument("--skip-s3", action="store_true", help="local disk only")
    arguments = parser.parse_args()
    layers, dim, rounds = (4, 2048, 1) if arguments.quick else (12, 2048, 5)
    rows: list[dict[str, Any]] = []
    Path("outputs").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=Path("outputs").resolve()) as scratch:
        folder = Path(scratch)
        for row in measure_place("disk", folder, layers, dim, rounds):
            add_row(arguments, rows, row)
        for way in ("stock", "ours"):
            loads = run_ranks(3, load_elsewhere, layers, dim, str(folder / "0" / way), way)
            add_row(arguments, rows, row_of("disk, 2 to 3 ranks", way, [loads]))
        if not arguments.skip_s3:
            with s3_server() as server:
                os.environ.update(s3_environment(server), AWS_DEFAULT_REGION="us-east-1", OMP_NUM_THREADS="1")
                create_bucket(server, BUCKET)
                for row in measure_place("s3", folder, layers, dim, rounds):
                    if row["way"] in ("stock", "ours"):
                        row["read ratio"] = read_ratio(server, layers, dim, row["way"])
                    add_row(arguments, rows, row)
    return finish(arguments, rows, bars(rows))


def read_ratio(server: str, layers: int, dim: int, way: str) -> float:
    """Bytes that two ranks read from S3 over those they need. A proxy counts what goes through sockets."""
    with fault_proxy(server) as proxy:
        sizes = run_ranks(2, load_through, proxy.endpoint, layers, dim, f"s3://{BUCKET}/0-{way}", way)
        return round(proxy.counts()["bytes_out"] / sum(sizes), 3)


def bars(rows: list[dict[str, Any]]) -> list[tuple[str, bool]]:
    """(bar for `ours`, whether it is met) for all bars."""
    by = {(row["place"], row["way"]): row for row in rows}
    asked = []
    for place, save, load in (("disk", 1.0, 1.0), ("s3", 1.2, 2.5)):
        if (place, "ours") in by:
            ours, stock, background = (by[place, way] for way in ("ours", "stock", "async"))
            asked += [
                (f"{place}: save at {save} times stock or faster", ours["save MB/s"] >= save * stock["save MB/s"]),
                (f"{place}: load at {load} times stock or faster", ours["load MB/s"] >= load * stock["load MB/s"]),
                (f"{place}: at most 1.05 bytes read per byte needed", ours["read ratio"] <= 1.05),
                (f"{place}: async stalls at most 5 % of a sync save", background["stall s"] <= 0.05 * ours["save s"]),
            ]
    disk = by["disk", "ours"]
    resharded = by["disk, 2 to 3 ranks", "ours"]
    asked += [
        ("at most 2.1 when 3 ranks read what 2 wrote", resharded["read ratio"] <= 2.1),
        ("sync save: at most 256 MB more", disk["save extra MB"] <= 256),
        ("load: at most 256 MB more", disk["load extra MB"] <= 256),
        ("async: at most one copy and 256 MB more", by["disk", "async"]["save extra MB"] <= disk["MB"] / 2 + 256),
    ]
    return asked


if __name__ == "__main__":
    sys.exit(main())
