"""The mean of checkpoints' weights, as a new checkpoint: in the stable phase it shows about what a decay would give.

python -m tools.average outputs/NAME@8000 outputs/NAME@9000 outputs/NAME@10000 averaged
"""

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import torch

from checkpoint.companions import declared_by, find_tokenizer
from checkpoint.files import read_average
from checkpoint.loading import check_identity, load_place
from checkpoint.writing import new_checkpoint, write_checkpoint
from config import command_line
from models import build_model, recorded_model


def average(places: Sequence[str], out: str, tokenizer: str = "") -> None:
    """Write the mean of the weights in the newest intact checkpoint of each place as the checkpoint `out`, in float32.

    Step and config are the last place's, the tokenizer, too, unless `tokenizer` names one. Raises TitaniteError.
    """
    new_checkpoint(out)
    checkpoints = [load_place(place, lambda opened: opened) for place in places]
    last = checkpoints[-1]
    manifest = last.manifest
    for opened in checkpoints:
        check_identity(opened.manifest, manifest["identity"])
    spec, flavor = recorded_model(manifest["identity"])
    model = build_model(spec, flavor)
    mean = {name: torch.empty(weight.shape) for name, weight in model.named_parameters()}
    read_average(checkpoints, mean)
    _, companions = find_tokenizer(last, places[-1], tokenizer, flavor.vocab_size)
    facts: dict[str, Any] = {key: manifest[key] for key in ("step", "identity", "config") if key in manifest}
    facts["averaged"] = [opened.url for opened in checkpoints]
    write_checkpoint(out, mean, lambda name, rows: mean[name][rows], companions, facts | declared_by(last))
    print(f"{out}: the mean of {', '.join(facts['averaged'])}")


def main(argv: Sequence[str]) -> None:
    """The command line. Raises TitaniteError."""
    parser = argparse.ArgumentParser(prog="python -m tools.average", description="The mean of checkpoints' weights.")
    parser.add_argument("places", nargs="+", metavar="RUN_OR_CHECKPOINT", help="RUN, RUN@STEP, or a checkpoint")
    parser.add_argument("out", metavar="CHECKPOINT", help="new folder or s3://bucket/prefix")
    parser.add_argument("--tokenizer", default="", help="tokenizer.json or its folder (default: the last place's)")
    average(**vars(parser.parse_args(argv)))


if __name__ == "__main__":
    with command_line():
        main(sys.argv[1:])
