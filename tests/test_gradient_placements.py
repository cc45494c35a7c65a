"""Gradients are reduced no more often than needed: once for all readers of a value, once a step for parameters."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import forcing
from autopart.passes.rules import Strategy
from autopart.plan import Plan
from autopart.runtime.traffic import Count
from autopart.verify import Subject, prepare
from forcing import Keep, op
from launch import run_kept_job

BATCH, ROWS, WIDTH = 8, 4, 16
VALUE = BATCH * ROWS * WIDTH * 8
"""Bytes of one activation of the whole batch."""
GATHERED = ("all_gather", "reduce_scatter")


class Readers(nn.Module):
    """Query, key and value read one normalised value; the layer before makes its gradient matter."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.first, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v = (nn.Linear(WIDTH, 2 * WIDTH, bias=False) for _ in range(3))
        self.out = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        normal = self.norm(torch.tanh(self.first(x)))
        mixed = torch.sin(self.q(normal)) * torch.cos(self.k(normal)) * self.v(normal)
        return (x + self.out(mixed)).square().sum()


@functools.cache
def subject() -> Subject:
    x = torch.randn(BATCH, ROWS, WIDTH, generator=torch.Generator().manual_seed(4)).double()
    return prepare(Readers().double(), (x,))


def split(others: Mapping[str, str]) -> Keep:
    """Megatron's split of the readers (by columns) and of ``out`` (by rows); others by op, R where none is given."""

    def keep(node: fx.Node, strategy: Strategy) -> bool:
        read = {item.name for item in node.all_input_nodes}
        if node.op != "call_function":
            return True
        if read & {"p_q_weight", "p_k_weight", "p_v_weight"}:
            return strategy.name == "n"
        if "p_out_weight" in read:
            return strategy.name == "k"
        return strategy.name == ("d2" if op(node) in ("sin", "cos", "mul") else others.get(op(node), "R"))

    return keep


REPLICATED = split({})
SEQUENCE = split({"linear": "b1", "tanh": "d1", "layer_norm": "b1", "add": "d1", "square": "d1", "sum": "d1"})


def counts(plan: Plan, folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, dict[tuple[str, str], Count]]:
    """Source, and what the first rank sent in a step on the tensor axis, by operation and phase; checks equality."""
    reports: list[Any] = []

    def listen(*args: Any, **options: Any) -> list[Any]:
        found = run_kept_job(*args, **options)
        reports.extend(found)
        return found

    monkeypatch.setattr(forcing, "run_kept_job", listen)
    _, source = forcing.run(subject(), plan, folder, monkeypatch)
    found = {(item[0], item[2]): Count(*item[3:]) for item in reports[0]["traffic"] if item[1] == "tp"}
    return source, found


def test_readers_of_one_value_share_one_sum_of_its_gradient(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """R to B: the three readers' gradients are added on each rank, and the sum is reduced once."""
    source, found = counts(forcing.forced(subject(), 2, REPLICATED), tmp_path, monkeypatch)
    assert source.count(".sum_gradients(") == 1
    assert found == {
        ("all_reduce", "forward"): Count(1, VALUE),  # of the row split
        ("all_reduce", "backward"): Count(1, VALUE),
    }


def test_sequence_sharding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """S to B: one gather for the readers, one reduce-scatter of their gradients' sum, and the other way round at the
    row split. Each rank has a part of the gradients of what is used on the sequence's shards: these are reduced once a
    step, whatever the number of microbatches, in one bucket.
    """
    parts = 4
    plan = forcing.forced(subject(), 2, SEQUENCE, {"microbatches": parts})
    partial = {"first.weight", "first.bias", "norm.weight", "norm.bias"}
    assert {name for name, placement in plan.storage.items() if placement == "B"} == partial
    source, found = counts(plan, tmp_path, monkeypatch)
    assert source.count(".all_gather_scatter_gradients(") == source.count(".reduce_scatter(") == 1
    assert found == {
        **{(name, phase): Count(parts, VALUE) for name in GATHERED for phase in ("forward", "backward")},
        ("all_reduce", "forward"): Count(parts, parts * 8),  # the loss
        ("all_reduce", "update"): Count(1, 8 * (WIDTH * WIDTH + 3 * WIDTH)),
    }
