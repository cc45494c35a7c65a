"""Solved candidates, and the best of several ways to solve one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from autopart.solver.degrees import Degrees
from autopart.solver.search_space import Evaluation
from autopart.solver.stages_problem import StageProblem, StageSolution, Way
from autopart.tensor_choice import TensorChoice


@dataclass(frozen=True, slots=True)
class Answer:
    """A solved candidate. others: such that may be faster, once they are timed on their graphs, the fastest first."""

    config: Degrees
    choice: TensorChoice
    problem: StageProblem
    cut: StageSolution
    others: tuple[Answer, ...] = ()

    @property
    def way(self) -> Way:
        return self.cut.way


def best_of(below: float, ways: Iterable[Callable[[float], Evaluation[Answer] | None]]) -> Evaluation[Answer] | None:
    """The fastest of what takes less than ``below``; each way is asked for less than what those before it take."""
    best: Evaluation[Answer] | None = None
    for way in ways:
        found = way(below)
        if found is not None and found.objective < below:
            best, below = found, found.objective
    return best
