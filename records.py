"""Files with one JSON record per line, to which every start of a run appends; atomic writes; which code wrote them.

A kill or a full disk may cut the last line. A cut line counts as never written. Imports no torch.
"""

import argparse
import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path
from typing import IO, Any

from config import LOCAL

CODE = Path(__file__).resolve().parent
DIFF = ("diff", "--no-color", "--no-ext-diff")  # however git is set up
PACKAGES = ("torchao", "triton", "numpy", "pyarrow", "tokenizers", "s3fs", "transformers", "torchtitan")


def open_records(path: Path) -> IO[str]:
    """Open the file to append lines. Removes a cut last line first, which the next one would be glued to."""
    if path.is_file():
        os.truncate(path, path.read_bytes().rfind(b"\n") + 1)
    return open(path, "a", encoding="utf-8")


@contextmanager
def written_whole(path: Path) -> Iterator[IO[bytes]]:
    """Create or replace a file. After a kill, a full disk or a power cut, either the old or the new file is whole."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_atomically(path: Path, data: bytes | memoryview) -> None:
    """Create or replace a file as `written_whole` does."""
    with written_whole(path) as file:
        file.write(data)


def output_path(text: str) -> Path:
    """argparse type for an `--output`."""
    if not text or text not in LOCAL:
        raise argparse.ArgumentTypeError(f"{text}: must be a string {LOCAL}")
    return Path(text)


def output_file(text: str) -> Path:
    """argparse type for an `--output` file. Makes its folder, and finds before the work whether it can be written."""
    path = output_path(text)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("ab").close()
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{path}: cannot be written: {error.strerror}") from None
    return path


def read_records(path: Path) -> list[dict[str, Any]]:
    """The records so far, [] if there is no file. Raises ValueError for a line that is not JSON."""
    lines = path.read_text(encoding="utf-8").split("\n")[:-1] if path.is_file() else []
    return [json.loads(line) for line in lines]


def git_commit() -> str | None:
    """The commit of this code, with "-dirty" if files differ from it. None outside a repository."""
    return _git("describe", "--always", "--dirty", "--abbrev=40").decode().strip() or None


def code_changes(leave_out: Path) -> bytes:
    """How this code differs from its commit, for `git apply`: changed files, and new text files of at most 1 MiB.

    Without hidden files, those that git ignores, and those in the folder `leave_out`; new ones only the first 1,000.
    """
    patch = _git(*DIFF, "--relative", "HEAD")
    for name in os.fsdecode(_git("ls-files", "--others", "--exclude-standard", "-z")).split("\0")[:-1][:1000]:
        path, shown = CODE / name, not name.startswith(".") and "/." not in name
        if shown and path.is_file() and path.stat().st_size <= 2**20 and leave_out.resolve() not in path.parents:
            patch += _git(*DIFF, "--no-index", "--", "/dev/null", name) if b"\0" not in path.read_bytes() else b""
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
