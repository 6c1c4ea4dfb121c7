"""Read checkpoints in full and compare every byte with its checksum:

python -m checkpoint.verify FOLDER_OR_S3_URL
"""

import sys

from tqdm import tqdm

from checkpoint.list import find_all, look
from checkpoint.manifest import Manifest, read_metadata, unpickle_metadata
from checkpoint.storage import verify_items
from checkpoint.stores import CheckpointError, DamagedError, Store
from config import TitaniteError


def verify(store: Store, name: str, manifest: Manifest) -> int:
    """Check all of checkpoint `name`, with a progress bar. Returns the number of its items. Raises DamagedError."""
    metadata = unpickle_metadata(read_metadata(store, name, manifest))
    total = sum(info.length for info in metadata.storage_data.values())
    with tqdm(total=total, unit="B", unit_scale=True, desc=name[:13], disable=None, leave=False) as bar:
        verify_items(store, name, metadata, bar.update)
    return len(metadata.storage_data)


def main(arguments: list[str]) -> int:
    """Print one line per checkpoint; 1 if one that was committed is damaged."""
    if len(arguments) != 1 or arguments[0].startswith("-"):
        raise CheckpointError("usage: python -m checkpoint.verify FOLDER_OR_S3_URL")
    store, names = find_all(arguments[0])
    damaged = 0
    for name in names:
        manifest, problem = look(store, name)
        if not manifest and "never committed" in problem:
            print(f"{name}: never committed, no run will use it")
            continue
        try:
            if problem:
                raise DamagedError(problem)
            print(f"{name or store.url}: intact, step {manifest['step']}, {verify(store, name, manifest)} items")
        except DamagedError as error:
            damaged += 1
            print(f"{name or store.url}: DAMAGED: {error}")
    return min(damaged, 1)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except TitaniteError as error:
        sys.exit(f"error: {error}")
