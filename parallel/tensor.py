"""Tensor parallelism: ranks share the matmuls of a block, and split the tokens in between.

As in Megatron-LM (Shoeybi et al. 2019; Korthikanti et al. 2022 for the sequence), by torch's DTensor.

Shapes: B batch   S sequence   T tokens, B * S   D dim   V vocabulary, or this rank's part of it
"""

from functools import partial
from typing import Any

import torch
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from parallel.stand_ins import check_stand_in, numbers, with_parts


def _own_part(ids: Tensor, size: int, rank: int) -> tuple[Tensor, Tensor]:
    """(places of token ids in this rank's `size` of the vocabulary, 0 for other ranks' ids; which ids are its own)."""
    place = ids - rank * size
    own = (place >= 0) & (place < size)
    return torch.where(own, place, 0), own


class VocabParallelEmbedding(ParallelStyle):
    """Shares the rows of an embedding [V, D] (Megatron-LM, section 3). Embeds tokens [B, S] to this rank's [T / tp, D].

    torch's RowwiseParallel sends as much, but makes the gradient of all V rows on each rank. It stays there until the
    step's end if gradients are summed late: 2 GB in float32 for the 8B, 8 GB for the 405B.
    """

    @staticmethod
    def check(module: nn.Module) -> None:
        """Raises ConfigError for an embedding that is more than a look-up."""
        rows = numbers(8, 4)
        ids = torch.tensor([[1, 5, 5], [0, 7, 5]])

        def embed(weight: Tensor) -> Tensor:
            return with_parts(module, weight=weight)(ids)

        def look_up(weight: Tensor) -> Tensor:
            return F.embedding(ids, weight)

        what = type(module).__qualname__
        check_stand_in(what, embed, look_up, [rows], "parallel.tensor.VocabParallelEmbedding", "parallelism.tp = 1")

    def _apply(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, nn.Embedding)
        module.weight = nn.Parameter(distribute_tensor(module.weight.detach(), mesh, [Shard(0)]))
        module.forward = partial(_look_up, module, mesh)  # type: ignore[method-assign]
        return module


def _look_up(module: nn.Embedding, mesh: DeviceMesh, tokens_BS: Tensor) -> Tensor:
    """Embed all tokens together with the other ranks, and return this rank's part of them, [T / tp, D]."""
    assert isinstance(module.weight, DTensor)
    weight = module.weight.to_local()
    row, own = _own_part(tokens_BS, len(weight), mesh.get_local_rank())
    found_TD = (F.embedding(row, weight) * own[..., None]).flatten(0, 1)
    summand = DTensor.from_local(found_TD, mesh, [Partial()])
    part = summand.redistribute(placements=[Shard(0)]).to_local()
    # The copy waits for the transfer. Without it a compiled block under FSDP2 silently loses the embedding's gradient.
    return part.clone()


def vocab_parallel_cross_entropy(
    logits_BSV: Tensor, labels_BS: Tensor, mesh: DeviceMesh | None, ignored: int, z_loss: float = 0.0
) -> Tensor:
    """Cross-entropy summed over tokens, in float32 and nats, of logits whose vocabulary is split over `mesh`.

    `logits_BSV` holds this rank's V / tp columns. `labels_BS` are global token ids, `ignored` for tokens not trained
    on. A token costs three numbers of communication instead of V (Megatron-LM, section 3). Only the logits are kept for
    the backward: they make the probabilities again. With `z_loss`: [cross-entropy, z], the terms of the loss. Without a
    `mesh` this process has the whole vocabulary.
    """
    local = logits_BSV.to_local() if isinstance(logits_BSV, DTensor) else logits_BSV
    return _VocabParallelCrossEntropy.apply(local.flatten(0, 1), labels_BS.flatten(), mesh, ignored, z_loss)


class _VocabParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits_TV: Tensor, labels_T: Tensor, mesh: DeviceMesh | None, ignored: int, z_loss: float
    ) -> Tensor:
        rank = mesh.get_local_rank() if mesh else 0
        trained_T = labels_T != ignored
        column_T, own_T = _own_part(torch.where(trained_T, labels_T, 0), logits_TV.shape[1], rank)
        of_label_T = logits_TV.gather(1, column_T[:, None])[:, 0].float()
        own_largest_T = logits_TV.amax(1).float()
        own_sum_T = (logits_TV - own_largest_T[:, None]).exp_().sum(1)
        largest_T = _reduce(own_largest_T, "max", mesh)
        scaled_sum_T = own_sum_T * (own_largest_T - largest_T).exp()
        parts = torch.stack((scaled_sum_T, torch.where(own_T, of_label_T, 0.0)))
        sum_T, label_T = _reduce(parts, "sum", mesh)
        log_sum_T = largest_T + sum_T.log()
        ctx.save_for_backward(logits_TV, log_sum_T, torch.where(own_T, column_T, -1), trained_T)
        ctx.z_loss = z_loss
        loss = torch.where(trained_T, log_sum_T - label_T, 0.0).sum()
        if not z_loss:
            return loss
        return torch.stack((loss, z_loss * (trained_T * log_sum_T).square().sum()))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        logits_TV, log_sum_T, column_T, trained_T = ctx.saved_tensors
        columns_V = torch.arange(logits_TV.shape[1], device=logits_TV.device)
        of_logits_TV = (logits_TV - log_sum_T[:, None]).exp_()
        if ctx.z_loss:
            of_logits_TV *= (1 + 2 * ctx.z_loss * log_sum_T)[:, None]
        of_logits_TV.add_(columns_V == column_T[:, None], alpha=-1)
        of_logits_TV *= (grad.reshape(-1)[0] * trained_T)[:, None]  # the same for all terms: their sum is trained
        return of_logits_TV.to(logits_TV.dtype), *[None] * 4


def _reduce(x: Tensor, operation: str, mesh: DeviceMesh | None) -> Tensor:
    return funcol.wait_tensor(funcol.all_reduce(x, operation, mesh)) if mesh else x
