"""A model's weights in safetensors files, as Hugging Face lays them out, one file in memory at a time."""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from tqdm import tqdm

from checkpoint import CheckpointError
from data.tokenizer import json_object

INDEX = "model.safetensors.index.json"
DTYPES: Mapping[str, torch.dtype] = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
# Files that are not read → what to do with them.
OTHERS: Mapping[str, str] = {
    "consolidated.*.pth": "Meta's own; download the model in Hugging Face's format",
    ".metadata": "a checkpoint of torch; if it is torchtitan's, its scripts/checkpoint_conversion/convert_to_hf.py "
    "converts it to Hugging Face's format",
    "pytorch_model*.bin": 'convert them by python -c "from transformers import AutoModelForCausalLM as M; '
    "M.from_pretrained('FOLDER', dtype='auto').save_pretrained('FOLDER')\"",
}
FILE_BYTES = 5_000_000_000


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
        for name, tensor in tensors.items():
            if not tensor.isfinite().all():
                raise CheckpointError(f"{name} is not finite in {dtype}; try another --dtype")
        save_file(tensors, folder / file, {"format": "pt"})
        (folder / file).chmod(folder.stat().st_mode & 0o666)  # safetensors 0.8 lets only the owner read
        del tensors  # before the next file's are made
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def find_weights(folder: Path) -> dict[str, Path]:
    """Tensor name → the safetensors file that holds it, as transformers finds them. Raises CheckpointError."""
    single = folder / "model.safetensors"
    if single.is_file():
        with open_weights(single) as file:
            return dict.fromkeys(file.keys(), single)
    if (folder / INDEX).is_file():
        index = json_object((folder / INDEX).read_bytes(), f"{folder / INDEX}")
        return {name: folder / file for name, file in index.get("weight_map", {}).items()}
    hints = [hint for pattern, hint in OTHERS.items() if any(folder.glob(pattern))]
    missing = f"{folder}: has neither model.safetensors nor {INDEX}"
    raise CheckpointError("; ".join([missing, *hints]).replace("FOLDER", str(folder)))


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
