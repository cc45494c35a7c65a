"""Divisions where ranks run several stages: no rank with much more to do than the others, and no slower for it."""

from __future__ import annotations

import dataclasses
import math

import pytest
from test_solver_stages import Random, random_chain

from autopart.runtime.errors import InfeasibleError
from autopart.runtime.schedule import SPLIT_SCHEDULES, in_flight, places_of
from autopart.solver import stages
from autopart.solver.stages_graph import StageGraph
from autopart.solver.stages_least import least_share
from autopart.solver.stages_parts import Block, Cut
from autopart.solver.stages_problem import StageProblem, Way
from autopart.solver.stages_ranks import balanced
from autopart.step_time import simulated_seconds


def timed(problem: StageProblem, way: Way, name: str, places: tuple[int, ...]) -> float:
    shares = [0.3 if name in SPLIT_SCHEDULES else 0.0] * problem.stages
    return simulated_seconds(problem, way, name, shares, (), places)


def rank_seconds(problem: StageProblem, way: Way, places: tuple[int, ...]) -> list[float]:
    found = [0.0] * len(set(places))
    for place, step in zip(places, way, strict=True):
        found[place] += sum(choice.seconds for choice in problem.chosen(step))
    return found


@pytest.mark.parametrize(("name", "virtual"), [("interleaved", 2), ("zb-v", 2)])
def test_long_stages_share_ranks_with_short_ones(name: str, virtual: int) -> None:
    """Ten equal blocks on four stages: two have two blocks, two three; by the formula it is all the same which."""
    blocks = [Block(f"block {number}", 1.0, 2.0) for number in range(10)]
    places = places_of(name, 4, virtual)
    flying = in_flight(name, 4, 16, (), places)
    problem = StageProblem.chain(blocks, (Cut(),) * 9, 16, flying, (math.inf,) * 4)
    found = stages.solve(
        problem,
        least_step=lambda forward, work, below: work * least_share(name, places, 16, forward / work),
        timed=lambda way: timed(problem, way, name, places),
        places=places,
    )
    assert rank_seconds(problem, found.way, places) == [15.0, 15.0]
    ways = {sizes: way_of(problem, sizes) for sizes in ((3, 2, 3, 2), (2, 3, 2, 3), (3, 2, 2, 3), (2, 3, 3, 2))}
    seconds = {sizes: timed(problem, way, name, places) for sizes, way in ways.items()}
    assert timed(problem, found.way, name, places) < min(seconds[3, 2, 3, 2], seconds[2, 3, 2, 3])
    graph = StageGraph.build(problem)
    for way in ways.values():
        for other in balanced(graph, way, places):
            assert max(rank_seconds(problem, other, places)) == 15.0


def way_of(problem: StageProblem, sizes: tuple[int, ...]) -> Way:
    ends = [sum(sizes[:at]) for at in range(len(sizes) + 1)]
    plain = stages.solve(problem)
    return tuple(
        dataclasses.replace(step, first=ends[at], last=ends[at + 1], choices=()) for at, step in enumerate(plain.way)
    )


@pytest.mark.parametrize(("name", "ranks", "virtual"), [("interleaved", 2, 3), ("zb-h1", 3, 1), ("zb-v", 3, 2)])
@pytest.mark.parametrize("seed", range(25))
def test_no_slower_than_the_formula_says_and_within_memory(name: str, ranks: int, virtual: int, seed: int) -> None:
    rng, count = Random(seed), ranks * virtual
    m, places = ranks * rng.choice([1, 2, 5]), places_of(name, ranks * virtual, virtual)
    problem = random_chain(rng, rng.randint(count, 3 * count), count, m)
    limits = tuple(dataclasses.replace(slot, capacity_bytes=rng.uniform(200, 1500)) for slot in problem.slots)
    problem = dataclasses.replace(problem, slots=limits, in_flight=in_flight(name, count, m, (), places))

    def least(forward: float, work: float, below: float) -> float:
        return work * least_share(name, places, m, forward / work, below / work)

    try:
        plain = stages.solve(problem, least_step=least)
    except InfeasibleError:
        return
    found = stages.solve(problem, least_step=least, timed=lambda way: timed(problem, way, name, places), places=places)
    assert timed(problem, found.way, name, places) <= timed(problem, plain.way, name, places)
    assert found.lower_bound_s == plain.lower_bound_s and problem.excess_bytes(found.way) <= 0
    assert [step.first for step in found.way[1:]] == [step.last for step in found.way[:-1]]
    assert problem.respects_pins(found.way)
    graph = StageGraph.build(problem)
    for way in balanced(graph, plain.way, places):
        assert problem.excess_bytes(way) <= 0 and problem.respects_pins(way)
