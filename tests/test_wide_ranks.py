"""Tensor ranks on several nodes without being asked: where samples are few or nothing else fits, and seldom besides."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

from autopart.analysis import Analysis, analyze
from autopart.cluster import Cluster
from autopart.models import load_model
from autopart.plan import Plan
from autopart.planner import make_plan
from autopart.tracing import capture
from autopart.what_if import Change

SIZE = 4096


class Stack(nn.Module):
    """Feed-forward layers of one size."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(SIZE, SIZE, bias=False) for _ in range(layers))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return {"loss": x.square().mean()}


@functools.lru_cache(maxsize=2)
def stack(layers: int) -> Analysis:
    with torch.device("meta"):
        model, example = Stack(layers), torch.empty(1, 2048, SIZE)
    return analyze(capture(model, (), {"x": example}, check_eval=False))


def plan(layers: int, cluster: str, **limits: Any) -> Plan:
    analysis = stack(layers)
    return make_plan(analysis.program, Cluster.parse(cluster), analysis=analysis, **limits)


def ranks(found: Plan) -> int:
    size = 1
    for _, parts in found.stages[0].mesh[1:]:
        size *= parts
    return size


def tried(found: Plan) -> list[str]:
    return [item["config"] for item in found.considered]


def test_few_samples_are_shared_by_ranks_of_several_nodes() -> None:
    """One sample on two nodes: pipelines of one microbatch keep one of their stages busy at a time."""
    found = plan(8, "2x1xA100-80GB", batch=1)
    assert ranks(found) == 2
    forced = plan(8, "2x1xA100-80GB", batch=1, pp=1, dp=1)
    assert found.step_time_s == forced.step_time_s
    assert found.step_time_s < plan(8, "2x1xA100-80GB", batch=1, tp=1).step_time_s


def test_where_nothing_else_divides_ranks_are_on_several_nodes() -> None:
    """One layer is one stage, and one sample one replica's."""
    assert ranks(plan(1, "2x1xA100-80GB", batch=1, pp=1, microbatches=1)) == 2


def test_what_promises_nothing_is_not_tried() -> None:
    """Of many samples replicas take each their own, and sum less than ranks exchange."""
    found = plan(8, "4x4xA100-80GB", batch=512)
    assert ranks(found) <= 4
    assert not [config for config in tried(found) if " tp=8 " in config or " tp=16 " in config]
    assert [config for config in tried(plan(8, "4x4xA100-80GB", batch=512, thorough=True)) if " tp=16 " in config]


def test_a_faster_network_is_no_reason_to_be_slower() -> None:
    """A node's ranks share what the other node repeats, which takes the same on any network."""
    name = "hf:gpt2?n_layer=2&n_embd=1024&n_head=8&vocab_size=8000&seq=256"
    loaded = load_model(name, meta=True)
    analysis = analyze(capture(loaded.model, loaded.args, loaded.kwargs, check_eval=False))

    def on(cluster: str, factor: float = 1.0, **limits: Any) -> Plan:
        changed = Change(network=factor).applied(Cluster.parse(cluster))
        return make_plan(analysis.program, changed, batch=8, recompute="none", analysis=analysis, **limits)

    found = on("2x2xRTX-4090@Ethernet-25", 4.0)
    assert found.bound_s <= found.step_time_s <= on("2xRTX-4090", tp=2, microbatches=1).step_time_s
    assert found.step_time_s < 0.9 * on("2x2xRTX-4090@Ethernet-25", 4.0, tp=2).step_time_s
