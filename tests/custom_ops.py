"""A user's op with a rule of its own, and a model that calls it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, library, nn

from autopart.passes.rules import RULES, RuleBook


@library.custom_op("autopart_tests::gate", mutates_args=())
def gate(x: Tensor, y: Tensor) -> Tensor:
    """``x * sigmoid(y)``."""
    return x * y.sigmoid()


@gate.register_fake
def _(x: Tensor, y: Tensor) -> Tensor:
    return torch.empty_like(x)


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
    x, y = ctx.saved_tensors
    s = y.sigmoid()
    return gradient * s, gradient * x * s * (1 - s)


gate.register_autograd(_backward, setup_context=_keep)


def rules() -> RuleBook:
    return RULES.extended({"autopart_tests.gate.default": "*d, *d -> *d"})


class Gated(nn.Module):
    """A gated feed-forward with a loss inside; wide, so that sharding its middle pays."""

    def __init__(self, width: int = 64, hidden: int = 256) -> None:
        super().__init__()
        self.value, self.control = nn.Linear(width, hidden), nn.Linear(width, hidden)
        self.out = nn.Linear(hidden, 8)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        hidden: Tensor = torch.ops.autopart_tests.gate(self.value(x), self.control(x))
        return {"loss": nn.functional.mse_loss(self.out(hidden), y)}
