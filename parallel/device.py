"""What kind of device computes, and how to wait for it.

An import of this module, as by train.py, sets up the allocator of a GPU's memory, unless the user has.
"""

import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch

from config import Config, ConfigError, recorded_config

# Segments that grow leave fewer holes: an 8B that takes 132 of 139 GiB was measured with them. torch reads this when it
# first allocates on a GPU, not when it is imported (2.11 to 2.14), by its older names too.
ALLOCATOR_NAMES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
if not any(name in os.environ for name in ALLOCATOR_NAMES):
    os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"


def device_type() -> str:
    """The type of accelerator that torch found, such as "cuda", otherwise "cpu"."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return accelerator.type if accelerator else "cpu"


def check_compiler(config: Config) -> None:
    """Raises ConfigError if torch.compile cannot compile for this CPU: without a compiler, or with spaces in paths."""
    if not config.compile.enable or config.compile.backend != "inductor" or device_type() != "cpu":
        return
    compiler = os.environ.get("CXX", "g++")
    if not shutil.which(compiler):
        raise ConfigError(f"compile.enable = true: no C++ compiler {compiler!r}; install one (or name it in CXX)")
    for place in (torch.__file__, os.environ.get("TORCHINDUCTOR_CACHE_DIR", "")):
        if " " in place:
            raise ConfigError(f"compile.enable = true: torch cannot compile for a CPU with a space in a path: {place}")


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished all its work; a CPU always has."""
    if device.type != "cpu":
        torch.accelerator.synchronize()


def fast_dtype() -> Literal["bfloat16", "float32"]:
    """The type to compute in: bfloat16, or float32 on a CPU without instructions that multiply bfloat16."""
    if device_type() != "cpu" or torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported():
        return "bfloat16"
    return "float32"


def choose_param_dtype(config: Config) -> Config:
    """`config` with a type in place of "auto": that of the run so far, if it has begun, otherwise the fast one here."""
    training = config.training
    if training.param_dtype != "auto":
        return config
    began = recorded_config(Path(config.run.folder)) if config.run.folder else None
    dtype = fast_dtype()
    if began and began.training.param_dtype != "auto":
        dtype = began.training.param_dtype
    return replace(config, training=replace(training, param_dtype=dtype))
