"""Which code and packages a run used. Imports no torch."""

import os
import subprocess
from contextlib import suppress
from importlib import metadata
from pathlib import Path

CODE = Path(__file__).resolve().parents[1]
DIFF = ("diff", "--no-color", "--no-ext-diff")  # however git is set up
PACKAGES = ("torchao", "triton", "numpy", "pyarrow", "tokenizers", "s3fs", "transformers", "torchtitan")


def git_commit() -> str | None:
    """The commit of this code, with "-dirty" if files differ from it. None outside a repository."""
    return _git("describe", "--always", "--dirty", "--abbrev=40").decode().strip() or None


def code_changes() -> bytes:
    """How this code differs from its commit, for `git apply`: changed files, and new ones of Python."""
    patch = _git(*DIFF, "--relative", "HEAD")
    new = os.fsdecode(_git("ls-files", "--others", "--exclude-standard", "-z", "*.py"))
    for name in new.split("\0")[:-1]:
        patch += _git(*DIFF, "--no-index", "--", "/dev/null", name)
    return patch


def _git(*words: str) -> bytes:
    """What git prints for this code; nothing outside a repository or without git."""
    command = ["git", "--no-optional-locks", "-c", "core.quotepath=false", "-C", str(CODE), *words]
    with suppress(OSError):
        return subprocess.run(command, capture_output=True, check=False).stdout
    return b""


def package_versions() -> dict[str, str]:
    """Package → version, of the installed ones that shape results."""
    return {package.name: package.version for package in metadata.distributions() if package.name in PACKAGES}
