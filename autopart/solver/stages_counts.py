r"""Of how many stages divisions may take no more than a given time, for all numbers of stages at once.

Where all that stages need is seconds, what a stage takes does not depend on how many there are, and under 1F1B and
GPipe neither does how many microbatches it holds, counted from the last stage. With nodes (i, a), a place in the row of
devices and a position among the blocks, and arcs (i, a) -> (j, b), a slot and a run of blocks, that take t seconds a
microbatch and x on the crossing behind them, a step of T seconds has for its r-th stage from the end
(:mod:`autopart.solver.stages_floor`)

    T >= max(end + forward[i, a], before[i, a]) + body_r(t, R[r - 1, j, b] + x)

with what lies before a node at its least over any number of stages, and

    R[r, i, a] = min over arcs that T allows of  t + x + R[r - 1, j, b]                    R[0]: 0 at the end of all

Where R[r] is finite at the beginning, r stages may take T; where it is not, none of r stages do.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from autopart.solver.stages_floor import Ways, body_seconds
from autopart.solver.stages_graph import RunCosts, all_runs, fast_enough, least_amounts
from autopart.solver.stages_problem import StageProblem
from autopart.solver.stages_runs import Array, Numbers, Runs


def possible_counts(problem: StageProblem, seconds: float) -> frozenset[int]:
    """Numbers of stages, up to the problem's, of which some division may take no more than so many seconds.

    Memory, tied gradients and what only pairs of stages say are left out; so have to be pins. Of p stages the last p
    numbers of microbatches in flight count.
    """
    if problem.pins:
        raise ValueError("pins name stages of a given number of these")
    arcs = _Arcs.of(problem, seconds)
    if not len(arcs.runs):
        return frozenset()
    m, flying = problem.microbatches, problem.in_flight
    behind, ways, found = arcs.end, Ways(flying, arcs.runs), set[int]()
    for stage in reversed(range(problem.stages)):
        after = behind[arcs.runs.last] + arcs.crossed
        possible = np.isfinite(after)
        body = body_seconds(
            *(m, flying[stage], flying[-1] >= m, arcs.seconds, arcs.forward, arcs.backward),
            *(np.where(possible, after, 0.0), arcs.sent, ways.of(stage, arcs.crossed)),
        )
        usable = np.where(possible & (body + arcs.around <= seconds), arcs.seconds, np.inf)
        ways.add(stage, usable[None], arcs.crossed[None])
        behind = arcs.runs.least_from(usable + after)
        if math.isfinite(behind[0]):
            found.add(problem.stages - stage)
        if not np.isfinite(behind).any():
            break
    return frozenset(found)


@dataclass(frozen=True, slots=True)
class _Arcs:
    """A slot and a run each, of those that a stage may have in a step of some seconds.

    runs: from node to node, of which the first is the beginning. seconds, forward, backward: of a microbatch, the two
    at least; crossed, sent: of the crossing behind, there and back, and the longer of the two. around: before and after
    a stage's own work. end: by node 0 at the end of all, else infinite.
    """

    runs: Runs
    seconds: Array
    forward: Array
    backward: Array
    crossed: Array
    sent: Array
    around: Array
    end: Array

    @staticmethod
    def of(problem: StageProblem, seconds: float) -> _Arcs:
        size, nodes = len(problem.positions), len(problem.links) * len(problem.positions)
        member, runs = all_runs(problem.positions, len(problem.blocks))
        runs = fast_enough(problem, member, runs, seconds / problem.microbatches)
        least = [runs.between(least_amounts(problem, member, name)) for name in ("forward_s", "backward_s")]
        parts = []
        for number, shape in enumerate(problem.shapes):
            costs = RunCosts.of(shape, member, runs, late=True)
            own = np.array([costs.fastest, *(amounts[number] for amounts in least), costs.exposed])
            parts.append(_of_shape(problem, number, runs, own, seconds / problem.microbatches))
        first, last = (np.concatenate([part[end] for part in parts]).astype(np.intp) for end in (0, 1))
        order = np.lexsort((first, last))
        arcs = Runs(nodes, first[order], last[order])
        amounts = np.concatenate([part[2] for part in parts], axis=1)[:, order]
        own, forward, _, exposed, there, back = amounts
        # the first stage's end comes after all
        taken = own + there + back + np.where(arcs.first == 0, exposed, 0.0)
        around = np.maximum(exposed + arcs.shortest(forward + there)[arcs.first], arcs.shortest(taken)[arcs.first])
        wanted = around + problem.microbatches * own <= seconds
        own, forward, backward, _, there, back = amounts[:, wanted]
        end = np.full(nodes, np.inf)
        end[[place * size + size - 1 for place in problem.ends]] = 0.0
        return _Arcs(
            *(arcs.where(wanted), own, forward, backward, there + back, np.maximum(there, back), around[wanted], end)
        )


def _of_shape(
    problem: StageProblem, number: int, runs: Runs, own: Array, most_seconds: float
) -> tuple[Numbers, Numbers, Array]:
    """Nodes before and behind the arcs of a shape, and [6, arc] seconds: ``own``, there and back.

    own: [4, run] of a microbatch, forward and backward at least, and at the end of a step. most_seconds: of a
    microbatch.
    """
    shape, size = problem.shapes[number], len(problem.positions)
    slots = [slot for slot in problem.slots if slot.shape == number]
    start, stop = (np.array([getattr(slot, end) for slot in slots], dtype=np.intp) for end in ("start", "stop"))
    # the first stage has the first blocks, and what has the last ones is the last
    starts = (runs.first == 0)[None] == (start == 0)[:, None]
    stops = (runs.last < size - 1)[None] | np.isin(stop, problem.ends)[:, None]
    slot, run = np.nonzero(starts & stops & (own[0] <= most_seconds))
    links, last = np.array(problem.links)[stop[slot]], runs.last[run]
    sides = [
        np.array([[getattr(cut, name) for cut in cuts] for cuts in shape.cuts])[links, last]
        for name in ("forward_s", "backward_s")
    ]
    return start[slot] * size + runs.first[run], stop[slot] * size + last, np.array([*own[:, run], *sides])
