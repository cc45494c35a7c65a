"""Runs a schedule on a clock: when each action starts and ends, and what each rank holds in memory.

The rules are those of the runtime. A rank works through its list in order. Sends do not block: a transfer starts when
the action before it has ended and takes the edge's seconds; transfers of one rank to another follow each other, and
between stages of one rank they take nothing. A receive blocks the rank until its transfer has arrived. A rank's memory
is what its stages always hold, the saved activations of each microbatch from the start of its forward to the end of its
backward, what the weights' share needs of them until its end, and what is temporary in the action at hand.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from autopart.runtime.errors import ScheduleError
from autopart.runtime.schedule import Action, Schedule, Work
from autopart.runtime.schedule.actions import SEND_OF
from autopart.runtime.schedule.double_buffered import unrolled
from autopart.runtime.schedule.exchanges import Step

Seconds = TypeVar("Seconds", bound=Any)
"""A number, or an array of them."""


@dataclass(frozen=True, slots=True)
class StageTimes:
    """One stage's seconds per microbatch, and its bytes.

    backward_s: of the whole backward. weight_s: the weights' share of it, which a schedule with W does there.
    reduce_s: once per step. fixed_bytes: parameters, gradients, optimizer state. saved_bytes: per microbatch between
    its forward and backward. weight_bytes: per microbatch between its B and W; None: as many as saved_bytes.
    working_bytes: temporary, while a microbatch is computed. first_s: what the step's first forward takes longer.
    """

    forward_s: float
    backward_s: float
    weight_s: float = 0.0
    reduce_s: float = 0.0
    fixed_bytes: int = 0
    saved_bytes: int = 0
    working_bytes: int = 0
    weight_bytes: int | None = None
    first_s: float = 0.0

    def seconds(self, work: Work, splits: bool = False) -> float:
        """splits: the stage's schedule has W actions."""
        if work is Work.FORWARD:
            return self.forward_s
        if work is Work.BACKWARD:
            return self.backward_s - (self.weight_s if splits else 0.0)
        if work is Work.WEIGHT:
            return self.weight_s
        return self.reduce_s if work is Work.REDUCE else 0.0


@dataclass(frozen=True, slots=True)
class Event:
    """An action with its start and end in seconds; of a send, the transfer's; of a receive, the wait's."""

    action: Action
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Simulation:
    """makespan_s: until the last rank's last action ends. in_flight: per stage; the others: per rank.

    busy_s counts computing and reducing, reducing_s the latter. in_flight: most microbatches between their forward and
    backward at once (their W, where the stage has such).
    """

    makespan_s: float
    busy_s: tuple[float, ...]
    reducing_s: tuple[float, ...]
    peak_bytes: tuple[int, ...]
    in_flight: tuple[int, ...]
    events: tuple[Event, ...]

    @property
    def idle_s(self) -> tuple[float, ...]:
        return tuple(self.makespan_s - busy for busy in self.busy_s)

    @property
    def bubble(self) -> float:
        """Idle share of all ranks' time, between 0 and 1."""
        return sum(self.idle_s) / (self.makespan_s * len(self.busy_s)) if self.makespan_s else 0.0


Transfer = Callable[[Action], float]
"""Seconds that a send takes."""

Durations = Callable[[Schedule, Sequence[StageTimes], Transfer], Sequence[Sequence[float]]]
"""Seconds of each rank's actions that compute, in their order, where they are not those of the stages' times."""


class _Clock:
    """The state of one run. ``arrivals``: when each sent message is there, by (work, from, to, microbatch)."""

    def __init__(
        self, schedule: Schedule, times: Sequence[StageTimes], transfer: Transfer, durations: Durations | None
    ):
        self.times = times
        taken = durations(schedule, times, transfer) if durations is not None else None
        self.durations = None if taken is None else [iter(own) for own in taken]
        self.transfer = transfer
        self.rank_of = schedule.rank_of
        ranks = len(schedule.ranks)
        self.now = [0.0] * ranks
        self.busy = [0.0] * ranks
        self.reducing = [0.0] * ranks
        self.channel: dict[tuple[int, int], float] = {}
        self.arrivals: dict[tuple[Work, int, int, int | None], float] = {}
        # Where the weights' share is computed later, part of the saved activations stay until then.
        self.splits = {a.stage for actions in schedule.ranks for a in actions if a.work is Work.WEIGHT}
        self.held = [0] * len(times)
        self.in_flight = [0] * len(times)
        self.bytes = [sum(times[stage].fixed_bytes for stage in own) for own in _stages(schedule)]
        self.peak_bytes = list(self.bytes)
        self.events: list[Event] = []

    def run(self, action: Action) -> bool:
        """Performs one action; False when it has to wait for a message that is not sent yet."""
        stage, work = action.stage, action.work
        rank = self.rank_of[stage]
        start = self.now[rank]
        if work.is_send:
            assert action.peer is not None
            to = self.rank_of[action.peer]
            begins = ends = start
            if to != rank:
                begins = max(start, self.channel.get((rank, to), 0.0))
                ends = self.channel[rank, to] = begins + self.transfer(action)
            self.arrivals[work, stage, action.peer, action.microbatch] = ends
            self.events.append(Event(action, begins, ends))
            return True
        if work.is_receive:
            assert action.peer is not None
            arrival = self.arrivals.get((SEND_OF[work], action.peer, stage, action.microbatch))
            if arrival is None:
                return False
            self.now[rank] = max(start, arrival)
            self.events.append(Event(action, start, self.now[rank]))
            return True
        if self.durations is None:
            duration = self.times[stage].seconds(work, stage in self.splits)
        else:
            duration = next(self.durations[rank])
        if work is Work.FORWARD and action.microbatch == 0:
            duration += self.times[stage].first_s
        self.now[rank] = start + duration
        self.busy[rank] += duration
        if work is Work.REDUCE:
            self.reducing[rank] += duration
        self.events.append(Event(action, start, self.now[rank]))
        self.count_memory(action, rank)
        return True

    def count_memory(self, action: Action, rank: int) -> None:
        if not action.work.is_compute:
            return
        stage, own = action.stage, self.times[action.stage]
        later = own.saved_bytes if own.weight_bytes is None else own.weight_bytes
        if action.work is Work.FORWARD:
            self.held[stage] += 1
            self.in_flight[stage] = max(self.in_flight[stage], self.held[stage])
            self.bytes[rank] += own.saved_bytes
        self.peak_bytes[rank] = max(self.peak_bytes[rank], self.bytes[rank] + own.working_bytes)
        if action.work is Work.BACKWARD:
            self.bytes[rank] += (later if stage in self.splits else 0) - own.saved_bytes
        elif action.work is Work.WEIGHT:
            self.bytes[rank] -= later
        if action.work is (Work.WEIGHT if stage in self.splits else Work.BACKWARD):
            self.held[stage] -= 1


def _stages(schedule: Schedule) -> list[list[int]]:
    return [sorted({action.stage for action in actions}) for actions in schedule.ranks]


def steady_seconds(
    schedule: Schedule,
    name: str,
    microbatches: int,
    times: Sequence[StageTimes],
    transfer: Transfer | float = 0.0,
    durations: Durations | None = None,
) -> float:
    """Seconds of a step: the makespan, or under "2bw" what one more batch adds to the batches before.

    The second batch may use time in which stages waited in the first, so it is no less than the work of any stage.
    """

    def run(of: Schedule, batches: int = 1) -> tuple[float, float]:
        """Its end, and the work of the busiest rank."""
        if durations is None:
            most = max(own.forward_s + own.backward_s for own in times)
            return makespan(of, times, transfer), batches * microbatches * most
        found = simulate(of, times, transfer, durations)
        return found.makespan_s, max(found.busy_s)

    if name != "2bw":
        return run(schedule)[0]
    (one, _), (two, work) = (run(unrolled(schedule, count, microbatches), count) for count in (1, 2))
    return max(two - one, work / 2) + max(own.reduce_s for own in times)


def makespan(schedule: Schedule, times: Sequence[StageTimes], transfer: Transfer | float = 0.0) -> float:
    """The seconds that :func:`simulate` finds, without events and memory, for searches over long schedules.

    A function ``transfer`` is asked once for each kind of send between two stages.
    """
    seconds = transfer if callable(transfer) else lambda _: float(transfer)
    rank_of = schedule.rank_of
    splits = {a.stage for actions in schedule.ranks for a in actions if a.work is Work.WEIGHT}
    lasts = [{work.value: own.seconds(work, stage in splits) for work in Work} for stage, own in enumerate(times)]
    sends: dict[tuple[bool, int, int], float] = {}
    channel: dict[tuple[int, int], float] = {}
    arrivals: dict[tuple[bool, int, int, int | None], float] = {}
    now, at, end = [0.0] * len(schedule.ranks), [0] * len(schedule.ranks), 0.0
    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(schedule.ranks):
            clock, position, count = now[rank], at[rank], len(actions)
            while position < count:
                action = actions[position]
                work, stage, peer = action.work, action.stage, action.peer
                if peer is None:
                    clock += lasts[stage][work._value_]
                elif work.is_receive:
                    arrival = arrivals.pop((work is Work.RECV_GRADIENT, peer, stage, action.microbatch), None)
                    if arrival is None:
                        break
                    clock = max(clock, arrival)
                else:
                    back, to, ends = work is Work.SEND_GRADIENT, rank_of[peer], clock
                    if to != rank:
                        kind = back, stage, peer
                        if kind not in sends:
                            sends[kind] = seconds(action)
                        ends = channel[rank, to] = max(clock, channel.get((rank, to), 0.0)) + sends[kind]
                        end = max(end, ends)
                    arrivals[back, stage, peer, action.microbatch] = ends
                position += 1
            moved, now[rank], at[rank] = moved or position > at[rank], clock, position
    if any(position < len(actions) for position, actions in zip(at, schedule.ranks, strict=True)):
        simulate(schedule, times, transfer)  # says what waits for ever
    return max(end, *now)


def row_makespan(
    order: Sequence[Sequence[Step]], times: Sequence[StageTimes], there: Sequence[float], back: Sequence[float]
) -> float:
    """:func:`makespan` of stages in a row, one on each rank, from their computations alone, which are no W.

    order: by stage. there, back: seconds of sending a microbatch from stage s to s + 1, and its gradient back.
    """
    forward, backward = [own.forward_s for own in times], [own.backward_s for own in times]
    return row_end(order, forward, backward, [own.reduce_s for own in times], there, back, 0.0, max)


def row_end(
    order: Sequence[Sequence[Step]],
    forward: Sequence[Seconds],
    backward: Sequence[Seconds],
    ends: Sequence[Seconds],
    there: Sequence[Seconds],
    back: Sequence[Seconds],
    start: Seconds,
    largest: Callable[[Seconds, Seconds], Seconds],
) -> Seconds:
    """The same in numbers, or in arrays with one for each of many rows: of stages forward, backward and at their end.

    start: when all begin. largest: of two such seconds the larger.
    """
    last = len(order) - 1
    values: list[dict[int, Seconds]] = [{} for _ in order]  # by stage, when what microbatches need has arrived
    gradients: list[dict[int, Seconds]] = [{} for _ in order]
    now, at = [start] * len(order), [0] * len(order)
    free_there, free_back = [start] * len(order), [start] * len(order)
    moved = True
    while moved:
        moved = False
        for stage, steps in enumerate(order):
            clock, position, count = now[stage], at[stage], len(steps)
            forward_s, backward_s = forward[stage], backward[stage]
            while position < count:
                work, _, k = steps[position]
                if work == "F":
                    if stage:
                        arrival = values[stage].pop(k, None)
                        if arrival is None:
                            break
                        clock = largest(clock, arrival)
                    clock = clock + forward_s
                    if stage < last:
                        free_there[stage] = largest(clock, free_there[stage]) + there[stage]
                        values[stage + 1][k] = free_there[stage]
                else:
                    if stage < last:
                        arrival = gradients[stage].pop(k, None)
                        if arrival is None:
                            break
                        clock = largest(clock, arrival)
                    clock = clock + backward_s
                    if stage:
                        free_back[stage] = largest(clock, free_back[stage]) + back[stage - 1]
                        gradients[stage - 1][k] = free_back[stage]
                position += 1
            moved, now[stage], at[stage] = moved or position > at[stage], clock, position
    assert all(position == len(steps) for position, steps in zip(at, order, strict=True)), "a row's orders do not wait"
    # what is sent is waited for by a computation, which ends later
    return functools.reduce(largest, [clock + end for clock, end in zip(now, ends, strict=True)])


def simulate(
    schedule: Schedule,
    times: Sequence[StageTimes],
    transfer: Transfer | float = 0.0,
    durations: Durations | None = None,
) -> Simulation:
    """Times a schedule and tracks its memory.

    times: one per stage. transfer: seconds of a send to another rank, as a number or as a function of the send.
    durations: see :data:`Durations`.
    Raises ScheduleError when the numbers of stages differ or when the schedule waits for ever.
    """
    if len(times) != schedule.stages:
        raise ScheduleError(f"the schedule has {schedule.stages} stages, times are given for {len(times)}")
    seconds = transfer if callable(transfer) else lambda _: float(transfer)
    clock = _Clock(schedule, times, seconds, durations)
    left = [deque(actions) for actions in schedule.ranks]
    moved = True
    while moved:
        moved = False
        for actions in left:
            while actions and clock.run(actions[0]):
                actions.popleft()
                moved = True
    stuck = [actions[0] for actions in left if actions]
    if stuck:
        raise ScheduleError(f"the schedule waits for ever: {', '.join(map(str, stuck))} have no matching send")
    ends = [event.end_s for event in clock.events]
    events = tuple(sorted(clock.events, key=lambda event: (event.start_s, event.action.stage)))
    ranks = (tuple(clock.busy), tuple(clock.reducing), tuple(clock.peak_bytes))
    return Simulation(max(ends, default=0.0), *ranks, tuple(clock.in_flight), events)
