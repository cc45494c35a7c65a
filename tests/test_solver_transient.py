"""Strategies under a limit of which the largest transient is a part, against brute force."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from test_planner import GPT2, analysis_of
from test_solver_tensor import random_problem

from autopart.candidate_settings import CUDA_OVERHEAD_BYTES
from autopart.plan import Plan
from autopart.planner import make_plan
from autopart.runtime.errors import InfeasibleError
from autopart.solver import brute, elimination, tensor_frontier, tensor_transient
from autopart.solver.search_space import NotBetter
from autopart.solver.tensor_problem import Choice, Op, TensorProblem
from clusters import ideal


def draw(seed: int, **sizes: int) -> TensorProblem:
    rng = random.Random(seed)
    sizes = {"ops": rng.randint(1, 6), "choices": rng.randint(1, 4), "placements": rng.randint(1, 3), **sizes}
    problem = random_problem(rng, **sizes, whole=rng.random() < 0.5, impossible=rng.choice([0.0, 0.2]), memory=True)
    ops = tuple(
        Op(op.name, tuple(replace(choice, transient=float(rng.randint(0, 150))) for choice in op.choices))
        for op in problem.ops
    )
    transients = rng.randint(1, 4)
    assert problem.memory_limit is not None
    return replace(problem, ops=ops, transients=transients, memory_limit=problem.memory_limit + rng.randint(0, 300))


@pytest.mark.parametrize("seed", range(150))
def test_equals_brute_force(seed: int) -> None:
    problem = draw(seed)
    best = brute.best_choices(problem)
    if best is None:
        with pytest.raises(InfeasibleError):
            tensor_transient.solve(problem)
        return
    found = tensor_transient.solve(problem)
    assert found.objective == pytest.approx(best[1], rel=1e-6, abs=1e-15) and problem.fits(found.choices)
    assert found.objective == pytest.approx(problem.objective(found.choices), abs=1e-12)
    assert found.bound <= best[1] * (1 + 1e-6) + 1e-15 and found.gap <= 1e-6


@pytest.mark.parametrize("seed", range(40))
def test_what_takes_too_long_is_not_sought(seed: int) -> None:
    problem = draw(2000 + seed)
    for item in (problem, replace(problem, transients=0)):
        best = brute.best_choices(item)
        if best is None or not best[1]:
            continue
        with pytest.raises(NotBetter) as caught:
            tensor_transient.solve(item, below=0.9 * best[1])
        assert 0.9 * best[1] <= caught.value.bound <= best[1] * (1 + 1e-6)
        assert tensor_transient.solve(item, below=1.1 * best[1]).objective == pytest.approx(best[1], rel=1e-6)


@pytest.mark.parametrize("seed", range(20))
def test_a_gap_holds(seed: int) -> None:
    problem = draw(1000 + seed, ops=7, choices=4)
    best = brute.best_choices(problem)
    if best is not None:
        found = tensor_transient.solve(problem, gap=0.1)
        assert problem.fits(found.choices) and found.bound <= best[1] * (1 + 1e-6) + 1e-15
        assert found.objective <= best[1] * 1.12 + 1e-12


@pytest.mark.parametrize("seed", range(8))
def test_the_frontier_counts_transients(seed: int) -> None:
    problem = replace(draw(2000 + seed), memory_limit=None)
    right = brute.frontier(problem)
    found = tensor_frontier.frontier(problem)
    assert [point.memory for point in found] == sorted((point.memory for point in found), reverse=True)
    for seconds, memory in right:
        assert any(point.seconds <= seconds + 1e-9 and point.memory <= memory + 1e-9 for point in found)


def test_logits_are_divided_where_they_are_what_does_not_fit() -> None:
    """On a slow link replicas of everything are the fastest; what they hold too much is logits and their gradients.

    The link is so slow that the logits' collective does not pass unseen beside the weight's gradient.
    """
    analysis = analysis_of(GPT2.replace("vocab_size=512", "vocab_size=16384"))
    limits: dict[str, Any] = {"batch": 16, "pp": 1, "dp": 1, "tp": 2, "microbatches": 1, "recompute": "none"}

    def planned(memory_bytes: int) -> Plan:
        cluster = ideal(2, bandwidth=7e5, memory_bytes=memory_bytes)
        return make_plan(analysis.program, cluster, analysis=analysis, **limits)

    roomy = planned(2**40)
    assert roomy.stages[0].collectives == {}, "replicas"
    held = roomy.stages[0].memory_bytes - CUDA_OVERHEAD_BYTES
    tight = planned(CUDA_OVERHEAD_BYTES + held * 7 // 10)
    assert tight.stages[0].memory_bytes <= tight.stages[0].capacity_bytes
    assert tight.step_time_s < 1.2 * roomy.step_time_s


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match="transient bytes"):
        Choice("c", 0.0, (0,), transient=-1.0)
    with pytest.raises(ValueError, match="at least 0 times"):
        TensorProblem((), transients=-1)
    with pytest.raises(ValueError, match="no largest transient"):
        elimination.frontier(draw(0))
