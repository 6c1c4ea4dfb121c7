"""Read checkpoints in full and compare every byte with its checksum:

python -m checkpoint.verify FOLDER_OR_S3_URL
"""

from tqdm import tqdm

from checkpoint.list import look, run
from checkpoint.manifest import Manifest, read_metadata, unpickle_metadata
from checkpoint.storage import verify_items
from checkpoint.stores import DamagedError, Store


def verify(store: Store, name: str, manifest: Manifest) -> int:
    """Check all of checkpoint `name`, with a progress bar. Returns the number of its items. Raises DamagedError."""
    metadata = unpickle_metadata(read_metadata(store, name, manifest))
    total = sum(info.length for info in metadata.storage_data.values())
    with tqdm(total=total, unit="B", unit_scale=True, desc=name[:13], disable=None, leave=False) as bar:
        verify_items(store, name, metadata, bar.update)
    return len(metadata.storage_data)


def verify_all(store: Store, names: list[str]) -> int:
    """Print one line per checkpoint; 1 if one that was committed is damaged."""
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
    run("verify", verify_all)
