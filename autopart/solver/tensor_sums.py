"""The least sums over all choices of strategies, for many prices at once: an elimination whose tables have columns.

As in :mod:`autopart.solver.elimination` one op after another is eliminated, but a table holds a number for each column
in place of a set of points. Choices of an op that read and yield alike, such as levels of ZeRO of one way to store a
parameter, take one place in its tables: the best of them in each column.

What does not depend on the columns is found once: the order, how tables are spread over the ops of those they join,
and what conversions take.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from autopart.solver.elimination_steps import MOST_SETTINGS, EliminationSteps, Floats
from autopart.solver.tensor_problem import IMPOSSIBLE, Edge, TensorProblem

Weights = tuple[float, float]
"""What a second and a byte count, or a point's seconds and bytes."""


_LARGE = 1 << 15
"""Numbers of a sum of tables that is not held as a whole."""


class Eliminator:
    """Of one problem. Raises PlanError where a table would have more than ``most_settings`` settings.

    others: the problem's edges with other costs, for columns that ask for these. more: further conversions, of edges by
    number.
    """

    def __init__(
        self,
        problem: TensorProblem,
        most_settings: int = MOST_SETTINGS,
        others: Sequence[Edge] = (),
        more: Sequence[tuple[int, Edge]] = (),
    ) -> None:
        self._problem = problem
        found = EliminationSteps(problem, most_settings, [number for number, _ in more])
        self._groups, self._steps, self._left = found.groups, found.steps, found.left
        columns = [problem.edges, others] if others else [problem.edges]
        self._edges = [np.stack([found.edge(edge) for edge in own], axis=-1) for own in zip(*columns, strict=True)]
        self._more = [found.edge(edge) for _, edge in more]
        # choices of all ops in a row, those of a group beside each other
        first = np.cumsum([0, *(len(op.choices) for op in problem.ops)])
        rows = [first[op] + np.array(group) for op, own in enumerate(self._groups) for group in own]
        self._rows = np.concatenate(rows)
        self._starts = np.cumsum([0, *map(len, rows)])[:-1]
        self._places = np.cumsum([0, *map(len, self._groups)]).tolist()

    @property
    def content(self) -> tuple[object, ...]:
        """Everything that :meth:`totals` follows from, beside what it is given."""
        return (self._edges, self._more, self._steps, self._left, self._rows, self._starts, self._places)

    def least(self, weights: Sequence[Weights]) -> list[tuple[int, ...] | None]:
        """By pair of weights the choices with the least weighted sum of seconds and bytes; None: none is possible."""
        counts, picked = np.array(weights, dtype=np.float64), list[list[NDArray[np.int64]]]()
        tables = list[Floats | None]()
        for op, groups in zip(self._problem.ops, self._groups, strict=True):
            sums = np.array([[choice.cost, choice.memory] for choice in op.choices]) @ counts.T
            best = [np.argmin(sums[group], axis=0) for group in groups]
            picked.append([np.array(group)[at] for group, at in zip(groups, best, strict=True)])
            tables.append(np.array([sums[group].min(axis=0) for group in groups]))
        tables += [_weighted(table[..., 0], counts[:, 0]) for table in self._edges]
        places = list[NDArray[np.int64]]()
        final = self._eliminated([*tables, *(None for _ in self._more)], places)
        return [self._choices(places, picked, at) if math.isfinite(final[at]) else None for at in range(len(weights))]

    def totals(self, costs: Floats, other: NDArray[np.bool_], times: Floats) -> Floats:
        """By column the least sum of what choices cost and of conversions; infinite where nothing is possible.

        costs: [choice of all ops, column], in place of what choices cost and hold. other: by column, whether it asks
        for the other costs of the edges. times: [number of more, column], how often further conversions count.
        """
        places = np.minimum.reduceat(costs[self._rows], self._starts, axis=0)
        tables = list[Floats | None](places[one:two] for one, two in itertools.pairwise(self._places))
        which = other.astype(np.int64)
        tables += [table if table.shape[-1] == 1 else np.take(table, which, axis=-1) for table in self._edges]
        # a conversion that is impossible is so as one of the edge as well
        tables += [_weighted(table, row) if row.any() else None for table, row in zip(self._more, times, strict=True)]
        return self._eliminated(tables)

    def _eliminated(self, tables: list[Floats | None], best: list[NDArray[np.int64]] | None = None) -> Floats:
        """The least sums by column. tables: of ops, edges and further conversions; None: counts nothing. best: takes
        by step the place that is the least.
        """
        for step in self._steps:
            known = [item.spread(table) for item in step.joined if (table := tables[item.table]) is not None]
            if best is None:
                tables.append(_least_sum(known))
                continue
            total = _sum(known)
            best.append(np.argmin(total, axis=-2))
            tables.append(total.min(axis=-2))
        return _sum([table for number in self._left if (table := tables[number]) is not None])

    def _choices(
        self, best: Sequence[NDArray[np.int64]], picked: Sequence[Sequence[NDArray[np.int64]]], at: int
    ) -> tuple[int, ...]:
        found: dict[int, int] = {}
        for step, places in zip(reversed(self._steps), reversed(best), strict=True):
            found[step.op] = int(places[(*(found[other] for other in step.rest), at)])
        return tuple(int(picked[op][found[op]][at]) for op in range(len(picked)))


def _sum(tables: Sequence[Floats]) -> Floats:
    """Of tables along the same axes, from the first on."""
    total, own = tables[0], False
    for table in tables[1:]:
        if own and all(map(operator.ge, total.shape, table.shape)):
            total += table
        else:
            total, own = total + table, True
    return total


def _least_sum(tables: Sequence[Floats]) -> Floats:
    """The least of :func:`_sum` along the last axis but the columns, which the first table has."""
    *others, last = tables
    if not others:
        return last.min(axis=-2)
    total = _sum(others)
    if math.prod(map(max, total.shape, last.shape)) < _LARGE:
        return (total + last).min(axis=-2)
    # place by place, as filling memory takes longer than adding
    found: Floats = total[..., 0, :] + last[..., 0, :]
    own, several = np.empty_like(found), last.shape[-2] > 1
    for place in range(1, total.shape[-2]):
        np.add(total[..., place, :], last[..., place if several else 0, :], out=own)
        np.minimum(found, own, out=found)
    return found


def _weighted(seconds: Floats, weights: Floats) -> Floats:
    """Impossible stays so where a second counts nothing."""
    spread = seconds[..., None]
    return np.where(np.isinf(spread), IMPOSSIBLE, np.where(np.isinf(spread), 0.0, spread) * weights)
