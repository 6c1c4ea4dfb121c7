"""Processes: where this one stands, how they start, talk and stop."""

import gc
import os
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import config as settings


class LaunchEnvironment(NamedTuple):
    """What torchrun says of this process; one process alone without it."""

    rank: int
    local_rank: int
    world_size: int


def launch_environment() -> LaunchEnvironment:
    """The only place where the environment's ranks are read."""
    environ = os.environ
    rank, local_rank, world_size = (int(environ.get(key, 0)) for key in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))
    return LaunchEnvironment(rank, local_rank, max(world_size, 1))


def device_type() -> str:
    """The accelerator torch found, such as "cuda", else "cpu"."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return accelerator.type if accelerator else "cpu"


def init_distributed(environment: LaunchEnvironment, comm: settings.Comm) -> torch.device:
    """Start the process group (also of one process) and return this rank's device."""
    kind = device_type()
    device = torch.device(kind) if kind == "cpu" else torch.device(kind, environment.local_rank)
    if kind != "cpu":
        torch.accelerator.set_device_index(environment.local_rank)
    # A gloo group beside the accelerator's carries small CPU objects and checkpoints.
    backend = "gloo" if kind == "cpu" else f"cpu:gloo,{kind}:{dist.get_default_backend_for_device(kind)}"
    timeout = timedelta(seconds=comm.init_timeout_seconds)
    if environment.world_size == 1:
        dist.init_process_group(backend, timeout=timeout, store=dist.HashStore(), rank=0, world_size=1)
    else:
        dist.init_process_group(backend, timeout=timeout)
    return device


def set_timeout(mesh: DeviceMesh, seconds: int) -> None:
    """Change the longest wait of every group of the mesh and of the world.

    All ranks meet first, so that none is bound by the new limit while another still compiles.
    """
    dist.barrier()
    groups = [None, *mesh.get_all_groups()]
    for group in groups:
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)


def broadcast_object(value: Any) -> Any:
    """Rank 0's `value`, on every rank."""
    holder = [value]
    dist.broadcast_object_list(holder, src=0)
    return holder[0]


def shut_down() -> None:
    """Leave the process group. Drop the model and the optimizer before calling this.

    gloo's threads abort the process if they drop the last reference to a tensor while Python exits:
    so everything is collected first.
    """
    gc.collect()
    dist.destroy_process_group()
