"""A torch.autograd.Function's own backward is lost in capture, and that is said."""

from __future__ import annotations

from typing import Any

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
    (note,) = [note for note in capture(Rounded(), (torch.randn(4, 4),)).notes if "backward of its own" in note]
    assert note.startswith("Round has")
    assert torch.autograd.Function.__dict__["apply"] is before
    assert not any("backward of its own" in note for note in capture(nn.Linear(4, 4), (torch.randn(4, 4),)).notes)
