"""Passes over schedules: exchanges put around computations, receives posted early, halves taken."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from autopart.runtime.errors import ScheduleError
from autopart.runtime.schedule.actions import Action, Edges, Schedule, Work

# A computation: "F", "B" or "W", the stage, the microbatch.
Step = tuple[str, int, int]


def with_exchanges(
    order: Sequence[Sequence[Step]], edges: Edges, gradient_edges: Edges | None, reduce: bool
) -> Schedule:
    """The schedule of each rank's computations: receives right before, as :func:`receive_as_sent`; sends right after.

    edges: the (source stage, target stage) pairs that exchange values. gradient_edges: those of them whose values have
    a gradient; None: all. reduce: with the gradients' sums at the end. Raises ScheduleError.
    """
    return receive_as_sent(insert_exchanges(order, edges, gradient_edges, reduce))


def insert_exchanges(
    order: Sequence[Sequence[Step]], edges: Edges, gradient_edges: Edges | None, reduce: bool
) -> Schedule:
    """As :func:`with_exchanges`, each receive at the computation that it is for."""
    gradient_edges = edges if gradient_edges is None else gradient_edges
    stages = 1 + max((stage for steps in order for _, stage, _ in steps), default=-1)
    for source, target in (*edges, *gradient_edges):
        if not 0 <= source < target < stages:
            raise ScheduleError(f"values cannot go from stage {source} to stage {target} of {stages}")
    peers = {
        stage: (
            sorted(a for a, b in set(edges) if b == stage),
            sorted(b for a, b in set(edges) if a == stage),
            sorted(b for a, b in set(gradient_edges) if a == stage),
            sorted(a for a, b in set(gradient_edges) if b == stage),
        )
        for stage in range(stages)
    }
    ranks = []
    for steps in order:
        actions: list[Action] = []
        for work, stage, k in steps:
            before, after, back_from, back_to = peers[stage]
            if work == "F":
                actions += [Action(Work.RECV_ACTIVATION, stage, k, peer) for peer in before]
                actions.append(Action(Work.FORWARD, stage, k))
                actions += [Action(Work.SEND_ACTIVATION, stage, k, peer) for peer in after]
            elif work == "B":
                actions += [Action(Work.RECV_GRADIENT, stage, k, peer) for peer in back_from]
                actions.append(Action(Work.BACKWARD, stage, k))
                actions += [Action(Work.SEND_GRADIENT, stage, k, peer) for peer in back_to]
            else:
                actions.append(Action(Work.WEIGHT, stage, k))
        if reduce:
            actions += [Action(Work.REDUCE, stage) for stage in sorted({stage for _, stage, _ in steps})]
        ranks.append(tuple(actions))
    return Schedule(tuple(ranks))


def receive_as_sent(schedule: Schedule) -> Schedule:
    """The schedule with each rank's receives from another in the order of that one's sends, moved up where need be.

    Two ranks with several stages may exchange along several edges, and NCCL tells messages apart by their order alone.
    """
    rank_of = schedule.rank_of
    if len(rank_of) == len(schedule.ranks) and _same_order(schedule):
        return schedule
    sent: dict[tuple[Work, int, int], deque[Action]] = {}
    for rank, actions in enumerate(schedule.ranks):
        for action in actions:
            if action.work.is_send and action.peer is not None and rank_of[action.peer] != rank:
                work = Work.RECV_ACTIVATION if action.work is Work.SEND_ACTIVATION else Work.RECV_GRADIENT
                receive = Action(work, action.peer, action.microbatch, action.stage)
                sent.setdefault((work, rank, rank_of[action.peer]), deque()).append(receive)
    ranks = []
    for rank, actions in enumerate(schedule.ranks):
        ordered: list[Action] = []
        early: set[Action] = set()
        for action in actions:
            if not action.work.is_receive or action.peer is None or rank_of[action.peer] == rank:
                ordered.append(action)
            elif action not in early:
                queue = sent[action.work, rank_of[action.peer], rank]
                while (first := queue.popleft()) != action:
                    ordered.append(first)
                    early.add(first)
                ordered.append(action)
        ranks.append(tuple(ordered))
    return Schedule(tuple(ranks))


def _same_order(schedule: Schedule) -> bool:
    """Whether every two stages, each on a rank of its own, exchange microbatches in rising order both ways."""
    last: dict[tuple[str, int, int | None], int] = {}
    for actions in schedule.ranks:
        for action in actions:
            if action.peer is not None and action.microbatch is not None:
                key = action.work.value, action.stage, action.peer
                if action.microbatch <= last.get(key, -1):
                    return False
                last[key] = action.microbatch
    return True


def forward_part(schedule: Schedule) -> Schedule:
    """The schedule's forwards and their exchanges, in order."""
    keep = (Work.FORWARD, Work.SEND_ACTIVATION, Work.RECV_ACTIVATION)
    return Schedule(tuple(tuple(a for a in actions if a.work in keep) for actions in schedule.ranks))


def backward_part(schedule: Schedule) -> Schedule:
    """What :func:`forward_part` leaves."""
    leave = (Work.FORWARD, Work.SEND_ACTIVATION, Work.RECV_ACTIVATION)
    return Schedule(tuple(tuple(a for a in actions if a.work not in leave) for actions in schedule.ranks))


def post_receives_early(actions: Sequence[Action]) -> tuple[Action, ...]:
    """One rank's actions with each receive from another rank moved before the computation that precedes it.

    The transfer then runs during that computation; it costs one more buffer. The order among receives stays.
    """
    own = {action.stage for action in actions}
    moved: list[Action] = []
    last_compute = 0  # position of the last computation in `moved`; receives gather before it
    for action in actions:
        if action.work.is_receive and action.peer not in own:
            moved.insert(last_compute, action)
            last_compute += 1
        else:
            if action.work.is_compute:
                last_compute = len(moved)
            moved.append(action)
    return tuple(moved)
