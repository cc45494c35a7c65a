"""The division into stages of small problems, worked out by hand, and how it fails."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence

import pytest
from test_solver_stages import Random, chain_edges, random_chain

from autopart.runtime.errors import InfeasibleError, PlanError
from autopart.solver import brute, stages
from autopart.solver.stages_graph import StageGraph
from autopart.solver.stages_order import positions
from autopart.solver.stages_parts import Block, Cut, TiedGroup
from autopart.solver.stages_problem import StageProblem, Step


def chain(
    count: int,
    stage_count: int,
    *,
    cuts: Sequence[Cut] | None = None,
    in_flight: Sequence[int] | None = None,
    capacity: Sequence[float] | None = None,
    tied: Sequence[TiedGroup] = (),
    pins: Sequence[tuple[int, int]] = (),
) -> StageProblem:
    """Equal blocks of a second forward and two backward, 10 bytes of state, 1 byte of activations."""
    return StageProblem.chain(
        [Block(f"block{i}", 1.0, 2.0, 10.0, 1.0) for i in range(count)],
        cuts or [Cut()] * (count - 1),
        8,
        in_flight or (1,) * stage_count,
        capacity or (math.inf,) * stage_count,
        tied=tied,
        pins=pins,
    )


def steps(*boundaries: int) -> tuple[Step, ...]:
    return tuple(Step(stage, *span) for stage, span in enumerate(itertools.pairwise(boundaries)))


def test_closed_form_of_an_even_pipeline() -> None:
    """(p + m - 1) times a stage, which the bound is as well."""
    problem = chain(12, 4, in_flight=(4, 3, 2, 1))
    solution = stages.solve(problem)
    assert problem.boundaries(solution.way) == (0, 3, 6, 9, 12)
    assert solution.objective == solution.lower_bound_s == (4 + 8 - 1) * 9.0


def test_one_stage_is_the_whole_chain() -> None:
    problem = chain(5, 1)
    solution = stages.solve(problem)
    assert problem.boundaries(solution.way) == (0, 5)
    assert solution.objective == solution.lower_bound_s == 8 * 15.0


def test_transfers_slow_the_stages_on_both_sides() -> None:
    problem = chain(4, 2, cuts=(Cut(), Cut(0.25, 0.25), Cut()))
    solution = stages.solve(problem)
    assert problem.boundaries(solution.way) == (0, 2, 4)
    assert solution.objective == 12 + 0.5 + 7 * (6 + 0.5)


def test_dear_cuts_are_avoided() -> None:
    problem = chain(4, 2, cuts=(Cut(), Cut(50.0), Cut()))
    assert problem.boundaries(stages.solve(problem).way) in ((0, 1, 4), (0, 3, 4))


def test_tied_parameters_are_held_once_per_stage() -> None:
    tied = (TiedGroup("embedding", (0, 3), 100.0, 5.0),)
    problem = chain(4, 2, tied=tied, capacity=(122.0, 122.0))
    assert problem.stage_bytes(0, Step(0, 0, 2)) == 122 and problem.stage_bytes(0, Step(0, 0, 4)) == 144
    assert stages.solve(problem).objective == chain(4, 2).objective(steps(0, 2, 4)) + 5.0


def test_pins_are_kept() -> None:
    problem = chain(12, 4, pins=((0, 0), (1, 1), (10, 2), (11, 3)))
    assert problem.boundaries(stages.solve(problem).way) == (0, 1, 6, 11, 12)


def test_pins_that_leave_no_blocks() -> None:
    with pytest.raises(InfeasibleError, match="pinned"):
        stages.solve(chain(4, 4, pins=((1, 2),)))


def test_memory_names_the_stage_and_what_would_do() -> None:
    with pytest.raises(
        InfeasibleError, match=r"stage 1 \(block2 \.\. block3\) holds 22 B, 2 B .* 2 B more on every device"
    ):
        stages.solve(chain(4, 2, in_flight=(3, 1), capacity=(26.0, 20.0)))
    with pytest.raises(InfeasibleError, match=r"stage 0 \(block0\) holds 11 B, 6 B"):
        stages.solve(chain(1, 1, capacity=(5.0,)))


def test_more_stages_than_blocks() -> None:
    with pytest.raises(PlanError, match="at most 3 stages"):
        stages.solve(chain(3, 4))


def test_arcs_agree_with_the_problem() -> None:
    problem = Random(5).with_sums(random_chain(Random(5), 7, 3, 4))
    problem = dataclasses.replace(
        problem,
        shapes=tuple(dataclasses.replace(shape, layers=()) for shape in problem.shapes),  # one choice for each block
        slots=tuple(dataclasses.replace(slot, capacity_bytes=0.0) for slot in problem.slots),
    )
    graph = StageGraph.build(problem)
    for boundaries in brute.divisions(problem, chain_edges(7)):
        for stage, step in enumerate(steps(*boundaries)):
            at = stage, graph.runs.number(step.first, step.last)
            assert graph.excess[at] == pytest.approx(problem.stage_bytes(stage, step))
            assert graph.busy[at] == pytest.approx(problem.busy_seconds(step))


def test_positions_of_a_chain_and_of_branches() -> None:
    assert positions(3, chain_edges(3)) == ((0b000, 0b001, 0b011, 0b111), True)
    branches = ((0, 1), (0, 2), (1, 3), (2, 3))
    assert positions(4, branches) == ((0, 0b0001, 0b0011, 0b0101, 0b0111, 0b1111), True)
    assert positions(4, branches, together=((0, 2),)) == ((0, 0b0101, 0b0111, 0b1111), True)
    wide = tuple((0, block) for block in range(1, 20))
    found, complete = positions(20, wide)
    assert not complete and {(1 << end) - 1 for end in range(21)} <= set(found)


def test_problems_check_themselves() -> None:
    with pytest.raises(ValueError, match="finite and not negative"):
        Block("b", -1.0, 0.0)
    with pytest.raises(ValueError, match="cut positions"):
        chain(4, 2, cuts=(Cut(),))
    with pytest.raises(ValueError, match="pins"):
        chain(4, 3, pins=((4, 0),))
    with pytest.raises(ValueError, match="beyond"):
        chain(4, 2, tied=(TiedGroup("t", (4,), 1.0),))
