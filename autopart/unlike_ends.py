"""Problems of stages with other ends: fewer slots for the first and the last stage, or one stage less."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import replace

from autopart.solver.stages_parts import Block, Shape
from autopart.solver.stages_problem import StageProblem


def reached(problem: StageProblem, place: int, stages: int) -> set[int]:
    """The places where so many stages that begin at a place may end."""
    found = {place}
    for _ in range(stages):
        found = {slot.stop for slot in problem.slots if slot.start in found}
    return found


def with_ends(problem: StageProblem, pairs: Collection[tuple[int, int]]) -> tuple[StageProblem, list[int]]:
    """The problem without the slots of the first and the last stage that none of these pairs has, and the numbers of
    those it keeps. pairs: slots of the first and the last stage.
    """
    first, last = ({pair[at] for pair in pairs} for at in range(2))
    kept = [
        number
        for number, slot in enumerate(problem.slots)
        if (slot.start or number in first) and (slot.stop not in problem.ends or number in last)
    ]
    return replace(problem, slots=tuple(problem.slots[number] for number in kept)), kept


def sent_behind(problem: StageProblem, behind: int, end: int) -> float:
    """Seconds of a step at least in which all microbatches' values pass to a stage that begins at a place with some of
    the blocks from ``behind`` on, and their gradients back.
    """
    link, last, least = problem.links[end], len(problem.positions) - 1, math.inf
    for position, inside in enumerate(problem.positions):
        if inside.bit_count() >= behind and position < last:
            cuts = [shape.cuts[link][position] for shape in problem.shapes]
            there, back = (min(getattr(cut, way) for cut in cuts) for way in ("forward_s", "backward_s"))
            least = min(least, there + back + (problem.microbatches - 1) * max(there, back))
    return least


def without_last(problem: StageProblem, behind: int) -> list[StageProblem]:
    """The problem without memory and without its last stage, which has some of the blocks from ``behind`` on: one for
    each place where that may begin. None where it has other blocks, as they are pinned.
    """

    def free(shape: Shape) -> Shape:
        blocks = (block if at < behind else Block(block.name, 0.0, 0.0) for at, block in enumerate(shape.blocks))
        layers = tuple(layer for layer in shape.layers if layer.blocks[-1] < behind)
        sums = tuple(item for item in shape.sums if min(item.blocks) < behind)
        return replace(shape, blocks=tuple(blocks), layers=layers, sums=sums)

    last = problem.stages - 1
    if any(block < behind and stage == last for block, stage in problem.pins):
        return []
    fewer = replace(
        problem,
        shapes=tuple(map(free, problem.shapes)),
        slots=tuple(replace(slot, capacity_bytes=math.inf) for slot in problem.slots),
        in_flight=problem.in_flight[:-1],
        pins=tuple((block, stage) for block, stage in problem.pins if stage < last),
    )
    places = dict.fromkeys(slot.start for slot in problem.slots if slot.stop in problem.ends)
    return [replace(fewer, ends=(place,)) for place in places]
