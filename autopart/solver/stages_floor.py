r"""Seconds that a step takes at least under 1F1B and GPipe, whatever waiting the stage solver's formula charges.

Stage k runs a microbatch in F_k seconds forward and B_k backward, t_k = F_k + B_k, and holds w_k of the m microbatches
at once: it begins with w_k forwards, goes on with a backward and a forward in turn, and ends with w_k backwards. With
t_{<k} the seconds of all stages before and t_{>k} of those behind, each with one microbatch's transfers there and back
on the cuts before k or behind it, a step of T seconds has, for every k:

(1) The first forward waits for F_{<k}; m microbatches follow, and the last one goes back through B_{<k}:

        T >= t_{<k} + m t_k

(2) Where w_k < m, the first backward waits until the first microbatch is through all stages behind. From then on
    m - w_k backwards and as many forwards follow up to the end of the last forward, whose microbatch goes through all
    stages behind as well, and then back:

        T >= t_{<k} + t_k + 2 t_{>k} + (m - w_k) t_k

(3) The forward of microbatch j + w_k waits for the backward of j, which has been through all stages behind. So do
    n = ceil(m / w_k) microbatches one after the other, and r - 1 = m - 1 - (n - 1) w_k others follow the last of them:

        T >= t_{<k} + n (t_k + t_{>k}) + (r - 1) max(F_k, B_k)

(4) Where the last stage holds all m (GPipe), no backward begins anywhere before all forwards are through all stages,
    F_{<=k} + (m - 1) F_k + F_{>k}; the first needs B_{>k} to come back and m - 1 others follow:

        T >= t_{<k} + m t_k + t_{>k}

(5) Transfers of one cut follow each other. With x the longer one of there and back on the cut behind k:

        T >= t_{<k} + t_k + t_{>k} + (m - 1) x

All of this holds for any order of a stage's work with no more microbatches in flight. In 1F1B's own

(6) neighbours wait for each other: after the forward of microbatch i stage l >= k runs the backward of i - w_l + 1, and
    stage k after the backward of j the forward of j + w_k. So where w_k < m, a forward of k leads through the stages up
    to l and back, S = t_{k..l} with their transfers, to that of c = w_k - w_l + 1 microbatches later. The first
    backward is behind a round trip, n = floor((m - 1 - w_k) / c) such ways follow, and each of the forwards left
    follows a backward:

        T >= t_{<k} + 2 (t_k + t_{>k}) + n S + (m - 1 - w_k - n c) t_k

    In many microbatches the pace is the largest S / c, as all cycles of waiting are such ways. In (3) t_k stands for
    max(F_k, B_k) likewise.

What follows T's part up to the last backward's end on stage k is its own step end, if that is longer than the way back.

:func:`least_step` takes (1), (2), (4) and of (3) the case w_k = m, without transfers, over all divisions of W = sum of
t_k: with X = T - W and R_k = t_{>k} they say

    (1) t_k <= (X + R_k) / (m - 1)    (2) t_k <= (X - R_k) / (m - w_k)
    (3) t_k <= 2 X / (m - 1)          (4) t_k <= X / (m - 1)

The least of these bounds makes R_{k-1} = R_k + t_k a rising function of R_k (of slope at least 1 - 1 / (m - w_k)), so
that the most work that X allows is found from the last stage on, and is r X for some r: W <= r X, T >= W (1 + 1/r). For
1F1B of more than p microbatches, and for GPipe, every t_k is X / (m - 1): T >= W (m + p - 1) / p, their closed form.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from autopart.solver.stages_runs import Runs

if TYPE_CHECKING:
    from autopart.solver.stages_problem import StageProblem, Way

Array = NDArray[np.float64]


def least_step(microbatches: int, in_flight: tuple[int, ...]) -> float:
    """Seconds of a step for each second that one microbatch takes through all stages, however these are divided."""
    return 1.0 if microbatches == 1 else 1.0 + 1.0 / most_behind(microbatches, in_flight)[0]


@functools.lru_cache(maxsize=4096)
def most_behind(microbatches: int, in_flight: tuple[int, ...]) -> tuple[float, ...]:
    """The most work from each stage on, and behind the last, for each second that a step takes beyond one microbatch's.

    Of several microbatches.
    """
    found, drained = [0.0], in_flight[-1] >= microbatches
    for held in reversed(in_flight):
        most = found[-1]
        here = (1.0 + most) / (microbatches - 1)
        if held < microbatches:
            here = min(here, max(0.0, 1.0 - most) / (microbatches - held))
        else:
            here = min(here, (1.0 if drained else 2.0) / (microbatches - 1))
        found.append(most + here)
    return tuple(reversed(found))


def body_seconds(
    microbatches: int,
    held: int,
    drained: bool,
    seconds: Array | float,
    forward: Array | float,
    backward: Array | float,
    behind: Array | float,
    sent: Array | float,
    ways: Sequence[tuple[int, Array | float]] | None,
) -> Array:
    """From the start of a stage's first forward to the end of its last backward, at least; see the module.

    held: microbatches in flight. drained: the last stage holds all. seconds, forward, backward: of the stage, the two
    at least; behind: of the stages behind, with all transfers there and back. sent: of the longer of the two on the cut
    behind the stage. ways: of (6), up to some stage behind and back: how many microbatches later they lead to, and
    their seconds without the stage's own; None: of any order of work.
    """
    held = min(max(held, 1), microbatches)
    found = np.asarray(microbatches * seconds + (behind if drained else 0.0))
    follow = np.maximum(forward, backward)
    if held < microbatches:
        left = microbatches - 1 - held
        follow = follow if ways is None else seconds
        # one microbatch later: from the stage to itself
        for later, others in ((1, 0.0), *(way for way in ways or () if way[0] <= left)):
            own = 2 + left // later + left % later
            found = np.maximum(found, own * seconds + 2 * behind + left // later * others)
    rounds = -(-microbatches // held)
    others = microbatches - 1 - (rounds - 1) * held
    found = np.maximum(found, rounds * (seconds + behind) + (others * follow if others else 0.0))
    return np.maximum(found, seconds + behind + (microbatches - 1) * sent)


def blocks_floor(problem: StageProblem) -> float:
    """Seconds that every division takes at least, whatever its positions: blocks cannot be cut.

    Of the j p + 1 slowest blocks some stage has j + 1, so its seconds t are at least those of the j + 1 fastest among
    them. With W the seconds of all blocks and R = t_{>k}, (1) and (2) say T >= W - R + (m - 1) t and T >= W + R +
    (m - w_k) t: for any R no less than W + (m - (w_k + 1) / 2) t.
    """
    choices = [
        [choice.seconds for shape in problem.shapes for choice in shape.blocks[i].choices]
        for i in range(len(problem.blocks))
    ]
    slowest, p, m = sorted((min(own) for own in choices), reverse=True), problem.stages, problem.microbatches
    work = math.fsum(slowest)
    most = max(math.fsum(slowest[j * p - j : j * p + 1]) for j in range((len(slowest) - 1) // p + 1))
    if problem.in_flight[-1] >= m:
        return work + (m - 1) * most
    found = math.inf
    for in_flight in problem.in_flight:
        held = min(max(in_flight, 1), m)
        behind = min((held - 1) * most / 2, work - most)
        own = work - behind + (m - 1) * most
        if held == m:
            own = max(m * most, work + (m - 1) * most / 2)
        found = min(found, own)
    return found


def way_floor(problem: StageProblem, way: Way, *, any_order: bool = False) -> float:
    """Seconds that a division takes at least with the choices that its stages have made.

    any_order: of a stage's work, with no more microbatches in flight; else 1F1B's and GPipe's.
    """
    chosen = [problem.chosen(step) for step in way]
    forward = [math.fsum(choice.forward_s for choice in own) for own in chosen]
    backward = [math.fsum(choice.backward_s for choice in own) for own in chosen]
    total = [math.fsum(pair) for pair in zip(forward, backward, strict=True)]
    crossed = [problem.crossings(before, after) for before, after in itertools.pairwise(way)]
    there = [*(max(cut.forward_s for cut in cuts) for cuts in crossed), 0.0]
    back = [*(max(cut.backward_s for cut in cuts) for cuts in crossed), 0.0]
    flying, drained = problem.in_flight, problem.in_flight[-1] >= problem.microbatches
    floor = 0.0
    for stage, step in enumerate(way):
        behind = math.fsum((*total[stage + 1 :], *there[stage:], *back[stage:]))
        ways = [
            (
                flying[stage] - flying[last] + 1,
                math.fsum((*total[stage + 1 : last + 1], *there[stage:last], *back[stage:last])),
            )
            for last in range(stage + 1, len(way))
            if flying[last] <= flying[stage]
        ]
        body = float(
            body_seconds(
                *(problem.microbatches, problem.in_flight[stage], drained),
                *(total[stage], forward[stage], backward[stage], behind, max(there[stage], back[stage])),
                ways=None if any_order else ways,
            )
        )
        came = math.fsum((*forward[:stage], *there[:stage]))
        gone = math.fsum((*backward[:stage], *back[:stage]))
        end = max(problem.exposed_step_end_seconds(step), gone + problem.exposed_step_end_seconds(way[0]))
        floor = max(floor, came + body + end)
    return floor


def arc_floors(
    problem: StageProblem,
    member: NDArray[np.bool_],
    runs: Runs,
    stage_of: Sequence[int],
    seconds: Array,
    fits: NDArray[np.bool_],
    fastest: Sequence[Array],
    exposed: Sequence[Array],
    there: Array,
    back: Array,
) -> Array:
    """The same of every arc [table, run], over all ways that go through it.

    member: [position, block]. stage_of: by table. seconds: of an arc's blocks, at least; fits: where it can be used.
    fastest, exposed: by table, seconds of the blocks of a run at their fastest, and of its step end without what these
    may hide of sums of gradients. Slower choices hide no more than they take longer. there, back: [table, position]
    seconds of a microbatch's transfers, as the stage that ends there has them, which are no more than both sides'.
    """
    blocks = range(member.shape[1])
    forward = member @ np.array([problem.least(block, "forward_s") for block in blocks])
    backward = member @ np.array([problem.least(block, "backward_s") for block in blocks])
    source = source_ends(problem, member)
    crossed = (there + back)[:, runs.last]
    usable = np.where(fits, seconds, np.inf)
    before, behind = least_through(runs, problem.stages, stage_of, usable + crossed)
    ways = Ways(problem.in_flight, runs)
    for stage in reversed(range(problem.stages)):
        tables = [table for table, at in enumerate(stage_of) if at == stage]
        ways.add(stage, usable[tables], crossed[tables])
    drained = problem.in_flight[-1] >= problem.microbatches
    found = np.empty(seconds.shape)
    for table, stage in enumerate(stage_of):
        body = body_seconds(
            *(problem.microbatches, problem.in_flight[stage], drained, seconds[table]),
            *(runs.between(forward), runs.between(backward), behind[stage + 1][runs.last] + crossed[table]),
            np.maximum(there, back)[table, runs.last],
            ways.of(stage, crossed[table]),
        )
        own = forward[runs.first] + body - (seconds[table] - fastest[table]) + exposed[table]
        to_source = np.maximum(before[stage], forward + backward) + source
        found[table] = np.maximum(own, to_source[runs.first] + body)
    return found


NEIGHBOURS = 3
"""Stages behind one up to which ways to wait for each other are weighed: between any two a slow link may lie."""


class Ways:
    """The least seconds of the ways of (6) up to a few stages behind, of all arcs. in_flight: by stage."""

    def __init__(self, in_flight: Sequence[int], runs: Runs) -> None:
        self.in_flight, self.runs = in_flight, runs
        self._least: dict[int, list[Array]] = {}  # by stage, of so many stages from a position on

    def add(self, stage: int, seconds: Array, crossed: Array) -> None:
        """A stage; those behind it come before. seconds: [table, run], infinite for what it does not have; crossed:
        the same of the cut behind.
        """
        behind = self._least.get(stage + 1, [])
        own = [seconds, *(seconds + crossed + least[self.runs.last] for least in behind[: NEIGHBOURS - 1])]
        self._least[stage] = [self.runs.least_from(item.min(axis=0, initial=math.inf)) for item in own]

    def of(self, stage: int, crossed: Array) -> list[tuple[int, Array]]:
        """As :func:`body_seconds` takes them, by run. crossed: of the cut behind the stage."""
        found = []
        for further, least in enumerate(self._least.get(stage + 1, []), stage + 1):
            later = self.in_flight[stage] - self.in_flight[further] + 1
            if later >= 1:
                found.append((later, crossed + least[self.runs.last]))
        return found


def source_ends(problem: StageProblem, member: NDArray[np.bool_]) -> Array:
    """By position: after its last backward a stage there waits for that of the first one, which has some source of the
    graph, whose step end is no less.
    """
    blocks = range(member.shape[1])
    ends = {block: problem.least_step_end(block) for block in blocks if 1 << block in problem.positions}
    return np.array([min((s for b, s in ends.items() if row[b]), default=0.0) for row in member])


def least_through(runs: Runs, stages: int, stage_of: Sequence[int], arcs: Array) -> tuple[Array, Array]:
    """The least sum of ``arcs`` from the beginning to a position before each stage, and from there to the end."""
    before, behind = np.full((2, stages + 1, runs.positions), np.inf)
    before[0, 0] = behind[stages, -1] = 0.0
    tables = [[table for table, at in enumerate(stage_of) if at == stage] for stage in range(stages)]
    for stage in range(stages):
        for table in tables[stage]:
            reached, _ = runs.least_to(before[stage][runs.first] + arcs[table])
            before[stage + 1] = np.minimum(before[stage + 1], reached)
    for stage in reversed(range(stages)):
        for table in tables[stage]:
            left = runs.least_from(arcs[table] + behind[stage + 1][runs.last])
            behind[stage] = np.minimum(behind[stage], left)
    return before, behind
