"""How many processes to start a run with on this machine: NGPU, or as many as can share its batch.

python -m tools.processes --config=train_configs/debug.toml
"""

import os
import sys
from contextlib import suppress

import torch

from config import Config, ConfigError, command_line, load_config
from data.ledger import build_phases
from parallel.mesh import ParallelDims


def processes(config: Config, most: int, fewest: int = 1) -> int:
    """The most processes that can share the batch. Raises ConfigError if none can."""
    for ranks in range(most, fewest, -1):
        with suppress(ConfigError):
            return check_batch(config, ranks)
    return check_batch(config, fewest)


def check_batch(config: Config, ranks: int) -> int:
    """Returns `ranks`. Raises ConfigError if so many cannot share the batch."""
    build_phases(config.training, ParallelDims.from_config(config.parallelism, ranks).dp)
    return ranks


if __name__ == "__main__":
    with command_line(exit_code=2):
        asked = int(os.environ.get("NGPU") or 0)
        print(processes(load_config(sys.argv[1:]), asked or torch.accelerator.device_count() or 1, asked or 1))
