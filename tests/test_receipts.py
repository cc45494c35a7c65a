"""What a rank's arrivals prove of its sends, against the times of simulated runs; and what is let go in real ones."""

from __future__ import annotations

import random

import pytest

from autopart.runtime.schedule import Action, Schedule, Work, make_schedule, places_of
from autopart.runtime.schedule.actions import SEND_OF
from autopart.runtime.schedule.double_buffered import unrolled
from autopart.runtime.schedule.receipts import receipts
from autopart.simulate import StageTimes, simulate


def chain(stages: int) -> list[tuple[int, int]]:
    return [(s, s + 1) for s in range(stages - 1)]


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"])
@pytest.mark.parametrize(("stages", "microbatches"), [(2, 2), (4, 4), (4, 12)])
def test_what_is_proved_has_arrived(name: str, stages: int, microbatches: int) -> None:
    virtual = 2 if name in ("interleaved", "zb-v") else 1
    places = places_of(name, stages, virtual) if virtual == 2 else None
    edges = [*chain(stages), *([(0, 3)] if stages == 4 and virtual == 1 else [])]
    schedule = make_schedule(name, stages, microbatches, edges, places=places)
    check(schedule, random.Random(name))


def check(schedule: Schedule, draw: random.Random) -> None:
    """Whatever the stages' speeds, an arrival was sent after the computations that used what it proves."""
    for _ in range(5):
        times = [StageTimes(draw.random(), 0.1 + draw.random(), 0.1) for _ in range(schedule.stages)]
        events = {event.action: event for event in simulate(schedule, times, draw.random()).events}
        for rank in range(len(schedule.ranks)):
            for receive, proved in receipts(schedule, rank).items():
                assert receive.peer is not None
                answer = Action(SEND_OF[receive.work], receive.peer, receive.microbatch, receive.stage)
                for send, _ in proved:
                    user = Work.FORWARD if send.work is Work.SEND_ACTIVATION else Work.BACKWARD
                    assert send.peer is not None
                    assert events[Action(user, send.peer, send.microbatch)].end_s <= events[answer].start_s


@pytest.mark.parametrize(("stages", "microbatches"), [(2, 2), (3, 4), (4, 8)])
def test_batches_without_a_gap(stages: int, microbatches: int) -> None:
    """The proofs of one batch are those of any batch in the middle of many."""
    schedule = make_schedule("2bw", stages, microbatches, chain(stages))
    many = unrolled(schedule, 5, microbatches)
    check(many, random.Random(0))
    for rank in range(stages):
        found = {}
        for receive, proved in receipts(many, rank).items():
            batch, own = numbered(receive, microbatches)
            if batch == 3:
                sends = [numbered(send, microbatches) for send, _ in proved]
                found[own] = [(send, number - batch) for number, send in sends]
        assert dict(receipts(schedule, rank, microbatches)) == found


def numbered(action: Action, microbatches: int) -> tuple[int, Action]:
    assert action.microbatch is not None
    batch, k = divmod(action.microbatch, microbatches)
    return batch, Action(action.work, action.stage, k, action.peer)


@pytest.mark.parametrize("stages", [2, 4, 8])
def test_what_is_left_under_1f1b(stages: int) -> None:
    """All activations are proved, and gradients two microbatches later, until the forwards end."""
    microbatches = 2 * stages
    schedule = make_schedule("1f1b", stages, microbatches, chain(stages))
    for rank, actions in enumerate(schedule.ranks):
        proofs = receipts(schedule, rank)
        pending: set[Action] = set()
        waiting: list[Action] = []
        most = 0
        for action in actions:
            if action.work.is_receive:
                waiting.append(action)
            elif action.work.is_compute:
                for receive in waiting:
                    pending -= {send for send, _ in proofs.get(receive, ())}
                waiting = []
                if action.work is Work.FORWARD:
                    most = max(most, sum(send.work is Work.SEND_GRADIENT for send in pending))
            elif action.work.is_send:
                pending.add(action)
        assert most <= 1
        assert all(send.work is Work.SEND_GRADIENT for send in pending)
        assert len(pending) == (stages - rank + 1 if rank else 0)
