"""Does edited code compute the same in every layout? A config's model, made small, against a plain loop.

python -m tools.same train_configs/debug.toml [--layouts "TP 2" "PP 2"] [--optimizer.name=muon]

The plain loop uses the model's forward, the loss, and the optimizer for one weight at a time, as they are now. Each
layout then trains the same steps as train.py does. Exit code 1: one of them computed something else without a word.
"""

import argparse
import copy
import dataclasses
import logging
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from checkpoint.state import clean_name
from config import Config, ConfigError, TitaniteError, command_line, load_config
from data.loader import IGNORED, Batch
from float8.convert import check_float8, convert_to_float8
from loss import check_loss, loss_chunks, stack_terms
from models import ModelSpec, build_model, find_model, settle_model
from models.weights import init_weights
from optim import build_optimizer, check_optim, learning_rate, set_learning_rate
from parallel.device import device_type
from parallel.mesh import ParallelDims
from run.processes import shut_down
from trainer import Computed, Trainer

STEPS = 4
UNTRAINED = 3  # the step without a label, of random tokens
SEQUENCES, SEQ_LEN, VOCAB_SIZE = 16, 32, 256
TIMEOUT_SECONDS = 60  # of a collective
# What every config gets. Shapes of the model are `shrink`'s.
SMALL = (
    f"--training.steps={STEPS}", f"--training.seq_len={SEQ_LEN}", f"--training.global_batch_size={SEQUENCES}",
    "--training.epochs=0", "--training.param_dtype=float32", "--training.loss_chunks=1", "--compile.enable=false",
    "--activation_checkpoint.mode=none", "--float8.enable=false", "--parallelism.dp_replicate=1",
    "--parallelism.dp_shard=-1", "--parallelism.cp=1", "--parallelism.tp=1", "--parallelism.pp=1",
    "--parallelism.reshard_group_size=0", "--parallelism.local_steps=0", "--parallelism.cpu_offload=false",
    "--data.mask_documents=false", "--lr_scheduler.warmup_steps=1", "--checkpoint.enable=false",
    "--validation.enable=false", "--metrics.per_layer=false",
)  # fmt: skip


class Tolerance(NamedTuple):
    """How far a layout may be from the plain loop: relative to the loss, and to the norms of a gradient and of what
    the training has changed in a weight."""

    loss: float
    gradient: float
    weight: float


EXACT = Tolerance(1e-5, 1e-4, 1e-2)
ROUNDED = Tolerance(5e-4, 0.05, 0.2)  # in bfloat16 or float8, where ranks and microbatches round elsewhere


class Layout(NamedTuple):
    """Settings that change how a model is trained, and not what. `reference`: settings of the plain loop, too."""

    ranks: int
    words: tuple[str, ...] = ()
    reference: tuple[str, ...] = ()
    tolerance: Tolerance = EXACT
    batches: int = 1  # of a step, on each rank


BFLOAT16 = ("--training.param_dtype=bfloat16",)
FLOAT8 = ("--float8.enable=true", "--float8.filter=all", "--float8.fsdp_all_gather=off")
OWN_KERNELS = ("--float8.kernels=own",)
DOCUMENTS = ("--data.mask_documents=true",)
COMPILED = ("--compile.enable=true", "--compile.backend=aot_eager")
TP = ("--parallelism.tp=2",)
CP = ("--parallelism.cp=2",)
PP = ("--parallelism.pp=2", "--parallelism.pp_microbatch_size=2")
RING = (*CP, "--parallelism.cp_method=ring")
DDP = ("--parallelism.dp_replicate=2",)
LAYOUTS = {
    "one process": Layout(1, batches=2),
    "loss in chunks": Layout(1, ("--training.loss_chunks=4",)),
    "recomputed": Layout(1, ("--activation_checkpoint.mode=selective",)),
    "compiled": Layout(1, (*COMPILED, "--training.loss_chunks=4")),
    "documents": Layout(1, DOCUMENTS, DOCUMENTS),
    "bfloat16": Layout(1, BFLOAT16, BFLOAT16, ROUNDED),
    "float8": Layout(1, FLOAT8, FLOAT8, ROUNDED),
    "float8, own kernels": Layout(1, (*FLOAT8, *OWN_KERNELS), FLOAT8, ROUNDED),
    "DDP 2": Layout(2, DDP, batches=2),
    "FSDP 2": Layout(2, batches=2),
    "TP 2": Layout(2, TP),
    "CP 2": Layout(2, CP),
    "CP 2, ring": Layout(2, RING),
    "CP 2, documents": Layout(2, (*CP, *DOCUMENTS), DOCUMENTS),
    "PP 2": Layout(2, PP),
    "FSDP 2 x TP 2": Layout(4, TP),
}


class Opened(NamedTuple):
    """A config made small, with its model's family and shape."""

    config: Config
    spec: ModelSpec
    flavor: Any


class Trace(NamedTuple):
    """What a training computed: the initial weights, by step the loss with its other terms and the clipped gradients,
    and by how much the weights have changed in the end."""

    start: dict[str, Tensor]
    losses: list[list[float]]
    gradients: list[dict[str, Tensor]]
    changes: dict[str, Tensor]


# ---------------------------------------------------------------- a config made small


def open_small(words: Sequence[str], layout: Layout, shape: dict[str, Any]) -> Opened:
    """The config of a command line in a layout. `shape`: other fields of the model. Raises TitaniteError."""
    config = load_config([*words, *SMALL, *layout.words])
    size = SEQUENCES // (ParallelDims.from_config(config.parallelism, layout.ranks).dp * layout.batches)
    config = load_config([*words, *SMALL, *layout.words, f"--training.local_batch_size={size}"])
    config = settle_model(config)
    spec, flavor = find_model(config.model, VOCAB_SIZE)
    return Opened(config, spec, shrink(flavor, **shape))


def shrink(flavor: Any, **shape: Any) -> Any:
    """A model of the same kind in a few layers and heads: what is not a size stays."""
    sizes: dict[str, Any] = {"dim": 64, "n_layers": 4, "n_heads": 4, "n_kv_heads": 4, "head_dim": 16, "hidden_dim": 128}
    sizes["vocab_size"] = VOCAB_SIZE
    if getattr(flavor, "n_kv_heads", 1) < getattr(flavor, "n_heads", 1):
        sizes["n_kv_heads"] = 2
    if getattr(flavor, "windows", ()):
        sizes["windows"] = tuple(8 if window else 0 for window in flavor.windows)
    known = {field.name for field in dataclasses.fields(flavor)}
    own = {name: size for name, size in sizes.items() if name in known}
    return dataclasses.replace(flavor, **own | shape)


def steps_of(opened: Opened, dims: ParallelDims, rank: int) -> Iterator[list[Batch]]:
    """The microbatches of a rank, step by step."""
    config = opened.config
    own = dims.dp_rank(rank)
    size = config.training.local_batch_size
    used = SEQUENCES - SEQUENCES % (dims.dp * size)  # all ranks take as many microbatches
    for step in range(1, config.training.steps + 1):
        whole = random_batch(step, config.training.max_seq_len, config.data.mask_documents)
        firsts = range(own * size, used, dims.dp * size)
        yield [Batch._make(None if x is None else x[first : first + size] for x in whole) for first in firsts]


def random_batch(step: int, seq_len: int, documents: bool = False) -> Batch:
    """Of a step: some labels are not trained, unevenly over sequences. Documents end anywhere."""
    generator = torch.Generator().manual_seed(step)
    stream = torch.randint(0, VOCAB_SIZE, (SEQUENCES, seq_len + 1), generator=generator)
    labels = stream[:, 1:].clone()
    labels[: SEQUENCES // 3, : seq_len // 2 + step] = IGNORED
    if step == UNTRAINED:
        labels[:] = IGNORED
    if not documents:
        return Batch(stream[:, :-1], labels)
    starts = torch.rand(SEQUENCES, seq_len, generator=generator) < 0.15
    places = torch.arange(seq_len).expand(SEQUENCES, -1)
    return Batch(stream[:, :-1], labels, places - torch.where(starts, places, 0).cummax(dim=1).values)


# ---------------------------------------------------------------- the plain loop


def train_plainly(opened: Opened, device: torch.device) -> Trace:
    """Train in one process, all sequences of a step at once, each weight by an optimizer of its own."""
    config = opened.config
    training = config.training
    model = build_model(opened.spec, opened.flavor)
    if config.float8.enable:
        convert_to_float8(model, config.float8)
    init_weights(model, device, config.run.seed)
    weights = dict(model.named_parameters())
    start = {name: weight.detach().clone() for name, weight in weights.items()}
    optimizers = []
    for name, weight in weights.items():
        own = build_optimizer([_Alone(name, weight)], config.optimizer, None, None, training.param_dtype)
        own.fuses = False
        optimizers.append(own)
    trace = Trace({name: weight.cpu() for name, weight in start.items()}, [], [], {})
    one = ParallelDims(1, 1)
    whole = opened._replace(
        config=dataclasses.replace(config, training=dataclasses.replace(training, local_batch_size=SEQUENCES))
    )
    for step, (batch,) in enumerate(steps_of(whole, one, 0), start=1):
        tokens, labels, positions = batch.to(device)
        low = copy.deepcopy(model).to(getattr(torch, training.param_dtype))
        n_tokens = (labels != IGNORED).sum().clamp(min=1)
        terms = stack_terms(low(tokens, positions), labels, training.z_loss).reshape(-1) / n_tokens
        terms.sum().backward()
        for (name, weight), used in zip(weights.items(), low.parameters(), strict=True):
            assert used.grad is not None, f"{name} has no gradient"
            weight.grad = used.grad.to(weight.dtype)
        trace.losses.append(terms.tolist())
        if training.max_norm:
            nn.utils.clip_grad_norm_(weights.values(), training.max_norm)
        gradients = {name: weight.grad for name, weight in weights.items() if weight.grad is not None}
        trace.gradients.append({name: gradient.cpu().clone() for name, gradient in gradients.items()})
        lr = learning_rate(step, training.steps, config.optimizer.lr, config.lr_scheduler, SEQUENCES)
        for own in optimizers:
            set_learning_rate(own, lr)
            own.step()
    trace.changes.update({name: (weight.detach() - start[name]).cpu() for name, weight in weights.items()})
    return trace


class _Alone(nn.Module):
    """A weight under its name in the model."""

    def __init__(self, name: str, weight: nn.Parameter):
        super().__init__()
        self.named = [(name, weight)]

    def named_parameters(self, *_: Any, **__: Any) -> Iterator[tuple[str, nn.Parameter]]:
        return iter(self.named)


# ---------------------------------------------------------------- a layout


def start_in_layout(opened: Opened, device: torch.device) -> Trainer:
    """Check and build as train.py does, as a rank of a process group. Raises TitaniteError where a start refuses."""
    config, spec, flavor = opened
    dims = ParallelDims.from_config(config.parallelism, dist.get_world_size())
    check_float8(config)
    check_optim(config)
    spec.check_parallelism(flavor, config)
    model = build_model(spec, flavor)
    check_loss(config)
    spec.check_replacements(model, config, loss_chunks(config))
    if config.float8.enable:
        convert_to_float8(model, config.float8, dims.tp, dims.shards)
    trainer = Trainer(config, model, spec, flavor, dims, dims.build_mesh(device.type), device)
    trainer.begin()
    return trainer


def take_steps(opened: Opened, trainer: Trainer) -> Iterator[Computed]:
    """Take the steps of a training. Each is yielded before its update."""
    config = opened.config
    for step, batches in enumerate(steps_of(opened, trainer.dims, dist.get_rank()), start=1):
        computed = trainer.compute_gradients([batch.to(trainer.device) for batch in batches], measure=True)
        lr = learning_rate(step, config.training.steps, config.optimizer.lr, config.lr_scheduler, SEQUENCES)
        set_learning_rate(trainer.optimizer, lr)
        yield computed
        trainer.update()
        trainer.end_step(step)


def train_in_layout(opened: Opened, device: torch.device) -> Trace:
    """Train as a rank of a process group. Raises TitaniteError where a start refuses."""
    trainer = start_in_layout(opened, device)
    weights = {clean_name(name): weight for part in trainer.parts for name, weight in part.named_parameters()}
    trace = Trace({name: whole(weight) for name, weight in weights.items()}, [], [], {})
    for computed in take_steps(opened, trainer):
        trace.losses.append([computed.loss.item(), *(term.item() for term in computed.terms.values())])
        found = {name: weight.grad for name, weight in weights.items() if weight.grad is not None}
        trace.gradients.append({name: whole(gradient) for name, gradient in found.items()})
    trace.changes.update({name: whole(weight) - trace.start[name] for name, weight in weights.items()})
    return trace


def whole(x: Tensor) -> Tensor:
    """All of a tensor that ranks may share, on the host. Collective."""
    found = x.detach()
    return (found.full_tensor() if isinstance(found, DTensor) else found).cpu().clone()


LATER = 100  # how many times further gradients may be after the first step: AdamW makes steps of small roundings


def first_difference(found: Trace, plain: Trace, tolerance: Tolerance) -> str:
    """Where a training leaves the plain loop, in words; "" if it does not."""
    for name, weight in found.start.items():
        if not torch.equal(weight, plain.start[name]):
            return f"in the initial values of {name}"
    for step, (ours, theirs) in enumerate(zip(found.losses, plain.losses, strict=True), start=1):
        far = tolerance.gradient if step == 1 else LATER * tolerance.gradient
        expected = plain.gradients[step - 1]
        found_gradients = found.gradients[step - 1].items()
        gradients = [name for name, gradient in found_gradients if not near(gradient, expected[name], far)]
        # A pipeline has one term.
        pairs = zip(ours, theirs, strict=False)
        if gradients or not all(abs(a - b) <= tolerance.loss * abs(b) for a, b in pairs):
            first = f"; first the gradient of {gradients[0]}" if gradients else ""
            return f"from step {step}: loss {ours[0]:.7g}, plain {theirs[0]:.7g}{first}"
    for name, change in found.changes.items():
        if not near(change, plain.changes[name], tolerance.weight):
            return f"in what training changes in {name}"
    return ""


def near(found: Tensor, expected: Tensor, tolerance: float) -> bool:
    return bool((found - expected).norm() <= tolerance * expected.norm() + 1e-12)


# ---------------------------------------------------------------- ranks


class Verdict(NamedTuple):
    """Of a layout: "same", "differs", "refused" or "fails", and why."""

    kind: str
    why: str = ""


WORST_FIRST = ("fails", "differs", "refused", "same")
SILENT = ("differs", "fails")  # nothing would say so before the run is over, or it would say it in a traceback


def compare_layouts(words: Sequence[str], layouts: dict[str, Layout], **shape: Any) -> Iterator[tuple[str, Verdict]]:
    """Yield the verdict of each layout by its name. `shape`: fields of the small model. One start for all layouts."""
    context = multiprocessing.get_context("fork" if device_type() == "cpu" else "spawn")
    plain: dict[tuple[str, ...], Trace | Verdict] = {}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        # A process for each rank: torch remembers parts of tensors by the mesh, as if a process kept its place there.
        most = max((layout.ranks for layout in layouts.values()), default=0)
        pools = [ProcessPoolExecutor(1, context, begin_process) for _ in range(most)]
        for pool in pools:
            stack.enter_context(pool)
        for name, layout in layouts.items():
            if layout.reference not in plain:
                (plain[layout.reference],) = ask(pools[:1], reference, words, layout, shape)
            expected = plain[layout.reference]
            if isinstance(expected, Verdict):
                yield name, expected
                continue
            meeting = f"{folder}/{name}"
            verdicts = ask(pools[: layout.ranks], compare_as_rank, words, layout, shape, expected, meeting)
            yield name, min(verdicts, key=lambda verdict: WORST_FIRST.index(verdict.kind))


def begin_process() -> None:
    """Set up a process that will be a rank of one group after another."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    torch._logging.set_logs(distributed=logging.ERROR, all=logging.ERROR)
    if device_type() != "cpu":  # all ranks share the first one, which NCCL allows to those that name hosts of their own
        torch.accelerator.set_device_index(0)
        loopback = dict.fromkeys(("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"), "lo")
        os.environ.update(loopback, NCCL_IB_DISABLE="1", NCCL_HOSTID=f"host{os.getpid()}")


def ask(ranks: Sequence[ProcessPoolExecutor], function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """What `function(*arguments, rank)` returns in the process of each rank, or the verdict of how it ended."""
    try:
        futures = [pool.submit(attempt, function, *arguments, rank) for rank, pool in enumerate(ranks)]
        return [future.result() for future in futures]
    except BrokenProcessPool as error:  # such as by a segmentation fault; later layouts cannot be tried, either
        return [Verdict("fails", str(error))]


def attempt(function: Callable[..., Any], *arguments: Any) -> Any:
    """The function's result, or the verdict of its error. Leaves its process group."""
    try:
        return function(*arguments)
    except TitaniteError as error:
        return Verdict("refused", str(error))
    except Exception as error:  # whatever a fork's code may raise
        where = traceback.extract_tb(error.__traceback__)[-1]
        said = str(error).strip().partition("\n")[0]
        return Verdict("fails", f"{type(error).__name__}: {said} ({Path(where.filename).name}:{where.lineno})")
    finally:
        shut_down()


def reference(words: Sequence[str], layout: Layout, shape: dict[str, Any], rank: int) -> Trace:
    """What the plain loop computes for a layout."""
    return train_plainly(open_small(words, Layout(1, layout.reference), shape), torch.device(device_type()))


def compare_as_rank(
    words: Sequence[str], layout: Layout, shape: dict[str, Any], plain: Trace, meeting: str, rank: int
) -> Verdict:
    """Train in a layout as one of its ranks, which find each other by the file `meeting`."""
    torch._dynamo.reset()  # a rank of a real run compiles for one model
    opened = open_small(words, layout, shape)
    device = torch.device(device_type())
    backend = "gloo" if device.type == "cpu" else f"cpu:gloo,{device.type}:nccl"
    dist.init_process_group(
        backend, init_method=f"file://{meeting}", rank=rank, world_size=layout.ranks,
        timeout=timedelta(seconds=TIMEOUT_SECONDS),
    )  # fmt: skip
    difference = first_difference(train_in_layout(opened, device), plain, layout.tolerance)
    dist.barrier()
    return Verdict("differs", difference) if difference else Verdict("same")


def main(argv: list[str]) -> int:
    """The command line. Raises TitaniteError."""
    about = (
        "Compare each layout's training of a config's model, made small, with a plain loop. Other options: settings."
    )
    parser = argparse.ArgumentParser(prog="python -m tools.same", allow_abbrev=False, description=about)
    parser.add_argument("config", metavar="CONFIG", help="TOML file")
    parser.add_argument(
        "--layouts", nargs="+", default=list(LAYOUTS), metavar="NAME", help=f"of {', '.join(LAYOUTS)}; default: all"
    )
    arguments, rest = parser.parse_known_args(argv)
    for name in arguments.layouts:
        if name not in LAYOUTS:
            raise ConfigError(f"--layouts {name!r}: must be of {', '.join(LAYOUTS)}")
    words = [f"--config={arguments.config}", *rest]
    opened = open_small(words, LAYOUTS["one process"], {})
    print(f"{STEPS} steps of {SEQUENCES} x {SEQ_LEN} random tokens, against a plain loop in one process")
    print(f"model: {opened.flavor}")
    begin = time.monotonic()
    silent = []
    chosen = {name: LAYOUTS[name] for name in LAYOUTS if name in arguments.layouts}
    for name, verdict in compare_layouts(words, chosen):
        if verdict.kind in SILENT:
            silent.append(name)
        why = verdict.why
        if verdict.kind == "same":
            why = f"losses within {chosen[name].tolerance.loss:g}, gradients {chosen[name].tolerance.gradient:g}"
        print(f"{name:<20} {verdict.kind:<8} {why}", flush=True)
    print(
        f"{len(chosen) - len(silent)} of {len(chosen)} are the same or say why not, in {time.monotonic() - begin:.0f} s"
    )
    return int(bool(silent))


if __name__ == "__main__":
    with command_line():
        sys.exit(main(sys.argv[1:]))
