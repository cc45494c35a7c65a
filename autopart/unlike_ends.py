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
    """The stages that these blocks may be in, so far as there are positions between stages to cut at.

    Behind each stage there has to be one with those of these blocks that stages have until then, and with more blocks
    in all than the one before.
    """
    last, count = problem.stages - 1, len(problem.blocks)
    marks = [1 << block for block in blocks]
    sizes: dict[int, set[int]] = {}  # of the positions, by which of the blocks these have
    for inside in problem.positions:
        sizes.setdefault(inside & sum(marks), set()).add(inside.bit_count())

    def ways(stage: int, before: int, size: int) -> Iterator[dict[int, int]]:
        """By mark, from this stage on, before which there are so many blocks, with these marks."""
        if stage == last:
            yield {mark: last for mark in marks if not mark & before}
            return
        for until, found in sizes.items():
            larger = [other for other in found if size < other <= count - last + stage]
            if larger and not before & ~until:
                own = {mark: stage for mark in marks if mark & until & ~before}
                yield from ({**own, **rest} for rest in ways(stage + 1, until, min(larger)))

    for stages in ways(0, 0, 0):
        yield tuple(stages[mark] for mark in marks)
