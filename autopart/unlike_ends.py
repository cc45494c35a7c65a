"""Of stages on a row of devices: the slots and the blocks that some of them may have."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from autopart.solver.stages_problem import StageProblem


def ways_through(problem: StageProblem, stages: Sequence[int]) -> list[tuple[int, ...]]:
    """The slots that these stages may have, in rising order, with any slots of the others between."""
    ends = _reached(problem, stages[0])
    ways: list[tuple[int, ...]] = [(number,) for number, slot in enumerate(problem.slots) if slot.start in ends[0]]
    for before, stage in itertools.pairwise(stages):
        between = _reached(problem, stage - before - 1)
        ways = [
            (*way, number)
            for way in ways
            for number, slot in enumerate(problem.slots)
            if slot.start in between[problem.slots[way[-1]].stop]
        ]
    behind = _reached(problem, problem.stages - 1 - stages[-1])
    return [way for way in ways if not behind[problem.slots[way[-1]].stop].isdisjoint(problem.ends)]


def _reached(problem: StageProblem, stages: int) -> list[set[int]]:
    """By place, the places where so many stages that begin there may end."""
    found = [{place} for place in range(len(problem.links))]
    for _ in range(stages):
        found = [{slot.stop for slot in problem.slots if slot.start in places} for places in found]
    return found


def with_ends(
    problem: StageProblem, firsts: Collection[int] | None, lasts: Collection[int] | None
) -> tuple[StageProblem, list[int]]:
    """The problem with these slots alone for the first and for the last stage, and the numbers of all that it keeps.

    None: all of them.
    """
    kept = [
        number
        for number, slot in enumerate(problem.slots)
        if (firsts is None or slot.start or number in firsts)
        and (lasts is None or slot.stop not in problem.ends or number in lasts)
    ]
    return replace(problem, slots=tuple(problem.slots[number] for number in kept)), kept


def stages_of(problem: StageProblem, blocks: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """The stages that these blocks may be in, each before those that depend on it.

    A block with n others that it depends on has stages behind it for the rest of the blocks at most, and before it for
    those at most that do not depend on it.
    """
    last, count = problem.stages - 1, len(problem.blocks)
    allowed = []
    for block in blocks:
        before = [inside.bit_count() for inside in problem.positions if not inside >> block & 1]
        until = [inside.bit_count() for inside in problem.positions if inside >> block & 1]
        allowed.append(range(max(0, last - (count - min(until))), min(last, max(before)) + 1))
    follows = [
        (one, other)
        for one, other in itertools.permutations(range(len(blocks)), 2)
        if all(inside >> blocks[one] & 1 for inside in problem.positions if inside >> blocks[other] & 1)
    ]
    for stages in itertools.product(*allowed):
        if all(stages[one] <= stages[other] for one, other in follows):
            yield stages
