"""The planner's accelerators: what their makers publish, and the share of it that training reaches."""

from dataclasses import dataclass
from types import MappingProxyType
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Device:
    """One accelerator and its links. Rates are operations and bytes per second; links and network count one direction.

    `memory_bytes` is all that torch finds. What the driver and communication take of it is not known here. Shares are
    of the peaks: of matmuls, in bfloat16 and float8; of attention, by the fastest kernel that torch takes there and by
    torch's own (FlashAttention-2); of the memory's bandwidth, for other kernels. `fitted`: to rows of this device.
    """

    flops: float
    float8_flops: float | None
    memory_bytes: float
    memory_bandwidth: float
    link_bandwidth: float
    network_bandwidth: float
    watts: int
    matmul_share: float = 0.72
    float8_share: float = 0.7
    attention_share: float = 0.46
    flash_share: float = 0.24
    memory_share: float = 0.75
    fitted: bool = False


GIB = 2**30
# Peaks and links are from the makers' data sheets, dense, one direction. Memory is the "total capacity" in torch's
# out-of-memory errors, as users have posted them; data sheets say GB and mean GiB. h100-96gb's is set as near to its
# sheet as h100's.
RATES = {"flops": 989e12, "float8_flops": 1979e12, "link_bandwidth": 450e9, "network_bandwidth": 50e9}
HOPPER: dict[str, Any] = {**RATES}
DEVICES = MappingProxyType(
    {
        # FlashAttention-2 reaches up to 225 of 312 TFLOP/s there (Dao 2023), less for short sequences.
        "a100": Device(
            flops=312e12, float8_flops=None, memory_bytes=79.1 * GIB, memory_bandwidth=2.04e12, link_bandwidth=300e9,
            network_bandwidth=25e9, watts=400, matmul_share=0.77, attention_share=0.6, flash_share=0.6,
        ),
        "h100": Device(**HOPPER, memory_bytes=79.1 * GIB, memory_bandwidth=3.35e12, watts=700),
        # The H100 of Meta's Grand Teton: more and slower memory, limited to 500 W.
        "h100-96gb": Device(
            **HOPPER, memory_bytes=95.0 * GIB, memory_bandwidth=2.4e12, watts=500, matmul_share=0.55, float8_share=0.42,
            attention_share=0.41, flash_share=0.24, fitted=True,
        ),
        "h200": Device(**HOPPER, memory_bytes=139.8 * GIB, memory_bandwidth=4.8e12, watts=700, fitted=True),
        "b200": Device(
            flops=2250e12, float8_flops=4500e12, memory_bytes=178.3 * GIB, memory_bandwidth=8e12, link_bandwidth=900e9,
            network_bandwidth=50e9, watts=1000,
        ),
        "mi300x": Device(
            flops=1307e12, float8_flops=2614e12, memory_bytes=191.7 * GIB, memory_bandwidth=5.3e12,
            link_bandwidth=448e9, network_bandwidth=50e9, watts=750,
        ),
    }
)  # fmt: skip
