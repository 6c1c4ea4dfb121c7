"""Load a trained model and its tokenizer into one process, from a run, a folder of checkpoints or a URL."""

import argparse
from dataclasses import dataclass

import torch
from torch import nn

from checkpoint.companions import find_tokenizer
from checkpoint.files import read_state
from checkpoint.loading import check_same_names, load_place
from checkpoint.manifest import Manifest, Opened
from checkpoint.state import model_tensors
from config import parse_schedule, tomllib
from data.tokenizer import Tokenizer
from models import build_model, recorded_model
from parallel.device import device_type


@dataclass(frozen=True)
class Trained:
    """A model in one process with the weights of a checkpoint, and what belongs to it."""

    model: nn.Module
    tokenizer: Tokenizer
    manifest: Manifest
    place: str  # of the checkpoint
    device: torch.device


def longest_sequence(manifest: Manifest) -> int:
    """Tokens of the longest sequences that a checkpoint was trained on, here or before its import; 0 if unknown."""
    run = tomllib.loads(manifest.get("config", ""))
    imported = manifest.get("imported", {}).get("max_position_embeddings", 0)
    return max(imported, *(length for _, length in parse_schedule(run.get("training", {}).get("seq_len", 0))))


def load_trained(place: str, *, device: torch.device, dtype: torch.dtype, tokenizer: str = "") -> Trained:
    """Load the newest intact checkpoint of a run, a folder of checkpoints or a URL.

    `tokenizer` is a tokenizer.json or its folder, "" the run's own. Raises TitaniteError.
    """

    def fill(opened: Opened) -> Trained:
        spec, flavor = recorded_model(opened.manifest["identity"])
        text, _ = find_tokenizer(opened, place, tokenizer, flavor.vocab_size)
        model = build_model(spec, flavor).to(dtype).to_empty(device=device).eval()
        tensors = model_tensors([model])
        check_same_names(opened, tensors)
        read_state(opened, {"model": tensors})
        return Trained(model, text, opened.manifest, opened.url, device)

    return load_place(place, fill)


def add_place_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that all commands on a trained model share."""
    parser.add_argument("place", metavar="RUN_OR_CHECKPOINT", help="run, checkpoints or one; RUN@STEP")
    parser.add_argument("--tokenizer", default="", help="tokenizer.json or its folder; default: the run's own")
    dtype = "float32" if device_type() == "cpu" else "bfloat16"
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default=dtype, help="to compute in (%(default)s)")


def load_from_arguments(arguments: argparse.Namespace) -> Trained:
    """Load the model that these arguments name to this machine's device. Raises TitaniteError."""
    dtype = getattr(torch, arguments.dtype)
    return load_trained(arguments.place, device=torch.device(device_type()), dtype=dtype, tokenizer=arguments.tokenizer)
