"""The simulator against closed forms and against a second, independent way to time a schedule."""

from __future__ import annotations

import itertools
import random
from functools import cache

import pytest

from autopart.runtime.errors import ScheduleError
from autopart.runtime.schedule import Action, Schedule, Work, gpipe, make_schedule, one_f_one_b, places_of
from autopart.runtime.schedule.flushing import one_f_one_b_order
from autopart.simulate import Event, Simulation, StageTimes, makespan, row_makespan, simulate


def chain(stages: int) -> list[tuple[int, int]]:
    return [(stage, stage + 1) for stage in range(stages - 1)]


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("stages", "microbatches"), [(1, 1), (1, 4), (2, 3), (4, 8), (4, 4), (8, 3)])
def test_equal_stages(name: str, stages: int, microbatches: int) -> None:
    """(m + p - 1)(f + b) in all, a bubble of (p - 1)/m over the ideal; GPipe and PipeDream-flush alike."""
    found = simulate(make_schedule(name, stages, microbatches, chain(stages)), [StageTimes(1.0, 2.0)] * stages)
    ideal = 3.0 * microbatches
    assert found.makespan_s == ideal + 3.0 * (stages - 1)
    assert found.busy_s == (ideal,) * stages
    assert found.idle_s == (3.0 * (stages - 1),) * stages
    assert (found.makespan_s - ideal) / ideal == pytest.approx((stages - 1) / microbatches)
    assert found.bubble == pytest.approx((stages - 1) / (microbatches + stages - 1))


@pytest.mark.parametrize(("ranks", "virtual", "microbatches"), [(2, 2, 4), (4, 2, 8), (4, 3, 4), (3, 4, 9), (1, 3, 2)])
def test_interleaving_divides_the_bubble(ranks: int, virtual: int, microbatches: int) -> None:
    """A bubble of (p - 1)/(m v) over the ideal (Narayanan et al. 2021, 2.2): a stage is 1/v of a rank's work."""
    stages = ranks * virtual
    schedule = make_schedule(
        "interleaved", stages, microbatches, chain(stages), places=places_of("interleaved", stages, virtual)
    )
    found = simulate(schedule, [StageTimes(1.0 / virtual, 2.0 / virtual)] * stages)
    ideal = 3.0 * microbatches
    assert found.busy_s == pytest.approx((ideal,) * ranks)
    assert (found.makespan_s - ideal) / ideal == pytest.approx((ranks - 1) / (microbatches * virtual))


@pytest.mark.parametrize(("stages", "microbatches"), [(1, 3), (2, 4), (4, 8), (4, 12), (8, 9)])
@pytest.mark.parametrize(("forward", "inputs", "weights"), [(1.0, 1.0, 1.0), (2.0, 3.0, 2.0), (3.0, 2.0, 2.0)])
def test_zb_h1(stages: int, microbatches: int, forward: float, inputs: float, weights: float) -> None:
    """(p - 1)(f + b - w) beyond a stage's own work (Qi et al. 2024, table 2)."""
    schedule = make_schedule("zb-h1", stages, microbatches, chain(stages))
    times = [StageTimes(forward, inputs + weights, weights)] * stages
    bubble = simulate(schedule, times).makespan_s - microbatches * (forward + inputs + weights)
    assert bubble == pytest.approx((stages - 1) * (forward + inputs - weights))
    whole = simulate(make_schedule("1f1b", stages, microbatches, chain(stages)), times).makespan_s
    assert whole - microbatches * (forward + inputs + weights) == pytest.approx(
        (stages - 1) * (forward + inputs + weights)
    )


@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 4), (2, 4), (3, 6), (4, 8), (8, 20)])
def test_zb_v_has_no_bubble_where_all_passes_take_as_long(ranks: int, microbatches: int) -> None:
    """A rank waits for its first microbatch and never again; the last one to begin ends last."""
    stages = 2 * ranks
    schedule = make_schedule("zb-v", stages, microbatches, chain(stages))
    found = simulate(schedule, [StageTimes(1.0, 2.0, 1.0)] * stages)
    assert found.makespan_s == 6.0 * microbatches + ranks - 1
    # Never more than the p whole microbatches (2p halves) of 1F1B's first rank.
    held = simulate(schedule, [StageTimes(1.0, 2.0, 1.0, saved_bytes=1, weight_bytes=0)] * stages)
    assert max(held.peak_bytes) == min(2 * ranks, 2 * microbatches)


def test_microbatches_in_flight() -> None:
    times = [StageTimes(1.0, 2.0, fixed_bytes=100, saved_bytes=10, working_bytes=1)] * 4
    assert simulate(gpipe(4, 8, chain(4)), times).in_flight == (8, 8, 8, 8)
    found = simulate(one_f_one_b(4, 8, chain(4)), times)
    assert found.in_flight == (4, 3, 2, 1)
    assert found.peak_bytes == (141, 131, 121, 111)
    assert simulate(one_f_one_b(4, 2, chain(4)), times).in_flight == (2, 2, 2, 1)


def test_transfers_and_reduction() -> None:
    """One microbatch through two stages: forward, send, forward, backward, send, backward, reduce."""
    times = [StageTimes(1.0, 2.0, reduce_s=0.5), StageTimes(3.0, 4.0)]
    found = simulate(gpipe(2, 1, chain(2)), times, 0.25)
    assert found.makespan_s == 1 + 0.25 + 3 + 4 + 0.25 + 2 + 0.5
    assert found.busy_s == (3.5, 7.0)
    received = next(event for event in found.events if event.action == Action.parse("RA1.0<0"))
    assert received == Event(received.action, 0.0, 1.25)


def test_sends_do_not_block_but_share_their_edge() -> None:
    found = simulate(Schedule.parse("F0.0 SA0.0>1 F0.1 SA0.1>1\nRA1.0<0 F1.0 RA1.1<0 F1.1"), [StageTimes(1, 0)] * 2, 5)
    events = {str(event.action): event for event in found.events}
    assert events["F0.1"].start_s == 1  # not after the transfer
    assert (events["SA0.1>1"].start_s, events["SA0.1>1"].end_s) == (6, 11)
    assert found.makespan_s == 12


def test_transfer_times_by_edge() -> None:
    times = [StageTimes(1.0, 1.0)] * 3
    found = simulate(gpipe(3, 1, chain(3)), times, lambda send: 10.0 if send.peer == 2 else 1.0)
    assert found.makespan_s == 6 + 1 + 10 + 1 + 1


def test_stages_of_one_rank() -> None:
    """They take turns, exchange at once, and their memory adds up."""
    schedule = make_schedule("gpipe", 2, 2, chain(2), places=(0, 0))
    times = [StageTimes(1.0, 2.0, fixed_bytes=10, saved_bytes=3), StageTimes(3.0, 4.0, fixed_bytes=20, saved_bytes=5)]
    found = simulate(schedule, times, 100.0)
    assert found.makespan_s == 20.0 and found.busy_s == (20.0,) and found.idle_s == (0.0,)
    assert found.peak_bytes == (46,) and found.in_flight == (2, 2)


def test_what_weights_need_is_held_longer() -> None:
    schedule = Schedule.parse("F0.0 B0.0 F0.1 B0.1 W0.0 W0.1")
    found = simulate(schedule, [StageTimes(1.0, 1.0, weight_s=0.5, saved_bytes=7, weight_bytes=2)])
    assert found.peak_bytes == (9,)


def test_memory_is_held_until_the_weights_share() -> None:
    schedule = Schedule.parse("F0.0 B0.0 F0.1 B0.1 W0.0 W0.1")
    found = simulate(schedule, [StageTimes(1.0, 1.0, weight_s=0.5, saved_bytes=7)])
    assert found.in_flight == (2,) and found.peak_bytes == (14,)
    assert found.makespan_s == 4.0


def test_a_deadlock_is_named() -> None:
    with pytest.raises(ScheduleError, match=r"RG0\.0<1"):
        simulate(Schedule.parse("RG0.0<1 F0.0 SA0.0>1\nRA1.0<0 F1.0 B1.0 SG1.0>0"), [StageTimes(1, 1)] * 2)
    with pytest.raises(ScheduleError, match="2 stages"):
        simulate(gpipe(2, 1, chain(2)), [StageTimes(1, 1)])


def longest_paths(schedule: Schedule, times: list[StageTimes], transfer: dict[tuple[int, int], float]) -> float:
    """The makespan by recursion over what each action waits for, without a clock."""
    before = {
        action: actions[index - 1] if index else None
        for actions in schedule.ranks
        for index, action in enumerate(actions)
    }
    rank = {action.stage: index for index, actions in enumerate(schedule.ranks) for action in actions}
    splits = {action.stage for actions in schedule.ranks for action in actions if action.work is Work.WEIGHT}
    before_on_edge: dict[Action, Action | None] = {}
    for actions in schedule.ranks:
        last: dict[int, Action] = {}
        for action in actions:
            if action.work.is_send:
                assert action.peer is not None
                before_on_edge[action] = last.get(rank[action.peer])
                last[rank[action.peer]] = action

    @cache
    def stage_free(action: Action | None) -> float:
        """When the stage can go on after an action."""
        if action is None:
            return 0.0
        start = stage_free(before[action])
        if action.work.is_send:
            return start
        if action.work.is_receive:
            assert action.peer is not None
            work = Work.SEND_ACTIVATION if action.work is Work.RECV_ACTIVATION else Work.SEND_GRADIENT
            return max(start, arrival(Action(work, action.peer, action.microbatch, action.stage)))
        own = times[action.stage]
        later = own.weight_s if action.stage in splits else 0.0
        return (
            start + {"F": own.forward_s, "B": own.backward_s - later, "W": later, "R": own.reduce_s}[action.work.value]
        )

    @cache
    def arrival(send: Action) -> float:
        assert send.peer is not None
        if rank[send.peer] == rank[send.stage]:
            return stage_free(before[send])
        earlier = before_on_edge[send]
        begins = max(stage_free(before[send]), arrival(earlier) if earlier is not None else 0.0)
        return begins + transfer[send.stage, send.peer]

    ends = [stage_free(actions[-1]) for actions in schedule.ranks]
    sends = [arrival(action) for actions in schedule.ranks for action in actions if action.work.is_send]
    return max(ends + sends)


@pytest.mark.parametrize("seed", range(60))
def test_against_longest_paths(seed: int) -> None:
    rng = random.Random(seed)
    stages, microbatches = rng.randint(1, 5), rng.randint(1, 6)
    edges = set(chain(stages))
    if stages > 2 and rng.random() < 0.5:
        edges.add((0, stages - 1))  # a skip connection
    name = rng.choice(["gpipe", "1f1b", "zb-h1", "interleaved", "zb-v"])
    places: tuple[int, ...] | None = None
    if name == "zb-v":
        stages += stages % 2
    elif name == "interleaved":
        ranks = rng.randint(1, 3)
        stages, microbatches = ranks * rng.randint(1, 3), ranks * rng.randint(1, 3)
        places = places_of(name, stages, stages // ranks)
    edges = {*chain(stages), *(edge for edge in edges if edge[1] < stages)}
    schedule = make_schedule(name, stages, microbatches, edges, places=places)
    times = [StageTimes(rng.random(), 1 + rng.random(), rng.random(), rng.random()) for _ in range(stages)]
    pairs = [(a, b) for a in range(stages) for b in range(stages)]
    transfer = {pair: rng.random() * rng.choice([0.1, 2.0]) for pair in pairs}

    def seconds(send: Action) -> float:
        assert send.peer is not None
        return transfer[send.stage, send.peer]

    found = simulate(schedule, times, seconds)
    assert makespan(schedule, times, seconds) == found.makespan_s
    assert found.makespan_s == pytest.approx(longest_paths(schedule, times, transfer))
    check_timeline(found, schedule)


def check_timeline(found: Simulation, schedule: Schedule) -> None:
    """No stage does two things at once, and every action appears once."""
    assert sorted(str(event.action) for event in found.events) == sorted(
        str(a) for line in schedule.ranks for a in line
    )
    for stage in range(schedule.stages):
        own = [event for event in found.events if event.action.stage == stage and event.action.work.is_compute]
        for first, second in itertools.pairwise(own):
            assert first.end_s <= second.start_s + 1e-12


@pytest.mark.parametrize("seed", range(12))
def test_a_row_of_stages_is_timed_without_its_actions(seed: int) -> None:
    """To the last bit, whatever waits for what."""
    rng = random.Random(seed)
    stages, microbatches = rng.randint(1, 6), rng.randint(1, 20)
    times = [StageTimes(rng.random(), rng.random(), reduce_s=rng.random()) for _ in range(stages)]
    there, back = ([rng.choice([0.0, 0.1, 3.0]) * rng.random() for _ in range(stages - 1)] for _ in range(2))
    warmup = None if seed % 2 else [2 * (stages - stage - 1) for stage in range(stages)]
    found = row_makespan(one_f_one_b_order(stages, microbatches, warmup), times, there, back)

    def transfer(action: Action) -> float:
        assert action.peer is not None
        return there[action.stage] if action.peer > action.stage else back[action.peer]

    assert found == makespan(one_f_one_b(stages, microbatches, chain(stages), warmup), times, transfer)
