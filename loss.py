"""The training loss."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import config as settings
from config import Config, ConfigError
from data.loader import IGNORED
from parallel.activation_checkpoint import exempt_from_budget
from parallel.context import local_indices
from parallel.gradients import build_add, compile_each_shape
from parallel.mesh import Mesh, ParallelDims
from parallel.stand_ins import check_stand_in, numbers
from parallel.tensor import vocab_parallel_cross_entropy


def loss_chunks(config: Config) -> int:
    """Number of pieces in which the loss is computed. Raises ConfigError if it cannot be computed in pieces."""
    chunks = config.training.loss_chunks
    is_split = config.parallelism.tp > 1 or config.parallelism.pp > 1
    if chunks > 1 and is_split:
        raise ConfigError(f"training.loss_chunks = {chunks}: needs parallelism.tp = 1 and pp = 1")
    if chunks == 0:
        chunks = 1 if is_split else 4
    return chunks


def check_loss(config: Config) -> None:
    """Refuse terms that a pipeline cannot train, and an edited loss that tp would ignore. Raises ConfigError."""
    parallelism = config.parallelism
    names = term_names(config.training.z_loss)
    if names and parallelism.pp > 1:
        raise ConfigError(f"parallelism.pp = {parallelism.pp}: the loss has {', '.join(names)}, which needs pp = 1")
    if parallelism.tp > 1:
        _check_split_loss(config.training.z_loss)


def _check_split_loss(z_loss: float) -> None:
    """Raises ConfigError if the loss of whole logits is not what tp computes of split ones."""
    labels = torch.arange(24).view(2, 12)
    labels[0, :5] = IGNORED
    whole = partial(stack_terms, labels_BS=labels, z_loss=z_loss)
    split = partial(vocab_parallel_cross_entropy, labels_BS=labels, mesh=None, ignored=IGNORED, z_loss=z_loss)
    name = "parallel.tensor.vocab_parallel_cross_entropy"
    check_stand_in("loss.stack_terms", _sum(whole), _sum(split), [3 * numbers(2, 12, 24)], name, "parallelism.tp = 1")


def _sum(terms: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """All terms and their sum, which alone has a gradient."""

    def summed(logits: Tensor) -> Tensor:
        found = terms(logits).reshape(-1)
        return torch.cat((found.detach(), found.sum()[None]))

    return summed


def cross_entropy(logits_BSV: Tensor, labels_BS: Tensor) -> Tensor:
    """Cross-entropy, in nats and float32, summed over the tokens whose label is not IGNORED."""
    return F.cross_entropy(logits_BSV.flatten(0, 1).float(), labels_BS.flatten(), ignore_index=IGNORED, reduction="sum")


def loss_terms(logits_BSV: Tensor, labels_BS: Tensor, z_loss: float) -> dict[str, Tensor]:
    """The terms of the loss, each summed over tokens, under the names of their figures.

    The sum of all terms is trained. The first is the cross-entropy, which alone is validated. With `z_loss` there is
    also that times the square of each token's log-sum-exp (Chowdhery et al. 2022, PaLM), which keeps logits small.
    """
    terms = {"loss": cross_entropy(logits_BSV, labels_BS)}
    if z_loss:
        log_sum_BS = torch.where(labels_BS != IGNORED, logits_BSV.float().logsumexp(-1), 0.0)
        terms["z_loss"] = z_loss * log_sum_BS.square().sum()
    return terms


def term_names(z_loss: float) -> list[str]:
    """The names of the terms after the first."""
    logits_BSV = torch.zeros(1, 1, 2)
    labels_BS = torch.zeros(1, 1, dtype=torch.int64)
    return list(loss_terms(logits_BSV, labels_BS, z_loss))[1:]


def stack_terms(logits_BSV: Tensor, labels_BS: Tensor, z_loss: float) -> Tensor:
    """The terms of the loss as one tensor [terms]; a single term as a scalar."""
    terms = list(loss_terms(logits_BSV, labels_BS, z_loss).values())
    if len(terms) == 1:
        return terms[0]
    return torch.stack(terms)


def count_trained(labels: Iterable[Tensor], dims: ParallelDims, device: torch.device) -> Tensor:
    """Tokens with a label in a step, over all ranks that make an update together. Collective.

    At least 1: if no token is trained, the loss and all gradients are 0 instead of 0 / 0. The update is then as for any
    gradient of 0: running means and weight decay go on. To leave it out the host would have to wait in every step.
    """
    island = dims.island(dist.get_rank())
    tokens = torch.zeros(dims.islands, dtype=torch.int64, device=device)
    tokens[island] = sum((own != IGNORED).sum() for own in labels)
    dist.all_reduce(tokens)
    return (tokens[island] // dims.copies).clamp_(min=1)


def sum_losses(losses: Sequence[Tensor], dims: ParallelDims, device: torch.device) -> Tensor:
    """A step's loss, or its terms: the sum over its microbatches and all ranks, the mean of the islands. Collective."""
    total = torch.stack(tuple(losses)).sum(0) if losses else torch.zeros((), device=device)
    total = total / dims.tp / dims.islands  # all ranks of tp computed the same loss
    dist.all_reduce(total)
    return total


def build_loss(
    compile: settings.Compile, mesh: Mesh | None = None, z_loss: float = 0.0
) -> Callable[[Tensor, Tensor], Tensor]:
    """Build the function (logits [B, S, V], labels [B, S]) → summed loss, or its terms.

    It is compiled if the model is: float32 logits then exist only inside the kernel. With a `mesh`, logits are this
    rank's part: tp splits the vocabulary, cp the sequence. Labels are always whole.
    """
    summed: Callable[..., Tensor] = partial(stack_terms, z_loss=z_loss)
    if mesh and mesh.tp.size() > 1:
        summed = partial(vocab_parallel_cross_entropy, mesh=mesh.tp, ignored=IGNORED, z_loss=z_loss)
    if compile.enable:
        summed = exempt_from_budget(torch.compile(summed, backend=compile.backend))
    if mesh is None or mesh.cp.size() == 1:
        return summed

    def of_own_tokens(logits: Tensor, labels: Tensor) -> Tensor:
        return summed(logits, _own_labels(labels, mesh))

    return of_own_tokens


def _own_labels(labels: Tensor, mesh: Mesh) -> Tensor:
    """Of whole sequences [B, S] the labels of this rank's tokens."""
    return labels[:, local_indices(labels.shape[1], mesh.cp, labels.device)]


def build_chunked_loss(
    compile: settings.Compile, mesh: Mesh, chunks: int, z_loss: float = 0.0
) -> Callable[..., Tensor]:
    """Build the function (labels [B, S], compute, hidden [B, S, D], output weight [V, D]) → summed loss, or its terms.

    `compute(hidden, weight)` makes the logits, of nothing that is trained but these two.

    Only one of `chunks` chunks of the tokens has logits at a time. The forward computes its gradients at once, and
    backward only scales them, so nothing is computed twice (as in Liger-Kernel's fused linear cross-entropy, Hsu et
    al. 2024).
    """

    def head(hidden: Tensor, weight: Tensor, labels: Tensor, compute: Callable[..., Tensor]) -> Tensor:
        logits = compute(hidden, weight)
        return stack_terms(logits[None], labels[None], z_loss)

    def scale(gradient: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
        # The factor gets one dimension: otherwise it would be rounded to the gradient's type.
        return (gradient * factor[None]).to(dtype)

    summed: Callable[..., Tensor] = head
    if compile.enable:
        summed = exempt_from_budget(torch.compile(head, backend=compile.backend))
    add = build_add(compile)
    scale_compiled = compile_each_shape(scale, compile)

    def chunked(labels: Tensor, compute: Callable[..., Tensor], hidden: Tensor, weight: Tensor) -> Tensor:
        if mesh.cp.size() > 1:
            labels = _own_labels(labels, mesh)
        parts = zip(hidden.detach().flatten(0, 1).chunk(chunks), labels.flatten().chunk(chunks), strict=True)
        if not torch.is_grad_enabled():
            return torch.stack([summed(part, weight, label, compute) for part, label in parts]).sum(0)
        low = weight.detach().to(hidden.dtype)  # once, not for each chunk
        total = torch.zeros((), device=hidden.device)
        of_hidden = []
        of_weight: Tensor | None = None
        for part, label in parts:
            h = part.detach().requires_grad_()
            w = low.detach().requires_grad_()
            loss = summed(h, w, label, compute)
            grad_h, grad_w = torch.autograd.grad(loss.sum(), (h, w))
            total = total + loss.detach()
            of_hidden.append(grad_h)
            of_weight = add(of_weight, grad_w, torch.float32)  # since it sums many chunks
        return _Scaled.apply(hidden, weight, total, torch.cat(of_hidden).view_as(hidden), of_weight, scale_compiled)

    return chunked


class _Scaled(torch.autograd.Function):
    """A loss whose gradients of hidden states and weight are already there. Backward multiplies them by its own."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, total: Tensor, of_hidden: Tensor, of_weight: Tensor, scale: Any
    ) -> Tensor:
        ctx.save_for_backward(of_hidden, of_weight)
        ctx.scale = scale
        ctx.weight_dtype = weight.dtype
        return total.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        of_hidden, of_weight = ctx.saved_tensors
        grad = grad.reshape(-1)[0]  # the same for all terms, since their sum is trained
        of_weight = ctx.scale(of_weight, grad, ctx.weight_dtype)
        return ctx.scale(of_hidden, grad, of_hidden.dtype), of_weight, *[None] * 4
