"""A model and a frozen copy of it that were parallelized apart: averages over the parameters of both in turn."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

import autopart
from autopart.model_copies import Likeness
from autopart.runtime.errors import PlanError
from clusters import ideal
from launch import launch

Wrap = Callable[[nn.Module], nn.Module]


class Net(nn.Module):
    """Without targets most work is in the first layer, so that a plan for that cuts elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(5))

    def forward(self, x: Tensor, target: Tensor | None = None) -> Tensor:
        for _ in range(8 if target is None else 0):
            x = torch.tanh(self.layers[0](x))
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x if target is None else (x - target).square().mean()


def batch(step: int) -> tuple[Tensor, ...]:
    made = torch.Generator().manual_seed(step)
    return torch.randn(2, 8, 8, generator=made, dtype=torch.float64).unbind()


def by_zip(mean: Any, model: Any) -> None:
    for average, value in zip(mean.parameters(), model.parameters(), strict=True):
        average.mul_(0.75).add_(value, alpha=0.25)


def by_lists(mean: Any, model: Any) -> None:
    torch._foreach_lerp_(list(mean.parameters()), list(model.parameters()), 0.25)


def by_state(mean: Any, model: Any) -> None:
    mean.load_state_dict({name: value * 2 for name, value in model.state_dict().items()})


def trained(wrap: Wrap, update: Callable[[Any, Any], None], teacher_first: bool, target: bool = True) -> Any:
    torch.manual_seed(0)
    net = Net().double()
    mean = wrap(copy.deepcopy(net).requires_grad_(False).eval())
    model, losses = wrap(net), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(3):
        x, y = batch(step)
        if teacher_first:
            losses.append(mean(x, y).item())
        loss = model(x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            update(mean, model)
            losses += [loss.item(), mean(x, y if target else None).sum().item()]
    return losses, {name: value.clone() for name, value in mean.state_dict().items()}


def wrapped(limits: dict[str, int]) -> Wrap:
    settings: dict[str, Any] = {"pp": 1, "dp": 1, "tp": 1, "microbatches": 1, **limits}
    return lambda model: autopart.parallelize(model, cluster=ideal(2), verbose=False, **settings)


def compare(limits: dict[str, int]) -> None:
    for update, teacher_first in ((by_zip, False), (by_zip, True), (by_lists, False), (by_state, False)):
        expected = trained(lambda model: model, update, teacher_first)
        found = trained(wrapped(limits), update, teacher_first)
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("limits", [{"pp": 2}, {"tp": 2}, {"dp": 2, "zero": 1}, {"dp": 2, "zero": 3}], ids=str)
def test_a_frozen_copy_is_divided_like_the_model(limits: dict[str, int]) -> None:
    launch(compare, 2, limits)


def unlike() -> None:
    wrap = wrapped({"pp": 2})
    # Planned by itself, as it is called with other inputs: right, but of another division.
    expected = trained(lambda model: model, lambda mean, model: None, False, target=False)
    found = trained(wrap, lambda mean, model: None, False, target=False)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    told = "gone over in turn.*divide them otherwise: (other ranks|on this rank number 0 is ).*copy.deepcopy"
    with pytest.raises(PlanError, match=told):
        trained(wrap, by_zip, False, target=False)
    # Not frozen, and not planned yet.
    net = Net().double()
    model, mean = wrap(net), wrap(copy.deepcopy(net))
    model(*batch(0)).backward()
    before = copy.deepcopy(mean.state_dict())
    with pytest.raises(PlanError, match="gone over in turn"), torch.no_grad():
        by_zip(mean, model)
    torch.testing.assert_close(mean.state_dict(), before, rtol=0, atol=0)
    with pytest.raises(PlanError, match="gone over in turn"):
        for _ in map(torch.Tensor.copy_, mean.parameters(), model.parameters()):
            raise AssertionError
    walks = iter(mean.parameters()), iter(model.parameters())
    next(walks[0])
    next(walks[1])
    with pytest.raises(PlanError, match="gone over in turn"):
        next(walks[0])
    del walks
    for _ in model.parameters():  # not in turn
        assert len([*mean.parameters()]) == 10
        next(mean.parameters())
    mean(*batch(0)).backward()
    with torch.no_grad():
        by_zip(mean, model)
        average: Any = AveragedModel(wrap(copy.deepcopy(Net())))
    assert average.module.parallel is None


def test_models_that_are_divided_otherwise_are_told() -> None:
    launch(unlike, 2)


class _Settings:
    """Of no class that says when its objects are equal."""

    def __init__(self, scale: float) -> None:
        self.scale, self.parent = scale, self


class _Recurrent(nn.Module):
    """Keeps lists of its weights, as torch's recurrent modules do, its own methods and layers, and an old hook."""

    def __init__(self, scale: float = 0.5) -> None:
        super().__init__()
        self.settings = _Settings(scale)
        self.gru = nn.GRU(8, 8, batch_first=True)
        self.layers = nn.ModuleList([nn.Linear(8, 8), nn.utils.spectral_norm(nn.Linear(8, 8))])
        self.order = {"last": (self.layers[1], self._scaled)}

    def _scaled(self, x: Tensor) -> Tensor:
        return x * self.settings.scale

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        x = self.layers[0](self.gru(x[:, None])[0][:, 0])
        for function in self.order["last"]:
            x = function(x)
        return (x - target).square().mean()


def averaged(wrap: Wrap) -> Any:
    torch.manual_seed(0)
    model = wrap(_Recurrent().double())
    mean: Any = AveragedModel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(3):
        model(*batch(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
        mean.update_parameters(model)
    return {name: value.clone() for name, value in mean.module.state_dict().items()}


def compare_averaged(limits: dict[str, int]) -> None:
    expected = averaged(lambda model: model)
    torch.testing.assert_close(averaged(wrapped(limits)), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("limits", [{"pp": 2}, {"dp": 2, "zero": 3}], ids=str)
def test_a_copy_of_a_model_whose_attributes_lead_into_it(limits: dict[str, int]) -> None:
    launch(compare_averaged, 2, limits)


def test_forms_are_those_of_what_was_copied() -> None:
    model = _Recurrent()
    likeness = Likeness.of(model)
    assert likeness.covers(Likeness.of(copy.deepcopy(model)))
    assert not likeness.covers(Likeness.of(_Recurrent(scale=2.0)))
    other = copy.deepcopy(model)
    other.order["last"] = (other.layers[0], other._scaled)
    assert not likeness.covers(Likeness.of(other))
    other = copy.deepcopy(model)
    other.gru._flat_weights[0] = torch.zeros(24, 8)
    assert not likeness.covers(Likeness.of(other))
