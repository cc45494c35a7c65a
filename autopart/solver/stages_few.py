"""Fewer positions to divide at, and what a division at them says about all others.

A step takes at least the seconds of all blocks, once, and m - 1 times those of one stage (see
:mod:`autopart.solver.stages`). So with U seconds of a division that is known, no stage of a better one has blocks that
take more than (U - all blocks) / (m - 1). With p stages this leaves about 1/p of the runs of blocks.
"""

from __future__ import annotations

import itertools
import math

from autopart.solver.stages_coarse import bits_of
from autopart.solver.stages_problem import StageProblem, Way

_ROUNDING = 1e-9


def spread(problem: StageProblem, count: int) -> list[int]:
    """About ``count`` positions, each a part of the next, of about equal work; of several those of the least cut."""
    done = [0.0]
    for before, mask in itertools.pairwise(problem.positions):
        # most positions grow by a block; work of those that swap some is found alike
        added, left = mask & ~before, before & ~mask
        done.append(done[-1] + _work(problem, added) - _work(problem, left))
    between: dict[int, list[int]] = {}
    for position in range(1, len(done) - 1):
        between.setdefault(int(count * done[position] / (done[-1] or 1.0)), []).append(position)
    kept = [0]
    for _, found in sorted(between.items()):
        reached = problem.positions[kept[-1]]
        fitting = [p for p in found if problem.positions[p] & reached == reached]
        kept += [min(fitting, key=lambda p: problem.cut_at(p).seconds)] if fitting else []
    return [*kept, len(done) - 1]


def _work(problem: StageProblem, mask: int) -> float:
    return math.fsum(problem.blocks[block].seconds for block in bits_of(mask))


def most_seconds(problem: StageProblem, known: Way) -> float:
    """Seconds of a stage's blocks with which a division takes longer than a known one.

    All blocks pass once, and m - 1 microbatches at the pace of the slowest stage.
    """
    if not known or problem.microbatches == 1:
        return math.inf
    once = math.fsum(
        min(choice.seconds for shape in problem.shapes for choice in shape.blocks[block].choices)
        for block in range(len(problem.blocks))
    )
    return (problem.objective(known) - once) / (problem.microbatches - 1) * (1 + _ROUNDING)
