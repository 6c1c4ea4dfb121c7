"""Find checkpoints and load the newest intact one: the same on all ranks, or none."""

import logging
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from checkpoint import CheckpointError
from checkpoint.files import tensors_in
from checkpoint.manifest import MANIFEST, METADATA, Manifest, Opened, by_step, open_checkpoint, step_of
from checkpoint.ranks import Ranks
from checkpoint.retention import committed
from config import Config, tomllib
from storage import DamagedError, Store, join, open_store

T = TypeVar("T")

logger = logging.getLogger(__name__)


def open_stores(config: Config, run_folder: Path) -> dict[str, Store]:
    """The places of a run's checkpoints, by their setting: `folder`, and `upload` if it is set."""
    places = {"folder": config.checkpoint.folder or run_folder / "checkpoints", "upload": config.checkpoint.upload}
    return {key: open_store(place, *store_waits(config)) for key, place in places.items() if place}


def store_waits(config: Config) -> tuple[float, float]:
    """How long requests to a store of checkpoints are repeated, and objects not seen yet are waited for, in seconds."""
    return config.comm.store_retry_seconds, config.checkpoint.visibility_seconds


def by_age(found: Iterable[tuple[Store, list[str]]]) -> list[tuple[Store, str]]:
    """(store, name) of the names found in each store, newest first. Copies of one are in the order of the stores."""
    pairs = [(store, name) for store, names in found for name in names]
    return sorted(pairs, key=lambda pair: by_step(pair[1]), reverse=True)  # stable: keeps the order of equal ones


def locate(place: str | Path, *waits: float, step: int | None = None) -> list[tuple[Store, str]]:
    """(store, name) of the checkpoints at `place` (of one `step`), newest first, over all its stores; see `find`."""
    pairs = by_age(find(place, committed, *waits))
    chosen = [pair for pair in pairs if step in (None, step_of(pair[1]))]
    if not chosen:
        steps = dict.fromkeys(str(step_of(name)) for _, name in pairs)
        raise CheckpointError(f"{place}: no checkpoint of step {step}, only of {', '.join(steps)}")
    return chosen


def find(place: str | Path, names_in: Callable[[Store], list[str]], *waits: float) -> list[tuple[Store, list[str]]]:
    """The stores of a run folder, a folder of checkpoints or one checkpoint, each with what `names_in` finds there.

    A run's stores are its config's `checkpoint.folder` and `checkpoint.upload`. A single checkpoint has the name "".
    Raises CheckpointError if there is no checkpoint.
    """
    folder, upload = _places_of_run(Path(place) / "config.toml")
    urls = [url for url in (folder or place, "" if folder else join(place, "checkpoints"), upload) if url]
    found, others = [], list[str]()
    for store in (open_store(url, *waits) for url in urls):
        sizes = store.sizes()
        if {MANIFEST, METADATA} & sizes.keys():
            return [(store, [""])]
        others += [
            join(store.url, file.removesuffix(f"/{METADATA}")) for file in sizes if file.endswith(f"/{METADATA}")
        ]
        if names := names_in(store):
            found.append((store, names))
    if not found:
        newest = max(others, key=lambda url: [int(number) for number in re.findall(r"\d+", url)], default="")
        hint = f"; name one itself, such as {newest}" if newest else ""
        raise CheckpointError(f"{place}: no checkpoint in {' nor in '.join(map(str, urls))}{hint}")
    return found


def _places_of_run(file: Path) -> tuple[str, str]:
    """`checkpoint.folder` and `checkpoint.upload` in the config of a run of any version; "" if not set there."""
    try:
        config = tomllib.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file}: cannot be read: {error}") from None
    settings = config.get("checkpoint", {})
    return settings.get("folder", ""), settings.get("upload", "")


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
            opened = Opened(store, name, *ranks.from_rank_0(partial(_read_index, store, name)))
            filled = ranks.together(partial(fill, opened))
            return opened, filled, {(store.url, name) for store, name in candidates[:number]}
        except DamagedError as error:
            reason = error
            if ranks.is_coordinator:
                logger.warning(f"damaged checkpoint skipped: {error}")
    names = ", ".join(join(store.url, name) for store, name in candidates)
    said = f"no checkpoint is intact ({len(candidates)} tried): {names}; the last one: {reason}{advice}"
    raise CheckpointError(said, agreed=True)


def _read_index(store: Store, name: str) -> tuple[Manifest, Any]:
    opened = open_checkpoint(store, name)
    return opened.manifest, opened.metadata


def load_place(place: str | Path, fill: Callable[[Opened], T]) -> T:
    """Return what `fill` makes of the newest intact checkpoint at `place`, in this process alone.

    Raises CheckpointError, StoreError.
    """
    return load_newest(locate(place), Ranks(), fill)[1]


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
    if extra := sorted(tensors_in(opened.metadata, "model.") - {f"model.{name}" for name in names}):
        raise CheckpointError(f"{opened.url}: has {len(extra)} tensors that the model lacks, such as {extra[0]}")
