"""train.py's whole step against bare training loops of the same model, in one process, step by step in turn.

    python -m benchmarks.step [--quick] [--check]

`bare` is a loop like nanoGPT's: the same Llama, batches from random places of a memory-mapped file of tokens,
cross-entropy, clipping and fused AdamW, with autocast for bfloat16. `transformers` is Hugging Face's Llama in that loop
(./setup.sh test installs it). Each round is one step of train.py (documents shuffled, global token count, loss in
chunks, finite check, log line) and one of each loop. Each one's peak memory comes from its own process. The bars:
train.py's tokens/s are at least those of either loop, its memory is at most theirs. bfloat16 only on a CPU that
multiplies it.
"""

import contextlib
import dataclasses
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import metrics
from benchmarks.report import add_row, build_parser, finish, prepare_once, require_cpu
from config import Config, load_config
from models.llama import FLAVORS
from models.llama.model import Llama, LlamaConfig
from models.weights import init_weights
from parallel.device import fast_dtype
from train import train

VOCAB_SIZE, WARMUP_STEPS = 4096, 3
DATASET = Path("datasets/stdlib")


def bare_llama() -> nn.Module:
    """Build the same model, not sharded."""
    with torch.device("meta"):
        model = Llama(_flavor())
    init_weights(model, torch.device("cpu"), seed=0)
    return model


def transformers_llama() -> nn.Module:
    """Build Hugging Face's Llama of the same shape, with its default attention (SDPA)."""
    from transformers import LlamaConfig as HFConfig
    from transformers import LlamaForCausalLM

    from models.llama.hf import to_hf_config

    shape = to_hf_config(_flavor(), 2048, "float32") | {"use_cache": False}
    return LlamaForCausalLM(HFConfig(**shape))


def bare_loop(model: nn.Module, config: Config) -> Iterator[None]:
    """Train one optimizer step per `next`."""
    training = config.training
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    mixed = training.param_dtype == "bfloat16"
    length = training.max_seq_len
    file = Path(tempfile.mkdtemp()) / "tokens.bin"
    np.random.default_rng(0).integers(0, VOCAB_SIZE, 2**20, dtype=np.uint16).tofile(file)
    while True:
        data = np.memmap(file, dtype=np.uint16, mode="r")
        places = torch.randint(len(data) - length, (training.local_batch_size,)).tolist()
        samples = torch.stack([torch.from_numpy(data[i : i + length + 1].astype(np.int64)) for i in places])
        tokens, labels = samples[:, :-1], samples[:, 1:]
        with torch.autocast("cpu", torch.bfloat16) if mixed else contextlib.nullcontext():
            out = model(tokens)
        logits = out if isinstance(out, Tensor) else out.logits
        loss = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        yield


PEERS = {"bare": bare_llama, "transformers": transformers_llama}


def measure(param_dtype: str, steps: int, outputs: Path) -> dict[str, float]:
    """Median seconds of a step, for train.py and for each peer."""
    config = _config(param_dtype, steps + WARMUP_STEPS, outputs)
    loops = {name: bare_loop(build(), config) for name, build in PEERS.items()}
    seconds: dict[str, list[float]] = {name: [] for name in ("train.py", *loops)}
    since = time.perf_counter()

    def after_step(step: int) -> None:
        nonlocal since
        seconds["train.py"].append(time.perf_counter() - since)
        for name, loop in loops.items():
            since = time.perf_counter()
            next(loop)
            seconds[name].append(time.perf_counter() - since)
        since = time.perf_counter()

    train(config, after_step)
    return {name: statistics.median(times[WARMUP_STEPS:]) for name, times in seconds.items()}


def run_alone(name: str, param_dtype: str) -> None:
    """Run a few steps of one contender, and print its peak memory in GiB."""
    with tempfile.TemporaryDirectory() as outputs:
        config = _config(param_dtype, 5, Path(outputs))
        if name == "train.py":
            train(config)
        else:
            loop = bare_loop(PEERS[name](), config)
            for _ in range(config.training.steps):
                next(loop)
        print(json.dumps(metrics.peak_memory_gib(torch.device("cpu"))), flush=True)


def peak_memory_gib(name: str, param_dtype: str) -> float:
    """Peak resident memory of a process that only runs `name`, GiB."""
    command = [sys.executable, "-m", "benchmarks.step", "--alone", name, param_dtype]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return float(output.splitlines()[-1])


def measure_dtype(param_dtype: str, quick: bool) -> list[dict[str, Any]]:
    """A row for train.py, and one for each peer."""
    with tempfile.TemporaryDirectory() as outputs:
        medians = measure(param_dtype, 8 if quick else 40, Path(outputs))
    training = _config(param_dtype, 1, Path()).training
    tokens = training.local_batch_size * training.max_seq_len
    return [
        {
            "loop": name,
            "dtype": param_dtype,
            "step ms": 1000 * seconds,
            "tokens/s": tokens / seconds,
            "tokens/s of train.py / its own": seconds / medians["train.py"],
            "peak GiB": None if quick else peak_memory_gib(name, param_dtype),
        }
        for name, seconds in medians.items()
    ]


def bars(ours: dict[str, Any], *others: dict[str, Any]) -> Iterator[tuple[str, bool]]:
    """The bars of one dtype."""
    for other in others:
        name = f"{ours['dtype']}: train.py / {other['loop']}"
        ratio = other["tokens/s of train.py / its own"]
        yield f"{name} = {ratio:.3f} of the tokens/s, at least 1", ratio >= 1
        if other["peak GiB"]:
            memory = ours["peak GiB"] / other["peak GiB"]
            yield f"{name} = {memory:.3f} of the memory, at most 1", memory <= 1


def main() -> int:
    parser = build_parser("train.py's step against bare loops of the same model")
    parser.add_argument("--alone", nargs=2, metavar=("NAME", "DTYPE"), help="internal: run one contender, print GiB")
    arguments = parser.parse_args()
    require_cpu(parser)
    prepare_once(DATASET)
    if arguments.alone:
        run_alone(*arguments.alone)
        return 0
    rows: list[dict[str, Any]] = []
    asked: list[tuple[str, bool]] = []
    for param_dtype in dict.fromkeys(("float32", fast_dtype())):
        measured = measure_dtype(param_dtype, arguments.quick)
        for row in measured:
            add_row(arguments, rows, row)
        asked += bars(*measured)
    return finish(arguments, rows, asked)


def _flavor() -> LlamaConfig:
    return dataclasses.replace(FLAVORS["debug"], vocab_size=VOCAB_SIZE)


def _config(param_dtype: str, steps: int, outputs: Path) -> Config:
    return load_config(
        [
            "--config=train_configs/debug.toml",
            "--training.global_batch_size=0",
            f"--model.vocab_size={VOCAB_SIZE}",
            f"--training.param_dtype={param_dtype}",
            f"--training.steps={steps}",
            f"--run.outputs={outputs}",
            "--lr_scheduler.warmup_steps=1",
            "--metrics.log_interval=5",
            "--metrics.tensorboard=false",
            "--validation.enable=false",
            "--checkpoint.enable=false",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
