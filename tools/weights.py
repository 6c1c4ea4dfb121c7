"""A model's weights in safetensors files, as Hugging Face lays them out, one file in memory at a time; torchtitan's."""

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from tqdm import tqdm

from checkpoint import CheckpointError
from checkpoint.files import read_state
from checkpoint.manifest import Opened
from config import Model
from data.tokenizer import json_object
from models import build_model, find_model

INDEX = "model.safetensors.index.json"
DTYPES: Mapping[str, torch.dtype] = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
# Files that are not read → what to do with them.
OTHERS: Mapping[str, str] = {
    "consolidated.*.pth": "Meta's own; instead of several take the Hugging Face format; for one, "
    "python -m torch.distributed.checkpoint.format_utils torch_to_dcp FOLDER/consolidated.00.pth NEW, then "
    "import --from torchtitan --flavor NAME NEW CHECKPOINT",
    "pytorch_model*.bin": 'convert them by python -c "from transformers import AutoModelForCausalLM as M; '
    "M.from_pretrained('FOLDER', dtype='auto').save_pretrained('FOLDER')\"",
}
FILE_BYTES = 5_000_000_000
TORCHTITAN_PARTS = ("tok_embeddings.", "layers.", "norm.", "output.", "lm_head.")


def write_weights(
    folder: Path, model: nn.Module, names: Mapping[str, str], dtype: torch.dtype,
    read: Callable[[dict[str, Tensor]], None], file_bytes: int = FILE_BYTES,
) -> None:  # fmt: skip
    """Write weights as safetensors files of about `file_bytes`, one at a time in memory; an index if there are several.

    `model`, on the meta device, gives the shapes; `names`: its parameters' names → Hugging Face's; `read` fills
    tensors of our names.
    """
    ours = {hf_name: name for name, hf_name in names.items()}
    shapes = {names[name]: weight.to(dtype) for name, weight in model.named_parameters()}
    split = split_torch_state_dict_into_shards(shapes, max_shard_size=file_bytes)
    for file, held in tqdm(split.filename_to_tensors.items(), desc="write", disable=None, leave=False):
        tensors = {name: torch.empty_like(shapes[name], device="cpu") for name in held}
        read({ours[name]: tensor for name, tensor in tensors.items()})
        if broken := [name for name, tensor in tensors.items() if not tensor.isfinite().all()]:
            raise CheckpointError(f"{broken[0]} is not finite in {dtype}; try another --dtype")
        save_file(tensors, folder / file, {"format": "pt"})
        (folder / file).chmod(folder.stat().st_mode & 0o666)  # safetensors 0.8 lets only the owner read
        del tensors  # before the next file's are made
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def find_weights(folder: Path) -> dict[str, Path]:
    """Tensor name → the safetensors file that holds it. Raises CheckpointError if there are none, or too many."""
    files = set(folder.glob("model*.safetensors")) or set(folder.glob("*.safetensors"))
    if (folder / INDEX).is_file():
        index = json_object((folder / INDEX).read_bytes(), f"{folder / INDEX}")
        listed = {folder / file for file in index.get("weight_map", {}).values()}
        if surplus := files - listed:
            raise CheckpointError(f"{min(surplus)}: not listed in {INDEX}; remove whichever is not the model's")
        files = listed
    if not files:
        hints = [hint for pattern, hint in OTHERS.items() if any(folder.glob(pattern))]
        raise CheckpointError("; ".join([f"{folder}: no safetensors files", *hints]).replace("FOLDER", str(folder)))
    weights = dict[str, Path]()
    for path in sorted(files):
        with open_weights(path) as file:
            if twice := weights.keys() & set(file.keys()):
                raise CheckpointError(f"{path}: {min(twice)} is in {weights[min(twice)].name} too; remove one")
            weights |= dict.fromkeys(file.keys(), path)
    return weights


def read_rows(weights: Mapping[str, Path], name: str, rows: slice = slice(None)) -> Tensor:
    """Rows of a tensor that `find_weights` found. Raises CheckpointError."""
    with open_weights(weights[name]) as file:
        return file.get_slice(name)[rows]


@contextmanager
def open_weights(path: Path) -> Iterator[Any]:
    """`safetensors.safe_open`. Raises CheckpointError, which names the file, for what cannot be read from it."""
    try:
        with safe_open(path, "pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: cannot be read as safetensors: {error}") from None


def convert_torchtitan(opened: Opened, flavor_name: str, folder: Path) -> None:
    """Write torchtitan's Llama (0.2.2, and main of 2026-08) as config.json and weights, in their own type, to `folder`.

    Its checkpoints have the weights at the top level, as stock DCP writes them, with our names but for two, and our
    shapes. torchtitan rotates pairs of neighbours in a head, we and Hugging Face its two halves, so the rows of wq and
    wk are in another order. Raises CheckpointError if they are not those of the flavor, whose vocabulary may differ.
    """
    held = cast(dict[str, Any], opened.metadata.state_dict_metadata)
    found = [name for name in held if name.startswith(TORCHTITAN_PARTS)]
    theirs = {name.replace("qkv_linear.", "").replace("lm_head.", "output."): name for name in found}
    embedding, output = "tok_embeddings.weight", "output.weight"
    if embedding not in theirs:
        raise CheckpointError(f"{opened.url}: has no {embedding}, so it is not torchtitan's")
    size, dtype = held[embedding].size, held[embedding].properties.dtype
    spec, flavor = find_model(Model(flavor=flavor_name, vocab_size=size[0]), data_vocab_size=1)
    assert spec.hf is not None
    stored = dataclasses.replace(flavor, tie_embeddings=flavor.tie_embeddings and output not in theirs)
    names = spec.hf.hf_names(stored)  # a tied weight too if it is stored twice: the import compares the two
    if odd := sorted(theirs.keys() ^ names.keys()):
        where = "is" if odd[0] in theirs else "is not"
        raise CheckpointError(f"{opened.url}: not the weights of --flavor {flavor_name}: {odd[0]} {where} among them")

    def read(tensors: dict[str, Tensor]) -> None:
        read_state(opened, {theirs[name]: tensor for name, tensor in tensors.items()})
        for name, tensor in tensors.items():
            if heads := {"wq": flavor.n_heads, "wk": flavor.n_kv_heads}.get(name.split(".")[-2]):
                pairs = tensor.unflatten(0, (heads, -1, 2))
                tensor.copy_(pairs.transpose(1, 2).reshape(tensor.shape))

    positions = 8192  # the checkpoint does not say for how many it was trained
    config = spec.hf.to_hf_config(flavor, positions, str(dtype).removeprefix("torch."))
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    write_weights(folder, build_model(spec, stored), names, dtype, read)
