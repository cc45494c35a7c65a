"""PipeDream-2BW: 1F1B that never drains, on two versions of the weights (Narayanan et al. 2021, arXiv 2006.09503)."""

from __future__ import annotations

from autopart.runtime.errors import ScheduleError
from autopart.runtime.schedule.actions import Action, Edges, Schedule, Work
from autopart.runtime.schedule.exchanges import Step, insert_exchanges


def two_buffered_weights(stages: int, microbatches: int, edges: Edges, gradient_edges: Edges | None = None) -> Schedule:
    """What each stage does in one batch when the batches before and after follow without a gap (section 3.1).

    Stage s does one forward, one backward in turn, the backwards ``stages - s - 1`` microbatches behind: its first ones
    are of the batch before, and come in the list before their microbatch's forward. The sum of the gradients is of that
    batch too. Each stage holds ``stages - s`` microbatches, as under 1F1B. Raises ScheduleError with fewer microbatches
    than that: a third version of the weights would be needed.
    """
    if microbatches < stages:
        raise ScheduleError(
            f"2bw needs as many microbatches as stages, {stages}, or it would need more than two versions of the "
            f"weights; there are {microbatches}"
        )
    order: list[list[Step]] = []
    for stage in range(stages):
        behind = stages - stage - 1
        order.append([step for k in range(microbatches) for step in _pair(stage, k, (k - behind) % microbatches)])
    found = insert_exchanges(order, edges, gradient_edges, reduce=False)
    ranks = []
    for stage, actions in enumerate(found.ranks):
        # All stages sum when the first one has the last of the earlier batch's gradients, so that none waits for it.
        at = actions.index(Action(Work.FORWARD, stage, stages - 1)) if stages > 1 else 0
        while at > 0 and actions[at - 1].work is Work.RECV_ACTIVATION:
            at -= 1
        ranks.append((*actions[:at], Action(Work.REDUCE, stage), *actions[at:]))
    return Schedule(tuple(ranks))


def _pair(stage: int, forward: int, backward: int) -> tuple[Step, Step]:
    return ("F", stage, forward), ("B", stage, backward)


def carried(actions: tuple[Action, ...]) -> tuple[bool, ...]:
    """For each action of a rank's list, whether it is of the batch before: the sum, and what precedes its forward."""
    begun: set[tuple[int, int | None]] = set()
    found = []
    for action in actions:
        if action.work is Work.FORWARD:
            begun.add((action.stage, action.microbatch))
        backward = action.work in (Work.BACKWARD, Work.WEIGHT, Work.SEND_GRADIENT, Work.RECV_GRADIENT)
        found.append(action.work is Work.REDUCE or (backward and (action.stage, action.microbatch) not in begun))
    return tuple(found)


def unrolled(schedule: Schedule, batches: int, microbatches: int) -> Schedule:
    """The schedule of several batches in a row and the end of the last, microbatches numbered through, without sums."""
    ranks = []
    for actions in schedule.ranks:
        marks = carried(actions)
        steps: list[Action] = []
        for batch in range(batches + 1):
            for action, before in zip(actions, marks, strict=True):
                number = batch - before
                if action.microbatch is not None and 0 <= number < batches and (before or batch < batches):
                    k = number * microbatches + action.microbatch
                    steps.append(Action(action.work, action.stage, k, action.peer))
        ranks.append(tuple(steps))
    return Schedule(tuple(ranks))


def version(batch: int) -> int:
    """The version of the weights that a batch is computed with: updates applied before, max(batch - 1, 0).

    The paper's max(⌊(k - 1) / m⌋ - 1, 0) of the k-th microbatch, both counted from one.
    """
    return max(batch - 1, 0)
