r"""Divisions by the seconds of their schedule, where these are not what the stage solver's formula says.

The formula charges transfers as if nothing passed beside them, and does not know that a stage with few microbatches in
flight waits for their way through all stages behind it and back. By :mod:`autopart.solver.stages_floor`, with R the
seconds behind a stage, transfers included,

    T >= before + body(t, R) + end

rises with R. So for a given T the least seconds behind each (stage, position) follow from the last stage on:

    R[k, i, a] = min over slots (i, j), runs (a, b) of  t[k, ij, a, b] + crossing[ij, b] + R[k + 1, j, b]

of those that T allows, with what lies before a run's devices, and the next stages that it waits for, at their least,
and of a crossing what the stage before it takes. Where nothing is left for the first stage, no division takes T or
less, which is a bound; else the way of the least seconds, of runs that the stage before allows too, is a candidate,
which is timed. T is sought by halves between what is proved and the best that was timed. Where few divisions are left
between the two, they are timed one by one (:mod:`autopart.solver.stages_listed`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from autopart.solver.stages_floor import Ways, body_seconds
from autopart.solver.stages_graph import StageGraph
from autopart.solver.stages_listed import fastest_listed
from autopart.solver.stages_problem import Step, Way
from autopart.solver.stages_runs import Array

_NEAR = 5e-4
"""Between what is proved and the best, in parts of the best, from where no better way is sought."""
_SAME = 1e-9
"""Seconds of divisions that differ by no more are the same."""
_ROUNDS, _REFINED = 8, 20
"""Times for which ways are sought, and how often for each with exact seconds of more stages."""

Timed = Callable[[Way], float]
"""Seconds of a step of a division, with tied gradients."""


def faster_way(graph: StageGraph, known: Way, floor: float, timed: Timed) -> tuple[Way, float]:
    """The division that takes the fewest seconds of those that are found, and what all take at least, tied gradients
    left aside. known: a division. floor: that all take at least.
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
    for _ in range(_ROUNDS):
        below = (1 - _SAME) * (least - problem.tied_seconds(best))
        way, bound = fastest_listed(graph, below, tied=True) or (None, low)
        low = max(low, bound)
        if way is None:
            break
        if graph.refine_all(way):
            continue
        whole = graph.made(way)
        if whole is None or whole in seen or problem.excess_bytes(whole) > 0 or (seconds := timed(whole)) >= least:
            break
        seen.add(whole)
        best, least = whole, seconds
    return best, low


def raised_floor(graph: StageGraph, floor: float, below: float) -> float:
    """Seconds that all divisions take at least, without tied gradients. floor: what is known. below: of interest."""
    trips, low, high = _Trips(graph), floor, below
    if low >= high or trips.way(high) == (None, True):
        return max(low, high)
    for _ in range(_ROUNDS):
        if high - low <= _NEAR * high:
            break
        middle = (low + high) / 2
        way, proved = trips.way(middle)
        if way is not None or not proved:
            high = middle
        else:
            low = middle
    for _ in range(_ROUNDS):
        way, bound = fastest_listed(graph, below) or (None, low)
        low = max(low, bound)
        if way is None or not graph.refine_all(way):
            break
    return low


@dataclass(frozen=True, slots=True)
class _Stage:
    """Of a way sought: by table and run, seconds from a run to the end, and those that the next stage may take."""

    through: Array
    spare: Array


class _Trips:
    def __init__(self, graph: StageGraph) -> None:
        self.graph, self.runs, self.problem = graph, graph.runs, graph.problem
        self.slots = [[self.problem.slots[number] for number, _ in found] for found in graph.slots]
        self.tables = [[table for _, table in found] for found in graph.slots]
        taken = np.where(graph.fits, graph.seconds, np.inf)
        taken += (graph.there + graph.back)[:, self.runs.last]
        taken[self.tables[0]] += np.maximum(graph.ends - graph.seconds, 0.0)[self.tables[0]]  # the first one's end
        self.before = self._least_before(taken)
        shapes = [shape for _, shape, *_ in graph.tables]
        self.forward, self.backward = (
            self.runs.between(graph.least[way])[shapes] for way in ("forward_s", "backward_s")
        )
        self.came = self._least_before(np.where(graph.fits, self.forward + graph.there[:, self.runs.last], np.inf))

    def _least_before(self, arcs: Array) -> list[dict[int, Array]]:
        """By stage, of the places where it may begin, the least sum of arcs [table, run] up to each position."""
        start = np.full(self.runs.positions, np.inf)
        start[0] = 0.0
        found: list[dict[int, Array]] = [{0: start}]
        for slots, tables in zip(self.slots, self.tables, strict=True):
            reached: dict[int, Array] = {}
            for slot, table in zip(slots, tables, strict=True):
                if slot.start in found[-1]:
                    least, _ = self.runs.least_to(found[-1][slot.start][self.runs.first] + arcs[table])
                    reached[slot.stop] = np.minimum(reached[slot.stop], least) if slot.stop in reached else least
            found.append(reached)
        return found

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
        end = np.full(runs.positions, np.inf)
        end[-1] = 0.0
        nothing, behind = np.full(runs.positions, np.inf), dict.fromkeys(problem.ends, end)
        ways, found = Ways(problem.in_flight, runs), list[_Stage]()
        for stage in reversed(range(problem.stages)):
            tables, slots, flying = self.tables[stage], self.slots[stage], problem.in_flight[stage]
            own, there, back = (item[tables] for item in (graph.seconds, graph.there, graph.back))
            crossed = (there + back)[:, runs.last]
            after = np.array([behind.get(slot.stop, nothing) for slot in slots])[:, runs.last] + crossed
            possible = graph.fits[tables] & np.isfinite(after) & np.isfinite(own)
            after, own = np.where(possible, after, 0.0), np.where(possible, own, 0.0)
            body = body_seconds(
                *(problem.microbatches, flying, problem.in_flight[-1] >= problem.microbatches),
                *(own, self.forward[tables], self.backward[tables], after, np.maximum(there, back)[:, runs.last]),
                ways.of(stage, crossed),
            )
            before, came = (
                np.array([item[stage].get(slot.start, nothing) for slot in slots])[:, runs.first]
                for item in (self.before, self.came)
            )
            ends = np.maximum(np.array([graph.ends[table] for table in tables]) - own, 0.0)
            around = np.maximum(ends + came, before)
            possible &= np.isfinite(around) & (body + around <= seconds)
            usable, left = np.where(possible, own, np.inf), seconds - np.where(possible, around, 0.0)
            found.append(_Stage(usable + after, self._spare(stage, own, crossed, after, left)))
            ways.add(stage, usable, crossed)
            behind = {}
            for slot, through in zip(slots, found[-1].through, strict=True):
                least = runs.least_from(through)
                behind[slot.start] = np.minimum(behind[slot.start], least) if slot.start in behind else least
        if not math.isfinite(behind.get(0, nothing)[0]):
            return None
        return self._taken(found[::-1])

    def _taken(self, found: Sequence[_Stage]) -> Way:
        """The way of the least seconds, of runs that the stage before allows too, where there are some."""
        runs, way, place, at, most = self.runs, list[Step](), 0, 0, math.inf
        for stage, item in enumerate(found):
            tables, slots = np.array(self.tables[stage]), self.slots[stage]
            own = np.flatnonzero([slot.start == place for slot in slots])
            here = np.flatnonzero(runs.first == at)
            left = item.through[np.ix_(own, here)]
            short = np.where(self.graph.seconds[np.ix_(tables[own], here)] <= most, left, np.inf)
            left = short if np.isfinite(short).any() else left
            row, column = divmod(int(np.argmin(left)), len(here))
            table, run = int(own[row]), int(here[column])
            place, at, most = slots[table].stop, int(runs.last[run]), float(item.spare[table, run])
            way.append(Step(self.graph.slots[stage][table][0], int(runs.first[run]), at))
        return tuple(way)

    def _spare(self, stage: int, own: Array, crossed: Array, after: Array, seconds: Array) -> Array:
        """By table and run, the seconds that the next stage may take, as the two wait for each other in a body of so
        many ``seconds``; see :mod:`autopart.solver.stages_floor`, (6).
        """
        m, flying = self.problem.microbatches, (*self.problem.in_flight, 0)
        later, left = flying[stage] - flying[stage + 1] + 1, m - 1 - flying[stage]
        if stage == self.problem.stages - 1 or not 1 <= later <= left:
            return np.full(own.shape, np.inf)
        times = 2 + left // later + left % later
        return (seconds - times * own - 2 * after) / (left // later) - crossed
