"""A rank of the parity tests, as torchrun starts it: every case in turn, each with process groups of its own.

torchrun --nproc-per-node=4 -m tests.parity_ranks FOLDER

FOLDER/cases.pickle: name → (config, steps). FOLDER/plain.pt: what a plain loop gives. Written: FOLDER/RANK.json,
name → what went wrong; empty: nothing.
"""

import json
import pickle
import sys
import traceback
from pathlib import Path
from typing import Any

import torch

from config import Comm, Config
from metrics import configure_logging
from parallel.comm import init_distributed, launch_environment, shut_down
from tests.parity import close, our_run

FULL_STEPS = 5  # a case of so many steps also compares the weights at the end


def compare(
    result: dict[str, Any],
    expected: dict[str, Any],
    steps: int,
    loss_tolerance: float = 1e-6,
    grad_tolerance: float | None = None,
) -> None:
    """What `close` compares, initial weights bit for bit, and the weights after all steps."""
    close(result, expected, loss_tolerance, grad_tolerance)
    for parameter, value in result["weights"].items():
        plain = expected["weights"][parameter]
        assert steps < FULL_STEPS or (value - plain).norm() < 1e3 * loss_tolerance * plain.norm(), parameter
        assert torch.equal(result["init"][parameter], expected["init"][parameter]), parameter


def main(folder: Path) -> None:
    environment = launch_environment()
    configure_logging((0,), environment.rank, environment.world_size)
    torch.set_num_threads(1)
    expected = torch.load(folder / "plain.pt", weights_only=False)
    cases: dict[str, tuple[Config, int]] = pickle.loads((folder / "cases.pickle").read_bytes())
    seen: dict[str, dict[str, Any]] = {}
    for name, (config, steps) in cases.items():
        init_distributed(environment, Comm(init_timeout_seconds=120))
        try:
            result = our_run(config, steps, accumulation=1)
            compare(result, expected, steps)
            seen[name] = {"error": "", "gradients": sorted(result["grads"])}
        except AssertionError:
            seen[name] = {"error": traceback.format_exc(), "gradients": []}
        shut_down()
        torch._dynamo.reset()  # a rank of a real run compiles for one model
    (folder / f"{environment.rank}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
