"""Prepare one's own text for a run of ./run_llama_train.sh, unless that is done. Prints the settings of such a run.

python -m tools.own_text mytext/
"""

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path

from config import command_line
from data.prepare import main as prepare
from data.shards import digest
from data.sources import File, documents, kind_of, list_files, plan_units

MAX_CHARACTERS = 4000  # of a piece of text
HELD_OUT_PIECES = 8  # of a small text; of others a share
SHARES = (0.02, 0.3)  # least and most that is held out
PROMPT_BYTES = 40  # of the sample's prompt, which must be shorter than a sequence


def prepare_own_text(sources: Sequence[str]) -> list[str]:
    """Prepare folders, files or globs, and return settings to train on them. Raises TitaniteError.

    The dataset is named after the text and a digest of its files' names, sizes and times. So changed text is prepared
    again, and a run resumed by its folder goes on with the old.
    """
    files = list_files(sources)
    name = re.sub(r"[^\w.-]+", "-", Path(sources[0].rstrip("/*")).stem).strip("-.") or "text"
    folder = Path("datasets") / f"{name}-{digest(json.dumps(files).encode())[:8]}"
    words = [f"--output={folder}", "--source", *sources]
    hold_out: list[str] = []
    if any(file.size > MAX_CHARACTERS or kind_of(file.url) != ("text", "") for file in files):
        words.append(f"--max-characters={MAX_CHARACTERS}")
        hold_out.append("--hold-out-pieces")
    pieces = sum(file.size for file in files) / MAX_CHARACTERS
    share = min(max(SHARES[0], HELD_OUT_PIECES / max(pieces, 1)), SHARES[1])
    with redirect_stdout(sys.stderr):
        if not (folder / "manifest.json").exists():
            prepare([*words, *hold_out, f"--validation-fraction={share:.3g}"])
        tokens = count_tokens(folder)
        if tokens["validation"] > tokens["train"]:  # by chance: little text, or pieces that are equal
            prepare([*words, "--validation-fraction=0", "--overwrite"])
    wanted = [f"--data.datasets={json.dumps([str(folder)])}"]
    prompt = first_words(files)
    if prompt:
        wanted.append(f"--validation.sample_prompt={prompt}")
    if not count_tokens(folder)["validation"]:
        wanted.append("--validation.enable=false")
    return wanted


def count_tokens(folder: Path) -> Counter[str]:
    """The tokens of each split of a dataset."""
    manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    tokens = Counter[str]()
    for shard in manifest["shards"]:
        tokens[shard["split"]] += shard["tokens"]
    return tokens


def first_words(files: Sequence[File]) -> str:
    """Up to three words with which the text begins."""
    for unit in plan_units(files):
        for _, text in documents(unit, ("text",), "text", lambda *_: None):
            words = text.split(maxsplit=3)[:3]
            if words:
                return " ".join(words).encode()[:PROMPT_BYTES].decode(errors="ignore")
    return ""


if __name__ == "__main__":
    with command_line():
        parser = argparse.ArgumentParser("python -m tools.own_text", description="Prepare text for a run.")
        parser.add_argument("sources", nargs="+", help="folders, files or globs")
        print(*prepare_own_text(parser.parse_args().sources), sep="\n")
