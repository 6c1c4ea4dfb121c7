"""How many processes to start a run with on this machine, if the user does not say.

python -m tools.processes --config=train_configs/debug.toml
"""

import sys
from contextlib import suppress

import torch

from config import Config, ConfigError, command_line, load_config
from data.ledger import build_phases
from parallel.mesh import ParallelDims


def processes(config: Config, devices: int) -> int:
    """The most processes, up to `devices`, that can share the batch. If none can, `devices`: the run then says why."""
    for ranks in range(devices, 0, -1):
        with suppress(ConfigError):
            build_phases(config.training, ParallelDims.from_config(config.parallelism, ranks).dp)
            return ranks
    return devices


if __name__ == "__main__":
    with command_line():
        print(processes(load_config(sys.argv[1:]), torch.accelerator.device_count() or 1))
