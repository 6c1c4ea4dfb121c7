"""The planner's accelerators: what their makers publish, and the share of it that matmuls reach."""

from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, kw_only=True)
class Device:
    """One accelerator and its links. Rates are operations and bytes per second; links and network count one direction.

    `memory_bytes` is all that torch finds. What the driver and communication take of it is not known here.
    `matmul_share` is the share of the peak that large matmuls reach in training, in bfloat16 and in float8;
    `attention_share` is that of flash attention.
    """

    flops: float
    float8_flops: float | None
    memory_bytes: float
    memory_bandwidth: float
    link_bandwidth: float
    network_bandwidth: float
    matmul_share: float
    attention_share: float


GIB = 2**30
# Peaks and links are from the makers' data sheets, dense, one direction. Memory is the "total capacity" in torch's
# out-of-memory errors, as users have posted them; data sheets say GB and mean GiB. h100-96gb's is set as near to its
# sheet as h100's. Shares are fitted on the rows that benchmarks/plan.py names; h200, b200 and mi300x use those of h100.
# Only a100's attention share is from a source: FlashAttention-2 reaches up to 225 of 312 TFLOP/s (Dao 2023), less for
# short sequences.
HOPPER = {"flops": 989e12, "float8_flops": 1979e12, "link_bandwidth": 450e9, "network_bandwidth": 50e9}
HOPPER_SHARES = {"matmul_share": 0.56, "attention_share": 0.23}
DEVICES = MappingProxyType(
    {
        "a100": Device(
            flops=312e12, float8_flops=None, memory_bytes=79.1 * GIB, memory_bandwidth=2.04e12, link_bandwidth=300e9,
            network_bandwidth=25e9, matmul_share=0.77, attention_share=0.6,
        ),
        "h100": Device(**HOPPER, **HOPPER_SHARES, memory_bytes=79.1 * GIB, memory_bandwidth=3.35e12),
        # The H100 of Meta's Grand Teton: more and slower memory, limited to 500 W.
        "h100-96gb": Device(
            **HOPPER, memory_bytes=95.0 * GIB, memory_bandwidth=2.4e12, matmul_share=0.5, attention_share=0.23
        ),
        "h200": Device(**HOPPER, **HOPPER_SHARES, memory_bytes=139.8 * GIB, memory_bandwidth=4.8e12),
        "b200": Device(
            **HOPPER_SHARES, flops=2250e12, float8_flops=4500e12, memory_bytes=178.3 * GIB, memory_bandwidth=8e12,
            link_bandwidth=900e9, network_bandwidth=50e9,
        ),
        "mi300x": Device(
            **HOPPER_SHARES, flops=1307e12, float8_flops=2614e12, memory_bytes=191.7 * GIB, memory_bandwidth=5.3e12,
            link_bandwidth=448e9, network_bandwidth=50e9,
        ),
    }
)  # fmt: skip
