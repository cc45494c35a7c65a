"""The steps of the Python API by themselves: what they take from each other, and what they refuse."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autopart.analysis import analyze
from autopart.cluster import Cluster
from autopart.passes.program import Program
from autopart.plan import Plan
from autopart.planner import make_plan
from autopart.realize import realize
from autopart.tracing import capture


class Residual(nn.Module):
    """Of which weights or activations weigh more, as there are few samples or many."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 64)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4))
        self.last = nn.Linear(64, 32)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.first(x)
        for layer in self.layers:
            h = h + layer(h)
        return F.cross_entropy(self.last(h), y)


@cache
def program_of(samples: int) -> Program:
    return capture(Residual(), (torch.randn(samples, 16), torch.zeros(samples, dtype=torch.long)), check_eval=False)


def planned(samples: int) -> Plan:
    return make_plan(program_of(samples), Cluster.parse("cpu:2"), batch=16, pp=2, tp=1)


def test_a_plan_is_for_example_inputs_of_any_number_of_samples() -> None:
    few, many = program_of(8), program_of(64)
    assert few.fingerprint == many.fingerprint
    assert len(analyze(few).blocks) != len(analyze(many).blocks), "else this tests nothing"
    plan = planned(8)
    assert plan.example_batch == 8
    assert realize(many, plan).files == realize(few, plan).files
    assert realize(few, planned(64)).files == realize(many, planned(64)).files


def test_a_plan_that_does_not_tell_its_samples_has_the_blocks_of_the_program_at_hand() -> None:
    plan = planned(8)
    assert realize(program_of(8), replace(plan, example_batch=0)).files == realize(program_of(8), plan).files
