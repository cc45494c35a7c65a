"""Writes through a boolean mask that each place knows the value of, and other ops that normalization spells out."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopart.passes.batch import split_batch
from autopart.passes.rules import RULES
from autopart.runtime.errors import CaptureError
from autopart.tracing import capture
from programs import gradients, in_shares

BATCH = 4


class Masked(nn.Module):
    def __init__(self, function: Callable[[Any, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.token, self.function = nn.Linear(6, 6), nn.Parameter(torch.randn(6)), function

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.function(self, x, y).square().mean()


def mask_token(model: Masked, x: Tensor, y: Tensor) -> Tensor:
    x = model.linear(x)
    x[y[..., 0] > 0] = model.token
    return x


def from_another(model: Masked, x: Tensor, y: Tensor) -> Tensor:
    x = model.linear(x)
    x[y > 0] = (y * model.token)[y > 0]
    return x


def rows_from_another(model: Masked, x: Tensor, y: Tensor) -> Tensor:
    x, mask = model.linear(x), y[..., 1] > 0
    x[mask] = model.linear(y)[mask]
    return x


def tiled(model: Masked, x: Tensor, y: Tensor) -> Tensor:
    return torch.tile(model.linear(x), (2,)) * torch.tile(model.token, (x.shape[0], 1, 2))


def turned(model: Masked, x: Tensor, y: Tensor) -> Tensor:
    x = model.linear(x)
    turns = [torch.rot90(x, times, (1, 2)).flatten(1) for times in (0, 1, 2, 3, -1)]
    return torch.cat(turns, 1) * torch.cat([y.flatten(1)] * 5, 1)


@pytest.mark.parametrize(
    "function", [mask_token, from_another, rows_from_another, tiled, turned], ids=lambda function: function.__name__
)
def test_shares_equal_the_whole(function: Callable[[Any, Tensor, Tensor], Tensor]) -> None:
    model = Masked(function).double()
    reference = copy.deepcopy(model)
    inputs = dict(zip("xy", torch.randn(2, BATCH, 3, 6, dtype=torch.float64), strict=True))
    program = capture(model, (), inputs, check_eval=False)
    split = split_batch(program, RULES)
    assert not split.flaw
    found, ours = in_shares(program, split, model, inputs, BATCH, 2)
    expected = reference(**inputs)
    expected.backward()
    torch.testing.assert_close(found["output"], expected, rtol=1e-13, atol=0)
    torch.testing.assert_close(ours, gradients(reference), rtol=1e-12, atol=1e-14)


def test_elements_that_a_mask_picks_are_told_of() -> None:
    model = Masked(lambda m, x, y: m.linear(x)[y > 0])
    program = capture(model, tuple(torch.randn(2, BATCH, 3, 6)), check_eval=False)
    assert "aten.index.Tensor" in (flaw := split_batch(program, RULES).flaw)
    assert "makes as many elements as the values say" in flaw and "weigh by the mask" in flaw


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(6, 6, batch_first=True)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return torch.as_tensor(self.rnn(packed)[1].square().mean())


def test_what_depends_on_values_is_told_of() -> None:
    with pytest.raises(CaptureError, match=r"module rnn .*(\n.*)*give the padded sequence to the module"):
        capture(Packed(), (torch.randn(BATCH, 3, 6), torch.tensor([3, 1, 2, 3])), check_eval=False)
    norm = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6, momentum=None))
    with pytest.raises(CaptureError, match=r"module 1 .*(\n.*)*give it a momentum"):
        capture(norm, (torch.randn(BATCH, 6),), check_eval=False)
