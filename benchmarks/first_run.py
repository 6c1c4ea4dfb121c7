"""Bits per byte of held-out files after four minutes of training: the default run, nanoGPT's and nanochat's.

    git clone https://github.com/karpathy/nanoGPT peers/nanoGPT
    git clone https://github.com/karpathy/nanochat peers/nanochat
    pip install --target peers/nanochat/site --no-deps rustbpe tiktoken regex psutil kernels
    python -m benchmarks.first_run [--quick] [--check] [--json=FILE]

All train on the data of ./run_llama_train.sh, with all cores, for as many steps as fill four minutes, by the step time
of a short run before; set-up and compilation do not count. nanoGPT's sizes are those of its README for a CPU, on bytes;
nanochat's those of runs/runcpu.sh, with its tokenizer. nanoGPT is scored here on consecutive blocks of its block size,
the others score themselves: nanochat on rows that its loader cuts from the same files. A peer that is not there, or
fails, is reported as unmeasured.
"""

import math
import os
import pickle
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from benchmarks.report import add_row, build_parser, finish, prepare_once, require_cpu
from data.shards import open_dataset
from storage.records import read_records

CONFIG, DATASET = "train_configs/default.toml", Path("datasets/stdlib")
PEERS = Path("peers").resolve()
Row = dict[str, Any]
SECONDS, TRIAL_STEPS = 240, 40
NANOGPT = (
    "--device=cpu", "--compile=False", "--eval_iters=20", "--log_interval=1", "--block_size=64", "--batch_size=12",
    "--n_layer=4", "--n_head=4", "--n_embd=128", "--dropout=0.0",
)  # fmt: skip
NANOCHAT = (
    "--depth=6", "--head-dim=64", "--window-pattern=L", "--max-seq-len=512", "--device-batch-size=32",
    "--total-batch-size=16384", "--eval-tokens=131072", "--core-metric-every=-1", "--sample-every=-1",
)  # fmt: skip
BELOW = {"with AMX": (0.85, 1.58), "without": (0.92, math.inf)}  # most: share of nanoGPT's, bits per byte


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


def train_titanite(folder: Path, seconds: float) -> Row:
    """The default run, with as many steps as fit."""

    def train(name: str, steps: int, *words: str) -> list[Row]:
        words = (f"--run.folder={folder / name}", f"--training.steps={steps}", *words)
        run(["train.py", f"--config={CONFIG}", *words, "--validation.sample_tokens=0"], Path.cwd())
        return read_records(folder / name / "metrics.jsonl")

    trial = train("trial", TRIAL_STEPS, "--validation.enable=false", "--metrics.log_interval=5")
    steps = round(seconds / statistics.median(row["step_seconds"] for row in trial[2:]))
    rows = train("run", steps, f"--validation.interval={steps}", "--validation.max_samples=0")
    (bits,) = (row["bits_per_byte"] for row in rows if row["bits_per_byte"])
    spent = sum((row["step_seconds"] or 0) * (row["interval_steps"] or 0) for row in rows)
    return {"bits per byte": round(bits, 4), "steps": steps, "seconds": round(spent)}


def train_nanogpt(folder: Path, seconds: float) -> Row:
    """nanoGPT's README run for a CPU, on bytes."""
    peer = PEERS / "nanoGPT"
    data = peer / "data" / "first_run"
    out = folder / "nanogpt"
    data.mkdir(exist_ok=True)
    for split, name in (("train", "train.bin"), ("validation", "val.bin")):
        np.frombuffer("\n".join(texts(split)).encode(), np.uint8).astype(np.uint16).tofile(data / name)
    (data / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": 256}))

    def train(steps: int) -> list[float]:
        words = [f"--out_dir={out}", "--dataset=first_run", "--always_save_checkpoint=True", f"--max_iters={steps}"]
        words += [f"--lr_decay_iters={steps}", f"--eval_interval={steps}"]
        said = run(["train.py", "config/train_shakespeare_char.py", *NANOGPT, *words], peer)
        return [float(time) / 1000 for time in re.findall(r"iter \d+: .* time ([\d.]+)ms", said)]

    steps = round(seconds / statistics.median(train(200)[20:]))
    times = train(steps)[1:-1]  # not those with an evaluation
    bits = score_nanogpt(peer, out, data)
    return {"bits per byte": round(bits, 4), "steps": steps, "seconds": round(sum(times))}


def score_nanogpt(peer: Path, out: Path, data: Path) -> float:
    """Bits per byte of the held-out files, in consecutive blocks of the model's block size."""
    sys.path.insert(0, str(peer))
    from model import GPT, GPTConfig

    saved = torch.load(out / "ckpt.pt", weights_only=True)
    model = GPT(GPTConfig(**saved["model_args"])).eval()
    model.load_state_dict(saved["model"])
    length = model.config.block_size
    held_out = torch.from_numpy(np.fromfile(data / "val.bin", np.uint16).astype(np.int64))
    blocks = (len(held_out) - 1) // length
    inputs = held_out[: blocks * length].view(blocks, length)
    targets = held_out[1 : blocks * length + 1].view(blocks, length)
    nats = 0.0
    with torch.no_grad():
        for x, y in zip(inputs.split(64), targets.split(64), strict=True):
            nats += model(x, y)[1].item() * y.numel()
    return nats / math.log(2) / targets.numel()


def train_nanochat(folder: Path, seconds: float) -> Row:
    """nanochat's runs/runcpu.sh, up to its base model."""
    peer = PEERS / "nanochat"
    data = folder / "nanochat" / "base_data_climbmix"
    data.mkdir(parents=True)
    for split, name in (("train", "a.parquet"), ("validation", "b.parquet")):  # the last file is for validation
        pq.write_table(pa.table({"text": list(texts(split))}), data / name)
    variables = {"NANOCHAT_BASE_DIR": str(folder / "nanochat"), "PYTHONPATH": str(peer / "site")}
    run(["-m", "scripts.tok_train"], peer, **variables)

    def train(steps: int) -> tuple[list[float], float]:
        words = [f"--num-iterations={steps}", f"--eval-every={steps}"]
        said = run(["-m", "scripts.base_train", *NANOCHAT, *words], peer, **variables)
        times = [float(time) / 1000 for time in re.findall(r"dt: ([\d.]+)ms", said)]
        return times, float(re.findall(r"Validation bpb: ([\d.]+)", said)[-1])

    steps = max(2, round(seconds / statistics.median(train(5)[0][2:])))
    times, bits = train(steps)
    return {"bits per byte": round(bits, 4), "steps": steps, "seconds": round(sum(times[1:]))}


JOBS = {"titanite": train_titanite, "nanoGPT": train_nanogpt, "nanochat": train_nanochat}


def main() -> int:
    parser = build_parser(__doc__ or "")
    options = parser.parse_args()
    require_cpu(parser)
    prepare_once(DATASET)
    rows: list[Row] = []
    for of, job in JOBS.items():
        with tempfile.TemporaryDirectory() as folder:
            try:
                row = job(Path(folder), 20 if options.quick else SECONDS)
            except (OSError, subprocess.CalledProcessError, ImportError) as error:
                row = {"unmeasured": " ".join(str(error).split())[:80]}
        add_row(options, rows, {"of": of, **row})
    scores: dict[str, float] = {row["of"]: row["bits per byte"] for row in rows if "bits per byte" in row}
    share, most = BELOW["with AMX" if torch.cpu._is_amx_tile_supported() else "without"]
    ours = scores.get("titanite", math.inf)
    theirs = scores.get("nanoGPT", math.inf)
    bars = [
        (f"bits per byte {ours}: lowest of {scores}", ours == min(scores.values(), default=0)),
        (f"bits per byte {ours}: at most {most:g}", ours <= most),
        (f"bits per byte {ours}: at most {share:g} of nanoGPT's, {theirs}", ours <= share * theirs),
    ]
    return finish(options, rows, [] if options.quick else bars)


if __name__ == "__main__":
    sys.exit(main())
