"""Seconds of taking a tensor from one tuple of placements to another, and its gradient back.

Every collective's time is affine in the bytes of the tensor (:mod:`autopart.cost.communication`), so a pair of
placements has four numbers, whatever tensor is converted::

    forward = fixed + rate * bytes            bytes: of the whole tensor
    backward = fixed' + rate' * bytes

A step along one axis moves the share of the tensor that the other axes leave, over that axis' own link.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from autopart.cost.communication import transition
from autopart.cost.devices import Device, Link
from autopart.passes.conversion import Axes, conversion, sent
from autopart.runtime import transitions
from autopart.runtime.placement import Placement, Placements, nested

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
        """The steps of :mod:`autopart.passes.conversion`, each at the share that the other axes leave."""
        key = (source, target, differentiable)
        if key not in self._pairs:
            steps = conversion(source, target, self.mesh)
            assert steps is not None, f"the solver offers placements that nest: {source}, {target}"
            total = Affine()
            for step in steps:
                call, share = step.transition, 1.0
                for other, placement in enumerate(step.before):
                    if other != step.axis and placement.is_shard:
                        share /= self.axes[other].parts
                one = self.step(step.axis, call.source, call.target, differentiable)
                total += Affine(one.fixed, (one.rate[0] * share, one.rate[1] * share))
            self._pairs[key] = total
        return self._pairs[key]

    def table(
        self, sources: Sequence[Placements], targets: Sequence[Placements], num_bytes: float, differentiable: bool
    ) -> NDArray[np.float64]:
        """Seconds forward and backward together: [sources, targets]."""
        fixed, rate, found = self._direct(sources, targets, differentiable)
        for i, j in np.argwhere(~found).tolist():
            pair = self.pair(sources[i], targets[j], differentiable)
            fixed[i, j], rate[i, j] = sum(pair.fixed), sum(pair.rate)
        return fixed + rate * num_bytes

    def _direct(
        self, sources: Sequence[Placements], targets: Sequence[Placements], differentiable: bool
    ) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.bool_]]:
        """:meth:`pair` for all pairs at once, where every order of going straight to the target nests on the way.

        Returns fixed seconds, seconds per byte, and which pairs these are given for: of those the order that moves the
        fewest bytes, if it is one, or if those that move as few take as long.
        """
        sizes = [axis.parts for axis in self.axes]
        axes = [_AxisTable(self, index, sources, targets, differentiable) for index in range(len(sizes))]
        shape = (len(sources), len(targets))
        possible = np.ones(shape, dtype=bool)
        orders = []
        for order in itertools.permutations(range(len(sizes))):
            moved, fixed, rate = np.zeros(shape), np.zeros(shape), np.zeros(shape)
            for position, index in enumerate(order):
                share = np.ones(shape)
                for other in range(len(sizes)):
                    if other != index:
                        done = other in order[:position]
                        share = share / np.where(axes[other].cuts(done), sizes[other], 1)
                moved += axes[index].moved * share
                fixed += axes[index].fixed
                rate += axes[index].rate * share
            orders.append((moved, fixed, rate))
        for first, second in itertools.combinations(range(len(sizes)), 2):
            nest = _nesting(axes[first].known, axes[second].known, sizes[first], sizes[second])
            possible &= nest[axes[first].have[:, None], axes[second].want[None, :]]
            possible &= nest[axes[first].want[None, :], axes[second].have[:, None]]
        moves = np.stack([moved for moved, _, _ in orders])
        rates = np.stack([rate for _, _, rate in orders])
        least = moves <= moves.min(axis=0) + 1e-9
        low = np.where(least, rates, np.inf).min(axis=0)
        high = np.where(least, rates, -np.inf).max(axis=0)
        return orders[0][1], low, possible & (high <= low * (1 + 1e-12))

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


class _AxisTable:
    """One axis' part of many conversions: by (source, target) what its transition moves and takes."""

    def __init__(
        self,
        prices: ConversionPrices,
        index: int,
        sources: Sequence[Placements],
        targets: Sequence[Placements],
        differentiable: bool,
    ) -> None:
        known: dict[Placement, int] = {}
        parts = prices.axes[index].parts
        self.have = np.array([known.setdefault(item[index], len(known)) for item in sources])
        self.want = np.array([known.setdefault(item[index], len(known)) for item in targets])
        self.known = tuple(known)
        self.sharded = np.array([placement.is_shard for placement in self.known])
        moved, fixed, rate = (np.zeros((len(known), len(known))) for _ in range(3))
        for i, source in enumerate(self.known):
            for j, target in enumerate(self.known):
                call = transitions.transition(source, target)
                if call is not None:
                    moved[i, j] = sent(call.forward, parts) + sent(call.backward, parts)
                    step = prices.step(index, source, target, differentiable)
                    fixed[i, j], rate[i, j] = sum(step.fixed), sum(step.rate)
        every = np.ix_(self.have, self.want)
        self.moved, self.fixed, self.rate = moved[every], fixed[every], rate[every]

    def cuts(self, done: bool) -> NDArray[np.bool_]:
        """Whether the axis cuts the tensor, before or after its own transition: broadcasts to [sources, targets]."""
        found: NDArray[np.bool_] = self.sharded[self.want][None, :] if done else self.sharded[self.have][:, None]
        return found


def _nesting(first: Sequence[Placement], second: Sequence[Placement], one: int, two: int) -> NDArray[np.bool_]:
    """Which placements on two axes can hold together; more axes nest where each two of them do."""
    return np.array([[nested((a, b), (one, two)) for b in second] for a in first])
