"""Gradients that are known before the script's backward are given away by it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopart
from autopart.runtime.attach import hand_out
from autopart.runtime.errors import InputError
from clusters import ideal
from launch import launch
from two_layers import batch


@pytest.mark.parametrize("factor", [1.0, 0.25, 1 / 3, 2.0**17])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_the_losss_gradient_scales_them(factor: float, dtype: torch.dtype) -> None:
    """Narrow types by a factor in float32, which they could not hold, and without dims as with."""
    known = [torch.arange(3).to(dtype), torch.tensor(0.3, dtype=dtype), None]
    parameters = [nn.Parameter(torch.zeros(3, dtype=dtype)), nn.Parameter(torch.zeros((), dtype=dtype))]
    parameters.append(nn.Parameter(torch.zeros(3, dtype=dtype)))
    wide = [None if gradient is None else gradient.double() * torch.tensor(factor).double() for gradient in known]
    expected = [None if gradient is None else gradient.to(dtype) for gradient in wide]
    (hand_out(torch.tensor(2.0), known, parameters) * factor).backward()
    torch.testing.assert_close([p.grad for p in parameters[:2]], expected[:2], rtol=1e-6, atol=0)
    assert parameters[2].grad is None


def test_a_plain_backward_computes_nothing() -> None:
    parameter, known = nn.Parameter(torch.zeros(3)), torch.ones(3)
    hand_out(torch.tensor(2.0), [known], [parameter]).backward()
    assert parameter.grad is not None and known._version == 0


def test_they_are_given_once() -> None:
    parameter = nn.Parameter(torch.zeros(3))
    loss = hand_out(torch.tensor(2.0), [torch.ones(3)], [parameter])
    loss.backward(retain_graph=True)
    with pytest.raises(InputError, match=r"handed out already.*add losses up"):
        loss.backward()


class Shared(nn.Module):
    """Has a module that another model has too."""

    def __init__(self, encoder: nn.Module, width: int) -> None:
        super().__init__()
        self.encoder, self.head = encoder, nn.Linear(4, width).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.encoder(x))).square().mean()


def in_turn(parallel: bool) -> list[float]:
    torch.manual_seed(0)
    encoder = nn.Linear(8, 4).double()
    models: list[Any] = [Shared(encoder, 2), Shared(encoder, 3)]
    optimizer = torch.optim.SGD([*models[0].parameters(), *models[1].head.parameters()], lr=0.1)
    if parallel:
        models = [autopart.parallelize(model, cluster=ideal(2), verbose=False, dp=2) for model in models]
    losses = []
    for _ in range(2):
        for model in models:
            loss = model(batch()["x"])
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def test_gradients_that_are_there_when_a_second_model_is_planned_stay() -> None:
    expected = in_turn(False)
    for losses in launch(in_turn, 2, True):
        assert losses == pytest.approx(expected, rel=1e-12)


class Parts(nn.Module):
    """Returns rows, a view of them, a sum over the samples, and a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8).double(), nn.Linear(8, 3).double()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        y = self.second(torch.tanh(self.first(x)))
        return y * 2.0, y.unsqueeze(1)[:, 0], y.sum(), self.second.bias * 2.0


def written_into(limits: dict[str, Any]) -> list[Tensor]:
    torch.manual_seed(0)
    model: Any = Parts()
    if limits:
        model = autopart.parallelize(model, cluster=ideal(2), verbose=False, **limits)
    found = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        outputs = model(batch()["x"])
        loss = sum(output.sub_(0.5).div_(2.0).square().sum() for output in outputs)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found += [loss.detach(), *(output.detach() for output in outputs)]
    return [*found, *(value.clone() for value in model.state_dict().values())]


@pytest.mark.filterwarnings("ignore:the loss is computed outside")
@pytest.mark.parametrize("limits", [{"pp": 2, "microbatches": 1}, {"pp": 2, "microbatches": 2}, {"tp": 2}, {"dp": 2}])
def test_outputs_may_be_written_into(limits: dict[str, int]) -> None:
    expected = written_into({})
    for found in launch(written_into, 2, limits):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


class Features(nn.Module):
    """Returns features, and where they are positive, which has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8).double(), nn.Linear(8, 8).double()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.second(torch.tanh(self.first(x)))
        return y, (y > 0).to(y.dtype)


def perceptual(limits: dict[str, Any]) -> list[Tensor]:
    """A frozen network's features of one batch are kept, and compared with those of what another network makes."""
    torch.manual_seed(0)
    frozen: Any = Features().requires_grad_(False)
    trained: Any = Features()
    if limits:
        settings: dict[str, Any] = {"cluster": ideal(2), "verbose": False, **limits}
        frozen, trained = autopart.parallelize(frozen, **settings), autopart.parallelize(trained, **settings)
    x = batch()["x"]
    wanted = frozen(x)
    for _ in range(2):
        made, positive = trained(x)
        assert made.requires_grad and not positive.requires_grad
        kept = frozen(x)
        assert not any(output.requires_grad for output in (*wanted, *kept))
        (frozen(made)[0] - wanted[0] + 0.1 * kept[0]).square().mean().backward()
        with torch.no_grad():
            for parameter in trained.parameters():
                if parameter.grad is not None:
                    parameter -= 0.1 * parameter.grad
                    parameter.grad = None
    for parameter in trained.parameters():
        parameter.requires_grad = False
    outputs = trained(x)
    assert not any(output.requires_grad for output in outputs)
    return [output.detach() for output in outputs]


@pytest.mark.filterwarnings("ignore:the loss is computed outside")
@pytest.mark.parametrize("limits", [{"pp": 2, "microbatches": 2}, {"tp": 2}, {"dp": 2, "zero": 3}], ids=str)
def test_what_has_no_gradient_in_the_original_has_none(limits: dict[str, Any]) -> None:
    expected = perceptual({})
    for found in launch(perceptual, 2, limits):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
