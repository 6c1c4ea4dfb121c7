"""torch.distributed.run with time for the last checkpoint, and with mistakes of the user in one line.

python -m run.torchrun --standalone --nproc-per-node=2 train.py --config=train_configs/default.toml
"""

import logging
import os
import signal
import sys
import tempfile
from pathlib import Path

from torch.distributed import run
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from run.exits import EXPLAINED, MISTAKE, SHUTDOWN

ENDED_BY_TORCHRUN = (-signal.SIGTERM, -signal.SIGKILL)  # exit codes of the other ranks, once one has failed
SAVING_SECONDS = "100"  # from a request to stop to SIGKILL, unless the environment says another number


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


if __name__ == "__main__":
    main()
