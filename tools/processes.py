"""How many processes to start a run with on this machine, if the user does not say.

python -m tools.processes --config=train_configs/debug.toml
"""

import sys

import torch

from config import Config, command_line, load_config

CPU_PROCESSES = 2  # where there is no accelerator


def processes(config: Config, devices: int) -> int:
    """The most processes, up to `devices`, that tp, cp, pp and the batch can be divided among.

    If there is no such number, `devices`: the run then says why.
    """
    parallelism, training = config.parallelism, config.training
    model_ranks = parallelism.tp * parallelism.cp * parallelism.pp
    batches = training.global_batch_size // training.local_batch_size  # 0: one per rank, for any number of ranks
    copies = parallelism.dp_replicate * max(1, parallelism.dp_shard)
    most = copies if parallelism.dp_shard > 0 else devices
    numbers = range(copies, min(most, devices // model_ranks) + 1, copies)
    fitting = [dp for dp in numbers if batches % dp == 0]
    return max(fitting, default=0) * model_ranks or devices


if __name__ == "__main__":
    with command_line():
        print(processes(load_config(sys.argv[1:]), torch.accelerator.device_count() or CPU_PROCESSES))
