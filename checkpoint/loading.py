"""Find checkpoints and load the newest intact one: the same on all ranks, or none."""

import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from checkpoint import CheckpointError
from checkpoint.branch import split_place
from checkpoint.manifest import MANIFEST, METADATA, Manifest, Opened, committed, open_checkpoint, step_of
from config import Config, ConfigError, close_match, tomllib
from parallel.ranks import Ranks
from storage import DamagedError, Store, join, open_store

T = TypeVar("T")

logger = logging.getLogger(__name__)


def open_place(config: Config, run_folder: Path) -> Store:
    """The place of a run's checkpoints."""
    return open_store(config.checkpoint.folder or run_folder / "checkpoints", config.comm.store_retry_seconds)


def locate(place: str | Path, retry_seconds: float = 180) -> list[tuple[Store, str]]:
    """(store, name) of the checkpoints at `place`, newest first; see `find`.

    `place` may end in @STEP.
    """
    place, step = split_place(str(place))
    store, names = find(place, committed, retry_seconds)
    chosen = [name for name in names if not step or step_of(name) == int(step)]
    if not chosen:
        steps = dict.fromkeys(str(step_of(name)) for name in names)
        raise CheckpointError(f"{place}: no checkpoint of step {step}, only of {', '.join(steps)}")
    return [(store, name) for name in chosen]


def find(
    place: str | Path, names_in: Callable[[Store], list[str]], retry_seconds: float = 180
) -> tuple[Store, list[str]]:
    """The store of a run folder, a folder of checkpoints or one checkpoint, and what `names_in` finds there.

    A single checkpoint has the name "". Raises CheckpointError if there is no checkpoint.
    """
    file = Path(place) / "config.toml"
    urls = [str(place), join(place, "checkpoints")]
    if file.is_file():
        urls = [_recorded_place(file) or urls[1]]  # not the whole folder, which may hold much else
    elif "://" not in str(place) and not Path(place).exists():
        nearby = [str(near) for near in Path(place).parent.glob("*/")]
        raise CheckpointError(f"{place}: does not exist{close_match(str(place), nearby)}")
    for url in urls:
        store = open_store(url, retry_seconds)
        if {MANIFEST, METADATA} & store.sizes().keys():
            return store, [""]
        names = names_in(store)
        if names:
            return store, names
    raise CheckpointError(f"{place}: no checkpoint in {' nor in '.join(urls)}")


def _recorded_place(file: Path) -> str:
    """`checkpoint.folder` in the recorded config of a run of any version, "" if it is not set. Raises ConfigError."""
    try:
        folder = tomllib.loads(file.read_text(encoding="utf-8")).get("checkpoint", {}).get("folder", "")
        return str(folder)
    except (ValueError, AttributeError) as error:
        raise ConfigError(f"{file}: is damaged: {error}") from None


def load_newest(
    candidates: Sequence[tuple[Store, str]], ranks: Ranks, fill: Callable[[Opened], T]
) -> tuple[Opened, T, set[str]]:
    """Call `fill` with the first intact candidate, the same on all ranks. Collective.

    If `fill` raises DamagedError on any rank, all try the next candidate. Other errors are raised
    on all. Returns the candidate, what `fill` returned, and the names of the damaged ones before.
    Raises CheckpointError without any.
    """
    damaged: dict[str, DamagedError] = {}
    for store, name in candidates:
        try:
            opened = ranks.from_rank_0(partial(open_checkpoint, store, name))
            return opened, ranks.together(partial(fill, opened)), {*damaged}
        except DamagedError as error:
            damaged[name] = error
            if ranks.is_coordinator:
                logger.warning(f"damaged checkpoint skipped: {error}")
    names = ", ".join(join(store.url, name) for store, name in candidates)
    *_, last = damaged.values()
    raise CheckpointError(f"no checkpoint is intact ({len(damaged)} tried): {names}; {last}", agreed=True)


def load_place(place: str | Path, fill: Callable[[Opened], T]) -> T:
    """What `fill` makes of the newest intact checkpoint at `place`, in this process alone. Raises TitaniteError."""
    return load_newest(locate(place), Ranks(), fill)[1]


def check_identity(manifest: Manifest, identity: dict[str, Any]) -> None:
    """Raise CheckpointError naming the differences if a checkpoint is of another model."""
    different = model_differences(manifest["identity"], identity)
    if different:
        raise CheckpointError(f"the checkpoint of step {manifest['step']} holds another model: {different}")


def model_differences(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> str:
    """How two models differ, by their identities; "" if they do not."""
    found = []
    ours = json.loads(json.dumps(ours))  # tuples become lists
    for key in sorted(theirs.keys() | ours.keys()):
        there = theirs.get(key)
        here = ours.get(key)
        if isinstance(there, Mapping) and isinstance(here, Mapping):
            nested = model_differences(there, here)
            if nested:
                found.append(f"{key}: {nested}")
        elif (there or None) != (here or None):  # a field added later was off in older models
            found.append(f"{key} is {there!r} there and {here!r} here")
    return "; ".join(found)


def check_same_names(opened: Opened, names: Iterable[str]) -> None:
    """Raise CheckpointError if the checkpoint has weights beyond `names`, those of the model."""
    extra = opened.tensors("model.") - {f"model.{name}" for name in names}
    if extra:
        raise CheckpointError(f"{opened.url}: has {len(extra)} tensors that the model lacks, such as {min(extra)}")
