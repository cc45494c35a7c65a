"""Seconds that one device takes for one op: the roofline model.

An op is bound by arithmetic or by memory traffic, whichever takes longer (Williams, Waterman, Patterson: Roofline,
CACM 52(4), 2009), and no op starts sooner than the host can launch it::

    seconds = max(flops / (peak * contraction), bytes / (bandwidth * memory)) + launches * launch_s
"""

from __future__ import annotations

from dataclasses import dataclass

from autopart.cost.devices import Device


@dataclass(frozen=True, slots=True)
class Efficiency:
    """Shares of the datasheet's peaks that are reached; above 0, at most 1.

    contraction: large matrix products in cuBLAS reach 60 to 75 percent of the dense tensor-core peak under a GPU's
    power limit, and MKL about as much of an AVX2 core's.
    memory: STREAM-like kernels reach about 80 percent of HBM's and DDR's peak.
    network: payload over line rate after protocol headers and the ends of a ring's pipeline.
    """

    contraction: float = 0.65
    memory: float = 0.8
    network: float = 0.8

    def __post_init__(self) -> None:
        for share in (self.contraction, self.memory, self.network):
            if not 0 < share <= 1:
                raise ValueError(f"an efficiency is above 0 and at most 1: {self}")


DEFAULT = Efficiency()


def op_seconds(
    device: Device,
    flops: float,
    num_bytes: float,
    dtype: str = "float32",
    launches: int = 1,
    efficiency: Efficiency = DEFAULT,
) -> float:
    """Seconds of an op with ``flops`` in ``dtype`` that reads and writes ``num_bytes``; 0 for a view (neither)."""
    if flops <= 0 and num_bytes <= 0:
        return 0.0
    arithmetic = flops / (device.peak(dtype) * efficiency.contraction)
    return max(arithmetic, copy_seconds(device, num_bytes, efficiency)) + launches * device.launch_s


def copy_seconds(device: Device, num_bytes: float, efficiency: Efficiency = DEFAULT) -> float:
    """Seconds of moving ``num_bytes`` (read plus written) through the device's memory."""
    return num_bytes / (device.memory_bandwidth * efficiency.memory)
