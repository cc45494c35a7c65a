"""Losses outside the model whose backward comes late: after another forward, and after the weights have changed."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import autopart
from launch import launch


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)).double()


def _rank(level: int) -> tuple[str, list[Tensor], list[Tensor]]:
    original = _model()
    plain = copy.deepcopy(original)
    x = torch.randn(8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    model = autopart.parallelize(original, dp=2, zero=level, microbatches=1)
    first = model(x).square().mean()
    with torch.no_grad():
        model(x + 1)
    model(x + 1).square().mean().backward()
    first.backward()  # after another batch went forward and back
    expected = plain(x).square().mean() + plain(x + 1).square().mean()
    wanted = list(torch.autograd.grad(expected, list(plain.parameters())))
    parts = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    late = model(x).square().mean()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    with torch.no_grad():
        model(x)
    try:
        late.backward()
    except RuntimeError as error:
        return str(error), parts, wanted
    return "", parts, wanted


@pytest.mark.filterwarnings("ignore:the loss is computed outside")
@pytest.mark.parametrize("level", [1, 2])
def test_weights_that_change_before_a_late_backward_are_noticed(level: int) -> None:
    ranks = launch(_rank, 2, level)
    for message, _, _ in ranks:
        assert "changed between its forward and its backward" in message
    for index, wanted in enumerate(ranks[0][2]):
        shares = [parts[index] for _, parts, _ in ranks]
        found = shares[0] if shares[0].shape == wanted.shape else torch.cat(shares)
        torch.testing.assert_close(found.reshape(wanted.shape), wanted, rtol=1e-12, atol=1e-12)
