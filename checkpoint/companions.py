"""The tokenizer's files that stand in a checkpoint or near it: found, read, and compared with the data's."""

from collections.abc import Mapping
from pathlib import Path

from checkpoint import CheckpointError
from checkpoint.manifest import Opened, read_small
from data.tokenizer import TOKENIZER, Tokenizer, parse_tokenizer

# Files copied unchanged, by `tools.hf` to Hugging Face and back.
COMPANIONS = (
    TOKENIZER,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
)


def find_companions(opened: Opened, place: str, tokenizer: Path | None) -> tuple[str, dict[str, bytes]]:
    """Find the tokenizer's files. Returns where they are, and name → content.

    Looks in `tokenizer`, a tokenizer.json or its folder. Without it, in the checkpoint, then in `place`, by which it
    was found, and the two folders above. Raises CheckpointError if there are none.
    """
    folders = [Path(place), *Path(place).absolute().parents[:2]]
    if tokenizer:
        folders = [tokenizer.parent if tokenizer.name == TOKENIZER else tokenizer]
    else:
        digests = opened.manifest.get("companions", {})
        inside = {path.removeprefix(f"{opened.name}/") for path in opened.store.sizes(opened.name)} | digests.keys()
        if TOKENIZER in inside:
            own = [file for file in COMPANIONS if file in inside]
            return opened.url, {file: read_small(opened.store, opened.name, file, digests.get(file)) for file in own}
    for folder in folders:
        if (folder / TOKENIZER).is_file():
            return str(folder), read_companions(folder)
    raise CheckpointError(f"{tokenizer or place}: no {TOKENIZER} found there; name one with --tokenizer")


def read_companions(folder: Path) -> dict[str, bytes]:
    """Name → content of the COMPANIONS in a folder."""
    return {file: (folder / file).read_bytes() for file in COMPANIONS if (folder / file).is_file()}


def companion_tokenizer(origin: str, companions: Mapping[str, bytes], vocab_size: int) -> Tokenizer:
    """The tokenizer that `find_companions` found. Raises TitaniteError if it is invalid or exceeds `vocab_size`."""
    tokenizer = parse_tokenizer(companions, origin)
    if tokenizer.vocab_size > vocab_size:
        raise CheckpointError(
            f"{origin}: its tokenizer has ids up to {tokenizer.vocab_size - 1}, the model only {vocab_size} rows of "
            "embedding; name the tokenizer it was trained with by --tokenizer"
        )
    return tokenizer


def check_vocabulary(tokenizer: Tokenizer, place: str, opened: Opened) -> None:
    """Refuse data whose token ids are other tokens to the weights of `opened`, which was found by `place`.

    A tenth may differ, such as reserved tokens that were given a use. Weights without a tokenizer pass, and those
    beside one that was changed since. Raises TitaniteError.
    """
    try:
        origin, companions = find_companions(opened, place, None)
    except CheckpointError:
        return
    theirs = {id: token for token, id in parse_tokenizer(companions, origin).raw.get_vocab().items()}
    ours = tokenizer.raw.get_vocab()
    others = sum(theirs.get(id, token) != token for token, id in ours.items())
    if others > len(ours) / 10:
        raise CheckpointError(
            f"{origin}: {others:,} of the {len(ours):,} token ids in the data are other tokens in its tokenizer; "
            "prepare the data with that tokenizer (--tokenizer)"
        )
