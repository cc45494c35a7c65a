"""The search of :mod:`autopart.solver.stages` over boxes of its two maxima, the slowest stage and the longest end."""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from autopart.solver.stages_graph import StageGraph
from autopart.solver.stages_problem import StageProblem, Way
from autopart.solver.stages_runs import Array
from autopart.solver.stages_ways import Found, cheapest, smallest_maximum

TOLERANCE = 1e-9
"""Objective and bound count as equal within that part of the objective."""


@dataclass(frozen=True, slots=True, order=True)
class _Box:
    """Ways whose largest busy time lies in (above, upto] x their largest step end in the same; ordered by bound."""

    bound: float
    busy_upto: float
    step_end_upto: float
    busy_above: float
    step_end_above: float


class BoxSearch:
    """Best-first search over boxes of (T, E), and the best division found."""

    def __init__(self, problem: StageProblem, graph: StageGraph, until: float) -> None:
        self.problem = problem
        self.graph = graph
        self.way: Way = ()
        self.objective = math.inf
        self.programs = 0
        self.until = until
        self.pace = problem.microbatches - 1
        self._fits = graph.fits
        self._version = -1
        self._busy_values = self._step_end_values = np.empty(0)
        self._take_values()

    def meets(self, bound: float) -> bool:
        return self.objective - bound <= TOLERANCE * self.objective

    @property
    def late(self) -> bool:
        return time.perf_counter() > self.until

    def run(self, max_programs: int) -> float:
        """Searches until proved, out of boxes or out of time; returns a bound in seconds. The first box always runs."""
        most = float(self.graph.busy[self._fits].max())
        if not self.graph.exact.all():
            most = math.inf  # refined stages are slower than these values say
        heap = [_Box(0.0, most, self._step_end_values[-1], -1.0, -1.0)]
        while heap:
            if self.way and (self.meets(heap[0].bound) or self.programs >= max_programs or self.late):
                return heap[0].bound
            for child in self._halves(heapq.heappop(heap)):
                heapq.heappush(heap, child)
        return self.objective

    def arcs(self, costs: Array, busy_upto: float = math.inf, step_end_upto: float = math.inf) -> Array:
        """``costs`` per arc [table, run], infinite for arcs that do not fit or exceed the limits."""
        allowed = (self.graph.busy <= busy_upto) & (self.graph.step_end <= step_end_upto)
        return np.where(self._fits & allowed, costs, np.inf)

    def exact(
        self, find: Callable[[StageGraph, Array], Found | None], name: str, limits: tuple[float, float]
    ) -> Found | None:
        """The best way under the limits, all of whose stages have exact seconds, or the last found in time."""
        while True:
            found = find(self.graph, self.arcs(getattr(self.graph, name), *limits))
            if found is None:
                return None
            changed = self.graph.refine_all(found[1])
            self.offer(found[1])
            if not changed or self.late:
                return found

    def offer(self, way: Way) -> None:
        """Keeps the division if its step is shorter than that of the one kept so far."""
        made = self.graph.made(way)
        if made is not None and (objective := self.problem.objective(made)) < self.objective:
            self.way, self.objective = made, objective

    def _take_values(self) -> None:
        """The values that the maxima may have, as far as they are known."""
        if self._version == self.graph.version:
            return
        self._version = self.graph.version
        self._busy_values = np.unique(self.graph.busy[self._fits])
        self._step_end_values = np.unique(self.graph.step_end[self._fits])

    def _halves(self, box: _Box) -> list[_Box]:
        """Bounds a box, tries the ways found for it, and splits it unless it holds nothing better."""
        self.programs += 1
        limits = box.busy_upto, box.step_end_upto
        once = self.exact(cheapest, "once", limits)
        busy = self.exact(smallest_maximum, "busy", limits)
        step_end = smallest_maximum(self.graph, self.arcs(self.graph.step_end, *limits))
        if once is None or busy is None or step_end is None:
            return []
        self.offer(step_end[1])
        self._take_values()
        slowest = self._busy_values[self._busy_values > box.busy_above]
        longest = self._step_end_values[self._step_end_values > box.step_end_above]
        least_busy, least_end = max(busy[0], slowest[0]), max(step_end[0], longest[0])
        fixed = once[0]
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
            # a stage that is still a bound may come to lie between two values
            next_busy = after if self.graph.exact.all() else middle
            above = max(bound, fixed + self.pace * next_busy + least_end)
            return [
                _Box(bound, middle, most_end, box.busy_above, box.step_end_above),
                _Box(above, most_busy, most_end, middle, box.step_end_above),
            ]
        above = max(bound, fixed + self.pace * least_busy + after)
        return [
            _Box(bound, most_busy, middle, box.busy_above, box.step_end_above),
            _Box(above, most_busy, most_end, box.busy_above, middle),
        ]
