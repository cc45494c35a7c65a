"""Emitted stages that compute with the number of samples otherwise than by arithmetic signs."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from autopart.runtime import ParallelModule
from programs import compile_model, gradients, tensors_of

DIVISORS: dict[str, Callable[[int], float]] = {
    "pow": lambda samples: samples**0.5,
    "abs": lambda samples: abs(samples - 9),
    "ceil": lambda samples: math.ceil(samples / 2),
}


class Scaled(nn.Module):
    """Of a mask, whose divisor is computed in ``totals.py``, and of outputs, whose divisor is in the stage."""

    def __init__(self, divisor: Callable[[int], float]) -> None:
        super().__init__()
        self.linear, self.divisor = nn.Linear(4, 3, dtype=torch.float64), divisor

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        squares, divisor = self.linear(x).square(), self.divisor(x.shape[0])
        return squares.sum() / divisor + (squares.sum(-1) * mask).sum() / (mask.sum() * divisor)


@pytest.mark.parametrize("name", DIVISORS)
def test_functions_of_the_number_of_samples(tmp_path: Path, name: str) -> None:
    model = Scaled(DIVISORS[name])
    given = {"x": torch.randn(8, 4).double(), "mask": torch.arange(8) % 3 < 2}
    compile_model(tmp_path, model, given, microbatches=2)
    expected = model(**given)
    expected.backward()
    slopes = gradients(model)
    parallel = ParallelModule(tmp_path, tensors_of(model))
    loss = parallel(**given)
    loss.backward()
    torch.testing.assert_close(loss.detach(), expected.detach())
    torch.testing.assert_close(gradients(parallel), slopes)
