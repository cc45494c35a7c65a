"""What a calibration measures: single kernels and collectives, each with what the cost model says of it.

A sample is predicted by the very functions that planning prices with (:func:`autopart.cost.compute.op_seconds`,
:func:`autopart.cost.communication.collective_seconds`), so that a fit of samples is a fit of plans' prices.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from autopart.cost.communication import COLLECTIVES, SEND, collective_seconds, send_seconds
from autopart.cost.compute import Product, op_seconds, vector_seconds
from autopart.cost.devices import Device, Link

PRODUCT = "product"
ATTENTION = "attention"
STREAM = "stream"
LAUNCH = "launch"
HOST = "host"
KERNELS = (PRODUCT, ATTENTION, STREAM, LAUNCH, HOST)
KINDS = (*KERNELS, *COLLECTIVES, SEND)


@dataclass(frozen=True, slots=True)
class Sample:
    """One measurement.

    kind: a matrix product, fused attention, an op bound by memory, a tiny op, a small model's step, which takes the
    host longer than the device, or a collective by its name. name: for people. seconds: of one call. products: the
    matrix products that it consists of. num_bytes: read and written, or a collective's payload as
    :mod:`autopart.cost.communication` counts it. launches: kernels started. parts: ranks of a collective. held: kept
    aside from the fit, to be tested on. functions, drawn, mapped: of CPUs, exponentials' worth of functions of
    elements, random numbers, and bytes of new large tensors.
    """

    kind: str
    name: str
    seconds: float
    dtype: str = "float32"
    products: tuple[Product, ...] = ()
    num_bytes: float = 0.0
    launches: int = 1
    parts: int = 1
    held: bool = False
    functions: float = 0.0
    drawn: float = 0.0
    mapped: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"a sample is one of {', '.join(KINDS)}, not {self.kind!r}")
        if not 0 < self.seconds < float("inf"):
            raise ValueError(f"{self.name}: a measurement takes some seconds, not {self.seconds}")

    @property
    def is_collective(self) -> bool:
        return self.kind not in KERNELS

    @property
    def is_aligned(self) -> bool:
        """Whether all its products are: see :meth:`autopart.cost.compute.Product.is_aligned`."""
        return all(product.is_aligned(self.dtype) for product in self.products)

    @staticmethod
    def from_json_object(data: Mapping[str, Any]) -> Sample:
        """Reads what :meth:`to_json_object` gives. Raises TypeError, KeyError or ValueError."""
        products = tuple(Product(**item) for item in data["products"])
        return Sample(**{**data, "products": products})

    def to_json_object(self) -> dict[str, Any]:
        return asdict(self)


def predicted_seconds(sample: Sample, device: Device, link: Link | None) -> float:
    """What the cost model says. link: that of the collectives' ranks; other samples need none."""
    if sample.kind == HOST:
        return device.host_s * sample.launches
    if not sample.is_collective:
        vector_s = vector_seconds(device, sample.functions, sample.drawn)
        return op_seconds(
            *(device, 0.0, sample.num_bytes, sample.dtype, sample.launches),
            products=sample.products,
            vector_s=vector_s,
            mapped=sample.mapped,
        )
    assert link is not None, "a collective is priced on a link"
    if sample.kind == SEND:
        return send_seconds(sample.num_bytes, link)
    return collective_seconds(sample.kind, sample.num_bytes, sample.parts, link)
