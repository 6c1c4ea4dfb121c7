"""How ranks tell torchrun and a scheduler why they end. Imports no torch."""

AGAIN = 75  # exit code of ranks that torchrun must start again; sysexits.h: EX_TEMPFAIL
MISTAKE = 2  # exit code of ranks that have explained in one line what is wrong
EXPLAINED = "TITANITE_EXPLAINED"  # in the environment, by run.torchrun: a file for such a rank to make
SHUTDOWN = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"  # in the environment: seconds from a request to stop to torchrun's SIGKILL
