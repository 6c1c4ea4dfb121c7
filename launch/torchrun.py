"""torchrun, without its own traceback when a rank has already said what was wrong.

    python -m launch.torchrun --nproc-per-node=2 train.py --config=train_configs/debug.toml

Takes torchrun's arguments. Exits with the code of the rank that failed first.
"""

import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

from torch.distributed import DistError, TCPStore
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import api
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousTimeoutError,
    c10d_rendezvous_backend,
)
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler
from torch.distributed.run import main

from run.exits import HUNG, Exit, record_exit, run_and_leave
from run.processes import name_launcher

ASKING = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)  # they ask for an end with a checkpoint
ANSWER_SECONDS = 150  # for the store of the c10d rendezvous to answer; connecting to it may take 60, twice
END_SECONDS = 60  # for torchruns to wait until all end, not torch's 300: one ended by a signal never comes
USER_ERROR = 2  # train.py's exit code for a mistake that it has explained
FOLLOWING = (1, -signal.SIGABRT)  # exit codes of a rank that lost another: an exception, or torch's own abort
ENDED = (-signal.SIGTERM, 128 + signal.SIGTERM)  # of a rank that torchrun ended after another failed: run.stop
LATE_SECONDS = 10  # ... or that it had to kill, which it does after 30


def launch(argv: list[str]) -> int:
    """Run torchrun. Returns the exit code for the shell."""
    # A failed rank or a signal is reported below, in one line. torch would log tracebacks, also in the torchruns
    # that then wait for one that has ended.
    for name in ("multiprocessing.api", "multiprocessing.errors.error_handler", "agent.server.api"):
        logging.getLogger(f"torch.distributed.elastic.{name}").setLevel(logging.CRITICAL)
    handled = "SIGTERM,SIGINT,SIGQUIT,SIGUSR1"  # the last is Slurm's warning, which would kill torchrun and the ranks
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # torchrun must not undo nohup
        handled += ",SIGHUP"
    # One machine: PET_NNODES may be meant for others, and nobody may know this machine's name.
    alone = ["--nnodes=1", "--local-addr=127.0.0.1"] if "--standalone" in argv else []
    starting = name_launcher()
    try:
        with patched_torchrun() as agents:
            main([f"--signals-to-handle={handled}", *alone, *argv])
    except ChildFailedError as error:
        rank, failure = _first_failure(error.failures)
        if failure.exitcode < 0:
            print(f"error: rank {rank} was killed by signal {-failure.exitcode}", file=sys.stderr)
        elif failure.exitcode != USER_ERROR:
            print(f"error: rank {rank} failed with exit code {failure.exitcode}, see above", file=sys.stderr)
        return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
    except RendezvousTimeoutError:
        print(
            "error: fewer nodes than --nnodes asks for joined within --rdzv-conf=join_timeout (600 s by default)",
            file=sys.stderr,
        )
        return 1
    except (DistError, RendezvousConnectionError) as error:
        met = agents and agents[0].get_worker_group().store
        lost = "; the node that keeps it is lost: start the job again on all nodes, with its --rdzv-id or --run.folder"
        print(f"error: rendezvous failed: {error.__cause__ or error}{lost if met else ''}", file=sys.stderr)
        return 1
    except SignalException as error:
        if error.sigval == signal.SIGQUIT:  # from a rank, which has explained what a restart would not fix
            return USER_ERROR
        if folder := os.pread(starting, 10_000, 0):
            cause = f"stopped by {error.sigval.name}, before it trained"
            action = f"start again with --run.folder={os.fsdecode(folder)}"
            record_exit(Path(os.fsdecode(folder)), Exit("stopped", cause, None, "start", 0, None, action))
        passed_on = "the ranks got it too; one that trains ends after its step, with a checkpoint"
        print(f"torchrun: ended by {error.sigval.name}; {passed_on}", file=sys.stderr)
        return 128 + error.sigval
    except (ValueError, RuntimeError, AssertionError) as error:
        if agents:
            raise
        # No rank was begun: torch (2.13) has only now read what its parser of arguments had let pass.
        print(f"error: an argument of torchrun: {str(error) or '--nproc-per-node must be at least 1'}", file=sys.stderr)
        return USER_ERROR
    return 0


@contextmanager
def patched_torchrun() -> Iterator[list[LocalElasticAgent]]:
    """Inside this context four faults of torchrun are patched. Yields a list that gets each agent that it makes."""
    next_rendezvous = DynamicRendezvousHandler.next_rendezvous

    def next_with_a_new_store(handler: DynamicRendezvousHandler) -> RendezvousInfo:
        # torch (2.11 to 2.13) keeps the ranks' store from one round to the next and never tells its address to a node
        # that comes later: both wait for a minute and fail. So every round gets a new store.
        handler._shared_tcp_store_server = handler._bootstrap_store_info = None
        return next_rendezvous(handler)

    create_store = c10d_rendezvous_backend._create_tcp_store

    def create_answering_store(parameters: RendezvousParameters) -> TCPStore:
        # torch (2.13) limits the time to connect, but not the time to wait for an answer.
        waiting = threading.Timer(ANSWER_SECONDS, give_up, [parameters.endpoint])
        waiting.daemon = True
        waiting.start()
        try:
            return create_store(parameters)
        finally:
            waiting.cancel()

    handle = api._terminate_process_handler

    def handle_once(number: int, frame: FrameType | None) -> None:
        # Each would end one of torch's (2.13) two waits for the ranks to save. Only a second Ctrl-C should.
        if number != signal.SIGINT:
            for repeated in ASKING:
                signal.signal(repeated, lambda *_: None)  # not SIG_IGN: Python complains if one is pending
        handle(number, frame)

    initialise, agents = LocalElasticAgent.__init__, list[LocalElasticAgent]()

    def make_agent(agent: LocalElasticAgent, *arguments: Any, **options: Any) -> None:
        agents.append(agent)
        initialise(agent, *arguments, **options | {"exit_barrier_timeout": END_SECONDS})

    with (
        mock.patch.object(DynamicRendezvousHandler, "next_rendezvous", next_with_a_new_store),
        mock.patch.object(c10d_rendezvous_backend, "_create_tcp_store", create_answering_store),
        mock.patch.object(LocalElasticAgent, "__init__", make_agent),
        mock.patch.object(api, "_terminate_process_handler", handle_once),
    ):
        yield agents


def give_up(endpoint: str) -> None:
    """End this torchrun, before it has started any rank."""
    print(
        f"error: rendezvous failed: what listens at {endpoint} is not a torchrun, it has not answered for "
        f"{ANSWER_SECONDS} s; choose another port",
        file=sys.stderr,
        flush=True,
    )
    os._exit(1)


def _first_failure(failures: dict[int, ProcessFailure]) -> tuple[int, ProcessFailure]:
    """The rank whose failure made the others fail.

    torch (2.13) takes the earliest, by whole seconds. But a rank that loses another fails within a tenth of a second,
    and the watchdog kills the rank that hangs.
    """
    earliest = min(failure.timestamp for failure in failures.values())

    def order(rank: int) -> tuple[bool, bool, bool, int]:
        failure = failures[rank]
        ended = failure.exitcode in ENDED or failure.timestamp > earliest + LATE_SECONDS
        return ended, failure.exitcode != HUNG, failure.exitcode in FOLLOWING, failure.timestamp

    first = min(failures, key=order)
    return first, failures[first]


if __name__ == "__main__":
    # A normal exit takes most of a second, in which a thread of torch may complain that it cannot wait for itself.
    run_and_leave(lambda: sys.exit(launch(sys.argv[1:])))
