"""A run of train.py on the batches made here, and the same training by torch alone: for parity tests."""

import contextlib
import copy
import dataclasses
import functools
import gc
import json
import math
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor import DTensor

import start
import train
from config import (
    ActivationCheckpoint,
    Checkpoint,
    Compile,
    Config,
    Data,
    Float8,
    LRScheduler,
    Metrics,
    Optimizer,
    Parallelism,
    Training,
    Validation,
)
from data.loader import Batch
from loss import IGNORED
from models import find_model
from models.init import init_weights
from models.llama.model import Llama, LlamaConfig
from optim import build_optimizer, clip_grad_norm_
from parallel.fsdp import reshard
from run.processes import from_rank_0
from tests.harness import run_ranks

VOCAB = 256
SEQ_LEN = 32
GLOBAL_BATCH = 16
FLAVOR = LlamaConfig(dim=64, n_layers=2, n_heads=4, n_kv_heads=2, hidden_dim=112, vocab_size=VOCAB)
LR = 3e-3
MAX_NORM = 0.5
SEED = 7
STEPS = 5  # that parity tests compare
UNTRAINED = 4  # the step of whose labels none is trained
VALIDATION_INTERVAL = 3
HELD_OUT = 1000  # the step whose data is held out
CPU = torch.device("cpu")
EXACT = (1e-6, 1e-5)  # tolerances of losses and of gradients


def step_data(step: int, seq_len: int = SEQ_LEN) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and labels of a global batch. Some are not trained, unevenly over samples and steps; UNTRAINED: none."""
    generator = torch.Generator().manual_seed(100 + step)
    stream = torch.randint(0, VOCAB, (GLOBAL_BATCH, seq_len + 1), generator=generator)
    tokens = stream[:, :-1]
    labels = stream[:, 1:].clone()
    labels[: GLOBAL_BATCH // 3, : seq_len // 2 + step % 8] = IGNORED
    if step == UNTRAINED:
        labels[:] = IGNORED
    return tokens, labels


def step_positions(step: int, seq_len: int = SEQ_LEN) -> torch.Tensor:
    """Places in documents whose ends fall anywhere."""
    generator = torch.Generator().manual_seed(200 + step)
    starts = torch.rand(GLOBAL_BATCH, seq_len, generator=generator) < 0.15
    places = torch.arange(seq_len).expand(GLOBAL_BATCH, -1)
    first = torch.where(starts, places, 0).cummax(dim=1).values
    return places - first


@functools.cache  # what compares with it changes nothing of it
def plain_run(
    steps: int,
    documents: bool = False,
    dtype: torch.dtype = torch.float32,
    pieces: int = 1,
    sum_dtype: torch.dtype = torch.float32,
    muon: bool = False,
    z_loss: float = 0.0,
    device: str = "cpu",
    home: str = "",
    seq_len: int = SEQ_LEN,
    **model_options: Any,
) -> dict[str, Any]:
    """The same training by torch alone: no sharding, no fused kernels, weights in float32.

    Forward and backward are in `dtype`, of one of `pieces` of the batch at a time, whose gradients are summed in
    `sum_dtype`. UNTRAINED has a gradient of 0 and no loss. With `muon` the matrices of
    the layers have torch's Muon, which on CPU works in `dtype`. With `z_loss` that times the squares of all
    log-sum-exps is trained, too. The weights are drawn on `home`, by default on `device`. Losses and norms are by step,
    as a run counts them.
    """
    model = Llama(dataclasses.replace(FLAVOR, **model_options))
    init_weights(model, torch.device(home or device), seed=SEED)
    model.to(device)
    weights = dict(model.named_parameters())
    matrices = {n: p for n, p in weights.items() if muon and n.startswith("layers.") and p.ndim > 1}
    groups = [
        {"params": [p for n, p in weights.items() if p.ndim > 1 and n not in matrices]},
        {"params": [p for p in weights.values() if p.ndim <= 1], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95), weight_decay=0.1, foreach=False, fused=False)
    optimizers: list[Any] = [adamw]
    if muon:
        optimizers.append(torch.optim.Muon(matrices.values(), lr=LR, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"))

    def summed_loss(low: Llama, step: int, rows: slice = slice(None)) -> torch.Tensor:  # the cross-entropy, z
        given = *step_data(step, seq_len), step_positions(step, seq_len)
        tokens, labels, positions = (x[rows].to(device) for x in given)
        logits = low(tokens, positions if documents else None).flatten(0, 1).float()
        squares = logits[labels.flatten() != IGNORED].exp().sum(1).log().square().sum()
        return torch.stack((F.cross_entropy(logits, labels.flatten(), reduction="sum"), z_loss * squares))

    init = {n: p.detach().clone() for n, p in weights.items()}
    result: dict[str, Any] = {"init": init, "losses": {}, "z_losses": {}, "norms": {}, "validation_losses": {}}
    result["layers"] = {}
    for step in range(1, steps + 1):
        n_tokens = int((step_data(step, seq_len)[1] != IGNORED).sum())
        loss = torch.zeros((), device=device)
        for rows in torch.arange(GLOBAL_BATCH).chunk(pieces):
            low = copy.deepcopy(model).to(dtype)
            piece = summed_loss(low, step, slice(int(rows[0]), int(rows[-1]) + 1)) / max(n_tokens, 1)
            piece.sum().backward()
            loss = loss + piece.detach()
            for name, copied in low.named_parameters():
                assert copied.grad is not None
                total = copied.grad.to(sum_dtype)
                if weights[name].grad is not None:
                    total += weights[name].grad.to(sum_dtype)
                weights[name].grad = total.float()
        if step == 1:
            result["grads"] = {n: p.grad.clone() for n, p in weights.items()}
        norm = torch.cat([p.grad.double().flatten() for p in weights.values()]).norm().item()
        layers = result["layers"][step] = {f"grad_norm/{layer}": n for layer, n in layer_norms(weights, "grad")}
        before = copy.deepcopy(weights)
        for p in weights.values():
            p.grad *= MAX_NORM / max(norm, MAX_NORM)
        result["norms"][step] = norm
        if n_tokens:
            result["losses"][step], result["z_losses"][step] = loss.tolist()
        in_float32: Any = contextlib.nullcontext()
        if device == "cpu" and dtype is torch.float32:
            in_float32 = mock.patch.object(torch.Tensor, "bfloat16", torch.Tensor.clone)  # which Muon calls
        with in_float32:
            for optimizer in optimizers:
                optimizer.step()
        model.zero_grad()
        layers.update({f"weight_norm/{layer}": n for layer, n in layer_norms(weights)})
        change = {n: p - before[n] for n, p in weights.items()}
        layers.update({f"update_norm/{layer}": n for layer, n in layer_norms(change)})
        with torch.no_grad():
            held_out_tokens = (step_data(HELD_OUT, seq_len)[1] != IGNORED).sum()
            loss = summed_loss(copy.deepcopy(model).to(dtype), HELD_OUT) / held_out_tokens
        result["validation_losses"][step] = loss[0].item()
    result["weights"] = {n: p.detach() for n, p in weights.items()}
    return result


def layer_norms(tensors: dict[str, torch.Tensor], field: str = "data") -> Iterator[tuple[str, float]]:
    """(layer, norm) of the tensors of each layer, or of their gradients."""
    for layer in dict.fromkeys(re.sub(r"(layers\.\d+|^\w+)\..*", r"\1", name) for name in tensors):
        own = [getattr(x, field).double().flatten() for name, x in tensors.items() if name.startswith(f"{layer}.")]
        yield layer, torch.cat(own).norm().item()


def whole(x: torch.Tensor) -> torch.Tensor:
    return (x.full_tensor() if isinstance(x, DTensor) else x).cpu()


class Batches:
    """Stands in for the data loader of train.py: `step_data`, whatever the ranks and microbatches."""

    wait_seconds = 0.0
    vocab_size = VOCAB
    is_chat = False

    def __init__(self, config: Config, dp_rank: int, dp_size: int, pin_memory: bool = False):
        self.config = config
        self.dp_rank = dp_rank
        self.dp_size = dp_size
        self.step = 0
        self.tokens_per_step = config.training.global_batch_size * config.training.seq_len
        self.seq_len = config.training.seq_len
        self.check_ranks = self.check_run = self.check_position = mock.Mock()
        self.describe = self.open_ledger = self.close = mock.Mock()
        self.tokenizer = mock.Mock(byte_lengths=np.zeros(VOCAB))

    def rows_of(self, step: int) -> Iterator[Batch]:
        training = self.config.training
        size = training.local_batch_size
        documents = step_positions(step, training.seq_len) if self.config.data.mask_documents else None
        for first in range(self.dp_rank * size, training.global_batch_size, self.dp_size * size):
            whole_batch = *step_data(step, training.seq_len), documents
            own = [None if x is None else x[first : first + size] for x in whole_batch]
            yield Batch._make(own)

    def settle(self, config: Config) -> Config:
        return config

    def next_step(self) -> list[Batch]:
        self.step += 1
        return list(self.rows_of(self.step))

    @property
    def tokens_seen(self) -> int:
        return self.step * self.tokens_per_step

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]


def our_run(
    config: Config,
    steps: int,
    accumulation: int,
    folder: Path | None = None,
    device: torch.device = CPU,
    **model_options: Any,
) -> dict[str, Any]:
    """`steps` steps of train.py on this rank of a process group, and what it wrote into its metrics.

    Only what is outside the training is replaced: the data and the model's shape. Beside the
    metrics: the weights at the start and the end, and the first step's gradients, before they are clipped. The run's
    folder is `run` in `folder`, which stays if it is given.
    """
    dp_size = train.ParallelDims.from_config(config.parallelism, dist.get_world_size()).dp
    local = GLOBAL_BATCH // accumulation // dp_size
    batch = {"local_batch_size": local, "global_batch_size": local * dp_size * accumulation}
    outputs = folder or Path(from_rank_0(tempfile.mkdtemp))
    config = dataclasses.replace(
        config,
        run=dataclasses.replace(config.run, folder=str(outputs / "run"), seed=SEED),
        training=dataclasses.replace(config.training, steps=steps, max_norm=MAX_NORM, **batch),
    )
    parts: list[torch.nn.Module] = []
    result: dict[str, Any] = {}

    def build_watched_optimizer(built: list[torch.nn.Module], *args: Any) -> torch.optim.Optimizer:
        parts.extend(built)
        result["init"] = {n: whole(p).detach().clone() for n, p in named_parameters(parts)}
        return build_optimizer(built, *args)

    def clip_watched(*args: Any) -> torch.Tensor:
        if "grads" not in result:
            named = {n: p.grad for n, p in named_parameters(parts) if p.grad is not None}
            result["grads"] = {n: whole(grad).clone() for n, grad in named.items()}
        return clip_grad_norm_(*args)

    def held_out(config: Config, dp_rank: int, dp_size: int, *_: Any) -> Iterator[Batch]:
        return Batches(config, dp_rank, dp_size).rows_of(HELD_OUT)

    with (
        mock.patch.multiple(
            start,
            DataLoader=Batches,
            find_model=lambda model, _: (find_model(model, VOCAB)[0], dataclasses.replace(FLAVOR, **model_options)),
        ),
        mock.patch.multiple(train, build_optimizer=build_watched_optimizer, clip_grad_norm_=clip_watched),
        mock.patch("run.run.init_distributed", return_value=device),
        mock.patch("validate.validation_batches", held_out),
    ):
        train.train(config)
    gc.enable()
    reshard(parts)
    result["weights"] = {n: whole(p).detach().clone() for n, p in named_parameters(parts)}
    dist.barrier()  # rank 0 writes the metrics
    rows = [json.loads(line) for line in (outputs / "run" / "metrics.jsonl").read_text().splitlines()]
    dist.barrier()
    if dist.get_rank() == 0 and folder is None:
        shutil.rmtree(outputs)
    result["rows"] = [row for row in rows if row["loss"] is not None]
    result["losses"] = {row["step"]: row["loss"] for row in result["rows"]}
    result["norms"] = {row["step"]: row["grad_norm"] for row in result["rows"]}
    held = {row["step"]: row["validation_loss"] for row in rows if row["validation_loss"] is not None}
    return result | {"validation_losses": held, "steps": steps}


def named_parameters(parts: list[torch.nn.Module]) -> list[tuple[str, torch.nn.Parameter]]:
    return [pair for part in parts for pair in part.named_parameters()]


def config_for(
    dp_replicate: int,
    dp_shard: int,
    compile: str = "",
    mode: str = "none",
    local_batch_size: int = 8,
    documents: bool = False,
    loss_chunks: int = 1,
    param_dtype: str = "float32",
    z_loss: float = 0.0,
    optimizer: str = "adamw",
    float8: Float8 | None = None,
    seq_len: int = SEQ_LEN,
    **parallelism: Any,
) -> Config:
    return Config(
        data=Data(mask_documents=documents),
        metrics=Metrics(log_interval=1, log_ranks=(), tensorboard=False, per_layer=True),
        validation=Validation(interval=VALIDATION_INTERVAL),
        checkpoint=Checkpoint(enable=False),
        lr_scheduler=LRScheduler(warmup_steps=0, decay_fraction=0.0),
        training=Training(
            param_dtype=param_dtype,
            seq_len=seq_len,
            local_batch_size=local_batch_size,
            loss_chunks=loss_chunks,
            z_loss=z_loss,
        ),
        optimizer=Optimizer(lr=LR, name=optimizer),  # type: ignore[arg-type]
        parallelism=Parallelism(dp_replicate=dp_replicate, dp_shard=dp_shard, **parallelism),
        compile=Compile(enable=bool(compile), backend=compile or "inductor"),
        activation_checkpoint=ActivationCheckpoint(mode=mode),
        float8=float8 or Float8(),
    )


def close(
    actual: dict[str, Any],
    expected: dict[str, Any],
    loss_tolerance: float = 1e-6,
    grad_tolerance: float | None = None,
) -> None:
    """A run against `plain_run`: its losses and norms, the first step's gradients, the weights at the end.

    The initial weights must be equal bit for bit.
    """
    every = range(VALIDATION_INTERVAL, actual["steps"], VALIDATION_INTERVAL)
    assert actual["validation_losses"].keys() == {*every, actual["steps"]}
    assert actual["losses"].keys() == expected["losses"].keys()
    for key, tolerance in (("losses", 1), ("validation_losses", 1), ("norms", 100)):
        plain = {step: expected[key][step] for step in actual[key]}
        assert actual[key] == pytest.approx(plain, rel=tolerance * loss_tolerance, abs=0), key
    for row in actual["rows"]:
        layers = {name: value for name, value in row.items() if "_norm/" in name}
        assert layers == pytest.approx(expected["layers"][row["step"]], rel=100 * loss_tolerance), row["step"]
    for name, grad in actual["grads"].items():
        atol = (grad_tolerance or 10 * loss_tolerance) * expected["grads"][name].abs().max().item()
        torch.testing.assert_close(grad, expected["grads"][name], rtol=0, atol=atol, msg=name)
    for name, weight in actual["weights"].items():
        assert torch.equal(actual["init"][name], expected["init"][name]), name
        # As a whole: AdamW turns the rounding of a gradient near zero into a step of its own.
        assert (weight - expected["weights"][name]).norm() < 1e3 * loss_tolerance * weight.norm(), name


Case = tuple[Config, dict[str, Any], tuple[float, float], int]


def case(
    plain: dict[str, Any] | None = None,
    tolerances: tuple[float, float] = EXACT,
    batches: int = 1,
    dp_replicate: int = 1,
    dp_shard: int = 1,
    **options: Any,
) -> Case:
    """A run, what the plain loop needs for the same, tolerances, batches of a step."""
    return config_for(dp_replicate, dp_shard, **options), plain or {}, tolerances, batches


def compare(config: Config, plain: dict[str, Any], tolerances: tuple[float, float], batches: int) -> None:
    """A run on forked ranks against a plain loop. Every parameter has a gradient on some rank. A z-loss is logged."""
    settings = config.parallelism
    world_size = math.prod((settings.dp_replicate, settings.dp_shard, settings.cp, settings.tp, settings.pp))
    model = {key: value for key, value in plain.items() if hasattr(FLAVOR, key)}
    expected = plain_run(STEPS, **plain)
    seen = set[str]()
    for result in run_ranks(world_size, functools.partial(our_run, **model), config, STEPS, batches):
        close(result, expected, *tolerances)
        seen |= result["grads"].keys()
        if "z_loss" in plain:
            logged = {row["step"]: row["z_loss"] for row in result["rows"]}
            assert logged == pytest.approx(expected["z_losses"], rel=1e-5)
    assert seen == expected["grads"].keys()
