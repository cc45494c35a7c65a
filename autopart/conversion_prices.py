"""Seconds of taking a tensor from one tuple of placements to another, and its gradient back.

Every collective's time is affine in the bytes of the tensor (:mod:`autopart.cost.communication`), so a pair of
placements has four numbers, whatever tensor is converted::

    forward = fixed + rate * bytes            bytes: of the whole tensor
    backward = fixed' + rate' * bytes

A step along one axis moves the share of the tensor that the other axes leave, over that axis' own link.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from autopart.cost.communication import transition
from autopart.cost.devices import Device, Link
from autopart.passes.conversion import Axes
from autopart.runtime.placement import Placement, Placements

_SAMPLE_BYTES = 2**40


@dataclass(frozen=True, slots=True)
class TensorAxis:
    """A tensor axis of a stage's mesh: ``parts`` ranks on ``link``, the slowest of any group along it."""

    name: str
    parts: int
    link: Link


@dataclass(frozen=True, slots=True)
class Affine:
    """Seconds forward and backward of converting a tensor: fixed ones, and per byte of the whole tensor."""

    fixed: tuple[float, float] = (0.0, 0.0)
    rate: tuple[float, float] = (0.0, 0.0)

    def seconds(self, num_bytes: float) -> tuple[float, float]:
        """Forward and backward."""
        return self.fixed[0] + self.rate[0] * num_bytes, self.fixed[1] + self.rate[1] * num_bytes

    def __add__(self, other: Affine) -> Affine:
        return Affine(
            (self.fixed[0] + other.fixed[0], self.fixed[1] + other.fixed[1]),
            (self.rate[0] + other.rate[0], self.rate[1] + other.rate[1]),
        )


@dataclass(slots=True)
class ConversionPrices:
    """Prices conversions on the tensor axes of one mesh, outermost axis first."""

    axes: tuple[TensorAxis, ...]
    device: Device
    _pairs: dict[tuple[Placements, Placements, bool], Affine] = field(default_factory=dict)
    _steps: dict[tuple[int, Placement, Placement, bool], Affine] = field(default_factory=dict)

    @property
    def mesh(self) -> Axes:
        return tuple((axis.name, axis.parts) for axis in self.axes)

    def seconds(
        self, source: Placements, target: Placements, num_bytes: float, differentiable: bool
    ) -> tuple[float, float]:
        """Forward and backward seconds. num_bytes: of the whole tensor."""
        if source == target:
            return 0.0, 0.0
        return self.pair(source, target, differentiable).seconds(num_bytes)

    def pair(self, source: Placements, target: Placements, differentiable: bool) -> Affine:
        """One axis after the other, as :mod:`autopart.passes.shard` inserts them."""
        key = (source, target, differentiable)
        if key not in self._pairs:
            total, current = Affine(), list(source)
            for index, wanted in enumerate(target):
                share = 1.0
                for other, placement in enumerate(current):
                    if other != index and placement.is_shard:
                        share /= self.axes[other].parts
                step = self.step(index, current[index], wanted, differentiable)
                total += Affine(step.fixed, (step.rate[0] * share, step.rate[1] * share))
                current[index] = wanted
            self._pairs[key] = total
        return self._pairs[key]

    def step(self, index: int, source: Placement, target: Placement, differentiable: bool) -> Affine:
        """One transition along one axis, per byte that a rank holds without this axis' sharding."""
        key = (index, source, target, differentiable)
        if key not in self._steps:
            axis = self.axes[index]
            once, twice = (
                transition(source, target, count * _SAMPLE_BYTES, axis.parts, axis.link, self.device, differentiable)
                for count in (1, 2)
            )
            first, second = (once.forward_s, once.backward_s), (twice.forward_s, twice.backward_s)
            rate = tuple((b - a) / _SAMPLE_BYTES for a, b in zip(first, second, strict=True))
            fixed = tuple(max(0.0, 2 * a - b) for a, b in zip(first, second, strict=True))
            self._steps[key] = Affine((fixed[0], fixed[1]), (rate[0], rate[1]))
        return self._steps[key]
