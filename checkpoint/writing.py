"""A checkpoint written outside a run: weights alone, whose values come from elsewhere, piece by piece."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.planner import WriteItem
from tqdm import tqdm

from checkpoint import CheckpointError
from checkpoint.files import plan_rows, write_items
from checkpoint.manifest import MANIFEST, commit, sha256
from config import LOCAL_OR_S3, is_form
from storage import Store, StoreError, open_store

PIECE_BYTES = 16 << 20  # of a tensor, so that each rank reads little more than it needs


def new_checkpoint(place: str) -> tuple[Store, str]:
    """(store, name) of a checkpoint to be written. Raises CheckpointError if there is one."""
    parent, _, name = place.rstrip("/").rpartition("/")
    # In an object store // is not /.
    if not is_form(place, LOCAL_OR_S3) or name in ("", ".", "..") or parent.endswith("/"):
        raise CheckpointError(f"{place}: name a new folder, with ~ written out, or s3://bucket/prefix")
    store = open_store(parent or ("/" if place.startswith("/") else "."))
    if store.sizes(name):
        raise CheckpointError(f"{place}: exists; name a new checkpoint")
    return store, name


def write_checkpoint(
    place: str,
    weights: dict[str, Tensor],
    read: Callable[[str, slice], Tensor],
    companions: Mapping[str, bytes],
    facts: Mapping[str, Any],
    check: Callable[[], None] = lambda: None,
) -> None:
    """Write weights alone as a checkpoint, piece by piece; `facts` are for its manifest. Raises TitaniteError.

    `weights` gives names, shapes and types, `read` the rows of one. If that or the `check` of all fails, nothing stays.
    """
    store, name = new_checkpoint(place)
    plan = plan_rows(weights, PIECE_BYTES)
    digests = {file: sha256(content) for file, content in companions.items()}
    facts = {"world_size": 1, "dataloader": {}, "companions": digests, **facts}

    def read_item(item: WriteItem) -> Tensor:
        assert item.tensor_data is not None
        chunk = item.tensor_data.chunk
        rows = slice(chunk.offsets[0], chunk.offsets[0] + chunk.sizes[0])
        bar.update()
        return read(item.index.fqn.removeprefix("model."), rows)

    try:
        with tqdm(total=sum(map(len, plan.files)), desc="write", disable=None, leave=False) as bar:
            written = write_items(store, name, 0, plan.files, read_item)
        for companion, content in companions.items():
            store.put(f"{name}/{companion}", content)
        commit(store, name, plan.metadata, [written], facts)
        check()
    except BaseException:
        with suppress(CheckpointError, StoreError):  # the first error says more
            store.remove([f"{name}/{MANIFEST}", *store.sizes(name)])
        raise
