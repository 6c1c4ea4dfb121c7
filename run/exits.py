"""How ranks tell torchrun and a scheduler why they end. Imports no torch."""

import os

AGAIN = 75  # exit code of ranks that torchrun must start again; sysexits.h: EX_TEMPFAIL
MISTAKE = 2  # exit code of ranks that have explained in one line what is wrong
EXPLAINED = "TITANITE_EXPLAINED"  # in the environment, by run.torchrun: a file for such a rank to make
SHUTDOWN = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"  # in the environment: seconds from a request to stop to torchrun's SIGKILL


def shutdown_seconds() -> float:
    """How long torchrun waits for ranks that were asked to stop, before it kills them."""
    return float(os.environ.get(SHUTDOWN, 30))  # torchrun's own default (torch 2.11 to 2.13)
