"""What a script or a module keeps of a forward of the original, as pruned layers do, is no hindrance to dividing it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

import autopart
from clusters import ideal
from launch import launch


class Net(nn.Module):
    """Two layers, one of them pruned: its weight is kept, and made anew in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 8)
        prune.l1_unstructured(self.second, "weight", 0.25)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).relu()).square().mean()


def trained(model: Any) -> list[Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for seed in range(2):
        optimizer.zero_grad()
        x = torch.randn(4, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        model(x).backward()
        optimizer.step()
    return [*model.state_dict().values()]


def compared(limits: dict[str, Any]) -> None:
    torch.manual_seed(0)
    plain = Net().double()
    torch.manual_seed(0)
    net = Net().double()
    ones = torch.ones(4, 4, dtype=torch.float64)
    kept = net(ones)
    model = autopart.parallelize(net, cluster=ideal(2), verbose=False, microbatches=1, **limits)
    for one, two in zip(trained(model), trained(plain), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-12, atol=1e-12)
    given = torch.autograd.grad(model(ones), [*model.parameters()])
    assert [gradient.shape for gradient in given] == [parameter.shape for parameter in model.parameters()]
    assert kept.requires_grad


@pytest.mark.parametrize(
    "limits", [{"pp": 1, "dp": 2, "tp": 1, "zero": 2}, {"pp": 1, "dp": 1, "tp": 2}, {"pp": 2, "dp": 1, "tp": 1}]
)
def test_what_is_kept_of_an_earlier_forward_does_not_matter(limits: dict[str, Any]) -> None:
    launch(compared, 2, limits)
