r"""Divisions by the seconds of their schedule, where these are not what the stage solver's formula says.

The formula charges transfers as if nothing passed beside them, and does not know that a stage with few microbatches in
flight waits for their way through all stages behind it and back. By :mod:`autopart.solver.stages_floor`, with R the
seconds behind a stage, transfers included,

    T >= before + body(t, R) + end

rises with R. So for a given T the least seconds behind each (stage, position) follow from the last stage on:

    R[k, a] = min over runs (a, b) of  t[k, a, b] + crossing[b] + R[k + 1, b]    of those that T allows

with what lies before a run, and the next stages that it waits for, at their least. Where nothing is left for the first
stage, no division takes T or less, which is a bound; else the way of the least seconds, of runs that the stage before
allows too, is a candidate, which is timed. T is sought by halves between what is proved and the best that was timed.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from autopart.solver.stages_floor import Ways, body_seconds, least_through
from autopart.solver.stages_graph import StageGraph
from autopart.solver.stages_problem import Step, Way
from autopart.solver.stages_runs import Array

_NEAR = 5e-4
"""Between what is proved and the best, in parts of the best, from where no better way is sought."""
_ROUNDS, _REFINED = 8, 20
"""Times for which ways are sought, and how often for each with exact seconds of more stages."""

Timed = Callable[[Way], float]
"""Seconds of a step of a division, with tied gradients."""


def is_row(graph: StageGraph) -> bool:
    """Whether each stage has one slot, and all one shape."""
    return len(graph.problem.shapes) == 1 and all(len(found) == 1 for found in graph.slots)


def faster_way(graph: StageGraph, known: Way, floor: float, timed: Timed) -> tuple[Way, float]:
    """The division that takes the fewest seconds of those that are found, and what all take at least, tied gradients
    left aside. known: a division. floor: that all take at least. For a graph that is a row.
    """
    problem = graph.problem
    best, least = known, timed(known)
    trips, seen = _Trips(graph), {known}
    low, high = floor, least - problem.tied_seconds(known)
    for _ in range(_ROUNDS):
        if high - low <= _NEAR * high:
            break
        middle = (low + high) / 2
        way, proved = trips.way(middle)
        if way is None:
            if not proved:
                break
            low = middle
            continue
        high = middle
        whole = graph.made(way)
        if whole is None or whole in seen or problem.excess_bytes(whole) > 0:
            continue
        seen.add(whole)
        seconds = timed(whole)
        if seconds < least:
            best, least = whole, seconds
            high = min(high, least - problem.tied_seconds(whole))
    return best, low


class _Trips:
    def __init__(self, graph: StageGraph) -> None:
        self.graph, self.runs, self.problem = graph, graph.runs, graph.problem
        self.tables = [found[0][1] for found in graph.slots]
        self.there, self.back = graph.there[self.tables], graph.back[self.tables]
        crossed = (self.there + self.back)[:, self.runs.last]
        arcs = np.where(graph.fits[self.tables], graph.seconds[self.tables] + crossed, np.inf)
        self.before, _ = least_through(self.runs, self.problem.stages, range(self.problem.stages), arcs)

    def way(self, seconds: float) -> tuple[Way | None, bool]:
        """A way that may take no more; None with whether it is proved that there is none."""
        for _ in range(_REFINED):
            found = self._way(seconds)
            if found is None:
                return None, True
            if not self.graph.refine_all(found):
                return found, True
        return None, False

    def _way(self, seconds: float) -> Way | None:
        graph, runs, problem = self.graph, self.runs, self.problem
        behind, through, spare = np.full(runs.positions, np.inf), list[Array](), list[Array]()
        behind[-1] = 0.0
        ways, forward = Ways(problem.in_flight, runs), runs.between(graph.forward)
        for stage in reversed(range(problem.stages)):
            table, flying = self.tables[stage], problem.in_flight[stage]
            own, crossed = graph.seconds[table], (self.there + self.back)[stage][runs.last]
            after = behind[runs.last] + crossed
            possible = graph.fits[table] & np.isfinite(after) & np.isfinite(own)
            after, own = np.where(possible, after, 0.0), np.where(possible, own, 0.0)
            body = body_seconds(
                *(problem.microbatches, flying, problem.in_flight[-1] >= problem.microbatches),
                *(own, forward, own - forward, after, np.maximum(self.there, self.back)[stage][runs.last]),
                ways.of(stage, crossed),
            )
            ends = np.maximum(graph.ends[table] - own, 0.0) + graph.forward[runs.first]
            source = (np.maximum(self.before[stage], 0.0) + graph.source)[runs.first]
            around = np.maximum(ends, source)
            possible &= body + around <= seconds
            usable = np.where(possible, own, np.inf)
            through.append(usable + after)
            spare.append(self._spare(stage, own, crossed, after, seconds - around))
            ways.add(stage, usable[None], crossed[None])
            behind = runs.least_from(through[-1])
        if not math.isfinite(behind[0]):
            return None
        way, at, most = list[Step](), 0, math.inf
        for stage, (left, room) in enumerate(zip(reversed(through), reversed(spare), strict=True)):
            here = np.flatnonzero(runs.first == at)
            short = here[graph.seconds[self.tables[stage]][here] <= most]
            if len(short) and np.isfinite(left[short]).any():
                here = short
            run = here[int(np.argmin(left[here]))]
            at, most = int(runs.last[run]), float(room[run])
            way.append(Step(graph.slots[stage][0][0], int(runs.first[run]), at))
        return tuple(way)

    def _spare(self, stage: int, own: Array, crossed: Array, after: Array, seconds: Array) -> Array:
        """By run, the seconds that the next stage may take, as the two wait for each other in a body of so many
        ``seconds``; see :mod:`autopart.solver.stages_floor`, (6).
        """
        m, flying = self.problem.microbatches, (*self.problem.in_flight, 0)
        later, left = flying[stage] - flying[stage + 1] + 1, m - 1 - flying[stage]
        if stage == self.problem.stages - 1 or not 1 <= later <= left:
            return np.full(len(own), np.inf)
        times = 2 + left // later + left % later
        return (seconds - times * own - 2 * after) / (left // later) - crossed
