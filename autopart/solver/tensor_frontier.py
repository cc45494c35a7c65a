"""All undominated (seconds, bytes) choices of strategies, by solving under falling memory limits (epsilon-constraint).

    x_0 = argmin seconds;    x_{i+1} = argmin { seconds(x) : memory(x) < memory(x_i) }    until there is none

Each answer is optimal under its limit, so every undominated point is met (Haimes, Lasdon, Wismer, 1971). The second
method besides :mod:`autopart.solver.elimination`; this one needs no narrow graph.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from autopart.runtime.errors import InfeasibleError
from autopart.solver import tensor_transient
from autopart.solver.elimination import Point
from autopart.solver.tensor_problem import TensorProblem, TensorSolution

_NEAR = 1e-7
"""Seconds within that share of each other count as equal, as they do for the solver."""


def frontier(
    problem: TensorProblem,
    step: float = 0.0,
    time_limit_s: float = 60.0,
    solver: Callable[[TensorProblem, float], TensorSolution] = tensor_transient.solve,
) -> tuple[Point, ...]:
    """The fastest first. step: each limit lies below the last answer's bytes by at least that share of them.

    With a step, for every undominated (s, b) there is an answer with at most (s, b / (1 - step)); with a ``solver``
    whose answers are within a gap g of their bounds with at most (s / (1 - g), b / (1 - step)).
    """
    if not 0 <= step < 1:
        raise ValueError(f"a step is at least 0 and below 1: {step}")
    found: list[Point] = []
    limit = problem.memory_limit
    while True:
        try:
            solution = solver(replace(problem, memory_limit=limit), time_limit_s)
        except InfeasibleError:
            return tuple(found)
        memory = problem.memory(solution.choices)
        while found and found[-1].seconds >= solution.objective * (1 - _NEAR):
            found.pop()  # as fast, with more bytes
        found.append(Point(solution.objective, memory, solution.choices))
        if memory <= 0:
            return tuple(found)
        limit = min(math.nextafter(memory, 0.0), memory * (1 - step))
