"""Read checkpoints in full and compare every byte with its checksum:

python -m checkpoint.verify FOLDER_OR_S3_URL

Exits with 1 if a committed checkpoint is damaged, or if one is stock DCP's, which cannot be checked.
"""

from tqdm import tqdm

from checkpoint.index import Opened, read_index
from checkpoint.list import STOCK, UNCOMMITTED, look, run
from checkpoint.manifest import MANIFEST, Manifest, read_metadata, read_small
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


def judge(store: Store, name: str) -> tuple[str, bool]:
    """What to say of checkpoint `name`, and whether it is damaged or has no checksums.

    Also doubtful is one, named by the user, that was never committed: beside others it is a usual leftover.
    """
    manifest, problem = look(store, name)
    if problem == UNCOMMITTED:
        return f"{UNCOMMITTED}, nothing will use it", not name
    if problem == STOCK:
        return f"{STOCK}: it can be loaded, but not verified", True
    try:
        if problem:
            raise DamagedError(problem)
        return f"intact, step {manifest['step']}, {verify(store, name, manifest)} items", False
    except DamagedError as error:
        if name and f"{name}/{MANIFEST}" not in store.sizes(name):
            return "removed during this check, as a run in training removes its older ones", False
        return f"DAMAGED: {error}", True


def verify_all(store: Store, names: list[str]) -> int:
    """Print one line per checkpoint. Returns 1 if one is doubtful, else 0."""
    exit_code = 0
    for name in names:
        said, is_doubtful = judge(store, name)
        print(f"{name or store.url}: {said}")
        exit_code |= is_doubtful
    return exit_code


if __name__ == "__main__":
    run("verify", "Read checkpoints in full and compare every byte with its checksum.", verify_all)
