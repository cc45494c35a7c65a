r"""The fastest choices of a stage's blocks that fit into its memory.

For blocks b with choices o of seconds s[b,o], kept bytes w[b,o] and transient bytes r[b,o], in a room of R bytes:

    minimise sum_b s[b,o_b]    with    sum_b w[b,o_b] + max_b r[b,o_b] <= R

:func:`least_seconds` finds the optimum: for every value that the maximum may take, what remains is a multiple-choice
knapsack; partial choices are kept only while neither dominated nor, by the relaxation below, too slow. Equal blocks are
taken together, so that a stage of repeated layers has few partial choices.

:func:`relaxed_seconds` bounds it for many stages at once: choices may be mixed in fractions, so that bytes are freed
where a byte costs the fewest seconds (Dantzig's bound, on each block's lower convex hull).
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopart.solver.stages_parts import Family

Array = NDArray[np.float64]

_LEVELS = 12
_MOST_PARTIAL = 20_000


@dataclass(frozen=True, slots=True)
class Fastest:
    """choices: per block its index; None when nothing fits. bound: no choices that fit take fewer seconds."""

    seconds: float
    bound: float
    choices: tuple[int, ...] | None


def transients(families: Sequence[Family]) -> list[float]:
    """Every value that a stage's largest transient may have."""
    return sorted({choice.transient_bytes for family in families for choice in family})


def hull(family: Family, in_flight: int, most_transient: float) -> list[tuple[float, float, int]]:
    """(seconds, kept bytes, index) of the choices on the lower convex hull, fastest first; empty if none is allowed."""
    points = sorted(
        (choice.seconds, choice.kept_bytes(in_flight), index)
        for index, choice in enumerate(family)
        if choice.transient_bytes <= most_transient
    )
    found: list[tuple[float, float, int]] = []
    for point in points:
        if found and point[1] >= found[-1][1]:
            continue
        while len(found) > 1 and _slope(found[-2], point) <= _slope(found[-2], found[-1]):
            found.pop()
        found.append(point)
    return found


def _slope(a: tuple[float, float, int], b: tuple[float, float, int]) -> float:
    """Seconds per byte freed."""
    return (b[0] - a[0]) / (a[1] - b[1])


def relaxed_seconds(families: Sequence[Family], counts: Array, room: Array, in_flight: int) -> Array:
    """At least the seconds of each run's fastest choices that fit; infinite where surely none does.

    counts: [family, run]. room: [run] bytes. Where every fastest choice fits it is exact.
    """
    best = np.full(room.shape, np.inf)
    values = transients(families)
    # Beyond some levels of the largest transient neighbours are taken as one: the smaller charged, the larger allowed.
    edges = values if len(values) <= _LEVELS else [values[i * (len(values) - 1) // _LEVELS] for i in range(_LEVELS + 1)]
    below = -math.inf
    for highest in edges:
        charged = next(value for value in values if value > below)
        below = highest
        hulls = [hull(family, in_flight, highest) for family in families]
        barred = np.array([float(not points) for points in hulls]) @ counts > 0
        seconds = np.array([points[0][0] if points else 0.0 for points in hulls]) @ counts
        need = charged - room + np.array([points[0][1] if points else 0.0 for points in hulls]) @ counts
        steps = [
            (_slope(a, b), a[1] - b[1], number)
            for number, points in enumerate(hulls)
            for a, b in itertools.pairwise(points)
        ]
        for price, freed, number in sorted(steps):
            taken = np.clip(need, 0.0, counts[number] * freed)
            seconds, need = seconds + taken * price, need - taken
        # rounding: what is freed altogether is as much as is needed
        best = np.minimum(best, np.where((need <= 1e-9 * np.abs(room)) & ~barred, seconds, np.inf))
    return best


def least_excess(families: Sequence[Family], counts: Array, room: Array, in_flight: int) -> Array:
    """By how many bytes the choices that need the fewest exceed the room; not positive where some fit.

    counts: [family, run]. room: [run] bytes.
    """
    least = np.full(room.shape, np.inf)
    for highest in transients(families):
        fewest = [
            min((c.kept_bytes(in_flight) for c in family if c.transient_bytes <= highest), default=None)
            for family in families
        ]
        barred = np.array([float(size is None) for size in fewest]) @ counts > 0
        kept = np.array([size or 0.0 for size in fewest]) @ counts
        least = np.minimum(least, np.where(barred, np.inf, kept + highest - room))
    return least


@dataclass(frozen=True, slots=True)
class Held:
    """How many of each family a run has: of blocks by position, then of parts of layers.

    blocks: [family, position]. parts: [family, first, last].
    """

    blocks: Array
    parts: Array

    def of(self, family: int) -> Array:
        """The number of a family's members in each run, [first, last]."""
        count = len(self.blocks)
        return np.maximum(between(self.blocks[family]), 0.0) if family < count else self.parts[family - count]

    def counts(self, runs: NDArray[np.bool_]) -> Array:
        """[family, run] of the runs that are marked, in the order of [first, last]."""
        first, last = np.nonzero(runs)
        return np.concatenate([self.blocks[:, last] - self.blocks[:, first], self.parts[:, first, last]])

    def summed(self, amounts: Sequence[float]) -> Array:
        """The sum over a run's members of what each member of a family has, [first, last]."""
        values, count = np.array(amounts, dtype=float), len(self.blocks)
        return between(values[:count] @ self.blocks) + np.tensordot(values[count:], self.parts, axes=1)


def between(values: Array) -> Array:
    """Of what grows with positions, the part of each run, [first, last]."""
    return values[None, :] - values[:, None]


def least_seconds(blocks: Sequence[Family], room: float, in_flight: int) -> Fastest:
    """The fastest choices of one stage's blocks in ``room`` bytes."""
    best = Fastest(math.inf, math.inf, None)
    bound = math.inf
    for highest in transients(blocks):
        found = _Knapsack(blocks, room - highest, in_flight, highest, best.seconds).solve()
        bound = min(bound, found.bound)
        if found.seconds < best.seconds:
            best = found
    return Fastest(best.seconds, min(bound, best.seconds), best.choices)


class _Knapsack:
    """One value of the largest transient; solutions that take ``limit`` seconds or more are of no interest."""

    def __init__(
        self, blocks: Sequence[Family], room: float, in_flight: int, most_transient: float, limit: float
    ) -> None:
        self._blocks, self._room, self._limit = blocks, room, limit
        self._counts = Counter(blocks)
        self._hulls = {family: hull(family, in_flight, most_transient) for family in self._counts}
        self._allowed = {
            family: [
                (choice.seconds, choice.kept_bytes(in_flight), index)
                for index, choice in enumerate(family)
                if choice.transient_bytes <= most_transient
            ]
            for family in self._counts
        }

    def solve(self) -> Fastest:
        if not all(self._hulls.values()) or not self._least_rest(list(self._counts)) <= self._room:
            return Fastest(math.inf, math.inf, None)
        # those with the most to gain first: the relaxation of the rest is then the tightest
        order = sorted(self._counts, key=lambda family: -len(self._hulls[family]) * self._counts[family])
        seconds, kept = np.zeros(1), np.zeros(1)
        bound = math.inf
        trail: list[tuple[NDArray[np.intp], list[tuple[int, ...]], NDArray[np.intp]]] = []
        for number, family in enumerate(order):
            mixes = self._mixes(family)
            amounts = np.array(mixes) @ np.array([choice[:2] for choice in self._allowed[family]])
            more, bytes_ = amounts[:, 0], amounts[:, 1]
            at_least = (seconds[:, None] + more[None, :]).ravel()
            size = (kept[:, None] + bytes_[None, :]).ravel()
            rest = order[number + 1 :]
            reach = at_least + self._rest_seconds(rest, size)
            keep = np.flatnonzero((size + self._least_rest(rest) <= self._room) & (reach < self._limit))
            keep = keep[np.lexsort((at_least[keep], size[keep]))]
            fastest = np.minimum.accumulate(at_least[keep]) if len(keep) else at_least[keep]
            first = np.ones(len(keep), dtype=bool)
            first[1:] = at_least[keep][1:] < fastest[:-1]
            keep = keep[first]
            if len(keep) > _MOST_PARTIAL:
                ranked = keep[np.argsort(reach[keep], kind="stable")]
                bound = min(bound, float(reach[ranked[_MOST_PARTIAL]]))
                keep = ranked[:_MOST_PARTIAL]
            trail.append((keep // len(mixes), mixes, keep % len(mixes)))
            seconds, kept = at_least[keep], size[keep]
            if not len(keep):
                return Fastest(math.inf, bound, None)
        best = int(seconds.argmin())
        taken: dict[Family, list[int]] = {}
        at = best
        for family, (parents, mixes, used) in zip(reversed(order), reversed(trail), strict=True):
            mix = mixes[int(used[at])]
            taken[family] = [c[2] for n, c in zip(mix, self._allowed[family], strict=True) for _ in range(n)]
            at = int(parents[at])
        choices = tuple(taken[family].pop() for family in self._blocks)
        return Fastest(float(seconds[best]), min(bound, float(seconds[best])), choices)

    def _mixes(self, family: Family) -> list[tuple[int, ...]]:
        """How many of a family's equal blocks take each allowed choice."""
        return list(_compositions(self._counts[family], len(self._allowed[family])))

    def _least_rest(self, families: Sequence[Family]) -> float:
        return sum(self._counts[family] * self._hulls[family][-1][1] for family in families)

    def _rest_seconds(self, families: Sequence[Family], kept: Array) -> Array:
        """At least the seconds of further families, where ``kept`` bytes are taken: fractions allowed."""
        need = kept - self._room
        steps: list[tuple[float, float]] = []
        base = 0.0
        for family in families:
            points, count = self._hulls[family], self._counts[family]
            base += count * points[0][0]
            need = need + count * points[0][1]
            steps += [(_slope(a, b), count * (a[1] - b[1])) for a, b in itertools.pairwise(points)]
        seconds = np.full(need.shape, base)
        for price, freed in sorted(steps):
            part = np.clip(need, 0.0, freed)
            seconds, need = seconds + part * price, need - part
        return seconds * (1 - 1e-12)


def _compositions(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    if parts == 1:
        yield (total,)
        return
    for first in range(total + 1):
        for rest in _compositions(total - first, parts - 1):
            yield (first, *rest)
