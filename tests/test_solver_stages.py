"""The cut into stages against all cuts, its bounds, and how it fails."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random

import pytest

from autopart.runtime.errors import InfeasibleError, PlanError
from autopart.solver import brute, stages
from autopart.solver.stages_graph import StageGraph
from autopart.solver.stages_problem import Block, Cut, StageProblem, TiedGroup


def random_problem(rng: random.Random, n: int, p: int, microbatches: int, whole: bool = False) -> StageProblem:
    """Without limits on memory. whole: few distinct values, so that many cuts tie."""

    def seconds(scale: float) -> float:
        return rng.randint(0, 3) * scale if whole else rng.random() * scale

    blocks = tuple(
        Block(
            f"block{i}",
            seconds(1e-3),
            seconds(2e-3),
            float(rng.randint(1, 100)),
            float(rng.randint(1, 100)),
            float(rng.randint(1, 100)),
            seconds(4e-3),
        )
        for i in range(n)
    )
    cuts = tuple(Cut(seconds(5e-4), seconds(5e-4), float(rng.randint(0, 30))) for _ in range(n - 1))
    tied = tuple(
        TiedGroup(
            f"tied{i}",
            tuple(rng.sample(range(n), min(n, rng.randint(1, 3)))),
            rng.randint(1, 200),
            seconds(2e-3),
            seconds(1e-3),
        )
        for i in range(rng.randint(0, 2))
    )
    in_flight = tuple(min(microbatches, p - stage) for stage in range(p))
    return StageProblem(blocks, cuts, microbatches, in_flight, (math.inf,) * p, float(rng.randint(0, 9)), tied)


def limited(rng: random.Random, problem: StageProblem) -> StageProblem:
    """The same with capacities, mostly unequal, under which some or all cuts do not fit; at times pinned."""
    ways = list(brute.cuts(problem))
    first, last = rng.choice(ways)[0:2]
    base = problem.stage_bytes(0, first, last)
    capacity = [round(base * rng.choice([0.6, 1.0, 1.4])) for _ in range(problem.stages)]
    if rng.random() < 0.3:
        capacity = [capacity[0]] * problem.stages
    pins = None
    if rng.random() < 0.3:
        pins = tuple(cut if rng.random() < 0.4 else None for cut in rng.choice(ways)[1:-1])
    return dataclasses.replace(problem, capacity_bytes=tuple(map(float, capacity)), pins=pins)


def small_problem(seed: int) -> StageProblem:
    rng = random.Random(seed)
    n = rng.randint(1, 9)
    problem = random_problem(rng, n, rng.randint(1, min(n, 5)), rng.choice([1, 2, 4, 16]), whole=rng.random() < 0.4)
    return limited(rng, problem) if rng.random() < 0.7 else problem


def check_against_all_cuts(problem: StageProblem, max_programs: int) -> None:
    best = brute.best_boundaries(problem)
    if best is None:
        with pytest.raises(InfeasibleError):
            stages.solve(problem, max_programs=max_programs)
        return
    solution = stages.solve(problem, max_programs=max_programs)
    assert solution.objective == pytest.approx(best[1], rel=1e-9, abs=1e-15)
    assert solution.objective == problem.objective(solution.boundaries)
    assert solution.gap == 0
    assert solution.lower_bound_s == pytest.approx(brute.lower_bound_seconds(problem), rel=1e-9, abs=1e-15)
    assert solution.lower_bound_s <= solution.objective * (1 + 1e-9)
    assert problem.excess_bytes(solution.boundaries) <= 0 and problem.respects_pins(solution.boundaries)


@pytest.mark.parametrize("seed", range(400))
def test_equals_brute_force(seed: int) -> None:
    check_against_all_cuts(small_problem(seed), stages.MAX_PROGRAMS)


@pytest.mark.parametrize("seed", range(60))
def test_integer_model_equals_brute_force(seed: int) -> None:
    """With a single box, CP-SAT has to find and prove nearly everything."""
    check_against_all_cuts(small_problem(seed), 1)


def test_both_methods_are_reached() -> None:
    problem = random_problem(random.Random(1), 12, 4, 2)
    by_boxes, by_model = stages.solve(problem), stages.solve(problem, max_programs=1)
    assert (by_boxes.method, by_model.method) == ("dynamic program", "cp-sat")
    assert by_boxes.objective == pytest.approx(by_model.objective, rel=1e-9)
    assert by_model.programs == 1


@pytest.mark.parametrize("stage_count", [4, 16])
def test_repeated_layers_take_few_programs(stage_count: int) -> None:
    layer = (Block("attention", 4e-4, 8e-4, 40, 50, 20, 5e-4), Block("mlp", 6e-4, 12e-4, 80, 70, 20, 8e-4))
    ends = Block("embedding", 1e-4, 2e-4, 900, 10, 0, 3e-3), Block("head", 8e-4, 16e-4, 900, 100, 100, 3e-3)
    blocks = (ends[0], *(layer * 48), ends[1])
    cuts = tuple(Cut(1e-4, 1e-4, 5) for _ in blocks[1:])
    in_flight = tuple(stage_count - stage for stage in range(stage_count))
    tied = (TiedGroup("embedding", (0, len(blocks) - 1), 900, 1e-3),)
    problem = StageProblem(blocks, cuts, 32, in_flight, (math.inf,) * stage_count, 0.0, tied)
    solution = stages.solve(problem)
    assert solution.gap == 0 and solution.method == "dynamic program" and solution.programs <= 20


@pytest.mark.parametrize("seed", range(3))
def test_chains_too_long_to_enumerate_are_proved(seed: int) -> None:
    solution = stages.solve(random_problem(random.Random(seed), 60, 6, 4))
    assert solution.gap == 0
    least = random_problem(random.Random(seed), 60, 6, 4)
    total = sum(block.seconds for block in least.blocks)
    assert solution.lower_bound_s >= 4 * max(total / 6, max(block.seconds for block in least.blocks)) * (1 - 1e-9)


@pytest.mark.parametrize("seed", range(100))
def test_smallest_excess_equals_brute_force(seed: int) -> None:
    rng = random.Random(seed)
    problem = limited(rng, random_problem(rng, rng.randint(2, 8), 2, 4))
    tight = dataclasses.replace(problem, capacity_bytes=tuple(size / 4 for size in problem.capacity_bytes))
    least = brute.least_excess_bytes(tight)
    if least <= 0:
        assert tight.excess_bytes(stages.solve(tight).boundaries) <= 0
        return
    with pytest.raises(InfeasibleError, match=rf"\({least:.0f} bytes\) over its capacity"):
        stages.solve(tight)
    grown = tuple(size + least for size in tight.capacity_bytes)
    stages.solve(dataclasses.replace(tight, capacity_bytes=grown))
    with pytest.raises(InfeasibleError):
        stages.solve(dataclasses.replace(tight, capacity_bytes=tuple(size - 1 for size in grown)))


def chain(count: int, stage_count: int, **changes: object) -> StageProblem:
    """Equal blocks of a second forward and two backward, 10 bytes of state, 1 byte of activations."""
    blocks = tuple(Block(f"block{i}", 1.0, 2.0, 10.0, 1.0) for i in range(count))
    problem = StageProblem(blocks, (Cut(),) * (count - 1), 8, (1,) * stage_count, (math.inf,) * stage_count)
    return dataclasses.replace(problem, **changes)  # type: ignore[arg-type]


def test_closed_form_of_an_even_pipeline() -> None:
    """(p + m - 1) times a stage; the bound is that of 4, 3, 3 and 2 blocks, whose first stage is busy that long."""
    solution = stages.solve(chain(12, 4))
    assert solution.boundaries == (0, 3, 6, 9, 12)
    assert solution.objective == (4 + 8 - 1) * 9.0
    assert solution.lower_bound_s == 8 * 12.0


def test_one_stage_is_the_whole_chain() -> None:
    solution = stages.solve(chain(5, 1))
    assert solution.boundaries == (0, 5)
    assert solution.objective == solution.lower_bound_s == 8 * 15.0


def test_transfers_slow_the_stages_on_both_sides() -> None:
    problem = chain(4, 2, cuts=(Cut(), Cut(0.25, 0.25), Cut()))
    solution = stages.solve(problem)
    assert solution.boundaries == (0, 2, 4)
    assert solution.objective == 12 + 0.5 + 7 * (6 + 0.5)


def test_dear_cuts_are_avoided() -> None:
    assert stages.solve(chain(4, 2, cuts=(Cut(), Cut(50.0), Cut()))).boundaries in ((0, 1, 4), (0, 3, 4))


def test_tied_parameters_are_held_once_per_stage() -> None:
    tied = (TiedGroup("embedding", (0, 3), 100.0, 5.0),)
    problem = chain(4, 2, tied=tied, capacity_bytes=(122.0, 122.0))
    assert problem.stage_bytes(0, 0, 2) == 122 and problem.stage_bytes(0, 0, 4) == 144
    assert stages.solve(problem).objective == chain(4, 2).objective((0, 2, 4)) + 5.0


def test_pins_are_kept() -> None:
    assert stages.solve(chain(12, 4, pins=(1, None, 11))).boundaries == (0, 1, 6, 11, 12)


def test_pins_that_leave_no_blocks() -> None:
    with pytest.raises(InfeasibleError, match="pinned"):
        stages.solve(chain(4, 4, pins=(None, None, 2)))


def test_memory_names_the_stage_and_what_would_do() -> None:
    problem = chain(4, 2, in_flight=(3, 1), capacity_bytes=(25.0, 20.0))
    with pytest.raises(InfeasibleError, match=r"stage 1 \(block2 \.\. block3\) holds 22 B, 2 B .* Devices with 22 B"):
        stages.solve(dataclasses.replace(problem, capacity_bytes=(26.0, 20.0)))
    with pytest.raises(InfeasibleError, match=r"stage 0 \(block0\) holds 11 B, 6 B"):
        stages.solve(chain(1, 1, capacity_bytes=(5.0,), pins=()))


def test_more_stages_than_blocks() -> None:
    with pytest.raises(PlanError, match="at most 3 stages"):
        stages.solve(chain(3, 4))


def test_arcs_agree_with_the_problem() -> None:
    problem = dataclasses.replace(random_problem(random.Random(5), 7, 3, 4), capacity_bytes=(0.0,) * 3)
    graph = StageGraph.build(problem)
    for way in brute.cuts(problem):
        for stage, (first, last) in enumerate(itertools.pairwise(way)):
            assert graph.excess[stage, first, last] == pytest.approx(problem.stage_bytes(stage, first, last))
            assert graph.busy[first, last] == pytest.approx(problem.busy_seconds(first, last))
            assert graph.floor[first, last] == pytest.approx(problem.span_floor(first, last))


def test_problems_check_themselves() -> None:
    with pytest.raises(ValueError, match="finite and not negative"):
        Block("b", -1.0, 0.0)
    with pytest.raises(ValueError, match="cut positions"):
        chain(4, 2, cuts=(Cut(),))
    with pytest.raises(ValueError, match="rising"):
        chain(4, 3, pins=(3, 2))
    with pytest.raises(ValueError, match="beyond"):
        chain(4, 2, tied=(TiedGroup("t", (4,), 1.0),))
