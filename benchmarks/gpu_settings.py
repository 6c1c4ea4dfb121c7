"""What each setting brings on one GPU: train.py with four layers of the 8B, and one thing changed at a time.

    python -m benchmarks.gpu_settings [--rows "NAME;..."] [--budget-seconds 300] [--rehearse] [--json FILE]

All rows are measured in one process, 8,192 tokens at once and four times that per step, as benchmarks.gpu does. `ratio`
is tokens/s over the first row's. The first row is measured again at the end: how far it is from 1 is how far to trust
the others. The output layer has a third of all matmuls here, one part in sixteen in the whole 8B. Rows whose settings
this commit's config.py does not know are left out.

`--rehearse` runs everything on CPU with tiny shapes, to find typos before using a GPU: its figures say nothing.
"""

import contextlib
import dataclasses
import gc
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch._functorch import config as functorch
from torch._inductor import config as inductor

import metrics
from benchmarks.gpu import (
    BLOCKWISE,
    BUDGET,
    DATASET,
    EVERY_LAYER,
    ONCE,
    REHEARSAL,
    ROWWISE,
    SMALL_STATES,
    TENSORWISE,
    Run,
    is_known,
    measure_training,
    rehearsal,
)
from benchmarks.report import REHEARSE, add_row, build_parser, finish, has_gpu, prepare_once
from models.llama import parallelize
from run.processes import shut_down

CHUNKS = ("--training.loss_chunks=2",)
BASE = "as in the rows of the 8B"
QUICK = (BASE, "weights cast in each microbatch")
RECIPES = {"tensorwise": TENSORWISE, "rowwise": ROWWISE, "blockwise": BLOCKWISE}
# What float8 may gain from, beside a recipe alone.
GAINS = {
    "own kernels": ("--float8.kernels=own",),
    "wk and wv too": (EVERY_LAYER,),
    "output too": ('--float8.always=["output"]',),
    "output too, whole logits": ("--float8.skip=[]", "--training.loss_chunks=1"),
}
IMPRECISE = {"fast accumulation": ("--float8.fast_accumulation=all",)}  # which the queue adds to no other row


@dataclasses.dataclass(frozen=True)
class Row:
    """Options of train.py, and what holds while they are measured.

    `gain`: those of the options that the row `beside`, otherwise equal, does not have.
    """

    options: tuple[str, ...]
    context: Callable[[], AbstractContextManager[Any]] = nullcontext
    gain: tuple[str, ...] = ()
    beside: str = ""


def rows() -> dict[str, Row]:
    base = (*CHUNKS, *SMALL_STATES, *BUDGET, *ONCE)

    def without(options: tuple[str, ...], *others: str) -> tuple[str, ...]:
        return (*(option for option in base if option not in options), *others)

    found = {
        BASE: Row(base),
        "flash attention, not cuDNN's": Row(base, _without_cudnn),
        "the compiler unguided": Row(base, _unguided),
        "weights cast in each microbatch": Row(without(ONCE)),
        "logits whole": Row(without(CHUNKS)),
        "not compiled": Row(without(BUDGET, "--compile.enable=false")),
    }
    for recipe in RECIPES:
        found |= float8_rows(base, recipe)
    return found | {f"{BASE}, again": Row(base)}


def float8_rows(base: tuple[str, ...], recipe: str) -> dict[str, Row]:
    """With `blockwise` kernels are always own ones, torch refuses fast accumulation, the output stays in bfloat16."""
    name = f"float8, {recipe}"
    options = (*base, *RECIPES[recipe])
    found = {name: Row(options)}
    gains = GAINS
    imprecise = IMPRECISE
    if recipe == "blockwise":
        gains = {"wk and wv too": GAINS["wk and wv too"]}
        imprecise = {}
    for gain, more in gains.items():
        found[f"{name}, {gain}"] = Row((*options, *more), gain=more, beside=name)
    for other, more in imprecise.items():
        found[f"{name}, {other}"] = Row((*options, *more))
    return found


@contextlib.contextmanager
def _without_cudnn() -> Any:
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        with inductor.patch(force_disable_caches=True):  # its cache does not look at this switch
            yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(True)


@contextlib.contextmanager
def _unguided() -> Any:
    """The compiler without the choices of parallel/activation_checkpoint.py. Its cache would return others' graphs."""
    nothing = mock.patch.object(parallelize, "guide_compiler")
    with nothing, functorch.patch(joint_custom_pass=None), inductor.patch(force_disable_caches=True):
        yield


def measure(row: Row, device: torch.device, rehearse: bool) -> dict[str, Any]:
    """Compile and measure a row. An error becomes part of it."""
    torch.compiler.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    layers = 1 if rehearse else 4
    run = Run("8B", 8192, 1, 4, (*row.options, f"--model.n_layers={layers}"), 4)
    run = rehearsal(run) if rehearse else run
    try:
        # What an earlier row's budget has set for the process.
        with functorch.patch(activation_memory_budget=1.0), row.context():
            return measure_training(run, device, time.perf_counter())
    except Exception as error:
        return {"failed": f"{type(error).__name__}: {str(error).splitlines()[0]}"}
    finally:
        if dist.is_initialized():
            shut_down()


def main() -> int:
    started = time.perf_counter()
    parser = build_parser(__doc__ or "")
    parser.add_argument("--rows", default="", help="names of rows, with ; between them (default: all)")
    parser.add_argument("--budget-seconds", type=float, default=300.0, help="start no row after this")
    parser.add_argument("--rehearse", action="store_true", help=REHEARSE)
    arguments = parser.parse_args()
    known = rows()
    names = list(QUICK if arguments.quick else known)
    if arguments.rows:
        names = [name.strip() for name in arguments.rows.split(";")]
    unknown = set(names) - set(known)
    if unknown:
        parser.error(f"--rows: unknown {'; '.join(sorted(unknown))}; known are {'; '.join(known)}")
    if not has_gpu(arguments.rehearse):
        return int(arguments.check)
    prepare_once(*((REHEARSAL, "docs") if arguments.rehearse else (DATASET,)))
    metrics.quiet_noisy_loggers()
    device = torch.device("cpu" if arguments.rehearse else "cuda")
    measured: list[dict[str, Any]] = []
    for name in names:
        if not is_known(known[name].options):
            print(f"{name}: left out, config.py does not know its settings", flush=True)
            continue
        if time.perf_counter() - started > arguments.budget_seconds:
            print(f"{name}: left out, the budget is spent", flush=True)
            continue
        row = {"row": name} | measure(known[name], device, arguments.rehearse)
        first = measured[0] if measured else row
        if "tokens/s" in row and "tokens/s" in first:
            row["ratio"] = row["tokens/s"] / first["tokens/s"]
        add_row(arguments, measured, row)
    bars = [(f"{row['row']}: {row['failed']}", False) for row in measured if "failed" in row]
    return finish(arguments, measured, bars)


if __name__ == "__main__":
    sys.exit(main())
