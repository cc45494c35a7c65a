"""Divisions by their schedule's seconds: no worse than the formula's, and bounds that no division undercuts."""

from __future__ import annotations

import dataclasses
import math

import pytest
from test_alike_work import MODELS, analysis_of
from test_solver_stages import Edges, Random, chain_edges, random_chain, small_problem
from test_stages_floor import scheduled

from autopart.candidates import Candidates
from autopart.cluster import Cluster, Link
from autopart.cost.communication import send_seconds
from autopart.describe import describe
from autopart.runtime.errors import InfeasibleError
from autopart.solver import brute, stages
from autopart.solver.degrees import Degrees
from autopart.solver.stages_parts import Block, Cut, Shape
from autopart.solver.stages_problem import Slot, StageProblem, StageSolution, Way
from autopart.step_time import simulated_seconds
from clusters import ideal


def timed(problem: StageProblem, way: Way, name: str) -> float:
    return simulated_seconds(problem, way, name, [0.0] * problem.stages, (), range(problem.stages))


def compared(
    problem: StageProblem, edges: Edges, name: str
) -> tuple[StageSolution, StageSolution, list[tuple[Way, float]]]:
    """By the formula, and by the schedule's seconds, which take no more; and all that fit, with seconds."""
    plain = stages.solve(problem)
    found = stages.solve(problem, timed=lambda way: timed(problem, way, name))
    assert timed(problem, found.way, name) <= timed(problem, plain.way, name)
    assert found.lower_bound_s >= plain.lower_bound_s and problem.excess_bytes(found.way) <= 0
    every = (way for bounds in brute.divisions(problem, edges) for way in brute.ways(problem, bounds, {}))
    fitting = [way for way in every if problem.respects_pins(way) and problem.excess_bytes(way) <= 0]
    return plain, found, [(way, timed(problem, way, name)) for way in fitting]


@pytest.mark.parametrize("name", ["1f1b", "gpipe"])
@pytest.mark.parametrize("seed", range(60))
def test_no_division_takes_less_than_the_bound(seed: int, name: str) -> None:
    """Of all that fit, with all choices of their blocks; links between stages are of two kinds."""
    rng = Random(seed)
    n = rng.randint(2, 7)
    p, m = rng.randint(2, min(n, 4)), rng.choice([2, 4, 9, 16])
    problem = rng.with_sums(random_chain(rng, n, p, m))
    slower = tuple(
        dataclasses.replace(cut, forward_s=3 * cut.forward_s, backward_s=2 * cut.backward_s)
        for cut in problem.shapes[0].cuts[0]
    )
    shape = dataclasses.replace(problem.shapes[0], cuts=(problem.shapes[0].cuts[0], slower))
    limits = tuple(dataclasses.replace(slot, capacity_bytes=rng.uniform(100, 1500)) for slot in problem.slots)
    links = (0, *(rng.choice([0, 1]) for _ in range(p - 1)), 0)
    problem = dataclasses.replace(problem, slots=limits, shapes=(shape,), links=links)
    problem = scheduled(problem, name, ())
    try:
        plain, found, every = compared(problem, chain_edges(n), name)
    except InfeasibleError:
        return
    assert found.objective == problem.objective(found.way) and found.bound == plain.bound
    for way, seconds in every:
        assert found.lower_bound_s <= (seconds - problem.tied_seconds(way)) * (1 + 1e-9)
    assert min(seconds for _, seconds in every) <= timed(problem, found.way, name) * (1 + 1e-9)


@pytest.mark.parametrize("name", ["1f1b", "gpipe"])
@pytest.mark.parametrize("seed", range(60))
def test_no_division_on_unlike_devices_takes_less_than_the_bounds(seed: int, name: str) -> None:
    """Of a graph, on runs of devices with shapes of their own, under memory limits and with pins."""
    problem, edges = small_problem(seed, dag=True)
    problem = scheduled(problem, name, ())
    try:
        _, found, every = compared(problem, edges, name)
    except InfeasibleError:
        return
    raised = stages.least_seconds(problem, timed(problem, found.way, name))
    assert raised >= stages.least_seconds(problem)
    for way, seconds in every:
        assert max(raised, found.lower_bound_s) <= (seconds - problem.tied_seconds(way)) * (1 + 1e-9)


def four_speeds(*speeds: float, microbatches: int = 4, sent: float = 3.0) -> StageProblem:
    """24 equal blocks on four devices in a row, which take so many times as long."""
    shapes = tuple(
        Shape(
            tuple(Block(f"block {number}", speed, 2 * speed) for number in range(24)),
            ((Cut(), *(Cut(sent, sent),) * 23, Cut()),),
        )
        for speed in speeds
    )
    slots = tuple(Slot(place, place + 1, place, math.inf) for place in range(4))
    return StageProblem(
        shapes, tuple((1 << n) - 1 for n in range(25)), slots, (0,) * 5, (4,), microbatches, (4, 3, 2, 1)
    )


def test_bounds_on_unlike_devices_are_near() -> None:
    problem = four_speeds(2.0, 1.0, 4.0, 2.0, microbatches=8, sent=1.0)
    found = stages.solve(problem, timed=lambda way: timed(problem, way, "1f1b"))
    seconds = timed(problem, found.way, "1f1b")
    assert stages.least_seconds(problem) < 0.97 * seconds
    assert 0.99 * seconds <= stages.least_seconds(problem, seconds) <= seconds


def test_divisions_on_unlike_devices_follow_the_schedule() -> None:
    problem = four_speeds(2.0, 1.0, 2.0, 4.0)
    plain, found = stages.solve(problem), stages.solve(problem, timed=lambda way: timed(problem, way, "1f1b"))
    assert timed(problem, plain.way, "1f1b") > 1.1 * timed(problem, found.way, "1f1b")


def test_transfers_that_pass_beside_work_cost_no_layers() -> None:
    """The formula has the stage in the middle send and receive twice as much as the others, one after the other."""
    blocks = [Block(f"block {number}", 1.0, 2.0) for number in range(12)]
    problem = StageProblem.chain(blocks, (Cut(2.0, 2.0),) * 11, 32, (3, 2, 1), (math.inf,) * 3)
    plain = stages.solve(problem)
    found = stages.solve(problem, timed=lambda way: timed(problem, way, "1f1b"))
    assert problem.boundaries(plain.way) == (0, 4, 7, 12) and problem.boundaries(found.way) == (0, 4, 8, 12)
    assert timed(problem, plain.way, "1f1b") == 509 and timed(problem, found.way, "1f1b") == 496
    assert found.lower_bound_s == plain.lower_bound_s == 496


def test_stages_between_slow_links_get_fewer_layers() -> None:
    """Of stages two to a node, those on either side of a link wait for each other; the first and the last are free."""
    blocks = [Block(f"block {number}", 1.0, 2.0) for number in range(26)]
    problem = StageProblem.chain(blocks, (Cut(0.0, 0.0),) * 25, 128, (4, 3, 2, 1), (math.inf,) * 4)
    shape = dataclasses.replace(problem.shapes[0], cuts=((Cut(),) * 27, (Cut(), *(Cut(3.0, 3.0),) * 25, Cut())))
    problem = dataclasses.replace(problem, shapes=(shape,), links=(0, 0, 1, 0, 0))
    found = stages.solve(problem, timed=lambda way: timed(problem, way, "1f1b"))
    _, first, _, last, _ = problem.boundaries(found.way)
    assert (first, last) == (7, 19)
    seconds = timed(problem, found.way, "1f1b")
    assert seconds * 0.995 <= found.lower_bound_s <= seconds


def test_transfers_take_what_the_link_of_their_stages_takes() -> None:
    """Two stages on each of two nodes: one cut of three is between nodes."""
    (node,) = ideal(2, bandwidth=1e9).nodes
    cluster = Cluster((dataclasses.replace(node, port=Link("slow", 1e8, 0.0)),) * 2)
    candidates = Candidates(analysis_of(MODELS[0]), cluster, 16, "adamw", zero=0)
    config = Degrees(4, 1, (), 8, "1f1b")
    evaluation = candidates.evaluate(config)
    answer, links = evaluation.answer, [candidates.layout.stage_link(config, stage, stage + 1) for stage in range(3)]
    assert links[0] == links[2] != links[1]
    plan = describe(candidates, answer)
    assert plan.step_time_s == pytest.approx(evaluation.objective, rel=1e-3)
    for (first, second), link, (source, target, there, _) in zip(
        zip(answer.cut.way, answer.cut.way[1:], strict=False), links, plan.transfers, strict=True
    ):
        (cut, _) = answer.problem.crossings(first, second)
        assert target == source + 1 and cut.forward_s == pytest.approx(there)
        assert there == send_seconds(cut.before_bytes / 2, link)  # two gradients, each as large as what was sent
