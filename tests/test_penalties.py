"""A penalty on weights that a script adds to the loss is of a rank's own part of the model, which is told of."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopart
from clusters import ideal
from launch import launch


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)).double()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers(x).square().mean()
        return y


def told(limits: dict[str, Any], way: str) -> list[str]:
    """What a few steps warn of."""
    torch.manual_seed(0)
    model = autopart.parallelize(Net(), cluster=ideal(2), verbose=False, **limits)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if way == "hooks":
        for parameter in model.parameters():
            parameter.register_hook(lambda gradient: gradient * 2.0)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(3):
            x = torch.randn(8, 8, dtype=torch.float64)
            loss = model(x)
            if way == "penalty":
                loss = loss + 0.01 * sum(p.square().sum() for p in model.parameters())
            elif way == "alone":
                torch.stack([p.norm() for p in model.parameters()]).sum().backward()
            elif way == "two calls":
                loss = 0.5 * loss + 2.0 * model(x + 1.0)
            elif way == "accumulated":
                loss.backward()
                loss = model(x + 1.0)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return [f"{item.filename}: {item.message}" for item in found if "beside the model" in str(item.message)]


@pytest.mark.parametrize("limits", [{"pp": 2, "microbatches": 2}, {"dp": 2, "zero": 3}], ids=str)
@pytest.mark.parametrize("way", ["penalty", "alone"])
def test_a_penalty_is_told_of_once(limits: dict[str, Any], way: str) -> None:
    for found in launch(told, 2, limits, way):
        (text,) = found
        assert text.startswith(__file__) and "a loss reaches the parameter 'layers." in text and "weight_decay" in text


@pytest.mark.parametrize("limits", [{"pp": 2, "microbatches": 2}, {"dp": 2, "zero": 1}, {"tp": 2}], ids=str)
@pytest.mark.parametrize("way", ["plain", "two calls", "hooks", "accumulated"])
def test_other_steps_are_not(limits: dict[str, Any], way: str) -> None:
    assert launch(told, 2, limits, way) == [[], []]


def test_replicas_of_the_whole_model_have_the_whole_penalty() -> None:
    assert launch(told, 2, {"dp": 2, "zero": 0}, "penalty") == [[], []]
