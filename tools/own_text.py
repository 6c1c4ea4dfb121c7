"""Prepare one's own text for a run of ./run_llama_train.sh, unless that is done. Prints the settings of such a run.

python -m tools.own_text mytext/
"""

import argparse
import json
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from pathlib import Path

from config import command_line
from data.prepare import prepare
from data.prepare.options import PIECE_CHARACTERS
from data.prepare.passes import cut
from data.prepare.readers import Tally, documents, plan_units
from data.prepare.sources import File, list_files
from data.shards import digest, open_dataset

HELD_OUT_PIECES = 8  # of a small text; of others a share
FEW_TOKENS = 20_000  # below so many held-out ones, figures are rough
SHARES = (0.02, 0.3)  # least and most that is held out


def prepare_own_text(sources: Sequence[str]) -> list[str]:
    """Prepare folders, files or globs, and return settings to train on them. Raises TitaniteError.

    The dataset is named after the text and a digest of its files' names, sizes and times. So changed text is prepared
    again, and a run resumed by its folder goes on with the old.
    """
    files = list_files(sources)
    name = re.sub(r"[^\w.-]+", "-", Path(sources[0].rstrip("/*")).stem).strip("-.") or "text"
    folder = f"datasets/{name}-{digest(json.dumps(files).encode())[:8]}"
    pieces = sum(file.size for file in files) / PIECE_CHARACTERS
    share = min(max(SHARES[0], HELD_OUT_PIECES / max(pieces, 1)), SHARES[1])
    with redirect_stdout(sys.stderr):
        if not Path(folder, "manifest.json").exists():
            prepare(_pieces(files), folder, validation_fraction=share)
        splits = open_dataset(folder).splits
        if splits["validation"].total_tokens > splits["train"].total_tokens:  # by chance: little text, or equal pieces
            Path(folder, "manifest.json").unlink()  # otherwise nothing would replace it
            prepare(_pieces(files), folder, validation_fraction=0)
        held_out = open_dataset(folder).splits["validation"].total_tokens
        print(f"{folder}: documents are pieces of up to {PIECE_CHARACTERS:,} characters, so that a batch has many")
        if held_out < FEW_TOKENS:
            print(f"warning: {held_out:,} tokens are held out, too few for a steady figure: more text helps")
    wanted = [f"--data.datasets={json.dumps([folder])}"]
    if not held_out:
        wanted.append("--validation.enable=false")
    return wanted


def _pieces(files: Sequence[File]) -> Iterator[str]:
    """Yield the text in pieces. Each is held out or not, as a small text may be one file."""
    tally = Tally()
    for unit in plan_units(files):
        for _, text in documents(unit, tally=tally):
            yield from cut(text, PIECE_CHARACTERS)


if __name__ == "__main__":
    with command_line(exit_code=2):
        parser = argparse.ArgumentParser("python -m tools.own_text", description="Prepare text for a run.")
        parser.add_argument("sources", nargs="+", help="folders, files or globs")
        print(*prepare_own_text(parser.parse_args().sources), sep="\n")
