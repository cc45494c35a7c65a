"""The lower convex hull of (seconds, bytes) over all choices of strategies, by prices for bytes.

At a price of w seconds per byte the choices with the least seconds + w bytes are a corner of the hull, and a problem
without a memory limit finds them. Corners that are known give the next prices, the slopes between neighbours::

    w = (s_{i+1} - s_i) / (b_i - b_{i+1})        a cheaper answer is a corner between them; none: there is no corner

A round asks for all these prices at once. The corners that lie farthest from what is known come first, so that a few
rounds give a hull of few corners that is near to the whole. What lies above the hull is not found.

:func:`eliminator` answers many prices in one elimination (:mod:`autopart.solver.tensor_sums`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from autopart.solver.elimination import Point
from autopart.solver.elimination_steps import MOST_SETTINGS
from autopart.solver.tensor_problem import Op, TensorProblem
from autopart.solver.tensor_sums import Eliminator, Weights

Item = TypeVar("Item")

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
    return Eliminator(problem, most_settings).least


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
