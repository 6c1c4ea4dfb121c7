"""Some steps of a loader on a rank, from and to a state file, recorded in the run's ledger."""

import json
from pathlib import Path

import torch.distributed as dist

from config import Config
from data.loader import DataLoader


def walk(run: Path, steps: int, config: Config) -> list[list[list[list[int]]]]:
    """The tokens of `steps` steps: of each step its microbatches, of each of those its rows."""
    loader = DataLoader(config, dist.get_rank(), dist.get_world_size())
    state_file = run / "state.json"
    if state_file.exists():
        loader.load_state_dict(json.loads(state_file.read_text()))
    loader.open_ledger(run)
    given = [[batch.tokens.tolist() for batch in loader.next_step()] for _ in range(steps)]
    states = [None] * dist.get_world_size()
    dist.all_gather_object(states, loader.state_dict())
    assert all(state == states[0] for state in states)
    if dist.get_rank() == 0:
        state_file.write_text(json.dumps(states[0]))
    loader.close()
    return given
