"""Optima by trying everything: what the solvers are held against in tests, on small instances."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from autopart.solver.stages_floor import way_floor
from autopart.solver.stages_problem import StageProblem, Step, Way
from autopart.solver.tensor_problem import TensorProblem


def best_choices(problem: TensorProblem) -> tuple[tuple[int, ...], float] | None:
    """The cheapest choice of strategies that fits and its seconds; None when there is none."""
    best: tuple[tuple[int, ...], float] | None = None
    for choices in itertools.product(*(range(len(op.choices)) for op in problem.ops)):
        if problem.fits(choices):
            seconds = problem.objective(choices)
            if seconds < (math.inf if best is None else best[1]):
                best = choices, seconds
    return best


def frontier(problem: TensorProblem) -> list[tuple[float, float]]:
    """Seconds and bytes of all undominated choices of strategies that fit, the fastest first."""
    points = sorted(
        (problem.objective(choices), problem.memory(choices))
        for choices in itertools.product(*(range(len(op.choices)) for op in problem.ops))
        if problem.fits(choices)
    )
    kept: list[tuple[float, float]] = []
    for seconds, memory in points:
        if seconds < math.inf and (not kept or memory < kept[-1][1]):
            kept.append((seconds, memory))
    return kept


def divisions(problem: StageProblem, edges: Sequence[tuple[int, int]]) -> Iterator[tuple[int, ...]]:
    """Every way to give each block a stage so that no stage is empty and none feeds an earlier one, as positions.

    edges: (block, block that depends on it). Positions are found by their sets of blocks; all have to be there.
    """
    index = {mask: position for position, mask in enumerate(problem.positions)}

    def assign(block: int, stage_of: list[int]) -> Iterator[list[int]]:
        if block == len(problem.blocks):
            if len(set(stage_of)) == problem.stages:
                yield stage_of
            return
        least = max((stage_of[source] for source, target in edges if target == block), default=0)
        for stage in range(least, problem.stages):
            yield from assign(block + 1, [*stage_of, stage])

    for stage_of in assign(0, []):
        sets = [sum(1 << b for b, at in enumerate(stage_of) if at < s) for s in range(problem.stages + 1)]
        yield tuple(index[mask] for mask in sets)


_Known = dict[tuple[int, int, int, int], Step]


def ways(problem: StageProblem, boundaries: Sequence[int], known: _Known) -> Iterator[Way]:
    """Every way with these positions: all rows of slots, and for each stage the choices that may be the best.

    Choices of a stage: of those that fit the fastest; where none fits, the one that exceeds its capacity least.
    known: those found before.
    """

    def place(stage: int, at: int, steps: Way) -> Iterator[Way]:
        if stage == problem.stages:
            if at in problem.ends:
                yield steps
            return
        for number, slot in enumerate(problem.slots):
            if slot.start == at:
                key = stage, number, boundaries[stage], boundaries[stage + 1]
                if key not in known:
                    known[key] = _best_step(problem, *key)
                yield from place(stage + 1, slot.stop, (*steps, known[key]))

    yield from place(0, 0, ())


def choices(problem: StageProblem, step: Step) -> Iterator[Step]:
    """Every way to run the blocks of a stage."""
    units = problem.units(step)
    for made in itertools.product(*(range(len(family)) for _, family in units)):
        own = [(block, choice) for (part, _), choice in zip(units, made, strict=True) for block in part]
        yield replace(step, choices=tuple(own))


def _best_step(problem: StageProblem, stage: int, slot: int, first: int, last: int) -> Step:
    tried = []
    for step in choices(problem, Step(slot, first, last)):
        over = problem.stage_bytes(stage, step) - problem.slots[slot].capacity_bytes
        tried.append((max(over, 0.0), problem.busy_seconds(step), step))
    return min(tried, key=lambda item: item[:2])[2]


def best_way(problem: StageProblem, edges: Sequence[tuple[int, int]]) -> tuple[Way, float] | None:
    """The division that fits with the shortest step, and its seconds; None when none fits."""
    best: tuple[Way, float] | None = None
    known: _Known = {}
    for boundaries in divisions(problem, edges):
        for way in ways(problem, boundaries, known):
            if problem.respects_pins(way) and problem.excess_bytes(way) <= 0:
                seconds = problem.objective(way)
                if seconds < (math.inf if best is None else best[1]):
                    best = way, seconds
    return best


def least_excess_bytes(problem: StageProblem, edges: Sequence[tuple[int, int]]) -> float:
    """By how many bytes the fullest stage exceeds its capacity in the best division; infinite without one."""
    known: _Known = {}
    return min(
        (
            problem.excess_bytes(way)
            for boundaries in divisions(problem, edges)
            for way in ways(problem, boundaries, known)
            if problem.respects_pins(way)
        ),
        default=math.inf,
    )


def lower_bound_seconds(problem: StageProblem, edges: Sequence[tuple[int, int]]) -> float:
    """Over all divisions that fit, the smallest of what each takes at least."""
    known: _Known = {}
    return min(
        way_floor(problem, way)
        for boundaries in divisions(problem, edges)
        for way in ways(problem, boundaries, known)
        if problem.respects_pins(way) and problem.excess_bytes(way) <= 0
    )
