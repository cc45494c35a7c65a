"""The predicted timeline of a plan: the runtime's own schedule, timed with what the plan says of its stages."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from autopart.plan import Plan
from autopart.runtime.schedule import Action, Work, make_schedule
from autopart.runtime.schedule.double_buffered import unrolled
from autopart.runtime.trace import Span, Timeline, trace_object
from autopart.shared_hosts import SharedHosts
from autopart.simulate import Simulation, StageTimes, simulate, steady_seconds


def simulate_plan(plan: Plan) -> Simulation:
    """The plan's step on a clock; a plan's step time is this makespan and ``plan.tied_s``.

    A plan of several stages without ``transfers`` (written by hand, or by an earlier version) is taken as a chain whose
    transfers take no time. peak_bytes are the plan's own, as are the numbers in flight that they count with.
    Raises ScheduleError when the schedule would wait for ever.
    """
    count = len(plan.stages)
    transfers = plan.transfers or tuple((stage, stage + 1, 0.0, 0.0) for stage in range(count - 1))
    there = {(source, target): seconds for source, target, seconds, _ in transfers}
    back = {(source, target): seconds for source, target, _, seconds in transfers if seconds is not None}
    schedule = make_schedule(
        plan.schedule, count, plan.microbatches, sorted(there), sorted(back), plan.warmup, plan.places
    )
    times = [
        StageTimes(
            *(stage.forward_s, stage.backward_s, stage.weight_s, stage.step_end_s),
            fixed_bytes=stage.memory_bytes,
            first_s=stage.arrival_s,
        )
        for stage in plan.stages
    ]

    def transfer(action: Action) -> float:
        assert action.peer is not None
        if action.work is Work.SEND_ACTIVATION:
            return there[action.stage, action.peer]
        return back[action.peer, action.stage]

    durations = None
    if plan.shared_host:
        devices = [tuple(plan.stages[plan.places.index(place)].devices) for place in range(plan.pp)]
        durations = SharedHosts(plan.shared_host, plan.alone).durations(devices)
    if plan.schedule != "2bw":
        return simulate(schedule, times, transfer, durations)
    # A batch's timeline with its fill and drain, but the step is what one more batch adds, and a rank, which has one
    # stage, is busy with half of two batches and its sums: on shared hosts a first batch is alone for longer.
    one, two = (simulate(unrolled(schedule, count, plan.microbatches), times, transfer, durations) for count in (1, 2))
    steady = steady_seconds(schedule, plan.schedule, plan.microbatches, times, transfer, durations)
    sums = tuple(own.reduce_s for own in times)
    busy = tuple(both / 2 + more for both, more in zip(two.busy_s, sums, strict=True))
    return replace(one, makespan_s=steady, busy_s=busy, reducing_s=sums)


def predicted_trace(plan: Plan, found: Simulation, first_pid: int = 0) -> dict[str, Any]:
    """The simulation in the format of :mod:`autopart.runtime.trace`: a line per group of devices."""
    order = {device: rank for rank, device in enumerate(sorted({d for stage in plan.stages for d in stage.devices}))}
    timelines = []
    for place in range(plan.pp):
        stages = tuple(stage for stage, its in enumerate(plan.places) if its == place)
        own = [event for event in found.events if event.action.stage in stages]
        spans = tuple(Span(event.action, event.start_s, event.end_s) for event in own)
        timelines.append(Timeline(stages, order[plan.stages[stages[0]].devices[0]], spans))
    return trace_object(timelines, "predicted", first_pid)
