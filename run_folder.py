"""The folder of a run: its name, what it is the run of, and the record of every start."""

import json
import subprocess
import sys
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import config as settings
from config import Config, ConfigError

PACKAGES = ("torch", "torchao", "triton", "numpy", "pyarrow", "tokenizers", "s3fs")


def check_run_folder(config: Config, identity: dict[str, Any]) -> None:
    """Refuse to resume what is not a run, or is the run of another model. Raises ConfigError."""
    folder = Path(config.run.folder)
    if not config.run.folder or not folder.exists():
        return
    if not folder.is_dir() or (any(folder.iterdir()) and not (folder / "model.json").is_file()):
        raise ConfigError(f"run.folder = {config.run.folder!r}: exists, but is not the folder of a run")
    if (folder / "model.json").is_file():
        saved = json.loads((folder / "model.json").read_text(encoding="utf-8"))
        different = [
            f"{key} is {saved.get(key)!r} there and {identity.get(key)!r} in this config"
            for key in sorted(saved.keys() | identity.keys())
            if saved.get(key) != identity.get(key)
        ]
        if different:
            raise ConfigError(
                f"run.folder = {config.run.folder!r} holds the run of another model: {'; '.join(different)}. "
                "Resume with the run's own model, or leave run.folder empty for a new run"
            )


def name_run_folder(config: Config) -> Path:
    """The folder that the config names, or a new name under `run.outputs`; only rank 0 may ask."""
    if config.run.folder:
        return Path(config.run.folder)
    stamp = datetime.now(timezone.utc).strftime("%Y%m%d-%H%M%S")
    name = f"{config.model.name}-{config.model.flavor}-{stamp}"
    outputs = Path(config.run.outputs)
    taken = {path.name for path in outputs.glob(f"{name}*")}
    return outputs / next(n for n in (name, *(f"{name}-{i}" for i in range(2, 1000))) if n not in taken)


def record_start(folder: Path, config: Config, identity: dict[str, Any], world_size: int) -> dict[str, tuple[Any, Any]]:
    """Write what this start runs: config.toml, model.json and a line of starts.jsonl.

    Returns the settings that differ from the start before, dotted key → (old, new). Rank 0 only.
    """
    folder.mkdir(parents=True, exist_ok=True)
    changed = {}
    if (folder / "config.toml").is_file():
        changed = settings.differences(settings.from_dict(settings.read_toml(folder / "config.toml")), config)
        changed.pop("run.folder", None)
    (folder / "config.toml").write_text(settings.to_toml(config), encoding="utf-8")
    (folder / "model.json").write_text(json.dumps(identity, indent=2) + "\n", encoding="utf-8")
    start = {
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "world_size": world_size,
        "changed": changed,
        "git_commit": _git_commit(),
        "python": sys.version.split()[0],
        "packages": {name: _version(name) for name in PACKAGES},
    }
    with open(folder / "starts.jsonl", "a", encoding="utf-8") as file:
        file.write(json.dumps(start) + "\n")
    return changed


def _git_commit() -> str | None:
    """Commit of this code, with "-dirty" where files differ from it; None outside a repository."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=40"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
