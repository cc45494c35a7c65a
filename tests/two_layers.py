"""Two layers over two ranks, divided in every way: what scripts do around a model is tried on it."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

import autopart

PP: dict[str, Any] = {"pp": 2, "microbatches": 2}
TP: dict[str, Any] = {"tp": 2}
DP: dict[str, Any] = {"dp": 2}
PLANS = [PP, TP, DP]
NAMES = ["pp", "tp", "dp"]
# Megatron's split, by hand: the solver divides nothing as small as this.
STRATEGIES = {"first:linear": "n", ":tanh": "d1", "second:linear": "k"}
STORAGE = {"first.weight": "S0", "first.bias": "S0", "second.weight": "S1"}


class Model(nn.Module):
    """Two layers; a scale that is replicated under tensor parallelism; a parameter that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 8)
        self.norm, self.unused = nn.LayerNorm(8), nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.norm(self.second(torch.tanh(self.first(x)))), y)


def build() -> Model:
    torch.manual_seed(0)
    return Model().double()


def batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(8, 8, generator=generator, dtype=torch.float64) for name in "xy"}


def parallel(limits: dict[str, Any]) -> nn.Module:
    plan = None
    if "tp" in limits:
        program = autopart.capture(build(), (), batch())
        plan = autopart.make_plan(program, autopart.Cluster.local(2), **limits)
        plan, limits = dataclasses.replace(plan, strategies=STRATEGIES, storage=STORAGE), {}
    return autopart.parallelize(build(), plan=plan, verbose=False, **limits)
