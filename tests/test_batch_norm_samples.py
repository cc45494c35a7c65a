"""Batch norm in training needs two values of each channel: plans give no rank fewer samples at a time."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from autopart.passes.graph import least_samples
from autopart.planner import make_plan
from autopart.runtime.errors import PlanError
from autopart.tracing import capture
from clusters import ideal


class _Model(nn.Module):
    """places: of an image's side where batch norm is; 0: none."""

    def __init__(self, places: int) -> None:
        super().__init__()
        self.places = places
        norm = nn.BatchNorm2d if places else nn.BatchNorm1d
        self.first, self.norm, self.last = nn.Linear(8, 8), norm(8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        if self.places:
            hidden = hidden[..., None, None].expand(-1, -1, self.places, self.places)
        hidden = self.norm(hidden)
        return self.last(hidden if not self.places else hidden.mean((2, 3))).square().mean()


@pytest.mark.parametrize(("places", "least"), [(0, 2), (1, 2), (2, 1)])
def test_how_many_it_takes(places: int, least: int) -> None:
    program = capture(_Model(places), (torch.randn(4, 8),))
    assert least_samples(program.graph) == least


def test_plans_give_every_rank_as_many() -> None:
    program = capture(_Model(0), (torch.randn(4, 8),))
    alike = make_plan(program, ideal(4), batch=4, meshes="equal")
    assert alike.dp * alike.microbatches <= 2
    with pytest.raises(PlanError, match=r"needs 2 samples at a time.* a batch of 4 have fewer"):
        make_plan(program, ideal(4), batch=4, dp=4)
    shares = make_plan(program, ideal(3, bandwidth=1e9), batch=7, pp=1, tp=1).stages[0].shares
    assert sorted(shares) == [2, 2, 3]
    with pytest.raises(PlanError, match="a batch of 5 does not divide"):  # and shares of 2, 2 and 1 are too few
        make_plan(program, ideal(3), batch=5, pp=1, tp=1)
