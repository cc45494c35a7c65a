r"""A bound for all choices from prices of a part: the Lagrangian dual of :mod:`autopart.solver.tensor`.

With prices a[e,u,p] and b[e,u,t] of the flow's two rows and l >= 0 of a byte, taking the flow's equations and the
memory limit into the objective leaves, for every op by itself and every edge by itself,

    D = sum_o min_c v[o,c] - l memory_limit
    v[o,c] = cost[o,c] + l memory[o,c] + sum_{e,u: c yields p} a[e,u,p] + sum_{e,u: c wants t} b[e,u,t]
    where for all e, p, t:   sum_u max(0, a[e,u,p] + b[e,u,t]) <= weight[e] cost[e,p,t]                     (feasible)
    (one use: a[e,p] + b[e,t] <= weight[e] cost[e,p,t], of any sign)

D is at most the optimum for *any* prices that are feasible (Geoffrion, Lagrangean relaxation for integer programming,
1974), so the prices of a model over some choices are completed to all placements: each missing price is the largest
that stays feasible, which is where a missing choice looks dearest. v[o,c] - min v[o,.] is then what the bound rises by
if c is taken (:meth:`Bound.excess`), and so is weight cost - sum_u max(0, a + b) for a pair of placements.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autopart.solver.tensor_arrays import EdgeArrays, Floats, ProblemArrays
from autopart.solver.tensor_flow import Duals


@dataclass(slots=True)
class Prices:
    """Feasible prices of all placements. yielded, wanted: a and b per edge and use; memory: seconds per byte.

    What a use does not want is priced at minus infinity.
    """

    yielded: list[list[Floats]]
    wanted: list[list[Floats]]
    memory: float = 0.0

    def values(self, arrays: ProblemArrays) -> list[Floats]:
        """v[o,c], per op."""
        found = [cost + self.memory * memory for cost, memory in zip(arrays.cost, arrays.memory, strict=True)]
        for edge, rows, columns in zip(arrays.edges, self.yielded, self.wanted, strict=True):
            for use, by_row, by_column in zip(edge.uses, rows, columns, strict=True):
                found[edge.source] = found[edge.source] + by_row[edge.produced]
                found[use.op] = found[use.op] + by_column[use.wanted]
        return found

    def bound(self, arrays: ProblemArrays) -> Bound:
        values = self.values(arrays)
        seconds = sum(float(row.min()) for row in values) - self.memory * (arrays.limit or 0.0)
        slack = [_slack(*item) for item in zip(arrays.edges, self.yielded, self.wanted, strict=True)]
        return Bound(seconds, values, slack, self)


@dataclass(frozen=True, slots=True)
class Bound:
    """seconds: no assignment takes fewer. values: v[o,c]. slack: per edge and use, what is left of each pair's cost.

    prices: that give it.
    """

    seconds: float
    values: list[Floats]
    slack: list[list[Floats]]
    prices: Prices

    def excess(self, op: int) -> Floats:
        """Per choice what the bound rises by at least where the choice is taken."""
        values = self.values[op]
        found: Floats = values - values.min()
        return found


def free(arrays: ProblemArrays, byte_s: float = 0.0) -> Prices:
    """Prices of no placement. byte_s: seconds that a byte costs."""
    yielded, wanted = [], []
    for edge in arrays.edges:
        rows, columns = edge.seconds.shape
        yielded.append([np.zeros(rows) for _ in edge.uses])
        wanted.append([np.full(columns, -np.inf) for _ in edge.uses])
        for use, column in zip(edge.uses, wanted[-1], strict=True):
            column[use.columns] = 0.0
    return Prices(yielded, wanted, byte_s)


def completed(arrays: ProblemArrays, duals: Duals) -> Prices:
    """Feasible prices from those known for a part of the placements."""
    yielded, wanted = [], []
    for edge, rows, columns in zip(arrays.edges, duals.yielded, duals.wanted, strict=True):
        a, b = [row.copy() for row in rows], [column.copy() for column in columns]
        (_complete_single if len(edge.uses) == 1 else _complete_shared)(edge, a, b)
        yielded.append(a)
        wanted.append([np.where(np.isnan(column), -np.inf, column) for column in b])
    return Prices(yielded, wanted, duals.memory)


def _complete_single(edge: EdgeArrays, a: Sequence[Floats], b: Sequence[Floats]) -> None:
    """Fills what is missing in place, and lowers what is not feasible."""
    (row,), (column,) = a, b
    known, read = ~np.isnan(row), ~np.isnan(column)
    if read.any() and known.any():
        inside = edge.seconds[np.ix_(known, read)] - column[read][None, :]
        row[known] = np.minimum(row[known], inside.min(axis=1))
    missing = np.flatnonzero(~read)
    if len(missing):
        free = (
            edge.seconds[np.ix_(known, missing)] - row[known][:, None] if known.any() else np.zeros((1, len(missing)))
        )
        column[missing] = _finite(free.min(axis=0), column[read])
    if not known.all():
        row[~known] = _finite((edge.seconds[~known] - column[None, :]).min(axis=1), row[known])


def _complete_shared(edge: EdgeArrays, a: Sequence[Floats], b: Sequence[Floats]) -> None:
    """The same where uses share the cost of a pair: each in turn takes what those before it have left."""
    count = len(edge.uses)
    known = ~np.isnan(a[0])
    # Known rows against known columns.
    left = edge.seconds.copy()
    for row, column in zip(a, b, strict=True):
        read = ~np.isnan(column)
        if known.any() and read.any():
            room = left[np.ix_(known, read)] - column[read][None, :]
            row[known] = np.minimum(row[known], room.min(axis=1))
            taken = np.zeros_like(left)
            taken[np.ix_(known, read)] = np.maximum(0.0, row[known][:, None] + column[read][None, :])
            left = left - taken
    # Missing columns: equal parts of what the known rows leave.
    for number, (row, column, use) in enumerate(zip(a, b, edge.uses, strict=True)):
        wanted = np.zeros(len(column), dtype=bool)
        wanted[use.columns] = True
        missing = np.flatnonzero(wanted & np.isnan(column))
        if len(missing):
            if known.any():
                rest = left[np.ix_(known, missing)]
                column[missing] = _finite((rest / (count - number) - row[known][:, None]).min(axis=0), column[wanted])
                left[np.ix_(known, missing)] -= np.maximum(0.0, row[known][:, None] + column[missing][None, :])
            else:
                column[missing] = 0.0
    # Missing rows: equal parts first, then each use raises its own by what is left.
    if known.all():
        return
    rest = edge.seconds[~known]
    for number, (row, column, use) in enumerate(zip(a, b, edge.uses, strict=True)):
        prices = column[use.columns][None, :]
        room = rest[:, use.columns] / (count - number) - prices
        row[~known] = _finite(room.min(axis=1), row[known])
        rest[:, use.columns] -= np.maximum(0.0, row[~known][:, None] + prices)
    for row, column, use in zip(a, b, edge.uses, strict=True):
        prices = column[use.columns][None, :]
        before = np.maximum(0.0, row[~known][:, None] + prices)
        raised = np.maximum(row[~known], (rest[:, use.columns] + before - prices).min(axis=1))
        raised = np.where(np.isfinite(raised), raised, row[~known])
        rest[:, use.columns] += before - np.maximum(0.0, raised[:, None] + prices)
        row[~known] = raised


def _finite(values: Floats, others: Floats) -> Floats:
    """Any price is feasible where no conversion is possible; the largest of the others."""
    others = others[np.isfinite(others)]
    found: Floats = np.where(np.isfinite(values), values, others.max() if len(others) else 0.0)
    return found


def _slack(edge: EdgeArrays, a: Sequence[Floats], b: Sequence[Floats]) -> list[Floats]:
    sums = [
        row[:, None] + np.where(np.isnan(column), -np.inf, column)[None, :] for row, column in zip(a, b, strict=True)
    ]
    if len(sums) == 1:
        return [edge.seconds - sums[0]]
    left = edge.seconds - sum(np.maximum(0.0, one) for one in sums)
    return [left + np.maximum(0.0, -one) for one in sums]
