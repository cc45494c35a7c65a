"""Hooks on parameters that a batch does not reach are not called, as in one process."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn

import autopart
from clusters import ideal
from launch import launch


class Heads(nn.Module):
    """Two heads, of which the script takes one, and a layer that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.first, self.second, self.unused = (nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        body = self.body(x).relu()
        return self.first(body), self.second(body)


def called(model: nn.Module) -> list[tuple[str, float]]:
    found: list[tuple[str, float]] = []
    for name, parameter in model.named_parameters():
        parameter.register_hook(lambda gradient, name=name: found.append((name, gradient.norm().item())))
        parameter.register_post_accumulate_grad_hook(lambda one, name=name: found.append((name, -1.0)))
    for step in range(3):
        outputs = model(torch.arange(16.0).reshape(4, 4).cos())
        model.zero_grad()
        outputs[step % 2].square().mean().backward()
        found.append(("step", 0.0))
    return sorted(found)


def compared() -> None:
    torch.manual_seed(0)
    plain = Heads()
    torch.manual_seed(0)
    model = autopart.parallelize(Heads(), cluster=ideal(2), verbose=False, pp=1, dp=2, tp=1, microbatches=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # no loss reaches a parameter beside the model
        found = called(model)
    expected = called(plain)
    assert [name for name, _ in found] == [name for name, _ in expected]
    assert [norm for _, norm in found] == pytest.approx([norm for _, norm in expected])


def test_hooks_are_called_where_a_gradient_arrives() -> None:
    launch(compared, 2)
