"""Plans whose code would hold more than their devices have, where what blocks add up to is less."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from autopart import overfull
from autopart.analysis import Analysis, analyze
from autopart.cluster import Cluster, Node
from autopart.cost.devices import Device, Link
from autopart.plan import Plan
from autopart.planner import make_plan
from autopart.rank_peaks import RankPeak, rank_peaks
from autopart.runtime.errors import InfeasibleError
from autopart.tracing import capture

LIMITS = {"pp": 1, "dp": 1, "tp": 4, "microbatches": 2, "batch": 16}


class _Layer(nn.Module):
    """Two products, each of a tensor that ranks gather for it: both gradients are on their way at once."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.near, self.far = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, nodes: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.far(edges @ nodes) + self.near(nodes))


class _Network(nn.Module):
    def __init__(self, width: int = 512) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(16, width), nn.Linear(width, 4)
        self.first, self.second, self.third = _Layer(width), _Layer(width), _Layer(width)

    def forward(self, nodes: torch.Tensor, edges: torch.Tensor, kinds: torch.Tensor) -> torch.Tensor:
        hidden = self.third(self.second(self.first(self.enter(nodes), edges), edges), edges)
        return nn.functional.cross_entropy(self.leave(hidden).flatten(0, 1), kinds.flatten())


@pytest.fixture(scope="module")
def analysis() -> Analysis:
    example = torch.randn(4, 128, 16), torch.rand(4, 128, 128), torch.randint(0, 4, (4, 128))
    return analyze(capture(_Network(), example, check_eval=False))


def _cluster(memory_bytes: float) -> Cluster:
    device = Device("plain", "cpu", int(memory_bytes), {"float32": 1e10}, 1e12, 0.0)
    link = Link("plain", 1e12, 0.0)
    return Cluster((Node(device, 4, link, link, 1),))


def _plan(analysis: Analysis, memory_bytes: float, **limits: Any) -> Plan:
    return make_plan(analysis.program, _cluster(memory_bytes), analysis=analysis, **{**LIMITS, **limits})


def _held(plan: Plan, analysis: Analysis) -> int:
    (peak,) = rank_peaks(plan, analysis, "cpu")
    return peak.total


def test_a_plan_whose_code_holds_too_much_is_made_again_with_less_memory(analysis: Analysis) -> None:
    free = _plan(analysis, 2**40)
    held = _held(free, analysis)
    assert held > free.fullest_bytes, "what the plan counts on is less than its code holds"
    limit = (held + free.fullest_bytes) // 2
    plan = _plan(analysis, limit)
    assert _held(plan, analysis) <= limit
    assert plan.stages[0].capacity_bytes == limit
    assert plan.cluster == str(_cluster(limit))
    assert any("the code of a faster plan holds" in note for note in plan.notes)
    assert _plan(analysis, held).step_time_s == free.step_time_s
    assert not any("the code of" in note for note in _plan(analysis, held).notes)


def test_where_nothing_else_fits_the_error_says_what_the_code_holds(
    analysis: Analysis, monkeypatch: pytest.MonkeyPatch
) -> None:
    peak = RankPeak((0,), 2**40, 0, 0, 0, 0)
    monkeypatch.setattr(overfull, "rank_peaks", lambda *_: [peak])
    monkeypatch.setattr(overfull, "SURELY", 0.0)
    with pytest.raises(InfeasibleError, match="the code of a faster plan holds 1 TiB on stage 0, 1008 GiB more than"):
        _plan(analysis, 2**34)


def test_code_of_plans_far_from_full_and_of_large_programs_is_not_walked_over(
    analysis: Analysis, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = _plan(analysis, 2**40)
    monkeypatch.setattr(overfull, "rank_peaks", None)
    assert _plan(analysis, free.fullest_bytes / overfull.SURELY + 1).step_time_s == free.step_time_s
    monkeypatch.setattr(overfull, "MOST_OPS", len(analysis.block_of) - 1)
    assert _plan(analysis, free.fullest_bytes).step_time_s == free.step_time_s


def test_each_kind_of_replica_has_room_for_its_own_samples(analysis: Analysis) -> None:
    """Three of four samples on a device that is three times as fast: what it holds is no matter of the slower one's."""

    def cluster(fast_bytes: float, slow_bytes: float) -> Cluster:
        link = Link("plain", 1e12, 0.0)
        devices = (
            Device("fast", "cpu", int(fast_bytes), {"float32": 3e10}, 3e12, 0.0),
            Device("slow", "cpu", int(slow_bytes), {"float32": 1e10}, 1e12, 0.0),
        )
        return Cluster(tuple(Node(device, 1, link, link, 1) for device in devices))

    def plan_of(given: Cluster) -> Plan:
        limits: dict[str, Any] = {"pp": 1, "dp": 2, "tp": 1, "microbatches": 2, "batch": 16, "meshes": "unlike"}
        return make_plan(analysis.program, given, analysis=analysis, **limits)

    free = plan_of(cluster(2**40, 2**40))
    (stage,) = free.stages
    assert stage.shares == (3, 1)
    fast, slow = (rank_peaks(free, analysis, "cpu", [samples])[0].total for samples in (6, 2))
    assert slow < 0.8 * fast and fast == _held(free, analysis)
    tight = cluster(fast, slow)
    assert overfull.overfull(free, analysis, tight) is None
    found = overfull.overfull(free, analysis, cluster(fast, slow - 1))
    assert found is not None and (found.held_bytes, found.room_bytes) == (slow, slow - 1)
    found = overfull.overfull(free, analysis, cluster(fast - 1, slow))
    assert found is not None and (found.held_bytes, found.room_bytes) == (fast, fast - 1)
    wide = cluster(2 * fast, 2 * slow)
    made = plan_of(overfull.with_share(wide, 0.75))
    assert made.stages[0].shares == (3, 1) and made.stages[0].capacity_bytes == 2 * fast * 3 // 4
    assert overfull.with_capacities(made, wide, 0.75).stages[0].capacity_bytes == 2 * fast
