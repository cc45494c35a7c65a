"""Floors under a step of a pipeline: never above what the simulator says of any division, and where they are it."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random

import pytest
from test_solver_stages import Random, chain_edges, random_chain
from test_solver_stages_cases import steps

from autopart.runtime.errors import InfeasibleError
from autopart.runtime.schedule import deeper_warmup, in_flight, make_schedule, places_of
from autopart.simulate import StageTimes, makespan
from autopart.solver import brute, stages
from autopart.solver.schedule_search import find_schedule
from autopart.solver.search_space import NotBetter
from autopart.solver.stages_floor import blocks_floor, least_step, way_floor
from autopart.solver.stages_least import least_share
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


@pytest.mark.parametrize("seed", range(30))
def test_blocks_that_cannot_be_cut_are_a_floor(seed: int) -> None:
    """Under every division and choice, whatever the order of the blocks."""
    rng = Random(300 + seed)
    n = rng.randint(2, 5)
    p = rng.randint(2, n)
    problem = random_chain(rng, n, p, rng.choice([1, 2, 4, 9]))
    for name in ("1f1b", "gpipe"):
        own = scheduled(problem, name, ())
        for boundaries in brute.divisions(own, chain_edges(n)):
            seconds = simulated_seconds(own, tuple(steps(*boundaries)), name, [0.0] * p, (), range(p))
            assert blocks_floor(own) <= seconds * (1 + 1e-9)


def test_one_block_that_is_slow_sets_the_pace() -> None:
    blocks = [Block(f"block{i}", 1.0, 2.0) for i in range(3)] + [Block("slow", 3.0, 6.0)]
    problem = StageProblem.chain(blocks, [Cut()] * 3, 40, (3, 2, 1), (math.inf,) * 3)
    found = stages.solve(problem)
    assert found.objective == 18 + 39 * 9
    assert 0.97 * found.objective <= blocks_floor(problem) <= found.objective


# --- Orders with W apart, or several stages on a rank ---

STEADY = [("2bw", 3, 1)]
ORDERS = [("interleaved", 2, 2), ("interleaved", 3, 2), ("interleaved", 2, 3), ("zb-h1", 3, 1), ("zb-v", 2, 2)]


@pytest.mark.parametrize(("name", "ranks", "virtual"), ORDERS)
def test_no_way_to_share_the_work_is_faster_in_these_orders(name: str, ranks: int, virtual: int) -> None:
    """Any seconds forward and backward, up to half of the backward left for W."""
    rng, count = random.Random(ranks), ranks * virtual
    places = places_of(name, count, virtual)
    for microbatches in (ranks, 2 * ranks, 4 * ranks):
        schedule = make_schedule(name, count, microbatches, set(itertools.pairwise(range(count))), places=places)
        assert least_share(name, places, microbatches, 1 / 3) > 1.005 * microbatches / ranks, "more than the work alone"
        for spread in (0.01, 0.3, 1.0) * 12:
            times = []
            for _ in range(count):
                backward = 2 * rng.uniform(1 - spread, 1)
                weight = backward * rng.uniform(0.5 - spread / 2, 0.5) if name.startswith("zb") else 0.0
                times.append(StageTimes(rng.uniform(1 - spread, 1), backward, weight))
            forward = sum(own.forward_s for own in times)
            work = forward + sum(own.backward_s for own in times)
            share = least_share(name, places, microbatches, forward / work)
            assert makespan(schedule, times) * (1 + 1e-9) >= work * share >= work * microbatches / ranks * (1 - 1e-6)


@pytest.mark.parametrize(("name", "ranks", "virtual"), ORDERS + STEADY)
@pytest.mark.parametrize("seed", range(12))
def test_no_division_that_fits_is_faster_in_these_orders(seed: int, name: str, ranks: int, virtual: int) -> None:
    """Than the bound of a division that is solved, and none is left out that takes less than what is of interest."""
    rng, count, m = Random(seed), ranks * virtual, ranks * (1 + seed % 3)
    places = places_of(name, count, virtual)
    problem = random_chain(rng, rng.randint(count, count + 2), count, m)
    limits = tuple(dataclasses.replace(slot, capacity_bytes=rng.uniform(100, 1500)) for slot in problem.slots)
    problem = dataclasses.replace(problem, slots=limits, in_flight=in_flight(name, count, m, (), places))
    found: list[float] = []
    for boundaries in brute.divisions(problem, chain_edges(len(problem.blocks))):
        for way in itertools.product(*(brute.choices(problem, step) for step in steps(*boundaries))):
            if problem.excess_bytes(way) <= 0:
                shares = [rng.uniform(0.0, 0.5) if name.startswith("zb") else 0.0 for _ in way]
                found.append(simulated_seconds(problem, way, name, shares, (), places))
    best = min(found, default=math.inf)

    steady = name == "2bw"

    def least(forward: float, work: float, below: float) -> float:
        return work * (m / ranks if steady else least_share(name, places, m, forward / work, below / work))

    try:
        solved = stages.solve(problem, least_step=least, steady=steady)
    except InfeasibleError:
        assert not found
        return
    assert 0 < solved.lower_bound_s <= best * (1 + 1e-9)
    assert stages.solve(problem, least_step=least, steady=steady, below=best * (1 + 1e-6)).lower_bound_s <= best * (
        1 + 1e-9
    )
    with pytest.raises(NotBetter) as stopped:
        # a hundredth less: bounds are of runs of blocks that may be of interest, which others are below other seconds
        stages.solve(problem, least_step=least, steady=steady, below=solved.lower_bound_s * 0.99)
    assert stopped.value.seconds <= best * (1 + 1e-9)


def test_zero_bubble_is_at_its_floor_with_equal_stages_and_interleaving_is_not() -> None:
    """With equal stages the first is within 1 % of the best; uneven ones beat the second's closed form."""
    edges = set(itertools.pairwise(range(4)))
    equal = makespan(make_schedule("zb-h1", 4, 8, edges), [StageTimes(1.0, 2.0, 1.0)] * 4) / 12
    assert equal * 0.99 <= least_share("zb-h1", range(4), 8, 1 / 3) <= equal == pytest.approx((8 + 3 / 3) / 4)
    places = places_of("interleaved", 4, 2)
    looped = make_schedule("interleaved", 4, 4, edges, places=places)
    equal = makespan(looped, [StageTimes(1.0, 2.0)] * 4) / 12
    assert equal == pytest.approx((4 + 1 / 2) / 2)
    assert 2 < least_share("interleaved", places, 4, 1 / 3) < 0.96 * equal


@pytest.mark.parametrize("seed", range(10))
def test_no_order_within_the_room_of_1f1b_is_faster(seed: int) -> None:
    """The floor of a division with its transfers, against the order that CP-SAT proves to be the best."""
    rng = Random(200 + seed)
    count, microbatches = rng.randint(2, 3), rng.randint(2, 4)
    blocks = [Block(f"block{i}", rng.randint(1, 6), rng.randint(1, 9)) for i in range(count)]
    cuts = [Cut(rng.randint(0, 9), rng.randint(0, 9)) for _ in range(count - 1)]
    held = in_flight("1f1b", count, microbatches)
    problem = StageProblem.chain(blocks, cuts, microbatches, held, (math.inf,) * count)
    way = tuple(steps(*range(count + 1)))
    transfers = {(index, index + 1): (cut.forward_s, cut.backward_s) for index, cut in enumerate(cuts)}
    times = [StageTimes(block.forward_s, block.backward_s) for block in blocks]
    found = find_schedule(times, microbatches, transfers, held)
    assert found.optimal and way_floor(problem, way, any_order=True) <= found.makespan_s * (1 + 1e-9)
    named = simulated_seconds(problem, way, "1f1b", [0.0] * count, (), range(count))
    assert way_floor(problem, way) <= named * (1 + 1e-9)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("seed", range(10))
def test_in_many_microbatches_the_floor_of_a_division_is_its_pace(seed: int, depth: int) -> None:
    """Whatever its stages and transfers take: the largest part that any two stages and those between wait for."""
    rng = Random(300 + seed)
    count, microbatches = rng.randint(2, 6), 400
    blocks = [Block(f"block{i}", rng.randint(1, 6), rng.randint(1, 9)) for i in range(count)]
    cuts = [Cut(rng.choice([0, 9]), rng.choice([0, 9])) for _ in range(count - 1)]
    warmup = deeper_warmup(count, depth)
    held = in_flight("1f1b", count, microbatches, warmup)
    problem = StageProblem.chain(blocks, cuts, microbatches, held, (math.inf,) * count)
    way = tuple(steps(*range(count + 1)))
    seconds = simulated_seconds(problem, way, "1f1b", [0.0] * count, warmup, range(count))
    assert 0.98 * seconds <= way_floor(problem, way) <= seconds * (1 + 1e-9)


def test_transfers_that_take_the_longest_are_the_floor() -> None:
    """Two stages with one microbatch on its way there and back at a time; and a cut that all have to pass."""
    blocks = [Block("first", 1.0, 1.0), Block("last", 1.0, 1.0)]
    alternating = StageProblem.chain(blocks, [Cut(10.0, 10.0)], 4, (2, 1), (math.inf,) * 2)
    way = tuple(steps(0, 1, 2))
    seconds = simulated_seconds(alternating, way, "1f1b", [0.0] * 2, (), range(2))
    assert 0.9 * seconds <= way_floor(alternating, way) <= seconds
    poured = dataclasses.replace(alternating, in_flight=(4, 4))
    seconds = simulated_seconds(poured, way, "gpipe", [0.0] * 2, (), range(2))
    assert 0.6 * seconds <= way_floor(poured, way) <= seconds
