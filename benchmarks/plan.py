"""The planner's tokens per second and memory against measured runs, other people's and our own, row by row.

    python -m benchmarks.plan [--quick] [--check] [--json=benchmarks/results/plan.json]

The devices' shares and the constants of tools/plan_time.py were fitted on the rows marked `fit`. All are of 2025-04 or
newer. Settings are the sources'; if a source does not give one, the row says what was assumed. `--quick` takes every
sixth row.
"""

import dataclasses
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from benchmarks.gpu import RUNS, training_config
from benchmarks.report import build_parser, finish, print_row
from config import Config, from_dict
from tools.plan import plan
from tools.plan_count import Case
from tools.plan_time import DEVICES, GIB, Cluster

# github.com/pytorch/torchtitan benchmarks/asyncTP_llama3_h100_2025-06_torchtitan.md: H100 of 96 GB and 500 W, 400 Gb/s
# per GPU; from its code: sequences of 8,192. The page calls its rowwise rows low: wk and wv, narrow under TP 8, lose by
# float8 there (torchtitan's issue 1207).
ASYNC = "torchtitan 2025-06"
# Also torchtitan, 8 H100. Assumed: GPUs as in its other tables, a compiled loss and two sequences of 8,192 at once, by
# their memory. Its attention is cuDNN's by then, before that it was torch's own on H100 and H200.
TITAN_2026 = "torchtitan 2026-06"
# Same repository, benchmarks/llama3-8b_h200_202506_trainy-whitefiber.md: selective checkpointing, and a compiled loss
# according to the code of its commit e7c0cae.
TRAINY = "trainy 2025-06"
# github.com/pytorch/ao docs/source/workflows/training.md at 36027d8: torchtitan on 8 GPUs of each kind, one sequence of
# 8,192, selective checkpointing, compiled. B200 (power limited) and MI300X are of 2025-08. H100 is of 2025-04; assumed
# is that of 96 GB, since the tables are Meta's.
AO = "torchao 2025-08"
AO_H100 = "torchao 2025-04"
OURS = "ours 2026-11"  # benchmarks/results/gpu-h200.json and gpu_settings-h200.json

NETWORK = 50e9  # bytes per second per GPU
RESULTS = Path(__file__).parent / "results"

Settings = dict[str, Any]  # section.field → value
SELECTIVE: Settings = {"activation_checkpoint.mode": "selective"}
FULL: Settings = {"activation_checkpoint.mode": "full"}
COMPILED: Settings = {"compile.enable": True}
FLOAT8_ON: Settings = {"float8.enable": True, "float8.filter": "all"}  # torchtitan's default: all but the output
ROWWISE_ON: Settings = {**FLOAT8_ON, "float8.recipe": "rowwise"}
WEIGHT_GRADIENTS: Settings = {**FLOAT8_ON, "float8.recipe": "rowwise_with_gw_hp"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One measured figure."""

    source: str
    name: str
    config: Config
    gpus: int
    device: str
    tps: float
    gib: float | None = None
    fit: bool = False

    @property
    def flash(self) -> bool:
        """Whether attention is torch's own: torchtitan took cuDNN's on Blackwell first."""
        return self.source not in (OURS, TITAN_2026) and self.device != "b200"


def configure(flavor: str, *parts: Settings) -> Config:
    """A config of sequences of 8,192, unless one of `parts` has others."""
    sections: dict[str, dict[str, Any]] = {"model": {"flavor": flavor}, "training": {"seq_len": 8192}}
    for part in parts:
        for key, value in part.items():
            section, _, name = key.partition(".")
            sections.setdefault(section, {})[name] = value
    config: Config = from_dict(sections)
    return config


def published_rows() -> list[Row]:
    """Other people's, all compiled. Not fitted: those of 2026, Trainy's, MI300X with weight gradients in bfloat16."""
    tp, batch = "parallelism.tp", "training.local_batch_size"
    large = (ASYNC, "h100-96gb", 256, "70B_3.1", {**FULL, tp: 8, batch: 16})
    small = (ASYNC, "h100-96gb", 64, "8B_3.1", {**SELECTIVE, tp: 8, batch: 12})
    titan = (TITAN_2026, "h100-96gb", 8, "8B", {batch: 2})
    trainy_32 = (TRAINY, "h200", 32, "8B_3.1", {**SELECTIVE, batch: 2})
    trainy_64 = (TRAINY, "h200", 64, "8B_3.1", {**SELECTIVE, batch: 2})
    one = {**SELECTIVE, batch: 1}
    b200, mi300x, h100 = (AO, "b200", 8, "8B", one), (AO, "mi300x", 8, "8B", one), (AO_H100, "h100-96gb", 8, "8B", one)
    rows = []
    for setup, name, more, tps, gib in (
        (large, "TP 8", {}, 597.3, None),
        (large, "tensorwise TP 8", FLOAT8_ON, 809.8, None),
        (large, "rowwise TP 8", ROWWISE_ON, 599.6, None),
        (small, "TP 8", {}, 4378, None),
        (small, "tensorwise TP 8", FLOAT8_ON, 5078.1, None),
        (small, "rowwise TP 8", ROWWISE_ON, 3708.5, None),
        (titan, "selective", SELECTIVE, 7890, 52.4),
        (titan, "full", FULL, 7006, 32.1),
        (trainy_32, "float8", FLOAT8_ON, 10938, 47.96),
        (trainy_64, "float8", FLOAT8_ON, 10753, 46.97),
        (b200, "bf16", {}, 8307.5, 33.71),
        (b200, "tensorwise", FLOAT8_ON, 10417.0, 33.38),
        (b200, "rowwise", ROWWISE_ON, 8640.5, 33.72),
        (mi300x, "bf16", {}, 5376.5, 39.09),
        (mi300x, "tensorwise", FLOAT8_ON, 6166.0, 39.07),
        (mi300x, "rowwise", ROWWISE_ON, 5891.0, 39.32),
        (mi300x, "rowwise, weight gradients in bf16", WEIGHT_GRADIENTS, 6100.0, 39.32),
        (h100, "bf16", {}, 6150, 47.65),
        (h100, "tensorwise", FLOAT8_ON, 7689.5, 47.77),
        (h100, "rowwise", ROWWISE_ON, 6768, 47.79),
    ):
        source, device, gpus, flavor, base = setup
        fit = source not in (TITAN_2026, TRAINY) and more is not WEIGHT_GRADIENTS
        config = configure(flavor, COMPILED, base, more)
        row = Row(source=source, name=name, config=config, gpus=gpus, device=device, tps=tps, gib=gib, fit=fit)
        rows.append(row)
    return rows


def our_rows() -> list[Row]:
    """Of train.py on one H200. Fitted are three."""
    rows = []
    for file in ("gpu-h200.json", "gpu_settings-h200.json"):
        for measured in json.loads((RESULTS / file).read_text(encoding="utf-8"))["rows"]:
            name = measured["row"]
            run = RUNS.get(name)
            if run is None or run.peer or name.endswith("again"):
                continue
            values: dict[str, Any] = {"source": OURS, "name": name, "gpus": 1, "device": "h200"}
            fit = name in ("1.8B bf16 8192", "1.8B tensorwise 8192", "8B bf16 8192")
            config = training_config(run, 1, "unused")
            rows.append(Row(**values, tps=measured["tokens/s"], gib=measured["peak GiB"], config=config, fit=fit))
    return rows


def all_rows() -> list[Row]:
    """All of the tables."""
    return [*our_rows(), *published_rows()]


def predict(row: Row) -> dict[str, Any]:
    """The planner's figures beside the row's."""
    device = DEVICES[row.device]._replace(network_bandwidth=NETWORK)
    if row.flash:
        device = device._replace(attention_share=device.flash_share)
    [found] = plan([Case(row.config, row.gpus)], Cluster(device, 8))
    gib = found.reserved / GIB
    return {
        "source": row.source,
        "model": row.config.model.flavor,
        "GPUs": f"{row.gpus} {row.device}",
        "run": row.name,
        "fit": "fit" if row.fit else "",
        "tokens/s": row.tps,
        "planned": round(found.rate, 1),
        "from": round(device.low * found.rate, 1),
        "to": round(device.high * found.rate, 1),
        "error %": round(100 * (found.rate / row.tps - 1), 1),
        "GiB": row.gib,
        "planned GiB": None if row.gib is None else round(gib, 1),
        "GiB error %": None if row.gib is None else round(100 * (gib / row.gib - 1), 1),
    }


def median_error(rows: list[dict[str, Any]], column: str = "error %") -> float:
    """The median of how far rows are off, in percent."""
    return statistics.median(abs(row[column]) for row in rows if row[column] is not None)


def bars(rows: list[dict[str, Any]]) -> list[tuple[str, bool]]:
    """The bars, and whether they are met."""
    new = median_error([row for row in rows if not row["fit"]])
    own = median_error([row for row in rows if row["source"] == OURS])
    gib = median_error(rows, "GiB error %")
    wide = statistics.median(row["to"] / row["from"] for row in rows)
    inside = statistics.mean(row["from"] <= row["tokens/s"] <= row["to"] for row in rows)
    return [
        (f"tokens/s of rows not fitted: {new:.1f} % off in the median, at most 12", new <= 12),
        (f"tokens/s of our H200 rows: {own:.1f} % off in the median, at most 6", own <= 6),
        (f"rows inside the range: {inside:.0%}, at least 80", inside >= 0.8),
        (f"range: {wide:.2f} from high to low in the median, at most 1.35", wide <= 1.35),
        (f"memory of all rows: {gib:.1f} % off in the median, at most 8", gib <= 8),
    ]


def main() -> int:
    arguments = build_parser("the planner against measured runs").parse_args()
    rows = []
    for row in all_rows()[:: 6 if arguments.quick else 1]:
        rows.append(predict(row))
        print_row(rows[-1])
    asked = bars(rows)
    for text, _ in asked:
        print(text)
    return finish(arguments, rows, asked)


if __name__ == "__main__":
    sys.exit(main())
