"""How ops are eliminated from a problem's graph, one after another: the order, and the tables that each step joins.

There is a table for each op, over its choices, and one for each value, over those of its source and of all that read
it. Eliminating an op joins the tables that mention it to one over the other ops in them (Cai et al., TensorOpt, arXiv
2004.10856: with two such ops node elimination, with more branch elimination). The largest table decides what it takes,
so ops are taken in the order that keeps the next one smallest; how large they become is known before any is made.

Choices of an op that read and yield alike, such as levels of ZeRO of one way to store a parameter, are a group, and
take one place in tables.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from autopart.runtime.errors import PlanError
from autopart.solver.tensor_problem import Edge, TensorProblem

Number = TypeVar("Number", np.int64, np.float64)
Array = TypeVar("Array", bound=NDArray[Any])
Floats = NDArray[np.float64]

MOST_SETTINGS = 300_000


@dataclass(frozen=True, slots=True)
class Joined:
    """A table that an op is eliminated from: its number, and how its axes become those of the joined tables."""

    table: int
    axes: tuple[int, ...]
    shape: tuple[int, ...]

    def spread(self, sums: Array) -> Array:
        """The table along the axes of the joined ones, its own last axis behind them."""
        found: Array = sums.transpose(self.axes).reshape(*self.shape, -1)  # type: ignore[assignment]
        return found


@dataclass(frozen=True, slots=True)
class Step:
    """Eliminates an op. rest: the ops of the table that is left, which is numbered behind all before it."""

    op: int
    rest: tuple[int, ...]
    joined: tuple[Joined, ...]


class EliminationSteps:
    """Of one problem. Raises PlanError where a table would have more than ``most_settings`` settings.

    groups: by op, the choices that read and yield alike. steps: over the tables of ops, of edges, and of edges once
    more, those whose numbers ``more`` gives. left: the tables that remain, over no op.
    """

    def __init__(self, problem: TensorProblem, most_settings: int = MOST_SETTINGS, more: Sequence[int] = ()) -> None:
        self._problem = problem
        self.groups = _groups(problem)
        self.size = [len(groups) for groups in self.groups]
        order = self._order(most_settings)
        spans = [_span(edge) for edge in problem.edges]
        self.steps, self.left = self._planned(order, [*spans, *(spans[number] for number in more)])

    def edge(self, edge: Edge) -> Floats:
        """Seconds of a value's conversions, each target once: [group of each op of its span], infinite: impossible."""
        ops = _span(edge)

        def placements(op: int, slot: int, read: bool) -> list[int]:
            choices = self._problem.ops[op].choices
            if read:
                return [choices[group[0]].inputs[slot] for group in self.groups[op]]
            return [choices[group[0]].outputs[slot] for group in self.groups[op]]

        def spread(op: int, found: NDArray[Number]) -> NDArray[Number]:
            """Along the dims of the source, where there are any besides, and of ``op``."""
            shape = [len(self.groups[other]) if other in (op, edge.source)[: found.ndim] else 1 for other in ops]
            return found.reshape(shape)

        have = placements(edge.source, edge.output, read=False)
        total: Floats = np.zeros([len(self.groups[op]) for op in ops])
        wanted: list[NDArray[np.int64]] = []
        for op, slot in edge.uses:
            want = placements(op, slot, read=True)
            seconds = edge.table(have, want)
            if op == edge.source:
                seconds = np.diagonal(seconds)
            if len(edge.uses) == 1:
                return total + spread(op, seconds)
            again = np.zeros((1,) * len(ops), dtype=bool)
            wanted.append(spread(op, np.array(want)))
            for other in wanted[:-1]:
                again = again | (other == wanted[-1])
            total = total + np.where(again, 0.0, spread(op, seconds))
        return total

    def _order(self, most_settings: int) -> list[int]:
        """Ops in the order that keeps the next table smallest."""
        size = self.size
        spans = [set(_span(edge)) for edge in self._problem.edges]
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

    def _planned(self, order: Sequence[int], spans: Sequence[tuple[int, ...]]) -> tuple[list[Step], list[int]]:
        """The steps, and the tables that are left. spans: ops of the tables of edges and of further conversions."""
        size = self.size
        tables = dict(enumerate([*((op,) for op in range(len(size))), *spans]))
        count, found = len(tables), list[Step]()
        for op in order:
            joined = {number: ops for number, ops in tables.items() if op in ops}
            rest = tuple(dict.fromkeys(other for ops in joined.values() for other in ops if other != op))
            axes = (*rest, op)
            place = {item: at for at, item in enumerate(axes)}
            parts = []
            for number, ops in joined.items():
                del tables[number]
                turned = sorted(range(len(ops)), key=lambda at: place[ops[at]])
                shape = tuple(size[item] if item in ops else 1 for item in axes)
                parts.append(Joined(number, (*turned, len(ops)), shape))
            found.append(Step(op, rest, tuple(parts)))
            tables[count] = rest
            count += 1
        return found, list(tables)


def _groups(problem: TensorProblem) -> list[list[list[int]]]:
    slots: list[set[tuple[bool, int]]] = [set() for _ in problem.ops]  # of inputs (true) and outputs with an edge
    for edge in problem.edges:
        slots[edge.source].add((False, edge.output))
        for op, slot in edge.uses:
            slots[op].add((True, slot))
    found: list[list[list[int]]] = []
    for item, own in zip(problem.ops, slots, strict=True):
        alike: dict[tuple[int, ...], list[int]] = {}
        read = sorted(own)
        for index, choice in enumerate(item.choices):
            key = tuple([(choice.inputs if at_input else choice.outputs)[slot] for at_input, slot in read])
            alike.setdefault(key, []).append(index)
        found.append(list(alike.values()))
    return found


def _span(edge: Edge) -> tuple[int, ...]:
    return tuple(dict.fromkeys((edge.source, *(op for op, _ in edge.uses))))


def _settings(spans: Sequence[set[int]], op: int, size: Sequence[int]) -> int:
    joined = set[int]().union({op}, *(span for span in spans if op in span))
    return math.prod(size[other] for other in joined)


def _check(settings: int, most: int) -> None:
    if settings > most:
        raise PlanError(f"the graph is too wide for elimination: a table of {settings} settings")
