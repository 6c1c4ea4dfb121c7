"""Folders of safetensors files in Hugging Face's layout: find tensors, and write files in place."""

import json
import os
import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from checkpoint.stores import CheckpointError

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


def write_file(
    path: Path, shapes: Mapping[str, Sequence[int]], dtype: torch.dtype, fill: Callable[[dict[str, Tensor]], None]
) -> None:
    """Write a new file of tensors with the names and `shapes`. `fill` sets their values, in the file's mapped memory.

    The format is 8 bytes for the length of a JSON header, the header, and the values
    (https://github.com/huggingface/safetensors#format). Raises CheckpointError if the file cannot be made.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    kind = next(name for name, known in DTYPES.items() if known == dtype)
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + int(np.prod(shape)) * dtype.itemsize
        header[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [start, end]}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    size = 8 + len(encoded) + end
    try:
        with open(path, "xb", buffering=0) as file:
            os.posix_fallocate(file.fileno(), 0, size)  # else a full disk would kill the process as it writes to memory
            file.write(struct.pack("<Q", len(encoded)) + encoded)
    except OSError as error:
        raise CheckpointError(f"{path}: {size / 1e9:.2f} GB cannot be written: {error.strerror}") from None
    memory = np.memmap(path, np.uint8, "r+", offset=0)
    tensors = {}
    for name, shape in shapes.items():
        start, stop = (8 + len(encoded) + offset for offset in header[name]["data_offsets"])
        tensors[name] = torch.from_numpy(memory[start:stop]).view(dtype).view(*shape)
    fill(tensors)
    memory.flush()
