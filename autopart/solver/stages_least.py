r"""Seconds that a step takes at least, for each second of one microbatch, however the work is divided into stages.

For schedules that :mod:`autopart.solver.stages_floor` has no closed form for: several stages on a rank, W split off.

In a schedule's order computations wait for those before them on their rank and for the stages that they receive from,
so a step takes as long as the longest chain of computations that wait for each other, each with the seconds of its
stage: F_s forward, B_s backward (with a W: of the inputs' gradients), W_s. The length of one chain is a linear function
of these, and the least step over all divisions of the work is that of a linear program, of which any chains give a
bound:

    minimise  T
    sum_s (F_s + B_s + W_s) >= 1,  sum_s F_s >= f,  W_s <= B_s
    T >= sum of the chain                                                                  for every chain

W_s <= B_s as half of what an op with weights takes in its backward is left for W at most, and what computes again does
so in B. The first chains are those of each stage s: the first microbatch's way to s, all work of s and of the stages
behind it on its rank, and a microbatch's way back; where W is split off, the way back without W or all work with it.
Then the longest chain of the program's answer is added, until none is longer than T. Where a schedule has more
computations than are to be gone over the first chains have to do.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence

from autopart.runtime.schedule import SPLIT_SCHEDULES, Work, make_schedule
from autopart.solver.linear import LinearModel

MOST_STEPS, MOST_STEPS_ONCE = 1500, 20_000
"""Computations of a schedule whose chains are gone over: of each configuration, and of one that is evaluated."""
_MOST_CHAINS = 60
_CLOSE = 1e-4
"""Relative: how near to the longest chain the program's answer has to come."""
_ROUNDING = 1e-7
_FINENESS = 32
"""Shares of forwards are rounded down to this part, so that configurations have the same."""

_Chain = tuple[int, ...]
"""How often each stage's F, B and W are in it, in this order, stage after stage."""
_WORKS = (Work.FORWARD, Work.BACKWARD, Work.WEIGHT)


def least_share(
    schedule: str,
    places: Sequence[int],
    microbatches: int,
    forward: float = 0.0,
    enough: float = math.inf,
    most_steps: int = MOST_STEPS,
) -> float:
    """Seconds of a step for each second of a microbatch, without transfers.

    places: the rank of each stage. forward: the share of forwards in a microbatch's seconds, at least. enough: where
    the first chains say as many, nothing more is looked for. most_steps: as of :data:`MOST_STEPS`.
    """
    asked = schedule, tuple(places), microbatches, math.floor(forward * _FINENESS)
    first = _least(*asked, more=False)
    if first >= enough or 3 * len(places) * microbatches > most_steps:
        return first
    return _least(*asked, more=True)


@functools.lru_cache(maxsize=4096)
def _least(schedule: str, places: tuple[int, ...], microbatches: int, forward: int, more: bool) -> float:
    stages = len(places)
    splits = schedule in SPLIT_SCHEDULES
    model = LinearModel()
    step = model.add_variable(1.0, upper=math.inf)
    for _ in range(stages):
        for work in _WORKS:
            model.add_variable(upper=math.inf if splits or work is not Work.WEIGHT else 0.0)
    every = range(1, 1 + 3 * stages)
    model.add_row(every, [1.0] * len(every), lower=1.0)
    model.add_row(every[::3], [1.0] * stages, lower=forward / _FINENESS)
    for stage in range(stages):
        model.add_row([3 + 3 * stage, 2 + 3 * stage], [1.0, -1.0], upper=0.0)

    def add(chain: _Chain) -> None:
        used = [index for index, count in enumerate(chain) if count]
        model.add_row([step, *(1 + index for index in used)], [1.0, *(-float(chain[i]) for i in used)], lower=0.0)

    for chain in _first_chains(places, microbatches, splits):
        add(chain)
    orders = _orders(schedule, places, microbatches) if more else None
    least = microbatches / len(set(places))
    for _ in range(_MOST_CHAINS):
        found = model.relax()
        assert found is not None
        least = max(least, found.objective)
        if orders is None:
            break
        length, chain = _longest(orders, found.values[1:], stages)
        if length <= found.objective * (1 + _CLOSE):
            break
        add(chain)
    return least * (1 - _ROUNDING)


def _first_chains(places: Sequence[int], microbatches: int, splits: bool) -> list[_Chain]:
    found = []
    for stage, place in enumerate(places):
        mine = [other for other in range(stage, len(places)) if places[other] == place]
        kinds = [(1, 1, 0, 0), (1, 0, 0, 1)] if splits else [(1, 1, 0, 0)]
        for there, back, weight_back, weight in kinds:
            chain = [0] * (3 * len(places))
            for other in range(stage):
                chain[3 * other : 3 * other + 3] = there, back, weight_back
            for other in mine:
                chain[3 * other : 3 * other + 3] = microbatches, microbatches, microbatches * weight
            found.append(tuple(chain))
    return found


def _orders(schedule: str, places: tuple[int, ...], microbatches: int) -> list[list[tuple[int, int, int]]]:
    """Of each rank its computations in order: (which of _WORKS, stage, microbatch)."""
    edges = set(itertools.pairwise(range(len(places))))
    made = make_schedule(schedule, len(places), microbatches, edges, places=places)
    return [
        [(_WORKS.index(a.work), a.stage, a.microbatch or 0) for a in actions if a.work in _WORKS]
        for actions in made.ranks
    ]


def _longest(
    orders: Sequence[Sequence[tuple[int, int, int]]], seconds: Sequence[float], stages: int
) -> tuple[float, _Chain]:
    """The longest chain under these seconds of each stage's F, B and W. Transfers take nothing."""
    done: dict[tuple[int, int, int], float] = {}
    behind: dict[tuple[int, int, int], tuple[int, int, int] | None] = {}
    at = [0] * len(orders)
    moved = True
    while moved:
        moved = False
        for rank, order in enumerate(orders):
            while at[rank] < len(order):
                step = order[at[rank]]
                work, stage, k = step
                waits = [order[at[rank] - 1]] if at[rank] else []
                if work == 0 and stage:
                    waits.append((0, stage - 1, k))
                elif work == 1 and stage < stages - 1:
                    waits.append((1, stage + 1, k))
                if any(other not in done for other in waits):
                    break
                last = max(waits, key=lambda other: done[other], default=None)
                behind[step] = last
                done[step] = (done[last] if last is not None else 0.0) + seconds[3 * stage + work]
                at[rank] += 1
                moved = True
    end: tuple[int, int, int] | None = max(done, key=lambda step: done[step])
    length = done[end] if end is not None else 0.0
    chain = [0] * (3 * stages)
    while end is not None:
        chain[3 * end[1] + end[0]] += 1
        end = behind[end]
    return length, tuple(chain)
