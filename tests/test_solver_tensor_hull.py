"""Corners of (seconds, bytes) by prices for bytes: against all assignments, by elimination and one price at a time."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from test_solver_tensor import random_problem

from autopart.runtime.errors import InfeasibleError, PlanError
from autopart.solver import tensor
from autopart.solver.tensor_hull import corners, eliminator, farthest_first, hull, weighed
from autopart.solver.tensor_problem import Choice, Edge, Op, TensorProblem
from autopart.solver.tensor_sums import Weights

Place = tuple[float, float]


def every_corner(problem: TensorProblem) -> list[Place]:
    """The hull of all assignments."""
    every = itertools.product(*(range(len(op.choices)) for op in problem.ops))
    places = [(problem.objective(choices), problem.memory(choices)) for choices in every]
    return corners([place for place in places if place[0] < math.inf], lambda place: place)


def with_levels(rng: random.Random, problem: TensorProblem) -> TensorProblem:
    """Every choice several times, with unlike seconds and bytes, as levels of ZeRO are."""
    ops = [
        Op(
            op.name,
            tuple(
                replace(choice, cost=choice.cost + rng.random() * 1e-3, memory=choice.memory * rng.random())
                for choice in op.choices
                for _ in range(rng.randint(1, 2))
            ),
        )
        for op in problem.ops
    ]
    return TensorProblem(tuple(ops), problem.edges)


@pytest.mark.parametrize("seed", range(60))
def test_the_hull_is_that_of_all_assignments(seed: int) -> None:
    rng = random.Random(seed)
    problem = random_problem(rng, rng.randint(1, 5), 3, 3, impossible=0.2 * (seed % 2), memory=True)
    problem = with_levels(rng, problem)
    want = every_corner(problem)
    found = hull(problem, eliminator(problem), most=100)
    assert [point.seconds for point in found] == pytest.approx([seconds for seconds, _ in want])
    assert [point.memory for point in found] == pytest.approx([memory for _, memory in want])
    for point in found:
        assert (problem.objective(point.choices), problem.memory(point.choices)) == (point.seconds, point.memory)


@pytest.mark.parametrize("seed", range(8))
def test_one_price_at_a_time_finds_the_same(seed: int) -> None:
    rng = random.Random(seed)
    problem = replace(random_problem(rng, 4, 3, 3, memory=True), memory_limit=None)

    def least(weights: Sequence[Weights]) -> list[tuple[int, ...] | None]:
        found: list[tuple[int, ...] | None] = []
        for pair in weights:
            try:
                found.append(tensor.solve(weighed(problem, pair)).choices)
            except InfeasibleError:
                found.append(None)
        return found

    one, other = (hull(problem, by, most=100) for by in (least, eliminator(problem)))
    assert [point.seconds for point in one] == pytest.approx([point.seconds for point in other])
    assert [point.memory for point in one] == pytest.approx([point.memory for point in other])


def test_of_many_corners_the_farthest_are_found_first() -> None:
    """A parabola of 33 corners: the ends, then halves, then quarters."""
    places = [(float(x * x), float(32 - x)) for x in range(33)]
    ops = (Op("one", tuple(Choice(str(x), *place_of(place)) for x, place in enumerate(places))),)
    problem = TensorProblem(ops)
    found = [point.choices[0] for point in hull(problem, eliminator(problem), most=5)]
    assert found == [0, 8, 16, 24, 32]
    order = farthest_first(places, lambda place: place)
    assert order[:3] == [places[0], places[32], places[16]] and {*order[3:5]} == {places[8], places[24]}
    assert len(order) == len(places)


def place_of(place: Place) -> tuple[float, tuple[int, ...], tuple[int, ...], float]:
    return place[0], (), (), place[1]


def test_a_graph_that_is_too_wide_is_refused() -> None:
    problem = random_problem(random.Random(0), 5, 3, 3, memory=True)
    with pytest.raises(PlanError, match="too wide"):
        eliminator(problem, most_settings=2)


def test_what_cannot_be_has_no_hull() -> None:
    ops = Op("made", (Choice("a", 0.0, (0,)),)), Op("read", (Choice("b", 0.0, (), (1,)),))
    problem = TensorProblem(ops, (Edge(0, 0, ((1, 0),), {}),))
    assert hull(problem, eliminator(problem)) == ()
