"""Runs a schedule on a clock: when each action starts and ends, and what each stage holds in memory.

The rules are those of the runtime. A stage works through its list in order. Sends do not block: a transfer starts when
the action before it has ended and takes the edge's seconds; transfers of one stage to one peer follow each other. A
receive blocks the stage until its transfer has arrived. A stage's memory is what it always holds plus one
microbatch's saved activations from the start of its forward to the end of its backward (its weights' share included).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from autopart.runtime.errors import ScheduleError
from autopart.runtime.schedule import Action, Schedule, Work


@dataclass(frozen=True, slots=True)
class StageTimes:
    """One stage's seconds per microbatch, and its bytes.

    weight_s: the weights' share where a schedule splits the backward (backward_s is then the rest).
    reduce_s: once per step. fixed_bytes: parameters, gradients, optimizer state. saved_bytes: per microbatch in flight.
    working_bytes: temporary, while any microbatch is computed.
    """

    forward_s: float
    backward_s: float
    weight_s: float = 0.0
    reduce_s: float = 0.0
    fixed_bytes: int = 0
    saved_bytes: int = 0
    working_bytes: int = 0

    def seconds(self, work: Work) -> float:
        if work is Work.FORWARD:
            return self.forward_s
        if work is Work.BACKWARD:
            return self.backward_s
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
    """makespan_s: until the last stage's last action ends. busy_s, peak_bytes, in_flight: per stage.

    busy_s counts computing and reducing. in_flight: most microbatches between their forward and backward at once.
    """

    makespan_s: float
    busy_s: tuple[float, ...]
    peak_bytes: tuple[int, ...]
    in_flight: tuple[int, ...]
    events: tuple[Event, ...]

    @property
    def idle_s(self) -> tuple[float, ...]:
        return tuple(self.makespan_s - busy for busy in self.busy_s)

    @property
    def bubble(self) -> float:
        """Idle share of all stages' time, between 0 and 1."""
        return sum(self.idle_s) / (self.makespan_s * len(self.busy_s)) if self.makespan_s else 0.0

    def stage_events(self, stage: int) -> tuple[Event, ...]:
        return tuple(event for event in self.events if event.action.stage == stage)


Transfer = Callable[[Action], float]
"""Seconds that a send takes."""

_PARTNER = {Work.RECV_ACTIVATION: Work.SEND_ACTIVATION, Work.RECV_GRADIENT: Work.SEND_GRADIENT}


class _Clock:
    """The state of one run. ``arrivals``: when each sent message is there, by (work, from, to, microbatch)."""

    def __init__(self, schedule: Schedule, times: Sequence[StageTimes], transfer: Transfer):
        self.times = times
        self.transfer = transfer
        count = len(times)
        self.now = [0.0] * count
        self.busy = [0.0] * count
        self.channel: dict[tuple[int, int], float] = {}
        self.arrivals: dict[tuple[Work, int, int, int | None], float] = {}
        self.held: list[set[int]] = [set() for _ in times]
        self.in_flight = [0] * count
        # Where the weights' share is computed later, the saved activations stay until then.
        self.release = [
            Work.WEIGHT if any(action.work is Work.WEIGHT for action in actions) else Work.BACKWARD
            for actions in schedule.stages
        ]
        self.events: list[Event] = []

    def run(self, action: Action) -> bool:
        """Performs one action; False when it has to wait for a message that is not sent yet."""
        stage, work, start = action.stage, action.work, self.now[action.stage]
        if work.is_send:
            assert action.peer is not None
            edge = (stage, action.peer)
            begins = max(start, self.channel.get(edge, 0.0))
            ends = begins + self.transfer(action)
            self.channel[edge] = ends
            self.arrivals[work, stage, action.peer, action.microbatch] = ends
            self.events.append(Event(action, begins, ends))
            return True
        if work.is_receive:
            assert action.peer is not None
            arrival = self.arrivals.get((_PARTNER[work], action.peer, stage, action.microbatch))
            if arrival is None:
                return False
            self.now[stage] = max(start, arrival)
            self.events.append(Event(action, start, self.now[stage]))
            return True
        duration = self.times[stage].seconds(work)
        self.now[stage] = start + duration
        self.busy[stage] += duration
        self.events.append(Event(action, start, self.now[stage]))
        self.count_memory(action)
        return True

    def count_memory(self, action: Action) -> None:
        if action.microbatch is None:
            return
        held = self.held[action.stage]
        if action.work is Work.FORWARD:
            held.add(action.microbatch)
            self.in_flight[action.stage] = max(self.in_flight[action.stage], len(held))
        elif action.work is self.release[action.stage]:
            held.discard(action.microbatch)


def simulate(schedule: Schedule, times: Sequence[StageTimes], transfer: Transfer | float = 0.0) -> Simulation:
    """Times a schedule and tracks its memory.

    times: one per stage. transfer: seconds of a send, as a number or as a function of the send.
    Raises ScheduleError when the numbers of stages differ or when the schedule waits for ever.
    """
    if len(times) != len(schedule.stages):
        raise ScheduleError(f"the schedule has {len(schedule.stages)} stages, times are given for {len(times)}")
    seconds = transfer if callable(transfer) else lambda _: float(transfer)
    clock = _Clock(schedule, times, seconds)
    left = [deque(actions) for actions in schedule.stages]
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
    peaks = tuple(
        stage.fixed_bytes + stage.saved_bytes * count + (stage.working_bytes if count else 0)
        for stage, count in zip(times, clock.in_flight, strict=True)
    )
    ends = [event.end_s for event in clock.events]
    events = tuple(sorted(clock.events, key=lambda event: (event.start_s, event.action.stage)))
    return Simulation(max(ends, default=0.0), tuple(clock.busy), peaks, tuple(clock.in_flight), events)
