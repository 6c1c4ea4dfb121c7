"""Data parallelism by FSDP2: DDP, FSDP and HSDP are one function over three shapes of mesh."""

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from config import Config


def apply_fsdp(model: nn.Module, groups: list[list[nn.Module]], mesh: DeviceMesh, config: Config) -> None:
    """Shard `model` in place over the mesh axes dp_replicate and dp_shard.

    Each of `groups`, in order of use, is gathered and freed as one; what is in none belongs to the root,
    which stays gathered from its forward to its backward, as does the last group, which backward needs first.
    A mesh of (n, 1) replicates (DDP), (1, n) shards (FSDP), (m, n) does both (HSDP).
    """
    axes = "dp_shard" if mesh["dp_replicate"].size() == 1 else ("dp_replicate", "dp_shard")
    policy = MixedPrecisionPolicy(
        param_dtype=getattr(torch, config.training.param_dtype),
        reduce_dtype=getattr(torch, config.training.reduce_dtype),
        # Hidden states have the compute type already, and rotary angles must keep float32.
        cast_forward_inputs=False,
    )
    reshard = config.parallelism.reshard_after_forward
    for group in groups:
        is_last = group is groups[-1]
        fully_shard(group, mesh=mesh[axes], mp_policy=policy, reshard_after_forward=reshard and not is_last)
    fully_shard(model, mesh=mesh[axes], mp_policy=policy, reshard_after_forward=False)

    for module in model.modules():
        if isinstance(module, FSDPModule):
            # The loss is divided by the step's tokens over all ranks, so gradients are summed, never averaged.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def set_last_microbatch(model: nn.Module, is_last: bool) -> None:
    """Sum gradients over the replicas only after a step's last microbatch."""
    if isinstance(model, FSDPModule):
        model.set_requires_all_reduce(is_last)


def reshard(model: nn.Module) -> None:
    """Free what a forward without a backward left gathered, so that the parameters are the shards again."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
