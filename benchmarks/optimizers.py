"""AdamW against Muon on the run of ./run_llama_train.sh: steps and seconds to AdamW's validation loss.

    python -m benchmarks.optimizers [--quick] [--check] [--json=FILE]

Both are tuned by equally many trials of one seed: first the rate, then the rates of embedding and output and one decay
of the running means, each with the best so far of the others. With what was best AdamW trains STEPS steps with every
seed, and Muon shares of them, each with its own schedule. The two optimizers are at work side by side, each with half
of the threads, on which a loss does not depend. Step times are measured afterwards, in turn, with all threads.

A run whose folder in outputs/optimizers is complete is not trained again: the command goes on where it was cut.
"""

import os
import statistics
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.report import add_row, build_parser, finish, prepare_once, require_cpu
from storage.records import read_records

CONFIG = "train_configs/default.toml"
OUTPUT = Path("outputs/optimizers").resolve()
SEEDS = (0, 1, 2)
STEPS = 250
TRIAL_STEPS = 80
SHARES = {"adamw": (1.0,), "muon": (0.75, 0.55)}  # of STEPS
DECAY = {"adamw": "beta2", "muon": "momentum"}
FIRST = {"lr": 0.0, "embedding": 1.0, "output": 1.0, "decay": 0.95}  # embedding and output: factors of the rate
TRIALS = {"lr": (1e-3, 2e-3, 4e-3, 8e-3, 16e-3), "embedding": (4.0, 12.0), "output": (0.5, 3.0), "decay": (0.9, 0.98)}
ROUNDS = 5
TIMED_STEPS = 12
QUIET: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}  # the run folder has it all
MOST_STEPS = 0.55  # of AdamW's, to its loss
MOST_SECONDS = 0.6
MOST_OF_A_STEP = 1.05


def train(
    name: str, choice: Mapping[str, float], seed: int, steps: int, folder: Path, threads: int, processes: int = 1
) -> list[Any]:
    """Train unless that is done. Returns the rows of its metrics."""
    factors = {"tok_embeddings.*": choice["embedding"], "output.*": choice["output"]}
    groups = ", ".join(f'{{pattern = "{pattern}", lr = {factor}}}' for pattern, factor in factors.items())
    words = [
        f"--config={CONFIG}", f"--run.folder={folder}", f"--run.seed={seed}", f"--training.steps={steps}",
        f"--optimizer.name={name}", f"--optimizer.lr={choice['lr']}", f"--optimizer.{DECAY[name]}={choice['decay']}",
        f"--optimizer.groups=[{groups}]", f"--validation.interval={steps}", "--validation.max_samples=0",
        "--validation.sample_tokens=0", "--checkpoint.enable=false", "--metrics.tensorboard=false",
        "--metrics.log_interval=1",
    ]  # fmt: skip
    rows = read_records(folder / "metrics.jsonl")
    if not rows or rows[-1]["step"] < steps:
        environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
        subprocess.run([sys.executable, *launcher, "train.py", *words], check=True, env=environment, **QUIET)
        rows = read_records(folder / "metrics.jsonl")
    return rows


def run_all(name: str, quick: bool) -> list[dict[str, Any]]:
    """Tune an optimizer, then train with all seeds: a row for each run, with its validation loss."""
    output = OUTPUT / ("quick" if quick else "full")
    threads = max(1, (os.cpu_count() or 2) // 2)
    steps = STEPS
    trial_steps = TRIAL_STEPS
    seeds: tuple[int, ...] = SEEDS
    trials = TRIALS
    if quick:
        steps = 20
        trial_steps = 5
        seeds = SEEDS[:1]
        trials = {"lr": TRIALS["lr"][:2]}
    rows = []

    def measure(kind: str, choice: Mapping[str, float], seed: int, steps: int) -> float:
        words = ",".join(f"{key}={value:g}" for key, value in choice.items())
        folder = output / f"{name}-{words}-seed{seed}-{steps}"
        loss: float = train(name, choice, seed, steps, folder, threads)[-1]["validation_loss"]
        rows.append({"optimizer": name, "run": kind, **choice, "seed": seed, "steps": steps, "loss": round(loss, 4)})
        return loss

    best = dict(FIRST)
    lowest = float("inf")
    for key, values in trials.items():
        for value in values:
            choice = {**best, key: value}
            loss = measure("trial", choice, SEEDS[0], trial_steps)
            if loss < lowest:
                lowest = loss
                best = choice
    for share in SHARES[name]:
        for seed in seeds:
            measure(f"{share:g} of the steps", best, seed, round(share * steps))
    return rows


def time_steps(best: Mapping[str, Mapping[str, float]], processes: int, quick: bool) -> dict[str, float]:
    """Optimizer → the median over interleaved rounds of a step's median seconds."""
    threads = max(1, (os.cpu_count() or 1) // processes)
    seconds: dict[str, list[float]] = {name: [] for name in best}
    for number in range(1 if quick else ROUNDS):
        for name, choice in best.items():
            folder = OUTPUT / f"time-{os.getpid()}-{processes}-{number}-{name}"
            rows = train(name, choice, 0, TIMED_STEPS, folder, threads, processes)
            times = [row["step_seconds"] for row in rows if row["step_seconds"]]
            seconds[name].append(statistics.median(times[len(times) // 3 :]))
    return {name: statistics.median(times) for name, times in seconds.items()}


def main() -> int:
    parser = build_parser(__doc__ or "")
    options = parser.parse_args()
    require_cpu(parser)
    prepare_once(Path("datasets/stdlib"))
    rows: list[dict[str, Any]] = []
    with ThreadPoolExecutor() as pool:
        for measured in pool.map(partial(run_all, quick=options.quick), DECAY):
            for row in measured:
                add_row(options, rows, row)
    best: dict[str, dict[str, float]] = {}
    losses: dict[tuple[str, int], list[float]] = {}
    for row in rows:
        if row["run"] != "trial":
            best[row["optimizer"]] = {key: row[key] for key in FIRST}
            losses.setdefault((row["optimizer"], row["steps"]), []).append(row["loss"])
    seconds = time_steps(best, 1, options.quick)
    in_two = time_steps(best, 2, options.quick)
    (adamw_steps,) = (steps for name, steps in losses if name == "adamw")
    bar = statistics.fmean(losses["adamw", adamw_steps])
    least = float("inf")
    for (name, steps), found in losses.items():
        mean = statistics.fmean(found)
        row = {"optimizer": name, "run": "mean of seeds", "steps": steps, "loss": round(mean, 4)}
        row |= {"spread": round(max(found) - min(found), 4), "ms of a step": round(1e3 * seconds[name], 1)}
        row["ms in two processes"] = round(1e3 * in_two[name], 1)
        row["share of AdamW's steps"] = round(steps / adamw_steps, 3)
        row["share of AdamW's seconds"] = round(steps * seconds[name] / (adamw_steps * seconds["adamw"]), 3)
        add_row(options, rows, row)
        if name == "muon" and mean <= bar:
            least = min(least, steps / adamw_steps)
    ratio = seconds["muon"] / seconds["adamw"]
    ratio_in_two = in_two["muon"] / in_two["adamw"]
    bars = [
        (f"Muon is at AdamW's loss after {least:g} of its steps: at most {MOST_STEPS}", least <= MOST_STEPS),
        (f"after {least * ratio:.3f} of its seconds: at most {MOST_SECONDS}", least * ratio <= MOST_SECONDS),
        (f"a step takes {ratio:.3f} of AdamW's: at most {MOST_OF_A_STEP}", ratio <= MOST_OF_A_STEP),
        (f"in two processes {ratio_in_two:.3f}: at most {MOST_OF_A_STEP}", ratio_in_two <= MOST_OF_A_STEP),
    ]
    return finish(options, rows, [] if options.quick else bars)


if __name__ == "__main__":
    sys.exit(main())
