"""Processes: this one's rank, and how they start, communicate and stop."""

import ctypes
import gc
import hashlib
import ipaddress
import os
import resource
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from config import Comm, ConfigError, TitaniteError
from parallel.device import device_type

T = TypeVar("T")
LAUNCHER, STARTING = "TITANITE_LAUNCHER", "TITANITE_STARTING"
PR_SET_PDEATHSIG, MFD_CLOEXEC = 1, 1  # linux/prctl.h, linux/memfd.h
FILES, FILES_OF_RANK = 50, 5  # most open files of a process, and more per rank of the job (3 measured)


class LaunchEnvironment(NamedTuple):
    """What torchrun tells this process. The defaults are for a process alone, without torchrun."""

    rank: int
    local_rank: int
    world_size: int
    job: str = ""  # identifies a job in all its restarts; empty without torchrun
    restarts_left: int = 0  # that torchrun may still make
    agent_store: tuple[str, int] | None = None  # host and port of the store that torchrun keeps over restarts
    local_world_size: int = 1  # ranks of this torchrun; their numbers are consecutive
    launcher: str = ""  # the process of launch.torchrun, as `identify` names it
    max_restarts: int = 0  # that torchrun may make in all


def launch_environment() -> LaunchEnvironment:
    """Read ranks and job from the environment; nothing else reads them. Raises ConfigError."""
    tasks = os.environ.get("SLURM_STEP_NUM_TASKS", "1")
    if tasks != "1" and "WORLD_SIZE" not in os.environ:
        raise ConfigError(
            f"SLURM_STEP_NUM_TASKS = {tasks}: srun has started that many processes, and each would train alone; "
            "let it start one torchrun per node, as launch/slurm.sh does"
        )
    job = os.environ.get("TORCHELASTIC_RUN_ID", "")
    if job == "none":  # no --rdzv-id: the torchrun process is the job
        job = f"{socket.gethostname()}-{identify(os.getppid())}"
    max_restarts = _number("TORCHELASTIC_MAX_RESTARTS", 0)
    agent_store = None
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        agent_store = os.environ["MASTER_ADDR"], _number("MASTER_PORT", 0)
    return LaunchEnvironment(
        rank=_number("RANK", 0),
        local_rank=_number("LOCAL_RANK", 0),
        world_size=_number("WORLD_SIZE", 1),
        job=job,
        restarts_left=max(max_restarts - _number("TORCHELASTIC_RESTART_COUNT", 0), 0),
        agent_store=agent_store,
        local_world_size=_number("LOCAL_WORLD_SIZE", 1),
        launcher=os.environ.get(LAUNCHER, ""),
        max_restarts=max_restarts,
    )


def _number(name: str, default: int) -> int:
    text = os.environ.get(name, str(default))
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"{name} = {text!r}: must be a whole number; torchrun sets it") from None


def process_state(pid: int) -> tuple[str, str]:
    """(state, start time) of a process, as Linux writes them; empty if it is gone, or another user's and hidden."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError, PermissionError):  # the second: it ended while being read
        return "", ""
    return fields[0], fields[19]


def identify(pid: int) -> str:
    """Name a process by pid and start time, since pids are reused; without the time if it is gone."""
    return f"{pid}-{process_state(pid)[1]}"


def name_launcher() -> int:
    """Name this process, torchrun, to the ranks it will start. Returns the file that `tell_launcher` writes to."""
    # Not os.memfd_create: uv and conda build Python for an old glibc, without it.
    file = ctypes.CDLL(None).memfd_create(STARTING.encode(), MFD_CLOEXEC)
    os.environ[LAUNCHER] = identify(os.getpid())
    os.environ[STARTING] = f"/proc/{os.getpid()}/fd/{file}"
    return file


def tell_launcher(folder: Path | None) -> None:
    """Tell launch.torchrun, if it started us, the folder of a run that starts up; None: its start-up is over.

    In between a signal ends the ranks at once. torchrun then records that it was no crash.
    """
    if file := os.environ.get(STARTING):
        with suppress(OSError):  # torchrun is gone, or another user
            Path(file).write_bytes(b"" if folder is None else os.fsencode(folder.absolute()))


def runs(process: str) -> bool:
    """Whether the process that `identify` named still exists."""
    return identify(int(process.partition("-")[0])) == process


def end_with(launcher: str) -> None:
    """Let the kernel kill this rank if its torchrun is killed: during start-up no watchdog would notice."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if not runs(launcher):  # it was killed before
        os._exit(128 + signal.SIGKILL)


def end_launcher() -> None:
    """Tell torchrun to end without a restart, since it would fail again. One rank of each node calls this."""
    os.kill(os.getppid(), signal.SIGQUIT)


def init_distributed(environment: LaunchEnvironment, comm: Comm) -> torch.device:
    """Start the process group, even for one process, and return this rank's device.

    Raises ConfigError if this node has too few devices, if ranks have devices of different types or cannot reach each
    other, if too few files may be open, or if nobody says where rank 0 is.
    """
    if environment.launcher:
        end_with(environment.launcher)
    allow_open_files(environment.world_size)
    kind = device_type()
    devices = torch.accelerator.device_count()
    # A rank that sees one device may have it for itself: torchrun --virtual-local-rank.
    here = max(environment.local_world_size if devices > 1 else 1, environment.local_rank + 1)
    if kind != "cpu" and here > devices:
        raise ConfigError(
            f"{socket.gethostname()}: each rank needs a {kind} device of its own, but {here} ranks see only {devices}; "
            "see torchrun's --nproc-per-node, and srun's --gpus-per-task"
        )
    device = torch.device(kind) if kind == "cpu" else torch.device(kind, environment.local_rank)
    if kind != "cpu":
        torch.accelerator.set_device_index(environment.local_rank)
    # A gloo group beside the accelerator's is for small CPU objects and checkpoints.
    backend = "gloo" if kind == "cpu" else f"cpu:gloo,{kind}:{dist.get_default_backend_for_device(kind)}"
    timeout = timedelta(seconds=comm.init_timeout_seconds)
    rank, world_size = environment.rank, environment.world_size
    store: dist.Store | None = None  # None: torch makes one at MASTER_ADDR and MASTER_PORT
    if world_size == 1:
        store = dist.HashStore()
    elif environment.agent_store:
        kept = dist.TCPStore(*environment.agent_store, is_master=False, timeout=timeout)
        store = dist.PrefixStore(meet(kept, rank, world_size, comm.init_timeout_seconds), kept)
        check_devices(store, rank, world_size, kind)
    elif missing := [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]:
        raise ConfigError(f"WORLD_SIZE = {world_size}: needs {' and '.join(missing)}, too; torchrun sets them all")
    dist.init_process_group(backend, timeout=timeout, store=store, rank=rank, world_size=world_size)
    return device


def allow_open_files(world_size: int) -> None:
    """Raise this process's limit of open files as far as allowed. Raises ConfigError if that is too few for the job.

    A rank has three connections to each other rank, by gloo's groups of the world, of votes to stop and of checkpoints.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = FILES + FILES_OF_RANK * world_size
    if most != resource.RLIM_INFINITY and needed > most:
        raise ConfigError(
            f"{socket.gethostname()}: a process may open {most} files, but with {world_size} ranks each needs "
            f"{needed}, mostly for connections to the others: raise the hard limit, ulimit -Hn, and then ulimit -n"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def check_devices(store: dist.Store, rank: int, world_size: int, kind: str) -> None:
    """Raises ConfigError, on all ranks, if they found devices of different types, as when a GPU is gone.

    Also if other hosts could not connect to one of several. `store` must belong to this start alone.
    """
    store.set(f"device/{rank}", f"{kind} {socket.gethostname()} {'alone' if _listens_to_itself() else ''}")
    if rank == 0:  # only rank 0 reads: thousands of readers of thousands of entries would keep the store busy
        found = set(store.multi_get([f"device/{other}" for other in range(world_size)]))
        places = [entry.decode().split(" ") for entry in sorted(found)]
        deaf = ", ".join(host for _, host, alone in places if alone)
        wrong = ""
        if len({name for name, _, _ in places}) > 1:
            mixed = "; ".join(f"{name} on {host}" for name, host, _ in places)
            wrong = f"ranks have devices of different types: {mixed}; is a GPU or its driver gone?"
        elif deaf and len({host for _, host, _ in places}) > 1:
            wrong = (
                f"{deaf}: the host's own name resolves to a loopback address, such as 127.0.1.1, or not at all, so "
                "gloo would listen where no other host can reach it: set GLOO_SOCKET_IFNAME to the interface of the "
                "hosts' network (ip -br addr lists them)"
            )
        store.set("devices", wrong)
    if wrong := store.get("devices").decode():
        raise ConfigError(wrong, agreed=True)


def _listens_to_itself() -> bool:
    """Whether gloo, which looks up the host's own name, gets a loopback address."""
    if os.environ.get("GLOO_SOCKET_IFNAME"):
        return False
    try:
        found = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
    except (socket.gaierror, UnicodeError):  # the second: no valid name for a name server
        return True
    for family, kind, protocol, _, address in found:  # the first that is this host's; without one gloo takes 127.0.0.1
        with suppress(OSError), socket.socket(family, kind, protocol) as own:
            own.bind(address)
            return ipaddress.ip_address(str(address[0]).partition("%")[0]).is_loopback
    return True


def meet(store: dist.Store, rank: int, world_size: int, timeout_seconds: float) -> str:
    """A name on which all ranks of this start agree, and no rank of an earlier one.

    torchrun keeps its store over restarts, and ranks would take what an earlier start left in it, such as gloo's
    addresses, for this start's (torch 2.11 to 2.13). So every rank writes a random word. Rank 0 announces the words
    it has read, a round. The round counts once every rank has found its word in it. Raises TimeoutError.
    """
    deadline = time.monotonic() + timeout_seconds
    word, joined = os.urandom(8).hex(), ""
    store.set(f"hello/{rank}", word)
    hellos = [f"hello/{other}" for other in range(world_size)]
    while time.monotonic() < deadline:
        if rank == 0 and store.check(hellos):
            store.set("round", b",".join(store.multi_get(hellos)).decode())
        if store.check(["round"]):
            words = store.get("round").decode()
            if words.split(",")[rank : rank + 1] == [word]:
                name = hashlib.sha256(words.encode()).hexdigest()
                if name != joined:
                    joined = name
                    store.add(f"joined/{name}", 1)
                if store.add(f"joined/{name}", 0) == world_size:
                    return f"start/{name}"
        time.sleep(0.02)
    raise TimeoutError(f"rank {rank}: not all of {world_size} ranks came within {timeout_seconds} s")


def set_timeout(seconds: int, apart: dist.ProcessGroup | None = None) -> None:
    """Set the timeout of all process groups that exist, except `apart`. A new group has torch's, 30 minutes.

    Neither a mesh nor FSDP2 takes a timeout for the groups it makes.
    """
    # Public from torch 2.14 on, where the old name warns on every rank.
    set_of_group = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
    for group in dist.distributed_c10d._world.pg_map:
        if group is not apart:
            set_of_group(timedelta(seconds=seconds), group)


def from_rank_0(make: Callable[[], T]) -> T:
    """Call `make` on rank 0 and return its result on every rank. A TitaniteError that it raises is raised on all."""
    box: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            box[0] = make()
        except TitaniteError as error:
            box[0] = error
    dist.broadcast_object_list(box, src=0)
    (value,) = box
    if isinstance(value, TitaniteError):
        value.agreed = True
        raise value
    return value


def shut_down() -> None:
    """Leave the process group, if there is one. Drop the model and the optimizer first.

    If a thread of gloo drops the last reference to a tensor while Python exits, it aborts the process. So all garbage
    is collected first.
    """
    gc.unfreeze()  # what the training loop has frozen
    gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()
