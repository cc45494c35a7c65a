"""Optima by trying everything: what the solvers are held against in tests, on small instances."""

from __future__ import annotations

import itertools
import math

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
