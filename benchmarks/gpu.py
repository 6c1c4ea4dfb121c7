"""The speed of train.py on one GPU, beside what the GPU can do, beside other loops of the same model, and with one
setting changed at a time.

    python -m benchmarks.gpu [--rows "NAME;..."] [--budget-seconds 540] [--list] [--rehearse] [--check] [--json FILE]

Rows are measured in order, each in a process of its own; those that have a result for the present code are left out.
FILE (default: benchmarks/results/gpu-GPU.json) gets each result as soon as it is there, so the next call continues
where this one ended; the .log beside it gets what the processes print. A row whose estimate exceeds the rest of the
budget is left out, one that takes twice its estimate is killed.

A training row runs train.py itself: some steps to compile and warm up, some timed together (waiting for the device only
at their ends), one under torch's profiler for the shares of the step. Peers do the same steps. `roofline` is tokens/s
over what the measured matmul peaks allow if only matmuls and attention took time (attention at the bfloat16 peak, its
causal half). `TFLOP/s` counts a token as 6 x (parameters without the embedding + layers x heads x head_dim x seq_len),
so attention's causal half, as NVIDIA's tables do; MFU counts all of attention, as torchtitan's.

`matmuls of ...` time the forward's matmul of layers of the 8B alone, without casts, in bfloat16 and by each scaling of
float8. `tests: ...` are tests of tests/gpu by pytest's expression.

Settings are compared on four layers of the 8B: `ratio` is tokens/s over the row `as in the rows of the 8B`, which is
measured again at the end: how far it is from 1 is how far to trust the others. The output layer has a third of all
matmuls there, one part in sixteen in the whole 8B.

`--rehearse` runs everything on CPU with tiny shapes, to find typos before using a GPU: its figures say nothing. The
dataset is the one that ./run_llama_train.sh prepares.
"""

import argparse
import dataclasses
import hashlib
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import float8.layers  # noqa: F401  (registers the kernels)
import metrics
from benchmarks.report import add_row, build_parser, cell, finish, machine, prepare_once, table
from config import Config, load_config
from float8.casts import cast, multiply
from float8.convert import convert_to_float8
from float8.cpu import replace_matmul
from models import build_model, find_model
from parallel.device import synchronize
from storage.records import read_records
from train import train

ROOT = Path(__file__).parents[1]
WARMUP_STEPS = 3
DATASET, REHEARSAL = Path("datasets/stdlib"), Path("datasets/rehearsal")
EVERY_LAYER = "--float8.filter=all"
CHUNKS = ("--training.loss_chunks=2",)
ONCE = ("--parallelism.reshard_after_forward=false",)  # weights are cast once per step, as always in float8
BUDGET = ("--activation_checkpoint.mode=budget", "--activation_checkpoint.memory_budget=0.8")
LARGE = (*CHUNKS, "--optimizer.state_dtype=bfloat16", *BUDGET, *ONCE)
RECIPES = {"tensorwise": ("--float8.enable",), "rowwise": ("--float8.enable", "--float8.recipe=rowwise")}
KINDS = {"bf16": (), **RECIPES, "muon": ("--optimizer.name=muon",)}
# Rows of whole models, each in all KINDS: flavor, tokens per sequence, sequences per microbatch and per step, further
# settings, steps, and the seconds that a row should take.
SHAPES = (
    ("1.8B", 8192, 4, 8, (*CHUNKS, *ONCE), 6, 60),
    ("8B", 8192, 1, 8, LARGE, 3, 95),
    ("3B", 8192, 2, 8, (*CHUNKS, *ONCE), 6, 75),
    ("1.8B", 4096, 8, 16, (*CHUNKS, *ONCE), 6, 60),
)
BASE = "as in the rows of the 8B"
# Rows of settings, on four layers of the 8B.
SETTINGS = {
    BASE: LARGE,
    "weights cast in each microbatch": tuple(word for word in LARGE if word not in ONCE),
    "logits whole": tuple(word for word in LARGE if word not in CHUNKS),
    "not compiled": ("--compile.enable=false", *(word for word in LARGE if word not in BUDGET)),
}
# What float8 may gain from, beside a recipe alone.
GAINS = {
    "own kernels": ("--float8.kernels=own",),
    "wk and wv too": (EVERY_LAYER,),
    "output too": ('--float8.always=["output"]',),
    "output too, whole logits": ("--float8.skip=[]", "--training.loss_chunks=1"),
}
# Linear layers of the 8B: out, in.
MATMULS = {
    "matmuls of wq, wo": (4096, 4096),
    "matmuls of wk, wv": (1024, 4096),
    "matmuls of w1, w3": (14336, 4096),
    "matmuls of w2": (4096, 14336),
}
PEAKS = "matmuls of w1, w3"
SCALINGS = ("tensorwise", "rowwise")
# Tests of tests/gpu by pytest's expression, and the seconds that they should take.
TESTS = {
    "test_kernels": 100,
    "2ranks and not compiled": 100,
    "2ranks and compiled": 150,
    "4ranks": 90,
    "test_gpu": 120,
}
# What computes a step. If one of these files changes, results are old.
CODE = (
    "train.py", "trainer.py", "config.py", "loss.py", "optim.py", "muon.py", "models/**/*.py", "parallel/*.py",
    "float8/*.py", "checkpoint/*.py", "run/*.py", "tools/same.py", "tests/layouts.py", "tests/gpu/*.py",
)  # fmt: skip
ENVIRONMENT = {"TEST_GPU": "1", "HF_HUB_OFFLINE": "1"}
SHOWN = ("ratio", "passed", "failed")  # of a result in the list, beside rates


@dataclasses.dataclass(frozen=True)
class Run:
    """A training row: flavor, tokens per sequence, sequences per microbatch and per step, and further settings.

    `steps` steps are timed; on an H200 all should take `seconds`.
    """

    flavor: str
    seq_len: int
    local_batch_size: int
    global_batch_size: int
    options: tuple[str, ...] = ()
    steps: int = 6
    seconds: int = 60
    peer: str = ""


def build_runs() -> dict[str, Run]:
    """The training rows by name: whole models, a peer, then settings."""
    rows = {}
    for flavor, seq_len, local, whole, options, steps, estimate in SHAPES:
        for kind, more in KINDS.items():
            rows[f"{flavor} {kind} {seq_len}"] = Run(flavor, seq_len, local, whole, (*options, *more), steps, estimate)
    rows["1.8B transformers 8192"] = Run("1.8B", 8192, 4, 8, peer="transformers")
    variants: dict[str, tuple[str, ...]] = dict(SETTINGS)
    for recipe, words in RECIPES.items():
        variants[f"float8, {recipe}"] = (*LARGE, *words)
        for gain, more in GAINS.items():
            variants[f"float8, {recipe}, {gain}"] = (*LARGE, *words, *more)
    variants[f"{BASE}, again"] = LARGE
    for name, words in variants.items():
        rows[name] = Run("8B", 8192, 1, 4, ("--model.n_layers=4", *words), 4, 45)
    return rows


RUNS = build_runs()
ESTIMATES = {  # row → seconds on an H200, in the order of the queue
    **dict.fromkeys(MATMULS, 20),
    **{f"tests: {name}": seconds for name, seconds in TESTS.items()},
    **{name: run.seconds for name, run in RUNS.items()},
}


def rehearsal(run: Run) -> Run:
    """The same row, small enough for a CPU."""
    options = [*run.options, f"--data.datasets={REHEARSAL}", "--model.n_layers=1", "--model.vocab_size=4096"]
    options.append("--training.param_dtype=float32")  # fast on every CPU
    if "--float8.enable" in options:
        options.append(EVERY_LAYER)
    return Run("tiny", 64, 2, 4, tuple(options), run.steps, peer=run.peer)


# ---------------------------------------------------------------- what the device can do


def measure_matmuls(shape: tuple[int, int], device: torch.device, tokens: int) -> dict[str, Any]:
    """TFLOP/s of a forward's matmul, in bfloat16 and in float8 by each scaling."""
    n_out, n_in = shape
    x, weight = (torch.randn(n, n_in, device=device, dtype=torch.bfloat16) for n in (tokens, n_out))
    products: dict[str, Callable[[], Any]] = {"bf16": lambda: F.linear(x, weight)}
    for scaling in SCALINGS:
        (x8,) = cast("copy", scaling, [x], columns=False)
        (weight8,) = cast("copy", scaling, [weight], columns=False)
        for fast in (True, False):
            products[f"{scaling}{', fast' * fast}"] = partial(multiply, x8[:2], weight8[:2], torch.bfloat16, fast)
    row: dict[str, Any] = {"out": n_out, "in": n_in, "tokens": tokens}
    for name, product in products.items():
        row[f"{name} TFLOP/s"] = 2 * tokens * n_out * n_in / seconds(product, device) / 1e12
    return row


def seconds(action: Callable[[], Any], device: torch.device, rounds: int = 20, at_once: int = 10) -> float:
    """Median time of `action` on the device. Waits for `at_once` of them together: a wait costs microseconds."""
    times = []
    for i in range(rounds + 3):
        synchronize(device)
        begin = time.perf_counter()
        for _ in range(at_once):
            action()
        synchronize(device)
        if i >= 3:
            times.append((time.perf_counter() - begin) / at_once)
    return statistics.median(times)


# ---------------------------------------------------------------- training


def measure_training(run: Run, device: torch.device, started: float) -> dict[str, Any]:
    """Measure train.py's tokens/s, first step, memory, the loss after all steps, and shares of a profiled step."""
    marks: dict[int, float] = {}
    last = WARMUP_STEPS + run.steps
    activity = torch.profiler.ProfilerActivity  # only the device's: recording the host slows it down
    profiler = torch.profiler.profile(activities=[activity.CPU if device.type == "cpu" else activity.CUDA])

    def after_step(step: int) -> None:
        if step in (1, WARMUP_STEPS, last):
            synchronize(device)
            marks[step] = time.perf_counter()
        if step == last:
            profiler.start()
        elif step > last:
            synchronize(device)
            profiler.stop()

    with tempfile.TemporaryDirectory() as outputs:
        train(training_config(run, last + 1, outputs), after_step)
        [records] = Path(outputs).glob("*/metrics.jsonl")
        loss = read_records(records)[-1]["loss"]
    elapsed = marks[last] - marks[WARMUP_STEPS]
    return result(run, device, elapsed, marks[1] - started) | {"loss": loss} | shares(profiler)


def result(run: Run, device: torch.device, elapsed: float, first_step: float) -> dict[str, Any]:
    """The row of a run whose timed steps took `elapsed` seconds."""
    speed = run.steps * run.global_batch_size * run.seq_len / elapsed
    model: Any = build_meta_model(run)
    peak = metrics.peak_flops(device)
    flops = model.flops_per_token(run.seq_len)  # with all of attention, as torchtitan counts
    flavor = model.config
    causal_flops = flops - 6 * flavor.n_layers * flavor.n_heads * flavor.head_dim * run.seq_len
    float8 = training_config(run, 1, "unused").float8
    converted = convert_to_float8(model, float8)[0] if float8.enable else []
    float8_flops = sum(6 * model.get_parameter(f"{name}.weight").numel() for name in converted)
    return {
        "sequences": run.local_batch_size,
        "tokens/s": speed,
        "MFU %": 100 * flops * speed / peak if peak else None,  # of the data sheet's peak; None if unknown
        "TFLOP/s": causal_flops * speed / 1e12,
        "bf16 GFLOP of a token": (causal_flops - float8_flops) / 1e9,
        "float8 GFLOP of a token": float8_flops / 1e9,
        "peak GiB": metrics.peak_memory_gib(device),
        "first step s": first_step,
    }


def training_config(run: Run, steps: int, outputs: str) -> Config:
    options = [
        f"--model.flavor={run.flavor}",
        f"--data.datasets={DATASET}",
        f"--training.seq_len={run.seq_len}",
        f"--training.local_batch_size={run.local_batch_size}",
        f"--training.global_batch_size={run.global_batch_size}",
        f"--training.steps={steps}",
        f"--run.outputs={outputs}",
        "--compile.enable",
        f"--lr_scheduler.warmup_steps={steps}",  # a first step at full rate throws losses about: none would compare
        "--lr_scheduler.decay_fraction=0",
        f"--metrics.log_interval={max(1, steps - 1)}",  # so that the last loss logged is that of the last step alone
        "--metrics.tensorboard=false",
        "--validation.enable=false",
        "--checkpoint.enable=false",
    ]
    return load_config([*options, *run.options])


def build_meta_model(run: Run) -> nn.Module:
    """The run's model on the meta device."""
    return build_model(*find_model(training_config(run, 1, "unused").model, 0))


def measure_transformers(run: Run, device: torch.device, started: float) -> dict[str, Any]:
    """Measure Hugging Face's Llama of the same shape, with float32 weights under autocast and fused AdamW.

    Layers and loss are compiled separately: if torch (2.11 to 2.13) compiles the mask too, transformers makes a whole
    mask and attention loses its fused kernel.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    from models.llama.hf import to_hf_config

    flavor: Any = build_meta_model(run).config
    shape = to_hf_config(flavor, run.seq_len, "float32") | {"use_cache": False}
    with device:
        model: nn.Module = LlamaForCausalLM(LlamaConfig(**shape))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    samples = torch.randint(0, flavor.vocab_size, (run.local_batch_size, run.seq_len + 1), device=device)
    tokens, labels = samples[:, :-1], samples[:, 1:]

    for layer in model.model.layers:  # type: ignore[union-attr]
        layer.compile()

    @torch.compile
    def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())

    def step() -> None:
        for _ in range(run.global_batch_size // run.local_batch_size):
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type != "cpu"):
                loss = loss_of(model(tokens).logits, labels)
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    last = WARMUP_STEPS + run.steps
    marks = {}
    for number in range(1, last + 1):
        step()
        if number in (1, WARMUP_STEPS, last):
            synchronize(device)
            marks[number] = time.perf_counter()
    return result(run, device, marks[last] - marks[WARMUP_STEPS], marks[1] - started)


# The first pattern that matches a kernel's name decides its kind.
KERNELS = (
    ("pointwise", r"lpnorm|binaryop"),  # clipping, on lists of tensors as in AdamW
    ("copy", r"memcpy|memset|nccl|chunk_cat|split_with_sizes"),  # the last two are FSDP's
    ("optimizer", r"adam|multi_tensor|foreach|triton.*lerp"),
    ("attention, flex", r"triton_tem.*(flex|attention)"),
    ("pointwise", r"^triton_(poi|red|per)_"),  # named after what was fused, such as attention's reshapes
    ("attention, cudnn", r"cudnn.*(sdpa|flash|fmha|attention|dot_do_o|convert_dq)"),
    ("attention, flash", r"sdpa|flash|fmha|attention|flex"),
    ("GEMM", r"gemm|nvjet|cutlass|xmma|scaled_mm|addmm|splitk|\bmm\b"),
    ("pointwise", r""),
)


def shares(profiler: torch.profiler.profile) -> dict[str, Any]:
    """Per cent of the profiled step that the device spent in each kind of kernel, and idle; empty on CPU.

    As if kernels never overlapped, which only collectives would. Those that took longest are printed.
    """
    print(profiler.key_averages().table(sort_by="self_device_time_total", row_limit=40, max_name_column_width=160))
    cuda = torch.autograd.DeviceType.CUDA
    # Without the ranges that compiler and optimizer name, which also come as events of the device.
    events = [event for event in profiler.events() or [] if event.device_type == cuda and not event.is_user_annotation]
    if not events:
        return {}
    span = max(event.time_range.end for event in events) - min(event.time_range.start for event in events)
    row = {"idle %": 100.0}
    for event in events:
        kind = next(kind for kind, pattern in KERNELS if re.search(pattern, event.name, re.IGNORECASE))
        share = 100 * event.time_range.elapsed_us() / span
        row[f"{kind} %"] = row.get(f"{kind} %", 0.0) + share
        row["idle %"] -= share
    return row


# ---------------------------------------------------------------- one row, in a process of its own


def measure_row(name: str, device: torch.device, rehearse: bool) -> dict[str, Any]:
    """Measure the row of this name."""
    metrics.quiet_noisy_loggers()  # torchao's, which counting float8's layers imports
    replace_matmul()  # that of CPUs, for a rehearsal
    if name in MATMULS:
        shape, tokens = MATMULS[name], 16384
        if rehearse:
            shape, tokens = (256, 128), 128
        return measure_matmuls(shape, device, tokens)
    run = RUNS[name]
    if rehearse:
        run = rehearsal(run)
    measure = measure_transformers if run.peer else measure_training
    return measure(run, device, time.perf_counter())


def run_row(name: str, rehearse: bool, log: Path, limit_seconds: float) -> dict[str, Any]:
    """Measure a row, or run its tests, in a process. An error becomes the row."""
    tests = name.removeprefix("tests: ")
    command = ["benchmarks.gpu", f"--row={name}", *["--rehearse"] * rehearse]
    if tests != name:
        command = ["pytest", "-q", "-p", "no:cacheprovider", "tests/gpu", "-k", tests]
    with open(log, "a+", encoding="utf-8") as file:
        print(f"--- {' '.join(command)}", file=file, flush=True)
        begin = file.tell()
        child = subprocess.Popen(
            [sys.executable, "-m", *command], cwd=ROOT, env=os.environ | ENVIRONMENT,
            stdout=file, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            child.wait(limit_seconds)
        except subprocess.TimeoutExpired:
            return {"failed": "killed, since it took too long"}
        finally:  # with its own processes
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        file.seek(begin)
        lines = [line for line in file.read().splitlines() if line.strip()] or ["no output"]
    if child.returncode:
        errors = [line for line in lines if re.search(r"[Ee]rror: .", line)]
        return {"failed": (errors or lines)[-1][:300]}
    if tests != name:
        return {"passed": lines[-1]}
    (row,) = (line for line in lines if line.startswith('{"measured": '))
    return json.loads(row)["measured"]


# ---------------------------------------------------------------- the queue


def hash_code() -> str:
    """A digest of the code that results depend on."""
    digest = hashlib.sha256()
    for pattern in CODE:
        for path in sorted(ROOT.glob(pattern)):
            digest.update(f"{path.relative_to(ROOT)}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def add_ratios(rows: list[dict[str, Any]]) -> None:
    """Add what is relative to another row: the roofline to measured matmuls, settings to the row without them."""
    by = {row["row"]: row for row in rows}
    peak = by.get(PEAKS, {})
    base = by.get(BASE, {}).get("tokens/s")
    for row in rows:
        speed = row.get("tokens/s")
        if speed and "bf16 TFLOP/s" in peak and "bf16 GFLOP of a token" in row:
            # As in torchao's recipes, the forward's matmul uses fast accumulation, the backward's two do not.
            float8_seconds = (1 / peak["tensorwise, fast TFLOP/s"] + 2 / peak["tensorwise TFLOP/s"]) / 3
            seconds = row["bf16 GFLOP of a token"] / peak["bf16 TFLOP/s"]
            row["roofline"] = speed * (seconds + row["float8 GFLOP of a token"] * float8_seconds) / 1e3
        if speed and base and "--model.n_layers=4" in RUNS[row["row"]].options:
            row["ratio"] = speed / base


def work(names: Sequence[str], rows: list[dict[str, Any]], arguments: argparse.Namespace) -> None:
    """Measure what fits into the budget, and put each row in place of its older one."""
    end = time.monotonic() + arguments.budget_seconds
    patience = 20 if arguments.rehearse else 2  # CPUs compile for minutes
    facts = machine()
    code = hash_code()
    older = {row["row"]: row for row in rows}
    for name in sorted(names, key=lambda name: "failed" in older.get(name, {})):
        found = older.get(name, {})
        left = end - time.monotonic()
        if (found.get("code") == code and "failed" not in found) or ESTIMATES[name] > left:
            continue
        limit = min(left, patience * ESTIMATES[name])
        row = {"row": name, "code": code, "date": facts["date"], "commit": facts["commit"]}
        row |= run_row(name, arguments.rehearse, arguments.json.with_suffix(".log"), limit)
        if time.monotonic() >= end:
            break  # this call's time is over: what it cut has not failed
        rows[:] = [row for row in rows if row["row"] != name]
        add_row(arguments, rows, row)


def list_rows(names: Sequence[str], rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What there is of each row: of the present code, or older."""
    code = hash_code()
    by = {row["row"]: row for row in rows}
    lines = []
    for name in names:
        found = by.get(name, {})
        shown = [f"{key} {cell(value)}" for key, value in found.items() if key.endswith("/s") or key in SHOWN]
        of = {None: "older" * bool(found), code: "present"}.get(found.get("code"), "older")
        lines.append({"row": name, "estimate s": ESTIMATES[name], "code": of, "result": ", ".join(shown)})
    return lines


def main() -> int:
    parser = build_parser(__doc__ or "")
    parser.add_argument("--rows", default="", help="names of rows, with ; between them (default: all)")
    parser.add_argument("--budget-seconds", type=float, default=540, help="the whole call (default %(default)s)")
    parser.add_argument("--list", action="store_true", help="rows, estimates and what there is, then end")
    parser.add_argument("--rehearse", action="store_true", help="on CPU, with tiny shapes; the figures say nothing")
    parser.add_argument("--row", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    device = torch.device("cpu" if arguments.rehearse else "cuda")
    if arguments.row:
        print(json.dumps({"measured": measure_row(arguments.row, device, arguments.rehearse)}), flush=True)
        return 0
    names = list(ESTIMATES)
    if arguments.quick:
        names = [PEAKS, "1.8B bf16 8192"]
    if arguments.rows:
        names = arguments.rows.split(";")
    unknown = {*names} - {*ESTIMATES}
    if unknown:
        parser.error(f"unknown rows {'; '.join(sorted(unknown))}; known are {'; '.join(ESTIMATES)}")
    gpu = "h200"  # whose results are listed where there is no GPU
    if torch.cuda.is_available():
        gpu = re.sub(r"\W+", "-", torch.cuda.get_device_name().lower().removeprefix("nvidia "))
    elif not arguments.rehearse and not arguments.list:
        print("no GPU here: nothing measured; --rehearse tries the command on CPU")
        return int(arguments.check)
    kept = ROOT / "benchmarks" / "results" / f"gpu-{gpu}.json"
    if arguments.rehearse:
        kept = ROOT / "outputs" / "gpu-rehearsal.json"
    arguments.json = arguments.json or kept
    rows = []
    if arguments.json.exists():
        rows = json.loads(arguments.json.read_text(encoding="utf-8"))["rows"]
        rows = [row for row in rows if row["row"] in ESTIMATES]
    if arguments.list:
        print(table(list_rows(names, rows)))
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # through `finally`: no process stays on the GPU
    prepare_once(*((REHEARSAL, "docs") if arguments.rehearse else (DATASET,)))
    work(names, rows, arguments)
    add_ratios(rows)
    return finish(arguments, rows, [] if arguments.rehearse else bars(rows, gpu))


TARGETS = {  # tokens/s on an H200
    "1.8B bf16 8192": 40_000,
    "1.8B tensorwise 8192": 47_000,
    "8B bf16 8192": 10_500,
    "8B tensorwise 8192": 14_500,
}
PEER, LEAD = "1.8B transformers 8192", 1.15


def bars(rows: list[dict[str, Any]], gpu: str) -> list[tuple[str, bool]]:
    """The bars of these rows, and whether they are met."""
    speed = {row["row"]: row["tokens/s"] for row in rows if "tokens/s" in row}
    found = []
    for name, target in TARGETS.items():
        if name in speed and gpu == "h200":
            found.append((f"{name}: {speed[name]:,.0f} tokens/s, at least {target:,}", speed[name] >= target))
    if PEER in speed:
        ours = speed.get("1.8B bf16 8192", 0.0)
        text = f"1.8B bf16: {ours:,.0f} tokens/s, at least {LEAD} times the {speed[PEER]:,.0f} of {PEER}"
        found.append((text, ours >= LEAD * speed[PEER]))
    for row in rows:
        if row["row"] != PEER and "GEMM %" in row:
            found.append((f"{row['row']}: attention by cuDNN", "attention, cudnn %" in row))
    return found


if __name__ == "__main__":
    sys.exit(main())
