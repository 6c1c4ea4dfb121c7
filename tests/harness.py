"""Runs a function on N real gloo ranks: forked after one import of torch, so a test costs about a second."""

import faulthandler
import gc
import os
import pickle
import signal
import sys
import tempfile
import traceback
from datetime import timedelta
from pathlib import Path

import pyarrow
import torch
import torch._inductor.compile_fx  # about a second, which no rank that compiles has to spend itself
import torch.distributed as dist

from tests.ports import free_port

GROUP_TIMEOUT_SECONDS = 120
pyarrow.array([0]).to_numpy()  # imports pandas, where it is installed: a quarter of a second for each rank


def run_ranks(world_size, function, *args, start_group=True):
    """Call `function(*args)` on every rank of a gloo group; return the picklable results by rank.

    RANK, LOCAL_RANK and WORLD_SIZE are set as torchrun sets them; without `start_group` the function
    starts the process group, for which the address is set too. Raises AssertionError with the traceback of every
    rank that failed, those ended by a signal first; a rank that fails ends, and the others notice it.
    """
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    with tempfile.TemporaryDirectory() as folder:
        sys.stdout.flush()
        sys.stderr.flush()
        prepare_fork()
        children = {
            os.fork() or _run_child(rank, world_size, folder, start_group, function, args): rank
            for rank in range(world_size)
        }
        codes = {rank: os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid, rank in children.items()}
        failures = [
            f"--- rank {rank} ended with {code}\n{_read(Path(folder) / f'error{rank}')}"
            for rank, code in sorted(codes.items(), key=lambda item: item[1])  # a signal's code is negative
            if code
        ]
        assert not failures, "\n".join(failures)
        for rank in range(world_size):
            os.write(2, (Path(folder) / f"error{rank}").read_bytes())
        return [pickle.loads((Path(folder) / f"result{rank}").read_bytes()) for rank in range(world_size)]


def prepare_fork():
    """Collect garbage here, and leave what stays out of every later collection, which walks through a million objects.

    A fork that collected a process group of its parent would wait for ever for a thread that it does not have.
    """
    gc.collect()
    gc.freeze()


def _run_child(rank, world_size, folder, start_group, function, args):
    """The life of a rank; never returns."""
    code = 1
    try:
        error = open(Path(folder) / f"error{rank}", "w", buffering=1)  # noqa: SIM115  # as long as the rank lives
        faulthandler.enable(error)
        if sys.stderr is not sys.__stderr__:  # pytest captures: what C++ says as it aborts shall stand in the assertion
            os.dup2(error.fileno(), 2)
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # these tests may themselves run under nohup
        signal.signal(signal.SIGINT, signal.default_int_handler)
        torch.set_num_threads(1)
        torch._dynamo.reset()  # what the parent's tests have compiled must not make this rank's shapes dynamic
        if start_group:
            rendezvous, timeout = f"file://{folder}/rendezvous", timedelta(seconds=GROUP_TIMEOUT_SECONDS)
            dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=world_size, timeout=timeout)
        result = function(*args)
        (Path(folder) / f"result{rank}").write_bytes(pickle.dumps(result))
        if dist.is_initialized():
            dist.barrier()
        code = 0
    except BaseException:
        error.write(traceback.format_exc())
    finally:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            # Not through Python's end: gloo's threads may abort there, and pytest's own clean-up is the parent's.
            os._exit(code)


def _read(path):
    return (path.read_text() if path.exists() else "") or "(ended before it could say why)"
