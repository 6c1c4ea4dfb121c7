"""Prepare one's own text for a run of ./run_llama_train.sh, unless that is done. Prints the settings of such a run.

python -m tools.own_text mytext/
"""

import argparse
import json
import re
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path

from config import command_line
from data.prepare import main as prepare
from data.shards import SPLITS, digest
from data.sources import documents, list_files, plan_units

MAX_CHARACTERS = 4000  # of a piece of text
HELD_OUT_PIECES = 8  # of a small text; of others a share
SHARES = (0.02, 0.3)  # least and most that is held out


def prepare_own_text(sources: Sequence[str]) -> list[str]:
    """Prepare folders, files or globs, and return settings to train on them. Raises TitaniteError.

    The dataset is named after the text and a digest of its files' names, sizes and times. So changed text is prepared
    again, and a run resumed by its folder goes on with the old.
    """
    files = list_files(sources)
    name = re.sub(r"[^\w.-]+", "-", Path(sources[0].rstrip("/*")).stem).strip("-.") or "text"
    folder = Path("datasets") / f"{name}-{digest(json.dumps(files).encode())[:8]}"
    manifest = folder / "manifest.json"
    if not manifest.exists():
        pieces = sum(file.size for file in files) / MAX_CHARACTERS
        share = min(max(SHARES[0], HELD_OUT_PIECES / max(pieces, 1)), SHARES[1])
        words = [f"--output={folder}", f"--max-characters={MAX_CHARACTERS}", f"--validation-fraction={share:.3g}"]
        with redirect_stdout(sys.stderr):
            prepare([*words, "--hold-out-pieces", "--source", *sources])
    _, first = next(documents(plan_units(files)[0], ("text",), "text", lambda *_: None))
    splits = {shard["split"] for shard in json.loads(manifest.read_text(encoding="utf-8"))["shards"]}
    prompt = " ".join(first.split()[:3])[:40]
    wanted = [f"--data.datasets={json.dumps([str(folder)])}", f"--validation.sample_prompt={prompt}"]
    return wanted if splits == {*SPLITS} else [*wanted, "--validation.enable=false"]


if __name__ == "__main__":
    with command_line():
        parser = argparse.ArgumentParser("python -m tools.own_text", description="Prepare text for a run.")
        parser.add_argument("sources", nargs="+", help="folders, files or globs")
        print(*prepare_own_text(parser.parse_args().sources), sep="\n")
