"""Ranks that share their host's cores are faster while others wait: no core idles that work is there for."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest

from autopart.analysis import analyze
from autopart.cluster import Cluster, Node
from autopart.cost import devices as presets
from autopart.plan import Plan
from autopart.planner import make_plan
from autopart.predict import simulate_plan
from autopart.runtime.errors import ClusterError, ScheduleError
from autopart.runtime.schedule import Schedule, make_schedule, places_of
from autopart.shared_hosts import SharedHosts
from autopart.simulate import Simulation, StageTimes, simulate, steady_seconds
from families import captured


def chain(stages: int) -> list[tuple[int, int]]:
    return [(stage, stage + 1) for stage in range(stages - 1)]


def check_speeds(
    found: Simulation, schedule: Schedule, times: list[StageTimes], hosts: SharedHosts, devices: list[tuple[int, ...]]
) -> None:
    """Between any two events each action goes on as fast as the cores allow, and ends when its work is done."""
    splits = {a.stage for actions in schedule.ranks for a in actions if a.peer is None and a.work.value == "W"}
    computed = [event for event in found.events if event.action.peer is None and event.end_s > event.start_s]
    moments = sorted({moment for event in computed for moment in (event.start_s, event.end_s)})
    done = dict.fromkeys(computed, 0.0)
    for begin, end in itertools.pairwise(moments):
        now = [event for event in computed if event.start_s <= begin and end <= event.end_s]
        own = {event: devices[schedule.rank_of[event.action.stage]] for event in now}
        for event in now:
            speeds = [hosts.alone]
            for host in {device // hosts.size for device in own[event]}:
                busy = sum(device // hosts.size == host for devices_of in own.values() for device in devices_of)
                speeds.append(hosts.size / busy)
            done[event] += (end - begin) * min(speeds)
    for event, work in done.items():
        action = event.action
        assert work == pytest.approx(times[action.stage].seconds(action.work, action.stage in splits)), str(action)


@pytest.mark.parametrize("seed", range(40))
def test_each_action_gets_its_work(seed: int) -> None:
    rng = random.Random(seed)
    name = rng.choice(["gpipe", "1f1b", "zb-h1", "interleaved"])
    ranks, virtual = rng.randint(1, 4), 2 if name == "interleaved" else 1
    stages = ranks * virtual
    places = places_of(name, stages, virtual)
    schedule = make_schedule(name, stages, ranks * rng.randint(1, 2), chain(stages), places=places)
    times = [StageTimes(rng.random(), 1 + rng.random(), rng.random(), rng.random()) for _ in range(stages)]
    width = rng.randint(1, 2)
    devices = [tuple(range(rank * width, (rank + 1) * width)) for rank in range(ranks)]
    size = rng.choice([ranks * width, max(1, ranks * width // 2)])
    hosts = SharedHosts(size, rng.choice([1.0, 1.5, float(size)]))
    pause = rng.random()
    found = simulate(schedule, times, pause, hosts.durations(devices))
    check_speeds(found, schedule, times, hosts, devices)
    priced = simulate(schedule, times, pause)
    assert priced.makespan_s / hosts.alone <= found.makespan_s * (1 + 1e-9)
    if hosts.alone == 1:
        assert found.makespan_s == pytest.approx(priced.makespan_s)


def test_ranks_in_turn_have_the_host_to_themselves() -> None:
    schedule, times = make_schedule("gpipe", 4, 1, chain(4)), [StageTimes(1.0, 2.0)] * 4
    alone = SharedHosts(4, 2.0).durations([(0,), (1,), (2,), (3,)])
    assert simulate(schedule, times, 0.0, alone).makespan_s == 6.0
    assert simulate(schedule, times).makespan_s == 12.0
    # two hosts of two, each with one core: nobody shares
    assert (
        steady_seconds(schedule, "gpipe", 1, times, 0.0, SharedHosts(2, 2.0).durations([(0,), (1,), (2,), (3,)])) == 6
    )


def test_a_step_of_2bw_is_no_less_than_a_ranks_work() -> None:
    """The second batch alone uses time in which ranks waited in the first, and adds 29 seconds."""
    schedule = make_schedule("2bw", 4, 4, chain(4))
    times = [StageTimes(4.0, 4.0), StageTimes(4.0, 3.0), StageTimes(2.0, 2.0), StageTimes(4.0, 3.0)]
    assert steady_seconds(schedule, "2bw", 4, times) == 32.0
    devices = [(rank,) for rank in range(4)]
    for alone in (1.0, 2.0, 4.0):
        shared = steady_seconds(schedule, "2bw", 4, times, 0.0, SharedHosts(4, alone).durations(devices))
        assert 32.0 / alone <= shared <= 32.0 * (1 + 1e-9)


def test_a_schedule_that_waits_for_ever_is_told() -> None:
    schedule = Schedule.parse("RG0.0<1 F0.0 SA0.0>1\nRA1.0<0 F1.0 B1.0 SG1.0>0")
    with pytest.raises(ScheduleError, match="waits for ever"):
        simulate(schedule, [StageTimes(1, 1)] * 2, 0.0, SharedHosts(2, 2.0).durations([(0,), (1,)]))


def host(alone: float) -> Cluster:
    return Cluster((Node.of(replace(presets.device("CPU"), alone=alone), 4),))


def test_plans_know_it() -> None:
    """A pipeline's ranks wait, so that it is faster; the bound holds for every configuration."""
    program = captured("gpt2")
    analysis = analyze(program)
    best = make_plan(program, host(2.0), analysis=analysis)
    for pp, dp, tp in ((4, 1, 1), (2, 2, 1), (1, 4, 1)):
        shared = make_plan(program, host(2.0), analysis=analysis, pp=pp, dp=dp, tp=tp)
        own = make_plan(program, host(1.0), analysis=analysis, pp=pp, dp=dp, tp=tp)
        assert best.bound_s <= best.step_time_s <= shared.step_time_s
        assert shared.bound_s <= shared.step_time_s <= own.step_time_s
        if pp > 1:
            assert shared.step_time_s < own.step_time_s
        else:
            assert shared.step_time_s == own.step_time_s
        read = Plan.from_json(shared.to_json())
        assert (read.shared_host, read.alone) == (4, 2.0)
        assert simulate_plan(read).makespan_s + read.tied_s == shared.step_time_s


def test_alone_is_no_brake() -> None:
    with pytest.raises(ClusterError, match="alone is at least 1"):
        host(0.5)
    assert SharedHosts.of(host(1.0)) is None
    assert SharedHosts.of(Cluster((*host(2.0).nodes, *host(3.0).nodes))) is None
