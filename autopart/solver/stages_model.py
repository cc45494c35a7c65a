"""What boxes leave of a problem of :mod:`autopart.solver.stages`, as a model of integers for CP-SAT."""

from __future__ import annotations

import itertools
import math
import time
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from autopart.solver.stages_boxes import BoxSearch
from autopart.solver.stages_problem import Step, Way
from autopart.solver.stages_runs import Array
from autopart.solver.stages_ways import smallest_maximum, sums_through

if TYPE_CHECKING:
    from ortools.sat.python import cp_model

_TICKS = 2**40
MOST_ARCS = 200_000
"""In one model: of more its rows take minutes and gigabytes to write, and the search's own bound stands."""


def solve_rest(search: BoxSearch) -> float:
    """Offers the optimum of the arcs that may be part of a better way; returns a bound in seconds."""
    from ortools.sat.python import cp_model  # which loads pandas, and is seldom needed

    graph, runs, known = search.graph, search.graph.runs, 0.0
    while True:
        ends = [smallest_maximum(graph, search.arcs(costs)) for costs in (graph.busy, graph.step_end)]
        least_busy, least_end = (end[0] if end else 0.0 for end in ends)
        arcs: list[_Arc] = []
        for stage, number, before, sums in sums_through(graph, search.arcs(graph.once)):
            table = next(table for slot, table in graph.slots[stage] if slot == number)
            slowest = search.pace * np.maximum(graph.busy[table], least_busy)
            at_least = sums + slowest + np.maximum(graph.step_end[table], least_end)
            found = np.flatnonzero(at_least < search.objective)
            between = zip(runs.first[found].tolist(), runs.last[found].tolist(), found.tolist(), strict=True)
            arcs += [_Arc(stage, number, before, table, *run) for run in between]
        if not arcs:
            return search.objective
        if len(arcs) > MOST_ARCS or search.late:
            return known
        model = _WayModel(search, arcs, least_busy, least_end)
        solver = cp_model.CpSolver()
        solver.parameters.max_time_in_seconds = max(0.1, search.until - time.perf_counter())
        status = solver.solve(model.cp)
        if status == cp_model.INFEASIBLE:
            return search.objective
        known = max(known, solver.best_objective_bound * model.tick)
        if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            return known
        way = model.way(solver)
        changed = graph.refine_all(way)
        search.offer(way)
        if not changed or search.late:
            return known


@dataclass(frozen=True, slots=True, order=True)
class _Arc:
    """A stage with a slot and a run, behind a stage of the shape ``before`` (-1: none)."""

    stage: int
    slot: int
    before: int
    table: int
    first: int
    last: int
    run: int


class _WayModel:
    """The model of :mod:`autopart.solver.stages` over some arcs, in whole ticks of ``tick`` seconds.

    Seconds are rounded down to ticks, so that a bound in ticks is one in seconds.
    """

    def __init__(self, search: BoxSearch, arcs: list[_Arc], least_busy: float, least_end: float) -> None:
        from ortools.sat.python import cp_model

        self.tick = search.objective / _TICKS
        self._sum = cp_model.LinearExpr.weighted_sum
        self.cp = cp_model.CpModel()
        self._arcs = sorted(arcs)
        self._search = search
        self._y = [self.cp.new_bool_var("") for _ in arcs]
        self._add_flow()
        graph, slots = search.graph, search.problem.slots
        once = []
        for arc in self._arcs:
            slot = slots[arc.slot]
            joint = graph.joint(arc.before, slot.shape, slot.start)[arc.first] if arc.before >= 0 else 0.0
            once.append(self._ticks(graph.once[arc.table, arc.run] + joint))
        busy = self._add_maximum(graph.busy, least_busy)
        step_end = self._add_maximum(graph.step_end, least_end)
        self.cp.minimize(self._sum(self._y, once) + search.pace * busy + step_end)

    def way(self, solver: cp_model.CpSolver) -> Way:
        used = [arc for arc, y in zip(self._arcs, self._y, strict=True) if solver.boolean_value(y)]
        return tuple(Step(arc.slot, arc.first, arc.last) for arc in used)

    def _add_flow(self) -> None:
        """Each stage has one arc, and it begins where that of the stage before ends."""
        problem = self._search.problem
        of_stage, leaving, entering = defaultdict(list), defaultdict(list), defaultdict(list)
        for arc, y in zip(self._arcs, self._y, strict=True):
            slot = problem.slots[arc.slot]
            of_stage[arc.stage].append(y)
            leaving[arc.stage, slot.start, arc.first, arc.before].append(y)
            entering[arc.stage + 1, slot.stop, arc.last, slot.shape].append(y)
        for stage in range(problem.stages):
            self.cp.add_exactly_one(of_stage[stage])
        for node in sorted({*leaving, *entering}):
            if 0 < node[0] < problem.stages:
                self.cp.add(sum(entering[node]) == sum(leaving[node]))

    def _add_maximum(self, seconds: Array, least: float) -> cp_model.IntVar:
        """A variable that is at least what the arc of each stage takes, and ``least``, which every way takes."""
        maximum = self.cp.new_int_var(int(max(least, 0.0) / self.tick), _TICKS, "")
        for _, group in itertools.groupby(zip(self._arcs, self._y, strict=True), key=lambda item: item[0].stage):
            taken = [(y, self._ticks(seconds[arc.table, arc.run])) for arc, y in group]
            self.cp.add(maximum >= self._sum([y for y, _ in taken], [t for _, t in taken]))
        return maximum

    def _ticks(self, seconds: float) -> int:
        return math.floor(max(seconds, 0.0) / self.tick)
