"""Which of a rank's sends are known to have arrived, by what arrives in return.

A rank that sends a message after a computation has what that computation waited for. So the gradient of a microbatch
says that its activations are there, and the activations of a later one that gradients sent back before are. Nothing
has to be asked or polled, which gloo does not offer, and the answer follows from the schedule alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autopart.runtime.schedule.actions import SEND_OF, Action, Schedule, Work
from autopart.runtime.schedule.double_buffered import unrolled

# Receive -> sends that its message proves to have arrived, each with how many batches later it is (0, -1 or 1: only
# where batches follow without a gap).
Receipts = Mapping[Action, Sequence[tuple[Action, int]]]

_RECEIVE_OF = {send: receive for receive, send in SEND_OF.items()}


def receipts(schedule: Schedule, rank: int, microbatches: int | None = None) -> Receipts:
    """What the receives of a rank of the pipeline prove, each send once.

    microbatches: of one batch, where the lists repeat batch after batch without a gap ("2bw").
    """
    if microbatches is None:
        return {receive: [(send, 0) for send in sends] for receive, sends in _once(schedule, rank).items()}
    found: dict[Action, list[tuple[Action, int]]] = {}
    for receive, sends in _once(unrolled(schedule, 3, microbatches), rank).items():
        batch, _ = _number(receive, microbatches)
        if batch == 1:  # the one in the middle has both neighbours
            found[_number(receive, microbatches)[1]] = [
                (send, at - batch) for at, send in (_number(send, microbatches) for send in sends)
            ]
    return found


def _number(action: Action, microbatches: int) -> tuple[int, Action]:
    """The batch of an unrolled schedule's action, and the action as the batch's own list has it."""
    assert action.microbatch is not None
    batch, microbatch = divmod(action.microbatch, microbatches)
    return batch, Action(action.work, action.stage, microbatch, action.peer)


def _once(schedule: Schedule, rank: int) -> dict[Action, list[Action]]:
    rank_of = schedule.rank_of
    found: dict[Action, list[Action]] = {}
    for other, actions in enumerate(schedule.ranks):
        if other == rank:
            continue
        posted: dict[tuple[Work, int, int | None], list[Action]] = {}
        used: list[Action] = []
        for action in actions:
            if action.peer is None:
                waits = {Work.FORWARD: Work.RECV_ACTIVATION, Work.BACKWARD: Work.RECV_GRADIENT}.get(action.work)
                if waits is not None:
                    used += posted.pop((waits, action.stage, action.microbatch), ())
            elif rank_of[action.peer] == rank and action.work.is_receive:
                send = Action(SEND_OF[action.work], action.peer, action.microbatch, action.stage)
                posted.setdefault((action.work, action.stage, action.microbatch), []).append(send)
            elif rank_of[action.peer] == rank:
                receive = Action(_RECEIVE_OF[action.work], action.peer, action.microbatch, action.stage)
                found[receive], used = used, []
    return found
