"""Of how many stages a step may be no longer than given: all of which some division is, and few others."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from test_solver_stages import Random, random_dag
from test_stages_floor import scheduled
from test_stages_trips import timed

from autopart.solver import brute
from autopart.solver.stages_counts import possible_counts
from autopart.solver.stages_problem import StageProblem

STAGES = 3


def least_seconds(problem: StageProblem, edges: tuple[tuple[int, int], ...], name: str) -> float:
    """Of all divisions, without tied gradients; infinite where there is none."""
    ways = (way for bounds in brute.divisions(problem, edges) for way in brute.ways(problem, bounds, {}))
    return min((timed(problem, way, name) - problem.tied_seconds(way) for way in ways), default=math.inf)


def case(seed: int, name: str) -> tuple[StageProblem, dict[int, float]]:
    """A problem of up to three stages on uneven devices in as much memory as they need, and the least by number."""
    rng = Random(seed)
    problem, edges = random_dag(rng, rng.randint(3, 5), STAGES)
    roomy = tuple(replace(slot, capacity_bytes=math.inf) for slot in problem.slots)
    problem = replace(rng.with_sums(problem), slots=roomy, pins=(), pairs={}, microbatches=rng.choice([1, 2, 4, 9]))
    found = {}
    for count in range(1, STAGES + 1):
        own = scheduled(replace(problem, in_flight=(1,) * count), name, ())
        found[count] = least_seconds(own, edges, name)
    return scheduled(problem, name, ()), found


@pytest.mark.parametrize("name", ["1f1b", "gpipe"])
@pytest.mark.parametrize("seed", range(30))
def test_every_number_that_some_division_has(seed: int, name: str) -> None:
    problem, least = case(seed, name)
    for count, seconds in least.items():
        if seconds < math.inf:
            assert count in possible_counts(problem, seconds * (1 + 1e-9))


@pytest.mark.parametrize("name", ["1f1b", "gpipe"])
def test_few_others(name: str) -> None:
    """In a quarter less than the best takes."""
    told = []
    for seed in range(30):
        problem, least = case(seed, name)
        told += [
            count in possible_counts(problem, 0.75 * seconds) for count, seconds in least.items() if seconds < math.inf
        ]
    assert len(told) > 60 and sum(told) < 0.2 * len(told)


def test_nothing_in_no_time() -> None:
    problem, _ = case(0, "1f1b")
    assert possible_counts(problem, 0.0) == frozenset()


def test_pins_are_refused() -> None:
    problem, _ = case(0, "1f1b")
    with pytest.raises(ValueError, match="pins"):
        possible_counts(replace(problem, pins=((0, 0),)), 1.0)
