"""Folders of safetensors files in Hugging Face's layout."""

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from checkpoint import CheckpointError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
# Type names in a file's header. Others (float8 and integers of quantized weights) are not read.
DTYPES: Mapping[str, torch.dtype] = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


def read_json(path: Path) -> dict[str, Any]:
    """Read the JSON object in a file. Raises CheckpointError."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path}: missing") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: not a readable JSON file: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: not a JSON object")
    return value


def find_weights(folder: Path) -> dict[str, Path]:
    """Tensor name → the file that holds it.

    Raises CheckpointError if there are none, or if the index names a file that is not in the folder.
    """
    if not (folder / INDEX).is_file():
        if (folder / SINGLE).is_file():
            with open_file(folder / SINGLE) as file:
                return dict.fromkeys(file.keys(), folder / SINGLE)
        others = ", ".join(sorted(path.name for path in folder.glob("*.bin")))
        hint = f"; {others} may run code when read: convert it to safetensors" if others else ""
        raise CheckpointError(f"{folder}: has neither {SINGLE} nor {INDEX}{hint}")
    weights = read_json(folder / INDEX).get("weight_map")
    if not isinstance(weights, dict):
        raise CheckpointError(f"{folder / INDEX}: has no weight_map")
    for file in set(map(str, weights.values())):
        if Path(file).name != file or not file.endswith(".safetensors") or "\\" in file:
            raise CheckpointError(f"{folder / INDEX}: names {file!r}, which is not a safetensors file of this folder")
        if not (folder / file).is_file():
            raise CheckpointError(f"{folder / file}: missing")
    return {name: folder / file for name, file in weights.items()}


def open_file(path: Path) -> Any:
    """`safetensors.safe_open`. Raises CheckpointError naming the file."""
    try:
        return safe_open(path, "pt")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: not a readable safetensors file: {error}") from None


def check_shapes(weights: Mapping[str, Path], shapes: Mapping[str, Sequence[int]]) -> dict[str, torch.dtype]:
    """The data type of each tensor in `shapes`, from the files' headers alone.

    Raises CheckpointError if a tensor is missing, has another shape, or has a type not in DTYPES.
    """
    found = {}
    for path in sorted({weights[name] for name in shapes}):
        with open_file(path) as file:
            held = set(file.keys())
            for name in (name for name in shapes if weights[name] == path):
                if name not in held:
                    raise CheckpointError(f"{path}: has no {name}, though {INDEX} lists it there")
                part = file.get_slice(name)
                kind, shape, expected = part.get_dtype(), tuple(part.get_shape()), tuple(shapes[name])
                if shape != expected:
                    raise CheckpointError(f"{path}: {name} has shape {shape}, but config.json requires {expected}")
                if kind not in DTYPES:
                    raise CheckpointError(f"{path}: {name} is of type {kind}, must be one of {', '.join(DTYPES)}")
                found[name] = DTYPES[kind]
    return found


def write_file(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write a new file of `tensors`, as transformers does. Raises CheckpointError if that fails."""
    try:
        save_file(tensors, path, {"format": "pt"})
        with open(path, "rb") as file:
            os.fsync(file.fileno())  # a power cut must not leave a whole folder with half a file
        with suppress(OSError):  # a file system that allows no change
            path.chmod(path.parent.stat().st_mode & 0o666)  # by the umask; safetensors 0.8 lets only the owner read
    except (SafetensorError, OSError) as error:
        size = sum(tensor.nbytes for tensor in tensors.values())
        raise CheckpointError(f"{path}: {size / 1e9:.2f} GB cannot be written: {error}") from None
