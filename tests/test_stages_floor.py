"""Floors under a step of a pipeline: never above what the simulator says of any division, and where they are it."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random

import pytest
from test_solver_stages import Random, chain_edges, random_chain, steps

from autopart.runtime.errors import InfeasibleError
from autopart.runtime.schedule import deeper_warmup, in_flight, make_schedule
from autopart.simulate import StageTimes, makespan
from autopart.solver import brute, stages
from autopart.solver.stages_floor import least_step, way_floor
from autopart.solver.stages_parts import Block, Choice, Cut
from autopart.solver.stages_problem import StageProblem, Way
from autopart.step_time import simulated_seconds

SCHEDULES = [("1f1b", 0), ("1f1b", 1), ("1f1b", 2), ("gpipe", 1)]


def scheduled(problem: StageProblem, name: str, warmup: tuple[int, ...]) -> StageProblem:
    flying = in_flight(name, problem.stages, problem.microbatches, warmup)
    return dataclasses.replace(problem, in_flight=flying)


@pytest.mark.parametrize(("name", "depth"), SCHEDULES)
@pytest.mark.parametrize("seed", range(25))
def test_no_division_that_fits_is_simulated_faster(seed: int, name: str, depth: int) -> None:
    """Whatever choices its stages make, and whatever of the sums of gradients their last backwards hide."""
    rng = Random(seed)
    n = rng.randint(1, 4)
    p = rng.randint(1, n)
    problem = rng.with_sums(random_chain(rng, n, p, rng.choice([1, 2, 4, 9])))
    warmup = deeper_warmup(p, depth) if name == "1f1b" else ()
    limits = tuple(dataclasses.replace(slot, capacity_bytes=rng.uniform(100, 1500)) for slot in problem.slots)
    problem = scheduled(dataclasses.replace(problem, slots=limits), name, warmup)
    try:
        floor = stages.least_seconds(problem)
    except InfeasibleError:
        floor = math.inf
    for boundaries in brute.divisions(problem, chain_edges(n)):
        way: Way = ()
        for step in steps(*boundaries):
            made = {part: rng.randrange(len(family)) for part, family in problem.units(step)}
            choices = tuple((block, choice) for part, choice in made.items() for block in part)
            way = (*way, dataclasses.replace(step, choices=choices))
            exposed = problem.exposed_step_end_seconds(way[-1])
            backward = sum(choice.backward_s for choice in problem.chosen(way[-1]))
            assert problem.step_end_seconds(step) - backward - 1e-12 <= exposed <= problem.step_end_seconds(step)
        seconds = simulated_seconds(problem, way, name, [0.0] * p, warmup, range(p)) * (1 + 1e-9)
        assert way_floor(problem, way) <= seconds
        if problem.excess_bytes(way) <= 0:
            assert floor <= seconds


@pytest.mark.parametrize(("name", "depth"), SCHEDULES)
@pytest.mark.parametrize("stages_", [2, 3, 5])
def test_no_way_to_share_the_work_is_simulated_faster(stages_: int, name: str, depth: int) -> None:
    """Stages of any seconds, forward and backward, without transfers."""
    rng = random.Random(stages_)
    edges = set(itertools.pairwise(range(stages_)))
    warmup = deeper_warmup(stages_, depth) if name == "1f1b" else ()
    for microbatches in (1, 2, 3, 4, 7, 16):
        flying = in_flight(name, stages_, microbatches, warmup)
        schedule = make_schedule(name, stages_, microbatches, edges, warmup=warmup)
        for spread in (0.01, 0.1, 1.0) * 8:
            times = [StageTimes(rng.uniform(1 - spread, 1), rng.uniform(1 - spread, 1) * 2) for _ in range(stages_)]
            work = sum(own.forward_s + own.backward_s for own in times)
            assert makespan(schedule, times) >= work * least_step(microbatches, flying) * (1 - 1e-9)


@pytest.mark.parametrize("microbatches", [2, 4, 5, 16])
@pytest.mark.parametrize("stages_", [1, 2, 4])
def test_closed_forms(stages_: int, microbatches: int) -> None:
    """(p + m - 1) / p of the work: of GPipe, and of 1F1B whose microbatches are more than its stages."""
    even = (stages_ + microbatches - 1) / stages_
    assert least_step(microbatches, (microbatches,) * stages_) == pytest.approx(even)
    flying = in_flight("1f1b", stages_, microbatches)
    if microbatches > stages_:
        assert least_step(microbatches, flying) == pytest.approx(even)
    else:
        assert least_step(microbatches, flying) < even * (1 + 1e-12)
    assert least_step(1, (1,) * stages_) == 1


def test_few_microbatches_allow_a_longer_first_stage() -> None:
    """With two of each, stages of 2 and 1 seconds take 4 seconds, and even ones 4.5."""
    schedule = make_schedule("1f1b", 2, 2, {(0, 1)})
    assert makespan(schedule, [StageTimes(1.0, 1.0), StageTimes(0.5, 0.5)]) == 4 == 3 * least_step(2, (2, 1))
    assert makespan(schedule, [StageTimes(0.75, 0.75)] * 2) == 4.5


def test_layers_that_run_again_are_in_the_floor() -> None:
    """The first stages recompute for memory: of the floor it is tight where they all have to."""
    layer = Block("layer", 1.0, 2.0, 10.0, 10.0, 0.0, others=(Choice(1.0, 3.0, 10.0, 1.0, 9.0),))
    plain = StageProblem.chain([layer] * 12, [Cut()] * 11, 8, (4, 3, 2, 1), (math.inf,) * 4)
    limited = dataclasses.replace(
        plain, slots=tuple(dataclasses.replace(slot, capacity_bytes=52.0) for slot in plain.slots)
    )
    assert stages.solve(plain).lower_bound_s == stages.solve(plain).objective == 11 * 9
    found = stages.solve(limited)
    seconds = simulated_seconds(limited, found.way, "1f1b", [0.0] * 4, (), range(4))
    # 3 layers: 30 + 4 (3 - k) 10 + 4 k + 9 <= 52 has no k but 3, and 30 + 2 (3 - k) 10 + 2 k + 9 needs k = 3 as well
    assert [len(step.choices) for step in found.way] == [3, 3, 3, 2]
    assert plain.objective(found.way) * 0.97 <= found.lower_bound_s <= seconds
