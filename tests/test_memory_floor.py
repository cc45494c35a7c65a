"""Seconds that memory adds at least: never above what any assignment of blocks to stages needs."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from autopart.memory_bound import least_added
from autopart.runtime.schedule import in_flight, make_schedule
from autopart.simulate import StageTimes, makespan
from autopart.solver.memory_floor import AddedSeconds, Held, Way, added_seconds
from autopart.solver.stages_floor import least_step

SEEDS = range(40)


def random_blocks(rng: random.Random, count: int) -> list[Held]:
    def way() -> Way:
        return Way(
            rng.choice([0.0, rng.random()]), rng.choice([0.0, 5 * rng.random()]), rng.choice([0.0, rng.random()])
        )

    return [
        Held(rng.randint(1, 2), rng.random(), tuple(tuple(way() for _ in range(rng.randint(1, 3))) for _ in range(2)))
        for _ in range(count)
    ]


def exact_seconds(blocks: list[Held], flying: int, capacity: float) -> float:
    """Of one stage, by trying all; infinite where nothing fits."""
    parts = [part for block in blocks for part in block.parts]
    found = math.inf
    for ways in itertools.product(*parts):
        if sum(way.state_bytes + flying * way.kept_bytes for way in ways) <= capacity:
            found = min(found, sum(way.seconds for way in ways))
    return found


def assignments(blocks: list[Held], stages: int) -> list[list[list[Held]]]:
    """All ways to give each single block to a stage."""
    single = [Held(1, block.work, block.parts) for block in blocks for _ in range(block.count)]
    return [
        [[block for block, at in zip(single, chosen, strict=True) if at == stage] for stage in range(stages)]
        for chosen in itertools.product(range(stages), repeat=len(single))
    ]


def work_of(stages: list[list[Held]]) -> list[float]:
    return [sum(block.work for block in own) for own in stages]


@pytest.mark.parametrize("seed", SEEDS)
def test_no_assignment_needs_less(seed: int) -> None:
    rng = random.Random(seed)
    stages = rng.randint(1, 3)
    blocks = random_blocks(rng, rng.randint(1, 2))
    flying = sorted((rng.randint(1, 4) for _ in range(stages)), reverse=True)
    capacity = [rng.uniform(1, 12) for _ in range(stages)]
    total = sum(block.count * block.work for block in blocks)
    behind = [total * rng.random() if stage < stages - 1 else 0.0 for stage in range(stages)]
    found = added_seconds(blocks, flying, capacity, behind)
    several = AddedSeconds(blocks, flying, capacity)
    assert several.at([math.inf] * stages) <= several.at(behind) == found
    for owned in assignments(blocks, stages):
        work = work_of(owned)
        if all(sum(work[stage + 1 :]) <= behind[stage] for stage in range(stages)):
            least = sum(exact_seconds(*item) for item in zip(owned, flying, capacity, strict=True))
            assert found <= least * (1 + 1e-9) + 1e-12


@pytest.mark.parametrize("seed", SEEDS)
def test_no_step_is_simulated_faster(seed: int) -> None:
    """What memory adds, in the floor of 1F1B, against all assignments with their fastest ways to fit."""
    rng = random.Random(seed)
    stages, microbatches = rng.randint(1, 3), rng.choice([1, 2, 5])
    blocks = random_blocks(rng, 2)
    flying = in_flight("1f1b", stages, microbatches)
    rooms = [rng.uniform(2, 12)] * stages
    work = sum(block.count * block.work for block in blocks)
    floor = (work + least_added(blocks, rooms, flying, microbatches, work)) * least_step(microbatches, flying)
    schedule = make_schedule("1f1b", stages, microbatches, set(itertools.pairwise(range(stages))))
    for owned in assignments(blocks, stages):
        added = [exact_seconds(*item) for item in zip(owned, flying, rooms, strict=True)]
        share = rng.random()
        times = [
            StageTimes(own * share, own * (1 - share) + more) for own, more in zip(work_of(owned), added, strict=True)
        ]
        if max(added) < math.inf and sum(added) <= 2 * work:
            assert floor <= makespan(schedule, times) * (1 + 1e-9)


def test_one_stage_frees_what_is_cheapest_in_fractions() -> None:
    """20 bytes of parameters and 30 of activations in 34: 16 are freed, 10 for 1 second and 6 of 10 for 3 seconds."""
    cheap, dear = ((Way(0.0, 0.0, 10.0), Way(price, 0.0)) for price in (1.0, 3.0))
    blocks = [Held(1, 1.0, ((Way(0.0, 20.0),), cheap, dear, (Way(0.0, 0.0, 10.0),)))]
    assert added_seconds(blocks, (1,), (34.0,), (0.0,)) == pytest.approx(1.0 + 0.6 * 3.0)
    assert added_seconds(blocks, (1,), (50.0,), (0.0,)) == 0
    assert added_seconds(blocks, (1,), (30.0,), (0.0,)) == pytest.approx(4.0)
    assert added_seconds(blocks, (1,), (29.0,), (0.0,)) == math.inf


def test_the_first_stage_holds_most_in_flight() -> None:
    """Of 8 layers on 4 stages the first two have 8 and 6 tensors in flight, in room for 5 each."""
    layer = Held(8, 1.0, ((Way(0.0, 0.0, 1.0), Way(0.5, 0.0)),))
    behind = (6.0, 4.0, 2.0, 0.0)
    # of stage 0: 2 layers of 4 microbatches, 3 bytes too many at an eighth of a second each
    assert added_seconds([layer], (4, 3, 2, 1), (5.0, 99.0, 99.0, 99.0), behind) == pytest.approx(3 * 0.5 / 4)
    assert added_seconds([layer], (4, 3, 2, 1), (5.0, 5.0, 99.0, 99.0), behind) == pytest.approx(4 * 0.5 / 4)
    assert added_seconds([layer], (4, 3, 2, 1), (99.0,) * 4, behind) == 0
