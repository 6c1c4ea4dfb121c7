"""What each setting for slow networks costs and saves.

    python -m benchmarks.ethernet [--quick] [--check] [--json=benchmarks/results/ethernet.json]

train.py's own step on two network namespaces joined by a shaped link, where the kernel counts bytes. Predicted bytes
are the planner's, predicted time is that of the unshaped link plus the bytes at the link's rate less headers. Needs
root, `ip` and `tc`.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.report import add_row, build_parser, finish, require_cpu
from config import load_config
from parallel.mesh import ParallelDims
from tests.corpus import write_dataset
from tools.plan_count import Case, count
from tools.plan_tally import Message
from tools.plan_time import sent_bytes
from train import train

ROOT = Path(__file__).parents[1]
NODES = (("titanite-a", "ta", "10.77.7.1"), ("titanite-b", "tb", "10.77.7.2"))
STEPS, SKIPPED = 4, 2  # the first steps connect
LOCAL_STEPS = 10  # with islands, steps from one meeting to the next
ACCUMULATION = 4
VOCAB_SIZE = 4096  # the least that the planner takes
PAYLOAD = 1448 / 1514  # of an Ethernet frame: the rest is headers
COMMON = (
    "--training.seq_len=16",  # only weights travel; a CPU may be slow in bfloat16
    "--training.local_batch_size=1",
    "--training.param_dtype=bfloat16",
    f"--model.vocab_size={VOCAB_SIZE}",
    "--lr_scheduler.warmup_steps=1",
    "--metrics.tensorboard=false",
    "--metrics.log_ranks=",
    "--validation.enable=false",
    "--checkpoint.enable=false",
)
FLOAT32 = ("--training.param_dtype=float32",)
OWN_SUM = ("--parallelism.reduce_scatter=all_to_all",)
ONCE = ("--parallelism.sync_every_microbatch=false",)
KEPT = ("--parallelism.reshard_after_forward=false",)
BF16_SUM = ("--training.reduce_dtype=bfloat16",)

Row = dict[str, Any]


class Setting(NamedTuple):
    """How many ranks each node has, and how they share the work."""

    ranks_per_node: int
    words: tuple[str, ...]

    @property
    def steps(self) -> tuple[int, int]:
        """(last step before the measured ones, last measured step)."""
        local = any("local_steps" in word for word in self.words)
        return (LOCAL_STEPS, 2 * LOCAL_STEPS) if local else (SKIPPED, STEPS)

    def arguments(self) -> list[str]:
        """Arguments of train.py."""
        batch = len(NODES) * self.ranks_per_node * ACCUMULATION
        return [
            *COMMON,
            *self.words,
            f"--training.global_batch_size={batch}",
            f"--training.steps={self.steps[1]}",
        ]


SETTINGS = {
    "naive: all in float32": Setting(1, FLOAT32),
    "weights in bfloat16": Setting(1, ()),
    "+ all_to_all": Setting(1, OWN_SUM),
    "+ gradients in bfloat16": Setting(1, (*OWN_SUM, *BF16_SUM)),
    "+ summed once a step": Setting(1, (*OWN_SUM, *BF16_SUM, *ONCE)),
    "+ gathered once a step": Setting(1, (*OWN_SUM, *BF16_SUM, *ONCE, *KEPT)),
    "islands, 10 local steps": Setting(1, ("--parallelism.dp_replicate=2", f"--parallelism.local_steps={LOCAL_STEPS}")),
    "2 ranks a node": Setting(2, ()),
    "2 ranks a node, HSDP": Setting(2, ("--parallelism.dp_replicate=2",)),
}
QUICK = ("naive: all in float32", "+ gathered once a step", "2 ranks a node, HSDP")
RATES = {"unshaped": None, "1 Gbit/s": 1000, "200 Mbit/s": 200}  # Mbit/s


def predict_bytes(setting: Setting) -> float:
    """Bytes that a node sends in a step, by the planner's count of collectives, sent round rings."""
    config = load_config(setting.arguments())
    dims = ParallelDims.from_config(config.parallelism, len(NODES) * setting.ranks_per_node)
    total = 0.0
    (counts,) = count([Case(config, len(NODES) * setting.ranks_per_node)]).values()
    for key, size in counts.items():
        if not isinstance(key, Message):
            continue
        ranks, groups = {
            "world": (len(NODES) * setting.ranks_per_node, 1),
            "dp_replicate": (dims.dp_replicate, setting.ranks_per_node),  # a ring crosses for each rank of a node
        }.get(key.axis, (1, 0))  # the other axes stay on a node
        # gloo's reduce-scatter is an all-reduce, after which each rank keeps its piece.
        kind = key.kind
        if kind == "reduce_scatter":
            kind = "all_reduce"
        total += groups * sent_bytes(kind, size, ranks)
    return total / max(1, config.parallelism.local_steps)


@contextmanager
def two_nodes() -> Iterator[None]:
    """Two namespaces joined by a pair of virtual Ethernet devices. Raises CalledProcessError if they cannot be made."""
    (left, left_link, _), (right, right_link, _) = NODES
    try:
        for name, _, _ in NODES:
            _ip("netns", "add", name)
        _ip("link", "add", left_link, "netns", left, "type", "veth", "peer", "name", right_link, "netns", right)
        for name, link, address in NODES:
            _ip("-n", name, "address", "add", f"{address}/24", "dev", link)
            for device in ("lo", link):
                _ip("-n", name, "link", "set", device, "up")
        yield
    finally:
        for name, _, _ in NODES:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


def shape(mbits: int | None) -> None:
    """Limit what each node sends; None: no limit."""
    for name, link, _ in NODES:
        tc = ["ip", "netns", "exec", name, "tc", "qdisc"]
        subprocess.run([*tc, "delete", "dev", link, "root"], capture_output=True)
        if mbits:
            limit = ["rate", f"{mbits}mbit", "burst", "256kb", "latency", "20ms"]
            subprocess.run([*tc, "add", "dev", link, "root", "tbf", *limit], check=True)


def run_nodes(setting: Setting, arguments: list[str], port: int) -> dict[str, float]:
    """Train on both nodes. Returns seconds and sent bytes of a step."""
    processes = []
    size = len(NODES) * setting.ranks_per_node
    for rank in range(size):
        name, link, _ = NODES[rank // setting.ranks_per_node]
        local = str(rank % setting.ranks_per_node)
        environment = os.environ | {"RANK": str(rank), "LOCAL_RANK": local, "WORLD_SIZE": str(size)}
        environment |= {"MASTER_ADDR": NODES[0][2], "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": link}
        environment |= {"OMP_NUM_THREADS": "1", "ETHERNET_LINK": link, "SKIPPED": str(setting.steps[0])}
        command = ["ip", "netns", "exec", name, sys.executable, "-m", "benchmarks.ethernet", "rank", *arguments]
        processes.append(subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True))
    outputs = [process.communicate(timeout=600)[0] for process in processes]
    return json.loads(outputs[0].splitlines()[-1])


def run_rank(arguments: list[str]) -> None:
    """Run one rank, and print what it measured."""
    counter = Path(f"/sys/class/net/{os.environ['ETHERNET_LINK']}/statistics/tx_bytes")
    seen: list[tuple[float, int]] = []
    torch.set_num_threads(1)
    train(load_config(arguments), lambda step: seen.append((time.perf_counter(), int(counter.read_text()))))
    times, sent = zip(*seen[int(os.environ["SKIPPED"]) - 1 :], strict=True)
    count = len(times) - 1
    # Whole steps only: the step after the last has not begun.
    print(json.dumps({"seconds": (times[-1] - times[0]) / count, "bytes": (sent[-1] - sent[0]) / count}), flush=True)
    os._exit(0)


def measure_rows(arguments: argparse.Namespace, scratch: Path, rows: list[Row]) -> None:
    """Measure each setting at each rate, and add a row for it."""
    alone: dict[str, float] = {}  # seconds of a step at the unshaped link
    names = QUICK if arguments.quick else tuple(SETTINGS)
    dataset = write_dataset(scratch / "data", [[[*[1] * 399, 0]] * 60], vocab_size=300)
    port = 29_700
    with two_nodes():
        for link, mbits in RATES.items():
            if arguments.quick and link == "1 Gbit/s":
                continue
            shape(mbits)
            for name in names:
                port += 1
                setting = SETTINGS[name]
                words = [*setting.arguments(), f"--data.datasets={dataset}", f"--run.folder={scratch / str(port)}"]
                row: Row = {"link": link, "setting": name} | run_nodes(setting, words, port)
                row["bytes_predicted"] = predict_bytes(setting)
                if mbits:
                    wire = 8 * row["bytes_predicted"] / (mbits * 1e6 * PAYLOAD)
                    row["seconds_predicted"] = alone[name] + wire
                else:
                    alone[name] = row["seconds"]
                add_row(arguments, rows, row)


def bars(rows: list[Row]) -> list[tuple[str, bool]]:
    """The bars, and whether they are met."""
    slow = {row["setting"]: row["seconds"] for row in rows if row["link"] == "200 Mbit/s"}
    gain = slow[QUICK[0]] / min(slow.values())
    off = max(abs(row["seconds"] / row["seconds_predicted"] - 1) for row in rows if "seconds_predicted" in row)
    return [
        (f"the best setting 3 times as fast as the naive one at 200 Mbit/s: {gain:.2f}", gain >= 3),
        (f"every time within 25 % of the formulas: {100 * off:.0f} %", off <= 0.25),
    ]


def main() -> int:
    parser = build_parser(__doc__ or "")
    arguments = parser.parse_args()
    require_cpu(parser)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="ethernet-") as scratch:
        measure_rows(arguments, Path(scratch), rows)
    return finish(arguments, rows, bars(rows))


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        run_rank(sys.argv[2:])
    sys.exit(main())
