"""A rank of the parity tests, as torchrun starts it: every case in turn, each with process groups of its own.

torchrun --nproc-per-node=4 -m tests.parity_ranks FOLDER [--one-device]

FOLDER/cases.pickle: name → a Case. FOLDER/plain.pt: what plain loops give, by the case's `expected`. Written:
FOLDER/RANK.json, name → what went wrong; empty: nothing. `--one-device`: all ranks share the first GPU, which NCCL
allows to ranks that name hosts of their own.
"""

import json
import os
import pickle
import sys
import traceback
from pathlib import Path
from typing import Any, NamedTuple

import torch

from config import Comm, Config
from metrics import configure_logging
from run.processes import init_distributed, launch_environment, shut_down
from tests.parity import close, our_run

FULL_STEPS = 5  # a case of so many steps also compares the weights at the end


class Case(NamedTuple):
    """A run to compare with a plain loop."""

    config: Config
    steps: int = FULL_STEPS
    expected: str = ""  # which plain loop
    loss_tolerance: float = 1e-6
    grad_tolerance: float | None = None  # None: ten times that


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


def main(folder: Path, *options: str) -> None:
    if options == ("--one-device",):
        loopback = dict.fromkeys(("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"), "lo")
        os.environ |= loopback | {"NCCL_IB_DISABLE": "1", "NCCL_HOSTID": f"host{os.environ['RANK']}"}
        os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    environment = launch_environment()
    configure_logging((0,), environment.rank)
    torch.set_num_threads(1)
    expected = torch.load(folder / "plain.pt", weights_only=False)
    cases: dict[str, Case] = pickle.loads((folder / "cases.pickle").read_bytes())
    seen: dict[str, dict[str, Any]] = {}
    for name, case in cases.items():
        device = init_distributed(environment, Comm(init_timeout_seconds=120))
        try:
            result = our_run(case.config, case.steps, accumulation=1, device=device)
            compare(result, expected[case.expected], case.steps, case.loss_tolerance, case.grad_tolerance)
            seen[name] = {"error": "", "gradients": sorted(result["grads"])}
        except AssertionError:
            seen[name] = {"error": traceback.format_exc(), "gradients": []}
        (folder / f"{environment.rank}.json").write_text(json.dumps(seen))  # at once: a later case may end the rank
        shut_down()
        torch._dynamo.reset()  # a rank of a real run compiles for one model


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
