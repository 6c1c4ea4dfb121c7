"""The tokenizer's files that stand in a checkpoint or near it: found, read, and compared with the data's."""

from pathlib import Path
from typing import Any

from checkpoint import CheckpointError
from checkpoint.branch import split_place
from checkpoint.manifest import Opened, read_small
from data.tokenizer import FILES, TOKENIZER, Tokenizer, parse_tokenizer, read_files

GENERATION = "generation_config.json"
DECLARED = ("imported", "generation_config")  # keys of a manifest: config.json and generation_config.json of an import
COMPANIONS = (*FILES, GENERATION)  # copied unchanged, by `tools.hf` to Hugging Face and back


def find_tokenizer(
    opened: Opened, place: str, named: str | Path | None, vocab_size: int
) -> tuple[Tokenizer, dict[str, bytes]]:
    """The tokenizer of a checkpoint and its files, name → content. Raises TitaniteError if it exceeds `vocab_size`."""
    origin, companions = _find_companions(opened, place, named)
    if not companions:
        raise CheckpointError(f"{origin}: no {TOKENIZER} found there; name one with --tokenizer")
    tokenizer = parse_tokenizer(companions, origin)
    if tokenizer.vocab_size > vocab_size:
        rows = f"ids up to {tokenizer.vocab_size - 1}, the model only {vocab_size} rows of embedding"
        raise CheckpointError(f"{origin}: its tokenizer has {rows}; name the one it was trained with by --tokenizer")
    return tokenizer, companions


def _find_companions(opened: Opened, place: str, named: str | Path | None) -> tuple[str, dict[str, bytes]]:
    """Where the tokenizer's files are, and name → content; {} if there are none.

    Looks in `named`, a tokenizer.json or its folder; without it in the checkpoint, `place`, two
    folders above.
    """
    digests = opened.manifest.get("companions", {})
    if TOKENIZER in digests and not named:
        files = {file: read_small(opened.store, opened.name, file, digest) for file, digest in digests.items()}
        return opened.url, files
    if named:
        file = Path(named)
        folders = [file.parent if file.name == TOKENIZER else file]
    else:
        folder = Path(split_place(place)[0])
        folders = [folder, *folder.absolute().parents[:2]]
    for folder in folders:
        if (folder / TOKENIZER).is_file():
            return str(folder), read_files(folder, COMPANIONS)
    return str(named or place), {}


def declared_by(opened: Opened) -> dict[str, Any]:
    """What the Hugging Face model that a checkpoint comes from declared; {} if it comes from none."""
    return {key: opened.manifest[key] for key in DECLARED if key in opened.manifest}


def check_vocabulary(tokenizer: Tokenizer, place: str, opened: Opened) -> None:
    """Refuse data whose token ids are other tokens to the weights of `opened`, which was found by `place`.

    A tenth may differ, such as reserved tokens that were given a use. Weights without a tokenizer
    pass.
    """
    origin, companions = _find_companions(opened, place, None)
    if not companions:
        return
    ours = tokenizer.raw.get_vocab()
    theirs = parse_tokenizer(companions, origin).raw
    others = sum(theirs.id_to_token(id) not in (None, token) for token, id in ours.items())
    if others > len(ours) / 10:
        raise CheckpointError(
            f"{origin}: {others:,} of the {len(ours):,} token ids in the data are other tokens in its tokenizer; "
            "prepare the data with that tokenizer (--tokenizer)"
        )
