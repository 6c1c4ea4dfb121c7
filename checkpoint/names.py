"""What checkpoints and their files are called."""

import re
import secrets
import time


def new_checkpoint_name(step: int, kind: str = "step") -> str:
    """A folder name that no other save has: step, time and chance."""
    return f"{kind}-{step:08d}-{int(time.time()):08x}{secrets.token_hex(2)}"


def by_step(name: str) -> tuple[int, str]:
    """What names are sorted by: their step, then their age; "" comes before all."""
    rest = name.partition("-")[2]  # without the kind: a run's weights alone are no newer for their longer name
    return len(rest), rest  # a step of nine digits, as text, would come before those of eight


def age_seconds(name: str) -> float:
    """Time since `new_checkpoint_name` gave this name."""
    return time.time() - int(name.rpartition("-")[2][:8], 16)


def is_checkpoint_name(name: str) -> bool:
    """Whether `new_checkpoint_name` may have made this name."""
    return re.fullmatch(r"(step|model)-\d{8,}-[0-9a-f]{12}", name) is not None


def step_of(name: str) -> int | None:
    """The step in a checkpoint's folder name, None for any other name."""
    match = re.fullmatch(r"step-(\d{8,})-[0-9a-f]{12}", name)
    return int(match[1]) if match else None


def files_of(rank: int) -> str:
    """How the names of the files begin that `rank` writes into a checkpoint."""
    return f"__{rank}_"


def file_of(rank: int, number: int) -> str:
    """The name of one of them."""
    return f"{files_of(rank)}{number}.distcp"


def rank_of(file: str) -> int:
    """The rank that wrote a file of this name."""
    return int(file.split("_")[2])
