r"""The linear model of :mod:`autopart.solver.tensor` over some choices and some pairs of placements."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autopart.solver.linear import LinearModel, Relaxation
from autopart.solver.tensor_arrays import EdgeArrays, Floats, Mask, ProblemArrays

_SCALE = 1e4
_INTEGRAL = 1e-6


@dataclass(frozen=True, slots=True)
class Part:
    """What of a problem a model has. choices: per op, which. pairs: per edge and use, which [row, column]."""

    choices: list[Mask]
    pairs: list[list[Mask]]

    @property
    def size(self) -> int:
        """Pairs, over all uses."""
        return sum(int(mask.sum()) for uses in self.pairs for mask in uses)


@dataclass(frozen=True, slots=True)
class Duals:
    """Prices of the model's rows in seconds; not a number where the model has no such row.

    yielded, wanted: per edge and use, by row and by column. memory: seconds per byte.
    """

    yielded: list[list[Floats]]
    wanted: list[list[Floats]]
    memory: float


class Flow:
    """The model over a part of the problem; its costs are seconds / ``unit``."""

    def __init__(self, arrays: ProblemArrays, part: Part, seconds: float) -> None:
        self.arrays = arrays
        self.part = part
        self.unit = seconds / _SCALE
        self.model = LinearModel()
        self.x: list[dict[int, int]] = []
        self._rows: list[list[tuple[dict[int, int], dict[int, int]]]] = []  # per edge and use: by row, by column
        self._memory_row: int | None = None
        self._memory_unit = 1.0
        self._add_choices()
        for edge, pairs in zip(arrays.edges, part.pairs, strict=True):
            self._add_edge(edge, pairs)
        if arrays.limit is not None:
            self._add_memory(arrays.limit)

    def rounded(self, values: Sequence[float]) -> list[int]:
        """Per op the problem's number of the choice of the largest value."""
        return self.arrays.original([max(row, key=lambda c, row=row: values[row[c]]) for row in self.x])  # type: ignore[misc]

    def is_integral(self, values: Sequence[float]) -> bool:
        return all(min(values[v], 1 - values[v]) < _INTEGRAL for row in self.x for v in row.values())

    def duals(self, relaxed: Relaxation) -> Duals:
        """The duals of the flow and memory rows, as :mod:`autopart.solver.tensor_bound` reads them."""
        yielded, wanted = [], []
        for edge, rows in zip(self.arrays.edges, self._rows, strict=True):
            shape = edge.seconds.shape
            both = [(np.full(shape[0], np.nan), np.full(shape[1], np.nan)) for _ in rows]
            for (a, b), (by_row, by_column) in zip(both, rows, strict=True):
                for values, numbers in ((a, by_row), (b, by_column)):
                    for placement, row in numbers.items():
                        values[placement] = relaxed.duals[row] * self.unit
            yielded.append([a for a, _ in both])
            wanted.append([b for _, b in both])
        price = 0.0
        if self._memory_row is not None:
            price = max(0.0, -relaxed.duals[self._memory_row]) * self.unit / self._memory_unit
        return Duals(yielded, wanted, price)

    def keep_near(
        self, yielded: Sequence[Sequence[Floats]], wanted: Sequence[Sequence[Floats]], seconds: float
    ) -> None:
        """Keeps the duals of flow rows within so many seconds of these prices, per edge and use.

        What joins or leaves a row's flow from outside costs what the price may be at most, or gives the least.
        """
        for uses, *both in zip(self._rows, yielded, wanted, strict=True):
            for numbers, prices in zip(uses, zip(*both, strict=True), strict=True):
                for rows, known in zip(numbers, prices, strict=True):
                    for placement, row in rows.items():
                        for sign in (1.0, -1.0):
                            cost = (sign * float(known[placement]) + seconds) / self.unit
                            self.model.extend_row(row, self.model.add_variable(cost, upper=math.inf), sign)

    def hint(self, choices: Sequence[int]) -> None:
        """Where the integer solve starts from: an assignment in the problem's numbers."""
        chosen = [live.index(c) for live, c in zip(self.arrays.live, choices, strict=True)]
        self.model.hint({row[c]: float(c == chosen[o]) for o, row in enumerate(self.x) for c in row})

    def exclude(self, choices: Sequence[int]) -> None:
        """Not these choices again: over the memory limit by less than the solver's tolerance."""
        chosen = [live.index(c) for live, c in zip(self.arrays.live, choices, strict=True)]
        self.model.add_row(
            [row[c] for row, c in zip(self.x, chosen, strict=True)], [1.0] * len(chosen), upper=len(chosen) - 1.0
        )

    def _add_choices(self) -> None:
        """sum_c x[o,c] = 1."""
        for cost, mask in zip(self.arrays.cost, self.part.choices, strict=True):
            row = {int(c): self.model.add_variable(cost[c] / self.unit, integer=True) for c in np.flatnonzero(mask)}
            self.model.add_row(list(row.values()), [1.0] * len(row), lower=1.0, upper=1.0)
            self.x.append(row)

    def _add_edge(self, edge: EdgeArrays, pairs: Sequence[Mask]) -> None:
        flows: dict[tuple[int, int], list[int]] = defaultdict(list)
        single = len(edge.uses) == 1
        rows = []
        for number in range(len(edge.uses)):
            y, numbers = self._add_flow(edge, number, pairs[number], priced=single)
            rows.append(numbers)
            for pair, variable in y.items():
                flows[pair].append(variable)
        if not single:
            self._add_shared(edge, flows)
        self._rows.append(rows)

    def _add_flow(
        self, edge: EdgeArrays, number: int, pairs: Mask, *, priced: bool
    ) -> tuple[dict[tuple[int, int], int], tuple[dict[int, int], dict[int, int]]]:
        """sum_t y[e,u,p,t] = sum of x that yield p, and sum_p y[e,u,p,t] = sum of x that want t."""
        use = edge.uses[number]
        yields, wants = self._by_placement(edge.source, edge.produced), self._by_placement(use.op, use.wanted)
        y: dict[tuple[int, int], int] = {}
        leaving: dict[int, list[int]] = {p: [] for p in yields}
        entering: dict[int, list[int]] = {t: [] for t in wants}
        for p, t in np.argwhere(pairs & np.isfinite(edge.seconds)).tolist():
            if p in yields and t in wants:
                cost = edge.seconds[p, t] / self.unit if priced else 0.0
                y[p, t] = self.model.add_variable(cost, integer=True)
                leaving[p].append(y[p, t])
                entering[t].append(y[p, t])
        by_row = {p: self._add_balance(leaving[p], sources) for p, sources in yields.items()}
        by_column = {t: self._add_balance(entering[t], users) for t, users in wants.items()}
        return y, (by_row, by_column)

    def _add_shared(self, edge: EdgeArrays, flows: dict[tuple[int, int], list[int]]) -> None:
        """z[e,p,t] >= y[e,u,p,t] for each use u."""
        for (p, t), uses in flows.items():
            seconds = edge.seconds[p, t]
            if seconds == 0:
                continue
            z = self.model.add_variable(seconds / self.unit, integer=True)
            for y in uses:
                self.model.add_row([z, y], [1.0, -1.0], lower=0.0)

    def _add_memory(self, limit: float) -> None:
        """sum memory[o,c] x[o,c] <= memory_limit, both as shares of the limit."""
        held = [(x, self.arrays.memory[o][c]) for o, row in enumerate(self.x) for c, x in row.items()]
        self._memory_unit = max(abs(limit), 1.0) / _SCALE
        self._memory_row = self.model.add_row(
            [x for x, _ in held], [size / self._memory_unit for _, size in held], upper=limit / self._memory_unit
        )

    def _add_balance(self, flow: Sequence[int], choices: Sequence[int]) -> int:
        return self.model.add_row([*flow, *choices], [1.0] * len(flow) + [-1.0] * len(choices), lower=0.0, upper=0.0)

    def _by_placement(self, op: int, placement: Sequence[int] | np.ndarray) -> dict[int, list[int]]:
        groups: dict[int, list[int]] = defaultdict(list)
        for c, x in self.x[op].items():
            groups[int(placement[c])].append(x)
        return groups


def whole(arrays: ProblemArrays) -> Part:
    """All choices and pairs."""
    return Part(
        [np.ones(len(cost), dtype=bool) for cost in arrays.cost],
        [[np.ones(edge.seconds.shape, dtype=bool) for _ in edge.uses] for edge in arrays.edges],
    )


def largest_seconds(arrays: ProblemArrays) -> float:
    """Something positive to scale by where no assignment is known."""
    most = max((float(cost.max()) for cost in arrays.cost), default=0.0)
    for edge in arrays.edges:
        finite = edge.seconds[np.isfinite(edge.seconds)]
        most = max(most, float(finite.max()) if finite.size else 0.0)
    return most if 0 < most < math.inf else 1.0
