"""Processes: this one's rank, and how they start, communicate and stop."""

import ctypes
import gc
import os
import resource
import signal
import socket
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist

from config import Comm, ConfigError
from parallel.device import device_type
from parallel.ranks import Ranks

T = TypeVar("T")
PR_SET_PDEATHSIG = 1  # linux/prctl.h: the signal that this process gets when its parent ends


def end_with_parent(number: int = signal.SIGKILL) -> None:
    """Let this process get a signal when its parent ends, however that ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)


class LaunchEnvironment(NamedTuple):
    """What torchrun tells this process. The defaults are for a process alone, without torchrun."""

    rank: int
    local_rank: int
    world_size: int
    job: str = ""  # identifies a job in all its restarts; empty without torchrun
    restarts: int = 0  # that torchrun has made
    max_restarts: int = 0  # that torchrun may make in all
    local_world_size: int = 1  # ranks of this torchrun; their numbers are consecutive
    store_of_torchrun: bool = False  # torchrun has the store where ranks meet, and keeps it; otherwise rank 0 makes it


def launch_environment() -> LaunchEnvironment:
    """Read ranks and job from the environment; nothing else reads them."""
    variables = os.environ
    job = variables.get("TORCHELASTIC_RUN_ID", "")
    if job == "none":  # no --rdzv-id: the torchrun process is the job
        parent = os.getppid()
        job = f"{socket.gethostname()}-{parent}-{process_state(parent)[1]}"  # pids are reused

    def number(name: str, default: int = 0) -> int:
        return int(variables.get(name, default))

    return LaunchEnvironment(
        number("RANK"),
        number("LOCAL_RANK"),
        number("WORLD_SIZE", 1),
        job,
        number("TORCHELASTIC_RESTART_COUNT"),
        number("TORCHELASTIC_MAX_RESTARTS"),
        number("LOCAL_WORLD_SIZE", 1),
        store_of_torchrun=variables.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )


def process_state(pid: int) -> tuple[str, str]:
    """(state, start time) of a process, as Linux writes them; empty if it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "", ""
    return fields[0], fields[19]


def init_distributed(environment: LaunchEnvironment, comm: Comm) -> torch.device:
    """Start the process group, even for one process, and return this rank's device.

    Raises ConfigError if this node has too few devices or another type than rank 0, or if torchrun did not start it.
    """
    tasks = os.environ.get("SLURM_STEP_NUM_TASKS", "1")
    if environment.world_size == 1 and tasks != "1":
        hint = "and each would train alone; let it start one torchrun per node, as launch/slurm.sh does"
        raise ConfigError(f"SLURM_STEP_NUM_TASKS = {tasks}: srun has started that many processes, {hint}")
    if environment.job:  # if torchrun is killed, this rank must not train on beside the job that replaces it
        end_with_parent()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # a rank has three connections to each other rank
    device = _choose_device(environment)
    # Otherwise NCCL's own watchdog aborts the process at an error of CUDA, before the exception can explain it (torch
    # 2.11 to 2.14). With this it also leaves a collective that has timed out to ours.
    os.environ.setdefault("TORCH_NCCL_RETHROW_CUDA_ERRORS", "0")
    backend = "gloo"
    if device.type != "cpu":  # gloo, also beside an accelerator's backend: for small CPU objects and checkpoints
        backend = f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device.type)}"
    timeout = timedelta(seconds=comm.init_timeout_seconds)
    store: dist.Store = dist.HashStore()
    if environment.world_size > 1:
        store = _meet(environment, device.type, timeout)
    dist.init_process_group(
        backend, timeout=timeout, store=store, rank=environment.rank, world_size=environment.world_size
    )
    return device


def _choose_device(environment: LaunchEnvironment) -> torch.device:
    """Make this rank's device the current one. Raises ConfigError if this node has too few."""
    kind = device_type()
    if kind == "cpu":
        return torch.device(kind)
    local_rank = environment.local_rank
    devices = torch.accelerator.device_count()
    if local_rank >= devices:
        raise ConfigError(
            f"{socket.gethostname()}: each rank needs a {kind} device of its own, but local rank {local_rank} sees "
            f"{devices}; see torchrun's --nproc-per-node, and srun's --gpus-per-task"
        )
    torch.accelerator.set_device_index(local_rank)
    return torch.device(kind, local_rank)


def _meet(environment: LaunchEnvironment, kind: str, timeout: timedelta) -> dist.Store:
    """Connect to the store of this start's ranks. Raises ConfigError if this one has another `kind` of device."""
    rank = environment.rank
    kept = environment.store_of_torchrun
    store: dist.Store
    store, *_ = next(dist.rendezvous("env://", rank, environment.world_size, timeout=timeout))
    if kept and environment.max_restarts and environment.local_world_size < environment.world_size:
        raise ConfigError(  # torchrun (2.11 to 2.13) keeps its store; its nodes may count restarts otherwise
            "--max-restarts with several nodes: set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for torchrun on all of "
            "them (and --rdzv-backend=c10d), otherwise ranks would not find each other after a restart"
        )
    # What an earlier start has left in a kept store is not for this one, nor what this process did before. Nodes that
    # come later have been restarted less often, but then rank 0 makes a new store at each start.
    restarts = environment.restarts if kept else 0
    count = store.add(f"starts/{restarts}/{rank}", 1)
    store = dist.PrefixStore(f"start/{restarts}/{count}", store)
    here = f"{kind} on {socket.gethostname()}"
    if rank == 0:
        store.set("device of rank 0", here)
    first = store.get("device of rank 0").decode()
    if first.split()[0] != kind:
        raise ConfigError(f"rank {rank} found {here}, rank 0 {first}: is a GPU or its driver gone?")
    return store


def set_timeout(seconds: int, apart: dist.ProcessGroup | None = None) -> None:
    """Set the timeout of all process groups but `apart`: neither a mesh nor FSDP2 takes one for the groups it makes."""
    for group in dist.distributed_c10d._world.pg_map:
        if group is not apart:
            dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)


def from_rank_0(make: Callable[[], T]) -> T:
    """Call `make` on rank 0 and return its result on every rank. Raises its error on all."""
    return Ranks(dist.group.WORLD).from_rank_0(make)


def shut_down() -> None:
    """Collect all garbage, then leave the process group, if there is one.

    Otherwise a thread of gloo could drop the last reference to a tensor while Python exits, which aborts the process.
    """
    gc.unfreeze()  # what the training loop has frozen
    gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()
