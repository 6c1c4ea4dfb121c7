"""One rank of benchmarks.chaos: train.py with a tiny model, and faults from inside that files ask for.

A file `RANK-nan` in $CHAOS_FOLDER spoils one forward of that rank; `RANK-stall` makes it wait for ever between two
steps.
"""

import dataclasses
import os
import signal
import time
from pathlib import Path
from typing import Any

from torch import nn

import start
import train
from config import Model
from models import find_model
from run.run import run_and_leave


def tiny_model(model: Model, data_vocab_size: int) -> tuple[Any, Any]:
    """The debug flavor, made smaller so that a step takes milliseconds."""
    spec, flavor = find_model(model, data_vocab_size)
    return spec, dataclasses.replace(flavor, dim=32, n_layers=2, n_heads=4, n_kv_heads=2, hidden_dim=64)


def asked_for(fault: str) -> bool:
    """Whether the fault was asked for; true once per request."""
    file = Path(os.environ["CHAOS_FOLDER"], f"{os.environ['RANK']}-{fault}")
    if not file.exists():
        return False
    file.unlink()
    return True


def spoil(module: nn.Module, inputs: Any, output: Any) -> Any:
    """A forward hook that spoils one result, as a failing processor would, if asked for."""
    if isinstance(module, nn.Embedding):
        time.sleep(float(os.environ.get("CHAOS_PAUSE_SECONDS", 0)))
    if isinstance(module, nn.Embedding) and asked_for("nan"):
        return output * float("nan")
    if isinstance(module, nn.Embedding) and asked_for("stall"):
        signal.pause()
    return output


if __name__ == "__main__":
    nn.modules.module.register_module_forward_hook(spoil)
    start.find_model = tiny_model
    run_and_leave(train.main)
