"""Optima by trying everything: what the solvers are held against in tests, on small instances."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

from autopart.solver.stages_problem import StageProblem
from autopart.solver.tensor_problem import TensorProblem


def best_choices(problem: TensorProblem) -> tuple[tuple[int, ...], float] | None:
    """The cheapest choice of strategies that fits and its seconds; None when there is none."""
    best: tuple[tuple[int, ...], float] | None = None
    for choices in itertools.product(*(range(len(op.choices)) for op in problem.ops)):
        if problem.fits(choices):
            seconds = problem.objective(choices)
            if seconds < (math.inf if best is None else best[1]):
                best = choices, seconds
    return best


def cuts(problem: StageProblem) -> Iterator[tuple[int, ...]]:
    """The boundaries of every cut into stages that respects the pins, whether it fits or not."""
    n = len(problem.blocks)
    for inner in itertools.combinations(range(1, n), problem.stages - 1):
        if problem.respects_pins((0, *inner, n)):
            yield 0, *inner, n


def best_boundaries(problem: StageProblem) -> tuple[tuple[int, ...], float] | None:
    """The cut that fits with the shortest step, and its seconds; None when none fits."""
    fitting = [way for way in cuts(problem) if problem.excess_bytes(way) <= 0]
    return min(((way, problem.objective(way)) for way in fitting), key=lambda item: item[1], default=None)


def least_excess_bytes(problem: StageProblem) -> float:
    """By how many bytes the fullest stage exceeds its capacity in the best cut; infinite when the pins leave none."""
    return min(map(problem.excess_bytes, cuts(problem)), default=math.inf)


def lower_bound_seconds(problem: StageProblem) -> float:
    """Over all cuts that fit, the smallest of what the slowest stage of each demands."""
    return min(
        max(problem.span_floor(*span) for span in itertools.pairwise(way))
        for way in cuts(problem)
        if problem.excess_bytes(way) <= 0
    )
