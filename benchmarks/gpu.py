"""The speed of train.py on one GPU, beside what the GPU can do, beside other loops of the same model, and with one
setting changed at a time.

    python -m benchmarks.gpu [--rows "NAME;..."] [--rehearse] [--check] [--json FILE]

`benchmarks.gpu_queue` measures the same rows in an order and in a given time. Rows are measured in one process, one
after another, and each is written as soon as it is there. If memory runs out, half as many sequences at once are tried.
A training row runs train.py itself: some steps to compile and warm up, some timed together (waiting for the device only
at their ends), one under torch's profiler for the shares of the step. Peers do the same steps. `roofline` is tokens/s
over what the measured matmul peaks allow if only matmuls and attention took time (attention at the bfloat16 peak, its
causal half). `TFLOP/s` counts a token as 6 x (parameters without the embedding + layers x heads x head_dim x seq_len),
so attention's causal half, as NVIDIA's tables do; MFU counts all of attention, as torchtitan's.

`matmuls of ...` time the forward's matmul of layers of the 8B alone, without casts, in bfloat16 and by each scaling of
float8. `error` is relative to a product of the same rounded values in float32; what is wrong by that is not timed.

Settings are compared on four layers of the 8B: `ratio` is tokens/s over the row `as in the rows of the 8B`, which is
measured again at the end: how far it is from 1 is how far to trust the others. The output layer has a third of all
matmuls there, one part in sixteen in the whole 8B.

`--rehearse` runs everything on CPU with tiny shapes, to find typos before using a GPU: its figures say nothing. The
dataset is the one that ./run_llama_train.sh prepares.
"""

import dataclasses
import gc
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._functorch import config as functorch
from torch.nn.attention import SDPBackend, sdpa_kernel

import float8.layers  # noqa: F401  (registers the kernels)
import metrics
from benchmarks.report import REHEARSE, add_row, build_parser, finish, has_gpu, prepare_once
from config import Config, load_config
from float8.casts import Cast, cast, multiply
from float8.convert import convert_to_float8
from float8.cpu import replace_matmul
from models import build_model, find_model
from models.llama.hf import to_hf_config
from parallel.device import synchronize
from run.processes import shut_down
from storage.records import read_records
from train import train

WARMUP_STEPS = 3
QUICK = ("peaks", "1.8B bf16 8192")
DATASET, REHEARSAL = Path("datasets/stdlib"), Path("datasets/rehearsal")
EVERY_LAYER = "--float8.filter=all"
CHUNKS = ("--training.loss_chunks=2",)
ONCE = ("--parallelism.reshard_after_forward=false",)  # weights are cast once per step, as always in float8
BUDGET = ("--activation_checkpoint.mode=budget", "--activation_checkpoint.memory_budget=0.8")
LARGE = (*CHUNKS, "--optimizer.state_dtype=bfloat16", *BUDGET, *ONCE)
RECIPES = {"tensorwise": ("--float8.enable",), "rowwise": ("--float8.enable", "--float8.recipe=rowwise")}
KINDS = {"bf16": (), **RECIPES, "muon": ("--optimizer.name=muon",)}
# Rows of whole models, each in all KINDS: flavor, tokens per sequence, sequences per microbatch and per step, steps.
SHAPES = (
    ("1.8B", 8192, 4, 8, (*CHUNKS, *ONCE), 6),
    ("8B", 8192, 1, 8, LARGE, 3),
    ("3B", 8192, 2, 8, (*CHUNKS, *ONCE), 6),
    ("1.8B", 4096, 8, 16, (*CHUNKS, *ONCE), 6),
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
    "fast accumulation": ("--float8.fast_accumulation=all",),
}
# Linear layers of the 8B: out, in.
MATMULS = {
    "matmuls of wq, wo": (4096, 4096),
    "matmuls of wk, wv": (1024, 4096),
    "matmuls of w1, w3": (14336, 4096),
    "matmuls of w2": (4096, 14336),
}
SCALINGS = ("tensorwise", "rowwise")
CHECKED = 16  # tokens whose products are compared with float32's
WRONG = 0.02  # relative error; rounding to bfloat16 makes 0.0017, and fast accumulation 0.0033 in all
NO_ROOM = "no room"


@dataclasses.dataclass(frozen=True)
class Run:
    """A training row: flavor, tokens per sequence, sequences per microbatch and per step, and further settings.

    `steps` steps are timed.
    """

    flavor: str
    seq_len: int
    local_batch_size: int
    global_batch_size: int
    options: tuple[str, ...] = ()
    steps: int = 6
    dataset: Path = DATASET
    peer: str = ""


def whole_models() -> dict[str, Run]:
    """The rows of whole models by name."""
    rows = {}
    for flavor, seq_len, local, whole, options, steps in SHAPES:
        for kind, more in KINDS.items():
            rows[f"{flavor} {kind} {seq_len}"] = Run(flavor, seq_len, local, whole, (*options, *more), steps)
    rows["1.8B transformers 8192"] = Run("1.8B", 8192, 4, 8, peer="transformers")
    return rows


def settings() -> dict[str, Run]:
    """The rows of settings by name."""
    options = dict(SETTINGS)
    for recipe, words in RECIPES.items():
        options[f"float8, {recipe}"] = (*LARGE, *words)
        for gain, more in GAINS.items():
            options[f"float8, {recipe}, {gain}"] = (*LARGE, *words, *more)
    options[f"{BASE}, again"] = LARGE
    return {name: Run("8B", 8192, 1, 4, ("--model.n_layers=4", *words), 4) for name, words in options.items()}


def rehearsal(run: Run) -> Run:
    """The same row, small enough for a CPU."""
    options = [*run.options, "--training.param_dtype=float32", "--model.n_layers=1"]  # fast on every CPU
    if "--float8.enable" in options:
        options.append(EVERY_LAYER)
    return Run("tiny", 64, 2, 4, tuple(options), run.steps, REHEARSAL, run.peer)


# ---------------------------------------------------------------- what the device can do


def peaks(device: torch.device, rehearse: bool) -> dict[str, float | None]:
    """TFLOP/s of matmuls and attention at the 8B's shapes, and TB/s of a copy (read and written).

    Float8's TFLOP/s are those of a forward and its backward.
    """
    tokens, dim, hidden = (64, 64, 128) if rehearse else (8192, 4096, 14336)
    x = torch.randn(tokens, dim, device=device, dtype=torch.bfloat16)
    weight = torch.randn(hidden, dim, device=device, dtype=torch.bfloat16)
    flops = 2 * tokens * dim * hidden
    row: dict[str, float | None] = {}
    row["bf16 TFLOP/s"] = flops / seconds(lambda: F.linear(x, weight), device) / 1e12
    if device.type == "cpu" or torch.cuda.get_device_capability() >= (8, 9):
        one = torch.ones((), device=device)
        x8 = x.to(torch.float8_e4m3fn)
        weight8 = weight.to(torch.float8_e4m3fn)

        def matmul(fast: bool) -> torch.Tensor:
            return torch._scaled_mm(x8, weight8.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=fast)

        # As in torchao's recipes, the forward's matmul uses fast accumulation, the backward's two do not.
        forward = seconds(partial(matmul, True), device)
        backward = 2 * seconds(partial(matmul, False), device)
        row["float8 TFLOP/s"] = 3 * flops / (forward + backward) / 1e12
    source = torch.empty(2**16 if rehearse else 2**30, dtype=torch.bfloat16, device=device)
    target = torch.empty_like(source)
    row["copy TB/s"] = 2 * source.nbytes / seconds(lambda: target.copy_(source), device) / 1e12
    return row | attention_rates(device, rehearse)


def attention_rates(device: torch.device, rehearse: bool) -> dict[str, float | None]:
    """TFLOP/s of a forward and backward of the 8B's causal attention by cuDNN and by flash, None where it has none.

    Its causal half is counted, with 2.5 times as much in the backward.
    """
    tokens, n_heads, n_kv_heads, head_dim = (64, 4, 2, 16) if rehearse else (8192, 32, 8, 128)
    q, k, v, grad = (
        torch.randn(1, tokens, n, head_dim, device=device, dtype=torch.bfloat16).transpose(1, 2).requires_grad_()
        for n in (n_heads, n_kv_heads, n_kv_heads, n_heads)
    )

    def step() -> None:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        torch.autograd.grad(out, (q, k, v), grad)

    row: dict[str, float | None] = {}
    for name, backend in (("cudnn", SDPBackend.CUDNN_ATTENTION), ("flash", SDPBackend.FLASH_ATTENTION)):
        key, flops = f"attention {name} TFLOP/s", 7 * tokens**2 * n_heads * head_dim
        try:
            with sdpa_kernel(backend):
                row[key] = flops / seconds(step, device) / 1e12
        except RuntimeError:
            row[key] = None
    return row


def measure_matmuls(shape: tuple[int, int], device: torch.device, tokens: int) -> dict[str, Any]:
    """TFLOP/s of a forward's matmul and its error, in bfloat16 and in float8 by each scaling. Errors become text."""
    n_out, n_in = shape
    x, weight = (torch.randn(n, n_in, device=device, dtype=torch.bfloat16) for n in (tokens, n_out))
    row: dict[str, Any] = {"out": n_out, "in": n_in, "tokens": tokens}

    def add(way: str, product: Callable[[], Tensor], x: Tensor, weight: Tensor) -> None:
        exact = x[:CHECKED].float() @ weight.float().t()
        try:
            error = ((product()[:CHECKED] - exact).norm() / exact.norm()).item()
            row[f"{way} error"] = error
            if not error < WRONG:  # also NaN
                row[f"{way} failed"] = f"wrong by {error:.2g}, so not timed"
                return
            row[f"{way} TFLOP/s"] = 2 * tokens * n_out * n_in / seconds(product, device) / 1e12
        except (RuntimeError, ValueError) as reason:
            row[f"{way} failed"] = " ".join(str(reason).split())[:300]

    add("bf16", lambda: x @ weight.t(), x, weight)
    for scaling in SCALINGS:
        (x8,) = cast("copy", scaling, [x], columns=False)
        (weight8,) = cast("copy", scaling, [weight], columns=False)
        for fast in (True, False):
            product = partial(multiply, x8[:2], weight8[:2], torch.bfloat16, fast)
            add(f"{scaling}{', fast' * fast}", product, dequantize(x8), dequantize(weight8))
    return row


def dequantize(x: Cast) -> Tensor:
    """The rounded values in float32."""
    return x.rows.float() * x.row_scales


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
    profiler = build_profiler(device)

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
    return result(run, device, elapsed, marks[1] - started) | {"loss": loss} | shares(profiler, device)


def result(run: Run, device: torch.device, elapsed: float, first_step: float) -> dict[str, Any]:
    """The row of a run whose timed steps took `elapsed` seconds."""
    speed = run.steps * run.global_batch_size * run.seq_len / elapsed
    model, peak = build_meta_model(run), metrics.peak_flops(device)
    flops, causal_flops = count_flops(model, run.seq_len)
    return {
        "tokens/s": speed,
        "MFU %": 100 * flops * speed / peak if peak else None,  # of the data sheet's peak; None if unknown
        "TFLOP/s": causal_flops * speed / 1e12,
        "peak GiB": metrics.peak_memory_gib(device),
        "first step s": first_step,
    }


def count_flops(model: nn.Module, seq_len: int) -> tuple[float, float]:
    """Operations of a token's training: with all of attention, as torchtitan counts; with its causal half."""
    flavor: Any = model.config
    flops = model.flops_per_token(seq_len)  # type: ignore[operator]
    return flops, flops - 6 * flavor.n_layers * flavor.n_heads * flavor.head_dim * seq_len


def training_config(run: Run, steps: int, outputs: str) -> Config:
    options = [
        f"--model.flavor={run.flavor}",
        f"--data.datasets={run.dataset}",
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

    return measure_loop(step, run, device, started)


def measure_loop(step: Callable[[], None], run: Run, device: torch.device, started: float) -> dict[str, Any]:
    """Measure a peer's tokens/s, first step, memory and shares, over the same steps as train.py's."""
    step()
    synchronize(device)
    first = time.perf_counter() - started
    for _ in range(WARMUP_STEPS - 1):
        step()
    synchronize(device)
    begin = time.perf_counter()
    for _ in range(run.steps):
        step()
    synchronize(device)
    elapsed = time.perf_counter() - begin
    with build_profiler(device) as profiler:
        step()
        synchronize(device)
    return result(run, device, elapsed, first) | shares(profiler, device)


def build_profiler(device: torch.device) -> torch.profiler.profile:
    activity = torch.profiler.ProfilerActivity  # only the device's: recording the host slows it down
    return torch.profiler.profile(activities=[activity.CPU if device.type == "cpu" else activity.CUDA])


# The first pattern that matches a kernel's name decides its kind.
KERNELS = (
    ("pointwise", r"lpnorm|binaryop"),  # clipping, on lists of tensors as in AdamW
    ("copy", r"memcpy|memset|nccl|chunk_cat|split_with_sizes"),  # the last two are FSDP's
    ("optimizer", r"adam|multi_tensor|foreach|triton.*lerp"),
    ("attention", r"triton_tem.*(flex|attention)"),
    ("pointwise", r"^triton_(poi|red|per)_"),  # named after what was fused, such as attention's reshapes
    ("attention", r"sdpa|flash|fmha|attention|flex|cudnn.*(dot_do_o|convert_dq)"),
    ("GEMM", r"gemm|nvjet|cutlass|xmma|scaled_mm|addmm|splitk|\bmm\b"),
    ("pointwise", r""),
)


def shares(profiler: torch.profiler.profile, device: torch.device) -> dict[str, Any]:
    """Per cent of the profiled step that the device spent in each kind of kernel, and idle; empty on CPU.

    As if kernels never overlapped, which only collectives would. Those that took longest are written to stderr.
    """
    cuda = torch.autograd.DeviceType.CUDA
    # Without the ranges that compiler and optimizer name, which also come as events of the device.
    events = [event for event in profiler.events() or [] if event.device_type == cuda and not event.is_user_annotation]
    if device.type == "cpu" or not events:
        return {}
    times: dict[tuple[str, str], list[float]] = {}  # of each kernel, by kind and name
    for event in events:
        kind = next(kind for kind, pattern in KERNELS if re.search(pattern, event.name, re.IGNORECASE))
        times.setdefault((kind, event.name), []).append(event.time_range.elapsed_us())
    begin = min(event.time_range.start for event in events)
    span = max(event.time_range.end for event in events) - begin
    by = {attention_by(name) for kind, name in times if kind == "attention"}
    row: dict[str, Any] = {"attention by": "+".join(sorted(by))}
    row |= dict.fromkeys([f"{kind} %" for kind, _ in KERNELS], 0.0) | {"idle %": 100.0}
    for i, ((kind, name), each) in enumerate(sorted(times.items(), key=lambda item: -sum(item[1]))):
        row[f"{kind} %"] += 100 * sum(each) / span
        row["idle %"] -= 100 * sum(each) / span
        if i < 40:
            print(f"{sum(each) / 1e3:9.2f} ms {len(each):6} x {kind:9}  {name[:160]}", file=sys.stderr)
    return row


def attention_by(kernel: str) -> str:
    """Whose attention a kernel is."""
    if "cudnn" in kernel:
        return "cudnn"
    return "flex" if "triton" in kernel else "flash"


def attainable(run: Run, peak: dict[str, Any]) -> float:
    """Tokens/s if only matmuls and attention took time, at the peaks measured in this run."""
    model, config = build_meta_model(run), training_config(run, 1, "unused")
    _, in_bf16 = count_flops(model, run.seq_len)
    converted = convert_to_float8(model, config.float8)[0] if config.float8.enable else []
    in_float8 = sum(6 * model.get_parameter(f"{name}.weight").numel() for name in converted)
    float8_seconds = in_float8 / (peak["float8 TFLOP/s"] * 1e12) if in_float8 else 0.0
    return 1 / (float8_seconds + (in_bf16 - in_float8) / (peak["bf16 TFLOP/s"] * 1e12))


# ---------------------------------------------------------------- rows


def find_run(name: str, rehearse: bool) -> Run:
    """The row of this name."""
    run = {**whole_models(), **settings()}[name]
    if rehearse:
        return rehearsal(run)
    return run


def measure_fitting(run: Run, device: torch.device) -> dict[str, Any]:
    """Measure a row, with half as many sequences at once as long as memory runs out."""
    row = measure(run, device)
    while run.local_batch_size > 1 and row.get("failed", "").startswith(NO_ROOM):
        run = dataclasses.replace(run, local_batch_size=run.local_batch_size // 2)
        row = measure(run, device)
    return row


def measure(run: Run, device: torch.device) -> dict[str, Any]:
    """Measure a row. An error becomes part of it."""
    torch.compiler.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    by = {"": measure_training, "transformers": measure_transformers}[run.peer]
    row: dict[str, Any] = {"sequences": run.local_batch_size}
    try:
        # Without what an earlier row has set for the process.
        with functorch.patch(activation_memory_budget=1.0, joint_custom_pass=None):
            return row | by(run, device, time.perf_counter())
    except Exception as error:
        reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        if re.search("out of memory|ALLOC_FAILED", str(error)):  # kernels and cuBLAS handles can run out of it too
            reason = f"{NO_ROOM}, {reason}"
        return row | {"failed": reason}
    finally:
        if dist.is_initialized():
            shut_down()


def main() -> int:
    parser = build_parser(__doc__ or "")
    parser.add_argument("--rows", default="", help="names of rows, with ; between them (default: all)")
    parser.add_argument("--rehearse", action="store_true", help=REHEARSE)
    arguments = parser.parse_args()
    known = ("peaks", *MATMULS, *whole_models(), *settings())
    names: Sequence[str] = known
    if arguments.quick:
        names = QUICK
    if arguments.rows:
        names = arguments.rows.split(";")
    unknown = {*names} - {*known}
    if unknown:
        parser.error(f"unknown rows {'; '.join(sorted(unknown))}; known are {'; '.join(known)}")
    if not has_gpu(arguments.rehearse):
        return int(arguments.check)
    prepare_data(arguments.rehearse)
    metrics.quiet_noisy_loggers()  # torchao's, which the roofline of float8 imports
    replace_matmul()  # that of CPUs, for a rehearsal
    device = torch.device("cpu" if arguments.rehearse else "cuda")
    rows: list[dict[str, Any]] = []
    peak: dict[str, Any] = {}
    base = 0.0  # tokens/s
    for name in names:
        row = {"row": name} | measure_row(name, device, arguments.rehearse)
        if name == "peaks":
            peak = row
        if "tokens/s" in row and peak.get("bf16 TFLOP/s"):
            row["roofline"] = row["tokens/s"] / attainable(find_run(name, arguments.rehearse), peak)
        if name == BASE:
            base = row.get("tokens/s", 0.0)
        if "tokens/s" in row and base and name in settings():
            row["ratio"] = row["tokens/s"] / base
        add_row(arguments, rows, row)
    return finish(arguments, rows, [] if arguments.rehearse else bars(rows, torch.cuda.get_device_name()))


def prepare_data(rehearse: bool) -> None:
    """Prepare the dataset of all rows, unless it exists."""
    if rehearse:
        prepare_once(REHEARSAL, "docs")
    else:
        prepare_once(DATASET)


def measure_row(name: str, device: torch.device, rehearse: bool) -> dict[str, Any]:
    """Measure the row of this name."""
    if name == "peaks":
        return peaks(device, rehearse)
    if name in MATMULS:
        shape, tokens = MATMULS[name], 16384
        if rehearse:
            shape, tokens = (256, 128), 128
        return measure_matmuls(shape, device, tokens)
    return measure_fitting(find_run(name, rehearse), device)


TARGETS = {  # tokens/s on an H200
    "1.8B bf16 8192": 40_000,
    "1.8B tensorwise 8192": 47_000,
    "8B bf16 8192": 10_500,
    "8B tensorwise 8192": 14_500,
}
PEERS = {"1.8B transformers 8192": 1.15}


def bars(rows: list[dict[str, Any]], gpu: str) -> list[tuple[str, bool]]:
    """The bars of these rows, and whether they are met."""
    speed = {row["row"]: row.get("tokens/s", 0.0) for row in rows}
    ours = speed.get("1.8B bf16 8192", 0.0)
    found = []
    for row in rows:
        name = row["row"]
        by = row.get("attention by", "cudnn")
        if name in TARGETS and "H200" in gpu:
            text = f"{name}: {speed[name]:,.0f} tokens/s, at least {TARGETS[name]:,}"
            found.append((text, speed[name] >= TARGETS[name]))
        if name in PEERS:
            text = f"1.8B bf16: {ours:,.0f} tokens/s, at least {PEERS[name]} times the {speed[name]:,.0f} of {name}"
            found.append((text, speed[name] > 0 and ours >= PEERS[name] * speed[name]))
        elif name not in MATMULS:
            found.append((f"{name}: attention by {by}, cudnn is asked for", by == "cudnn"))
    return found


if __name__ == "__main__":
    sys.exit(main())
