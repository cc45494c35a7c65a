r"""All divisions that may be of interest, one by one, where they are few: the least of their schedule's own seconds.

Bounds of :mod:`autopart.solver.stages_floor` leave out most divisions of a few stages that may beat a known one. What
is left is listed stage after stage, each with the blocks before it and, with t_{<k} their seconds with transfers, R the
least behind it and w_k the microbatches in flight, as long as

    t_{<k} + m t_k < T    and    t_{<k} + t_k + 2 R + (m - w_k) t_k < T

for the seconds T that are of interest. The whole ones are timed all at once: 1F1B's order of work (GPipe's, where the
first stage holds all microbatches) is the same for all, so that each of its computations and transfers is one array.
Seconds at least in place of exact ones give a step at least, as no computation of a fixed order ends sooner where
another takes longer.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from autopart.runtime.schedule.flushing import one_f_one_b_order
from autopart.simulate import row_end
from autopart.solver.stages_graph import StageGraph
from autopart.solver.stages_problem import Step, Way
from autopart.solver.stages_runs import Array, Numbers

_Numbers = TypeVar("_Numbers", Array, Numbers)
_MOST, _MOST_ACTIONS = 100_000, 20_000_000
"""Divisions that are listed, and their computations in all, up to which that is done."""


def fastest_listed(graph: StageGraph, below: float, tied: bool = False) -> tuple[Way | None, float] | None:
    """The fastest division, if one takes less than ``below`` seconds, and what all take at least, up to ``below``.

    Without tied gradients, which only say with ``tied`` which division is returned; and with seconds of stages that are
    bounds where they are not exact. None where divisions are too many to list, or choices of blocks trade their
    forward's seconds for the backward's.
    """
    if not math.isfinite(below) or not _same_forwards(graph):
        return None
    listed = _listed(graph, below)
    if listed is None:
        return None
    seconds = _makespans(graph, listed) if len(listed.place) else np.zeros(0)
    if not (seconds < below).any():
        return None, below
    sums = [(graph.once - graph.seconds)[own] for own in zip(listed.tables, listed.runs, strict=True)]
    at = int(np.argmin(sum(sums, seconds) if tied else seconds))
    way = tuple(
        Step(int(slots[at]), int(graph.runs.first[runs[at]]), int(graph.runs.last[runs[at]]))
        for slots, runs in zip(listed.slots, listed.runs, strict=True)
    )
    return way, float(seconds.min())


@dataclass(frozen=True, slots=True)
class _Listed:
    """Beginnings of divisions, [division]. place, position: where they end. spent: a microbatch's seconds up to there,
    transfers included. slots, tables, runs: by stage; there, back: seconds of transfers on each cut before a stage.
    """

    place: Numbers
    position: Numbers
    spent: Array
    slots: tuple[Numbers, ...] = ()
    tables: tuple[Numbers, ...] = ()
    runs: tuple[Numbers, ...] = ()
    there: tuple[Array, ...] = ()
    back: tuple[Array, ...] = ()


def _same_forwards(graph: StageGraph) -> bool:
    """Whether all choices of every block take as long forward, as where they differ in what is computed again."""
    for shape in graph.problem.shapes:
        forward = [block.choices[0].forward_s for block in shape.blocks]
        own = zip(forward, (block.choices for block in shape.blocks), strict=True)
        parts = (
            (math.fsum(forward[block] for block in part), family)
            for layer in shape.layers
            for part, family in layer.parts.items()
        )
        for seconds, family in itertools.chain(own, parts):
            if not all(math.isclose(choice.forward_s, seconds, rel_tol=1e-9) for choice in family):
                return False
    return True


def _listed(graph: StageGraph, below: float) -> _Listed | None:
    """The whole divisions; None where there are too many on the way."""
    problem, runs, stages = graph.problem, graph.runs, graph.problem.stages
    behind = _least_behind(graph)
    found = _Listed(np.zeros(1, np.intp), np.zeros(1, np.intp), np.zeros(1))
    m, actions = problem.microbatches, 2 * problem.microbatches * stages
    most = min(_MOST, _MOST_ACTIONS // actions)
    for stage in range(stages):
        pieces: list[_Listed] = []
        count = 0
        for slot_number, table in graph.slots[stage]:
            slot = problem.slots[slot_number]
            own = np.flatnonzero(found.place == slot.start)
            rest = behind[stage + 1].get(slot.stop)
            if rest is None or not len(own):
                continue
            usable = graph.fits[table] & (graph.floor[table] < below) & np.isfinite(rest[runs.last])
            which, run = _joined(found.position[own], np.flatnonzero(usable), runs.first)
            which = own[which]
            count += len(which)
            if count > most:
                return None
            there, back = _crossed(graph, found, which, table, run) if stage else (np.zeros(len(which)),) * 2
            seconds, before = graph.seconds[table, run], found.spent[which] + there + back
            least = before + m * seconds
            if (flying := min(max(problem.in_flight[stage], 1), m)) < m:
                least = np.maximum(least, before + seconds + 2 * rest[runs.last[run]] + (m - flying) * seconds)
            kept = np.flatnonzero(least < below)
            which, run, there, back = which[kept], run[kept], there[kept], back[kept]
            pieces.append(
                _Listed(
                    np.full(len(kept), slot.stop),
                    runs.last[run],
                    before[kept] + seconds[kept],
                    (*(item[which] for item in found.slots), np.full(len(kept), slot_number)),
                    (*(item[which] for item in found.tables), np.full(len(kept), table)),
                    (*(item[which] for item in found.runs), run),
                    (*(item[which] for item in found.there), there),
                    (*(item[which] for item in found.back), back),
                )
            )
        found = _together(pieces)
    return found


def _joined(positions: Numbers, usable: Numbers, first: Numbers) -> tuple[Numbers, Numbers]:
    """Pairs of a beginning, by its number in ``positions``, and a usable run that follows it."""
    usable = usable[np.argsort(first[usable], kind="stable")]
    begins = np.searchsorted(first[usable], positions, side="left")
    counts = np.searchsorted(first[usable], positions, side="right") - begins
    which = np.repeat(np.arange(len(positions)), counts)
    at = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts) + np.repeat(begins, counts)
    return which, usable[at]


def _together(pieces: Sequence[_Listed]) -> _Listed:
    if not pieces:
        return _Listed(np.zeros(0, np.intp), np.zeros(0, np.intp), np.zeros(0))

    def joined(lists: Iterable[Sequence[_Numbers]]) -> tuple[_Numbers, ...]:
        return tuple(map(np.concatenate, zip(*lists, strict=True)))

    return _Listed(
        np.concatenate([piece.place for piece in pieces]),
        np.concatenate([piece.position for piece in pieces]),
        np.concatenate([piece.spent for piece in pieces]),
        joined(piece.slots for piece in pieces),
        joined(piece.tables for piece in pieces),
        joined(piece.runs for piece in pieces),
        joined(piece.there for piece in pieces),
        joined(piece.back for piece in pieces),
    )


def _least_behind(graph: StageGraph) -> list[dict[int, Array]]:
    """By stage, of the places where it may begin, the least of a microbatch's seconds from each position to the end,
    with transfers as the stages that end there have them.
    """
    problem, runs = graph.problem, graph.runs
    end = np.full(runs.positions, np.inf)
    end[-1] = 0.0
    found: list[dict[int, Array]] = [dict.fromkeys(problem.ends, end)]
    for stage in reversed(range(problem.stages)):
        reached: dict[int, Array] = {}
        for number, table in graph.slots[stage]:
            slot = problem.slots[number]
            if slot.stop not in found[-1]:
                continue
            own = np.where(graph.fits[table], graph.seconds[table], np.inf)
            crossed = (graph.there + graph.back)[table][runs.last] if stage < problem.stages - 1 else 0.0
            least = runs.least_from(own + crossed + found[-1][slot.stop][runs.last])
            reached[slot.start] = np.minimum(reached[slot.start], least) if slot.start in reached else least
        found.append(reached)
    return found[::-1]


def _crossed(graph: StageGraph, found: _Listed, which: Numbers, table: int, run: Numbers) -> tuple[Array, Array]:
    """Seconds of the transfers between beginnings and the stage that follows them: of those who have the most to do."""
    problem, at = graph.problem, graph.runs.first[run]
    _, shape, _, link, _ = graph.tables[table]
    before = found.tables[-1][which]
    made = np.empty((2, len(which)))
    for other in np.unique(before):
        pair = graph.tables[other][1], shape
        lists = [problem.shapes[number].cuts[link] for number in pair]
        if pair in problem.pairs:
            lists.append(problem.pairs[pair][link])
        rows = np.flatnonzero(before == other)
        for way, name in enumerate(("forward_s", "backward_s")):
            sides = np.max([[getattr(cut, name) for cut in cuts] for cuts in lists], axis=0)
            made[way, rows] = sides[at[rows]]
    return made[0], made[1]


def _makespans(graph: StageGraph, listed: _Listed) -> Array:
    """Seconds of a step of each division."""
    problem = graph.problem
    order = one_f_one_b_order(problem.stages, problem.microbatches, [max(held, 1) - 1 for held in problem.in_flight])
    forward, backward, ends = [], [], []
    for tables, run in zip(listed.tables, listed.runs, strict=True):
        shapes = np.array([shape for _, shape, *_ in graph.tables])[tables]
        seconds = graph.seconds[tables, run]
        there = graph.runs.between(graph.least["forward_s"])[shapes, run]
        forward.append(there)
        backward.append(seconds - there)
        ends.append(np.maximum(graph.ends[tables, run] - seconds, 0.0))
    found: Array = row_end(
        *(order, forward, backward, ends, listed.there[1:], listed.back[1:], np.zeros(len(listed.place)), np.maximum)
    )
    return found
