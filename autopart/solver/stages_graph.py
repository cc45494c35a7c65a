"""All runs of blocks that one stage can have, as arrays, and dynamic programs over them.

Everything is indexed [first, last] for the run of blocks first .. last - 1, and [stage, first, last] where the stage's
position matters; a way from 0 to n with one arc per stage is a cut into stages. n <= 200 blocks and 64 stages make 2.6
million arcs, one pass over which takes some milliseconds.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopart.solver.stages_problem import StageProblem

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class StageGraph:
    """The arcs of a problem.

    busy, step_end: seconds of a stage, [first, last]. once: seconds that are added up over stages: the crossing of the
    cut after it, and the tied groups that begin in it and end behind it. floor: see StageProblem.span_floor.
    excess: bytes over the capacity, [stage, first, last]; infinite for arcs that no cut into stages has.
    """

    busy: Array
    step_end: Array
    once: Array
    floor: Array
    excess: Array

    @staticmethod
    def build(problem: StageProblem) -> StageGraph:
        n = len(problem.blocks)
        first, last = np.arange(n + 1)[:, None], np.arange(n + 1)[None, :]
        is_run = first < last
        blocks, ends = problem.blocks, [problem.cut_at(position) for position in range(n + 1)]
        forward = _prefix([block.forward_s for block in blocks])
        compute = _prefix([block.seconds for block in blocks])
        crossing = np.array([cut.seconds for cut in ends])
        busy = _runs(compute) + crossing[:, None] + crossing[None, :]
        step_end = _runs(_prefix([block.step_end_s for block in blocks]))
        once = np.broadcast_to(crossing[None, :], (n + 1, n + 1)).copy()
        held = _runs(_prefix([block.state_bytes for block in blocks])) + _running_max(problem)
        for group in problem.tied:
            begin, end = min(group.blocks), max(group.blocks)
            once += group.seconds * ((first <= begin) & (begin < last) & (last <= end))
            present = _prefix([float(block in group.blocks) for block in range(n)])
            held += group.bytes * (_runs(present) > 0)
            step_end += group.step_end_s * (_runs(present) > 0)
        buffers = np.array([cut.buffer_bytes for cut in ends])
        held += problem.overhead_bytes + buffers[:, None] + buffers[None, :]

        ready = forward[:-1, None]
        done = np.full((n + 1, n + 1), np.inf)
        done[:-1] = ready + problem.microbatches * _runs(compute)[:-1]
        way_back = compute - forward
        way_back[1:] += blocks[0].step_end_s
        floor = done + np.maximum(step_end, way_back[:, None])

        activations = _runs(_prefix([block.activation_bytes for block in blocks]))
        excess = np.stack(
            [
                np.where(is_run & _reachable(problem, stage), held + flight * activations - capacity, np.inf)
                for stage, (flight, capacity) in enumerate(zip(problem.in_flight, problem.capacity_bytes, strict=True))
            ]
        )
        return StageGraph(busy, step_end, once, floor, excess)

    @property
    def fits(self) -> NDArray[np.bool_]:
        """Whether an arc can be used, [stage, first, last]."""
        return self.excess <= 0


def cheapest(arcs: Array) -> tuple[float, tuple[int, ...]] | None:
    """The way with the smallest sum of ``arcs`` [stage, first, last], and its boundaries; None without a way."""
    return _best_way(arcs, np.add)


def smallest_maximum(arcs: Array) -> tuple[float, tuple[int, ...]] | None:
    """The way whose largest arc is smallest, and its boundaries; None without a way."""
    return _best_way(arcs, np.maximum)


def sums_through(arcs: Array) -> Array:
    """For each arc the smallest sum of a way that uses it, [stage, first, last]."""
    stages, size, _ = arcs.shape
    to, after = np.full((stages + 1, size), np.inf), np.full((stages + 1, size), np.inf)
    to[0, 0], after[stages, -1] = 0.0, 0.0
    for stage in range(stages):
        to[stage + 1] = (to[stage][:, None] + arcs[stage]).min(axis=0)
    for stage in reversed(range(stages)):
        after[stage] = (arcs[stage] + after[stage + 1][None, :]).min(axis=1)
    return to[:-1, :, None] + arcs + after[1:, None, :]


def _best_way(arcs: Array, combine: np.ufunc) -> tuple[float, tuple[int, ...]] | None:
    """best[s + 1, last] = min over first of combine(best[s, first], arcs[s, first, last])."""
    stages, size, _ = arcs.shape
    best = np.full(size, np.inf)
    best[0] = -np.inf if combine is np.maximum else 0.0
    came_from = np.zeros((stages, size), dtype=np.intp)
    for stage in range(stages):
        ways = combine(best[:, None], arcs[stage])
        came_from[stage] = ways.argmin(axis=0)
        best = np.take_along_axis(ways, came_from[stage][None, :], axis=0)[0]
    if not np.isfinite(best[-1]):
        return None
    boundaries = [size - 1]
    for stage in reversed(range(stages)):
        boundaries.append(int(came_from[stage, boundaries[-1]]))
    return float(best[-1]), tuple(reversed(boundaries))


def _prefix(values: list[float]) -> Array:
    return np.concatenate([[0.0], np.cumsum(values)])


def _runs(prefix: Array) -> Array:
    return prefix[None, :] - prefix[:, None]


def _running_max(problem: StageProblem) -> Array:
    n = len(problem.blocks)
    peak = np.zeros((n + 1, n + 1))
    for first in range(n):
        peak[first, first + 1 :] = np.maximum.accumulate([block.transient_bytes for block in problem.blocks[first:]])
    return peak


def _reachable(problem: StageProblem, stage: int) -> NDArray[np.bool_]:
    """Runs that leave a block for each other stage and begin and end at the pins."""
    n, stages = len(problem.blocks), problem.stages
    pins = (0, *(problem.pins or (None,) * (stages - 1)), n)
    positions = np.arange(n + 1)
    starts = (positions >= stage) & (positions <= n - (stages - stage))
    stops = (positions >= stage + 1) & (positions <= n - (stages - stage - 1))
    if pins[stage] is not None:
        starts &= positions == pins[stage]
    if pins[stage + 1] is not None:
        stops &= positions == pins[stage + 1]
    return starts[:, None] & stops[None, :]
