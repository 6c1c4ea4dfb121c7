"""Bits per byte of held-out files after four minutes of training: the default run, nanoGPT's and nanochat's.

    git clone https://github.com/karpathy/nanoGPT peers/nanoGPT
    git clone https://github.com/karpathy/nanochat peers/nanochat
    pip install --target peers/nanochat/site --no-deps rustbpe tiktoken regex psutil kernels
    python -m benchmarks.first_run [--quick] [--check] [--json=FILE]

All train on the data of ./run_llama_train.sh, with all cores, for as many steps as fill four minutes, by the step time
of a short run before; set-up and compilation do not count. The default run trains with three seeds: the mean counts.
The peers have no setting of a seed. nanoGPT's sizes are those of its README for a CPU, on bytes; nanochat's those of
runs/runcpu.sh, with its tokenizer. Each scores itself: nanoGPT on random blocks of the held-out files, nanochat on rows
that its loader cuts from them. A peer that is not there, or fails, is reported as unmeasured.
"""

import math
import os
import pickle
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from benchmarks.report import add_row, build_parser, finish, prepare_once, require_cpu
from data.shards import open_dataset
from storage.records import read_records

CONFIG = "train_configs/default.toml"
DATASET = Path("datasets/stdlib")
PEERS = Path("peers").resolve()
SECONDS = 240
SEEDS = (0, 1, 2)
Train = Callable[[int, int], tuple[list[float], float]]  # steps, seed → seconds of each step, bits per byte at the end
NANOGPT = (
    "--device=cpu", "--compile=False", "--eval_iters=200", "--log_interval=1", "--block_size=64", "--batch_size=12",
    "--n_layer=4", "--n_head=4", "--n_embd=128", "--dropout=0.0",
)  # fmt: skip
NANOCHAT = (
    "--depth=6", "--head-dim=64", "--window-pattern=L", "--max-seq-len=512", "--device-batch-size=32",
    "--total-batch-size=16384", "--eval-tokens=131072", "--core-metric-every=-1", "--sample-every=-1",
)  # fmt: skip
BELOW = {"with AMX": 0.85, "without": 0.92}  # most: share of nanoGPT's bits per byte
MOST_BITS = 1.33


def texts(split: str) -> Iterator[str]:
    """The documents of a split of the dataset."""
    dataset = open_dataset(str(DATASET))
    tokenizer, own = dataset.tokenizer(), dataset.split(split)
    for number in range(len(own.tokens)):
        block = own.read(number)
        for first, stop in zip(block.offsets[:-1], block.offsets[1:], strict=True):
            yield tokenizer.decode(block.values[first:stop].tolist())


def run(words: Sequence[str], folder: Path, **environment: str) -> str:
    """What a command prints. Raises CalledProcessError."""
    threads = {"OMP_NUM_THREADS": str(os.cpu_count()), "OMP_PROC_BIND": "true"}
    command, variables = [sys.executable, *words], {**os.environ, **threads, **environment}
    return subprocess.run(command, cwd=folder, env=variables, check=True, text=True, stdout=subprocess.PIPE).stdout


def titanite(folder: Path) -> Train:
    """The default run."""

    def train(steps: int, seed: int) -> tuple[list[float], float]:
        out = folder / f"{steps}-{seed}"
        words = [f"--run.folder={out}", f"--run.seed={seed}", f"--training.steps={steps}"]
        words += [f"--validation.interval={steps}", "--validation.max_samples=0", "--validation.sample_tokens=0"]
        run(["train.py", f"--config={CONFIG}", *words], Path.cwd())
        rows = read_records(out / "metrics.jsonl")
        times = [row["step_seconds"] for row in rows for _ in range(row["interval_steps"] or 0)]
        return times, rows[-1]["bits_per_byte"]

    return train


def nanogpt(folder: Path) -> Train:
    """nanoGPT's README run for a CPU, on bytes."""
    peer = PEERS / "nanoGPT"
    data = peer / "data" / "first_run"
    data.mkdir(exist_ok=True)
    for split, name in (("train", "train.bin"), ("validation", "val.bin")):
        np.frombuffer("\n".join(texts(split)).encode(), np.uint8).astype(np.uint16).tofile(data / name)
    (data / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": 256}))

    def train(steps: int, seed: int) -> tuple[list[float], float]:
        words = [f"--out_dir={folder}", "--dataset=first_run", f"--max_iters={steps}", f"--lr_decay_iters={steps}"]
        words.append(f"--eval_interval={steps}")
        said = run(["train.py", "config/train_shakespeare_char.py", *NANOGPT, *words], peer)
        times = [float(time) / 1000 for time in re.findall(r"iter \d+: .* time ([\d.]+)ms", said)]
        nats = float(re.findall(r"val loss ([\d.]+)", said)[-1])
        return times[1:-1], nats / math.log(2)  # not those with an evaluation

    return train


def nanochat(folder: Path) -> Train:
    """nanochat's runs/runcpu.sh, up to its base model."""
    peer = PEERS / "nanochat"
    data = folder / "base_data_climbmix"
    data.mkdir()
    for split, name in (("train", "a.parquet"), ("validation", "b.parquet")):  # the last file is for validation
        pq.write_table(pa.table({"text": list(texts(split))}), data / name)
    variables = {"NANOCHAT_BASE_DIR": str(folder), "PYTHONPATH": str(peer / "site")}
    run(["-m", "scripts.tok_train"], peer, **variables)

    def train(steps: int, seed: int) -> tuple[list[float], float]:
        words = [f"--num-iterations={steps}", f"--eval-every={steps}"]
        said = run(["-m", "scripts.base_train", *NANOCHAT, *words], peer, **variables)
        times = [float(time) / 1000 for time in re.findall(r"dt: ([\d.]+)ms", said)]
        return times[1:], float(re.findall(r"Validation bpb: ([\d.]+)", said)[-1])

    return train


def measure(build: Callable[[Path], Train], trial_steps: int, seeds: Sequence[int], seconds: float) -> dict[str, Any]:
    """Train for as many steps as fill `seconds`, by the median step of the second half of a trial, with each seed."""
    with tempfile.TemporaryDirectory() as folder:
        train = build(Path(folder))
        trial, _ = train(trial_steps, seeds[0])
        steps = max(2, round(seconds / statistics.median(trial[len(trial) // 2 :])))
        runs = [train(steps, seed) for seed in seeds]
    bits = [score for _, score in runs]
    row: dict[str, Any] = {"bits per byte": round(statistics.fmean(bits), 4)}
    row["spread"] = round(max(bits) - min(bits), 4)
    row |= {f"seed {seed}": round(score, 4) for seed, score in zip(seeds, bits, strict=True)}
    return row | {"steps": steps, "seconds": round(statistics.fmean(sum(times) for times, _ in runs))}


JOBS = {  # with the steps of a trial, and the seeds
    "titanite": (titanite, 40, SEEDS),
    "nanoGPT": (nanogpt, 200, SEEDS[:1]),
    "nanochat": (nanochat, 5, SEEDS[:1]),
}


def main() -> int:
    parser = build_parser(__doc__ or "")
    options = parser.parse_args()
    require_cpu(parser)
    prepare_once(DATASET)
    rows: list[dict[str, Any]] = []
    seconds = SECONDS
    if options.quick:
        seconds = 20
    for name, (build, trial_steps, seeds) in JOBS.items():
        try:
            row = measure(build, trial_steps, seeds, seconds)
        except (OSError, subprocess.CalledProcessError) as error:
            row = {"unmeasured": " ".join(str(error).split())[:80]}
        add_row(options, rows, {"of": name, **row})
    scores: dict[str, float] = {row["of"]: row["bits per byte"] for row in rows if "bits per byte" in row}
    share = BELOW["with AMX" if torch.cpu._is_amx_tile_supported() else "without"]
    ours = scores.get("titanite", math.inf)
    theirs = scores.get("nanoGPT", math.inf)
    bars = [
        (f"bits per byte {ours}: lowest of {scores}", ours == min(scores.values(), default=0)),
        (f"bits per byte {ours}: at most {MOST_BITS}", ours <= MOST_BITS),
        (f"bits per byte {ours}: at most {share:g} of nanoGPT's, {theirs}", ours <= share * theirs),
    ]
    return finish(options, rows, [] if options.quick else bars)


if __name__ == "__main__":
    sys.exit(main())
