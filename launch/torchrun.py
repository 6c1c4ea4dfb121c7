"""torchrun, without its own traceback when a rank has already said what was wrong.

    python -m launch.torchrun --nproc-per-node=2 train.py --config=train_configs/debug.toml

Takes torchrun's arguments. Exits with the code of the rank that failed first.
"""

import logging
import sys

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main


def launch(argv: list[str]) -> int:
    """Run torchrun; return the exit code for the shell."""
    # Which rank failed is said below, in one line.
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel(logging.CRITICAL)
    try:
        main(argv)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode < 0:
            print(f"error: rank {rank} was killed by signal {-failure.exitcode}", file=sys.stderr)
        elif failure.exitcode != USER_ERROR:
            print(f"error: rank {rank} failed with exit code {failure.exitcode}, see above", file=sys.stderr)
        return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
    except SignalException as error:
        print(f"torchrun: ended by {error.sigval.name}; the ranks were asked to stop after their step", file=sys.stderr)
        return 128 + error.sigval
    return 0


USER_ERROR = 2  # the exit code of train.py for a mistake that it has explained

if __name__ == "__main__":
    sys.exit(launch(sys.argv[1:]))
