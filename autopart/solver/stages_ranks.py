r"""Divisions for schedules that run several stages on a rank: no rank has much more to do than others.

The stage solver's formula knows the slowest stage, not the rank that has two slow ones. With P(s) the rank of stage s,
L_r the seconds of all stages of rank r, and F_{<r}, B_{<r} those of the stages before its first one, which follow each
other before its first forward and after its last backward, no step takes less than the longest of

    F_{<r} + B_{<r} + m L_r                                                                     for every rank r

(where W is apart, of B the inputs' share). But ranks with unequal stages wait for each other as well, so that for a
share q and v stages on a rank this looks for a division with a small maximum of

    F_{<r} + B_{<r} + m (q L_r + (1 - q) v t_s)                                     for every stage s, of rank r

with t_s its own seconds. In a row of stages on ranks that all differ, with the other stages as they are, a dynamic
program has the least maximum; of divisions with that, a second one the fewest seconds in all. Row after row is divided
so, until none becomes better. Which q is the best the schedule's own seconds tell.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from autopart.solver.stages_graph import StageGraph
from autopart.solver.stages_problem import Step, Way
from autopart.solver.stages_runs import Array

_GAINED = 1e-4
"""Of the longest: rows that gain a smaller part are left as they are."""
_SHARES = (1.0, 0.5, 0.25)
"""The q of the docstring; 1 alone where each rank has one stage."""
_ROUNDS, _REFINED = 6, 20
"""How often all rows are gone over, and each with exact seconds of more stages."""


def balanced(graph: StageGraph, known: Way, places: Sequence[int]) -> list[Way]:
    """By q a division whose maximum is no larger than that of ``known``. For a graph that is a row.

    places: the rank of each stage.
    """
    return [_balanced(graph, known, places, share) for share in (_SHARES if len(set(places)) < len(places) else (1.0,))]


def _balanced(graph: StageGraph, known: Way, places: Sequence[int], share: float) -> Way:
    found, rows = _Balance(graph, known, places, share), _rows(places)
    for _ in range(_ROUNDS):
        improved = [found.improve(*row) for row in rows]
        if not any(improved):
            break
    return found.way


def _rows(places: Sequence[int]) -> list[tuple[int, int]]:
    """Stages from, to: in the longest rows on different ranks, and in such that begin in the middle of these."""
    starts, start = list[int](), 0
    while start < len(places):
        starts += [start, (start + _until(places, start)) // 2]
        start = _until(places, start)
    found = ((start, _until(places, start)) for start in dict.fromkeys(starts))
    return [(start, stop) for start, stop in found if stop - start > 1]


def _until(places: Sequence[int], start: int) -> int:
    """The end of the longest row on different ranks from there on."""
    seen = set[int]()
    for stage in range(start, len(places)):
        if places[stage] in seen:
            return stage
        seen.add(places[stage])
    return len(places)


class _Balance:
    def __init__(self, graph: StageGraph, way: Way, places: Sequence[int], share: float) -> None:
        self.graph, self.runs, self.places = graph, graph.runs, places
        self.way, self.microbatches = way, graph.problem.microbatches
        self.tables = [found[0][1] for found in graph.slots]
        self.share, self.virtual = share, len(places) / len(set(places))
        self.firsts = [places.index(place) for place in places]  # by stage, the first one of its rank
        total = sum(self._seconds(way))
        # by position, seconds of the blocks before, as forwards share them
        self.ahead = graph.forward * (total / graph.forward[-1] if graph.forward[-1] else 0.0)

    def improve(self, start: int, stop: int) -> bool:
        """Divides a row of stages anew, if that makes the longest rank shorter."""
        longest = max(self._lengths(self.way))
        for _ in range(_REFINED):
            found = self._divided(start, stop, longest * (1 - _GAINED))
            if found is None:
                return False
            way = (*self.way[:start], *found, *self.way[stop:])
            if not self.graph.refine_all(way):
                break
        else:
            return False
        whole = self.graph.made(way)
        if whole is None or self.graph.problem.excess_bytes(whole) > 0:
            return False
        if max(self._lengths(whole)) > longest * (1 - _GAINED):
            return False
        self.way = whole
        return True

    def _seconds(self, way: Way) -> list[float]:
        runs = (self.runs.number(step.first, step.last) for step in way)
        return [float(self.graph.seconds[table, run]) for table, run in zip(self.tables, runs, strict=True)]

    def _lengths(self, way: Way) -> list[float]:
        """By stage, of its rank's."""
        seconds = self._seconds(way)
        load = dict.fromkeys(self.places, 0.0)
        for place, own in zip(self.places, seconds, strict=True):
            load[place] += own
        return [
            float(self.ahead[way[first].first])
            + self.microbatches * (self.share * load[place] + (1 - self.share) * self.virtual * own)
            for first, place, own in zip(self.firsts, self.places, seconds, strict=True)
        ]

    def _divided(self, start: int, stop: int, most: float) -> list[Step] | None:
        """The stages between as runs with the least maximum, if that is less than ``most``."""
        seconds, lengths = self._seconds(self.way), self._lengths(self.way)
        inside = set(self.places[start:stop])
        apart = max((own for own, place in zip(lengths, self.places, strict=True) if place not in inside), default=0.0)
        if apart >= most:
            return None
        costs, each = [], self.microbatches * (self.share + (1 - self.share) * self.virtual)
        for stage in range(start, stop):
            length = lengths[stage] - each * seconds[stage] + each * self.graph.seconds[self.tables[stage]]
            if self.firsts[stage] == stage:
                length += self.ahead[self.runs.first] - self.ahead[self.way[stage].first]
            costs.append(np.where(self.graph.fits[self.tables[stage]], length, np.inf))
        best = self._best(start, stop, costs, np.maximum)
        if best is None or best[0] >= most:
            return None
        limit = max(best[0], apart)
        tables = self.tables[start:stop]
        sums = [np.where(own <= limit, self.graph.busy[at], np.inf) for own, at in zip(costs, tables, strict=True)]
        found = self._best(start, stop, sums, np.add)
        assert found is not None
        return found[1]

    def _best(
        self, start: int, stop: int, costs: Sequence[Array], combine: Callable[[Array, Array], Array]
    ) -> tuple[float, list[Step]] | None:
        """The way from where the row begins to where it ends with the least sum or maximum."""
        begin, end = self.way[start].first, self.way[stop - 1].last
        best = np.full(self.runs.positions, np.inf)
        best[begin] = 0.0
        came = []
        for cost in costs:
            best, which = self.runs.least_to(combine(best[self.runs.first], cost))
            came.append(which)
        if not np.isfinite(best[end]):
            return None
        steps, at = list[Step](), end
        for which, step in zip(reversed(came), reversed(self.way[start:stop]), strict=True):
            first = int(self.runs.first[which[at]])
            steps.append(Step(step.slot, first, at))
            at = first
        return float(best[end]), steps[::-1]
