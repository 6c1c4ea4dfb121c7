"""torchtitan's Llama (0.2.2, and main of 2026-08) as a Hugging Face folder.

Its checkpoints have the weights at the top level, as stock DCP writes them. They have our names but for two, and our
shapes. torchtitan rotates pairs of neighbours in a head, we and Hugging Face its two halves, so the rows of wq and wk
are in another order.
"""

import json
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from checkpoint import CheckpointError
from checkpoint.files import read_state
from checkpoint.manifest import Opened
from config import Model
from models import build_model, find_model
from tools.weights import write_weights

PARTS = ("tok_embeddings.", "layers.", "norm.", "output.", "lm_head.")
EMBEDDING, OUTPUT = "tok_embeddings.weight", "output.weight"
POSITIONS = 8192  # in config.json; the checkpoint does not say for how many it was trained


def to_hugging_face(opened: Opened, flavor_name: str, folder: Path) -> None:
    """Write config.json and weights, in their own type, to `folder`.

    Raises CheckpointError if they are not those of the flavor, whose vocabulary may differ; ConfigError.
    """
    held = cast(dict[str, Any], opened.metadata.state_dict_metadata)
    theirs = {
        name.replace("qkv_linear.", "").replace("lm_head.", "output."): name for name in held if name.startswith(PARTS)
    }
    if EMBEDDING not in theirs:
        raise CheckpointError(f"{opened.url}: has no {EMBEDDING}, so it is not torchtitan's")
    size, dtype = held[EMBEDDING].size, held[EMBEDDING].properties.dtype
    spec, flavor = find_model(Model(flavor=flavor_name, vocab_size=size[0]), data_vocab_size=1)
    assert spec.hf is not None
    names = spec.hf.hf_names(flavor)
    if OUTPUT in theirs and OUTPUT not in names:  # torchtitan stores a tied weight twice
        twice = {theirs[name]: torch.empty(size, dtype=dtype) for name in (EMBEDDING, OUTPUT)}
        read_state(opened, twice)
        if torch.equal(*twice.values()):
            del theirs[OUTPUT]
    if odd := sorted(theirs.keys() ^ names.keys()):
        where = "is" if odd[0] in theirs else "is not"
        raise CheckpointError(f"{opened.url}: not the weights of --flavor {flavor_name}: {odd[0]} {where} among them")

    def read(tensors: dict[str, Tensor]) -> None:
        read_state(opened, {theirs[name]: tensor for name, tensor in tensors.items()})
        for name, tensor in tensors.items():
            if heads := {"wq": flavor.n_heads, "wk": flavor.n_kv_heads}.get(name.split(".")[-2]):
                pairs = tensor.unflatten(0, (heads, -1, 2))
                tensor.copy_(pairs.transpose(1, 2).reshape(tensor.shape))

    config = spec.hf.to_hf_config(flavor, POSITIONS, str(dtype).removeprefix("torch."))
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    write_weights(folder, build_model(spec, flavor), names, dtype, read)
