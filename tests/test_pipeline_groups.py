"""Stages in groups: what sums over them obey follows from what each obeys, and is nearly as much."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from autopart.runtime.schedule import in_flight
from autopart.solver.pipeline_floor import Family, Piece, Pipeline, Way, Weights, least_step_seconds
from autopart.solver.pipeline_groups import Group, groups


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


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "deep"])
@pytest.mark.parametrize("seed", range(12))
def test_what_groups_ask_for_follows_from_what_stages_do(name: str, seed: int) -> None:
    rng = random.Random(seed)
    count, m = rng.choice([1, 2, 9, 24, 60]), rng.choice([1, 7, 30, 64, 200])
    if name == "deep":
        flying = [min(m, 3 * (count - number)) for number in range(count)]
    else:
        flying = list(in_flight(name, count, m))
    rooms = [rng.uniform(1.0, 2.0) for _ in flying]
    there, back = ([rng.choice([0.0, rng.random()]) for _ in range(count - 1)] for _ in range(2))
    found, every = (groups(m, flying, rooms, there, back, each) for each in (False, True))
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
    few, many = (least(groups(m, flying, rooms, none, none, each), equal, none, none) for each in (False, True))
    assert few == pytest.approx(many, rel=0.02)


@pytest.mark.parametrize("room", [40.0, 4.0])
def test_groups_are_few_and_lose_little(room: float) -> None:
    piece = Piece(1.0, 2.0, (Weights(1.0, (Way(state_bytes=1.0, end_s=3.0),)),), (Way(0.0, 0.0, 0.1), Way(1.0)))
    rest = [Piece(1.0, 1.0), Piece(5.0, 8.0)]
    flying, m = tuple(in_flight("1f1b", 64, 192)), 192
    assert len(groups(m, flying, [room] * 64, [0.1] * 63, [0.1] * 63)) < 40
    pipeline = Pipeline(m, flying, (room,) * 64, 0.0, (0.1,) * 63, (0.1,) * 63)
    found, every = (
        least_step_seconds([Family(96, piece, (piece,))], rest, pipeline, each=each) for each in (False, True)
    )
    assert every * 0.995 < found <= every * (1 + 1e-9)
