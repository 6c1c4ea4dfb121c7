"""Find checkpoints and load the newest intact one: the same on all ranks, or none."""

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from checkpoint.index import Index, Opened, read_index
from checkpoint.manifest import MANIFEST, METADATA, ROTARY, Manifest, read_manifest, read_metadata
from checkpoint.names import by_step
from checkpoint.ranks import Ranks
from checkpoint.retention import committed, finished
from checkpoint.storage import tensors_in
from checkpoint.stores import CheckpointError, DamagedError, Store, join, open_store
from config import Checkpoint, tomllib

T = TypeVar("T")

logger = logging.getLogger(__name__)


def locate(place: str | Path, settings: Checkpoint | None = None) -> list[tuple[Store, str]]:
    """(store, name) of the committed checkpoints at `place`, newest first, over all its stores; see `find`."""
    pairs = [(store, name) for store, names in find(place, committed, settings) for name in names]
    return sorted(pairs, key=lambda pair: by_step(pair[1]), reverse=True)  # stable: keeps the order of equal ones


def find(
    place: str | Path, names_in: Callable[[Store], list[str]], settings: Checkpoint | None = None
) -> list[tuple[Store, list[str]]]:
    """The stores of a run folder, a folder of checkpoints or one checkpoint, each with what `names_in` finds there.

    A run's stores are its config's `checkpoint.folder` and `checkpoint.upload`. A single checkpoint has the name "".
    Raises CheckpointError if there is no checkpoint.
    """
    folder, upload = _places_of_run(Path(place) / "config.toml")
    found, models = [], list[str]()
    first = [folder] if folder else [str(place), join(place, "checkpoints")]
    for url in [*first, upload] if upload else first:
        store = open_store(url, settings)
        sizes = store.sizes()
        if {MANIFEST, METADATA} & sizes.keys():
            return [(store, [""])]
        models += [join(url, name) for name in sorted(finished(sizes)) if name.startswith("model-")]
        if names := names_in(store):
            found.append((store, names))
    if found:
        return found
    searched = f"in {folder}, its checkpoint.folder" if folder else "here, nor in its folder `checkpoints`"
    uploaded = f", nor in {upload}, its checkpoint.upload" if upload else ""
    alone = f"; for the model alone name {models[-1]}" if models else ""
    raise CheckpointError(f"{place}: no checkpoint {searched}{uploaded}{alone}")


def _places_of_run(file: Path) -> list[str]:
    """`checkpoint.folder` and `checkpoint.upload` in the config of a run of any version; "" if not set there."""
    try:
        config = tomllib.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file}: cannot be read: {error}") from None
    section = config.get("checkpoint")
    places = [section.get(key) if isinstance(section, dict) else None for key in ("folder", "upload")]
    return [place if isinstance(place, str) else "" for place in places]


def load_newest(
    candidates: Sequence[tuple[Store, str]], ranks: Ranks, fill: Callable[[Opened], T], advice: str = ""
) -> tuple[Opened, T, set[tuple[str, str]]]:
    """Call `fill` with the first intact candidate, the same on all ranks. Collective.

    If `fill` raises DamagedError on any rank, all try the next candidate. Other errors are raised on all. Returns the
    candidate, what `fill` returned, and (url, name) of the damaged ones before. Raises CheckpointError with `advice` if
    none is intact.
    """
    for number, (store, name) in enumerate(candidates):
        try:
            opened = Opened(store, name, *ranks.from_rank_0(partial(open_one, store, name)))
            filled = ranks.together(partial(fill, opened))
            return opened, filled, {(store.url, name) for store, name in candidates[:number]}
        except DamagedError as error:
            reason = error
            if ranks.rank == 0:
                logger.warning(f"damaged checkpoint skipped: {error}")
    names = ", ".join(join(store.url, name) for store, name in candidates)
    said = f"no checkpoint is intact ({len(candidates)} tried): {names}; the last one: {reason}{advice}"
    raise CheckpointError(said, agreed=True)


def load_place(place: str | Path, fill: Callable[[Opened], T]) -> T:
    """Return what `fill` makes of the newest intact checkpoint at `place`, in this process alone.

    A run that trains may remove the checkpoint being read after it has saved a newer one, which is taken then. Raises
    CheckpointError.
    """
    candidates = locate(place)
    while True:
        try:
            return load_newest(candidates, Ranks(), fill)[1]
        except CheckpointError:
            before, candidates = candidates, locate(place)
            if candidates[0][1] == before[0][1]:
                raise


def check_identity(manifest: Manifest, identity: dict[str, Any]) -> None:
    """Raise CheckpointError naming the differences if a checkpoint is of another model."""
    if different := model_differences(manifest.get("identity", identity), identity):
        raise CheckpointError(f"the checkpoint of step {manifest['step']} holds another model: {different}")


def model_differences(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> str:
    """How two models differ, by their identities; "" if they do not."""
    return "; ".join(
        f"{key} is {theirs.get(key)!r} there and {ours.get(key)!r} here"
        for key in sorted(theirs.keys() | ours.keys())
        if (theirs.get(key) or None) != (ours.get(key) or None)  # a field added later was off in older models
    )


def check_same_names(opened: Opened, names: Collection[str]) -> None:
    """Raise CheckpointError if the checkpoint has weights beyond `names`, those of the model."""
    extra = sorted(tensors_in(opened.index, "model.") - {f"model.{name}" for name in names})
    if extra:
        hint = "" if opened.manifest else f"; {ROTARY}"
        raise CheckpointError(
            f"{opened.url}: has tensors that the model lacks ({len(extra)}), such as {extra[0]}{hint}"
        )


def open_one(store: Store, name: str) -> tuple[Manifest, Index]:
    """Manifest ({} for a stock one) and index of a checkpoint. Raises CheckpointError."""
    if name or MANIFEST in store.sizes():
        manifest = read_manifest(store, name)
        return manifest, read_index(read_metadata(store, name, manifest))
    index = read_index(read_metadata(store, name, None))
    if not index.is_stock:
        raise CheckpointError(f"{store.url}: was never committed, it has no {MANIFEST}; name another checkpoint")
    return {}, index
