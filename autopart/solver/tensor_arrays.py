"""A tensor problem as arrays, over the choices that are left of it.

Choices and placements are counted anew: those left of an op from 0, the placements of an edge as rows (produced) and
columns (wanted) of its matrix of seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopart.solver.tensor_problem import Edge, TensorProblem

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Mask = NDArray[np.bool_]
Live = list[list[int]]
"""Per op the indices of the choices that remain, cheapest first."""


@dataclass(frozen=True, slots=True)
class UseArrays:
    """One use of a value. wanted: per choice of ``op`` the column in which it wants to read. columns: those wanted."""

    op: int
    wanted: Ints
    columns: Ints


@dataclass(frozen=True, slots=True)
class EdgeArrays:
    """One value. produced: per choice of ``source`` the row in which it yields. seconds: [rows, columns], weighted."""

    source: int
    produced: Ints
    uses: tuple[UseArrays, ...]
    seconds: Floats


@dataclass(frozen=True, slots=True)
class ProblemArrays:
    """live: the choices of ``problem`` that the arrays are about. cost, memory: per op and choice."""

    problem: TensorProblem
    live: Live
    cost: tuple[Floats, ...]
    memory: tuple[Floats, ...]
    edges: tuple[EdgeArrays, ...]

    @property
    def limit(self) -> float | None:
        return self.problem.memory_limit

    @property
    def pairs(self) -> int:
        """Pairs of a produced and a wanted placement, over all uses."""
        return sum(len(edge.seconds) * len(use.columns) for edge in self.edges for use in edge.uses)

    def original(self, choices: Sequence[int]) -> list[int]:
        """The problem's own numbers of choices."""
        return [live[choice] for live, choice in zip(self.live, choices, strict=True)]

    def objective(self, choices: Sequence[int]) -> float:
        return self.problem.objective(self.original(choices))

    def memory_of(self, choices: Sequence[int]) -> float:
        return self.problem.memory(self.original(choices))

    def fits(self, choices: Sequence[int]) -> bool:
        return self.problem.fits(self.original(choices))

    def of(self, kept: Sequence[Mask]) -> ProblemArrays:
        """The same problem with fewer choices. kept: per op, which of its choices stay."""
        live = [
            [c for c, stays in zip(row, mask, strict=True) if stays] for row, mask in zip(self.live, kept, strict=True)
        ]
        cost = tuple(values[mask] for values, mask in zip(self.cost, kept, strict=True))
        memory = tuple(values[mask] for values, mask in zip(self.memory, kept, strict=True))
        return ProblemArrays(self.problem, live, cost, memory, tuple(_restricted(edge, kept) for edge in self.edges))


def compiled(problem: TensorProblem, live: Live | None = None) -> ProblemArrays:
    """The arrays of a problem, of all choices unless ``live`` names those that count."""
    if live is None:
        live = [
            sorted(range(len(op.choices)), key=lambda c, op=op: (op.choices[c].cost, op.choices[c].memory))  # type: ignore[misc]
            for op in problem.ops
        ]
    return ProblemArrays(
        problem,
        live,
        tuple(np.array([op.choices[c].cost for c in kept]) for op, kept in zip(problem.ops, live, strict=True)),
        tuple(np.array([op.choices[c].memory for c in kept]) for op, kept in zip(problem.ops, live, strict=True)),
        tuple(_edge(problem, live, edge) for edge in problem.edges),
    )


def _edge(problem: TensorProblem, live: Live, edge: Edge) -> EdgeArrays:
    ops = problem.ops
    made = [ops[edge.source].choices[c].outputs[edge.output] for c in live[edge.source]]
    rows, produced = np.unique(np.array(made, dtype=np.int64), return_inverse=True)
    read = [np.array([ops[op].choices[c].inputs[slot] for c in live[op]], dtype=np.int64) for op, slot in edge.uses]
    columns = np.unique(np.concatenate(read))
    uses = []
    for (op, _), wants in zip(edge.uses, read, strict=True):
        wanted = np.searchsorted(columns, wants)
        uses.append(UseArrays(op, wanted, np.unique(wanted)))
    return EdgeArrays(edge.source, produced, tuple(uses), edge.table(rows.tolist(), columns.tolist()))


def _restricted(edge: EdgeArrays, kept: Sequence[Mask]) -> EdgeArrays:
    """The edge over the choices that stay; itself, where all of its ops' do."""
    if kept[edge.source].all() and all(kept[use.op].all() for use in edge.uses):
        return edge
    rows, produced = np.unique(edge.produced[kept[edge.source]], return_inverse=True)
    wants = [use.wanted[kept[use.op]] for use in edge.uses]
    columns = np.unique(np.concatenate(wants))
    uses = []
    for use, found in zip(edge.uses, wants, strict=True):
        wanted = np.searchsorted(columns, found)
        uses.append(UseArrays(use.op, wanted, np.unique(wanted)))
    return EdgeArrays(edge.source, produced, tuple(uses), edge.seconds[np.ix_(rows, columns)])


def outgoing(arrays: ProblemArrays) -> list[list[EdgeArrays]]:
    """Per op the edges that it is the source of."""
    found: list[list[EdgeArrays]] = [[] for _ in arrays.cost]
    for edge in arrays.edges:
        found[edge.source].append(edge)
    return found


def incoming(arrays: ProblemArrays) -> list[list[tuple[EdgeArrays, int]]]:
    """Per op the uses that it is the reader of: edge, number of the use."""
    found: list[list[tuple[EdgeArrays, int]]] = [[] for _ in arrays.cost]
    for edge in arrays.edges:
        for number, use in enumerate(edge.uses):
            found[use.op].append((edge, number))
    return found
