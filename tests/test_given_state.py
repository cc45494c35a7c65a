"""What a script writes into the state of a parallel program, which gives copies, reaches the model, or is told of."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

import autopart
from clusters import ideal
from launch import launch

WIDTH = 4


class Net(nn.Module):
    """All layers alike: parameters of one could be taken for another's."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


def batch(step: int) -> Tensor:
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def by_state(average: Any, model: Any) -> None:
    for mean, value in zip(average.state_dict().values(), model.state_dict().values(), strict=True):
        mean.lerp_(value, 0.25)


def by_name(average: Any, model: Any) -> None:
    mean, now = average.state_dict(), model.state_dict()
    for name, value in now.items():
        mean[name] *= 0.75
        mean[name] += 0.25 * value


def by_parameters(average: Any, model: Any) -> None:
    for mean, value in zip(average.parameters(), model.parameters(), strict=True):
        mean.lerp_(value, 0.25)


def averaged(average: Any, model: Any) -> None:
    average.update_parameters(model)


Update = Callable[[Any, Any], None]


def trained(wrap: Callable[[nn.Module], nn.Module], update: Update) -> tuple[list[float], dict[str, Tensor]]:
    torch.manual_seed(0)
    model = wrap(Net().double())
    average: Any = AveragedModel(model) if update is averaged else copy.deepcopy(model)
    average.eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for step in range(4):
        loss = model(batch(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            update(average, model)
            losses += [loss.item(), average(batch(9)).item() if step != 1 else 0.0]
    return losses, {name: value.clone() for name, value in average.state_dict().items() if "layers" in name}


def both(limits: dict[str, int], updates: tuple[Update, ...]) -> None:
    settings: dict[str, Any] = {"pp": 1, "dp": 1, "tp": 1, "microbatches": 1, **limits}
    for update in updates:
        expected = trained(lambda model: model, update)
        found = trained(lambda model: autopart.parallelize(model, cluster=ideal(2), verbose=False, **settings), update)
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("limits", [{"pp": 2}, {"dp": 2, "zero": 1}])
def test_averages_of_weights_are_those_of_one_process(limits: dict[str, int]) -> None:
    launch(both, 2, limits, (by_state, by_name, by_parameters, averaged))


def unlike() -> None:
    """Copies that were changed are planned by themselves."""
    model: Any = autopart.parallelize(Net(), verbose=False, pp=2, dp=1, tp=1, microbatches=1)
    same, changed, replaced, frozen = (copy.deepcopy(model) for _ in range(4))
    changed.original.layers[1].factor = 2
    replaced.original.layers[1] = nn.Identity()
    frozen.requires_grad_(False)
    trains = copy.deepcopy(frozen)
    model(batch(0).float())
    assert same.parallel is not None and frozen.parallel is not None
    assert changed.parallel is None and replaced.parallel is None
    other: Any = autopart.parallelize(Net().requires_grad_(False), verbose=False, pp=2, dp=1, tp=1, microbatches=1)
    trains = copy.deepcopy(other).requires_grad_(True)
    other(batch(0).float())
    assert trains.parallel is None


def test_copies_that_are_not_alike_are_planned_by_themselves() -> None:
    launch(unlike, 2)


def exchanged(wrap: Callable[[nn.Module], nn.Module]) -> tuple[list[float], dict[str, Tensor]]:
    """Puts averages in the place of the parameters' memory for an evaluation, and then that back."""
    torch.manual_seed(0)
    model, losses = wrap(Net().double()), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    averages: list[Tensor] = []
    for step in range(4):
        losses.append(model(batch(step)))
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
        if not averages:
            averages = [parameter.detach().clone() for parameter in model.parameters()]
        for parameter, average in zip(model.parameters(), averages, strict=True):
            average.lerp_(parameter.detach(), 0.25)
        kept = [parameter.data for parameter in model.parameters()]
        for parameter, average in zip(model.parameters(), averages, strict=True):
            parameter.data = average
        with torch.no_grad():
            losses.append(model.eval()(batch(step)))
        for parameter, own in zip(model.train().parameters(), kept, strict=True):
            parameter.data = own
    return [loss.item() for loss in losses], dict(model.state_dict())


def exchanged_under(limits: dict[str, Any]) -> None:
    def parallel(model: nn.Module) -> nn.Module:
        return autopart.parallelize(model, cluster=ideal(2), verbose=False, **limits)

    expected, state = exchanged(lambda model: model)
    losses, found = exchanged(parallel)
    assert losses == pytest.approx(expected, rel=1e-12)
    for name, value in state.items():
        torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("limits", [{"zero": 1}, {"zero": 2}, {"zero": 3}, {"pp": 2}], ids=str)
def test_averages_put_in_the_place_of_memory(limits: dict[str, Any]) -> None:
    launch(exchanged_under, 2, limits if "pp" in limits else {"dp": 2, **limits})


def planned() -> Any:
    model = autopart.parallelize(Net().double(), verbose=False)
    model(batch(0)).backward()
    return model


def test_what_is_written_after_further_training_is_told() -> None:
    model = planned()
    state = model.state_dict()
    model(batch(1))
    state["layers.0.bias"].fill_(7)
    with pytest.warns(UserWarning, match=r"written into 'layers.0.bias' of state_dict\(\) is lost.*trained meanwhile"):
        model.state_dict()
    assert not (model.state_dict()["layers.0.bias"] == 7).any()


def cloned(model: Any) -> None:
    {name: value.clone() for name, value in model.state_dict().items()}["layers.0.bias"].fill_(7)


def copied(model: Any) -> None:
    copy.deepcopy(model.state_dict())["layers.0.bias"].fill_(7)


def replaced(model: Any) -> None:
    state = model.state_dict()
    state["layers.0.bias"] = torch.full_like(state["layers.0.bias"], 7)


def trains_another(model: Any) -> None:
    net = Net().double()
    net.load_state_dict(model.state_dict())
    with torch.no_grad():
        net.get_parameter("layers.0.bias").fill_(7)


@pytest.mark.parametrize("use", [cloned, copied, replaced, trains_another])
def test_copies_of_a_state_are_the_scripts_own(use: Callable[[Any], None]) -> None:
    model = planned()
    before = copy.deepcopy(model.state_dict())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        use(model)
        torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
