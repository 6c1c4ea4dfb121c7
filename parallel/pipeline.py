"""Pipeline parallelism: consecutive layers on different ranks, with microbatches in flight between them.

The schedules are torch's: 1F1B and its interleaved form (Narayanan et al. 2021).
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class

from config import Config, ConfigError, Parallelism
from parallel.fsdp import set_last_microbatch
from parallel.mesh import Mesh

LossFn = Callable[[Tensor, Tensor], Tensor]  # (logits, labels) → summed loss
ChunkedLoss = Callable[..., Tensor]  # (labels, what makes logits, hidden states, output weight) → summed loss


class Compute(NamedTuple):
    """What a rank does with one microbatch of tokens [B, S], labels [B, S] and positions [B, S] or None.

    forward_backward(tokens, labels, positions, n_tokens, is_last) adds to the gradients and returns the loss, or its
    terms, divided by `n_tokens`. After the step's last microbatch the gradients are summed over all ranks.
    forward(tokens, labels, positions) returns the summed loss. Both losses are 0 on a rank without the last layer.
    """

    forward_backward: Callable[[Tensor, Tensor, Tensor | None, Tensor, bool], Tensor]
    forward: Callable[[Tensor, Tensor, Tensor | None], Tensor]


def build_compute(
    parts: list[nn.Module],
    loss_fn: LossFn,
    flavor: Any,
    mesh: Mesh,
    config: Config,
    chunked_loss: ChunkedLoss | None = None,
) -> Compute:
    """Build the computation of the whole model, or of the pipeline stages `parts`.

    `flavor` has the model's `dim` and `vocab_size`. With `chunked_loss` the whole model computes that, not logits.
    """
    if mesh.pp.size() > 1:
        return _build_pipeline(parts, loss_fn, flavor, mesh, config)
    (model,) = parts

    def forward(tokens: Tensor, labels: Tensor, positions: Tensor | None) -> Tensor:
        if chunked_loss is None:
            return loss_fn(model(tokens, positions), labels)
        return model(tokens, positions, loss=partial(chunked_loss, labels))

    def forward_backward(
        tokens: Tensor, labels: Tensor, positions: Tensor | None, n_tokens: Tensor, is_last: bool
    ) -> Tensor:
        set_last_microbatch(model, is_last, mesh.fsdp, config.parallelism)
        # Divided by the tokens of the whole step, so that the update does not depend on how they are split.
        terms = forward(tokens, labels, positions) / n_tokens
        terms.sum().backward()
        return terms.detach()

    return Compute(forward_backward, forward)


def _build_pipeline(parts: list[nn.Module], loss_fn: LossFn, flavor: Any, mesh: Mesh, config: Config) -> Compute:
    stages = _build_stages(parts, flavor, mesh, config)
    device = stages[0].device
    divisor = torch.ones((), device=device)  # read by the loss, which the schedule calls with two arguments
    kind = get_schedule_class(config.parallelism.pp_schedule)

    def mean_loss(output: Tensor, labels: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            stages[-1].forget_outputs()
        return loss_fn(output, labels) / divisor

    run_by: Any = stages if len(stages) > 1 else stages[0]
    schedule = kind(
        run_by,
        config.training.local_batch_size // config.parallelism.pp_microbatch_size,
        loss_fn=mean_loss,
        scale_grads=False,
    )

    def run(action: Callable[..., object], tokens: Tensor, labels: Tensor, positions: Tensor | None) -> Tensor:
        inputs = [tokens.contiguous()] if stages[0].is_first else []  # torch 2.11 takes no other strides
        kwargs = {} if positions is None else {"positions_BS": positions}
        losses: list[Tensor] = []
        action(*inputs, target=labels, losses=losses, **kwargs)
        if not losses:  # without the last layer
            return torch.zeros((), device=device)
        return torch.stack(losses).sum()

    def forward(tokens: Tensor, labels: Tensor, positions: Tensor | None) -> Tensor:
        divisor.fill_(1)
        return run(partial(schedule.eval, return_outputs=False), tokens, labels, positions)

    def forward_backward(
        tokens: Tensor, labels: Tensor, positions: Tensor | None, n_tokens: Tensor, is_last: bool
    ) -> Tensor:
        divisor.copy_(n_tokens)
        for stage in stages:
            stage.is_last_batch = is_last
        return run(partial(schedule.step, return_outputs=False), tokens, labels, positions).detach()

    return Compute(forward_backward, forward)


def _build_stages(parts: list[nn.Module], flavor: Any, mesh: Mesh, config: Config) -> list["_Stage"]:
    """This rank's stages, with shapes, which the first step would otherwise find by an extra forward and backward."""
    settings, training = config.parallelism, config.training
    device = torch.device(mesh.pp.device_type)
    if device.type != "cpu":
        device = torch.device(device.type, torch.accelerator.current_device_index())
    size = settings.pp_microbatch_size
    length = training.max_seq_len // mesh.cp.size()
    tp = mesh.tp.size()
    hidden_shape = [size, length, flavor.dim]
    if tp > 1:  # which cuts the tokens of all sequences, in one row
        hidden_shape = [size * length // tp, flavor.dim]
    dtype = getattr(torch, training.param_dtype)
    tokens = torch.empty(size, training.max_seq_len, dtype=torch.int64, device="meta")
    hidden = torch.empty(hidden_shape, dtype=dtype, device="meta", requires_grad=True)
    scores = torch.empty(size, length, flavor.vocab_size // tp, dtype=dtype, device="meta", requires_grad=True)
    n_stages = mesh.pp.size() * len(parts)
    stages = []
    for part, i in zip(parts, stages_of_rank(mesh.pp.get_local_rank(), settings), strict=True):
        inputs = tokens if i == 0 else hidden
        outputs = scores if i == n_stages - 1 else hidden
        stages.append(_Stage(part, i, n_stages, device, inputs, outputs, group=mesh.pp.get_group()))
    return stages


class _Stage(PipelineStage):
    """torch's stage, with gradients summed over ranks once per step of several batches."""

    is_last_batch = True

    def forget_outputs(self) -> None:
        """Drop a forward's logits. The schedule would keep them to the end of the batch, where nothing reads them."""
        self.fwd_cache.update(dict.fromkeys(self.fwd_cache, ((), [])))

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        # Sums over shards and replicas. Until then gradients stay whole, as within a batch.
        if self.is_last_batch:
            super().perform_reduce_grad(grad_scale_factor)


def stages_of_rank(rank: int, settings: Parallelism) -> list[int]:
    """Numbers of the stages that a rank of the pipeline holds. They are assigned round-robin."""
    per_rank = 1 if settings.pp_schedule == "1F1B" else settings.pp_stages_per_rank
    return list(range(rank, settings.pp * per_rank, settings.pp))


def layers_of_stages(n_layers: int, n_stages: int) -> list[range]:
    """The layers of each stage, as evenly as possible. The ends, which have embedding and output, get the fewer."""
    least, more = divmod(n_layers, n_stages)
    # The stages nearest to the middle get one layer more.
    middle = sorted(range(n_stages), key=lambda stage: abs(2 * stage - n_stages + 1))[:more]
    layers = []
    start = 0
    for stage in range(n_stages):
        end = start + least + (stage in middle)
        layers.append(range(start, end))
        start = end
    return layers


def check_pipeline(config: Config, n_layers: int) -> None:
    """Raises ConfigError if the batch or the layers do not fit the pipeline."""
    settings = config.parallelism
    batch = config.training.local_batch_size
    if settings.pp == 1:
        return
    if len(config.training.seq_lens) > 1:
        needed = f"must be one with parallelism.pp = {settings.pp}, whose stages have fixed shapes"
        raise ConfigError(f"training.seq_len = {config.training.seq_len}: {needed}")
    n_stages = settings.pp * len(stages_of_rank(0, settings))
    if n_layers < n_stages:
        raise ConfigError(f"parallelism.pp = {settings.pp}: n_layers = {n_layers} are too few for {n_stages} stages")
    microbatches, rest = divmod(batch, settings.pp_microbatch_size)
    in_turns = settings.pp_schedule != "1F1B"
    if rest or microbatches < settings.pp or (in_turns and microbatches % settings.pp):
        raise ConfigError(
            f"training.local_batch_size / parallelism.pp_microbatch_size = {batch} / {settings.pp_microbatch_size}: "
            f"must be a whole number, at least parallelism.pp = {settings.pp}; with Interleaved1F1B a multiple of it"
        )
