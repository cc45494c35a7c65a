"""Schedules never deadlock, hold as many microbatches as the formulas say, and bad ones are found out."""

from __future__ import annotations

import random

import pytest

from autopart.runtime.dry_run import dry_run
from autopart.runtime.errors import ScheduleError
from autopart.runtime.schedule import (
    Action,
    Schedule,
    Work,
    backward_part,
    forward_only,
    forward_part,
    gpipe,
    in_flight,
    interleaved,
    make_schedule,
    one_f_one_b,
    places_of,
    post_receives_early,
)


def chain(stages: int) -> list[tuple[int, int]]:
    return [(s, s + 1) for s in range(stages - 1)]


@pytest.mark.parametrize("stages", range(1, 17))
def test_all_sizes_run_and_hold_what_the_formulas_say(stages: int) -> None:
    for microbatches in sorted({1, 2, stages - 1, stages, stages + 1, 2 * stages - 1, 47, 64} - {0}):
        edges = chain(stages)
        assert dry_run(gpipe(stages, microbatches, edges)) == (microbatches,) * stages
        expected = tuple(min(microbatches, stages - s) for s in range(stages))
        assert dry_run(one_f_one_b(stages, microbatches, edges)) == expected
        assert dry_run(forward_only(stages, microbatches, edges)) == (0,) * stages


@pytest.mark.parametrize("stages", range(1, 17))
def test_split_backwards_run_and_hold_what_the_formulas_say(stages: int) -> None:
    for microbatches in sorted({1, 2, stages - 1, stages, stages + 1, 2 * stages, 64} - {0}):
        found = dry_run(make_schedule("zb-h1", stages, microbatches, chain(stages)))
        assert found == in_flight("zb-h1", stages, microbatches) == (min(microbatches, stages),) * stages
        if stages % 2 == 0:
            found = dry_run(make_schedule("zb-v", stages, microbatches, chain(stages)))
            assert found == in_flight("zb-v", stages, microbatches)
            assert found == tuple(min(microbatches, stages - s) for s in range(stages))


@pytest.mark.parametrize(
    ("ranks", "virtual"), [(r, v) for v in (1, 2, 3, 4) for r in (1, 2, 3, 4, 5, 8, 16) if r * v <= 16]
)
def test_interleaved_runs_and_holds_what_the_formula_says(ranks: int, virtual: int) -> None:
    stages = ranks * virtual
    places = places_of("interleaved", stages, virtual)
    for groups in sorted({1, 2, 3, 64 // ranks}):
        schedule = interleaved(stages, ranks * groups, chain(stages), places=places)
        assert dry_run(schedule) == in_flight("interleaved", stages, ranks * groups, places=places)
        if virtual == 1:
            assert schedule == one_f_one_b(stages, ranks * groups, chain(stages))
    with pytest.raises(ScheduleError, match="multiple of"):
        interleaved(2 * ranks + 2, ranks * 3 + 1 if ranks > 1 else 1, (), places=(*range(ranks + 1),) * 2)


def test_several_stages_on_a_rank() -> None:
    for places in ((0, 1, 0, 1), (0, 1, 1, 0), (0, 0, 0, 0), (0, 0, 1, 1)):
        assert dry_run(gpipe(4, 5, chain(4), places=places)) == (5,) * 4
        assert dry_run(forward_only(4, 5, chain(4), places)) == (0,) * 4
    with pytest.raises(ScheduleError, match="1f1b runs one stage on each rank"):
        make_schedule("1f1b", 4, 4, chain(4), places=(0, 1, 0, 1))
    with pytest.raises(ScheduleError, match="in a V"):
        make_schedule("zb-v", 4, 4, chain(4), places=(0, 1, 0, 1))
    with pytest.raises(ScheduleError, match="no even number"):
        make_schedule("zb-v", 3, 4, chain(3))


def test_messages_between_two_ranks_are_received_in_the_order_of_sending() -> None:
    """Also those of different stages: NCCL tells them apart by their order alone."""
    good = "F0.0 SA0.0>1 RA2.0<1 F2.0 SA2.0>3\nRA1.0<0 F1.0 SA1.0>2 RA3.0<2 F3.0"
    assert dry_run(Schedule.parse(good)) == (0, 0, 0, 0)
    with pytest.raises(ScheduleError, match=r"RA3\.0<1 comes where microbatch 0 was sent from 0 to 2"):
        dry_run(Schedule.parse("F0.0 SA0.0>2 F1.0 SA1.0>3\nRA3.0<1 F3.0 RA2.0<0 F2.0"))


def test_random_edges_with_skips() -> None:
    draw = random.Random(0)
    for _ in range(60):
        stages, microbatches = draw.randint(2, 9), draw.randint(1, 12)
        pairs = [(a, b) for b in range(stages) for a in range(b)]
        edges = sorted({*chain(stages), *draw.sample(pairs, draw.randint(0, len(pairs)))})
        back = draw.sample(edges, draw.randint(0, len(edges)))
        virtual = draw.choice([v for v in (1, 2, 3) if stages % v == 0])
        for name in ("gpipe", "1f1b", "forward_only", "zb-h1", "interleaved", *(["zb-v"] if stages % 2 == 0 else [])):
            places = None
            if name == "interleaved":
                places = places_of(name, stages, virtual)
                microbatches = stages // virtual * draw.randint(1, 3)
            schedule = make_schedule(name, stages, microbatches, edges, back, places=places)
            dry_run(schedule)
            assert Schedule.parse(str(schedule)) == schedule


def test_a_longer_warmup_holds_more() -> None:
    assert dry_run(one_f_one_b(3, 8, chain(3), warmup=[4, 2, 0])) == (5, 3, 1)
    with pytest.raises(ScheduleError, match="warmup"):
        one_f_one_b(3, 8, chain(3), warmup=[1, 0])
    # Stage 0 waits for the gradient of microbatch 0 with only one forward done, which is enough to go on.
    assert dry_run(one_f_one_b(3, 4, chain(3), warmup=[0, 0, 0])) == (1, 1, 1)


def test_text_of_a_small_schedule() -> None:
    assert str(one_f_one_b(2, 2, {(0, 1)})) == (
        "F0.0 SA0.0>1 F0.1 SA0.1>1 RG0.0<1 B0.0 RG0.1<1 B0.1 R0\nRA1.0<0 F1.0 B1.0 SG1.0>0 RA1.1<0 F1.1 B1.1 SG1.1>0 R1"
    )


@pytest.mark.parametrize("text", ["F0", "F0.1>2", "SA0.1<2", "RA0.1>2", "SA0.1", "R0.1", "X0.1", "F.1", "", "SA1.0>1"])
def test_bad_text(text: str) -> None:
    with pytest.raises(ScheduleError):
        Action.parse(text)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("F0.0 RG0.0<1 B0.0 SA0.0>1\nRA1.0<0 F1.0 B1.0 SG1.0>0", r"deadlocks: RG0\.0<1, RA1\.0<0"),
        ("F0.0 SA0.0>1 B0.0\nF1.0 B1.0", r"SA0\.0>1 is never received"),
        ("F0.0 B0.0\nRA1.0<0 F1.0 B1.0", r"RA1\.0<0"),
        ("B0.0 F0.0", r"B0\.0 comes before F0\.0"),
        ("F0.0 F0.0 B0.0", r"F0\.0 comes twice"),
        ("F0.0 F0.1 B0.1", r"never does B0\.0"),
        ("F0.0 F0.1 B0.0 B0.1\nF1.0 B1.0", r"never does F1\.1, B1\.1"),
        ("F0.0 R0 B0.0", r"R0 comes before the last B"),
        ("F0.0 B0.0 R0 R0", r"R0 comes twice"),
        ("SA0.0>1 F0.0 B0.0\nRA1.0<0 F1.0 B1.0", r"SA0\.0>1 comes before what it sends"),
        ("F0.0 SA0.0>1 B0.0\nF1.0 RA1.0<0 B1.0", r"F1\.0 comes before RA1\.0<0"),
        (
            "F0.0 F0.1 SA0.1>1 SA0.0>1 B0.0 B0.1\nRA1.0<0 RA1.1<0 F1.0 F1.1 B1.0 B1.1",
            r"RA1\.0<0 comes where microbatch 1",
        ),
        ("F0.0 SA0.0>3 B0.0", "a stage that is not there"),
        ("F0.0 W0.0 B0.0", r"W0\.0 comes before B0\.0"),
        ("F0.0 B0.0 W0.0 W0.0", r"W0\.0 comes twice"),
        ("F0.0 B0.0 F0.1 B0.1 W0.0", r"never does W0\.1"),
        ("F0.0 B0.0 R0 W0.0", r"R0 comes before the last W"),
        ("F0.0\nF1.0 F0.1", "F0.1 stands in the list of rank 1, other actions of stage 0 in that of rank 0"),
    ],
)
def test_bad_schedules_are_found(text: str, names: str) -> None:
    with pytest.raises(ScheduleError, match=names):
        dry_run(Schedule.parse(text))


def test_unknown_name_and_backward_edges() -> None:
    with pytest.raises(ScheduleError, match="no schedule is called 'zigzag'"):
        make_schedule("zigzag", 1, 1, ())
    with pytest.raises(ScheduleError, match="from stage 1 to stage 0"):
        gpipe(2, 1, {(1, 0)})


def test_receives_are_posted_one_computation_earlier() -> None:
    actions = one_f_one_b(2, 3, {(0, 1)}).ranks[1]
    early = post_receives_early(actions)
    assert " ".join(map(str, early)) == (
        "RA1.0<0 F1.0 RA1.1<0 B1.0 SG1.0>0 F1.1 RA1.2<0 B1.1 SG1.1>0 F1.2 B1.2 SG1.2>0 R1"
    )
    assert sorted(map(str, early)) == sorted(map(str, actions))
    for works in (Work.RECV_ACTIVATION, Work.RECV_GRADIENT):
        assert [a for a in early if a.work is works] == [a for a in actions if a.work is works]


def test_the_halves_of_a_schedule() -> None:
    whole = gpipe(3, 2, {(0, 1), (1, 2), (0, 2)})
    halves = [(*a, *b) for a, b in zip(forward_part(whole).ranks, backward_part(whole).ranks, strict=True)]
    assert tuple(halves) == whole.ranks
