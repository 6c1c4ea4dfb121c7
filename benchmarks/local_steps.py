"""What local steps (DiLoCo) cost in loss: two islands train on the same tokens and meet at times, or at every step.

    python -m benchmarks.local_steps [--quick] [--check] [--json=benchmarks/results/local_steps.json]

The debug model on the data of ./run_llama_train.sh, two ranks, one seed for weights and order. `bytes` is what a rank
sends per step on average, by the planner's count, as a share of the synchronous run's.
"""

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.report import add_row, build_parser, finish, prepare_once
from config import load_config
from storage.records import read_records
from tools.plan_count import Case, count
from tools.plan_time import sent_bytes

DATASET = Path("datasets/stdlib")
RANKS, STEPS, QUICK_STEPS = 2, 200, 30
AVERAGE, PAPER = (1.0, 0.0), (0.7, 0.9)  # outer rate and momentum: for the islands' mean; as published, for long runs
SETTINGS = ((0, AVERAGE), (10, AVERAGE), (50, AVERAGE), (10, PAPER), (50, PAPER))  # the first is synchronous
ACCEPTED_NATS = 0.1  # most that the least frequent meetings, as published, may cost


def arguments(local_steps: int, outer: tuple[float, float], steps: int, folder: str) -> list[str]:
    """The arguments of train.py. With 0 local steps, replicas sum their gradients."""
    return [
        "--config=train_configs/debug.toml",
        f"--data.datasets={DATASET}",
        f"--parallelism.dp_replicate={RANKS}",
        f"--parallelism.local_steps={local_steps}",
        f"--parallelism.outer_lr={outer[0]}",
        f"--parallelism.outer_momentum={outer[1]}",
        f"--training.steps={steps}",
        "--training.local_batch_size=4",
        "--training.global_batch_size=8",
        f"--validation.interval={steps}",
        "--validation.sample_tokens=0",
        "--checkpoint.enable=false",
        "--metrics.tensorboard=false",
        f"--run.folder={folder}",
    ]


def train_and_validate(local_steps: int, outer: tuple[float, float], steps: int) -> float:
    """Train, and return the validation loss after the last step, in nats."""
    with tempfile.TemporaryDirectory() as folder:
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
        command = [sys.executable, *torchrun, "train.py"]
        run = Path(folder) / "run"
        command += arguments(local_steps, outer, steps, str(run))
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode:
            sys.exit(f"{' '.join(command)} failed:\n{result.stderr}")
        rows = read_records(run / "metrics.jsonl")
        return next(row["validation_loss"] for row in reversed(rows) if row["validation_loss"] is not None)


def bytes_per_step(local_steps: int) -> float:
    """Bytes that a rank sends per step, with meetings spread over the steps between them."""
    config = load_config(arguments(local_steps, AVERAGE, STEPS, ""))
    (counted,) = count([Case(config, RANKS)]).values()
    return sum(sent_bytes(kind, size, RANKS) for (_, kind), (_, size) in counted.sent.items()) / max(1, local_steps)


def main() -> int:
    options = build_parser("the loss that local steps cost").parse_args()
    prepare_once(DATASET)
    steps = QUICK_STEPS if options.quick else STEPS
    rows: list[dict[str, Any]] = []
    for local_steps, outer in SETTINGS[:2] if options.quick else SETTINGS:
        loss = train_and_validate(local_steps, outer, steps)
        row = {
            "local steps": local_steps or "none",
            "outer lr": outer[0],
            "outer momentum": outer[1],
            "steps": steps,
            "validation loss": round(loss, 4),
            "more than synchronous": round(loss - rows[0]["validation loss"], 4) if rows else 0.0,
            "bytes": round(bytes_per_step(local_steps) / bytes_per_step(0), 3),
        }
        add_row(options, rows, row)
    cost = rows[-1]["more than synchronous"]
    text = f"{rows[-1]['local steps']} local steps cost {cost:+.3f} nats, at most {ACCEPTED_NATS}"
    return finish(options, rows, [(text, options.quick or cost <= ACCEPTED_NATS)])


if __name__ == "__main__":
    sys.exit(main())
