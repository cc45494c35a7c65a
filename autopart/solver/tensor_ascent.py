r"""Raising the bound of :mod:`autopart.solver.tensor_bound` op by op, without a linear solver.

The dual is climbed one op at a time (sequential tree-reweighted message passing; Kolmogorov, IEEE Transactions on
Pattern Analysis and Machine Intelligence 28(10), 2006). An op first raises the prices of all of its placements as far
as they stay feasible, so that v[o,.] holds what its neighbours save or cost; then it passes this on to those that come
later in the pass: each price falls by min_{c with that placement} (v[o,c] - min v[o,.]) / n, n the larger of the
numbers of neighbours before and after. v stays at least min v, so that the bound never falls. An assignment is read off
the prices by taking, op after op, the choice of the least v plus the slack towards what has been taken already.
"""

from __future__ import annotations

import math

import numpy as np

from autopart.solver.tensor_arrays import EdgeArrays, Floats, ProblemArrays, incoming, outgoing
from autopart.solver.tensor_bound import Prices

# What a pass has to bring: a share of the bound, or of what is still wanting.
_LEAST_RISE, _LEAST_OF_WANTING = 1e-3, 0.02


class Ascent:
    """Passes over a problem's ops that raise ``prices``, in place."""

    def __init__(self, arrays: ProblemArrays, prices: Prices) -> None:
        self.arrays, self.prices = arrays, prices
        number = {id(edge): index for index, edge in enumerate(arrays.edges)}
        self._sources = [[number[id(edge)] for edge in edges] for edges in outgoing(arrays)]
        self._readers = [[(number[id(edge)], use) for edge, use in uses] for uses in incoming(arrays)]

    def run(self, passes: int, wanted: float = math.inf) -> float:
        """There and back ``passes`` times at most, until the bound is as high as wanted or hardly rises; returns it."""
        ops = range(len(self.arrays.cost))
        bound = self.prices.bound(self.arrays).seconds
        for _ in range(passes):
            for op in ops:
                self._visit(op, forward=True)
            for op in reversed(ops):
                self._visit(op, forward=False)
            before, bound = bound, self.prices.bound(self.arrays).seconds
            least = min(_LEAST_RISE * abs(bound), _LEAST_OF_WANTING * (wanted - bound))
            if bound >= wanted or bound - before < least:
                break
        return bound

    def assignments(self) -> tuple[list[int], list[int]]:
        """What the prices suggest, from the first op on and from the last: numbers of the arrays' choices."""
        bound = self.prices.bound(self.arrays)
        ops = range(len(self.arrays.cost))
        found = []
        for order in (ops, reversed(ops)):
            chosen: dict[int, int] = {}
            for op in order:
                values = bound.values[op]
                for index, use in self._readers[op]:
                    edge = self.arrays.edges[index]
                    if edge.source in chosen:
                        row = bound.slack[index][use][edge.produced[chosen[edge.source]]]
                        values = values + row[edge.uses[use].wanted]
                for index in self._sources[op]:
                    edge = self.arrays.edges[index]
                    for reader, slack in zip(edge.uses, bound.slack[index], strict=True):
                        if reader.op in chosen:
                            values = values + slack[:, reader.wanted[chosen[reader.op]]][edge.produced]
                chosen[op] = int(values.argmin())
            found.append([chosen[op] for op in ops])
        return found[0], found[1]

    def _visit(self, op: int, *, forward: bool) -> None:
        arrays, prices = self.arrays, self.prices
        values = arrays.cost[op] + prices.memory * arrays.memory[op]
        for index, use in self._readers[op]:
            edge = arrays.edges[index]
            column, columns = prices.wanted[index][use], edge.uses[use].columns
            room = self._room(edge, index, use)[:, columns] - prices.yielded[index][use][:, None]
            column[columns] = _kept(room.min(axis=0), column[columns])
            values = values + column[edge.uses[use].wanted]
        for index in self._sources[op]:
            edge = arrays.edges[index]
            for use, by_row in enumerate(prices.yielded[index]):
                columns = edge.uses[use].columns
                room = self._room(edge, index, use)[:, columns] - prices.wanted[index][use][columns][None, :]
                by_row[:] = _kept(room.min(axis=1), by_row)
                values = values + by_row[edge.produced]
        above = values - values.min()
        leaving = sum(len(arrays.edges[index].uses) for index in self._sources[op])
        share = 1 / max(1, leaving, len(self._readers[op]))
        if forward:
            for index in self._sources[op]:
                edge = arrays.edges[index]
                for by_row in prices.yielded[index]:
                    by_row -= share * _least(above, edge.produced, len(by_row))
        else:
            for index, use in self._readers[op]:
                column, wanted = prices.wanted[index][use], arrays.edges[index].uses[use].wanted
                column -= share * _least(above, wanted, len(column))

    def _room(self, edge: EdgeArrays, index: int, use: int) -> Floats:
        """What the other uses leave of each pair's cost."""
        room = edge.seconds
        for other in range(len(edge.uses)):
            if other != use:
                rows, columns = self.prices.yielded[index][other], self.prices.wanted[index][other]
                room = room - np.maximum(0.0, rows[:, None] + columns[None, :])
        return room


def _kept(raised: Floats, before: Floats) -> Floats:
    """Never less than before, and as before where nothing bounds it."""
    found: Floats = np.where(np.isfinite(raised), np.maximum(raised, before), before)
    return found


def _least(values: Floats, placements: np.ndarray, count: int) -> Floats:
    """Per placement the least value of the choices that have it; 0 for those of none."""
    found = np.full(count, np.inf)
    np.minimum.at(found, placements, values)
    return np.where(np.isfinite(found), found, 0.0)
