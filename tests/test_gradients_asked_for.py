"""``torch.autograd.grad`` for a list of parameters that a script made before the stages were known."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import autopart
from launch import launch


class _Model(nn.Module):
    def __init__(self, inside: bool) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4))).double()
        self.inside = inside

    def forward(self, x: Tensor) -> Tensor:
        found = self.layers(x)
        return found.square().mean() if self.inside else found


def _rank(inside: bool) -> tuple[list[Tensor], list[Tensor], list[bool]]:
    torch.manual_seed(0)
    original = _Model(inside)
    plain = copy.deepcopy(original)
    x = torch.randn(8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    model = autopart.parallelize(original, pp=2, microbatches=2)
    parameters = list(model.parameters())

    def loss_of(module: nn.Module) -> Tensor:
        found = module(x)
        return found if inside else found.square().mean()

    made = torch.autograd.grad(loss_of(model), parameters)
    wanted = torch.autograd.grad(loss_of(plain), list(plain.parameters()))
    for parameter in parameters[::3]:
        parameter.register_hook(lambda gradient: gradient * 2)
    loss_of(model).backward()
    return list(made), list(wanted), [parameter.grad is not None for parameter in parameters]


@pytest.mark.filterwarnings("ignore:the loss is computed outside")
@pytest.mark.parametrize("inside", [True, False])
def test_gradients_of_all_parameters_are_each_on_one_rank(inside: bool) -> None:
    ranks = launch(_rank, 2, inside)
    owners = [[made.numel() > 0 for made in found] for found, _, _ in ranks]
    assert [sum(own) for own in zip(*owners, strict=True)] == [1] * 8
    assert all(any(own) for own in owners)
    for index, wanted in enumerate(ranks[0][1]):
        (found,) = [made[index] for made, _, _ in ranks if made[index].numel()]
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    assert [given for _, _, given in ranks] == owners  # a backward gives the others none
