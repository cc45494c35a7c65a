"""Seconds of taking a tensor from one tuple of placements to another, and its gradient back.

Every collective's time is affine in the bytes of the tensor (:mod:`autopart.cost.communication`), so a pair of
placements has four numbers, whatever tensor is converted::

    forward = fixed + rate * bytes            bytes: of the whole tensor
    backward = fixed' + rate' * bytes

A step along one axis moves the share of the tensor that the other axes leave, over that axis' own link.

Of the backward the first collective, that of the last step, may pass while weights' gradients are computed
(:mod:`autopart.passes.beside`); :meth:`ConversionPrices.beside` says how long it takes.
"""

from __future__ import annotations

import copy
import enum
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from autopart.cost.communication import transition
from autopart.cost.devices import Device, Link
from autopart.passes.beside import WITH_LATER
from autopart.passes.conversion import STEP_NUMBERS, Axes, Step, conversion, moved, step_number
from autopart.runtime import transitions
from autopart.runtime.placement import REPLICATE, Placement, Placements, nested

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Mask = NDArray[np.bool_]

_SAMPLE_BYTES = 2**40
# Pairs of a source and a target that are priced at once; each takes about a kilobyte meanwhile.
_MOST_CELLS = 20_000


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


_NO_WAY = Affine((float("inf"), float("inf")))


@dataclass(slots=True)
class ConversionPrices:
    """Prices conversions on the tensor axes of one mesh, outermost axis first."""

    axes: tuple[TensorAxis, ...]
    device: Device
    _pairs: dict[tuple[Placements, Placements, bool], Affine] = field(default_factory=dict)
    _beside: dict[tuple[Placements, Placements], Affine] = field(default_factory=dict)
    _steps: dict[tuple[int, Placement, Placement, bool], Affine] = field(default_factory=dict)
    _legs: dict[tuple[int, tuple[Placement, ...], bool], tuple[Floats, ...]] = field(default_factory=dict)

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
            total = Affine() if steps is not None else _NO_WAY
            for step in steps or ():
                total += self._share_of(step, differentiable)
            self._pairs[key] = total
        return self._pairs[key]

    def _share_of(self, step: Step, differentiable: bool) -> Affine:
        call, share = step.transition, 1.0
        for other, placement in enumerate(step.before):
            if other != step.axis and placement.divides:
                share /= self.axes[other].parts
        one = self.step(step.axis, call.source, call.target, differentiable)
        return Affine(one.fixed, (one.rate[0] * share, one.rate[1] * share))

    def beside(self, source: Placements, target: Placements, num_bytes: float) -> float:
        """Seconds of the backward's first collective, beside which weights' gradients of products that read the
        converted tensor are computed; 0 where they are not. num_bytes: of the whole tensor, which has a gradient.
        """
        key = (source, target)
        if key not in self._beside:
            steps = conversion(source, target, self.mesh) if source != target else ()
            late = steps and steps[-1].transition.name in WITH_LATER
            self._beside[key] = self._share_of(steps[-1], True) if steps and late else Affine()
        return self._beside[key].seconds(num_bytes)[1]

    def table(
        self,
        sources: Sequence[Placements],
        targets: Sequence[Placements],
        num_bytes: float,
        differentiable: bool,
        hiding: Sequence[float] = (),
    ) -> NDArray[np.float64]:
        """Seconds forward and backward together: [sources, targets].

        hiding: per target, what :meth:`beside` counts passes unseen for so many seconds.
        """
        ways = _Ways(self, sources, targets, differentiable)
        rows = max(1, _MOST_CELLS // max(1, len(targets)))
        unseen = np.array(hiding) if any(hiding) else None
        parts = [ways.seconds(slice(row, row + rows), num_bytes, unseen) for row in range(0, len(sources), rows)]
        return np.concatenate(parts) if parts else np.zeros((0, len(targets)))

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

    def legs(self, index: int, known: tuple[Placement, ...], differentiable: bool) -> tuple[Floats, ...]:
        """Between all of these placements on one axis: bytes moved, in the units of ``moved``, seconds fixed and per
        byte, and those of the backward beside which weights' gradients are computed. Arrays [from, to].
        """
        key = index, known, differentiable
        if key in self._legs:
            return self._legs[key]
        sizes = tuple(axis.parts for axis in self.axes)
        found = tuple(np.zeros((len(known), len(known))) for _ in range(5))
        moves, fixed, rate, beside_fixed, beside_rate = found
        for i, source in enumerate(known):
            for j, target in enumerate(known):
                if not transitions.exists(source, target):
                    moves[i, j] = np.inf
                elif sizes[index] > 1 and (call := transitions.transition(source, target)) is not None:
                    moves[i, j] = moved(call, sizes, index)
                    step = self.step(index, source, target, differentiable)
                    fixed[i, j], rate[i, j] = sum(step.fixed), sum(step.rate)
                    if call.name in WITH_LATER:
                        beside_fixed[i, j], beside_rate[i, j] = step.fixed[1], step.rate[1]
        self._legs[key] = found
        return found


class _Place(enum.IntEnum):
    """Where an axis is on the way of a conversion."""

    SOURCE = 0
    WHOLE = 1
    TARGET = 2


@dataclass(frozen=True, slots=True)
class _Way:
    """The best ways to one combination of places: bytes moved, their order among equals, seconds fixed and per byte.

    Arrays [sources, targets]; what cannot be reached has moved infinitely many.
    """

    moved: Floats
    path: Ints
    fixed: Floats
    rate: Floats

    def or_else(self, other: _Way) -> _Way:
        """Per conversion the better of two."""
        better = (other.moved < self.moved) | ((other.moved == self.moved) & (other.path < self.path))
        return _Way(
            np.where(better, other.moved, self.moved),
            np.where(better, other.path, self.path),
            np.where(better, other.fixed, self.fixed),
            np.where(better, other.rate, self.rate),
        )


class _Ways:
    """The shortest paths of :func:`autopart.passes.conversion.conversion`, for all pairs at once.

    An axis goes from its source to its target or by way of R, so a path leads through combinations of places, of which
    each is reached from those where one axis was further back.
    """

    def __init__(
        self,
        prices: ConversionPrices,
        sources: Sequence[Placements],
        targets: Sequence[Placements],
        differentiable: bool,
    ) -> None:
        self._sizes = tuple(axis.parts for axis in prices.axes)
        count = range(len(self._sizes))
        self._axes = [_AxisTable(prices, index, sources, targets, differentiable) for index in count]
        # which placements on two axes can hold together; more axes nest where each two of them do
        self._nest = {
            (a, b): np.array(
                [
                    [nested((p, q), (self._sizes[a], self._sizes[b])) for q in self._axes[b].known]
                    for p in self._axes[a].known
                ]
            )
            for a, b in itertools.permutations(count, 2)
        }
        # one axis alone need not go by way of R
        places = tuple(_Place) if len(self._sizes) > 1 else (_Place.SOURCE, _Place.TARGET)
        self._order = list(itertools.product(places, repeat=len(self._sizes)))

    def seconds(self, rows: slice, num_bytes: float, hiding: Floats | None = None) -> Floats:
        """Forward and backward together, of some of the sources. hiding: as of :meth:`ConversionPrices.table`."""
        axes = [axis.of(rows) for axis in self._axes]
        shape = (len(axes[0].have), len(axes[0].want))
        start = _Way(np.zeros(shape), np.zeros(shape, dtype=np.int64), np.zeros(shape), np.zeros(shape))
        reached = {self._order[0]: start}
        for places in self._order[1:]:
            found: _Way | None = None
            for index, place in enumerate(places):
                for before in _Place:
                    earlier = reached.get((*places[:index], before, *places[index + 1 :])) if before < place else None
                    if earlier is not None:
                        way = self._step(earlier, axes, index, before, places)
                        found = way if found is None else found.or_else(way)
            assert found is not None
            for first, second in itertools.permutations(range(len(axes)), 2):
                if places[first] is _Place.SOURCE and places[second] is _Place.TARGET:
                    nest = self._nest[first, second][axes[first].have[:, None], axes[second].want[None, :]]
                    found = replace(found, moved=np.where(nest, found.moved, np.inf))
            reached[places] = found
        end = reached[self._order[-1]]
        there = np.isfinite(end.moved)
        possible = np.logical_and.reduce([axis.exists for axis in axes])
        assert (there == possible).all(), "the solver offers placements that nest"
        found_s: Floats = np.where(there, end.fixed + end.rate * num_bytes, np.inf)
        if hiding is not None:  # rounding must not leave less than nothing
            found_s = np.maximum(0.0, found_s - np.minimum(self._beside(end.path, axes, num_bytes), hiding[None, :]))
        return found_s

    def _beside(self, path: Ints, axes: Sequence[_AxisTable], num_bytes: float) -> Floats:
        """Seconds backward of each way's last step, where weights' gradients are computed beside it."""
        total = np.zeros(path.shape)
        for index, axis in enumerate(axes):
            is_last = path % STEP_NUMBERS == step_number(index, True)
            by_whole = np.zeros(path.shape, dtype=bool)
            for digit in range(2 * len(axes)):
                by_whole |= path // STEP_NUMBERS**digit % STEP_NUMBERS == step_number(index, False)
            parts: Ints = np.ones((1, 1), dtype=np.int64)
            for other, there in enumerate(axes):
                if other != index:
                    parts = parts * np.where(there.cuts(_Place.TARGET), self._sizes[other], 1)
            (fixed, rate), (whole_fixed, whole_rate) = axis.beside(_Place.SOURCE), axis.beside(_Place.WHOLE)
            fixed, rate = np.where(by_whole, whole_fixed, fixed), np.where(by_whole, whole_rate, rate)
            total += np.where(is_last, fixed + rate / parts * num_bytes, 0.0)
        return total

    def _step(self, way: _Way, axes: Sequence[_AxisTable], index: int, before: _Place, after: Sequence[_Place]) -> _Way:
        """One axis goes from a place to that which it has in ``after``, the others stay there."""
        moved, fixed, rate = axes[index].leg(before, after[index])
        parts: Ints = np.ones((1, 1), dtype=np.int64)
        for other, place in enumerate(after):
            if other != index:
                parts = parts * np.where(axes[other].cuts(place), self._sizes[other], 1)
        stays = axes[index].stays if after[index] is _Place.TARGET else np.zeros((1, 1), dtype=bool)
        path = np.where(stays, way.path, way.path * STEP_NUMBERS + step_number(index, after[index] is _Place.TARGET))
        # moved / parts is whole, so that sums of it are equal where they should be
        return _Way(way.moved + moved / parts, path, way.fixed + fixed, way.rate + rate / parts)


class _AxisTable:
    """One axis' part of many conversions: by (source, target) what a leg of its way moves and takes."""

    def __init__(
        self,
        prices: ConversionPrices,
        index: int,
        sources: Sequence[Placements],
        targets: Sequence[Placements],
        differentiable: bool,
    ) -> None:
        known: dict[Placement, int] = {}
        sizes = tuple(axis.parts for axis in prices.axes)
        self.have = np.array([known.setdefault(item[index], len(known)) for item in sources], dtype=np.int64)
        self.want = np.array([known.setdefault(item[index], len(known)) for item in targets], dtype=np.int64)
        self._whole = known.setdefault(REPLICATE, len(known))
        self.known = tuple(known)
        self._sharded = np.array([placement.divides for placement in self.known])
        legs = prices.legs(index, self.known, differentiable)
        self._moved, self._fixed, self._rate, self._beside_fixed, self._beside_rate = legs
        self._alone = sizes[index] == 1

    def of(self, rows: slice) -> _AxisTable:
        """The same for some of the sources."""
        found = copy.copy(self)
        found.have = self.have[rows]
        return found

    @property
    def exists(self) -> Mask:
        """Where there is a way at all, which routed rows have to themselves alone: [sources, targets]."""
        found: Mask = np.isfinite(self._moved)[self.have[:, None], self.want[None, :]] | self._alone
        return found

    @property
    def stays(self) -> Mask:
        """Where nothing is to be done, on an axis of one rank everywhere: [sources, targets]."""
        found: Mask = (self.have[:, None] == self.want[None, :]) | self._alone
        return found

    def leg(self, before: _Place, after: _Place) -> tuple[Floats, Floats, Floats]:
        """Bytes moved, in the units of ``moved``, and seconds fixed and per byte; broadcast to [sources, targets].

        There is no way by R (infinitely many bytes) for what stays, or starts or ends there.
        """
        start = np.array([[self._whole]]) if before is _Place.WHOLE else self.have[:, None]
        end = np.array([[self._whole]]) if after is _Place.WHOLE else self.want[None, :]
        at = np.broadcast_arrays(start, end)
        moved = self._moved[tuple(at)]
        if _Place.WHOLE in (before, after):
            apart = (self.have[:, None] != self._whole) & (self.want[None, :] != self._whole) & ~self.stays
            moved = np.where(apart, moved, np.inf)
        return moved, self._fixed[tuple(at)], self._rate[tuple(at)]

    def beside(self, before: _Place) -> tuple[Floats, Floats]:
        """Of the step to the target those seconds of the backward beside which weights' gradients are computed."""
        start = np.array([[self._whole]]) if before is _Place.WHOLE else self.have[:, None]
        at = tuple(np.broadcast_arrays(start, self.want[None, :]))
        return self._beside_fixed[at], self._beside_rate[at]

    def cuts(self, place: _Place) -> Mask:
        """Whether the axis cuts the tensor where it is at a place: broadcasts to [sources, targets]."""
        if place is _Place.WHOLE:
            return np.zeros((1, 1), dtype=bool)
        found: Mask = self._sharded[self.have][:, None] if place is _Place.SOURCE else self._sharded[self.want][None, :]
        return found
