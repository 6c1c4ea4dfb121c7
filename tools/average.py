"""The mean of checkpoints' weights, as a new checkpoint: in the stable phase it shows about what a decay would give.

python -m tools.average outputs/NAME@8000 outputs/NAME@9000 outputs/NAME@10000 averaged
"""

import argparse
import logging
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.planner import WriteItem
from tqdm import tqdm

from checkpoint import CheckpointError
from checkpoint.averaging import read_average
from checkpoint.companions import declared_by, find_tokenizer
from checkpoint.files import plan_rows, write_items
from checkpoint.loading import load_place, model_differences
from checkpoint.manifest import MANIFEST, Opened, commit, sha256
from config import ConfigError, command_line
from models import build_model, recorded_model
from storage import StoreError
from tools.hf import PIECE_BYTES, new_checkpoint

MODEL = "model."

logger = logging.getLogger(__name__)


def average(places: Sequence[str], out: str, weights: Sequence[float] = (), tokenizer: str = "") -> None:
    """Write the mean of the weights in the newest intact checkpoint of each place as the checkpoint `out`, in float32.

    `weights`: of each place, divided by their sum. It has the step, tokenizer and config of the last place. A few
    tensors are in memory at a time. `tokenizer` is a tokenizer.json or its folder. Raises TitaniteError.
    """
    weights = weights or [1.0] * len(places)
    total = sum(weights)
    if len(weights) != len(places) or total == 0:
        raise ConfigError(f"--weights {','.join(map(str, weights))}: must be a number for each of {len(places)} places")
    store, name = new_checkpoint(out)
    checkpoints = [load_place(place, lambda opened: opened) for place in places]
    check_same_model(checkpoints)
    last = checkpoints[-1]
    spec, flavor = recorded_model(last.manifest["identity"])
    model = build_model(spec, flavor)
    shapes = dict(model.named_parameters())
    _, companions = find_tokenizer(last, places[-1], tokenizer, flavor.vocab_size)
    facts: dict[str, Any] = {
        "step": last.manifest["step"],
        "world_size": 1,
        "identity": last.manifest["identity"],
        "dataloader": {},
        "config": last.manifest.get("config", ""),
        **declared_by(last),
        "averaged": [opened.url for opened in checkpoints],
        "companions": {file: sha256(content) for file, content in companions.items()},
    }
    factors = [weight / total for weight in weights]

    @lru_cache(maxsize=2)  # of each of the threads that write files
    def mean_of(name: str) -> Tensor:
        tensor = torch.empty(shapes[name].shape)
        read_average(checkpoints, factors, {name: tensor})
        return tensor

    def read(item: WriteItem) -> Tensor:
        assert item.tensor_data is not None
        chunk = item.tensor_data.chunk
        bar.update()
        return mean_of(item.index.fqn.removeprefix(MODEL)).narrow(0, chunk.offsets[0], chunk.sizes[0])

    plan = plan_rows({name: shape.detach() for name, shape in shapes.items()}, PIECE_BYTES)
    try:
        with tqdm(total=sum(map(len, plan.files)), desc="average", disable=None, leave=False) as bar:
            written = write_items(store, name, 0, plan.files, read)
        for file, content in companions.items():
            store.put(f"{name}/{file}", content)
        commit(store, name, plan.metadata, [written], facts)
    except BaseException:
        with suppress(CheckpointError, StoreError):  # the first error says more
            store.remove([f"{name}/{MANIFEST}", *store.sizes(name)])
        raise
    logger.info(f"{out}: the mean of {', '.join(facts['averaged'])}")


def check_same_model(checkpoints: Sequence[Opened]) -> None:
    """Raise CheckpointError if a checkpoint is of another model than the last."""
    last = checkpoints[-1]
    for opened in checkpoints[:-1]:
        different = model_differences(opened.manifest["identity"], last.manifest["identity"])
        if different:
            raise CheckpointError(f"{opened.url} holds another model than {last.url}: {different}")


def main(argv: Sequence[str]) -> None:
    """The command line. Raises TitaniteError."""
    parser = argparse.ArgumentParser(prog="python -m tools.average", description="The mean of checkpoints' weights.")
    parser.add_argument("places", nargs="+", metavar="RUN_OR_CHECKPOINT", help="RUN, RUN@STEP, or a checkpoint")
    parser.add_argument("out", metavar="CHECKPOINT", help="new folder or s3://bucket/prefix")
    parser.add_argument("--weights", default="", help="of each, such as 1,2,3; default: the same")
    parser.add_argument("--tokenizer", default="", help="tokenizer.json or its folder; default: the last one's own")
    arguments = parser.parse_args(argv)
    try:
        weights = [float(weight) for weight in arguments.weights.split(",") if weight]
    except ValueError:
        parser.error(f"--weights {arguments.weights}: must be numbers with commas in between")
    average(arguments.places, arguments.out, weights, arguments.tokenizer)


if __name__ == "__main__":
    logging.basicConfig(format="%(message)s", level=logging.INFO)
    with command_line():
        main(sys.argv[1:])
