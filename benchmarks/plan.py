"""The planner's tokens per second and memory against measured runs, other people's and our own, row by row.

    python -m benchmarks.plan [--quick] [--check] [--counts FILE] [--json=benchmarks/results/plan.json]

The devices' shares and the constants of tools/plan_time.py were fitted on the rows marked `fit`. Rows of software older
than 2025-04 are planned as if it were today's: reported, and under no bar. Settings are the sources'; if a source does
not give one, the row says what was assumed. `--quick` takes every sixth row. `--counts` keeps what was counted in a
file, so that other shares can be tried in seconds: remove it when the model or the counting has changed.
"""

import dataclasses
import json
import pickle
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import models
from benchmarks.gpu import BUDGET, ONCE, ROWWISE, SMALL_STATES, TENSORWISE, Run, runs, training_config
from benchmarks.report import build_parser, finish, print_row
from config import Config, from_dict
from models.llama.model import LlamaConfig
from tools.plan import plan
from tools.plan_count import Case, DryRun, count
from tools.plan_time import DEVICES, Cluster

# github.com/pytorch/torchtitan benchmarks/llama3_h100_202412_torchtitan.md: H100 of 96 GB and 500 W, 400 Gb/s per GPU.
# The rest is from its commit 9dec370: sequences of 8,192, loss not compiled, as many pipeline microbatches as stages,
# two stages per rank when interleaved.
TITAN = "torchtitan 2024-12"
# Same repository, benchmarks/asyncTP_llama3_h100_2025-06_torchtitan.md: the same GPUs. The page calls its rowwise rows
# low: wk and wv, narrow under TP 8, lose by float8 there (torchtitan's issue 1207).
ASYNC = "torchtitan 2025-06"
# Also torchtitan, 8 H100. Assumed: GPUs as in its other tables, a compiled loss and two sequences of 8,192 at once, by
# their memory. Its attention is cuDNN's by then, before that it was torch's own on H100 and H200.
TITAN_2026 = "torchtitan 2026-06"
# Same repository, benchmarks/llama3-8b_h200_202506_trainy-whitefiber.md: selective checkpointing, and a compiled loss
# according to the code of its commit e7c0cae.
TRAINY = "trainy 2025-06"
# github.com/foundation-model-stack/fms-fsdp README.md: sequences of 4,096, gradients summed in bfloat16. The network is
# a node's. "Selective AC" is for a share of blocks that follows only from the README's HFU / MFU: 1/3 of 13B's, all of
# 34B's and 70B's.
FMS = "fms-fsdp 2024"
# pytorch.org/blog/training-using-float8-fsdp2 (2024-11): sequences of 8,192, each with the best batch size and
# checkpointing, which the planner has to find among three. GPUs: 512 in its table 3. Its table 1 does not say; assumed
# here are 128 up to 8B, 256 for 70B, 512 for 405B.
FLOAT8 = "float8 study 2024-11"
# github.com/pytorch/ao docs/source/workflows/training.md at 36027d8: torchtitan on 8 GPUs of each kind, one sequence of
# 8,192, selective checkpointing, compiled. B200 (power limited) and MI300X are of 2025-08. H100 is of 2025-04; assumed
# is that of 96 GB, since the tables are Meta's.
AO = "torchao 2025-08"
AO_H100 = "torchao 2025-04"
OURS = "ours 2026-11"  # benchmarks/results/gpu-h200.json and gpu_settings-h200.json

LLAMA2_34B = LlamaConfig(dim=8192, n_layers=48, n_heads=64, n_kv_heads=8, hidden_dim=22016, vocab_size=32_000)
LLAMA2_70B = LlamaConfig(dim=8192, n_layers=80, n_heads=64, n_kv_heads=8, hidden_dim=28672, vocab_size=32_000)
OTHERS = {"llama2_34B": LLAMA2_34B, "llama2_70B": LLAMA2_70B}
RESULTS = Path(__file__).parent / "results"

Settings = dict[str, Any]  # section.field → value
SELECTIVE: Settings = {"activation_checkpoint.mode": "selective"}
FULL: Settings = {"activation_checkpoint.mode": "full"}
COMPILED: Settings = {"compile.enable": True}
FLOAT8_ON: Settings = {"float8.enable": True, "float8.filter": "all"}  # torchtitan's default: all but the output
ROWWISE_ON: Settings = {**FLOAT8_ON, "float8.recipe": "rowwise"}
WEIGHT_GRADIENTS: Settings = {**FLOAT8_ON, "float8.recipe": "rowwise_with_gw_hp"}
ASYNC_TP: Settings = {"parallelism.async_tp": True}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One measured figure. `choices`: further settings of which the planner takes the fastest that fit."""

    source: str
    name: str
    configs: list[Config]
    gpus: int
    device: str
    tps: float
    gib: float | None = None
    network: float = 50e9  # bytes per second per GPU
    eager_loss: bool = False
    fit: bool = False

    @property
    def flash(self) -> bool:
        """Whether attention is torch's own: torchtitan took cuDNN's on Blackwell first."""
        return self.source not in (OURS, TITAN_2026) and self.device != "b200"

    @property
    def is_old(self) -> bool:
        """Whether its software is older than 2025-04."""
        return self.source in (TITAN, FMS, FLOAT8)

    @property
    def model(self) -> str:
        """The flavor."""
        return self.configs[0].model.flavor


def configure(flavor: str, *parts: Settings) -> Config:
    """A config of sequences of 8,192, unless one of `parts` has others."""
    sections: dict[str, dict[str, Any]] = {"model": {"flavor": flavor}, "training": {"seq_len": 8192}}
    for part in parts:
        for key, value in part.items():
            section, _, name = key.partition(".")
            sections.setdefault(section, {})[name] = value
    config: Config = from_dict(sections)
    return config


def titan_rows() -> list[Row]:
    """Tables 1 to 6."""
    data = {"training.local_batch_size": 2, **SELECTIVE}
    float8 = {**COMPILED, **FLOAT8_ON}
    full = {**float8, **FULL}
    grid = {**full, "parallelism.tp": 8, "training.local_batch_size": 16}
    deep = {**full, **ASYNC_TP, "parallelism.tp": 8, "parallelism.pp": 8}
    table5 = {**deep, "training.local_batch_size": 32, "parallelism.pp_microbatch_size": 4}
    interleaved = {"parallelism.pp_schedule": "Interleaved1F1B"}

    def row(name: str, flavor: str, gpus: int, tps: float, gib: float, *parts: Settings) -> Row:
        config = configure(flavor, *parts)
        values: dict[str, Any] = {"source": TITAN, "device": "h100-96gb", "name": name, "gpus": gpus, "gib": gib}
        return Row(**values, tps=tps, configs=[config], eager_loss=True)

    rows = [
        row("eager", "8B_3.1", 8, 5762, 82.4, data),
        row("compiled", "8B_3.1", 8, 6667, 77.0, data, COMPILED),
        row("float8", "8B_3.1", 8, 8532, 76.8, data, float8),
        row("eager", "8B_3.1", 128, 5605, 67.0, data),
        row("compiled", "8B_3.1", 128, 6514, 62.0, data, COMPILED),
        row("float8", "8B_3.1", 128, 8380, 61.8, data, float8),
        row("float8 TP 8", "70B_3.1", 256, 829, 71.9, grid),
        row("float8 async TP 8", "70B_3.1", 256, 876, 67.6, grid, ASYNC_TP),
        row("float8 TP 8 PP 8 1F1B", "405B", 512, 100, 82.5, table5),
        row("float8 TP 8 PP 8 interleaved", "405B", 512, 128, 72.7, table5, interleaved),
    ]
    table2 = ((1, 32768, 3890, 83.9), (2, 65536, 2540, 84.2), (4, 131072, 1071, 84.0), (8, 262144, 548, 84.5))
    for cp, seq_len, tps, gib in table2:
        long = {"parallelism.cp": cp, "training.seq_len": seq_len, "training.local_batch_size": 1}
        rows.append(row(f"float8 CP {cp} of {seq_len:,}", "8B_3.1", 8, tps, gib, full, long))
    table6 = ((1, 32768, 76, 75.3), (2, 65536, 47, 75.9), (4, 131072, 31, 77.1), (8, 262144, 16, 84.9))
    for cp, seq_len, tps, gib in table6:
        long = {"parallelism.cp": cp, "training.seq_len": seq_len, "training.local_batch_size": 8}
        rows.append(row(f"float8 TP 8 PP 8 CP {cp} of {seq_len:,}", "405B", 512, tps, gib, deep, long))
    return rows


def recent_rows() -> list[Row]:
    """torchtitan's of 2025-06 and 2026-06, and Trainy's."""
    large = {**COMPILED, **FULL, "parallelism.tp": 8, "training.local_batch_size": 16}
    small = {**COMPILED, **SELECTIVE, "parallelism.tp": 8, "training.local_batch_size": 12}
    rows = []
    for flavor, gpus, base, name, recipe, tps, async_tps in (
        ("70B_3.1", 256, large, "TP 8", {}, 597.3, 652.4),
        ("70B_3.1", 256, large, "tensorwise TP 8", FLOAT8_ON, 809.8, 942.4),
        ("70B_3.1", 256, large, "rowwise TP 8", ROWWISE_ON, 599.6, 624.8),
        ("8B_3.1", 64, small, "TP 8", {}, 4378, 4809.4),
        ("8B_3.1", 64, small, "tensorwise TP 8", FLOAT8_ON, 5078.1, 5570.1),
        ("8B_3.1", 64, small, "rowwise TP 8", ROWWISE_ON, 3708.5, 3914.9),
    ):
        values: dict[str, Any] = {"source": ASYNC, "device": "h100-96gb", "gpus": gpus, "fit": True}
        config, overlapping = configure(flavor, base, recipe), configure(flavor, base, recipe, ASYNC_TP)
        rows.append(Row(**values, name=name, tps=tps, configs=[config]))
        rows.append(Row(**values, name=f"async {name}", tps=async_tps, configs=[overlapping]))
    two = {**COMPILED, "training.local_batch_size": 2}
    for mode, tps, gib in ((SELECTIVE, 7890, 52.4), (FULL, 7006, 32.1)):
        name = mode["activation_checkpoint.mode"]
        values = {"source": TITAN_2026, "device": "h100-96gb", "name": name, "gpus": 8}
        rows.append(Row(**values, tps=tps, gib=gib, configs=[configure("8B", two, mode)]))
    settings = {**COMPILED, **SELECTIVE, **FLOAT8_ON, "training.local_batch_size": 2}
    for gpus, tps, gib in ((32, 10938, 47.96), (64, 10753, 46.97)):
        values = {"source": TRAINY, "name": "float8", "gpus": gpus, "device": "h200"}
        rows.append(Row(**values, tps=tps, gib=gib, configs=[configure("8B_3.1", settings)]))
    return rows


def torchao_rows() -> list[Row]:
    """Its tables of H100, MI300X and B200. Not fitted: MI300X with weight gradients in bfloat16."""
    one = {**COMPILED, **SELECTIVE, "training.local_batch_size": 1}
    rows = []
    for source, device, name, recipe, tps, gib in (
        (AO, "b200", "bf16", {}, 8307.5, 33.71),
        (AO, "b200", "tensorwise", FLOAT8_ON, 10417.0, 33.38),
        (AO, "b200", "rowwise", ROWWISE_ON, 8640.5, 33.72),
        (AO, "mi300x", "bf16", {}, 5376.5, 39.09),
        (AO, "mi300x", "tensorwise", FLOAT8_ON, 6166.0, 39.07),
        (AO, "mi300x", "rowwise", ROWWISE_ON, 5891.0, 39.32),
        (AO, "mi300x", "rowwise, weight gradients in bf16", WEIGHT_GRADIENTS, 6100.0, 39.32),
        (AO_H100, "h100-96gb", "bf16", {}, 6150, 47.65),
        (AO_H100, "h100-96gb", "tensorwise", FLOAT8_ON, 7689.5, 47.77),
        (AO_H100, "h100-96gb", "rowwise", ROWWISE_ON, 6768, 47.79),
    ):
        fit = recipe is not WEIGHT_GRADIENTS
        values: dict[str, Any] = {"source": source, "device": device, "name": name, "gpus": 8, "fit": fit}
        rows.append(Row(**values, tps=tps, gib=gib, configs=[configure("8B", one, recipe)]))
    return rows


def our_rows() -> list[Row]:
    """Of train.py on one H200. Fitted are three."""
    base = ("--training.loss_chunks=2", *SMALL_STATES, *BUDGET, *ONCE)
    layers = ("--model.n_layers=4",)
    known = {
        **runs(),
        "as in the rows of the 8B": Run("8B", 8192, 1, 4, (*layers, *base)),
        "weights cast in each microbatch": Run("8B", 8192, 1, 4, (*layers, *base[:-1])),
        "logits whole": Run("8B", 8192, 1, 4, (*layers, *base[1:])),
        "float8, tensorwise": Run("8B", 8192, 1, 4, (*layers, *base, *TENSORWISE)),
        "float8, rowwise": Run("8B", 8192, 1, 4, (*layers, *base, *ROWWISE)),
    }
    rows = []
    for file in ("gpu-h200.json", "gpu_settings-h200.json"):
        for measured in json.loads((RESULTS / file).read_text(encoding="utf-8"))["rows"]:
            name, tps, gib = measured["row"], measured.get("tokens/s"), measured.get("peak GiB")
            run = known.get(name)
            if run is None or run.peer or tps is None:
                continue
            values: dict[str, Any] = {"source": OURS, "name": name, "gpus": 1, "device": "h200", "gib": gib}
            fit = name in ("1.8B bf16 8192", "1.8B tensorwise 8192", "8B bf16 8192")
            rows.append(Row(**values, tps=tps, configs=[training_config(run, 1, "unused")], fit=fit))
    return rows


def fms_rows() -> list[Row]:
    """The README's table."""
    third = {**FULL, "activation_checkpoint.every_n_layers": 3}
    base = {**COMPILED, "training.seq_len": 4096, "training.local_batch_size": 2, "training.reduce_dtype": "bfloat16"}
    rows = []
    for flavor, a100, h100, checkpoint in (
        ("llama2_7B", 4550, 9600, {}),
        ("llama2_13B", 2150, 4850, third),
        ("llama2_34B", 820, 1830, FULL),
        ("llama2_70B", 410, 890, FULL),
    ):
        for device, gpus, tps, node_network in (("a100", 128, a100, 50e9), ("h100", 96, h100, 100e9)):
            replicas = {"parallelism.dp_replicate": gpus // 8 if flavor == "llama2_7B" else 1}
            config = configure(flavor, base, checkpoint, replicas)
            values: dict[str, Any] = {"source": FMS, "name": "", "gpus": gpus, "device": device, "eager_loss": True}
            rows.append(Row(**values, tps=tps, network=node_network / 8, configs=[config]))
    return rows


def float8_rows() -> list[Row]:
    """The study's tables 1 and 3."""
    rows = []
    for table, flavor, gpus, bf16, float8 in (
        (1, "1.8B", 128, 29e3, 35e3),
        (1, "8B", 128, 8e3, 10e3),
        (1, "70B", 256, 956, 1430),
        (1, "405B", 512, 149, 227),
        (3, "70B", 512, 960, 1448),
        (3, "405B", 512, 152, 217),
    ):
        for name, tps in (("bf16", bf16), ("float8", float8)):
            recipe = FLOAT8_ON if name == "float8" else {}
            base = {**COMPILED, **recipe, "parallelism.tp": 4 if flavor == "405B" else 1}
            choices: list[Settings] = [
                {"training.local_batch_size": 2},
                {"training.local_batch_size": 1, **SELECTIVE},
                {"training.local_batch_size": 4, **FULL},
            ]
            values: dict[str, Any] = {"source": FLOAT8, "name": f"{name}, table {table}", "gpus": gpus, "tps": tps}
            configs = [configure(flavor, base, choice) for choice in choices]
            rows.append(Row(**values, device="h100", configs=configs, eager_loss=True))
    return rows


def all_rows() -> list[Row]:
    """All of the tables, the recent ones first."""
    return [*our_rows(), *recent_rows(), *torchao_rows(), *titan_rows(), *fms_rows(), *float8_rows()]


class Counts:
    """Counts cases as `count` does without a third count, each once, and keeps them in `file`, if there is one."""

    def __init__(self, file: Path | None):
        self.file = file
        self.kept: dict[Case, DryRun] = {}
        if file and file.exists():
            self.kept = pickle.loads(file.read_bytes())

    def __call__(self, cases: Sequence[Case]) -> list[DryRun]:
        alike = [without_async_tp(case) for case in cases]
        missing = [case for case in dict.fromkeys(alike) if case not in self.kept]
        if missing:
            self.kept |= zip(missing, count(missing, sure=False), strict=True)
            if self.file:
                self.file.write_bytes(pickle.dumps(self.kept))
        return [self.kept[case] for case in alike]


def without_async_tp(case: Case) -> Case:
    """The case that counts the same: async TP changes how long messages show."""
    parallelism = dataclasses.replace(case.config.parallelism, async_tp=False)
    return case._replace(config=dataclasses.replace(case.config, parallelism=parallelism))


def predict(row: Row, counter: Counts) -> dict[str, Any]:
    """The planner's figures beside the row's."""
    cluster = Cluster(DEVICES[row.device], 8, row.network, row.flash)
    plans = plan(row.configs, row.gpus, cluster, row.eager_loss, counter=counter)
    found = max(plans, key=lambda found: (found["fits"] or len(plans) == 1, found["speed"]["tokens_per_second"]))
    speed, gib = found["speed"], found["memory_gib"]["reserved"]
    return {
        "source": row.source,
        "model": row.model,
        "GPUs": f"{row.gpus} {row.device}",
        "run": ", ".join(filter(None, (row.name, found["mode"] if len(plans) > 1 else ""))),
        "fit": "fit" if row.fit else ("old" if row.is_old else ""),
        "tokens/s": row.tps,
        "planned": round(speed["tokens_per_second"], 1),
        "from": round(speed["low"], 1),
        "to": round(speed["high"], 1),
        "error %": round(100 * (speed["tokens_per_second"] / row.tps - 1), 1),
        "GiB": row.gib,
        "planned GiB": None if row.gib is None else round(gib, 1),
        "GiB error %": None if row.gib is None else round(100 * (gib / row.gib - 1), 1),
    }


def median_error(rows: list[dict[str, Any]], column: str = "error %") -> float:
    """The median of how far rows are off, in percent."""
    return statistics.median(abs(row[column]) for row in rows if row[column] is not None)


def share_inside(rows: list[dict[str, Any]]) -> float:
    """The share of rows whose range has the measured figure."""
    return statistics.mean(row["from"] <= row["tokens/s"] <= row["to"] for row in rows)


def check_rows(rows: list[dict[str, Any]]) -> list[tuple[str, bool]]:
    """The bars, and whether they are met."""
    recent = [row for row in rows if row["fit"] != "old"]
    new = median_error([row for row in recent if not row["fit"]])
    own = median_error([row for row in rows if row["source"] == OURS])
    gib = median_error(rows, "GiB error %")
    wide = statistics.median(row["to"] / row["from"] for row in rows)
    of_recent, of_all = share_inside(recent), share_inside(rows)
    return [
        (f"tokens/s of recent rows not fitted: {new:.1f} % off in the median, at most 12", new <= 12),
        (f"tokens/s of our H200 rows: {own:.1f} % off in the median, at most 6", own <= 6),
        (f"rows inside the range: {of_recent:.0%} of the recent, at least 80", of_recent >= 0.8),
        (f"rows inside the range: {of_all:.0%} of all, at least 80", of_all >= 0.8),
        (f"range: {wide:.2f} from high to low in the median, at most 1.35", wide <= 1.35),
        (f"memory of all rows: {gib:.1f} % off in the median, at most 8", gib <= 8),
    ]


def main() -> int:
    parser = build_parser("the planner against measured runs")
    parser.add_argument("--counts", type=Path, help="a file that keeps what was counted")
    arguments = parser.parse_args()
    counter = Counts(arguments.counts)
    spec = models.MODELS["llama"]
    with_others = {"llama": dataclasses.replace(spec, flavors={**spec.flavors, **OTHERS})}
    rows = []
    with mock.patch.object(models, "MODELS", with_others):
        for row in all_rows()[:: 6 if arguments.quick else 1]:
            rows.append(predict(row, counter))
            print_row(rows[-1])
    groups = {name: [row for row in rows if row["fit"] == name] for name in ("fit", "", "old")}
    for name, group in groups.items():
        print(f"{len(group)} rows {name or 'not fitted'}: tokens/s {median_error(group):.1f} % off in the median")
    bars = check_rows(rows)
    for text, _ in bars:
        print(text)
    return finish(arguments, rows, bars)


if __name__ == "__main__":
    sys.exit(main())
