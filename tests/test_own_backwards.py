"""What capture loses is said: a torch.autograd.Function's own backward, draws of NumPy's and Python's generators."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from autopart.tracing import capture


class Round(torch.autograd.Function):
    """A straight-through estimator."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


class Rounded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.as_tensor(self.last(Round.apply(self.first(x))).mean())


def test_it_is_said_once() -> None:
    before = torch.autograd.Function.__dict__["apply"]
    (note,) = [
        note
        for note in capture(Rounded(), (torch.randn(4, 4),), check_eval=False).notes
        if "backward of its own" in note
    ]
    assert note.startswith("Round has")
    assert torch.autograd.Function.__dict__["apply"] is before
    assert not any(
        "backward of its own" in note for note in capture(nn.Linear(4, 4), (torch.randn(4, 4),), check_eval=False).notes
    )


class DropsLayers(nn.Module):
    """One layer, skipped at random by a generator that is not torch's."""

    def __init__(self, generator: str) -> None:
        super().__init__()
        self.layer, self.generator = nn.Linear(4, 1), generator

    def forward(self, x: Tensor) -> Tensor:
        draws: dict[str, Callable[[], float]] = {"numpy": np.random.random, "python": random.random}
        drawn = draws[self.generator]() if self.generator in draws else 1.0
        return torch.as_tensor(self.layer(x).mean() * (1.0 if drawn > 1e-9 else 0.0))


@pytest.mark.parametrize(
    ("generator", "name"), [("numpy", "numpy.random"), ("python", "Python's random"), ("none", "")]
)
def test_draws_of_other_generators_are_said(generator: str, name: str) -> None:
    notes = [
        note
        for note in capture(DropsLayers(generator), (torch.randn(4, 4),), check_eval=False).notes
        if "draws from" in note
    ]
    assert len(notes) == bool(name) and all(f"draws from {name} while" in note for note in notes)
