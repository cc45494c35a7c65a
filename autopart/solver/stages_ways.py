"""Ways through the runs of blocks that stages can have: dynamic programs, stage after stage.

A way goes from place 0 to one of the ends with one slot and one run per stage of a
:class:`~autopart.solver.stages_graph.StageGraph`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from autopart.solver.stages_graph import StageGraph
from autopart.solver.stages_problem import Slot, Step
from autopart.solver.stages_runs import Array

# place and the shape of the stage before it, -1 where there is none
_Node = tuple[int, int]
# by position the best of ways that lead there, and the shape of their last stage
_Entry = tuple[Array, NDArray[np.intp]]
_AT_ONCE = 2**19
"""Values of arcs that are compared at once."""


@dataclass(slots=True)
class _Layer:
    """Best values of ways up to some stage, by node, and where they come from: slot, run's first position.

    entered: by place and shape of a slot what its ways came through.
    """

    best: dict[_Node, Array] = field(default_factory=dict)
    slot: dict[_Node, NDArray[np.intp]] = field(default_factory=dict)
    first: dict[_Node, NDArray[np.intp]] = field(default_factory=dict)
    entered: dict[_Node, _Entry | None] = field(default_factory=dict)

    def take(self, node: _Node, number: int, least: Array, first: NDArray[np.intp]) -> None:
        """The ways through a slot, where they are better than those that are known."""
        if node not in self.best:
            self.best[node], self.first[node] = least, first
            self.slot[node] = np.full(len(least), number)
            return
        better = least < self.best[node]
        self.best[node] = np.where(better, least, self.best[node])
        self.first[node] = np.where(better, first, self.first[node])
        self.slot[node] = np.where(better, number, self.slot[node])


Found = tuple[float, tuple[Step, ...]]


def cheapest(graph: StageGraph, arcs: Array) -> Found | None:
    """The way with the smallest sum of ``arcs`` [table, run] and of what crosses; None without a way."""
    return _best_way(graph, arcs, np.add)


def least_sum(graph: StageGraph, arcs: Array) -> float:
    """The smallest sum of ``arcs`` alone; infinite without a way."""
    found = _best_way(graph, arcs, np.add, crossing=False)
    return np.inf if found is None else found[0]


def smallest_maximum(graph: StageGraph, arcs: Array) -> Found | None:
    """The way whose largest arc is smallest; None without a way."""
    return _best_way(graph, arcs, np.maximum)


def _best_way(graph: StageGraph, arcs: Array, combine: np.ufunc, crossing: bool = True) -> Found | None:
    """best[s + 1, stop, last] = min over slots, runs to last of combine(best[s, start, first], arcs[table, run]).

    crossing: sums have what crosses between stages.
    """
    problem, runs, adds = graph.problem, graph.runs, combine is np.add
    if not len(runs):
        return None
    size, most = len(problem.positions), max(1, _AT_ONCE // len(runs))
    start = np.full(size, np.inf)
    start[0] = 0.0 if adds else -np.inf
    layers = [_Layer({(0, -1): start})]
    for found in graph.slots:
        before, layer = layers[-1], _Layer()
        entered: list[tuple[int, int, Array]] = []
        for number, table in found:
            slot = problem.slots[number]
            entry = _entered(graph, before, layer, slot, adds and crossing)
            if entry is not None:
                entered.append((number, table, entry[0]))
        for at in range(0, len(entered), most):
            some = entered[at : at + most]
            through = np.stack([best for _, _, best in some])[:, runs.first]
            least, which = runs.least_to(combine(through, arcs[[table for _, table, _ in some]]))
            for row, (number, _, _) in enumerate(some):
                slot = problem.slots[number]
                layer.take((slot.stop, slot.shape), number, least[row], runs.first[which[row]])
        layers.append(layer)
    final = [(float(value[-1]), node) for node, value in layers[-1].best.items() if node[0] in problem.ends]
    value, node = min(final, default=(np.inf, (0, -1)))
    if not np.isfinite(value):
        return None
    steps, last = [], size - 1
    for layer in reversed(layers[1:]):
        number, first = int(layer.slot[node][last]), int(layer.first[node][last])
        slot = problem.slots[number]
        steps.append(Step(number, first, last))
        entry = layer.entered[slot.start, slot.shape]
        assert entry is not None, "a way came through"
        node, last = (slot.start, int(entry[1][first])), first
    return value, tuple(reversed(steps))


def _entered(graph: StageGraph, before: _Layer, layer: _Layer, slot: Slot, crossing: bool) -> _Entry | None:
    key = slot.start, slot.shape
    if key not in layer.entered:
        layer.entered[key] = _entry(graph, before.best, *key, crossing)
    return layer.entered[key]


def _entry(graph: StageGraph, best: dict[_Node, Array], place: int, shape: int, crossing: bool) -> _Entry | None:
    """By position the best that leads to a stage of this shape, and the shape of the stage before; None where none."""
    value: Array | None = None
    came = np.full(len(graph.problem.positions), -1, dtype=np.intp)
    for (at, other), found in best.items():
        if at != place:
            continue
        through = found + graph.joint(other, shape, place) if crossing and other >= 0 else found
        better = np.ones(len(came), dtype=bool) if value is None else through < value
        value = through if value is None else np.where(better, through, value)
        came = np.where(better, other, came)
    return None if value is None else (value, came)


def sums_through(graph: StageGraph, arcs: Array) -> Iterator[tuple[int, int, int, Array]]:
    """(stage, slot, shape before, [run]): for each arc the smallest sum of a way that uses it."""
    problem, runs, size = graph.problem, graph.runs, len(graph.problem.positions)
    start = np.full(size, np.inf)
    start[0] = 0.0
    to: list[dict[_Node, Array]] = [{(0, -1): start}]
    for found in graph.slots:
        reached: dict[_Node, Array] = {}
        for number, table in found:
            slot = problem.slots[number]
            entry = _entry(graph, to[-1], slot.start, slot.shape, crossing=True)
            if entry is not None:
                value, _ = runs.least_to(entry[0][runs.first] + arcs[table])
                node = slot.stop, slot.shape
                reached[node] = np.minimum(reached[node], value) if node in reached else value
        to.append(reached)
    end = np.full(size, np.inf)
    end[-1] = 0.0
    after: dict[_Node, Array] = {node: end for node in to[-1] if node[0] in problem.ends}
    found_all: list[tuple[int, int, int, Array]] = []
    for stage in reversed(range(problem.stages)):
        back: dict[_Node, Array] = {}
        for number, table in graph.slots[stage]:
            slot = problem.slots[number]
            rest = after.get((slot.stop, slot.shape))
            if rest is None:
                continue
            onward = arcs[table] + rest[runs.last]
            for (place, other), before in to[stage].items():
                if place != slot.start:
                    continue
                joint = graph.joint(other, slot.shape, place) if other >= 0 else np.zeros(size)
                found_all.append((stage, number, other, (before + joint)[runs.first] + onward))
                value = joint + runs.least_from(onward)
                node = place, other
                back[node] = np.minimum(back[node], value) if node in back else value
        after = back
    return iter(found_all)
