"""Models that ask whether gradients are on: run without where that changes nothing, else refused there."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import autopart
from autopart.runtime.errors import InputError
from clusters import ideal
from launch import launch


class Asking(nn.Module):
    def __init__(self, body: Callable[[Asking, Tensor], Tensor]) -> None:
        super().__init__()
        self.body, self.first, self.last = body, nn.Linear(4, 4), nn.Linear(4, 4)
        self.layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.body(self, x))


def apart(model: Asking, x: Tensor) -> Tensor:
    return model.first(x) if torch.is_grad_enabled() else 2 * model.first(x)


def apart_in_evaluation(model: Asking, x: Tensor) -> Tensor:
    return model.first(x) if model.training or torch.is_grad_enabled() else 2 * model.first(x)


def alike(model: Asking, x: Tensor) -> Tensor:
    if model.training and torch.is_grad_enabled():
        return checkpoint(model.first, x, use_reentrant=False)
    return model.first(x)


def stopped(model: Asking, x: Tensor) -> Tensor:
    with torch.no_grad():
        scale = model.first(x).abs().amax(-1, keepdim=True)
    return model.first(x) / (scale + float(torch.is_grad_enabled() or 1.0))


def fused_by_torch(model: Asking, x: Tensor) -> Tensor:
    return alike(model, model.layer(x[:, None])[:, 0])


@pytest.mark.parametrize(
    ("body", "flaw"),
    [(apart, True), (apart_in_evaluation, True), (alike, False), (stopped, False), (fused_by_torch, False)],
)
def test_what_is_computed_otherwise_without_gradients_is_told(body: Callable[..., Tensor], flaw: bool) -> None:
    model = Asking(body)
    found = autopart.capture(model, (torch.randn(8, 4),)).evaluation
    assert not found.flaw and model.training
    if flaw:
        assert "computed by other ops" in found.no_grad_flaw and "test_grad_mode.py:" in found.no_grad_flaw
    else:
        assert not found.no_grad_flaw


def test_that_torch_itself_asks_takes_no_further_capture() -> None:
    modes: list[bool] = []

    class Layer(nn.TransformerEncoderLayer):
        def forward(self, src: Tensor) -> Tensor:  # type: ignore[override]
            modes.append(self.training)
            return super().forward(src)

    found = autopart.capture(Layer(8, 2, 16, batch_first=True), (torch.randn(2, 3, 8),)).evaluation
    assert not found.no_grad_flaw and modes == [True, False]


def refused(training: bool) -> tuple[str, bool]:
    torch.manual_seed(0)
    plain, x = Asking(apart).double(), torch.randn(4, 4, dtype=torch.float64)
    expected = plain(x)
    model = autopart.parallelize(plain, cluster=ideal(2), verbose=False, pp=2, outputs="all").train(training)
    with torch.no_grad():
        try:
            model(x)
        except InputError as error:
            return str(error), torch.allclose(_with_gradients(model, x), expected, atol=0, rtol=1e-12)
    return "", False


def _with_gradients(model: nn.Module, x: Tensor) -> Tensor:
    with torch.enable_grad():
        found: Tensor = model(x)
    return found.detach()


@pytest.mark.parametrize("training", [True, False])
def test_a_call_without_gradients_that_computes_otherwise_is_refused(training: bool) -> None:
    for text, same in launch(refused, 2, training):
        assert "cannot run under torch.no_grad()" in text and "call the model outside of these" in text
        assert same
