"""Read checkpoints in full and compare every byte with its checksum:

python -m checkpoint.verify FOLDER_OR_S3_URL

Exits with 1 if a committed checkpoint is damaged, or if one is stock DCP's, which cannot be checked.
"""

from tqdm import tqdm

from checkpoint.index import Opened, read_index
from checkpoint.list import STOCK, UNCOMMITTED, look, run
from checkpoint.manifest import MANIFEST, Manifest, read_metadata, read_small
from checkpoint.retention import never_committed
from checkpoint.storage import verify_items
from checkpoint.stores import DamagedError, Store


def verify(store: Store, name: str, manifest: Manifest) -> int:
    """Check all of checkpoint `name`, with a progress bar. Returns its number of items. Raises DamagedError."""
    index = read_index(read_metadata(store, name, manifest))
    for file, digest in manifest.get("companions", {}).items():
        read_small(store, name, file, digest)
    total = int(index.places[:, 2].sum())
    with tqdm(total=total, unit="B", unit_scale=True, desc=name[:13], disable=None, leave=False) as bar:
        verify_items(Opened(store, name, manifest, index), bar.update)
    return len(index.places)


def verify_all(store: Store, names: list[str]) -> int:
    """Print one line per checkpoint. Returns 1 if one is damaged or has no checksums, else 0.

    Also 1 if the only one, which the user has named, was never committed: beside others it is a usual leftover.
    """
    doubtful = 0
    for name in names:
        manifest, problem = look(store, name)
        place = name or store.url
        if problem == UNCOMMITTED:
            doubtful += not name
            print(f"{place}: never committed, nothing will use it")
            continue
        if problem == STOCK:
            doubtful += 1
            print(f"{place}: {STOCK}: it can be loaded, but not verified")
            continue
        try:
            if problem:
                raise DamagedError(problem)
            print(f"{place}: intact, step {manifest['step']}, {verify(store, name, manifest)} items")
        except DamagedError as error:
            if name and never_committed(store, [name]) and f"{name}/{MANIFEST}" not in store.sizes(name):
                print(f"{place}: removed during this check, as a run in training removes its older ones")
                continue
            doubtful += 1
            print(f"{place}: DAMAGED: {error}")
    return min(doubtful, 1)


if __name__ == "__main__":
    run("verify", "Read checkpoints in full and compare every byte with its checksum.", verify_all)
