"""torch.distributed.run with time for the last checkpoint, and with mistakes of the user in one line.

python -m run.torchrun --standalone --nproc-per-node=2 train.py --config=train_configs/default.toml
"""

import logging
import os
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path

from torch.distributed import TCPStore, run
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.utils import _matches_machine_hostname, parse_rendezvous_endpoint

from run.exits import EXPLAINED, MISTAKE, SHUTDOWN

ENDED_BY_TORCHRUN = (-signal.SIGTERM, -signal.SIGKILL)  # exit codes of the other ranks, once one has failed
SAVING_SECONDS = "100"  # from a request to stop to SIGKILL, unless the environment says another number
DEFAULT_PORT = 29400  # torchrun's own
ANSWER_SECONDS = 5.0  # in which the store of another torchrun answers


def main() -> None:
    """Run the ranks as the command line says.

    Signals are passed on to the ranks, which then save and stop; not SIGHUP under nohup, where it is ignored.
    Exits with MISTAKE after one, with 128 + N after signal N, otherwise as torchrun does.
    """
    os.environ.setdefault(SHUTDOWN, SAVING_SECONDS)
    signals = ["SIGTERM", "SIGINT", "SIGQUIT", "SIGUSR1"]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        signals.append("SIGHUP")
    os.environ.setdefault("PET_SIGNALS_TO_HANDLE", ",".join(signals))  # as torchrun's option --signals-to-handle
    held = find_held_port(sys.argv[1:])
    if held:
        sys.exit(f"error: {held}")
    with tempfile.TemporaryDirectory() as folder:
        explained = Path(folder) / "explained"
        os.environ[EXPLAINED] = str(explained)
        for handler in logging.getLogger("torch.distributed").handlers:
            handler.addFilter(lambda record: not explained.exists())
        try:
            run.main()
        except ChildFailedError as error:
            codes = {failure.exitcode for failure in error.failures.values()}
            if not explained.exists() or codes - {MISTAKE, *ENDED_BY_TORCHRUN}:
                raise
            sys.exit(MISTAKE)
        except SignalException as error:  # also from a rank, so that torchrun starts it no more
            if explained.exists():
                sys.exit(MISTAKE)
            sys.exit(128 + error.sigval)


def find_held_port(argv: Sequence[str]) -> str:
    """Why nodes cannot meet at the port of this one, which something else holds; empty: they can, or meet elsewhere.

    Without this, torchrun (2.11 to 2.13) waits several minutes for an answer of whatever listens there.
    """
    config, *_ = run.config_from_args(run.parse_args(argv))
    if config.rdzv_backend != "c10d" or not config.rdzv_endpoint:
        return ""
    host, port = parse_rendezvous_endpoint(config.rdzv_endpoint, DEFAULT_PORT)
    parameters = RendezvousParameters(
        config.rdzv_backend, config.rdzv_endpoint, config.run_id, config.min_nodes, config.max_nodes,
        **config.rdzv_configs,
    )  # fmt: skip
    is_host = parameters.get_as_bool("is_host")
    if not port or is_host is False or (is_host is None and not _matches_machine_hostname(host)):
        return ""
    try:
        socket.create_server(("", port)).close()
    except OSError as error:
        if is_host is None and _is_store(host, port):
            return ""  # of another torchrun of this machine, which came first
        return f"port {port} of this node, where the nodes are to meet, is not free: {error.strerror}; choose another"
    return ""


def _is_store(host: str, port: int) -> bool:
    """Whether a store of torchrun answers. In a thread: torch (2.11 to 2.13) waits on whatever accepts connections."""
    stores = list[TCPStore]()
    thread = threading.Thread(target=lambda: stores.append(TCPStore(host, port, is_master=False)), daemon=True)
    thread.start()
    thread.join(ANSWER_SECONDS)
    return bool(stores)


if __name__ == "__main__":
    main()
