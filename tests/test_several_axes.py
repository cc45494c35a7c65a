"""Two tensor axes without being asked: where one is short of memory or sizes, and not otherwise."""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopart.analysis import Analysis, analyze
from autopart.axes_volume import least_exchange_seconds
from autopart.candidates import Candidates
from autopart.cluster import Cluster
from autopart.plan import Plan
from autopart.plan_notes import unfactored
from autopart.planner import make_plan
from autopart.report.units import format_seconds
from autopart.runtime.errors import InfeasibleError
from autopart.several_axes import uncovered
from autopart.solver import tensor
from autopart.solver.degrees import Degrees
from autopart.solver.search_outcomes import Considered, Status
from autopart.solver.tensor_problem import TensorProblem, TensorSolution
from autopart.tracing import capture
from clusters import ideal

LIMITS: dict[str, Any] = {"batch": 1, "pp": 1, "dp": 1, "microbatches": 1, "recompute": "none"}


class Square(nn.Module):
    """Two products of as many rows as columns."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(size, size, bias=False), nn.Linear(size, size, bias=False)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"loss": self.second(torch.nn.functional.gelu(self.first(x))).square().mean()}


@functools.lru_cache(maxsize=2)
def square(size: int) -> Analysis:
    return analyze(capture(Square(size), (), {"x": torch.randn(1, size, size)}, check_eval=False))


def plan(size: int, cluster: Cluster, **limits: Any) -> Plan:
    analysis = square(size)
    return make_plan(analysis.program, cluster, analysis=analysis, **{**LIMITS, **limits})


def sizes(found: Plan) -> tuple[int, ...]:
    return tuple(parts for _, parts in found.stages[0].mesh[1:])


def test_sizes_that_do_not_divide_by_all_ranks_are_shared_on_two_axes() -> None:
    """258 rows, columns and factors on 4 ranks: on one axis nothing divides."""
    found = plan(258, ideal(4))
    assert sizes(found) == (2, 2)
    assert found.step_time_s < plan(258, ideal(4), tensor_scheme="1d").step_time_s
    assert [row["config"] for row in found.considered if "2x2" in str(row["config"])]
    assert sizes(plan(256, ideal(4))) == (4,)
    assert not [row for row in plan(256, ideal(4)).considered if "2x2" in str(row["config"])]
    assert sizes(plan(258, ideal(4), tp=4)) == (4,), "what is given is forced"


def test_what_does_not_fit_on_one_axis_is_tried_on_two() -> None:
    whole = plan(258, ideal(4), tensor_scheme="1d").stages[0].memory_bytes
    less = plan(258, ideal(4), tp="2x2").stages[0].memory_bytes
    assert less < whole
    assert sizes(plan(258, ideal(4, memory_bytes=(less + whole) // 2))) == (2, 2)


def test_where_the_least_does_not_fit_no_limits_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    least = plan(258, ideal(4), tp="2x2").stages[0].memory_bytes
    limits = list[float]()
    solve = tensor.solve

    def counted(problem: TensorProblem, *others: Any) -> TensorSolution:
        if problem.memory_limit is not None:
            limits.append(problem.memory_limit)
        return solve(problem, *others)

    monkeypatch.setattr(tensor, "solve", counted)
    for share in (0.9, 0.1):  # parameters fit, but not with what is kept; and not even parameters
        with pytest.raises(InfeasibleError, match="no cut"):
            plan(258, ideal(4, memory_bytes=int(share * least)), tp="2x2")
    assert not limits


class Chain(nn.Module):
    """Products whose three tensors are of one size, one after the other."""

    def __init__(self, size: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(size, size, bias=False) for _ in range(layers))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        for layer in self.layers:
            x = torch.nn.functional.gelu(layer(x))
        return {"loss": x.square().mean()}


def test_several_axes_are_chosen_where_they_exchange_less() -> None:
    """On 16 ranks one axis moves a whole tensor of each product, two axes two quarters: it counts on slow links."""
    analysis = analyze(capture(Chain(256, 4), (), {"x": torch.randn(1, 256, 256)}, check_eval=False))

    def chosen(bandwidth: float, **limits: Any) -> Plan:
        cluster = ideal(16, bandwidth=bandwidth)
        return make_plan(analysis.program, cluster, analysis=analysis, **{**LIMITS, **limits})

    found, one = chosen(1e9), chosen(1e9, tp=16)
    assert len(sizes(found)) > 1
    assert found.step_time_s < 0.95 * one.step_time_s
    assert found.bound_s <= found.step_time_s
    fast = chosen(1e12)
    assert len(sizes(fast)) == 1
    assert not [row for row in fast.considered if "x" in str(row["config"]).split("tp=")[1].split()[0]]


def test_the_least_exchange_of_a_product() -> None:
    """By hand: three tensors of 256 KiB, on links of 1 byte/s without latency."""
    analysis = square(256)
    candidates = Candidates(analysis, ideal(16, bandwidth=1.0), 1, "adamw")
    size, products = 256 * 256 * 4, 2

    def exchanged(*axes: int) -> float:
        return least_exchange_seconds(candidates, Degrees(1, 1, axes, 1, "1f1b", "none")) / (products * size)

    efficiency = candidates.layout.tensor_axes(Degrees(1, 1, (16,), 1, "1f1b"))[0].link.efficiency
    assert exchanged(16) == pytest.approx(2 * 15 / 16 / efficiency, rel=1e-6)
    assert exchanged(4, 4) == pytest.approx(2 * 2 * (3 / 4) / 4 / efficiency, rel=1e-6)
    assert exchanged(4, 2, 2) == pytest.approx(2 * ((3 / 4) / 4 + 2 * (1 / 2) / 8) / efficiency, rel=1e-6)
    (node,) = ideal(16, bandwidth=1.0).nodes
    summing = Cluster((replace(node, inside=replace(node.inside, switch_sums=0.5)),))
    candidates = Candidates(analysis, summing, 1, "adamw")
    operand = least_exchange_seconds(candidates, Degrees(1, 1, (16,), 1, "1f1b", "none"), by_rows=False)
    assert operand / (products * size) == pytest.approx(1 / 0.5, rel=1e-3)  # copied, its gradient summed in switches


def test_factorings_that_were_not_searched_are_said_and_bounded() -> None:
    analysis = square(64)
    plan = make_plan(analysis.program, ideal(4, bandwidth=1e6), analysis=analysis, **LIMITS)
    candidates = Candidates(analysis, ideal(4, bandwidth=1e6), 1, "adamw")
    config = Degrees(1, 1, (4,), 1, "1f1b", "none")
    left, least = uncovered(candidates, [config], {config}, plan.bound_s)
    assert left == ((2, 2),) and 0 < least < plan.bound_s
    two = make_plan(analysis.program, ideal(4, bandwidth=1e6), analysis=analysis, **LIMITS, tp="2x2")
    assert least <= two.bound_s
    assert uncovered(candidates, [config], {config, replace(config, axes=(2, 2))}, plan.bound_s) == ((), math.inf)
    assert uncovered(candidates, [config], {config}, least) == ((), math.inf)
    one = Considered(config, Status.CHOSEN, plan.step_time_s, "")
    (note,) = unfactored(candidates, [config], [one], plan.bound_s)
    assert "2x2 were not" in note and format_seconds(least) in note and "--tp 2x2 plans" in note
    assert [row for row in plan.considered if "tp=2x2" in str(row["config"])], "the search takes it up here"
    assert not [note for note in plan.notes if note.startswith("the lower bound")]
    assert not [note for note in two.notes if note.startswith("the lower bound")]
