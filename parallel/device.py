"""What kind of device computes, and how to wait for it."""

import torch


def device_type() -> str:
    """The type of accelerator that torch found, such as "cuda", otherwise "cpu"."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return accelerator.type if accelerator else "cpu"


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished all its work; a CPU always has."""
    if device.type != "cpu":
        torch.accelerator.synchronize()


def bfloat16_is_slow(device: torch.device) -> bool:
    """Whether torch multiplies bfloat16 a hundred times slower than float32, as on a CPU without AVX-512."""
    return device.type == "cpu" and not torch.ops.mkldnn._is_mkldnn_bf16_supported()
