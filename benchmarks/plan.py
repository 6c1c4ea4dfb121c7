"""The planner's tokens per second and memory against published figures of other people's runs, row by row.

    python -m benchmarks.plan [--check]

The shares of peak in tools/devices.py and the constants of tools/plan_time.py and plan_memory.py were fitted on
the rows marked `fit`, a third of all. The bars are on the other rows. No row of the tables is left out. Settings are
the sources'; if a source does not give one, the row says what was assumed.
"""

import dataclasses
import itertools
import statistics
import sys
from typing import Any

from benchmarks.report import build_parser, finish, print_row
from config import Config, ConfigError, from_dict
from models.llama import FLAVORS
from models.llama.model import LlamaConfig
from parallel.mesh import ParallelDims
from tools.devices import DEVICES, GIB
from tools.plan_costs import Work
from tools.plan_memory import memory, reserved
from tools.plan_time import Cluster, estimate

# github.com/pytorch/torchtitan benchmarks/llama3_h100_202412_torchtitan.md: H100 of 96 GB and 500 W, 400 Gb/s per GPU.
# The rest is from its commit 9dec370: sequences of 8,192, loss not compiled, as many pipeline microbatches as stages,
# two stages per rank when interleaved.
TITAN = "torchtitan 2024-12"
# Same repository, benchmarks/llama3-8b_h200_202506_trainy-whitefiber.md: selective checkpointing, and a compiled loss
# according to the code of its commit e7c0cae.
TRAINY = "trainy 2025-06"
# github.com/foundation-model-stack/fms-fsdp README.md: sequences of 4,096, gradients summed in bfloat16. The network is
# a node's. "Selective AC" is for a share of blocks that follows only from the README's HFU / MFU: 1/3 of 13B's, all of
# 34B's and 70B's.
FMS = "fms-fsdp"
# pytorch.org/blog/training-using-float8-fsdp2 (2024-11): sequences of 8,192, each with the best batch size and
# checkpointing, which the planner has to find. GPUs: 512 in its table 3. Its table 1 does not say; assumed here are 128
# up to 8B, 256 for 70B, 512 for 405B.
FLOAT8 = "float8 study"

LLAMA2_34B = LlamaConfig(dim=8192, n_layers=48, n_heads=64, n_kv_heads=8, hidden_dim=22016, vocab_size=32_000)
LLAMA2_70B = LlamaConfig(dim=8192, n_layers=80, n_heads=64, n_kv_heads=8, hidden_dim=28672, vocab_size=32_000)
SHAPES = {**FLAVORS, "llama2_34B": LLAMA2_34B, "llama2_70B": LLAMA2_70B}
ALL_LINEAR = frozenset({"wq", "wk", "wv", "wo", "w1", "w2", "w3"})


Settings = dict[str, Any]  # section.field → value


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One published figure. `network`: bytes per second per GPU. `search`: try batch sizes and checkpointing modes."""

    source: str
    name: str
    shape: str
    gpus: int
    device: str
    tps: float
    gib: float | None = None
    network: float = 50e9
    settings: Settings
    compiled_loss: bool = False
    fit: bool = False
    search: bool = False


def titan_rows() -> list[Row]:
    """Tables 1 to 6."""
    data = {"training.local_batch_size": 2, "activation_checkpoint.mode": "selective"}
    compiled = {"compile.enable": True}
    float8 = {**compiled, "float8.enable": True}
    full = {**float8, "activation_checkpoint.mode": "full"}
    grid = {**full, "parallelism.tp": 8, "training.local_batch_size": 16}
    deep = {**full, "parallelism.tp": 8, "parallelism.pp": 8, "parallelism.async_tp": True}
    table5 = {**deep, "training.local_batch_size": 32, "parallelism.pp_microbatch_size": 4}

    def row(name: str, shape: str, gpus: int, tps: float, gib: float, settings: Settings, fit: bool = False) -> Row:
        values: dict[str, Any] = {"source": TITAN, "device": "h100-96gb", "name": name, "shape": shape, "gpus": gpus}
        return Row(**values, tps=tps, gib=gib, settings=settings, fit=fit)

    rows = [
        row("eager", "8B_3.1", 8, 5762, 82.4, data, fit=True),
        row("compiled", "8B_3.1", 8, 6667, 77.0, {**data, **compiled}),
        row("float8", "8B_3.1", 8, 8532, 76.8, {**data, **float8}, fit=True),
        row("eager", "8B_3.1", 128, 5605, 67.0, data),
        row("compiled", "8B_3.1", 128, 6514, 62.0, {**data, **compiled}, fit=True),
        row("float8", "8B_3.1", 128, 8380, 61.8, {**data, **float8}),
        row("float8 TP 8", "70B_3.1", 256, 829, 71.9, grid, fit=True),
        row("float8 async TP 8", "70B_3.1", 256, 876, 67.6, {**grid, "parallelism.async_tp": True}),
        row("float8 TP 8 PP 8 1F1B", "405B", 512, 100, 82.5, table5, fit=True),
    ]
    table5 = {**table5, "parallelism.pp_schedule": "Interleaved1F1B"}
    rows.append(row("float8 TP 8 PP 8 interleaved", "405B", 512, 128, 72.7, table5))
    table2 = ((1, 32768, 3890, 83.9), (2, 65536, 2540, 84.2), (4, 131072, 1071, 84.0), (8, 262144, 548, 84.5))
    for cp, seq_len, tps, gib in table2:
        settings = {**full, "parallelism.cp": cp, "training.seq_len": seq_len, "training.local_batch_size": 1}
        rows.append(row(f"float8 CP {cp} of {seq_len:,}", "8B_3.1", 8, tps, gib, settings, fit=cp == 2))
    table6 = ((1, 32768, 76, 75.3), (2, 65536, 47, 75.9), (4, 131072, 31, 77.1), (8, 262144, 16, 84.9))
    for cp, seq_len, tps, gib in table6:
        settings = {**deep, "parallelism.cp": cp, "training.seq_len": seq_len, "training.local_batch_size": 8}
        rows.append(row(f"float8 TP 8 PP 8 CP {cp} of {seq_len:,}", "405B", 512, tps, gib, settings, fit=cp == 2))
    return rows


def fms_rows() -> list[Row]:
    """The README's table."""
    full = {"activation_checkpoint.mode": "full"}
    third = {**full, "activation_checkpoint.every_n_layers": 3}
    rows = []
    for shape, a100, h100, checkpoint, fit in (
        ("llama2_7B", 4550, 9600, {}, True),
        ("llama2_13B", 2150, 4850, third, False),
        ("llama2_34B", 820, 1830, full, False),
        ("llama2_70B", 410, 890, full, True),
    ):
        for device, gpus, tps, node_network in (("a100", 128, a100, 50e9), ("h100", 96, h100, 100e9)):
            settings: Settings = {
                **checkpoint,
                "training.seq_len": 4096,
                "training.local_batch_size": 2,
                "training.reduce_dtype": "bfloat16",
                "compile.enable": True,
                "parallelism.dp_replicate": gpus // 8 if shape == "llama2_7B" else 1,
            }
            values: dict[str, Any] = {"source": FMS, "name": "", "shape": shape, "gpus": gpus, "device": device}
            rows.append(Row(**values, tps=tps, network=node_network / 8, settings=settings, fit=fit))
    return rows


def float8_rows() -> list[Row]:
    """The study's tables 1 and 3, and Trainy's."""
    rows = []
    for table, shape, gpus, bf16, float8 in (
        (1, "1.8B", 128, 29e3, 35e3),
        (1, "8B", 128, 8e3, 10e3),
        (1, "70B", 256, 956, 1430),
        (1, "405B", 512, 149, 227),
        (3, "70B", 512, 960, 1448),
        (3, "405B", 512, 152, 217),
    ):
        for name, tps in (("bf16", bf16), ("float8", float8)):
            values: dict[str, Any] = {"source": FLOAT8, "name": f"{name}, table {table}", "shape": shape, "gpus": gpus}
            settings: Settings = {
                "compile.enable": True,
                "float8.enable": name == "float8",
                "parallelism.tp": 4 if shape == "405B" else 1,
            }
            fit = (shape, name) == ("8B", "float8")
            rows.append(Row(**values, device="h100", tps=tps, settings=settings, search=True, fit=fit))
    settings = {
        "training.local_batch_size": 2,
        "activation_checkpoint.mode": "selective",
        "compile.enable": True,
        "float8.enable": True,
    }
    for gpus, tps, gib in ((32, 10938, 47.96), (64, 10753, 46.97)):
        values = {"source": TRAINY, "name": "float8", "shape": "8B_3.1", "gpus": gpus, "device": "h200"}
        rows.append(Row(**values, tps=tps, gib=gib, settings=settings, compiled_loss=True))
    return rows


def predict(row: Row) -> tuple[float, float, str]:
    """The planner's (tokens per second per device, GiB, settings that it chose)."""
    device = DEVICES[row.device]
    cluster = Cluster(device, 8, row.network)
    choices: list[tuple[Settings, str]] = [({}, "")]
    if row.search:
        choices = [
            ({"training.local_batch_size": batch, "activation_checkpoint.mode": mode}, f"{mode}, batch {batch}")
            for batch, mode in itertools.product((1, 2, 4, 8), ("none", "selective", "full"))
        ]
    found = []
    for choice, text in choices:
        work = build_work(row, choice)
        gib = reserved(memory(work)) / GIB
        if not row.search or gib * GIB < device.memory_bytes:
            found.append((estimate(work, cluster).tokens_per_second, gib, text))
    if not found:
        raise ConfigError(f"{row.source} {row.shape} {row.name}: no batch size and checkpointing mode fits")
    return max(found)


def build_work(row: Row, choice: Settings) -> Work:
    """The row's run, as the formulas take it."""
    sections: dict[str, dict[str, Any]] = {"training": {"seq_len": 8192}}
    for key, value in {**row.settings, **choice}.items():
        section, _, name = key.partition(".")
        sections.setdefault(section, {})[name] = value
    config: Config = from_dict(sections)
    dims = ParallelDims.from_config(config.parallelism, row.gpus)
    float8 = ALL_LINEAR if config.float8.enable else frozenset()
    work = Work(
        shape=SHAPES[row.shape], config=config, dims=dims, float8_layers=float8, compiled_loss=row.compiled_loss
    )
    return max((dataclasses.replace(work, stage=stage) for stage in range(dims.pp)), key=lambda w: memory(w).peak)


def main() -> int:
    arguments = build_parser("the planner against published figures").parse_args()
    rows, errors = [], []
    published = [*titan_rows(), *fms_rows(), *float8_rows()]
    for row in published:
        tps, gib, choice = predict(row)
        tps_error = 100 * (tps / row.tps - 1)
        gib_error = None if row.gib is None else 100 * (gib / row.gib - 1)
        errors.append((row.fit, tps_error, gib_error))
        rows.append(
            {
                "source": row.source,
                "model": row.shape,
                "GPUs": f"{row.gpus} {row.device}",
                "run": ", ".join(filter(None, (row.name, choice))),
                "fit": "fit" if row.fit else "",
                "tokens/s": row.tps,
                "planned": round(tps, 1),
                "error %": round(tps_error, 1),
                "GiB": row.gib,
                "planned GiB": None if row.gib is None else round(gib, 1),
                "GiB error %": None if gib_error is None else round(gib_error, 1),
            }
        )
        print_row(rows[-1])
    fitted = sum(row.fit for row in published)
    speed = statistics.median(abs(tps) for fit, tps, _ in errors if not fit)
    size = statistics.median(abs(gib) for fit, _, gib in errors if not fit and gib is not None)
    bars = [
        (f"{fitted} of {len(published)} rows fitted, at most a third", 3 * fitted <= len(published)),
        (f"tokens/s of the other rows: {speed:.1f} % off in the median, at most 20", speed <= 20),
        (f"memory of the other rows: {size:.1f} % off in the median, at most 10", size <= 10),
    ]
    for text, _ in bars:
        print(text)
    return finish(arguments, rows, bars)


if __name__ == "__main__":
    sys.exit(main())
