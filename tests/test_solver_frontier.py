"""The frontier of seconds and bytes: elimination and memory limits against brute force and each other."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from test_solver_tensor import random_problem

from autopart.runtime.errors import PlanError
from autopart.solver import brute, elimination, tensor, tensor_frontier
from autopart.solver.tensor_problem import Choice, Edge, Op, TensorProblem

NEAR = 1e-9


def draw(seed: int, memory: bool = True, **more: int) -> TensorProblem:
    rng = random.Random(seed)
    sizes = {"ops": rng.randint(1, 6), "choices": rng.randint(1, 4), "placements": rng.randint(1, 4), **more}
    return random_problem(rng, **sizes, whole=rng.random() < 0.5, impossible=rng.choice([0.0, 0.2, 0.5]), memory=memory)


def same(found: tuple[elimination.Point, ...], right: list[tuple[float, float]]) -> bool:
    """Equal but for points that rounding alone tells apart."""
    return covers(found, right) and all(
        any(s <= point.seconds + NEAR and m <= point.memory + NEAR for s, m in right) for point in found
    )


def covers(
    found: tuple[elimination.Point, ...], right: list[tuple[float, float]], slower: float = 0.0, larger: float = 0.0
) -> bool:
    return all(
        any(
            point.seconds <= seconds * (1 + slower) + NEAR and point.memory <= memory * (1 + larger) + NEAR
            for point in found
        )
        for seconds, memory in right
    )


@pytest.mark.parametrize("seed", range(60))
def test_both_equal_brute_force(seed: int) -> None:
    problem = draw(seed)
    if seed % 2:
        problem = replace(problem, memory_limit=None)
    right = brute.frontier(problem)
    for found in (elimination.frontier(problem), tensor_frontier.frontier(problem)):
        assert same(found, right)
        for point in found:
            assert problem.fits(point.choices)
            assert point.seconds == pytest.approx(problem.objective(point.choices), abs=1e-12)
            assert point.memory == problem.memory(point.choices)
        assert [p.memory for p in found] == sorted((p.memory for p in found), reverse=True)


@pytest.mark.parametrize("seed", range(3))
def test_each_equals_the_other_on_larger_ones(seed: int) -> None:
    problem = replace(draw(seed, ops=10, choices=4, placements=3, inputs=2), memory_limit=None)
    first, second = elimination.frontier(problem), tensor_frontier.frontier(problem)
    assert same(first, [(p.seconds, p.memory) for p in second])
    assert len(first) > 3 or seed


@pytest.mark.parametrize("seed", range(10))
def test_few_sums_at_a_time_are_as_good(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = draw(seed, ops=6, choices=4, placements=2)
    whole = elimination.frontier(problem, epsilon=0.1 * (seed % 2))
    monkeypatch.setattr(elimination, "_MOST_SUMS", 3)
    assert elimination.frontier(problem, epsilon=0.1 * (seed % 2)) == whole


@pytest.mark.parametrize("seed", range(15))
def test_epsilon_is_kept(seed: int) -> None:
    problem = replace(draw(seed), memory_limit=None)
    right = brute.frontier(problem)
    coarse = elimination.frontier(problem, epsilon=0.5)
    assert covers(coarse, right, slower=0.5) and len(coarse) <= len(right)
    assert covers(tensor_frontier.frontier(problem, step=0.3), right, larger=1 / 0.7 - 1)


def test_the_fastest_is_the_solver_s() -> None:
    for seed in range(20):
        problem = draw(seed, memory=False)
        try:
            fastest = tensor.solve(problem).objective
        except PlanError:
            assert not elimination.frontier(problem)
            continue
        (point,) = elimination.frontier(problem)
        assert point.seconds == pytest.approx(fastest, abs=1e-12)


def test_too_wide() -> None:
    """One value that thirty ops read is a table over them all."""
    choices = tuple(Choice(str(c), 1.0, (c,), (c,), 1.0) for c in range(2))
    ops = (Op("source", choices), *(Op(f"user{index}", choices) for index in range(30)))
    problem = TensorProblem(ops, (Edge(0, 0, tuple((index, 0) for index in range(1, 31)), {}),))
    with pytest.raises(PlanError, match="too wide"):
        elimination.frontier(problem)
    with pytest.raises(ValueError, match="epsilon"):
        elimination.frontier(problem, epsilon=-1.0)
