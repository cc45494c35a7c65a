"""The lower convex hull of (seconds, bytes) over all choices of strategies, by prices for bytes.

At a price of w seconds per byte the choices with the least seconds + w bytes are a corner of the hull, and a problem
without a memory limit finds them. Corners that are known give the next prices, the slopes between neighbours::

    w = (s_{i+1} - s_i) / (b_i - b_{i+1})        a cheaper answer is a corner between them; none: there is no corner

A round asks for all these prices at once. The corners that lie farthest from what is known come first, so that a few
rounds give a hull of few corners that is near to the whole. What lies above the hull is not found.

:func:`eliminator` answers many prices in one elimination (:mod:`autopart.solver.elimination`), whose tables hold a
number for each price in place of sets of points. Choices of an op that read and yield alike, such as levels of ZeRO of
one way to store a parameter, take one place in its tables: the best of them at each price.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from autopart.runtime.errors import PlanError
from autopart.solver.elimination import MOST_SETTINGS, Point
from autopart.solver.tensor_problem import IMPOSSIBLE, Edge, Op, TensorProblem

Item = TypeVar("Item")
Weights = tuple[float, float]
"""What a second and a byte count, or a point's seconds and bytes."""

_NEAR = 1e-9
"""Sums within that share of each other count as equal."""


def hull(
    problem: TensorProblem, least: Callable[[Sequence[Weights]], Sequence[Sequence[int] | None]], most: int = 8
) -> tuple[Point, ...]:
    """The corners, the fastest first; of more than ``most`` those that were found first. Empty: nothing is possible.

    least: for each pair of weights the choices with the least weighted sum of seconds and bytes.
    """

    def points(weights: Sequence[Weights]) -> list[Point]:
        return [
            Point(problem.objective(choices), problem.memory(choices), tuple(choices))
            for choices in least(weights)
            if choices is not None
        ]

    # of the fastest the smallest, and of the smallest the fastest
    scale = _seconds_per_byte(problem)
    ends = points([(1.0, _NEAR * scale), (_NEAR, scale)])
    if not ends:
        return ()
    found = corners(ends, _place)
    whole: set[tuple[Point, Point]] = set()  # between which no corner is left
    while len(found) < most:
        pairs = [pair for pair in itertools.pairwise(found) if pair not in whole]
        if not pairs:
            break
        new = []
        for pair, point in zip(pairs, points([_slope(*pair) for pair in pairs]), strict=True):
            below = _below(_place(pair[0]), _place(pair[1]), _place(point))
            if below > 0:
                new.append((below, point))
            else:
                whole.add(pair)
        new.sort(key=lambda item: -item[0])
        found = corners([*found, *(point for _, point in new[: most - len(found)])], _place)
    return tuple(found)


def eliminator(
    problem: TensorProblem, most_settings: int = MOST_SETTINGS
) -> Callable[[Sequence[Weights]], list[tuple[int, ...] | None]]:
    """Answers :func:`hull` exactly. Raises PlanError where a table would have more than ``most_settings`` settings."""
    return _Eliminator(problem, most_settings).least


def least_sums(
    problem: TensorProblem,
    costs: Sequence[NDArray[np.float64]],
    more: Sequence[tuple[Edge, NDArray[np.float64]]] = (),
    most_settings: int = MOST_SETTINGS,
) -> NDArray[np.float64]:
    """By column the least sum of what choices cost and of conversions, exactly.

    costs: of each op [choice, column], in place of what its choices cost and hold. more: further conversions, each as
    often as it counts by column. Infinite where nothing is possible. Raises PlanError as :func:`eliminator` does.
    """
    return _Eliminator(problem, most_settings).totals(costs, more)


def weighed(problem: TensorProblem, weights: Weights) -> TensorProblem:
    """Seconds are the weighted sum, and bytes nothing."""
    seconds, memory = weights
    ops = tuple(
        Op(
            op.name,
            tuple(replace(own, cost=seconds * own.cost + memory * own.memory, memory=0.0) for own in op.choices),
        )
        for op in problem.ops
    )
    edges = tuple(replace(edge, weight=edge.weight * seconds) for edge in problem.edges)
    return TensorProblem(ops, edges)


def _slope(one: Point, two: Point) -> Weights:
    """By which two corners are equal."""
    return 1.0, (two.seconds - one.seconds) / (one.memory - two.memory)


def _seconds_per_byte(problem: TensorProblem) -> float:
    """For numbers of one size."""
    seconds, memory = (
        math.fsum(max(getattr(choice, name) for choice in op.choices) for op in problem.ops)
        for name in ("cost", "memory")
    )
    return seconds / memory if seconds and memory else 1.0


def corners(points: Sequence[Item], at: Callable[[Item], Weights]) -> list[Item]:
    """The lower convex hull, the fastest first. at: seconds and bytes of a point."""
    found: list[tuple[Weights, Item]] = []
    for place, item in sorted(((at(item), item) for item in points), key=lambda pair: pair[0]):
        if found and place[1] >= found[-1][0][1]:
            continue
        while len(found) > 1 and _below(found[-2][0], place, found[-1][0]) <= 0:
            found.pop()
        found.append((place, item))
    return [item for _, item in found]


def farthest_first(points: Sequence[Item], at: Callable[[Item], Weights]) -> list[Item]:
    """The corners of a hull, its ends first, then always the one that lies farthest below what went before."""
    left = list(points)
    order = [*left[:1], *left[1:][-1:]]
    while len(order) < len(left):
        numbers = sorted(map(left.index, order))
        below = [
            (_below(at(left[one]), at(left[two]), at(left[number])), number)
            for one, two in itertools.pairwise(numbers)
            for number in range(one + 1, two)
        ]
        order.append(left[max(below)[1]])
    return order


def _below(one: Weights, two: Weights, between: Weights) -> float:
    """Seconds by which a point lies below the line through two others; not above zero within rounding."""
    slope = (two[0] - one[0]) / (one[1] - two[1])
    below = one[0] + (one[1] - between[1]) * slope - between[0]
    return below if below > _NEAR * two[0] else 0.0


def _place(point: Point) -> Weights:
    return point.seconds, point.memory


@dataclass(frozen=True, slots=True)
class _Table:
    """Sums by the groups of ``ops``, in that order, and the weights last."""

    ops: tuple[int, ...]
    sums: NDArray[np.float64]


_Steps = list[tuple[int, tuple[int, ...], NDArray[np.int64]]]
_Picked = list[list[NDArray[np.int64]]]


class _Eliminator:
    def __init__(
        self,
        problem: TensorProblem,
        most_settings: int,
    ) -> None:
        self.problem = problem
        slots: list[set[tuple[bool, int]]] = [set() for _ in problem.ops]  # of inputs (true) and outputs with an edge
        for edge in problem.edges:
            slots[edge.source].add((False, edge.output))
            for op, slot in edge.uses:
                slots[op].add((True, slot))
        self.groups: list[list[list[int]]] = []  # by op, the choices that read and yield alike
        for item, own in zip(problem.ops, slots, strict=True):
            alike: dict[tuple[int, ...], list[int]] = {}
            for index, choice in enumerate(item.choices):
                key = tuple((choice.inputs if read else choice.outputs)[slot] for read, slot in sorted(own))
                alike.setdefault(key, []).append(index)
            self.groups.append(list(alike.values()))
        self.order = self._order(most_settings)
        self.edges = [self._edge(edge) for edge in problem.edges]

    def least(self, weights: Sequence[Weights]) -> list[tuple[int, ...] | None]:
        """By pair of weights the choices with the least weighted sum of seconds and bytes."""
        counts, picked, tables = np.array(weights, dtype=np.float64), _Picked(), []
        for number, (own, groups) in enumerate(zip(self.problem.ops, self.groups, strict=True)):
            sums = np.array([[choice.cost, choice.memory] for choice in own.choices]) @ counts.T
            best = [np.argmin(sums[group], axis=0) for group in groups]
            picked.append([np.array(group)[at] for group, at in zip(groups, best, strict=True)])
            tables.append(_Table((number,), np.array([sums[group].min(axis=0) for group in groups])))
        tables += [_Table(table.ops, _weighted(table.sums, counts[:, 0])) for table in self.edges]
        steps = _Steps()
        final = self._eliminated(tables, steps)
        return [self._choices(steps, picked, at) if math.isfinite(final[at]) else None for at in range(len(weights))]

    def totals(
        self, costs: Sequence[NDArray[np.float64]], more: Sequence[tuple[Edge, NDArray[np.float64]]]
    ) -> NDArray[np.float64]:
        """As :func:`least_sums`."""
        ones = np.ones(costs[0].shape[1])
        tables = [
            _Table((number,), np.array([own[group].min(axis=0) for group in groups]))
            for number, (own, groups) in enumerate(zip(costs, self.groups, strict=True))
        ]
        edges = [(table, ones) for table in self.edges] + [(self._edge(edge), times) for edge, times in more]
        tables += [_Table(table.ops, _weighted(table.sums, times)) for table, times in edges]
        return self._eliminated(tables)

    def _eliminated(self, tables: list[_Table], steps: _Steps | None = None) -> NDArray[np.float64]:
        """The least sums by column. steps: takes how they come about."""
        for op in self.order:
            joined = [table for table in tables if op in table.ops]
            tables = [table for table in tables if op not in table.ops]
            rest = _others(joined, op)
            total = sum(_spread(table, (*rest, op)) for table in joined)
            assert isinstance(total, np.ndarray)
            if steps is not None:
                steps.append((op, rest, np.argmin(total, axis=-2)))
            tables.append(_Table(rest, total.min(axis=-2)))
        final = sum(table.sums for table in tables)
        assert isinstance(final, np.ndarray)
        return final

    def _choices(
        self,
        steps: _Steps,
        picked: _Picked,
        at: int,
    ) -> tuple[int, ...]:
        found: dict[int, int] = {}
        for op, rest, best in reversed(steps):
            found[op] = int(best[(*(found[other] for other in rest), at)])
        return tuple(int(picked[op][found[op]][at]) for op in range(len(picked)))

    def _order(self, most_settings: int) -> list[int]:
        """Ops in the order that keeps the next table smallest."""
        size = [len(groups) for groups in self.groups]
        spans = [{edge.source, *(op for op, _ in edge.uses)} for edge in self.problem.edges]
        left, found = set(range(len(size))), list[int]()
        settings = {op: _settings(spans, op, size) for op in left}
        for span in spans:
            _check(math.prod(size[op] for op in span), most_settings)
        while left:
            op = min(left, key=lambda item: (settings[item], item))
            _check(settings[op], most_settings)
            left.remove(op)
            found.append(op)
            joined = {other for span in spans if op in span for other in span} - {op}
            spans = [span for span in spans if op not in span]
            if joined:
                spans.append(joined)
            settings.update({other: _settings(spans, other, size) for other in joined})
        return found

    def _edge(self, edge: Edge) -> _Table:
        """Seconds of a value's conversions, each target once."""
        ops = tuple(dict.fromkeys((edge.source, *(op for op, _ in edge.uses))))

        def placements(op: int, slot: int, read: bool) -> list[int]:
            choices = [self.problem.ops[op].choices[group[0]] for group in self.groups[op]]
            return [(choice.inputs if read else choice.outputs)[slot] for choice in choices]

        def spread(op: int, found: NDArray[np.generic]) -> NDArray[np.generic]:
            """Along the dims of the source, where there are any besides, and of ``op``."""
            shape = [len(self.groups[other]) if other in (op, edge.source)[: found.ndim] else 1 for other in ops]
            return found.reshape(shape)

        have = placements(edge.source, edge.output, read=False)
        total = np.zeros([len(self.groups[op]) for op in ops])
        wanted: list[NDArray[np.generic]] = []
        for op, slot in edge.uses:
            want = placements(op, slot, read=True)
            seconds = edge.table(have, want)
            if op == edge.source:
                seconds = np.diagonal(seconds)
            again = np.zeros((1,) * len(ops), dtype=bool)
            wanted.append(spread(op, np.array(want)))
            for other in wanted[:-1]:
                again = again | (other == wanted[-1])
            total = total + np.where(again, 0.0, spread(op, seconds))
        return _Table(ops, total)


def _weighted(seconds: NDArray[np.float64], weights: NDArray[np.float64]) -> NDArray[np.float64]:
    """Impossible stays so where a second counts nothing."""
    spread = seconds[..., None]
    return np.where(np.isinf(spread), IMPOSSIBLE, np.where(np.isinf(spread), 0.0, spread) * weights)


def _spread(table: _Table, ops: Sequence[int]) -> NDArray[np.float64]:
    """A table's sums along other ops as well, each once."""
    order = sorted(range(len(table.ops)), key=lambda at: ops.index(table.ops[at]))
    sums = table.sums.transpose([*order, len(order)])
    shape = [sums.shape[order.index(table.ops.index(op))] if op in table.ops else 1 for op in ops]
    return sums.reshape([*shape, sums.shape[-1]])


def _others(tables: Sequence[_Table], op: int) -> tuple[int, ...]:
    found = dict.fromkeys(other for table in tables for other in table.ops)
    return tuple(other for other in found if other != op)


def _settings(spans: Sequence[set[int]], op: int, size: Sequence[int]) -> int:
    joined = set[int]().union({op}, *(span for span in spans if op in span))
    return math.prod(size[other] for other in joined)


def _check(settings: int, most: int) -> None:
    if settings > most:
        raise PlanError(f"the graph is too wide for elimination: a table of {settings} settings")
