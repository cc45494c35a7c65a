"""The original model, once ranks have shares of it: it refuses to compute and to give its state."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopart
from autopart.alike_layers import alike_layers
from autopart.divided_original import Refusal
from autopart.runtime.errors import PlanError
from clusters import ideal
from launch import launch

WIDTH, WORDS = 8, 12


class Net(nn.Module):
    def __init__(self, norm: bool) -> None:
        super().__init__()
        self.words, self.last = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH) if norm else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.words(x).mean(1))).square().mean()


def batch(length: int = 4) -> Tensor:
    return torch.randint(3, (8, length), generator=torch.Generator().manual_seed(0))


def run(limits: dict[str, int], norm: bool, name: str) -> None:
    net = Net(norm).double()
    settings: dict[str, Any] = {"pp": 1, "dp": 1, "tp": 1, "microbatches": 1, **limits}
    model = autopart.parallelize(net, cluster=ideal(2), verbose=False, **settings)
    model(batch()).backward()
    model(batch(6)).backward()  # the original is captured again
    whole = copy.deepcopy(model.state_dict())
    if not name:
        net.eval()
        with torch.no_grad():
            assert net(batch()).item() == pytest.approx(model.eval()(batch()).item(), rel=1e-9)
        torch.testing.assert_close(net.state_dict(), whole)
        return
    told = rf"the original model cannot compute.*since '{name}' is.*what parallelize returned"
    with pytest.raises(PlanError, match=told):
        net(batch())
    with pytest.raises(PlanError, match=told):
        net.state_dict()
    with pytest.raises(PlanError, match=told):
        copy.deepcopy(net).state_dict()
    with pytest.raises(PlanError, match=told):
        net.get_submodule(name.split(".")[0]).state_dict()


@pytest.mark.parametrize(
    ("limits", "norm", "name"),
    [
        ({"dp": 2}, False, ""),
        ({"dp": 2}, True, "norm.running_mean"),
        ({"dp": 2, "zero": 3}, False, "words.weight"),
    ],
)
def test_it_computes_and_gives_its_state_only_where_it_is_whole(limits: dict[str, int], norm: bool, name: str) -> None:
    launch(run, 2, limits, norm, name)


def test_layers_that_refuse_are_alike() -> None:
    """A capture for other sizes traces few of them, as the first did."""
    layers = nn.ModuleList([nn.Sequential(nn.Linear(WIDTH, WIDTH)) for _ in range(8)])
    for number, layer in enumerate(layers):
        layer.get_submodule("0").register_forward_pre_hook(Refusal(f"{number}.weight", "is this rank's share alone"))
    assert [len(group) for group in alike_layers(layers)] == [8]
    layers[0].register_forward_pre_hook(lambda module, given: None)
    assert not alike_layers(layers)  # seven are left
