r"""Cuts a chain of n blocks into p pipeline stages, for the shortest step of m microbatches that fits in memory.

A stage s has the blocks a .. b - 1. Its busy time per microbatch t_s holds its blocks' forward and backward and its own
sends and receives, which are taken as not overlapped. With x_i the seconds of crossing cut position i, both ways:

    minimise  sum of all blocks' seconds + sum_{cuts i} x_i            the first microbatch's way through and back
              + (m - 1) max_s t_s                                      the others behind it, at the slowest stage's pace
              + max_s step_end_s + sum_{tied groups over several stages} seconds                  once per step

    state + tied + in_flight[s] * activations + transient peak + buffers + overhead <= capacity[s]   for every stage s

As a way through the arcs (s, a, b) of :mod:`autopart.solver.stages_graph`, of which those that do not fit are left out:

    y[s,a,b] in {0, 1};    sum_b y[0,0,b] = 1                                                          _add_flow
    sum_a y[s,a,b] = sum_c y[s+1,b,c]            at every cut b between s and s + 1                    _add_flow
    T >= sum_{a,b} t[a,b] y[s,a,b] and E >= sum_{a,b} step_end[a,b] y[s,a,b]     for every stage s     _add_maximum
    minimise  sum once[a,b] y[s,a,b] + (m - 1) T + E

The two maxima are what makes it hard: with both bounded from above, the cheapest sum is a shortest way. So the search
first goes over boxes of (T, E). In a box, the cheapest sum under its upper limits, with the smallest T and the smallest
E under them, bounds every way from below, and each way found is a candidate. Boxes that may hold something better are
halved. If that takes more than ``max_programs`` boxes, the arcs that can still be part of a better way form the model
above, which CP-SAT solves. Objective and bound count as equal when they differ by less than TOLERANCE of the objective.
"""

from __future__ import annotations

import heapq
import itertools
import math
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from ortools.sat.python import cp_model

from autopart.report.units import format_bytes
from autopart.runtime.errors import InfeasibleError, PlanError
from autopart.solver.stages_graph import Array, StageGraph, cheapest, smallest_maximum, sums_through
from autopart.solver.stages_problem import StageProblem, StageSolution
from autopart.solver.tensor_problem import relative_gap

TOLERANCE = 1e-9
MAX_PROGRAMS = 300
_TICKS = 2**40


def solve(problem: StageProblem, time_limit_s: float = 60.0, *, max_programs: int = MAX_PROGRAMS) -> StageSolution:
    """The cut into stages with the shortest step, or the best found in ``time_limit_s``.

    max_programs: boxes to go over before the integer solver takes the rest. Raises InfeasibleError, with the stage and
    the bytes that bind and the capacity that would do, when no cut fits; PlanError when there are too few blocks.
    """
    start = time.perf_counter()
    if problem.stages > len(problem.blocks):
        raise PlanError(
            f"{problem.stages} stages need as many blocks, but there are {len(problem.blocks)}; "
            f"use at most {len(problem.blocks)} stages"
        )
    graph = StageGraph.build(problem)
    floor = smallest_maximum(np.where(graph.fits, graph.floor, np.inf))
    if floor is None:
        raise _infeasible(problem, graph)
    search = _BoxSearch(problem, graph)
    bound = search.run(max_programs, start + time_limit_s)
    method = "dynamic program"
    if not search.meets(bound):
        left = max(0.1, start + time_limit_s - time.perf_counter())
        proved = _solve_rest(search, left)
        bound, method = max(bound, min(proved, search.objective)), "cp-sat"
    if search.meets(bound):
        bound = search.objective
    return StageSolution(
        boundaries=search.boundaries,
        objective=search.objective,
        bound=bound,
        gap=relative_gap(search.objective, bound),
        lower_bound_s=floor[0],
        seconds=time.perf_counter() - start,
        programs=search.programs,
        method=method,
    )


@dataclass(frozen=True, slots=True, order=True)
class _Box:
    """Ways whose largest busy time lies in (above, upto] x their largest step end in the same; ordered by bound."""

    bound: float
    busy_upto: float
    step_end_upto: float
    busy_above: float
    step_end_above: float


class _BoxSearch:
    """Best-first search over boxes of (T, E), and the best cut found."""

    def __init__(self, problem: StageProblem, graph: StageGraph) -> None:
        self.problem = problem
        self.graph = graph
        self.boundaries: tuple[int, ...] = ()
        self.objective = math.inf
        self.programs = 0
        self.pace = problem.microbatches - 1
        self.base = math.fsum(block.seconds for block in problem.blocks)
        self._fits = graph.fits
        used = self._fits.any(axis=0)
        self._busy_values = np.unique(graph.busy[used])
        self._step_end_values = np.unique(graph.step_end[used])

    def meets(self, bound: float) -> bool:
        return self.objective - bound <= TOLERANCE * self.objective

    def run(self, max_programs: int, until: float) -> float:
        """Searches until proved, out of boxes or out of time; returns a bound in seconds. The first box always runs."""
        heap = [_Box(0.0, self._busy_values[-1], self._step_end_values[-1], -1.0, -1.0)]
        while heap:
            if self.boundaries and (
                self.meets(heap[0].bound) or self.programs >= max_programs or time.perf_counter() > until
            ):
                return heap[0].bound
            for child in self._halves(heapq.heappop(heap)):
                heapq.heappush(heap, child)
        return self.objective

    def arcs(self, costs: Array, busy_upto: float = math.inf, step_end_upto: float = math.inf) -> Array:
        """``costs`` per arc [stage, first, last], infinite for arcs that do not fit or exceed the limits."""
        allowed = (self.graph.busy <= busy_upto) & (self.graph.step_end <= step_end_upto)
        return np.where(self._fits & allowed, costs, np.inf)

    def _halves(self, box: _Box) -> list[_Box]:
        """Bounds a box, tries the ways found for it, and splits it unless it holds nothing better."""
        self.programs += 1
        limits = box.busy_upto, box.step_end_upto
        once = cheapest(self.arcs(self.graph.once, *limits))
        busy = smallest_maximum(self.arcs(self.graph.busy, *limits))
        step_end = smallest_maximum(self.arcs(self.graph.step_end, *limits))
        if once is None or busy is None or step_end is None:
            return []
        for _, boundaries in (once, busy, step_end):
            self.offer(boundaries)
        slowest = self._busy_values[self._busy_values > box.busy_above]
        longest = self._step_end_values[self._step_end_values > box.step_end_above]
        least_busy, least_end = max(busy[0], slowest[0]), max(step_end[0], longest[0])
        fixed = self.base + once[0]
        bound = max(box.bound, fixed + self.pace * least_busy + least_end)
        if self.meets(bound):
            return []
        room = self.objective - fixed
        most_busy = min(box.busy_upto, (room - least_end) / self.pace) if self.pace else box.busy_upto
        most_end = min(box.step_end_upto, room - self.pace * least_busy)
        slowest = slowest[(slowest >= least_busy) & (slowest <= most_busy)]
        longest = longest[(longest >= least_end) & (longest <= most_end)]
        if not len(slowest) or not len(longest):
            return []
        by_busy = self.pace * (slowest[-1] - slowest[0]) >= longest[-1] - longest[0]
        if len(slowest if by_busy else longest) == 1:
            by_busy = not by_busy
        values = slowest if by_busy else longest
        if len(values) == 1:
            only = _Box(bound, slowest[0], longest[0], box.busy_above, box.step_end_above)
            return [only] if (only.busy_upto, only.step_end_upto) != limits else []
        middle, after = values[(len(values) - 1) // 2], values[(len(values) - 1) // 2 + 1]
        if by_busy:
            above = max(bound, fixed + self.pace * after + least_end)
            return [
                _Box(bound, middle, most_end, box.busy_above, box.step_end_above),
                _Box(above, most_busy, most_end, middle, box.step_end_above),
            ]
        above = max(bound, fixed + self.pace * least_busy + after)
        return [
            _Box(bound, most_busy, middle, box.busy_above, box.step_end_above),
            _Box(above, most_busy, most_end, box.busy_above, middle),
        ]

    def offer(self, boundaries: tuple[int, ...]) -> None:
        """Keeps the cut if its step is shorter than that of the one kept so far."""
        objective = self.problem.objective(boundaries)
        if objective < self.objective:
            self.boundaries, self.objective = boundaries, objective


def _solve_rest(search: _BoxSearch, time_limit_s: float) -> float:
    """Offers the optimum of the arcs that may be part of a better way; returns a bound in seconds."""
    graph = search.graph
    ends = [smallest_maximum(search.arcs(costs)) for costs in (graph.busy, graph.step_end)]
    least_busy, least_end = (end[0] if end else 0.0 for end in ends)
    slowest = search.pace * np.maximum(graph.busy, least_busy) + np.maximum(graph.step_end, least_end)
    at_least = search.base + sums_through(search.arcs(graph.once)) + slowest
    arcs = [tuple(map(int, arc)) for arc in np.argwhere(at_least < search.objective)]
    if not arcs:
        return search.objective
    model = _WayModel(search, arcs, least_busy, least_end)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = time_limit_s
    status = solver.solve(model.cp)
    if status == cp_model.INFEASIBLE:
        return search.objective
    if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        search.offer(model.boundaries(solver))
    return search.base + solver.best_objective_bound * model.tick


class _WayModel:
    """The model of this file's docstring over some arcs, in whole ticks of ``tick`` seconds, the blocks' own left out.

    Seconds are rounded down to ticks, so that a bound in ticks is one in seconds.
    """

    def __init__(
        self, search: _BoxSearch, arcs: Sequence[tuple[int, ...]], least_busy: float, least_end: float
    ) -> None:
        self.tick = search.objective / _TICKS
        self.cp = cp_model.CpModel()
        self._arcs = arcs
        self._end = search.problem.stages, len(search.problem.blocks)
        self._y = [self.cp.new_bool_var("") for _ in arcs]
        self._add_flow()
        once = self._ticks(search.graph.once)
        busy = self._add_maximum(search.graph.busy, least_busy)
        step_end = self._add_maximum(search.graph.step_end, least_end)
        crossings = cp_model.LinearExpr.weighted_sum(self._y, [once[a][b] for _, a, b in arcs])
        self.cp.minimize(crossings + search.pace * busy + step_end)

    def boundaries(self, solver: cp_model.CpSolver) -> tuple[int, ...]:
        used = sorted(arc for arc, y in zip(self._arcs, self._y, strict=True) if solver.boolean_value(y))
        return (0, *(last for _, _, last in used))

    def _add_flow(self) -> None:
        """Each stage has one arc, and it begins where that of the stage before ends."""
        leaving, entering = defaultdict(list), defaultdict(list)
        for (stage, first, last), y in zip(self._arcs, self._y, strict=True):
            leaving[stage, first].append(y)
            entering[stage + 1, last].append(y)
        for stage in range(self._end[0]):
            self.cp.add_exactly_one(y for (of, _), group in leaving.items() if of == stage for y in group)
        for node in sorted({*leaving, *entering} - {(0, 0), self._end}):
            self.cp.add(sum(entering[node]) == sum(leaving[node]))

    def _add_maximum(self, seconds: Array, least: float) -> cp_model.IntVar:
        """A variable that is at least what the arc of each stage takes, and ``least``, which every way takes."""
        ticks = self._ticks(seconds)
        maximum = self.cp.new_int_var(int(max(least, 0.0) / self.tick), _TICKS, "")
        for _, group in itertools.groupby(zip(self._arcs, self._y, strict=True), key=lambda item: item[0][0]):
            taken = [(y, ticks[first][last]) for (_, first, last), y in group]
            self.cp.add(maximum >= cp_model.LinearExpr.weighted_sum([y for y, _ in taken], [t for _, t in taken]))
        return maximum

    def _ticks(self, seconds: Array) -> list[list[int]]:
        rounded: list[list[int]] = np.floor(np.maximum(seconds, 0.0) / self.tick).astype(np.int64).tolist()
        return rounded


def _infeasible(problem: StageProblem, graph: StageGraph) -> InfeasibleError:
    """Which stage is over memory at least, by how many bytes, and the capacity that would do."""
    least = smallest_maximum(graph.excess)
    if least is None:
        return InfeasibleError(
            f"no cut of {len(problem.blocks)} blocks into {problem.stages} stages has the pinned cuts {problem.pins}: "
            "a pin leaves too few blocks before, behind or between; move it or use fewer stages"
        )
    over, boundaries = least
    spans = list(itertools.pairwise(boundaries))
    stage = max(range(problem.stages), key=lambda s: graph.excess[s, spans[s][0], spans[s][1]])
    first, last = spans[stage]
    blocks = problem.blocks[first:last]
    named = blocks[0].name if len(blocks) == 1 else f"{blocks[0].name} .. {blocks[-1].name}"
    state = math.fsum(block.state_bytes for block in blocks)
    kept = problem.in_flight[stage] * math.fsum(block.activation_bytes for block in blocks)
    needed, capacity = problem.stage_bytes(stage, first, last), problem.capacity_bytes[stage]
    in_flight = problem.in_flight[stage]
    return InfeasibleError(
        f"no cut into {problem.stages} stages fits: in the best one stage {stage} ({named}) holds "
        f"{format_bytes(needed)}, {format_bytes(over)} ({over:.0f} bytes) over its capacity of "
        f"{format_bytes(capacity)}; {format_bytes(state)} of it are parameters with gradients and optimizer state, "
        f"{format_bytes(kept)} activations of {in_flight} microbatch{'es' if in_flight > 1 else ''} in flight. "
        f"Devices with {format_bytes(capacity + over)} would do; or more devices, or smaller microbatches",
        over,
    )
