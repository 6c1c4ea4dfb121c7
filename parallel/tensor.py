"""Tensor parallelism: ranks share the matmuls of a block, and split the sequence in between.

As in Megatron-LM (Shoeybi et al. 2019; Korthikanti et al. 2022 for the sequence), by torch's DTensor.

Shapes: B batch   S sequence   V vocabulary
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


def _own_part(ids: Tensor, size: int, mesh: DeviceMesh) -> tuple[Tensor, Tensor]:
    """(places of token ids in this rank's `size` of the vocabulary, 0 for other ranks' ids; which ids are its own)."""
    place = ids - mesh.get_local_rank() * size
    own = (place >= 0) & (place < size)
    return torch.where(own, place, 0), own


class VocabParallelEmbedding(ParallelStyle):
    """Shares the rows of an embedding [V, D] (Megatron-LM, section 3). Embeds tokens [B, S] to this rank's part of S.

    torch's RowwiseParallel sends as much, but makes the gradient of all V rows on each rank. It stays there until the
    step's end if gradients are summed late: 2 GB in float32 for the 8B, 8 GB for the 405B.
    """

    def _apply(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, nn.Embedding)
        module.weight = nn.Parameter(distribute_tensor(module.weight.detach(), mesh, [Shard(0)]))
        module.forward = partial(_look_up, module, mesh)  # type: ignore[method-assign]
        return module


def _look_up(module: nn.Embedding, mesh: DeviceMesh, tokens_BS: Tensor) -> Tensor:
    """Embed all tokens together with the other ranks, and return this rank's part of the sequence."""
    assert isinstance(module.weight, DTensor)
    weight = module.weight.to_local()
    row, own = _own_part(tokens_BS, len(weight), mesh)
    found_BSD = F.embedding(row, weight) * own[..., None]
    part = DTensor.from_local(found_BSD, mesh, [Partial()]).redistribute(placements=[Shard(1)]).to_local()
    # The copy waits for the transfer. Without it a compiled block under FSDP2 silently loses the embedding's gradient.
    return part.clone()


def enable_async_tensor_parallel(mesh: DeviceMesh) -> None:
    """Let the compiler overlap tensor parallelism's collectives with matmuls, by symmetric memory. Needs CUDA.

    Changes a setting of the compiler for the whole process.
    """
    import torch._inductor.config as inductor
    import torch.distributed._symmetric_memory as symmetric_memory

    inductor._micro_pipeline_tp = True
    enable = getattr(symmetric_memory, "enable_symm_mem_for_group", None)
    if enable and not hasattr(enable, "__deprecated__"):  # not needed from torch 2.13 on, which warns on every rank
        enable(mesh.get_group().group_name)


class _SumOverRanks(torch.autograd.Function):
    """Sum over the ranks. All compute the same from it, so the gradient of each rank's part is that of the sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: DeviceMesh) -> Tensor:
        return funcol.wait_tensor(funcol.all_reduce(x, "sum", mesh))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def vocab_parallel_cross_entropy(logits_BSV: Tensor, labels_BS: Tensor, mesh: DeviceMesh, ignored: int) -> Tensor:
    """Cross-entropy summed over tokens, in float32 and nats, of logits whose vocabulary is split over `mesh`.

    `logits_BSV` holds this rank's V / tp columns. `labels_BS` are global token ids, `ignored` for tokens not trained
    on. A token costs three numbers of communication instead of V (Megatron-LM, section 3).
    """
    local = logits_BSV.to_local() if isinstance(logits_BSV, DTensor) else logits_BSV
    logits = local.flatten(0, 1).float()
    labels = labels_BS.flatten()
    trained = labels != ignored
    largest = funcol.wait_tensor(funcol.all_reduce(logits.detach().amax(-1), "max", mesh))
    logits = logits - largest[:, None]
    column, own = _own_part(torch.where(trained, labels, 0), logits.shape[-1], mesh)
    picked = logits.gather(-1, column[:, None]).squeeze(-1)
    of_label = torch.where(own, picked, 0.0)
    sums = _SumOverRanks.apply(torch.stack((logits.exp().sum(-1), of_label)), mesh)
    return torch.where(trained, sums[0].log() - sums[1], 0.0).sum()
