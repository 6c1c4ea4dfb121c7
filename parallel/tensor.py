"""Tensor parallelism: the matmuls of a block shared by ranks, with the sequence split in between.

After Megatron-LM (Shoeybi et al. 2019; Korthikanti et al. 2022 for the sequence), by torch's DTensor.

Shapes: B batch   S sequence   V vocabulary
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed._functional_collectives as funcol
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from config import ConfigError


def check_divides(tp: int, sizes: Mapping[str, int]) -> None:
    """Raise ConfigError naming the first of `sizes` (what it is → how many) that `tp` ranks cannot share evenly."""
    for name, size in sizes.items():
        if size % tp:
            raise ConfigError(f"parallelism.tp = {tp}: must divide {name} = {size}")


def apply_tensor_parallel(module: nn.Module, plan: Mapping[str, ParallelStyle], mesh: DeviceMesh) -> None:
    """Shard the submodules of `module` that `plan` names, in place, over the one axis of `mesh`."""
    parallelize_module(module, mesh, dict(plan))
    for name in plan:
        # A compiled block that is handed an embedding still on its way from other ranks silently loses the
        # embedding's gradient under FSDP2; a copy has arrived.
        if isinstance(submodule := module.get_submodule(name), nn.Embedding):
            submodule.register_forward_hook(lambda module, inputs, output: output.clone())


def enable_async_tensor_parallel(mesh: DeviceMesh) -> None:
    """Let the compiler overlap tensor parallelism's collectives with the matmuls beside them, through symmetric memory.

    Changes a setting of the compiler for the whole process. Needs CUDA.
    """
    import torch._inductor.config as inductor
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    inductor._micro_pipeline_tp = True
    enable_symm_mem_for_group(mesh.get_group().group_name)


class _SumOverRanks(torch.autograd.Function):
    """Sum of what the ranks hold, of which all then compute the same: so each part's gradient is the sum's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: DeviceMesh) -> Tensor:
        return funcol.wait_tensor(funcol.all_reduce(x, "sum", mesh))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def vocab_parallel_cross_entropy(logits_BSV: Tensor, labels_BS: Tensor, mesh: DeviceMesh, ignored: int) -> Tensor:
    """Cross-entropy summed over tokens, in float32, of logits whose vocabulary is split over the ranks of `mesh`.

    `logits_BSV` holds this rank's V / tp columns; `labels_BS` are global token ids, `ignored` where nothing is
    trained. Each token costs three numbers of communication instead of V (Megatron-LM, section 3).
    """
    local = logits_BSV.to_local() if isinstance(logits_BSV, DTensor) else logits_BSV
    logits = local.flatten(0, 1).float()
    labels = labels_BS.flatten()
    trained = labels != ignored
    largest = funcol.wait_tensor(funcol.all_reduce(logits.detach().amax(-1), "max", mesh))
    logits = logits - largest[:, None]
    column = torch.where(trained, labels, 0) - mesh.get_local_rank() * logits.shape[-1]
    own = (column >= 0) & (column < logits.shape[-1])
    picked = logits.gather(-1, torch.where(own, column, 0)[:, None]).squeeze(-1)
    of_label = torch.where(own, picked, 0.0)
    sums = _SumOverRanks.apply(torch.stack((logits.exp().sum(-1), of_label)), mesh)
    return torch.where(trained, sums[0].log() - sums[1], 0.0).sum()
