"""What is asked for may be out of all proportion, or nothing at all: planning says so, or ends all the same."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import autopart
from autopart.cluster import Cluster
from autopart.mesh_prices import dealt
from autopart.runtime.errors import PlanError
from autopart.solver.degrees import MOST_MICROBATCHES, degrees
from clusters import ideal

PRIME = 2**31 - 1
"""A batch that can be cut into single samples alone."""


class _Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).relu()).square().mean()


class _Idle(nn.Module):
    """Has a parameter, and does not use it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        return x.tanh()


@pytest.mark.parametrize(("meshes", "devices"), [("equal", 2), ("unlike", 3)])
def test_no_more_microbatches_are_tried_than_a_schedule_may_have(meshes: str, devices: int) -> None:
    program = autopart.capture(_Small(), (torch.zeros(2, 4),))
    plan = autopart.make_plan(program, ideal(devices), batch=PRIME, pp=2, meshes=meshes)
    assert plan.microbatches == 1
    assert {config.microbatches for config in degrees(2, PRIME)} == {1}
    assert max(config.microbatches for config in degrees(2, 2**31)) == MOST_MICROBATCHES


@pytest.mark.parametrize("seconds", [(1.0,), (1.0, 1.0, 1.0), (0.3, 0.1, 0.7, 0.1), (1e-9, 5.0), (0.0, 1.0)])
def test_rows_are_dealt_as_if_one_went_after_the_other(seconds: tuple[float, ...]) -> None:
    given = [0] * len(seconds)
    for rows in range(100):
        assert dealt(seconds, rows) == tuple(given)
        given[min(range(len(given)), key=lambda index: ((given[index] + 1) * seconds[index], index))] += 1
    if min(seconds) > 0:
        assert sum(dealt(seconds, PRIME)) == PRIME


def test_microbatches_out_of_proportion_are_refused() -> None:
    program = autopart.capture(_Small(), (torch.zeros(2, 4),))
    with pytest.raises(PlanError, match="microbatches is at most 1,048,576, not 2,147,483,647"):
        autopart.make_plan(program, ideal(2), batch=PRIME, microbatches=PRIME)


@pytest.mark.parametrize("model", [nn.Tanh(), _Idle()])
def test_a_model_without_anything_to_train_is_refused(model: nn.Module) -> None:
    program = autopart.capture(model, (torch.zeros(2, 4),), name="idle")
    with pytest.raises(PlanError, match="idle computes nothing that depends on a parameter"):
        autopart.make_plan(program, Cluster.parse("2xH100"))
