"""Two tensor axes without being asked: where one is short of memory or sizes, and not otherwise."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

from autopart.analysis import Analysis, analyze
from autopart.cluster import Cluster
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
