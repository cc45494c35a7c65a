"""Executes a schedule symbolically: proof that it cannot deadlock, and how many microbatches each stage holds."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from autopart.runtime.errors import ScheduleError
from autopart.runtime.schedule import Action, Schedule, Work


@dataclass(slots=True)
class _Stage:
    """What one stage has done so far."""

    actions: tuple[Action, ...]
    position: int = 0
    forwarded: set[int] = field(default_factory=set)
    backwarded: set[int] = field(default_factory=set)
    received: set[tuple[Work, int, int]] = field(default_factory=set)
    reduced: bool = False
    peak: int = 0


def dry_run(schedule: Schedule) -> tuple[int, ...]:
    """Runs all stages' lists with sends that do not block and receives that do.

    Returns the most microbatches that each stage holds at once between their forward and their backward (forward-only
    schedules hold none: zero).

    Raises ScheduleError, naming the actions, when the stages wait for each other, a receive has no send or comes in
    another order than sent, a computation comes before what it needs or twice, or something is left undone.
    """
    stages = [_Stage(actions) for actions in schedule.stages]
    trains = any(action.work is Work.BACKWARD for actions in schedule.stages for action in actions)
    # (stage, work) -> peers that the stage receives from in some microbatch, and so must in all
    sources: dict[tuple[int, Work], set[int]] = {}
    for actions in schedule.stages:
        for action in actions:
            if action.peer is not None and not 0 <= action.peer < len(stages):
                raise ScheduleError(f"{action} names a stage that is not there; there are {len(stages)}")
            if action.work.is_receive:
                assert action.peer is not None
                sources.setdefault((action.stage, action.work), set()).add(action.peer)
    channels: dict[tuple[Work, int, int], deque[int]] = {}

    def advance(stage: _Stage) -> bool:
        """Takes the stage's next action if it can run now."""
        action = stage.actions[stage.position]
        if action.work.is_receive and not _receive(stage, action, channels):
            return False
        if action.work.is_send:
            _send(stage, action, channels)
        elif action.work.is_compute:
            _compute(stage, action, sources)
            if trains:
                stage.peak = max(stage.peak, len(stage.forwarded) - len(stage.backwarded))
        elif action.work is Work.REDUCE:
            left = [a for a in stage.actions[stage.position :] if a.work in (Work.BACKWARD, Work.WEIGHT)]
            if left or stage.reduced:
                raise ScheduleError(f"{action} comes {'before ' + str(left[0]) if left else 'twice'}")
            stage.reduced = True
        stage.position += 1
        return True

    progress = True
    while progress:
        progress = False
        for stage in stages:
            while stage.position < len(stage.actions) and advance(stage):
                progress = True
    stuck = [str(stage.actions[stage.position]) for stage in stages if stage.position < len(stage.actions)]
    if stuck:
        raise ScheduleError(f"the schedule deadlocks: {', '.join(stuck)} wait for what is never sent")
    _check_complete(stages, channels, trains)
    return tuple(stage.peak for stage in stages)


_SEND_OF = {Work.RECV_ACTIVATION: Work.SEND_ACTIVATION, Work.RECV_GRADIENT: Work.SEND_GRADIENT}


def _receive(stage: _Stage, action: Action, channels: dict[tuple[Work, int, int], deque[int]]) -> bool:
    assert action.peer is not None and action.microbatch is not None
    channel = channels.get((_SEND_OF[action.work], action.peer, action.stage))
    if not channel:
        return False
    # NCCL matches messages between two ranks by their order alone.
    if channel[0] != action.microbatch:
        raise ScheduleError(f"{action} comes where microbatch {channel[0]} was sent; receive in the order of sending")
    channel.popleft()
    stage.received.add((action.work, action.peer, action.microbatch))
    return True


def _send(stage: _Stage, action: Action, channels: dict[tuple[Work, int, int], deque[int]]) -> None:
    assert action.peer is not None and action.microbatch is not None
    done = stage.forwarded if action.work is Work.SEND_ACTIVATION else stage.backwarded
    if action.microbatch not in done:
        raise ScheduleError(f"{action} comes before what it sends is computed")
    channels.setdefault((action.work, action.stage, action.peer), deque()).append(action.microbatch)


def _compute(stage: _Stage, action: Action, sources: dict[tuple[int, Work], set[int]]) -> None:
    assert action.microbatch is not None
    k = action.microbatch
    if action.work is Work.WEIGHT:
        if k not in stage.backwarded:
            raise ScheduleError(f"{action} comes before B{action.stage}.{k}")
        return
    forward = action.work is Work.FORWARD
    if not forward and k not in stage.forwarded:
        raise ScheduleError(f"{action} comes before F{action.stage}.{k}")
    done = stage.forwarded if forward else stage.backwarded
    if k in done:
        raise ScheduleError(f"{action} comes twice")
    receive = Work.RECV_ACTIVATION if forward else Work.RECV_GRADIENT
    for peer in sorted(sources.get((action.stage, receive), ())):
        if (receive, peer, k) not in stage.received:
            raise ScheduleError(f"{action} comes before {receive.value}{action.stage}.{k}<{peer}")
    done.add(k)


def _check_complete(stages: list[_Stage], channels: dict[tuple[Work, int, int], deque[int]], trains: bool) -> None:
    everything = set().union(*(stage.forwarded for stage in stages))
    for index, stage in enumerate(stages):
        missing = [f"F{index}.{k}" for k in sorted(everything - stage.forwarded)]
        if trains:
            missing += [f"B{index}.{k}" for k in sorted(everything - stage.backwarded)]
        if missing:
            raise ScheduleError(f"stage {index} never does {', '.join(missing)}")
    for (work, source, target), left in channels.items():
        if left:
            raise ScheduleError(f"{work.value}{source}.{left[0]}>{target} is never received")
