"""Stages in groups: what sums over them obey follows from what each obeys, and is nearly as much."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from autopart.runtime.schedule import in_flight
from autopart.solver import pipeline_floor
from autopart.solver.pipeline_floor import least_step_seconds
from autopart.solver.pipeline_groups import Group, Grouping, groups
from autopart.solver.pipeline_pieces import Family, Piece, Pipeline, Way, Weights


def least(
    found: tuple[Group, ...], stages: Sequence[Sequence[float]], there: Sequence[float], back: Sequence[float]
) -> float:
    """Seconds of a step that the groups' chains ask for. stages: seconds of the forward, the backward and the end."""
    sums, at = [], 0
    for group in found:
        sums.append([sum(column) for column in zip(*stages[at : at + group.stages], strict=True)])
        at += group.stages
    assert at == len(stages)
    asked = []
    for number, (group, (f, b, e)) in enumerate(zip(found, sums, strict=True)):
        first = sum(other.stages for other in found[:number])
        ahead_f = sum(there[:first]) + sum(other[0] for other in sums[:number])
        ahead = sum(there[:first]) + sum(back[:first]) + sum(other[0] + other[1] for other in sums[:number])
        last = first + group.stages - 1
        behind = sum(there[last:]) + sum(back[last:]) + sum(other[0] + other[1] for other in sums[number + 1 :])
        for before, chains, own in ((ahead_f, group.own, True), (ahead, group.first, False)):
            for chain in chains if own or number else ():
                end = chain.end * e if own else sums[0][2]
                body = chain.forward * f + chain.backward * b + chain.behind * behind
                asked.append(before + body + end + chain.sent)
    return max(asked)


@pytest.mark.parametrize("grouping", [Grouping.FINE, Grouping.COARSE])
@pytest.mark.parametrize("name", ["1f1b", "gpipe", "deep"])
@pytest.mark.parametrize("seed", range(12))
def test_what_groups_ask_for_follows_from_what_stages_do(name: str, seed: int, grouping: Grouping) -> None:
    rng = random.Random(seed)
    count, m = rng.choice([1, 2, 9, 24, 60]), rng.choice([1, 7, 30, 64, 200])
    if name == "deep":
        flying = [min(m, 3 * (count - number)) for number in range(count)]
    else:
        flying = list(in_flight(name, count, m))
    rooms = [rng.uniform(1.0, 2.0) for _ in flying]
    there, back = ([rng.choice([0.0, rng.random()]) for _ in range(count - 1)] for _ in range(2))
    found, every = (groups(m, flying, rooms, there, back, kind) for kind in (grouping, Grouping.EACH))
    assert all(group.stages == 1 for group in every) and len(every) == count
    assert sum(group.stages for group in found) == count
    assert sum(group.capacity_bytes for group in found) == pytest.approx(sum(rooms))
    at = 0
    for group in found:
        assert group.in_flight == min(flying[at : at + group.stages])
        at += group.stages
    for spread in (0.0, 0.1, 1.0):
        stages = [tuple(1.0 + spread * rng.uniform(-1, 1) for _ in range(3)) for _ in flying]
        exact = least(every, stages, there, back)
        assert least(found, stages, there, back) <= exact * (1 + 1e-12)
    equal, none = [(1.0, 1.0, 0.0)] * count, [0.0] * (count - 1)
    few, many = (
        least(groups(m, flying, rooms, none, none, kind), equal, none, none) for kind in (grouping, Grouping.EACH)
    )
    assert few == pytest.approx(many, rel=0.02)


@pytest.mark.parametrize("room", [40.0, 4.0])
def test_groups_are_few_and_lose_little(room: float) -> None:
    piece = Piece(1.0, 2.0, (Weights(1.0, (Way(state_bytes=1.0, end_s=3.0),)),), (Way(0.0, 0.0, 0.1), Way(1.0)))
    rest = [Piece(1.0, 1.0), Piece(5.0, 8.0)]
    flying, m = tuple(in_flight("1f1b", 64, 192)), 192
    few, fewest = (len(groups(m, flying, [room] * 64, [0.1] * 63, [0.1] * 63, kind)) for kind in list(Grouping)[1:])
    assert few < 40 and fewest < 10
    pipeline = Pipeline(m, flying, (room,) * 64, 0.0, (0.1,) * 63, (0.1,) * 63)
    families = [Family(96, piece, (piece,))]
    every, found, coarse = (least_step_seconds(families, rest, pipeline, grouping=kind) for kind in Grouping)
    assert every * 0.995 < found <= every * (1 + 1e-9)
    assert every * 0.95 < coarse <= every * (1 + 1e-9)


def test_few_groups_are_enough_where_they_take_as_long_as_is_of_interest(monkeypatch: pytest.MonkeyPatch) -> None:
    """And where they take less, what is found is what stages in more groups take."""
    piece = Piece(1.0, 2.0, (Weights(1.0, (Way(state_bytes=1.0, end_s=3.0),)),), (Way(0.0, 0.0, 0.1), Way(1.0)))
    pipeline = Pipeline(192, tuple(in_flight("1f1b", 64, 192)), (4.0,) * 64)
    families, asked = [Family(96, piece, (piece,))], list[Grouping]()

    def noted(*arguments: Any) -> tuple[Group, ...]:
        asked.append(arguments[-1])
        return groups(*arguments)

    monkeypatch.setattr(pipeline_floor, "groups", noted)
    coarse, fine = (
        least_step_seconds(families, [], pipeline, grouping=kind) for kind in (Grouping.COARSE, Grouping.FINE)
    )
    assert coarse < fine
    del asked[:]
    assert coarse <= least_step_seconds(families, [], pipeline, below=coarse * 0.99) * (1 + 1e-9)
    assert asked == [Grouping.COARSE]
    del asked[:]
    assert least_step_seconds(families, [], pipeline, below=2 * fine) == pytest.approx(fine, rel=1e-6)
    assert asked == [Grouping.COARSE, Grouping.FINE]
