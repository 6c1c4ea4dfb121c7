"""What kind of device computes, and how to wait for it."""

import time
from collections.abc import Callable

import torch


def device_type() -> str:
    """The type of accelerator that torch found, such as "cuda", otherwise "cpu"."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return accelerator.type if accelerator else "cpu"


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished all its work; a CPU always has."""
    if device.type != "cpu":
        torch.accelerator.synchronize()


def best_seconds(work: Callable[[], object], device: torch.device, tries: int) -> float:
    """Seconds of `work` on the device, the best of several tries."""
    times = []
    for _ in range(tries):
        synchronize(device)
        begin = time.perf_counter()
        work()
        synchronize(device)
        times.append(time.perf_counter() - begin)
    return min(times)


def bfloat16_is_slow(device: torch.device) -> bool:
    """Whether torch multiplies bfloat16 a hundred times slower than float32, as on a CPU without AVX-512."""
    return device.type == "cpu" and not torch.ops.mkldnn._is_mkldnn_bf16_supported()
