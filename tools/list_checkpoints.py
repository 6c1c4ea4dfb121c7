"""List checkpoints without reading their data:

python -m tools.list_checkpoints FOLDER_OR_S3_URL

Exits with 1 if sizes show that one is damaged, or if one was never committed.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence

from checkpoint import CheckpointError
from checkpoint.loading import find
from checkpoint.manifest import MANIFEST, Manifest, open_checkpoint, read_manifest
from checkpoint.names import by_step, is_checkpoint_name
from config import command_line
from storage import DamagedError, Store

STOCK = "stock DCP, no checksums"
UNCOMMITTED = "never committed"
COLUMNS = "{:>10}  {:>10}  {:>5}  {:>5}  {:<25}  {:<10}  {}"


def begun(store: Store) -> list[str]:
    """Names of all checkpoints in `store`, committed or not."""
    names = {file.partition("/")[0] for file in store.sizes() if "/" in file}
    return sorted(filter(is_checkpoint_name, names), key=by_step)


def look(store: Store, name: str) -> tuple[Manifest, str]:
    """(manifest or {}, what is wrong with the manifest or file sizes, or "")."""
    sizes = {file.removeprefix(f"{name}/"): size for file, size in store.sizes(name).items()}
    try:
        if MANIFEST not in sizes:
            try:
                return {}, UNCOMMITTED if name or not open_checkpoint(store, name).is_stock else STOCK
            except CheckpointError:
                return {}, UNCOMMITTED
        manifest = read_manifest(store, name)
    except DamagedError as error:
        return {}, str(error)
    wrong = [
        f"{file} has {sizes[file]} bytes, not {size}" if file in sizes else f"{file} is missing"
        for file, size in manifest["files"].items()
        if sizes.get(file) != size
    ]
    return manifest, "; ".join(wrong)


def describe(store: Store, name: str, manifest: Manifest, problem: str) -> str:
    """One line of the table."""
    gigabytes = sum(store.sizes(name).values()) / 1e9
    return COLUMNS.format(
        manifest.get("step", "?"),
        f"{gigabytes:.3f} GB",
        len(manifest.get("files", ())),
        manifest.get("world_size", "?"),
        manifest.get("created", "?"),
        "stock" if problem == STOCK else "unusable" if not manifest else "DAMAGED" if problem else "committed",
        f"{name or store.url}  {problem}".rstrip(),
    )


def print_table(store: Store, names: list[str]) -> int:
    """Print one line per checkpoint. Returns 1 if any does not look intact from outside, else 0."""
    print(COLUMNS.format("step", "size", "files", "ranks", "created", "state", "name"))
    problems = 0
    for name in names:
        manifest, problem = look(store, name)
        problems += problem not in ("", STOCK)
        print(describe(store, name, manifest, problem))
    return min(problems, 1)


def find_begun(place: str, other: str = "") -> Iterator[tuple[Store, list[str]]]:
    """Yield the stores of a place with the checkpoints there, after a line with the store's name if there are several.

    Raises CheckpointError, which ends in `other`, if there are none.
    """
    try:
        found = find(place, begun)
    except CheckpointError as error:
        raise CheckpointError(f"{error}{other}") from None
    for store, names in found:
        if len(found) > 1:  # of a run, whose second place may have others, or other copies
            print(f"{store.url}:")
        yield store, names


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tools.list_checkpoints", description="List checkpoints without reading their data."
    )
    parser.add_argument("place", help="folder or s3:// URL of a run, of checkpoints, or of one checkpoint")
    place = parser.parse_args(argv).place
    with command_line():
        exit_code = max([print_table(store, names) for store, names in find_begun(place)])
    sys.exit(exit_code)


if __name__ == "__main__":
    main()
