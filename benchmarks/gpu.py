"""The speed of train.py on one GPU, beside what the GPU can do and beside a transformers loop of the same model.

    python -m benchmarks.gpu [--rows NAME,...] [--add "NAME=OPTIONS"] [--budget-seconds 540] [--rehearse] [--check]
        [--json FILE]

The most important rows come first. Each is written as soon as it is measured, so that a run cut short keeps its first
rows. Each runs in its own process. If memory runs out, another process tries half as many sequences at once. A training
row runs train.py itself: some steps to compile and warm up, some timed together (waiting for the device only at their
ends), one under torch's profiler for the shares of the step. Peers do the same steps. `roofline` is tokens/s over what
the measured matmul peaks allow if only matmuls and attention took time (attention at the bfloat16 peak, its causal
half). `TFLOP/s` counts a token as 6 x (parameters without the embedding + layers x heads x head_dim x seq_len), so
attention's causal half, as NVIDIA's tables do; MFU counts all of attention, as torchtitan's do.

`--rehearse` runs everything on CPU with tiny shapes, to find typos before using a GPU: its figures say nothing. The
dataset is the one that ./run_llama_train.sh prepares. A GPU of 80 GB has room for a part of the 8B:
`--add "8B bf16 8192=--model.n_layers=12"`.
"""

import argparse
import dataclasses
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import metrics
from benchmarks.report import REHEARSE, add_row, build_parser, finish, has_gpu, prepare_once, print_row
from config import Config, TitaniteError, load_config
from float8.convert import convert_to_float8
from models import build_model, find_model
from models.llama.hf import to_hf_config
from parallel.device import synchronize
from storage.records import read_records
from train import train

WARMUP_STEPS = 3
QUICK = ("peaks", "1.8B bf16 8192")
DATASET, REHEARSAL = Path("datasets/stdlib"), Path("datasets/rehearsal")
TENSORWISE, ROWWISE = ("--float8.enable",), ("--float8.enable", "--float8.recipe=rowwise")
BLOCKWISE = ("--float8.enable", "--float8.recipe=blockwise")
EVERY_LAYER = "--float8.filter=all"
ONCE = ("--parallelism.reshard_after_forward=false",)  # weights are cast once per step, as always in float8
SMALL_STATES = ("--optimizer.state_dtype=bfloat16",)
BUDGET = ("--activation_checkpoint.mode=budget", "--activation_checkpoint.memory_budget=0.8")
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


def is_known(options: Sequence[str]) -> bool:
    """Whether config.py of this commit has these settings and values."""
    try:
        load_config(options)
    except TitaniteError:
        return False
    return True


def runs() -> dict[str, Run]:
    """The training rows by name, the most important first, without those whose settings are not known."""
    chunks = "--training.loss_chunks=2"
    muon = "--optimizer.name=muon"

    def small(*options: str) -> Run:
        return Run("1.8B", 8192, 4, 8, (chunks, *ONCE, *options))

    def medium(*options: str) -> Run:
        return Run("3B", 8192, 2, 8, (chunks, *ONCE, *options))

    def large(*options: str) -> Run:
        return Run("8B", 8192, 1, 8, (chunks, *SMALL_STATES, *BUDGET, *ONCE, *options), 3)

    def short(*options: str) -> Run:
        return Run("1.8B", 4096, 8, 16, (chunks, *ONCE, *options))

    rows = {
        "1.8B bf16 8192": small(),
        "1.8B torchtitan 8192": Run("1.8B", 8192, 4, 8, peer="torchtitan"),
        "1.8B tensorwise 8192": small(*TENSORWISE),
        "8B bf16 8192": large(),
        "8B tensorwise 8192": large(*TENSORWISE),
        "1.8B transformers 8192": Run("1.8B", 8192, 4, 8, peer="transformers"),
        "1.8B rowwise 8192": small(*ROWWISE),
        "1.8B bf16 4096": short(),
        "3B bf16 8192": medium(),
        "3B tensorwise 8192": medium(*TENSORWISE),
        "8B rowwise 8192": large(*ROWWISE),
        "8B blockwise 8192": large(*BLOCKWISE),
        "1.8B blockwise 8192": small(*BLOCKWISE),
        "1.8B muon 8192": small(muon),
        "8B muon 8192": large(muon),
        "3B rowwise 8192": medium(*ROWWISE),
        "1.8B tensorwise 4096": short(*TENSORWISE),
        "1.8B rowwise 4096": short(*ROWWISE),
    }
    return {name: run for name, run in rows.items() if is_known(run.options)}


def rehearsal(run: Run) -> Run:
    """The same row, small enough for a CPU."""
    options = [*run.options, "--training.param_dtype=float32"]  # fast on every CPU
    if "--float8.enable" in options:
        options.append(EVERY_LAYER)
    flavor = "tiny"
    if "--float8.recipe=blockwise" in options:  # its layers need larger sizes
        flavor = "1B"
        options += ["--model.n_layers=1", "--model.vocab_size=4096"]
    return dataclasses.replace(
        run,
        flavor=flavor,
        seq_len=64,
        local_batch_size=2,
        global_batch_size=4,
        options=tuple(options),
        dataset=REHEARSAL,
    )


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
    marks: dict[str, float] = {}
    last = WARMUP_STEPS + run.steps
    profiler = build_profiler(device)

    def after_step(step: int) -> None:
        if step in (1, WARMUP_STEPS, last):
            synchronize(device)
            marks[str(step)] = time.perf_counter()
        if step == last:
            profiler.start()
        elif step > last:
            synchronize(device)
            profiler.stop()

    with tempfile.TemporaryDirectory() as outputs:
        train(training_config(run, last + 1, outputs), after_step)
        [records] = Path(outputs).glob("*/metrics.jsonl")
        loss = read_records(records)[-1]["loss"]
    elapsed = marks[str(last)] - marks[str(WARMUP_STEPS)]
    return result(run, device, elapsed, marks["1"] - started) | {"loss": loss} | shares(profiler, device)


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


def measure_torchtitan(run: Run, device: torch.device, started: float) -> dict[str, Any]:
    """Measure torchtitan 0.3.0 (requirements-bench.txt): its Llama, compilation, loss, clipping and AdamW.

    Its Trainer is left out, since it needs its own data. The order of a step is the Trainer's.
    """
    from torchtitan.distributed import ParallelDims, utils
    from torchtitan.distributed.cudagraph import wrap_with_cuda_graph
    from torchtitan.distributed.spmd_types import annotate_input_spmd_types

    job = configure_torchtitan(run)
    dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
    dims = ParallelDims.from_config(job.parallelism, world_size=1)
    utils.set_spmd_backend(job.parallelism.spmd_backend)
    model = build_torchtitan(job, dims, run)
    loss_fn = job.loss.build(compile_config=job.compile)
    model.to_empty(device=device)
    with torch.no_grad():
        model.init_weights(buffer_device=None)
    loss_fn.set_lm_head(model.lm_head)
    model._skip_lm_head = True  # its loss applies the output layer, in chunks
    optimizers = job.optimizer.build(model_parts=[model])
    context = utils.get_spmd_context(parallel_dims=dims)

    def forward_backward(tokens: Tensor, labels: Tensor, count: Tensor, more: dict[str, Any]) -> Tensor:
        with context():
            loss, _ = loss_fn(model(tokens, **more), labels, count, positions=more["positions"])
            loss.backward()
        return loss

    samples = torch.randint(0, model.config.vocab_size, (run.local_batch_size, run.seq_len + 1), device=device)
    positions = torch.arange(run.seq_len, device=device).repeat(run.local_batch_size, 1)
    more = {"positions": positions, "attention_masks": model.get_attention_masks(positions=positions)}
    tokens, labels, more = annotate_input_spmd_types(dims, samples[:, :-1], samples[:, 1:], more)
    count = torch.tensor(run.global_batch_size * run.seq_len, device=device)
    captured = wrap_with_cuda_graph(forward_backward)

    def step() -> None:
        optimizers.zero_grad(set_to_none=False)
        for _ in range(run.global_batch_size // run.local_batch_size):
            captured(tokens, labels, count, more)
        utils.clip_grad_norm_(list(model.parameters()), 1.0, foreach=True)
        optimizers.step()

    return measure_loop(step, run, device, started)


def configure_torchtitan(run: Run) -> Any:
    """torchtitan's job of its 8B, with the shape of the run's model, without checkpointing, compiled."""
    from torchtitan.config import CompileConfig
    from torchtitan.models import llama3
    from torchtitan.models.llama3.config_registry import llama3_8b

    flavor: Any = build_meta_model(run).config
    job = llama3_8b()
    job.training.seq_len, job.training.local_batch_size = run.seq_len, run.local_batch_size
    job.compile = CompileConfig(enable=True)
    shape = job.model_spec.model
    shape.dim, shape.vocab_size = flavor.dim, flavor.vocab_size
    shape.tok_embeddings.num_embeddings, shape.tok_embeddings.embedding_dim = flavor.vocab_size, flavor.dim
    shape.norm.normalized_shape = flavor.dim
    shape.lm_head.in_features, shape.lm_head.out_features = flavor.dim, flavor.vocab_size
    rope = dataclasses.replace(shape.layers[0].attention.rope, dim=flavor.head_dim, theta=flavor.rope_theta)
    shape.layers = llama3._build_llama3_layers(
        n_layers=flavor.n_layers,
        dim=flavor.dim,
        n_heads=flavor.n_heads,
        n_kv_heads=flavor.n_kv_heads,
        hidden_dim=flavor.hidden_dim,
        rope=rope,
        attn_backend="flex",
    )
    return job


def build_torchtitan(job: Any, dims: Any, run: Run) -> Any:
    """torchtitan's model on the meta device, compiled and sharded as its Trainer does."""
    spec = job.model_spec
    spec.model.update_from_config(config=job)
    with torch.device("meta"):
        model = spec.model.build()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    ours = sum(parameter.numel() for parameter in build_meta_model(run).parameters())
    assert parameters == ours, f"not the same shape: {parameters}, ours has {ours}"
    return spec.parallelize_fn(
        model,
        parallel_dims=dims,
        training=job.training,
        parallelism=job.parallelism,
        compile_config=job.compile,
        ac_config=None,
        dump_folder="",
    )


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

    The kernels that took longest are written to stderr.
    """
    cuda = torch.autograd.DeviceType.CUDA
    # Without the ranges that compiler and optimizer name, which also come as events of the device.
    events = [event for event in profiler.events() or [] if event.device_type == cuda and not event.is_user_annotation]
    if device.type == "cpu" or not events:
        return {}
    times: dict[tuple[str, str], list[float]] = {}  # of each kernel, by kind and name
    backends = set()
    end = busy = 0.0
    for event in sorted(events, key=lambda event: event.time_range.start):
        kind = next(kind for kind, pattern in KERNELS if re.search(pattern, event.name, re.IGNORECASE))
        times.setdefault((kind, event.name), []).append(event.time_range.elapsed_us())
        busy += max(0.0, event.time_range.end - max(end, event.time_range.start))  # kernels may overlap
        end = max(end, event.time_range.end)
        if kind == "attention":
            backends.add(attention_by(event.name))
    span = end - min(event.time_range.start for event in events)
    for (kind, name), each in sorted(times.items(), key=lambda item: -sum(item[1]))[:40]:
        print(f"{sum(each) / 1e3:9.2f} ms {len(each):6} x {kind:9}  {name[:160]}", file=sys.stderr)  # into the log
    row: dict[str, Any] = {"attention by": "+".join(sorted(backends))}
    row |= dict.fromkeys([f"{kind} %" for kind, _ in KERNELS], 0.0)
    for (kind, _), each in times.items():
        row[f"{kind} %"] += 100 * sum(each) / span
    return row | {"idle %": 100 * (1 - busy / span)}


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


# ---------------------------------------------------------------- rows, each in a process of its own


def find_run(name: str, rehearse: bool, added: Sequence[str] = ()) -> Run:
    """The row, with `added` settings."""
    run = runs()[name]
    run = dataclasses.replace(run, options=(*run.options, *added))
    return rehearsal(run) if rehearse else run


def measure_row(name: str, added: Sequence[str], sequences: int, rehearse: bool, started: float) -> dict[str, Any]:
    """Measure one row in this process, with `added` settings and `sequences` at once.

    Raises RuntimeError if memory runs out.
    """
    device = torch.device("cpu" if rehearse else "cuda")
    if name == "peaks":
        return peaks(device, rehearse)
    run = dataclasses.replace(find_run(name, rehearse, added), local_batch_size=sequences)
    measure = {"": measure_training, "transformers": measure_transformers, "torchtitan": measure_torchtitan}[run.peer]
    return measure(run, device, started) | {"sequences": sequences}


def run_alone(name: str, added: Sequence[str], sequences: int, rehearse: bool, started: float) -> None:
    """Print the row as this process measures it."""
    try:
        row = measure_row(name, added, sequences, rehearse, started)
    except RuntimeError as error:  # kernels and cuBLAS handles can run out of memory too
        if not re.search("out of memory|ALLOC_FAILED", str(error)):
            raise
        row = {"failed": f"{NO_ROOM} for {sequences} sequences at once: {str(error).splitlines()[0]}"}
    print_row(row)
    os._exit(0)  # the row is printed: errors in Python's exit do not matter


def run_fitting(
    name: str, added: Sequence[str], sequences: int, rehearse: bool, timeout_seconds: float, log: Path
) -> dict[str, Any]:
    """Measure a row with `sequences` at once, or half as many as long as memory runs out."""
    deadline = time.perf_counter() + timeout_seconds
    while True:
        row = run_row(name, added, sequences, rehearse, deadline - time.perf_counter(), log)
        if sequences == 1 or not row.get("failed", "").startswith(NO_ROOM):
            return row
        sequences //= 2


def run_row(
    name: str, added: Sequence[str], sequences: int, rehearse: bool, timeout_seconds: float, log: Path
) -> dict[str, Any]:
    """Measure one row in its own process. An error becomes part of the row; all output goes to `log`."""
    command = [sys.executable, "-m", "benchmarks.gpu", "--alone", name, f"--sequences={sequences}"]
    command.append(f"--add={name}={' '.join(added)}")
    if rehearse:
        command.append("--rehearse")
    with open(log, "a+", encoding="utf-8") as errors:
        errors.write(f"--- {name}, {sequences} at once\n")
        errors.flush()
        begin = errors.tell()
        try:
            result = subprocess.run(
                command, stdout=subprocess.PIPE, stderr=errors, text=True, timeout=timeout_seconds, check=False
            )
        except subprocess.TimeoutExpired:
            return {"failed": f"not done within {timeout_seconds:.0f} s, see {log}"}
        errors.seek(begin)
        said = errors.read().splitlines()
    if result.returncode < 0:  # out of host memory, or a driver's fault: the process may have said why
        said.append(f"Error: ended by {signal.Signals(-result.returncode).name}")
    if result.returncode:
        reasons = [line for line in said if "rror" in line] or said or ["no output"]
        return {"failed": f"{reasons[-1][:200]}, see {log}"}
    row: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return row


def measure_rows(
    names: Sequence[str], added: dict[str, list[str]], arguments: argparse.Namespace, started: float
) -> list[dict[str, Any]]:
    """Measure the rows that fit into the budget, and write each once it is there."""
    log = arguments.json.with_suffix(".log") if arguments.json else Path(tempfile.gettempdir()) / "benchmarks-gpu.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    longest: dict[str, float] = {}  # row of each flavor, which says nothing about other flavors
    peak: dict[str, Any] = {}
    for name in names:
        flavor = name.split()[0]
        begin = time.perf_counter()
        left = arguments.budget_seconds - (begin - started)
        if left < longest.get(flavor, 0.0):
            print(f"{name}: left out, {left:.0f} s remain of the budget", flush=True)
            continue
        row: dict[str, Any] = {"row": name}
        more = added.get(name, [])
        if name == "peaks":
            peak = run_row(name, more, 1, arguments.rehearse, left, log)
            row |= peak
        else:
            run = find_run(name, arguments.rehearse, more)
            if more:
                row["added"] = " ".join(more)
            row |= run_fitting(name, more, run.local_batch_size, arguments.rehearse, left, log)
            if "tokens/s" in row and peak.get("bf16 TFLOP/s"):
                row["roofline"] = row["tokens/s"] / attainable(run, peak)
        longest[flavor] = max(longest.get(flavor, 0.0), time.perf_counter() - begin)
        add_row(arguments, rows, row)
    return rows


def main() -> int:
    started = time.perf_counter()
    parser = build_parser("train.py on one GPU")
    parser.add_argument("--rows", default="", help="names separated by commas; default: all that fit the budget")
    parser.add_argument(
        "--add", action="append", default=[], metavar="ROW=OPTIONS", help="more settings for a row; may be repeated"
    )
    parser.add_argument(
        "--budget-seconds", type=float, default=540, help="no row begins that may pass it (%(default)s)"
    )
    parser.add_argument("--rehearse", action="store_true", help=REHEARSE)
    parser.add_argument("--alone", metavar="ROW", help="internal: measure one row in this process")
    parser.add_argument("--sequences", type=int, default=1, help="internal: of that row, at once")
    arguments = parser.parse_args()
    added: dict[str, list[str]] = {}
    for text in arguments.add:
        name, _, options = text.partition("=")
        added[name] = options.split()
    if arguments.alone:
        more = added.get(arguments.alone, [])
        run_alone(arguments.alone, more, arguments.sequences, arguments.rehearse, started)
    known = ("peaks", *runs())
    wanted = QUICK if arguments.quick else known
    if arguments.rows:
        wanted = arguments.rows.split(",")
    unknown = {*wanted, *added} - {*known}
    if unknown:
        parser.error(f"unknown rows {', '.join(sorted(unknown))}; known are {', '.join(known)}")
    if not has_gpu(arguments.rehearse):
        return int(arguments.check)
    prepare_once(*((REHEARSAL, "docs") if arguments.rehearse else (DATASET,)))
    metrics.quiet_noisy_loggers()  # torchao's, which the roofline of float8 imports
    rows = measure_rows([name for name in known if name in wanted], added, arguments, started)
    if arguments.rehearse:
        return finish(arguments, rows, [])
    return finish(arguments, rows, bars(rows, wanted, torch.cuda.get_device_name()))


TARGETS = {
    "1.8B bf16 8192": 40_000,
    "1.8B tensorwise 8192": 47_000,
    "8B bf16 8192": 10_500,
    "8B tensorwise 8192": 14_500,
}
PEERS = {"transformers": 1.15, "torchtitan": 1.05}


def bars(rows: list[dict[str, Any]], wanted: Sequence[str], gpu: str) -> Iterator[tuple[str, bool]]:
    """The bars of the `wanted` rows. A row that was not measured misses its bar. Those in tokens/s are for an H200."""
    speed = {row["row"]: row.get("tokens/s", 0.0) for row in rows}
    for row in rows:
        by = row.get("attention by", "cudnn")
        if by != "cudnn" and not runs()[row["row"]].peer:
            yield f"{row['row']}: attention by {by}, cudnn is asked for", False
    for name, target in TARGETS.items():
        if name in wanted and "H200" in gpu:
            measured = speed.get(name, 0.0)
            yield f"{name}: {measured:,.0f} tokens/s, at least {target:,}", measured >= target
    ours = speed.get("1.8B bf16 8192", 0.0)
    for peer, least in PEERS.items():
        name = f"1.8B {peer} 8192"
        if name in wanted:
            theirs = speed.get(name, 0.0)
            met = theirs > 0 and ours >= least * theirs
            yield f"1.8B bf16: {ours:,.0f} tokens/s, at least {least} times {peer}'s {theirs:,.0f}", met


if __name__ == "__main__":
    sys.exit(main())
