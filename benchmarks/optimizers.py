"""AdamW against Muon on the run of ./run_llama_train.sh: validation loss after each 100 steps, and seconds.

    python -m benchmarks.optimizers [--quick] [--check] [--json=FILE]

Each optimizer first tries the same rates for 100 steps with one seed. The best then trains the whole run with every
seed, AdamW and Muon in turn. A run whose folder in outputs/optimizers is complete is not trained again, so the command
goes on where it was cut. Writes compare.html there. `seconds` are the steps times the median seconds of one. In one
process with all threads, compiled, in bfloat16 where this CPU multiplies it fast.
"""

import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.report import add_row, build_parser, finish, prepare_once, print_row, require_cpu
from config import load_config
from parallel.device import bfloat16_is_slow
from storage.records import read_records
from tools.compare import write_page

CONFIG, OUTPUT = "train_configs/debug.toml", Path("outputs/optimizers").resolve()
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
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1", "train.py"]
        threads = {"OMP_NUM_THREADS": str(os.cpu_count())}
        subprocess.run([*command, *words], check=True, stdout=subprocess.DEVNULL, env=os.environ | threads)
        rows = read_records(folder / "metrics.jsonl")
    seconds = statistics.median(row["step_seconds"] for row in rows if row["step_seconds"])
    losses = {row["step"]: row["validation_loss"] for row in rows}
    return {step: (loss, step * seconds) for step, loss in losses.items() if loss is not None}


def find_best_rate(name: str, folder: Path, steps: int) -> float:
    """The rate of the lowest validation loss after `steps`."""
    tried = {}
    for rate in RATES:
        tried[rate], _ = train(folder / f"trial-{name}-{rate:g}", name, rate, 0, steps)[steps]
    print_row({"optimizer": name, **{f"loss at {rate:g}": loss for rate, loss in tried.items()}})
    return min(tried, key=lambda rate: tried[rate])


def main() -> int:
    parser = build_parser(__doc__ or "")
    arguments = parser.parse_args()
    require_cpu(parser)
    prepare_once(Path("datasets/stdlib"))
    output = OUTPUT / "full"
    trial_steps = TRIAL_STEPS
    steps = load_config([f"--config={CONFIG}"]).training.steps
    seeds: tuple[int, ...] = SEEDS
    if arguments.quick:
        output = OUTPUT / "quick"
        trial_steps, steps, seeds = 10, 20, SEEDS[:1]
    best = {name: find_best_rate(name, output, trial_steps) for name in ("adamw", "muon")}
    found = {}
    folders = []
    for seed in seeds:
        for name, rate in best.items():
            folders.append(output / f"{name}-seed{seed}")
            found[seed, name] = train(folders[-1], name, rate, seed, steps)
    rows: list[dict[str, Any]] = []
    for step in found[seeds[0], "adamw"]:
        for name, rate in best.items():
            losses, seconds = zip(*(found[seed, name][step] for seed in seeds), strict=True)
            row = {"optimizer": name, "lr": rate, "step": step, "loss": round(statistics.fmean(losses), 4)}
            row |= {"spread": round(max(losses) - min(losses), 4), "seconds": round(statistics.fmean(seconds), 1)}
            add_row(arguments, rows, row)
    write_page(folders, output / "compare.html")
    adamw, muon = rows[-2:]
    gained = adamw["loss"] - muon["loss"]
    bar = f"Muon's last loss: {gained:.3f} nats below AdamW's, above the spread of seeds, {adamw['spread']:.3f}"
    return finish(arguments, rows, [(bar, arguments.quick or gained > adamw["spread"])])


if __name__ == "__main__":
    sys.exit(main())
