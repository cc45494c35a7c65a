"""Unlike replicas beside each other: what is counted of them together, beside each by itself."""

from __future__ import annotations

import itertools

import pytest
from test_unlike_planning import ROOMY, subject_of, unlike

from autopart.candidates import Candidates
from autopart.describe_unlike import describe_unlike
from autopart.mesh_prices import MeshPrices
from autopart.passes.data_axis import LEVELS
from autopart.runtime.errors import InfeasibleError
from autopart.solver.degrees import UnlikeMeshes
from autopart.solver.stages_problem import Step
from autopart.unlike import UnlikeCandidates


def candidates_of(slow: int, fast: int, model: str = "gpt2", zero: int | None = 0) -> UnlikeCandidates:
    """Of a device of speed 1 and one of speed 3 with so many bytes."""
    _, analysis = subject_of(model)
    found = Candidates(analysis, unlike((1, 1.0, slow), (1, 3.0, fast)), 8, "adamw", zero=zero)
    return UnlikeCandidates(MeshPrices(found, tp=1))


@pytest.mark.parametrize("model", ["gpt2", "t5", "mixtral"])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_no_replica_fills_its_device_more_than_what_is_counted(model: str, schedule: str) -> None:
    """Of every run of blocks, level of ZeRO and way to run layers."""
    found = candidates_of(2**31 + 2**24, 2**31 + 5 * 2**23, model, None)
    compared = 0
    for config in (UnlikeMeshes(stages, 2, schedule, "auto") for stages in (1, 2)):
        problem, priced = found.problem(config, LEVELS)
        last = len(problem.positions) - 1
        for number, slot in enumerate(problem.slots):
            item = priced[slot.shape]
            overhead = item.shape.overhead_bytes
            assert len({shape.blocks[0].state_bytes for shape in item.alone}) == 1
            for first, end in itertools.combinations(range(0, last + 1, 3), 2):
                plain = Step(number, first, end)
                for way in range(3):
                    families = problem.units(plain)
                    made = tuple((part[0], way) for part, family in families if len(family) > way)
                    step = Step(number, first, end, made)
                    counted = (problem.stage_bytes(0, step) - overhead) / min(part.room_bytes for part in item.parts)
                    for part, shape in zip(item.parts, item.alone, strict=True):
                        own = problem.with_shape(slot.shape, shape).stage_bytes(0, step) - overhead
                        assert own / part.room_bytes <= counted * (1 + 1e-9)
                        compared += len(item.parts) > 1
    assert compared > 50


def test_the_faster_of_two_replicas_may_hold_more_where_it_has_the_room() -> None:
    config = UnlikeMeshes(1, 1, "1f1b", "none")
    (item,) = candidates_of(ROOMY, ROOMY).evaluate(config).answer.stages
    assert item.mesh.rows == (2, 6) and len(item.parts) == 2
    problem, _ = candidates_of(ROOMY, ROOMY).problem(config)
    step, overhead = Step(0, 0, len(problem.positions) - 1), item.shape.overhead_bytes
    sizes = {
        part.candidates.samples(part.config): problem.with_shape(0, shape).stage_bytes(0, step) - overhead
        for part, shape in zip(item.parts, item.alone, strict=True)
    }
    assert sizes[6] > 1.5 * sizes[2]
    small = 1.01 * sizes[2]
    assert sizes[6] > small, "what the faster holds would not fit the slower"
    slow, fast = (int(overhead + room) for room in (small, 3 * small))
    plan = describe_unlike(found := candidates_of(slow, fast), found.evaluate(config).answer)
    (stage,) = plan.stages
    assert stage.shares == (1, 3) and stage.memory_bytes <= stage.capacity_bytes
    assert slow < stage.memory_bytes == pytest.approx(overhead + sizes[6]) and stage.capacity_bytes == fast
    with pytest.raises(InfeasibleError):
        candidates_of(slow, slow).evaluate(config)


@pytest.mark.parametrize("schedule", ["interleaved", "zb-v"])
def test_stages_of_one_rank_are_told_with_what_its_replicas_hold(schedule: str) -> None:
    """Of the replica that holds the most of each stage, in its part of the memory."""
    _, analysis = subject_of("gpt2")
    cluster = unlike((1, 1.0, ROOMY), (1, 1.0, ROOMY), (1, 3.0, 2 * ROOMY))
    found = UnlikeCandidates(MeshPrices(Candidates(analysis, cluster, 8, "adamw", zero=0), tp=1))
    answer = found.evaluate(UnlikeMeshes(2, 4, schedule, "none", 2)).answer
    plan = describe_unlike(found, answer)
    assert len(plan.stages) == 4
    for index, (stage, item) in enumerate(zip(plan.stages, answer.stages, strict=True)):
        slot, step = answer.problem.slots[answer.way[index].slot], answer.way[index]
        held = [answer.problem.with_shape(slot.shape, shape).stage_bytes(index, step) for shape in item.alone]
        rooms = {part.candidates.device.memory_bytes / 2 for part in item.parts}
        assert stage.memory_bytes == round(max(held)) and stage.capacity_bytes in rooms
