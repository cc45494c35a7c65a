"""Divisions listed one by one: the least of their schedule's seconds, as simulating each of them says."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
from test_solver_stages import Edges, small_problem
from test_stages_floor import scheduled
from test_stages_trips import four_speeds, timed

from autopart.runtime.schedule import deeper_warmup
from autopart.solver import brute, stages, stages_listed
from autopart.solver.stages_graph import StageGraph
from autopart.solver.stages_listed import fastest_listed
from autopart.solver.stages_parts import Block, Choice
from autopart.solver.stages_problem import StageProblem, Way
from autopart.step_time import simulated_seconds


def without_choices(problem: StageProblem) -> StageProblem:
    """The same with the first way to run each block, no layers, and sums of gradients that hide behind nothing."""
    shapes = [
        dataclasses.replace(
            shape,
            blocks=tuple(dataclasses.replace(block, others=()) for block in shape.blocks),
            layers=(),
            sums=(),
        )
        for shape in problem.shapes
    ]
    return dataclasses.replace(problem, shapes=tuple(shapes))


def every(problem: StageProblem, edges: Edges, name: str) -> list[tuple[float, Way]]:
    """Seconds without tied gradients of all divisions that fit."""
    ways = (way for bounds in brute.divisions(problem, edges) for way in brute.ways(problem, bounds, {}))
    fitting = [way for way in ways if problem.respects_pins(way) and problem.excess_bytes(way) <= 0]
    return [(timed(problem, way, name) - problem.tied_seconds(way), way) for way in fitting]


@pytest.mark.parametrize("name", ["1f1b", "gpipe"])
@pytest.mark.parametrize("seed", range(60))
def test_the_least_of_all_divisions_is_found(seed: int, name: str) -> None:
    problem, edges = small_problem(seed, dag=seed % 2 == 0)
    problem = scheduled(without_choices(problem), name, ())
    found = every(problem, edges, name)
    if not found or problem.stages == 1:
        return
    least = min(seconds for seconds, _ in found)
    graph = StageGraph.build(problem)
    way, seconds = fastest_listed(graph, 1.01 * least) or (None, 0.0)
    assert way is not None and seconds == pytest.approx(least, rel=1e-9)
    assert timed(problem, way, name) - problem.tied_seconds(way) == pytest.approx(least, rel=1e-9)
    assert fastest_listed(graph, 0.999 * least) == (None, 0.999 * least)
    solved = stages.solve(problem, timed=lambda way: timed(problem, way, name))
    if not problem.shapes[0].tied:
        assert timed(problem, solved.way, name) == pytest.approx(least, rel=1e-9)


@pytest.mark.parametrize("depth", [1, 2])
def test_divisions_on_unlike_devices_are_the_best_there_are(depth: int) -> None:
    """Of all 1,771 cuts in this order of devices, which is the only one."""
    problem = four_speeds(2.0, 1.0, 4.0, 2.0, microbatches=8, sent=1.0)
    warmup = deeper_warmup(4, depth)
    problem = scheduled(problem, "1f1b", warmup)
    graph = StageGraph.build(problem)
    starts = [(0, *cuts, 24) for cuts in itertools.combinations(range(1, 24), 3)]
    steps = stages.solve(problem).way
    ways = [
        tuple(
            dataclasses.replace(step, first=first, last=last)
            for step, (first, last) in zip(steps, itertools.pairwise(cut), strict=True)
        )
        for cut in starts
    ]

    def seconds_of(way: Way) -> float:
        return simulated_seconds(problem, way, "1f1b", [0.0] * 4, warmup, range(4))

    least = min(map(seconds_of, ways))
    _, seconds = fastest_listed(graph, 2 * least) or (None, 0.0)
    solved = stages.solve(problem, timed=seconds_of)
    assert seconds == pytest.approx(least, rel=1e-9) == seconds_of(solved.way)
    assert solved.lower_bound_s == pytest.approx(least, rel=1e-9)


def test_what_is_too_much_to_list_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = four_speeds(1.0, 1.0, 1.0, 1.0)
    graph = StageGraph.build(problem)
    seconds = timed(problem, stages.solve(problem).way, "1f1b")
    assert fastest_listed(graph, 2 * seconds) is not None and fastest_listed(graph, math.inf) is None
    monkeypatch.setattr(stages_listed, "_MOST", 20)
    assert fastest_listed(graph, 2 * seconds) is None
    trading = tuple(Block(b.name, b.forward_s, b.backward_s, others=(Choice(2.0, 1.0),)) for b in problem.blocks)
    traded = problem.with_shape(0, dataclasses.replace(problem.shapes[0], blocks=trading))
    monkeypatch.undo()
    assert fastest_listed(StageGraph.build(traded), seconds) is None
