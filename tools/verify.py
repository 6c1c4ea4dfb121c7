"""Read datasets and checkpoints in full, and compare every block and item with its checksum and the manifest.

    python -m tools.verify datasets/stdlib outputs/RUN s3://bucket/dataset
    python -m tools.verify --list outputs/RUN       its checkpoints, by their manifests and sizes alone

Exits with 1 if a dataset has a fault, if a committed checkpoint is damaged, or if the one named was never committed.
"""

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from tqdm import tqdm

from checkpoint.files import verify_items
from checkpoint.loading import find
from checkpoint.manifest import MANIFEST, Manifest, begun, open_checkpoint, path_of, read_manifest, read_small
from config import Config, Data, command_line
from data.files import Files
from data.shards import DataError, Dataset, Split, open_dataset
from storage import DamagedError, MissingError, Store


def faults(dataset: Dataset) -> Iterator[str]:
    """Yield a message for each fault of a dataset. Raises StoreError if it cannot be read."""
    try:
        dataset.check_tokenizer()
    except (DataError, DamagedError) as error:
        yield str(error)

    def check(split: Split, block: int) -> str:
        try:
            split.read(block)
        except DataError as error:
            return str(error).partition("; `python -m tools.verify`")[0]  # without the advice to run this command
        return ""

    blocks = [(split, block) for split in dataset.splits.values() for block in range(len(split.size))]
    with ThreadPoolExecutor(4) as threads:
        found = threads.map(lambda block: check(*block), blocks)
        yield from filter(None, tqdm(found, desc="verify", unit=" blocks", total=len(blocks)))


def judge(store: Store, name: str, reads: bool) -> tuple[str, bool]:
    """What to say of checkpoint `name`, and whether it is doubtful. `reads`: also checks its data.

    One that was never committed is doubtful only if the user named it: beside others it is a usual leftover.
    """
    sizes = store.sizes(name)
    if path_of(name, MANIFEST) not in sizes:
        return "never committed, nothing will use it", not name
    state = "committed"
    try:
        manifest = read_manifest(store, name)
        for file, size in manifest["files"].items():
            found = sizes.get(path_of(name, file), "no")
            if found != size:
                raise DamagedError(f"{file} has {found} bytes, not {size}")
        if reads:
            state = f"intact, {read_all(store, name, manifest)} items"
    except DamagedError as error:
        if name and path_of(name, MANIFEST) not in store.sizes(name):
            return "removed during this check, as a run in training removes its older ones", False
        return f"DAMAGED: {error}", True
    gigabytes = sum(manifest["files"].values()) / 1e9
    ranks = manifest.get("world_size", "?")
    return f"{state}, step {manifest['step']}, {gigabytes:.3f} GB by {ranks} ranks, {manifest['created']}", False


def read_all(store: Store, name: str, manifest: Manifest) -> int:
    """Check every byte of a checkpoint. Returns how many items it has. Raises DamagedError."""
    for file, digest in manifest.get("companions", {}).items():
        read_small(store, name, file, digest)
    opened = open_checkpoint(store, name)
    items = opened.metadata.storage_data
    total = sum(info.length for info in items.values())
    with tqdm(total=total, unit="B", unit_scale=True, desc=name[:13], disable=None, leave=False) as bar:
        verify_items(opened, bar.update)
    return len(items)


def verify_checkpoints(place: str, reads: bool) -> int:
    """Print one line per checkpoint of a place. Returns how many are doubtful. Raises CheckpointError without any."""
    doubtful = 0
    store, names = find(place, lambda store: begun(store.sizes()))
    for name in names:
        verdict, is_doubtful = judge(store, name, reads)
        print(f"{name or store.url}: {verdict}")
        doubtful += is_doubtful
    return doubtful


def verify_place(place: str, reads: bool) -> int:
    """Verify the dataset or the checkpoints at a folder or URL. Returns how many faults or doubtful checkpoints."""
    with tempfile.TemporaryDirectory() as cache:  # a run's own cache would hide faults of the dataset
        config = Config(data=Data(cache_folder=cache, cache_gb=1))
        try:
            Files(place, config).read("manifest.json")
        except MissingError:
            return verify_checkpoints(place, reads)
        dataset = open_dataset(place, config)
        messages = list(faults(dataset))
    for message in messages:
        print(message)
    for name, split in dataset.splits.items():
        documents = sum(shard.documents for shard in split.shards)
        print(f"{dataset.url}: {name}: documents {documents:,}, tokens {split.total_tokens:,}")
    return len(messages)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.verify", description="Read all of datasets and checkpoints.")
    parser.add_argument("place", nargs="+", help="folder or URL of a dataset, a run, checkpoints or one checkpoint")
    parser.add_argument("--list", action="store_true", help="of checkpoints, read manifests and compare sizes only")
    options = parser.parse_args(argv)
    with command_line():
        wrong = sum(verify_place(place, not options.list) for place in options.place)
        if wrong:
            sys.exit(f"faults: {wrong}")
        print("no faults")


if __name__ == "__main__":
    main()
