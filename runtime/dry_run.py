"""Executes a schedule symbolically: proof that it cannot deadlock, and how many microbatches each stage holds."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from autopart.runtime.errors import ScheduleError
from autopart.runtime.schedule import Action, Schedule, Work
from autopart.runtime.schedule.actions import SEND_OF

# Messages on their way between two ranks, by what they are and who sends to whom: (source stage, target stage,
# microbatch) in the order of sending. NCCL matches messages between two ranks by their order alone.
_Channels = dict[tuple[Work, int, int], deque[tuple[int, int, int]]]


@dataclass(slots=True)
class _Stage:
    """What one stage has done so far. splits: it has W actions, until which its microbatches are held."""

    index: int
    splits: bool
    forwarded: set[int] = field(default_factory=set)
    backwarded: set[int] = field(default_factory=set)
    weighted: set[int] = field(default_factory=set)
    received: set[tuple[Work, int, int]] = field(default_factory=set)
    reduced: bool = False
    peak: int = 0

    @property
    def held(self) -> int:
        return len(self.forwarded) - len(self.weighted if self.splits else self.backwarded)


def dry_run(schedule: Schedule) -> tuple[int, ...]:
    """Runs all ranks' lists with sends that do not block and receives that do.

    Returns the most microbatches that each stage holds at once between their forward and their backward, or their W
    where the stage has such (forward-only schedules hold none: zero).

    Raises ScheduleError, naming the actions, when the ranks wait for each other, a receive has no send or comes in
    another order than sent, a computation comes before what it needs or twice, or something is left undone.
    """
    return _DryRun(schedule).run()


class _DryRun:
    def __init__(self, schedule: Schedule) -> None:
        self.lists = schedule.ranks
        self.rank_of = schedule.rank_of
        everything = [action for actions in schedule.ranks for action in actions]
        splits = {action.stage for action in everything if action.work is Work.WEIGHT}
        self.trains = any(action.work is Work.BACKWARD for action in everything)
        self.stages = [_Stage(index, index in splits) for index in range(schedule.stages)]
        # (stage, work) -> peers that the stage receives from in some microbatch, and so must in all
        self.sources: dict[tuple[int, Work], set[int]] = {}
        self.left: dict[int, dict[Work, int]] = {stage.index: {} for stage in self.stages}
        for action in everything:
            if action.peer is not None and action.peer not in self.rank_of:
                raise ScheduleError(f"{action} names a stage that is not there; there are {len(self.stages)}")
            if action.work.is_receive:
                assert action.peer is not None
                self.sources.setdefault((action.stage, action.work), set()).add(action.peer)
            counts = self.left[action.stage]
            counts[action.work] = counts.get(action.work, 0) + 1
        self.channels: _Channels = {}

    def run(self) -> tuple[int, ...]:
        positions = [0] * len(self.lists)
        progress = True
        while progress:
            progress = False
            for rank, actions in enumerate(self.lists):
                while positions[rank] < len(actions) and self.advance(actions[positions[rank]]):
                    positions[rank] += 1
                    progress = True
        stuck = [str(actions[at]) for actions, at in zip(self.lists, positions, strict=True) if at < len(actions)]
        if stuck:
            raise ScheduleError(f"the schedule deadlocks: {', '.join(stuck)} wait for what is never sent")
        self.check_complete()
        return tuple(stage.peak for stage in self.stages)

    def advance(self, action: Action) -> bool:
        """Does a rank's next action if that can run now."""
        stage = self.stages[action.stage]
        if action.work.is_receive and not self.receive(stage, action):
            return False
        if action.work.is_send:
            self.send(stage, action)
        elif action.work.is_compute:
            self.compute(stage, action)
            if self.trains:
                stage.peak = max(stage.peak, stage.held)
        elif action.work is Work.REDUCE:
            counts = self.left[stage.index]
            if stage.reduced:
                raise ScheduleError(f"{action} comes twice")
            for work in (Work.BACKWARD, Work.WEIGHT):
                if counts.get(work):
                    raise ScheduleError(f"{action} comes before the last {work.value} of its stage")
            stage.reduced = True
        self.left[stage.index][action.work] -= 1
        return True

    def channel(self, action: Action) -> deque[tuple[int, int, int]]:
        assert action.peer is not None
        sends = action.work.is_send
        source, target = (action.stage, action.peer) if sends else (action.peer, action.stage)
        key = (action.work if sends else SEND_OF[action.work], self.rank_of[source], self.rank_of[target])
        return self.channels.setdefault(key, deque())

    def receive(self, stage: _Stage, action: Action) -> bool:
        assert action.peer is not None and action.microbatch is not None
        channel = self.channel(action)
        if not channel:
            return False
        wanted = (action.peer, action.stage, action.microbatch)
        if self.rank_of[action.peer] == self.rank_of[action.stage] and wanted in channel:
            channel.remove(wanted)  # handed over in memory, in any order
            stage.received.add((action.work, action.peer, action.microbatch))
            return True
        source, target, microbatch = channel[0]
        if (source, target, microbatch) != wanted:
            other = "" if (source, target) == (action.peer, action.stage) else f" from {source} to {target}"
            raise ScheduleError(
                f"{action} comes where microbatch {microbatch} was sent{other}; receive in the order of sending"
            )
        channel.popleft()
        stage.received.add((action.work, action.peer, action.microbatch))
        return True

    def send(self, stage: _Stage, action: Action) -> None:
        assert action.peer is not None and action.microbatch is not None
        done = stage.forwarded if action.work is Work.SEND_ACTIVATION else stage.backwarded
        if action.microbatch not in done:
            raise ScheduleError(f"{action} comes before what it sends is computed")
        self.channel(action).append((action.stage, action.peer, action.microbatch))

    def compute(self, stage: _Stage, action: Action) -> None:
        assert action.microbatch is not None
        k, work = action.microbatch, action.work
        before, done = {
            Work.FORWARD: (None, stage.forwarded),
            Work.BACKWARD: (stage.forwarded, stage.backwarded),
            Work.WEIGHT: (stage.backwarded, stage.weighted),
        }[work]
        if before is not None and k not in before:
            raise ScheduleError(f"{action} comes before {'B' if work is Work.WEIGHT else 'F'}{action.stage}.{k}")
        if k in done:
            raise ScheduleError(f"{action} comes twice")
        receive = {Work.FORWARD: Work.RECV_ACTIVATION, Work.BACKWARD: Work.RECV_GRADIENT}.get(work)
        if receive is not None:
            for peer in sorted(self.sources.get((action.stage, receive), ())):
                if (receive, peer, k) not in stage.received:
                    raise ScheduleError(f"{action} comes before {receive.value}{action.stage}.{k}<{peer}")
        done.add(k)

    def check_complete(self) -> None:
        everything = set().union(*(stage.forwarded for stage in self.stages))
        for stage in self.stages:
            missing = [f"F{stage.index}.{k}" for k in sorted(everything - stage.forwarded)]
            if self.trains:
                missing += [f"B{stage.index}.{k}" for k in sorted(everything - stage.backwarded)]
            if stage.splits:
                missing += [f"W{stage.index}.{k}" for k in sorted(everything - stage.weighted)]
            if missing:
                raise ScheduleError(f"stage {stage.index} never does {', '.join(missing)}")
        for (work, _, _), left in self.channels.items():
            for source, target, microbatch in left:
                raise ScheduleError(f"{work.value}{source}.{microbatch}>{target} is never received")
