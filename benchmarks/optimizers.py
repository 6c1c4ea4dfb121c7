"""AdamW against Muon on the run of ./run_llama_train.sh: validation loss after each 100 steps, and seconds.

    python -m benchmarks.optimizers [--quick] [--check] [--json=FILE] [--output=outputs/optimizers]

Each optimizer first tries the same rates for 100 steps with one seed. The best then trains the whole run with every
seed, AdamW and Muon in turn. A run whose folder is complete is not trained again, so the command goes on where it was
cut. Writes optimizers.csv and compare.html there. `seconds` are the steps times the median seconds of one. In one
process with all threads, compiled, in bfloat16 where this CPU multiplies it fast.
"""

import csv
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.report import build_parser, finish, prepare_once, print_row, require_cpu
from config import load_config
from parallel.device import bfloat16_is_slow
from storage.records import read_records
from tools.compare import write_page

CONFIG = "train_configs/debug.toml"
RATES = (5e-4, 1e-3, 2e-3, 4e-3, 8e-3)
SEEDS = (0, 1, 2)
TRIAL_STEPS = 100


def train(folder: Path, name: str, rate: float, seed: int, steps: int) -> dict[int, tuple[float, float]]:
    """Train unless that is done: step → validation loss, seconds of all steps up to it."""
    dtype = "float32" if bfloat16_is_slow(torch.device("cpu")) else "bfloat16"
    words = [
        f"--config={CONFIG}", f"--run.folder={folder}", f"--run.seed={seed}", f"--training.steps={steps}",
        f"--optimizer.name={name}", f"--optimizer.lr={rate}", f"--validation.interval={min(TRIAL_STEPS, steps)}",
        "--validation.sample_tokens=0", "--checkpoint.enable=false", "--metrics.tensorboard=false",
        f"--training.param_dtype={dtype}", "--compile.enable=true",
    ]  # fmt: skip
    rows = read_records(folder / "metrics.jsonl")
    if not rows or rows[-1]["step"] < steps:
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1", "train.py"]
        threads = {"OMP_NUM_THREADS": str(os.cpu_count())}
        subprocess.run(
            [sys.executable, *torchrun, *words], check=True, stdout=subprocess.DEVNULL, env={**os.environ, **threads}
        )
        rows = read_records(folder / "metrics.jsonl")
    seconds = statistics.median(row["step_seconds"] for row in rows if row["step_seconds"])
    return {
        row["step"]: (row["validation_loss"], row["step"] * seconds)
        for row in rows
        if row["validation_loss"] is not None
    }


def main() -> int:
    parser = build_parser(__doc__ or "")
    parser.add_argument("--output", type=Path, default=Path("outputs/optimizers"), help="folder of the runs")
    arguments = parser.parse_args()
    require_cpu(parser)
    prepare_once(Path("datasets/stdlib"))
    quick, output = arguments.quick, arguments.output.resolve() / ("quick" if arguments.quick else "full")
    trial_steps, steps = (10, 20) if quick else (TRIAL_STEPS, load_config([f"--config={CONFIG}"]).training.steps)
    seeds, best = SEEDS[: 1 if quick else None], {}
    for name in ("adamw", "muon"):
        trials = {rate: train(output / f"trial-{name}-{rate:g}", name, rate, 0, trial_steps) for rate in RATES}
        tried = {rate: found[trial_steps][0] for rate, found in trials.items()}
        best[name] = min(tried, key=lambda rate: tried[rate])
        print_row({"optimizer": name, **{f"loss at {rate:g}": loss for rate, loss in tried.items()}})
    runs = {(seed, name): output / f"{name}-seed{seed}" for seed in seeds for name in best}
    found = {key: train(folder, key[1], best[key[1]], key[0], steps) for key, folder in runs.items()}
    rows: list[dict[str, Any]] = []
    for step in found[seeds[0], "adamw"]:
        for name, rate in best.items():
            losses, seconds = zip(*(found[seed, name][step] for seed in seeds), strict=True)
            mean, spread = statistics.fmean(losses), max(losses) - min(losses)
            row = {"optimizer": name, "lr": rate, "step": step, "loss": round(mean, 4), "spread": round(spread, 4)}
            rows.append(row | {"seconds": round(statistics.fmean(seconds), 1)})
            print_row(rows[-1])
    with (output / "optimizers.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    write_page(list(runs.values()), output / "compare.html")
    adamw, muon = rows[-2:]
    gained = adamw["loss"] - muon["loss"]
    bar = f"Muon's last loss: {gained:.3f} nats below AdamW's, above the spread of seeds, {adamw['spread']:.3f}"
    return finish(arguments, rows, [(bar, quick or gained > adamw["spread"])])


if __name__ == "__main__":
    sys.exit(main())
