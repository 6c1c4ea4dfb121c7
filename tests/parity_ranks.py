"""Parity runs by torchrun: a rank of them, and their start.

torchrun --nproc-per-node=4 -m tests.parity_ranks FOLDER [--one-device]

FOLDER/cases.pickle: name → a Case. FOLDER/plain.pt: what plain loops give, by the case's `expected`. Written:
FOLDER/RANK.json, name → what went wrong; empty: nothing. `--one-device`: all ranks share the first GPU, which NCCL
allows to ranks that name hosts of their own.
"""

import json
import os
import pickle
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any, NamedTuple

import torch

from config import Comm, Config
from metrics import configure_logging
from run.processes import init_distributed, launch_environment, shut_down
from tests.parity import STEPS, close, our_run

ROOT = Path(__file__).parents[1]
TIMEOUT_SECONDS = 150


class Case(NamedTuple):
    """A run to compare with a plain loop."""

    config: Config
    expected: str = ""  # which plain loop
    tolerances: tuple[float, float] = (1e-6, 1e-5)  # of losses and of gradients
    n_layers: int = 0  # 0: as many as in all plain loops
    folder: str = ""  # where the run's own folder stays; empty: nowhere
    later: bool = False  # whether it takes a checkpoint, and so does not begin with the first step


def start_ranks(
    world_size: int,
    cases: dict[str, Case],
    plain: dict[str, Any],
    folder: Path,
    *options: str,
    timeout_seconds: int = TIMEOUT_SECONDS,
) -> tuple[list[dict[str, Any]], str]:
    """Run the cases in one start of torchrun. Returns what each rank wrote of each, and stderr."""
    torch.save(plain, folder / "plain.pt")
    (folder / "cases.pickle").write_bytes(pickle.dumps(cases))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world_size}"]
    command += ["-m", "tests.parity_ranks", str(folder), *options]
    with open(folder / "log", "w") as log:
        ranks = subprocess.Popen(command, cwd=ROOT, stderr=log)
        try:
            ranks.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            ranks.terminate()
            ranks.wait()
    files = [folder / f"{rank}.json" for rank in range(world_size)]
    return [json.loads(file.read_text()) if file.exists() else {} for file in files], (folder / "log").read_text()


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
        model = {"n_layers": case.n_layers} if case.n_layers else {}
        try:
            result = our_run(case.config, STEPS, 1, Path(case.folder) if case.folder else None, device=device, **model)
            gradients = sorted(result["grads"])
            if case.later:
                result["grads"] = {}  # of other steps than `close` expects
            close(result, expected[case.expected], *case.tolerances)
            seen[name] = {"error": "", "gradients": gradients}
        except Exception:
            seen[name] = {"error": traceback.format_exc(), "gradients": []}
        (folder / f"{environment.rank}.json").write_text(json.dumps(seen))  # at once: a later case may end the rank
        shut_down()
        torch._dynamo.reset()  # a rank of a real run compiles for one model


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
