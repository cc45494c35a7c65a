"""Schedules that split the backward (Qi et al. 2024, arXiv 2401.10241): B the inputs' gradients, W the weights'.

Only B has to come in time for the other stages; W fills what would be a bubble.
"""

from __future__ import annotations

from collections.abc import Sequence

from autopart.runtime.errors import ScheduleError
from autopart.runtime.schedule.actions import Edges, Schedule
from autopart.runtime.schedule.exchanges import Step, with_exchanges


def zb_h1(stages: int, microbatches: int, edges: Edges, gradient_edges: Edges | None = None) -> Schedule:
    """ZB-H1 (section 2.2): 1F1B whose weights' share on stage s lags s backwards behind.

    Every stage then holds as many microbatches as 1F1B's first, min(m, p), counting those whose W is to come. With
    seconds f, b, w and free transfers a step takes (p - 1)(f + b - w) beyond a stage's own work where b ≥ w, instead of
    1F1B's (p - 1)(f + b + w).
    """
    order = []
    for stage in range(stages):
        first = min(stages - stage - 1, microbatches)
        steps: list[Step] = [("F", stage, k) for k in range(first)]
        for k in range(microbatches):
            if first + k < microbatches:
                steps.append(("F", stage, first + k))
            steps.append(("B", stage, k))
            if k >= stage:
                steps.append(("W", stage, k - stage))
        steps += [("W", stage, k) for k in range(max(0, microbatches - stage), microbatches)]
        order.append(steps)
    return with_exchanges(order, edges, gradient_edges, reduce=True)


def v_shaped(stages: int) -> tuple[int, ...]:
    """The rank of each stage: down and up again, so that the first rank has the last stage too.

    Raises ScheduleError for an odd number of stages.
    """
    if stages < 2 or stages % 2:
        raise ScheduleError(f"zb-v runs two stages on each rank; {stages} stages are no even number")
    return tuple(min(stage, stages - 1 - stage) for stage in range(stages))


def zb_v(
    stages: int,
    microbatches: int,
    edges: Edges,
    gradient_edges: Edges | None = None,
    places: Sequence[int] | None = None,
) -> Schedule:
    """ZB-V (section 6): two stages on each of p ranks in the shape of a V, s and 2p - 1 - s on rank s.

    Stage s holds min(m, 2p - s) microbatches, as in 1F1B over 2p stages, which makes 2p (half-size) ones on every rank.
    With f = b = w and free transfers no rank waits once it has begun. Raises ScheduleError unless stages lie in a V.
    """
    if places is not None and tuple(places) != v_shaped(stages):
        raise ScheduleError(f"zb-v runs the stages in a V, {list(v_shaped(stages))}, not {list(places)}")
    ranks = len(set(v_shaped(stages)))
    return with_exchanges(
        [_v_order(ranks, rank, microbatches) for rank in range(ranks)], edges, gradient_edges, reduce=True
    )


def _v_order(ranks: int, rank: int, microbatches: int) -> list[Step]:
    """A rank's computations; what would be of a microbatch beyond the last is left out."""
    down, up = rank, 2 * ranks - 1 - rank
    done = {(work, stage): 0 for work in "FBW" for stage in (down, up)}
    steps: list[Step] = []

    def do(work: str, stage: int) -> None:
        k = done[work, stage]
        if k < microbatches:
            steps.append((work, stage, k))
            done[work, stage] += 1

    # Until the first microbatch comes back up.
    for _ in range(2 * (ranks - rank) - 1):
        do("F", down)
    for _ in range(rank):
        do("F", up)
        do("F", down)
    # Until its gradient comes back down.
    for _ in range(ranks - rank):
        for work in "FBW":
            do(work, up)
    # One of each.
    while min(done["F", up], done["F", down]) < microbatches:
        do("F", down)
        for work in "BW":
            do(work, down)
        for work in "FBW":
            do(work, up)
    # The gradients that others wait for first; W where these have to be waited for.
    for _ in range(rank):
        do("B", down)
        do("B", up)
    for _ in range(ranks - rank):
        do("B", down)
        do("W", down)
    for stage in (up, down):
        while done["B", stage] < microbatches:
            do("B", stage)
        while done["W", stage] < microbatches:
            do("W", stage)
    return steps
