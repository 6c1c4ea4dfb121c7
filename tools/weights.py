"""A model's weights in safetensors files, as Hugging Face lays them out, with one file in memory at a time."""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from tqdm import tqdm

from checkpoint import CheckpointError

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
DTYPES: Mapping[str, torch.dtype] = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
FILE_BYTES = 5_000_000_000


def write_weights(
    folder: Path, model: nn.Module, names: Mapping[str, str], dtype: torch.dtype,
    read: Callable[[dict[str, Tensor]], None], file_bytes: int = FILE_BYTES,
) -> None:  # fmt: skip
    """Write weights as safetensors files of about `file_bytes`, one at a time in memory; an index if there are several.

    `model` gives the shapes; `names`: its parameters' names → Hugging Face's; `read` fills tensors of our names.
    """
    ours = {hf_name: name for name, hf_name in names.items()}
    sizes = {names[name]: weight.numel() * dtype.itemsize for name, weight in model.named_parameters()}
    split = split_state_dict_into_shards_factory(
        sizes, get_storage_size=int, filename_pattern="model{suffix}.safetensors", max_shard_size=file_bytes
    )
    for file, held in tqdm(split.filename_to_tensors.items(), desc="write", disable=None, leave=False):
        tensors = {n: torch.empty(model.get_parameter(ours[n]).shape, dtype=dtype) for n in held}
        read({ours[n]: tensor for n, tensor in tensors.items()})
        save_file(tensors, folder / file, {"format": "pt"})
        (folder / file).chmod(folder.stat().st_mode & 0o666)  # safetensors 0.8 lets only the owner read
        del tensors  # before the next file's are made
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def find_weights(folder: Path) -> dict[str, Path]:
    """Tensor name → the safetensors file that holds it. Raises CheckpointError if there are none."""
    if (folder / INDEX).is_file() and not (folder / SINGLE).is_file():
        weights = json.loads((folder / INDEX).read_bytes())["weight_map"]
        return {name: folder / file for name, file in weights.items()}
    with open_weights(folder / SINGLE) as file:
        return dict.fromkeys(file.keys(), folder / SINGLE)


@contextmanager
def open_weights(path: Path) -> Iterator[Any]:
    """`safetensors.safe_open`. Raises CheckpointError, which names the file, for what cannot be read from it."""
    try:
        with safe_open(path, "pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: cannot be read as safetensors: {error}") from None
