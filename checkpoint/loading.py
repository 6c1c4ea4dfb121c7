"""Find checkpoints and load the newest intact one: the same on all ranks, or none."""

import json
import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from checkpoint import CheckpointError
from checkpoint.best import best_of
from checkpoint.branch import BEST, split_place
from checkpoint.manifest import MANIFEST, METADATA, Manifest, Opened, by_step, open_checkpoint, step_of
from checkpoint.owner import own_checkpoints
from checkpoint.ranks import Ranks
from checkpoint.retention import committed
from config import Config, tomllib
from storage import DamagedError, Store, join, open_store

T = TypeVar("T")

logger = logging.getLogger(__name__)


def open_stores(config: Config, run_folder: Path) -> dict[str, Store]:
    """The places of a run's checkpoints, by their setting: `folder`, and `upload` if it is set."""
    places = {"folder": config.checkpoint.folder or run_folder / "checkpoints", "upload": config.checkpoint.upload}
    return {key: open_store(place, config.comm.store_retry_seconds) for key, place in places.items() if place}


def by_age(found: Iterable[tuple[Store, list[str]]]) -> list[tuple[Store, str]]:
    """(store, name) of the names found in each store, newest first. Copies of one are in the order of the stores."""
    pairs = [(store, name) for store, names in found for name in names]
    return sorted(pairs, key=lambda pair: by_step(pair[1]), reverse=True)  # stable: keeps the order of equal ones


def locate(place: str | Path, retry_seconds: float = 180, step: int | None = None) -> list[tuple[Store, str]]:
    """(store, name) of the checkpoints at `place` (of one `step`), newest first, over all its stores; see `find`.

    `place` may end in @STEP or @best. A run folder stands for the checkpoints that it knows: others there may be those
    of a copy, or of the original.
    """
    place, which = split_place(str(place))
    if which.isdecimal():
        step = int(which)
    found = by_age(find(place, committed, retry_seconds))
    pairs = own_checkpoints(Path(place), found)
    if not pairs:
        store, name = found[0]
        unknown = f"does not know {join(store.url, name)}"
        raise CheckpointError(f"{place}: is a copy of a run, or an older state of it, and {unknown}: name that itself")
    if which == BEST:
        best = best_of({name for _, name in pairs}, Path(place))
        if best is None:
            advice = "name the folder of a run that validates at steps with a checkpoint"
            raise CheckpointError(f"{place}@{BEST}: none of its checkpoints has a validation loss; {advice}")
        return [pair for pair in pairs if pair[1] == best]
    chosen = [pair for pair in pairs if step in (None, step_of(pair[1]))]
    if not chosen:
        steps = dict.fromkeys(str(step_of(name)) for _, name in pairs)
        raise CheckpointError(f"{place}: no checkpoint of step {step}, only of {', '.join(steps)}")
    return chosen


def find(
    place: str | Path, names_in: Callable[[Store], list[str]], retry_seconds: float = 180
) -> list[tuple[Store, list[str]]]:
    """The stores of a run folder, a folder of checkpoints or one checkpoint, each with what `names_in` finds there.

    A run's stores are its config's `checkpoint.folder` and `checkpoint.upload`. A single checkpoint has the name "".
    Raises CheckpointError if there is no checkpoint.
    """
    file = Path(place) / "config.toml"  # of a run of any version
    settings = tomllib.loads(file.read_text(encoding="utf-8")).get("checkpoint", {}) if file.is_file() else {}
    folder, upload = settings.get("folder"), settings.get("upload")
    urls = [url for url in (folder or place, "" if folder else join(place, "checkpoints"), upload) if url]
    found = []
    for store in (open_store(url, retry_seconds) for url in urls):
        if {MANIFEST, METADATA} & store.sizes().keys():
            return [(store, [""])]
        if names := names_in(store):
            found.append((store, names))
    if not found:
        raise CheckpointError(f"{place}: no checkpoint in {' nor in '.join(map(str, urls))}")
    return found


def load_newest(
    candidates: Sequence[tuple[Store, str]], ranks: Ranks, fill: Callable[[Opened], T]
) -> tuple[Opened, T, set[tuple[str, str]]]:
    """Call `fill` with the first intact candidate, the same on all ranks. Collective.

    If `fill` raises DamagedError on any rank, all try the next candidate. Other errors are raised on all. Returns the
    candidate, what `fill` returned, and (url, name) of the damaged ones before. Raises CheckpointError without any.
    """
    for number, (store, name) in enumerate(candidates):
        try:
            opened = ranks.from_rank_0(partial(open_checkpoint, store, name))
            filled = ranks.together(partial(fill, opened))
            return opened, filled, {(store.url, name) for store, name in candidates[:number]}
        except DamagedError as error:
            reason = error
            if ranks.is_coordinator:
                logger.warning(f"damaged checkpoint skipped: {error}")
    names = ", ".join(join(store.url, name) for store, name in candidates)
    raise CheckpointError(f"no checkpoint is intact ({len(candidates)} tried): {names}; {reason}", agreed=True)


def load_place(place: str | Path, fill: Callable[[Opened], T]) -> T:
    """What `fill` makes of the newest intact checkpoint at `place`, in this process alone. Raises TitaniteError."""
    return load_newest(locate(place), Ranks(), fill)[1]


def check_identity(manifest: Manifest, identity: dict[str, Any]) -> None:
    """Raise CheckpointError naming the differences if a checkpoint is of another model."""
    ours = json.loads(json.dumps(identity))  # tuples become lists
    if different := model_differences(manifest.get("identity", ours), ours):
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
    if extra := sorted(opened.tensors("model.") - {f"model.{name}" for name in names}):
        raise CheckpointError(f"{opened.url}: has {len(extra)} tensors that the model lacks, such as {extra[0]}")
