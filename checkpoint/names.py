"""Names of checkpoints, of their files and of the runs that save them."""

import re
import secrets
import socket
import time
from pathlib import Path

RUN_NAME = ".run_name"  # in the run's folder: holds its name, so that it moves with the folder


def new_checkpoint_name(step: int, kind: str = "step") -> str:
    """A folder name that no other save has: step, time and random digits."""
    return f"{kind}-{step:08d}-{int(time.time()):08x}{secrets.token_hex(2)}"


def by_step(name: str) -> tuple[int, str]:
    """Sort key of names: by step, then by time. "" comes first."""
    rest = name.partition("-")[2]  # without the kind, whose longer name would make `model-...` newer
    return len(rest), rest  # length first: as text, nine-digit steps could sort before eight-digit ones


def age_seconds(name: str) -> float:
    """Seconds since `new_checkpoint_name` made this name."""
    return time.time() - int(name.rpartition("-")[2][:8], 16)


def is_checkpoint_name(name: str) -> bool:
    """Whether `new_checkpoint_name` may have made this name."""
    return re.fullmatch(r"(step|model)-\d{8,}-[0-9a-f]{12}", name) is not None


def step_of(name: str) -> int | None:
    """The step in a checkpoint's folder name, None for any other name."""
    match = re.fullmatch(r"step-(\d{8,})-[0-9a-f]{12}", name)
    return int(match[1]) if match else None


def file_of(rank: int, number: int) -> str:
    """The name of one of the files that `rank` writes into a checkpoint."""
    return f"__{rank}_{number}.distcp"


def run_name(run_folder: Path) -> str:
    """The name that a run's checkpoints bear: that in `.run_name` in its folder, or host:/absolute/run/folder."""
    file = run_folder / RUN_NAME
    held = file.read_text(encoding="utf-8", errors="replace").strip() if file.is_file() else ""
    return held or f"{socket.gethostname()}:{run_folder.absolute()}"


def is_same_run(name: str, other: str) -> bool:
    """Whether two names are one run's. Their hosts may differ: a lost run folder is made again on a new machine."""
    return (name.partition(":")[2] or name) == (other.partition(":")[2] or other)
