"""Training in this process by torch alone, and the same by train.py's parts on many ranks: for parity tests."""

import dataclasses
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor import DTensor

from config import ActivationCheckpoint, Compile, Config, Data, Optimizer, Parallelism, Training
from float8.convert import convert_to_float8
from loss import IGNORED, build_chunked_loss, build_loss
from models import build_model, find_model
from models.init import init_weights
from models.llama.model import Llama, LlamaConfig
from models.weights import build_refresh
from optim import build_optimizer, clip_grad_norm_
from parallel.fsdp import reshard
from parallel.mesh import ParallelDims
from parallel.pipeline import build_step

VOCAB, SEQ_LEN, GLOBAL_BATCH = 256, 32, 16
FLAVOR = LlamaConfig(dim=64, n_layers=3, n_heads=4, n_kv_heads=2, hidden_dim=112, vocab_size=VOCAB)
LR, MAX_NORM = 3e-3, 0.5


def step_data(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and labels of a global batch; some labels are not trained, unevenly over the samples."""
    generator = torch.Generator().manual_seed(100 + step)
    stream = torch.randint(0, VOCAB, (GLOBAL_BATCH, SEQ_LEN + 1), generator=generator)
    tokens, labels = stream[:, :-1], stream[:, 1:].clone()
    labels[: GLOBAL_BATCH // 3, : SEQ_LEN // 2] = IGNORED
    return tokens, labels


def step_positions(step: int) -> torch.Tensor:
    """Places in documents whose ends fall anywhere."""
    generator = torch.Generator().manual_seed(200 + step)
    starts = torch.rand(GLOBAL_BATCH, SEQ_LEN, generator=generator) < 0.15
    places = torch.arange(SEQ_LEN).expand(GLOBAL_BATCH, -1)
    first = torch.where(starts, places, 0).cummax(dim=1).values
    return places - first


def plain_run(steps: int, documents: bool = False, **model_options: Any) -> dict[str, Any]:
    """The same training by torch alone: no sharding, no accumulation, no fused kernels."""
    model = Llama(dataclasses.replace(FLAVOR, **model_options))
    init_weights(model, torch.device("cpu"), seed=0)
    init = {n: p.detach().clone() for n, p in model.named_parameters()}
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed}, {"params": others, "weight_decay": 0.0}],
        lr=LR, betas=(0.9, 0.95), weight_decay=0.1, foreach=False, fused=False,
    )  # fmt: skip
    result: dict[str, Any] = {"init": init, "losses": [], "norms": []}
    for step in range(steps):
        tokens, labels = step_data(step)
        logits = model(tokens, step_positions(step) if documents else None)
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)
        loss.backward()
        if step == 0:
            result["grads"] = {n: p.grad.clone() for n, p in model.named_parameters()}
        result["norms"].append(torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item())
        optimizer.step()
        optimizer.zero_grad()
        result["losses"].append(loss.item())
    result["weights"] = {n: p.detach() for n, p in model.named_parameters()}
    return result


def whole(x: torch.Tensor) -> torch.Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def our_run(config: Config, steps: int, accumulation: int, **model_options: Any) -> dict[str, Any]:
    """The step of train.py on this rank."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    dims = ParallelDims.from_config(config.parallelism, world_size)
    spec, _ = find_model(config.model, VOCAB)
    flavor = dataclasses.replace(FLAVOR, **model_options)
    spec.check_parallelism(flavor, config)
    mesh = dims.build_mesh("cpu")
    model = build_model(spec, flavor)
    if config.float8.enable:
        convert_to_float8(model, config.float8, dims.tp, dims.shards)
    parts = spec.apply_parallelism(model, mesh, config)
    for part in parts:
        init_weights(part, torch.device("cpu"), seed=0)
    result: dict[str, Any] = {"init": {n: whole(p).detach().clone() for n, p in named_parameters(parts)}}
    refresh_weights = build_refresh(parts, config)
    refresh_weights()
    optimizer = build_optimizer(parts, config.optimizer, config.compile)
    chunks = config.training.loss_chunks
    chunked = build_chunked_loss(config.compile, mesh, chunks) if chunks > 1 else None
    compute = build_step(parts, build_loss(config.compile, mesh), FLAVOR.dim, VOCAB, mesh, config, chunked)
    result |= {"losses": [], "norms": []}
    local = GLOBAL_BATCH // accumulation // dims.dp
    for step in range(steps):
        tokens, labels = step_data(step)
        positions = step_positions(step) if config.data.mask_documents else None
        n_tokens = (labels != IGNORED).sum()
        total = torch.zeros(())
        for i in range(accumulation):
            first = (i * dims.dp + dims.dp_rank(rank)) * local
            batch = [None if x is None else x[first : first + local] for x in (tokens, labels, positions)]
            total += compute.forward_backward(*batch, n_tokens, i == accumulation - 1) / dims.tp
        dist.all_reduce(total)
        if step == 0:
            result["grads"] = {n: whole(p.grad).clone() for n, p in named_parameters(parts)}
        parameters = [p for _, p in named_parameters(parts)]
        result["norms"].append(clip_grad_norm_(parameters, MAX_NORM, mesh.pp).item())
        optimizer.step()
        refresh_weights()
        optimizer.zero_grad()
        result["losses"].append(total.item())
    with torch.no_grad():  # as validation does: a forward without a backward
        tokens, labels = step_data(0)
        compute.forward(tokens[:local], labels[:local], None)
    reshard(parts)
    result["weights"] = {n: whole(p).detach().clone() for n, p in named_parameters(parts)}
    return result


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
    **parallelism: Any,
) -> Config:
    return Config(
        data=Data(mask_documents=documents),
        training=Training(
            param_dtype="float32", seq_len=SEQ_LEN, local_batch_size=local_batch_size, loss_chunks=loss_chunks
        ),
        optimizer=Optimizer(lr=LR),
        parallelism=Parallelism(dp_replicate=dp_replicate, dp_shard=dp_shard, **parallelism),
        compile=Compile(enable=bool(compile), backend=compile or "inductor"),
        activation_checkpoint=ActivationCheckpoint(mode=mode),
    )


def close(actual: dict[str, Any], expected: dict[str, Any], loss_tolerance: float) -> None:
    torch.testing.assert_close(actual["losses"], expected["losses"], rtol=loss_tolerance, atol=0)
    torch.testing.assert_close(actual["norms"], expected["norms"], rtol=100 * loss_tolerance, atol=0)
    for name, grad in actual["grads"].items():
        scale = expected["grads"][name].abs().max().item()
        torch.testing.assert_close(grad, expected["grads"][name], rtol=0, atol=10 * loss_tolerance * scale, msg=name)
