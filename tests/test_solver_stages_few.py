"""Stages sought at few positions first, or below the seconds of a known plan: narrower, and nothing is lost."""

from __future__ import annotations

import math

import pytest
from test_solver_stages import Random, check_against_all, random_chain, small_problem

from autopart.runtime.errors import InfeasibleError
from autopart.solver import brute, stages
from autopart.solver.search_space import NotBetter
from autopart.solver.stages_few import most_seconds, spread
from autopart.solver.stages_graph import StageGraph

SEEDS = [*range(40), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(40, 100))]


@pytest.mark.parametrize("seed", SEEDS)
def test_few_positions_first_equals_brute_force(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A division at few positions narrows the search, and loses nothing."""
    monkeypatch.setattr(stages, "_FEW", 2)
    monkeypatch.setattr(stages, "_FEW_A_STAGE", 1)
    check_against_all(*small_problem(seed, dag=seed % 2 == 0), stages.MAX_PROGRAMS)


@pytest.mark.parametrize("seed", SEEDS)
def test_what_is_asked_for_below_is_not_missed(seed: int) -> None:
    """No division that may be faster than what is asked for is left out."""
    problem, edges = small_problem(seed, dag=seed % 2 == 0)
    best = brute.best_way(problem, edges)
    if best is None:
        return
    least = brute.lower_bound_seconds(problem, edges)
    for below in (least * 0.9, least * 1.01, best[1] * 1.01, best[1] * 2):
        try:
            solution = stages.solve(problem, below=below)
        except (NotBetter, InfeasibleError):
            assert least >= below * (1 - 1e-9)
        else:
            assert problem.excess_bytes(solution.way) <= 0 and best[1] * (1 - 1e-9) <= solution.objective
            assert solution.lower_bound_s <= below


def test_few_positions_leave_fewer_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = random_chain(Random(5), 160, 8, 16)
    most = most_seconds(problem, stages.solve(problem.at(spread(problem, 64))).way)
    sizes = [int(StageGraph.build(problem, limit).fits.sum()) for limit in (math.inf, most)]
    assert sizes[1] < sizes[0] / 3
    narrowed = stages.solve(problem)
    monkeypatch.setattr(stages, "_FEW", len(problem.positions))
    whole = stages.solve(problem)
    assert narrowed.objective == pytest.approx(whole.objective, rel=1e-9) and narrowed.gap == 0
