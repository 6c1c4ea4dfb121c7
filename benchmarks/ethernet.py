"""What each setting for slow networks costs and saves: two nodes as network namespaces, joined by a shaped link.

    python -m benchmarks.ethernet [--quick] [--check] [--json=benchmarks/results/ethernet.json]

train.py's own step on one rank per node; bytes are counted by the kernel at the link. Needs root, `ip` and `tc`.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.chaos import prepare_data
from benchmarks.report import build_parser, finish, print_row
from config import load_config

ROOT = Path(__file__).parents[1]
NODES = (("titanite-a", "ta", "10.77.7.1"), ("titanite-b", "tb", "10.77.7.2"))
STEPS, SKIPPED = 5, 2  # the first steps connect
ACCUMULATION = 4
COMMON = (
    "--training.seq_len=64",
    "--training.local_batch_size=1",
    f"--training.global_batch_size={len(NODES) * ACCUMULATION}",
    f"--training.steps={STEPS}",
    "--lr_scheduler.warmup_steps=1",
    "--metrics.tensorboard=false",
    "--metrics.log_ranks=9",
    "--validation.enable=false",
    "--checkpoint.enable=false",
)
FLOAT32 = ("--training.param_dtype=float32",)
OWN_SUM = ("--parallelism.reduce_scatter=all_to_all",)
ONCE = ("--parallelism.sync_every_microbatch=false",)
KEPT = ("--parallelism.reshard_after_forward=false",)
BF16_SUM = ("--training.reduce_dtype=bfloat16",)
SETTINGS: dict[str, tuple[str, ...]] = {
    "naive: all in float32": FLOAT32,
    "weights in bfloat16": (),
    "+ all_to_all": OWN_SUM,
    "+ gradients in bfloat16": (*OWN_SUM, *BF16_SUM),
    "+ prefetch 1": (*OWN_SUM, *BF16_SUM, "--parallelism.prefetch_layers=1"),
    "+ summed once a step": (*OWN_SUM, *BF16_SUM, *ONCE),
    "+ gathered once a step": (*OWN_SUM, *BF16_SUM, *ONCE, *KEPT),
}
RATES = {"unshaped": None, "1 Gbit/s": 1000, "200 Mbit/s": 200}  # Mbit/s


def predict_bytes(settings: tuple[str, ...], parameters: int) -> float:
    """Bytes that a rank sends in a step, by the formulas of docs/ethernet.md."""
    config = load_config([*COMMON, *settings])
    share = (len(NODES) - 1) / len(NODES)
    sums = 1 if not config.parallelism.sync_every_microbatch else ACCUMULATION
    gathers = ACCUMULATION * (2 if config.parallelism.reshard_after_forward else 1)
    if sums == 1 and not config.parallelism.reshard_after_forward:
        gathers = 1
    weight, gradient = (
        {"float32": 4, "bfloat16": 2}[dtype] for dtype in (config.training.param_dtype, config.training.reduce_dtype)
    )
    whole = 1 if config.parallelism.reduce_scatter == "all_to_all" else 2  # gloo's reduce-scatter is an all-reduce
    return share * parameters * (gathers * weight + sums * gradient * whole)


@contextmanager
def two_nodes() -> Iterator[None]:
    """Two namespaces joined by a pair of virtual Ethernet devices. Raises CalledProcessError where that cannot be."""
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
    """Limit what each node sends."""
    for name, link, _ in NODES:
        tc = ["ip", "netns", "exec", name, "tc", "qdisc"]
        subprocess.run([*tc, "delete", "dev", link, "root"], capture_output=True)
        if mbits:
            limit = ["rate", f"{mbits}mbit", "burst", "256kb", "latency", "20ms"]
            subprocess.run([*tc, "add", "dev", link, "root", "tbf", *limit], check=True)


def run_nodes(arguments: list[str], port: int) -> dict[str, float]:
    """Train on both nodes: seconds and sent bytes of a step, parameters."""
    ranks = []
    for rank, (name, link, _) in enumerate(NODES):
        environment = os.environ | {"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": str(len(NODES))}
        environment |= {"MASTER_ADDR": NODES[0][2], "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": link}
        environment |= {"OMP_NUM_THREADS": "1", "ETHERNET_LINK": link}
        command = ["ip", "netns", "exec", name, sys.executable, "-m", "benchmarks.ethernet", "rank", *arguments]
        ranks.append(subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True))
    outputs = [rank.communicate(timeout=600)[0] for rank in ranks]
    return json.loads(outputs[0].splitlines()[-1])


def run_rank(arguments: list[str]) -> None:
    """One node's rank; prints what it measured."""
    import torch

    from train import train

    counter = Path(f"/sys/class/net/{os.environ['ETHERNET_LINK']}/statistics/tx_bytes")
    seen: list[tuple[float, int]] = []
    torch.set_num_threads(1)
    train(load_config(arguments), lambda step: seen.append((time.perf_counter(), int(counter.read_text()))))
    times, sent = zip(*seen[SKIPPED - 1 :], strict=True)
    count = len(times) - 1
    # In whole steps: the one after the last is not begun.
    print(json.dumps({"seconds": (times[-1] - times[0]) / count, "bytes": (sent[-1] - sent[0]) / count}), flush=True)
    os._exit(0)


def main() -> int:
    parser = build_parser(__doc__ or "")
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    quick = arguments.quick
    names = [name for name in SETTINGS if not quick or name in (next(iter(SETTINGS)), list(SETTINGS)[-1])]
    rates = {name: rate for name, rate in RATES.items() if not quick or name != "1 Gbit/s"}
    port = 29_700
    with tempfile.TemporaryDirectory(prefix="ethernet-") as scratch:
        dataset = prepare_data(Path(scratch))
        try:
            with two_nodes():
                for rate_name, mbits in rates.items():
                    shape(mbits)
                    for name in names:
                        port += 1
                        folder = Path(scratch) / f"run-{port}"
                        words = [*COMMON, *SETTINGS[name], f"--data.datasets={dataset}", f"--run.folder={folder}"]
                        rows.append({"link": rate_name, "setting": name} | run_nodes(words, port))
                        model = json.loads((folder / "model.json").read_text())
                        rows[-1]["bytes_predicted"] = predict_bytes(SETTINGS[name], count_parameters(model))
                        if mbits:
                            alone = next(r for r in rows if r["setting"] == name and r["link"] == "unshaped")
                            wire = 8 * rows[-1]["bytes_predicted"] / (mbits * 1e6)
                            rows[-1]["seconds_predicted"] = alone["seconds"] + wire
                        print_row(rows[-1])
        except (OSError, subprocess.CalledProcessError) as error:
            print(f"no namespaces or no shaped link can be made here: {error}")
            return int(arguments.check)
    slow = {row["setting"]: row["seconds"] for row in rows if row["link"] == "200 Mbit/s"}
    gain = slow[names[0]] / min(slow.values())
    off = max(abs(row["seconds"] / row["seconds_predicted"] - 1) for row in rows if "seconds_predicted" in row)
    bars = [
        (f"the best setting 3 times as fast as the naive one at 200 Mbit/s: {gain:.2f}", gain >= 3),
        (f"every time within 25 % of the formulas: {100 * off:.0f} %", off <= 0.25),
    ]
    return finish(arguments, rows, bars)


def count_parameters(model: dict[str, Any]) -> int:
    """Parameters of a run's model.json."""
    from models import MODELS, build_model

    spec = MODELS[model.pop("name")]
    flavor = type(next(iter(spec.flavors.values())))(**model)
    return sum(parameter.numel() for parameter in build_model(spec, flavor).parameters())


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        run_rank(sys.argv[2:])
    sys.exit(main())
