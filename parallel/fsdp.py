"""Data parallelism by FSDP2: one function does DDP, FSDP and HSDP, over meshes of different shapes."""

import warnings
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter

from config import Config, Parallelism


def needs_fsdp(config: Config, ranks: int) -> bool:
    """Whether to use FSDP2, if `ranks` ranks compute an update together.

    A rank alone needs it only to keep weights and gradients on the host: otherwise it just adds copies of them.
    """
    return ranks > 1 or config.parallelism.cpu_offload


def apply_fsdp(model: nn.Module, groups: list[list[nn.Module]], mesh: DeviceMesh, config: Config) -> None:
    """Shard `model` in place over `mesh`: (n) shards (FSDP), (n, 1) replicates (DDP), (m, n) does both (HSDP).

    Each of `groups`, in order of use, is gathered and freed together. Weights in no group belong to the root. The root
    stays gathered from forward to backward, and so does the last group, which backward needs first.
    """
    settings = config.parallelism
    policy = MixedPrecisionPolicy(
        param_dtype=getattr(torch, config.training.param_dtype),
        reduce_dtype=getattr(torch, config.training.reduce_dtype),
        # Hidden states already have the compute type, and rotary angles must stay float32.
        cast_forward_inputs=False,
    )
    offload = OffloadPolicy()
    if settings.cpu_offload:  # pinning host memory needs an accelerator
        offload = CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu")
    options: dict[str, Any] = {"mesh": mesh, "mp_policy": policy, "offload_policy": offload}
    # A pipeline does not reshard: each microbatch would gather the weights again.
    reshard: bool | int = settings.reshard_after_forward and settings.pp == 1
    if settings.reshard_group_size:
        # For each block FSDP2 makes process groups of that many ranks, each with connections of its own.
        reshard = settings.reshard_group_size
    # Modules under tensor parallelism return views; nothing changes them in place.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    for group in groups:
        fully_shard(group, reshard_after_forward=group is not groups[-1] and reshard, **options)
    fully_shard(model, reshard_after_forward=False, **options)

    for module in model.modules():
        if isinstance(module, FSDPModule):
            if mesh.size() > 1:  # alone, FSDP2 would still divide every gradient by 1
                # Sum, never average: the loss is already divided by the tokens of all ranks in the step.
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
            if settings.reduce_scatter == "all_to_all":
                module.set_custom_reduce_scatter(AllToAllReduceScatter())


class AllToAllReduceScatter(ReduceScatter):
    """Reduce-scatter by all-to-all: every rank sends each other rank its piece and sums in float32 what it receives.

    gloo's own is an all-reduce that drops all but one piece: twice the bytes. This is also more exact than a sum in
    bfloat16, for the same traffic.
    """

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        received = torch.empty_like(input_tensor)
        dist.all_to_all_single(received, input_tensor, group=group)
        output_tensor.copy_(received.view(group.size(), -1).sum(0, dtype=torch.float32))


def set_last_microbatch(model: nn.Module, is_last: bool, mesh: DeviceMesh, settings: Parallelism) -> None:
    """Sum gradients over the replicas only after a step's last microbatch; if the settings say so, over all of `mesh`.

    A rank alone puts nothing off: on an accelerator its whole gradients and their sums are in the memory of different
    streams, which cannot reuse each other's. With `cpu_offload` it does, since each sum goes to the host.
    """
    if not isinstance(model, FSDPModule):
        return
    model.set_requires_all_reduce(is_last)
    if settings.sync_every_microbatch:
        return
    puts_off = mesh.size() > 1 or settings.cpu_offload
    model.set_requires_gradient_sync(is_last or not puts_off)
    if not settings.reshard_after_forward:  # then weights need no second gather, either
        model.set_reshard_after_backward(is_last)


def reshard(parts: list[nn.Module]) -> None:
    """Free the weights that a forward without backward left gathered, so that parameters are shards again."""
    for part in parts:
        for module in part.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        if isinstance(part, FSDPModule) and hasattr(part, "reset_iter_state"):  # torch 2.13
            part.reset_iter_state()  # otherwise the next backward gathers this forward's last weights again at its end
