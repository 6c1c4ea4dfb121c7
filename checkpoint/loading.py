"""Find checkpoints and load the newest intact one: the same on all ranks, or none."""

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from checkpoint import CheckpointError
from checkpoint.files import tensors_in
from checkpoint.manifest import MANIFEST, METADATA, ROTARY, Manifest, Opened, open_checkpoint
from checkpoint.names import by_step, step_of
from checkpoint.ranks import Ranks
from checkpoint.retention import committed, finished
from config import Config, tomllib
from storage import DamagedError, Store, StoreError, join, open_store

T = TypeVar("T")

logger = logging.getLogger(__name__)


def open_stores(config: Config, run_folder: Path) -> list[Store]:
    """The places of a run's checkpoints: the first, and the second if there is one."""
    places = [config.checkpoint.folder or run_folder / "checkpoints", config.checkpoint.upload]
    return [open_store(place, *store_waits(config)) for place in places if place]


def store_waits(config: Config) -> tuple[float, float]:
    """How long requests to a store of checkpoints are repeated, and objects not seen yet are waited for, in seconds."""
    return config.comm.store_retry_seconds, config.checkpoint.visibility_seconds


def by_age(stores: Sequence[Store]) -> list[tuple[Store, str]]:
    """(store, name) of all committed checkpoints, newest first. Copies of one are in the order of `stores`."""
    found = [(store, name) for store in stores for name in committed(store)]
    return sorted(found, key=lambda pair: by_step(pair[1]), reverse=True)  # stable: keeps the order of equal ones


def locate(place: str | Path, *waits: float, step: int | None = None) -> list[tuple[Store, str]]:
    """(store, name) of the checkpoints at `place` (of one `step`), newest first, over all its stores; see `find`."""
    pairs = [(store, name) for store, names in find(place, committed, *waits) for name in names]
    chosen = [pair for pair in pairs if step in (None, step_of(pair[1]))]
    if not chosen:
        steps = dict.fromkeys(str(step_of(name)) for _, name in pairs)
        raise CheckpointError(f"{place}: no checkpoint of step {step}, only of {', '.join(steps)}")
    return sorted(chosen, key=lambda pair: by_step(pair[1]), reverse=True)


def find(place: str | Path, names_in: Callable[[Store], list[str]], *waits: float) -> list[tuple[Store, list[str]]]:
    """The stores of a run folder, a folder of checkpoints or one checkpoint, each with what `names_in` finds there.

    A run's stores are its config's `checkpoint.folder` and `checkpoint.upload`. A single checkpoint has the name "".
    Raises CheckpointError if there is no checkpoint.
    """
    folder, upload = _places_of_run(Path(place) / "config.toml")
    found, others = [], list[str]()
    first = [folder] if folder else [str(place), join(place, "checkpoints")]
    for url in [*first, upload] if upload else first:
        store = open_store(url, *waits)
        sizes = store.sizes()
        if {MANIFEST, METADATA} & sizes.keys():
            return [(store, [""])]
        stock = {file.removesuffix(f"/{METADATA}") for file in sizes if file.endswith(f"/{METADATA}")}
        alone = {name for name in finished(sizes) if name.startswith("model-")}
        others += [join(url, name) for name in sorted(stock, key=_number) if name in alone or "-" in name]
        if names := names_in(store):
            found.append((store, names))
    if found:
        return found
    searched = f"in {folder}, its checkpoint.folder" if folder else "here, nor in its folder `checkpoints`"
    uploaded = f", nor in {upload}, its checkpoint.upload" if upload else ""
    hint = f"; name one itself, such as {others[-1]}" if others else ""
    raise CheckpointError(f"{place}: no checkpoint {searched}{uploaded}{hint}")


def _number(name: str) -> int:
    """The step in a folder name such as `step-500`, 0 if there is none."""
    return next((int(part) for part in name.split("-") if part.isdigit()), 0)


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

        def read(store: Store = store, name: str = name) -> tuple[Manifest, Any]:
            opened = open_checkpoint(store, name)
            return opened.manifest, opened.metadata

        try:
            opened = Opened(store, name, *ranks.from_rank_0(read))
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
    CheckpointError, StoreError.
    """
    candidates = locate(place)
    while True:
        try:
            return load_newest(candidates, Ranks(), fill)[1]
        except (CheckpointError, StoreError):
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
    extra = sorted(tensors_in(opened.metadata, "model.") - {f"model.{name}" for name in names})
    if extra:
        hint = "" if opened.manifest else f"; {ROTARY}"
        raise CheckpointError(
            f"{opened.url}: has tensors that the model lacks ({len(extra)}), such as {extra[0]}{hint}"
        )
