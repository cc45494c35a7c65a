"""Schedules of one stage per rank that drain at the end of each batch: GPipe and 1F1B; forwards alone."""

from __future__ import annotations

from collections.abc import Sequence

from autopart.runtime.errors import ScheduleError
from autopart.runtime.schedule.actions import Edges, Schedule
from autopart.runtime.schedule.exchanges import Step, with_exchanges


def gpipe(
    stages: int,
    microbatches: int,
    edges: Edges,
    gradient_edges: Edges | None = None,
    places: Sequence[int] | None = None,
) -> Schedule:
    """All forwards, then all backwards (Huang et al. 2019): ``microbatches`` are in flight on every stage.

    edges: the (source stage, target stage) pairs that exchange values. gradient_edges: those of them whose values have
    a gradient; by default all. places: the rank of each stage; by default each has its own. A rank with several stages
    runs all microbatches through one before it goes on to the next (breadth first, Lamy-Poirier, arXiv 2211.05953).
    """
    order: list[list[Step]] = []
    for own in stages_by_rank(stages, places):
        forwards: list[Step] = [("F", stage, k) for stage in own for k in range(microbatches)]
        backwards: list[Step] = [("B", stage, k) for stage in reversed(own) for k in range(microbatches)]
        order.append(forwards + backwards)
    return with_exchanges(order, edges, gradient_edges, reduce=True)


def one_f_one_b_order(stages: int, microbatches: int, warmup: Sequence[int] | None = None) -> list[list[Step]]:
    """The computations of :func:`one_f_one_b`, by stage. Raises ScheduleError as that does."""
    if warmup is None:
        warmup = [stages - s - 1 for s in range(stages)]
    if len(warmup) != stages or any(count < 0 for count in warmup):
        raise ScheduleError(f"warmup needs one number of forwards for each of {stages} stages, found {list(warmup)}")
    order: list[list[Step]] = []
    for stage, count in enumerate(warmup):
        first = min(count, microbatches)
        steps: list[Step] = [("F", stage, k) for k in range(first)]
        for k in range(microbatches - first):
            steps += [("F", stage, first + k), ("B", stage, k)]
        steps += [("B", stage, k) for k in range(microbatches - first, microbatches)]
        order.append(steps)
    return order


def one_f_one_b(
    stages: int,
    microbatches: int,
    edges: Edges,
    warmup: Sequence[int] | None = None,
    gradient_edges: Edges | None = None,
) -> Schedule:
    """One forward, one backward in turn, after a warm-up (Narayanan et al. 2019; PipeDream-Flush in 2006.09503).

    warmup: forwards of each stage before its first pair; by default ``stages - s - 1``, so that stage ``s`` has
    ``min(microbatches, stages - s)`` microbatches in flight. More of them hide slow transfers for more memory, see
    :func:`deeper_warmup`. Raises ScheduleError when the warm-up has the wrong length or is negative.
    """
    order = one_f_one_b_order(stages, microbatches, warmup)
    return with_exchanges(order, edges, gradient_edges, reduce=True)


def deeper_warmup(stages: int, depth: int) -> tuple[int, ...]:
    """The warm-up in which each stage is ``depth`` forwards ahead of the next: ``depth * (stages - s - 1)``.

    1 is the least with which equal stages never wait but for transfers. With 2 a transfer there and one back pass while
    another microbatch is computed: a stage waits for neither as long as the two take no longer than one forward and
    backward. 0 leaves one microbatch in the whole pipeline. BaPipe (Zhao et al. 2020, arXiv 2012.12544) has two such
    depths, 1F1B-SNO and 1F1B-SO.
    """
    return tuple(depth * (stages - stage - 1) for stage in range(stages))


def forward_only(stages: int, microbatches: int, edges: Edges, places: Sequence[int] | None = None) -> Schedule:
    """Forwards in order, for evaluation; a rank with several stages runs one after the other."""
    order: list[list[Step]] = [
        [("F", stage, k) for stage in own for k in range(microbatches)] for own in stages_by_rank(stages, places)
    ]
    return with_exchanges(order, edges, (), reduce=False)


def stages_by_rank(stages: int, places: Sequence[int] | None) -> list[list[int]]:
    """The stages of each rank, ascending. Raises ScheduleError unless ``places`` names a rank for each stage."""
    if places is None:
        return [[stage] for stage in range(stages)]
    if len(places) != stages or set(places) != set(range(1 + max(places, default=-1))):
        raise ScheduleError(f"places needs one rank for each of {stages} stages and leaves none out: {list(places)}")
    return [[s for s in range(stages) if places[s] == rank] for rank in range(1 + max(places, default=-1))]
