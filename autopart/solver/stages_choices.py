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

import functools
import itertools
import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from autopart.solver.stages_parts import Family, Shape
from autopart.solver.stages_runs import Numbers, Runs

Array = NDArray[np.float64]

_LEVELS = 12
_MOST_PARTIAL = 20_000
_FEW_MIXES = 200
_ROUNDING = 1e-11
_MOST_CELLS = 2**20
"""Of a table that is made on the way."""


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
    hulls: list[list[tuple[float, float, int]]] = [[] for _ in families]
    own = [sorted(choice.transient_bytes for choice in family) for family in families]
    for highest in edges:
        charged = next(value for value in values if value > below)
        for number, sizes in enumerate(own):
            if bisect_right(sizes, highest) > bisect_right(sizes, below):
                hulls[number] = hull(families[number], in_flight, highest)
        below = highest
        barred = np.array([float(not points) for points in hulls]) @ counts > 0
        seconds = np.array([points[0][0] if points else 0.0 for points in hulls]) @ counts
        need = charged - room + np.array([points[0][1] if points else 0.0 for points in hulls]) @ counts
        steps = [
            (_slope(a, b), a[1] - b[1], number)
            for number, points in enumerate(hulls)
            for a, b in itertools.pairwise(points)
        ]
        need[barred] = 0.0
        for price, freed, number in sorted(steps):
            if need.max(initial=0.0) <= 0.0:
                break
            taken = np.clip(need, 0.0, counts[number] * freed)
            seconds, need = seconds + taken * price, need - taken
        # rounding: what is freed altogether is as much as is needed
        best = np.minimum(best, np.where((need <= 1e-9 * np.abs(room)) & ~barred, seconds, np.inf))
    return best


def least_excess(families: Sequence[Family], counts: Array, room: Array, in_flight: int) -> Array:
    """By how many bytes the choices that need the fewest exceed the room; not positive where some fit.

    counts: [family, run]. room: [run] bytes.
    """
    values = np.array(transients(families))
    fewest = np.array([_fewest_bytes(family, in_flight, values) for family in families]).T
    # a larger transient by which nothing keeps less only takes more
    helps = np.concatenate([[True], (fewest[1:] < fewest[:-1]).any(axis=1)])
    values, fewest = values[helps], fewest[helps]
    none = np.isinf(fewest)
    sizes, some = np.where(none, 0.0, fewest), none.any(axis=1)
    least = np.empty(room.shape)
    for start in range(0, len(room), step := max(1, _MOST_CELLS // len(values))):
        part = slice(start, start + step)
        needed = sizes @ counts[:, part] + values[:, None]
        needed[some] = np.where(none[some].astype(float) @ counts[:, part] > 0, np.inf, needed[some])
        least[part] = needed.min(axis=0) - room[part]
    return least


def _fewest_bytes(family: Family, in_flight: int, most_transient: Array) -> Array:
    """What is kept at least under each limit of transients; infinite where none is allowed."""
    order = sorted(family, key=lambda choice: choice.transient_bytes)
    fewest = np.minimum.accumulate([math.inf, *(choice.kept_bytes(in_flight) for choice in order)])
    found: Array = fewest[np.searchsorted([choice.transient_bytes for choice in order], most_transient, side="right")]
    return found


@dataclass(frozen=True, slots=True)
class Held:
    """How many of each family of blocks, and of parts of layers, each run has.

    at: [family, position], whose growth from the first to the last position is what a run has, but for ``number`` more
    of ``family`` in ``run``, entry by entry. marks: [2, run] two numbers that are the same for runs with as many of
    each family, and other ones, both of 64 bits, where not: sums of the families' random numbers.
    """

    runs: Runs
    at: Array
    family: Numbers
    run: Numbers
    number: Array
    marks: NDArray[np.int64] = field(init=False)

    def __post_init__(self) -> None:
        own = np.random.default_rng(0).integers(1, 2**62, (2, len(self.at)))
        grown, number = own @ self.at.astype(np.int64), self.number.astype(np.int64)
        marks = grown[:, self.runs.last] - grown[:, self.runs.first]
        for row, numbers in zip(marks, own, strict=True):
            np.add.at(row, self.run, numbers[self.family] * number)
        object.__setattr__(self, "marks", marks)

    @staticmethod
    def of(shape: Shape, member: NDArray[np.bool_], runs: Runs) -> tuple[list[Family], Held]:
        """The families of a shape, and how many of each a run has. member: [position, block]."""
        in_layers = {block for layer in shape.layers for block in layer.blocks}
        numbers: dict[Family, int] = {}
        counts: dict[int, Array] = {}
        more: list[tuple[Numbers, Numbers, Array]] = []

        def add(family: Family, at: NDArray[np.bool_]) -> None:
            number = numbers.setdefault(family, len(numbers))
            counts[number] = counts.get(number, np.zeros(len(member))) + at

        for block, item in enumerate(shape.blocks):
            if block not in in_layers:
                add(item.choices, member[:, block])
        for layer in shape.layers:
            code = member[:, list(layer.blocks)] @ (1 << np.arange(len(layer.blocks)))
            whole = (1 << len(layer.blocks)) - 1
            add(layer.parts[layer.blocks], code == whole)
            # runs that part the layer have a part of it, and not the whole
            apart = (code > 0) & (code < whole)
            found = np.flatnonzero(apart[runs.first] | apart[runs.last])
            inside = code[runs.last[found]] - code[runs.first[found]]
            family = np.zeros(len(found), dtype=np.intp)
            for bits in np.unique(inside[inside > 0]).tolist():
                part = tuple(block for place, block in enumerate(layer.blocks) if bits >> place & 1)
                family[inside == bits] = numbers.setdefault(layer.parts[part], len(numbers))
            some = inside > 0
            more.append((family[some], found[some], np.ones(int(some.sum()))))
            once = found[(code == whole)[runs.last[found]]]  # counted as the whole so far
            more.append((np.full(len(once), numbers[layer.parts[layer.blocks]]), once, np.full(len(once), -1.0)))
        at = np.zeros((len(numbers), len(member)))
        for number, values in counts.items():
            at[number] = values
        families, found, times = (np.concatenate([item[place] for item in more] or [np.zeros(0)]) for place in range(3))
        return list(numbers), Held(runs, at, families.astype(np.intp), found.astype(np.intp), times)

    def counts(self, wanted: NDArray[np.bool_]) -> Array:
        """[family, run] of the runs that are marked."""
        found = np.take(self.at, self.runs.last[wanted], axis=1) - np.take(self.at, self.runs.first[wanted], axis=1)
        place, entries = np.cumsum(wanted) - 1, wanted[self.run]
        cells = self.family[entries] * found.shape[1] + place[self.run[entries]]
        np.add.at(found.reshape(-1), cells, self.number[entries])  # seen as one row, which is much faster
        return found

    def largest(self, amounts: Sequence[float]) -> Array:
        """By run the largest of what each member of a family has, 0 at least."""
        found, values = np.zeros(len(self.runs)), np.array(amounts, dtype=float)
        parts = self.number > 0
        np.maximum.at(found, self.run[parts], values[self.family[parts]])
        for family in np.flatnonzero(self.at.any(axis=1)):
            count, entries = self.runs.between(self.at[family]), self.family == family
            np.add.at(count, self.run[entries], self.number[entries])
            np.maximum(found, values[family], out=found, where=count > 0)
        return found

    def summed(self, amounts: Sequence[float]) -> Array:
        """By run the sum over its members of what each member of a family has."""
        values = np.array(amounts, dtype=float)
        rest = np.bincount(self.run, values[self.family] * self.number, minlength=len(self.runs))
        return self.runs.between(values @ self.at) + rest


def least_seconds(blocks: Sequence[Family], room: float, in_flight: int) -> Fastest:
    """The fastest choices of one stage's blocks in ``room`` bytes."""
    numbers = numbered(blocks)
    families = dict(zip(numbers, blocks, strict=True))
    levels = [
        _Knapsack(families, numbers, room - highest, in_flight, highest)
        for highest in transients(list(families.values()))
    ]
    best = Fastest(math.inf, math.inf, None)
    bound = math.inf
    for level in sorted(levels, key=lambda item: item.relaxed):
        if level.relaxed >= best.seconds:
            break
        found = level.solve(best.seconds)
        bound = min(bound, found.bound)
        if found.seconds < best.seconds:
            best = found
    return Fastest(best.seconds, min(bound, best.seconds), best.choices)


def numbered(families: Sequence[Family]) -> list[int]:
    """Of each a number, the same for equal ones; those that are one object are compared once, as hashing takes long."""
    by_id: dict[int, int] = {}
    by_content: dict[Family, int] = {}
    for family in families:
        if id(family) not in by_id:
            by_id[id(family)] = by_content.setdefault(family, len(by_content))
    return [by_id[id(family)] for family in families]


@functools.lru_cache(maxsize=256)
def _all_mixes(count: int, choices: int) -> NDArray[np.intp]:
    """How many of ``count`` take each of some choices, all ways, in order: [mix, choice]."""
    if choices == 1:
        return np.array([[count]])
    parts = [
        np.column_stack([np.full(len(rest), first), rest])
        for first in range(count + 1)
        for rest in [_all_mixes(count - first, choices - 1)]
    ]
    return np.concatenate(parts)


class _Knapsack:
    """One value of the largest transient. relaxed: seconds that every solution takes; infinite where there is none."""

    def __init__(
        self,
        families: Mapping[int, Family],
        blocks: Sequence[int],
        room: float,
        in_flight: int,
        most_transient: float,
    ) -> None:
        """blocks: the number of each one's family."""
        self._blocks, self._room = blocks, room
        self._counts = Counter(blocks)
        self._hulls = {number: hull(family, in_flight, most_transient) for number, family in families.items()}
        self._allowed = {
            number: [
                (choice.seconds, choice.kept_bytes(in_flight), index)
                for index, choice in enumerate(family)
                if choice.transient_bytes <= most_transient
            ]
            for number, family in families.items()
        }
        possible = all(self._hulls.values()) and self._least_rest(list(self._counts)) <= room
        self.relaxed = float(self._rest_seconds(list(self._counts), np.zeros(1))[0]) if possible else math.inf
        self._price = self._last_price() if possible else 0.0

    def solve(self, limit: float) -> Fastest:
        """The best solution, where it takes less than ``limit`` seconds."""
        known, mix = self._rounded()
        if self._holds(mix) > self._room:
            known = math.inf
        elif known <= self.relaxed * (1 + 1e-11):
            return Fastest(known, known, self._choices(mix))
        found = self._search(min(limit, math.nextafter(known * (1 + 1e-9), math.inf)))
        if known < min(found.seconds, limit):  # too many partial choices
            return Fastest(known, min(known, found.bound), self._choices(mix))
        return found

    def _search(self, limit: float) -> Fastest:
        """The best solution in less than ``limit`` seconds, family by family."""
        # those with the most to gain first: the relaxation of the rest is then the tightest
        order = sorted(self._counts, key=lambda family: -len(self._hulls[family]) * self._counts[family])
        seconds, kept = np.zeros(1), np.zeros(1)
        bound = math.inf
        trail: list[tuple[NDArray[np.intp], NDArray[np.intp], NDArray[np.intp]]] = []
        for number, family in enumerate(order):
            mixes, dropped = self._mixes(family, limit)
            bound = min(bound, dropped)
            if not len(mixes):
                return Fastest(math.inf, bound, None)
            amounts = mixes @ np.array([choice[:2] for choice in self._allowed[family]])
            more, bytes_ = amounts[:, 0], amounts[:, 1]
            at_least = (seconds[:, None] + more[None, :]).ravel()
            size = (kept[:, None] + bytes_[None, :]).ravel()
            rest = order[number + 1 :]
            reach = at_least + self._rest_seconds(rest, size)
            keep = np.flatnonzero((size + self._least_rest(rest) <= self._room) & (reach < limit))
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
        taken: dict[int, Counter[int]] = {}
        at = best
        for family, (parents, mixes, used) in zip(reversed(order), reversed(trail), strict=True):
            numbers = zip(mixes[used[at]].tolist(), self._allowed[family], strict=True)
            taken[family] = Counter({choice[2]: count for count, choice in numbers})
            at = int(parents[at])
        return Fastest(float(seconds[best]), min(bound, float(seconds[best])), self._choices(taken))

    def _holds(self, taken: Mapping[int, Counter[int]]) -> float:
        sizes = {family: {index: size for _, size, index in allowed} for family, allowed in self._allowed.items()}
        return math.fsum(
            count * sizes[family][index]
            for family, numbers in taken.items()
            for index, count in numbers.items()
            if count
        )

    def _choices(self, taken: Mapping[int, Counter[int]]) -> tuple[int, ...]:
        """The choice of each block; taken: how many of each family take which."""
        left = {family: list(numbers.elements()) for family, numbers in taken.items()}
        return tuple(left[family].pop() for family in self._blocks)

    def _mixes(self, family: int, limit: float) -> tuple[NDArray[np.intp], float]:
        """How many of a family's equal blocks may take each allowed choice in a solution, [mix, choice], in order; a
        bound of what is left out.

        Where there are few all are gone over; else choice by choice, those that few can take first, with the blocks
        left over and all other families relaxed.
        """
        count, allowed = self._counts[family], self._allowed[family]
        most = self._most(family, limit)
        if math.comb(count + len(allowed) - 1, count) <= _FEW_MIXES:
            mixes = _all_mixes(count, len(allowed))
            return mixes[(mixes <= most).all(axis=1)], math.inf
        order = sorted(range(len(allowed)), key=lambda number: most[number])
        others = [other for other in self._counts if other != family]
        mixes = np.zeros((1, 0), dtype=np.intp)
        left, seconds, bytes_ = np.array([count]), np.zeros(1), np.zeros(1)
        bound = math.inf
        for place, number in enumerate(order):
            if place == len(order) - 1:
                taken, parents = left, np.arange(len(left))
            else:
                options = np.minimum(left, most[number]) + 1
                parents = np.repeat(np.arange(len(left)), options)
                taken = np.arange(len(parents)) - np.repeat(np.cumsum(options) - options, options)
            left = left[parents] - taken
            each_s, each = allowed[number][:2]
            seconds, bytes_ = seconds[parents] + taken * each_s, bytes_[parents] + taken * each
            least = bytes_ + left * self._hulls[family][-1][1] + self._least_rest(others)
            found = np.flatnonzero((least <= self._room) & (seconds < limit))
            reach = seconds[found] + self._rest_seconds(others, bytes_[found], (family, left[found]))
            found, reach = found[reach < limit], reach[reach < limit]
            if len(found) > _MOST_PARTIAL:
                ranked = np.argsort(reach, kind="stable")
                bound = min(bound, float(reach[ranked[_MOST_PARTIAL]]))
                found = found[ranked[:_MOST_PARTIAL]]
            mixes = np.column_stack([mixes[parents[found]], taken[found]])
            left, seconds, bytes_ = left[found], seconds[found], bytes_[found]
            if not len(mixes):
                return np.zeros((0, len(allowed)), dtype=np.intp), bound
        mixes = mixes[:, np.argsort(order)]
        return mixes[np.lexsort(mixes.T[::-1])], bound

    def _most(self, family: int, limit: float) -> list[int]:
        """How many blocks of a family may take each allowed choice in a solution in less than ``limit`` seconds.

        With seconds + price * bytes, no solution is below the sum of every block's least, less the room's; each block
        that takes a choice adds what that has more than its least.
        """

        def charged(own: int) -> list[float]:
            return [seconds + self._price * size for seconds, size, _ in self._allowed[own]]

        least = {own: min(charged(own)) for own in self._counts}
        spare = limit - math.fsum(count * least[own] for own, count in self._counts.items()) + self._price * self._room
        spare += _ROUNDING * limit
        more = [amount - least[family] for amount in charged(family)]
        count = self._counts[family]
        return [count if by * count <= spare else max(0, math.floor(spare / by)) for by in more]

    def _last_price(self) -> float:
        """Seconds per byte at which the last bytes are freed, where choices are mixed in fractions."""
        need, price = -self._room, 0.0
        steps = []
        for family, points in self._hulls.items():
            count = self._counts[family]
            need += count * points[0][1]
            steps += [(_slope(a, b), count * (a[1] - b[1])) for a, b in itertools.pairwise(points)]
        for each, freed in sorted(steps):
            if need <= 0:
                break
            need, price = need - freed, each
        return price

    def _rounded(self) -> tuple[float, dict[int, Counter[int]]]:
        """An assignment that fits, where any does: bytes are freed where they cost the least, by whole blocks."""
        need, seconds = -self._room, 0.0
        steps: list[tuple[float, float, int, int, int]] = []
        taken: dict[int, Counter[int]] = {}
        for family, points in self._hulls.items():
            count = self._counts[family]
            taken[family] = Counter({points[0][2]: count})
            seconds, need = seconds + count * points[0][0], need + count * points[0][1]
            steps += [(_slope(a, b), a[1] - b[1], family, a[2], b[2]) for a, b in itertools.pairwise(points)]
        for price, freed, family, before, after in sorted(steps, key=lambda step: step[0]):
            count = min(taken[family][before], math.ceil(need / freed)) if need > 0 else 0
            taken[family][before] -= count
            taken[family][after] += count
            seconds, need = seconds + count * freed * price, need - count * freed
        return (seconds if need <= 0 else math.inf), taken

    def _least_rest(self, families: Sequence[int]) -> float:
        return sum(self._counts[family] * self._hulls[family][-1][1] for family in families)

    def _rest_seconds(
        self, families: Sequence[int], kept: Array, left: tuple[int, NDArray[np.intp]] | None = None
    ) -> Array:
        """At least the seconds of further families, where ``kept`` bytes are taken: fractions allowed.

        left: so many blocks of a family besides.
        """
        need = kept - self._room
        steps: list[tuple[float, NDArray[np.float64]]] = []
        seconds = np.zeros(need.shape)
        counted = [(family, np.array(float(self._counts[family]))) for family in families]
        counted += [(left[0], left[1].astype(np.float64))] if left else []
        for family, count in counted:
            points = self._hulls[family]
            seconds = seconds + count * points[0][0]
            need = need + count * points[0][1]
            steps += [(_slope(a, b), count * (a[1] - b[1])) for a, b in itertools.pairwise(points)]
        for price, freed in sorted(steps, key=lambda step: step[0]):
            part = np.clip(need, 0.0, freed)
            seconds, need = seconds + part * price, need - part
        return seconds * (1 - 1e-12)
