"""Two tensor axes without being asked: where one is short of memory or sizes, and not otherwise."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopart.analysis import Analysis, analyze
from autopart.cluster import Cluster, Node
from autopart.cost.devices import Link
from autopart.plan import Plan
from autopart.planner import make_plan
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
    return analyze(capture(Square(size), (), {"x": torch.randn(1, size, size)}))


def plan(size: int, cluster: Cluster, **limits: Any) -> Plan:
    analysis = square(size)
    return make_plan(analysis.program, cluster, analysis=analysis, **{**LIMITS, "tp": cluster.device_count, **limits})


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


def test_what_does_not_fit_on_one_axis_is_tried_on_two() -> None:
    whole = plan(258, ideal(4), tensor_scheme="1d").stages[0].memory_bytes
    less = plan(258, ideal(4), tp="2x2").stages[0].memory_bytes
    assert less < whole
    assert sizes(plan(258, ideal(4, memory_bytes=(less + whole) // 2))) == (2, 2)


@pytest.mark.parametrize(("inside", "across"), [(1e12, 1e9), (1e9, 1e9)])
def test_each_axis_lies_on_a_level_of_links(inside: float, across: float) -> None:
    """Two nodes of two devices: of both factorings of four ranks the outer axis crosses nodes."""
    device = ideal(1).devices[0]
    node = Node(device, 2, Link("inside", inside, 0.0), Link("across", across, 0.0), 1)
    found = plan(64, Cluster((node, node)))
    assert {"2x2"} <= {str(row["config"]).split("tp=")[1].split()[0] for row in found.considered}
    one = plan(64, Cluster((node, node)), tensor_scheme="1d")
    assert found.step_time_s <= one.step_time_s * (1 + 1e-9)
