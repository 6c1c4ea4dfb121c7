"""Run by torchrun: some steps of a loader, from and to a state file, recorded in the run's ledger."""

import json
import sys
from pathlib import Path

import torch.distributed as dist

from config import load_config
from data.loader import build_dataloader


def main() -> None:
    run, steps, *arguments = sys.argv[1:]
    config = load_config(arguments)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    loader = build_dataloader(config, rank, dist.get_world_size())
    state_file = Path(run) / "state.json"
    if state_file.exists():
        loader.load_state_dict(json.loads(state_file.read_text()))
    loader.open_ledger(Path(run))
    given = [[batch.tokens.tolist() for batch in loader.next_step()] for _ in range(int(steps))]
    (Path(run) / f"given-{rank}.json").write_text(json.dumps(given))
    states = [None] * dist.get_world_size()
    dist.all_gather_object(states, loader.state_dict())
    assert all(state == states[0] for state in states)
    if rank == 0:
        state_file.write_text(json.dumps(states[0]))
    loader.close()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
