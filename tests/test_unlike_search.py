"""The search over unlike meshes: schedules with several stages on a rank, and ZeRO between the replicas of a stage."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from test_unlike_planning import ROOMY, check_equal, plan_of, subject_of, unlike

from autopart import unlike_virtual
from autopart.candidates import Candidates
from autopart.cluster import Cluster
from autopart.describe_unlike import describe_unlike
from autopart.device_row import MOST_PLACES, DeviceRow
from autopart.mesh_prices import MeshPrices
from autopart.passes.data_axis import LEVELS
from autopart.plan import Plan
from autopart.plan_notes import whole_nodes
from autopart.predict import simulate_plan
from autopart.runtime.errors import InfeasibleError, PlanError
from autopart.solver.degrees import UnlikeMeshes
from autopart.solver.search_outcomes import Considered, Status
from autopart.solver.stages_problem import Slot, Step
from autopart.unlike import UnlikeCandidates
from autopart.unlike_virtual import VirtualMeshes, ways
from clusters import ideal

THREE = ideal(3, bandwidth=1e9)


def uses_all(plan: Plan, devices: int) -> None:
    assert sorted({rank for stage in plan.stages for rank in stage.devices}) == list(range(devices))
    assert 0 < plan.bound_s <= plan.step_time_s and simulate_plan(plan).makespan_s <= plan.step_time_s


@pytest.mark.parametrize(
    ("schedule", "zero"),
    [
        ("interleaved", 3),
        *(pytest.param(*item, marks=pytest.mark.slow) for item in (("zb-v", None), ("zb-v", 1), ("zb-h1", 2))),
        *(pytest.param("1f1b", level, marks=pytest.mark.slow) for level in (1, 2, 3)),
    ],
)
def test_what_the_search_made_trains_as_one(
    schedule: str, zero: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unlike meshes on three devices, two ranks of the pipeline with one stage or two."""
    plan = plan_of("gpt2", THREE, pp=2, tp=1, schedule=schedule, zero=zero, microbatches=2)
    uses_all(plan, 3)
    assert not plan.is_uniform and plan.pp == 2
    assert len(plan.stages) == (4 if schedule in ("interleaved", "zb-v") else 2)
    assert bool(plan.zero) == bool(zero) and set(plan.zero.values()) <= {zero}
    check_equal("gpt2", plan, tmp_path, monkeypatch)


def unlike_candidates(cluster: Cluster, zero: int | None = 0, tp: int | None = None) -> UnlikeCandidates:
    _, analysis = subject_of("gpt2")
    return UnlikeCandidates(MeshPrices(Candidates(analysis, cluster, 8, "adamw", zero=zero), tp=tp))


def of_memory(size: int) -> Cluster:
    """Three devices, each with so many bytes."""
    return ideal(3, bandwidth=1e9, memory_bytes=size)


def test_ways_come_once_each_and_the_best_first() -> None:
    """Against all sequences of slots."""
    runs = [(a, b) for a in range(5) for b in range(a + 1, 6)]
    slots = [Slot(a, b, shape, 1.0) for a, b in runs for shape in range(2)]
    worth = [((7 * number) % 11) / 3 for number in range(len(slots))]
    for ranks in (1, 2, 3):
        found = list(ways(slots, worth, 5, ranks))
        every = [
            way
            for way in itertools.product(range(len(slots)), repeat=ranks)
            if slots[way[0]].start == 0
            and slots[way[-1]].stop == 5
            and all(slots[a].stop == slots[b].start for a, b in itertools.pairwise(way))
        ]
        assert sorted(found) == every
        totals = [sum(worth[number] for number in way) for way in found]
        assert totals == pytest.approx(sorted(totals, reverse=True))


@pytest.mark.parametrize(("schedule", "pp", "microbatches"), [("interleaved", 2, 4), ("zb-v", 2, 2), ("zb-v", 3, 4)])
def test_meshes_of_several_stages_equal_trying_all(
    schedule: str, pp: int, microbatches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over all rows of meshes, each cut by the stage solver, no step is shorter; the bound is below all."""
    monkeypatch.setattr(unlike_virtual, "MOST_WAYS", 10**6)
    found = unlike_candidates(unlike((2, 1.0, ROOMY), (2, 2.0, ROOMY)))
    config = UnlikeMeshes(pp, microbatches, schedule, "none", 2)
    slots, meshes = found.slots(config.pp, 8 // config.microbatches)
    priced = tuple(found.prices.priced(mesh, config) for mesh in meshes)
    search = VirtualMeshes(found, config, (0,))
    steps = []
    for row in itertools.product(slots, repeat=config.pp):
        ends = [(0, 0), *((slot.start, slot.stop) for slot in row)]
        if row[-1].stop != found.row.end or any(a[1] != b[0] for a, b in itertools.pairwise(ends)):
            continue
        answer = search.cut(row, priced, set())
        assert answer is not None
        steps.append(found.step_seconds(answer))
    evaluation = found.evaluate(config)
    assert len(steps) > 4 and evaluation.objective == pytest.approx(min(steps), rel=1e-12)
    assert evaluation.bound <= min(steps)


def test_few_ways_are_cut_where_the_first_take_far_longer_than_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    found = unlike_candidates(unlike((2, 1.0, ROOMY), (2, 2.0, ROOMY)))
    config = UnlikeMeshes(2, 4, "interleaved", "none", 2)
    cuts = []

    def noted(search: VirtualMeshes, *rest: Any) -> Any:
        cuts.append(rest)
        return cut(search, *rest)

    cut = VirtualMeshes.cut
    monkeypatch.setattr(VirtualMeshes, "cut", noted)
    monkeypatch.setattr(unlike_virtual, "FEW_WAYS", 2)
    best = found.evaluate(config)
    many = len(cuts)
    assert found.evaluate(config, best.objective).objective == best.objective and len(cuts) == 2 * many
    monkeypatch.setattr(unlike_virtual, "FAR", 1.0)
    few = found.evaluate(config, best.objective)
    assert len(cuts) == 2 * many + 2 < 3 * many and few.objective >= best.objective and few.bound == best.bound


def test_levels_of_a_stage_equal_trying_all() -> None:
    """Under a limit that whole parameters do not keep: the shortest of all meshes, levels and cuts."""
    config = UnlikeMeshes(2, 2, "1f1b", "none")
    with pytest.raises(InfeasibleError) as caught:
        unlike_candidates(of_memory(2**31), tp=1).evaluate(config)
    enough = 2**31 + int(caught.value.excess_bytes or 0)  # for whole parameters
    cluster = of_memory(enough - (enough - 2**31) // 20)
    with pytest.raises(InfeasibleError):
        unlike_candidates(cluster, tp=1).evaluate(config)
    found = unlike_candidates(cluster, None, tp=1)
    evaluation = found.evaluate(config)
    assert any(item.mesh.zero for item in evaluation.answer.stages)
    problem, priced = found.problem(config, LEVELS)
    assert {item.mesh.zero for item in priced} == set(LEVELS)
    best = min(
        found.step_seconds(found._answer(config, problem, priced, way))
        for cut in range(1, len(problem.positions) - 1)
        for first, second in itertools.product(range(len(problem.slots)), repeat=2)
        if problem.slots[first].stop == problem.slots[second].start and problem.slots[first].start == 0
        if problem.slots[second].stop in problem.ends
        for way in [
            (
                Step(first, 0, cut),
                Step(second, cut, len(problem.positions) - 1),
            )
        ]
        if problem.excess_bytes(way) <= 0
    )
    assert evaluation.objective == pytest.approx(best, rel=1e-12)
    plan = describe_unlike(found, evaluation.answer)
    assert plan.zero and all(stage.memory_bytes <= stage.capacity_bytes for stage in plan.stages)


def test_2bw_is_searched_with_whole_parameters_alone() -> None:
    plan = plan_of("gpt2", THREE, pp=2, tp=1, schedule="2bw", microbatches=2)
    assert plan.schedule == "2bw" and not plan.zero
    with pytest.raises(PlanError, match="2bw"):
        plan_of("gpt2", THREE, pp=2, schedule="2bw", zero=1)


def test_large_clusters_have_few_places() -> None:
    """Stages have whole nodes there, several at once, which are used up in the end whatever their number."""
    for named in (
        "4x8xA100-80GB+4x8xRTX-3090",
        "17x8xA100-80GB+30x8xRTX-3090",
        "32x8xH100",
        "5x8xH100+3x8xL40S+2x4xRTX-4090",
    ):
        row = DeviceRow(Cluster.parse(named))
        assert row.is_coarse and len(row.places) <= MOST_PLACES, named
        assert all(place.taken == 0 for place in row.places)
        whole = [run for run in row.runs if (run.start, run.stop) == (0, row.end)]
        assert whole and sorted(row.devices(whole[0])) == [*range(row.cluster.device_count)]
        for run in row.runs:
            assert len(set(row.devices(run))) == run.count
    assert not DeviceRow(Cluster.parse("2x8xA100-80GB+2x8xRTX-3090")).is_coarse
    assert not DeviceRow(Cluster.parse("64xH100")).is_coarse


def test_plans_say_that_stages_had_whole_nodes() -> None:
    unlike_one = Considered(UnlikeMeshes(2, 1, "1f1b"), Status.CHOSEN, 1.0, "")
    alike = Considered(UnlikeMeshes(2, 1, "1f1b").equal, Status.CHOSEN, 1.0, "")
    large, small = Cluster.parse("9x8xA100-80GB+9x8xRTX-3090"), Cluster.parse("2x8xA100-80GB+2x8xRTX-3090")
    (told,) = whole_nodes(large, [unlike_one, alike])
    assert "of 144 devices" in told and "whole nodes, 3 of a kind at once" in told
    assert whole_nodes(large, [alike]) == whole_nodes(small, [unlike_one]) == []
