"""Schedules that CP-SAT finds: against every order of tiny cases, and against the named schedules at equal room."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence

import pytest

from autopart.runtime.dry_run import dry_run
from autopart.runtime.errors import InfeasibleError, PlanError, ScheduleError
from autopart.runtime.schedule import Action, Schedule, Work, deeper_warmup, in_flight, make_schedule, with_exchanges
from autopart.simulate import StageTimes, simulate
from autopart.solver.schedule_search import Edge, find_schedule, room

Transfers = dict[Edge, tuple[float, float | None]]


def chain(stages: int, there: float = 0.0, back: float = 0.0) -> Transfers:
    return {(stage, stage + 1): (there, back) for stage in range(stages - 1)}


def makespan(schedule: Schedule, times: Sequence[StageTimes], transfers: Transfers) -> float:
    def seconds(action: Action) -> float:
        assert action.peer is not None
        if action.work is Work.SEND_ACTIVATION:
            return transfers[action.stage, action.peer][0]
        return transfers[action.peer, action.stage][1] or 0.0

    return simulate(schedule, times, seconds).makespan_s


def every_schedule(
    microbatches: int, transfers: Transfers, places: Sequence[int], works: str = "FB"
) -> Iterator[Schedule]:
    """All orders of all computations, microbatches in any order."""
    orders = []
    for rank in range(1 + max(places)):
        own = [stage for stage, at in enumerate(places) if at == rank]
        work = [(kind, stage, k) for kind in works for stage in own for k in range(microbatches)]
        orders.append(
            [
                order
                for order in itertools.permutations(work)
                if all(
                    order.index((earlier, stage, k)) < order.index((later, stage, k))
                    for earlier, later in itertools.pairwise(works)
                    for stage in own
                    for k in range(microbatches)
                )
            ]
        )
    back = [edge for edge, (_, gradient) in transfers.items() if gradient is not None]
    for steps in itertools.product(*orders):
        yield with_exchanges(steps, list(transfers), back, reduce=True)


def best_of_all(
    times: Sequence[StageTimes],
    microbatches: int,
    transfers: Transfers,
    held: Sequence[int],
    places: Sequence[int] | None = None,
    works: str = "FB",
) -> float | None:
    best = None
    for schedule in every_schedule(microbatches, transfers, places or range(len(times)), works):
        try:
            peaks = simulate(schedule, times).in_flight
        except ScheduleError:
            continue
        if all(peak <= most for peak, most in zip(peaks, held, strict=True)):
            found = makespan(schedule, times, transfers)
            best = found if best is None else min(best, found)
    return best


@pytest.mark.parametrize(
    ("places", "microbatches", "works"),
    [((0, 1), 2, "FBW"), ((0,), 2, "FBW"), ((0, 1, 0), 1, "FBW"), ((0, 1, 1, 0), 1, "FB"), ((0, 1, 0, 1), 1, "FBW")],
)
def test_no_order_is_better_with_w_or_several_stages_on_a_rank(
    places: Sequence[int], microbatches: int, works: str
) -> None:
    rng = random.Random(len(places))
    weights = [rng.randint(1, 5) for _ in places]
    times = [StageTimes(rng.randint(1, 6), own + rng.randint(1, 6), own, rng.randint(0, 3)) for own in weights]
    transfers: Transfers = {edge: (float(rng.randint(0, 4)), float(rng.randint(0, 4))) for edge in chain(len(places))}
    held = tuple(rng.randint(1, microbatches) for _ in places)
    found = find_schedule(times, microbatches, transfers, held, places=places, splits=works == "FBW")
    assert found.optimal
    assert found.makespan_s == found.bound_s == best_of_all(times, microbatches, transfers, held, places, works)


@pytest.mark.parametrize(
    ("stages", "microbatches", "seed"),
    [(1, 3, 0), *((p, 2, seed) for p in (2, 3) for seed in range(8)), (2, 3, 1), (2, 3, 2)],
)
def test_no_order_of_any_kind_is_better(stages: int, microbatches: int, seed: int) -> None:
    rng = random.Random(seed)
    times = [StageTimes(rng.randint(1, 5), rng.randint(1, 6), reduce_s=rng.randint(0, 3)) for _ in range(stages)]
    transfers: Transfers = {edge: (float(rng.randint(0, 4)), float(rng.randint(0, 4))) for edge in chain(stages)}
    if stages == 3 and seed % 2:
        transfers[0, 2] = (float(rng.randint(0, 4)), None)  # a skip connection without a gradient
    held = sorted((rng.randint(1, microbatches) for _ in range(stages)), reverse=True)
    found = find_schedule(times, microbatches, transfers, held)
    assert found.optimal
    assert found.makespan_s == found.bound_s == best_of_all(times, microbatches, transfers, held)


@pytest.mark.parametrize("seed", range(12))
def test_named_schedules_are_never_better_at_equal_room(seed: int) -> None:
    rng = random.Random(100 + seed)
    stages, microbatches = rng.randint(2, 4), rng.randint(2, 6)
    times = [StageTimes(rng.randint(1, 9), rng.randint(1, 9), reduce_s=rng.randint(0, 5)) for _ in range(stages)]
    transfers: Transfers = {edge: (float(rng.randint(0, 6)), float(rng.randint(0, 6))) for edge in chain(stages)}
    for name, depth in (("gpipe", 0), ("1f1b", 1), ("1f1b", 2), ("1f1b", 0)):
        warmup = deeper_warmup(stages, depth) if name == "1f1b" else ()
        named = make_schedule(name, stages, microbatches, list(transfers), warmup=warmup)
        held = in_flight(name, stages, microbatches, warmup)
        assert dry_run(named) == held
        found = find_schedule(times, microbatches, transfers, held)
        assert found.optimal
        assert all(peak <= most for peak, most in zip(dry_run(found.schedule), held, strict=True))
        assert found.makespan_s == makespan(found.schedule, times, transfers) == found.bound_s
        assert found.makespan_s <= makespan(named, times, transfers)
        assert Schedule.parse(str(found.schedule)) == found.schedule


# The ranks of the stages, and the number of microbatches.
SPLIT_OR_SEVERAL = {
    "zb-h1": ((0, 1), 4),
    "zb-h1-3": ((0, 1, 2), 3),
    "zb-v": ((0, 1, 1, 0), 2),
    "interleaved": ((0, 1, 0, 1), 2),
    "interleaved-1": ((0, 0), 3),
}


@pytest.mark.parametrize("case", SPLIT_OR_SEVERAL)
@pytest.mark.parametrize("seed", range(3))
def test_schedules_with_w_or_several_stages_on_a_rank_are_never_better(case: str, seed: int) -> None:
    rng = random.Random(seed)
    places, microbatches = SPLIT_OR_SEVERAL[case]
    name, stages = case.rstrip("-123") if not case.startswith("zb-h1") else "zb-h1", len(places)
    times = [
        StageTimes(rng.randint(1, 6), own + rng.randint(1, 6), own, rng.randint(0, 3))
        for own in (rng.randint(1, 5) for _ in range(stages))
    ]
    transfers: Transfers = {edge: (float(rng.randint(0, 4)), float(rng.randint(0, 4))) for edge in chain(stages)}
    named = make_schedule(name, stages, microbatches, list(transfers), places=places)
    held = simulate(named, times).in_flight
    found = find_schedule(times, microbatches, transfers, held, places=places, splits=name.startswith("zb"))
    assert found.optimal
    assert found.schedule.rank_of == named.rank_of
    assert all(peak <= most for peak, most in zip(dry_run(found.schedule), held, strict=True))
    assert found.bound_s == found.makespan_s == makespan(found.schedule, times, transfers)
    assert found.makespan_s <= makespan(named, times, transfers)


def test_what_one_rank_sends_to_another_follows_each_other() -> None:
    """Long transfers of two stages on one link: a model in which they overlap would promise 71."""
    transfers: Transfers = {(0, 1): (8.0, 8.0), (1, 2): (5.0, 7.0), (2, 3): (9.0, 8.0)}
    found = find_schedule([StageTimes(1, 1)] * 4, 3, transfers, (3,) * 4, places=(0, 1, 0, 1))
    assert found.optimal and found.makespan_s == found.bound_s == 87.0
    skip: Transfers = {(0, 1): (2.0, 3.0), (0, 2): (4.0, None), (1, 2): (1.0, 1.0)}  # one forward sends both
    found = find_schedule([StageTimes(1, 1)] * 3, 1, skip, (1,) * 3, places=(0, 1, 1))
    assert found.makespan_s == found.bound_s == best_of_all([StageTimes(1, 1)] * 3, 1, skip, (1,) * 3, (0, 1, 1))


@pytest.mark.parametrize("microbatches", [2, 4])
def test_equal_stages_of_named_schedules_are_best(microbatches: int) -> None:
    """Interleaved's bubble of (p - 1)/v of a rank's f + b, and ZB-H1's of (p - 1)(f + b - w) in its own room."""
    looped = find_schedule([StageTimes(1, 2)] * 4, microbatches, chain(4), (microbatches,) * 4, places=(0, 1, 0, 1))
    assert looped.optimal and looped.makespan_s == 3.0 * (2 * microbatches + 1)
    split = find_schedule([StageTimes(1, 2, 1)] * 2, microbatches, chain(2), (2, 2), splits=True)
    assert split.optimal and split.makespan_s == 3.0 * microbatches + 1


@pytest.mark.parametrize(("stages", "microbatches"), [(1, 4), (2, 4), (3, 5), (4, 6)])
def test_1f1b_is_best_for_equal_stages(stages: int, microbatches: int) -> None:
    """(m + p - 1)(f + b), in the room of 1F1B as in any."""
    times = [StageTimes(1.0, 2.0)] * stages
    for held in (in_flight("1f1b", stages, microbatches), (microbatches,) * stages):
        assert find_schedule(times, microbatches, chain(stages), held).makespan_s == 3.0 * (microbatches + stages - 1)


def test_room_for_one_more_hides_transfers() -> None:
    """Two equal stages, a transfer of half a forward and backward: the deeper warm-up is best, and needs its room."""
    times, transfers, count = [StageTimes(1.0, 1.0)] * 2, chain(2, 1.0, 1.0), 8
    least, deeper = (make_schedule("1f1b", 2, count, [(0, 1)], warmup=deeper_warmup(2, depth)) for depth in (1, 2))
    assert makespan(least, times, transfers) > makespan(deeper, times, transfers)
    for schedule in (least, deeper):
        found = find_schedule(times, count, transfers, dry_run(schedule))
        assert found.makespan_s == makespan(schedule, times, transfers)


def test_times_without_a_common_unit_are_rounded() -> None:
    times = [StageTimes(0.1234567891, 0.3333333333), StageTimes(2**-0.5, 3**-0.5)]
    found = find_schedule(times, 3, chain(2, 0.0101010101, 0.02), (2, 1))
    assert found.optimal and found.unit_s < 1e-4
    assert found.makespan_s == pytest.approx(makespan(found.schedule, times, chain(2, 0.0101010101, 0.02)))
    assert found.bound_s == pytest.approx(found.makespan_s, rel=1e-4)
    free = find_schedule([StageTimes(0.0, 0.0)] * 2, 3, chain(2), (1, 1))
    assert free.makespan_s == 0.0 and dry_run(free.schedule) == (1, 1)


def test_room_in_bytes() -> None:
    times = StageTimes(1.0, 1.0, fixed_bytes=100, saved_bytes=10, working_bytes=5)
    assert [room(times, limit, 4) for limit in (115, 134.9, 135, 1000)] == [1, 2, 3, 4]
    with pytest.raises(InfeasibleError, match="114 bytes"):
        room(times, 114, 4)


def test_contradictions() -> None:
    with pytest.raises(PlanError, match="held"):
        find_schedule([StageTimes(1, 1)], 2, {}, (0,))
    with pytest.raises(PlanError, match="later one"):
        find_schedule([StageTimes(1, 1)] * 2, 2, {(1, 0): (1.0, 1.0)}, (2, 2))
