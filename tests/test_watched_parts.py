"""What a script changes of a model that is planned: buffers take effect, the rest is told of once."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

import autopart
from autopart.runtime.errors import PlanError
from autopart.watched_parts import SetBuffers, WatchedParts
from launch import launch

WIDTH = 8


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("heat", torch.ones(()))
        self.register_buffer("mask", torch.ones(WIDTH), persistent=False)
        self.table: Tensor = torch.ones(WIDTH)

    heat: Tensor
    mask: Tensor

    def body(self, x: Tensor) -> Tensor:
        return torch.tanh(self.norm(self.first(x)) * self.heat) * self.mask * self.table

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.body(x))


class Weighted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.ones(WIDTH))

    weight: Tensor

    def forward(self, out: Tensor, targets: Tensor) -> Tensor:
        return ((out - targets).square() * self.weight).mean()


def batch(step: int, rows: int = 8) -> list[Tensor]:
    generator = torch.Generator().manual_seed(step)
    return list(torch.randn(2, rows, WIDTH, generator=generator, dtype=torch.float64).unbind())


def trained(limits: dict[str, Any] | None) -> list[float]:
    """A script that sets buffers between steps, in place and anew."""
    torch.manual_seed(0)
    net, loss_fn = Net().double(), Weighted().double()
    net.table = net.table.double()
    model: Any = net
    if limits is not None:
        model = autopart.parallelize(net, loss_fn=loss_fn, verbose=False, tp=1, microbatches=2, **limits)
    net.norm.eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for step in range(4):
        x, y = batch(step)
        if step == 1:
            net.heat.fill_(0.5)
            loss_fn.weight[2:5] = 3
        if step == 2:
            net.mask = (torch.arange(WIDTH) % 2).double()
        loss = loss_fn(model(x), y) if limits is None else model(x, targets=y).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    net.heat.fill_(7.0)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    losses.append(state["heat"].item())
    net.heat.fill_(1.0)  # what is loaded after it counts
    model.load_state_dict(state)
    x, y = batch(4)
    losses.append((loss_fn(model(x), y) if limits is None else model(x, targets=y).loss).item())
    return losses


def both(limits: dict[str, Any]) -> None:
    assert trained(limits) == pytest.approx(trained(None), rel=1e-9)


@pytest.mark.parametrize("limits", [{"pp": 2, "dp": 1}, {"pp": 1, "dp": 2}])
def test_buffers_that_a_script_sets_take_effect(limits: dict[str, Any]) -> None:
    launch(both, 2, limits)


def written() -> None:
    net = Net()
    model: Any = autopart.parallelize(net, loss_fn=Weighted(), verbose=False, pp=1, dp=2, tp=1, microbatches=1)
    x, y = (item.float() for item in batch(0))
    model(x, targets=y)
    net.norm.reset_running_stats()
    with pytest.raises(PlanError, match=r"'norm.running_mean' was set .*forward writes it as well.*load_state_dict"):
        model(x, targets=y)


def test_buffers_that_forward_writes_are_refused() -> None:
    launch(written, 2)


def hooked(net: Net) -> None:
    net.first.register_forward_hook(lambda module, given, out: out * 2)


def on_gradients(net: Net) -> None:
    net.first.register_full_backward_hook(lambda module, given, out: None)


def other_module(net: Net) -> None:
    net.last = nn.Linear(WIDTH, WIDTH)


def other_parameter(net: Net) -> None:
    net.last.bias = nn.Parameter(torch.zeros(WIDTH))


def pruned(net: Net) -> None:
    prune.l1_unstructured(net.last, "weight", amount=0.5)


def normed(net: Net) -> None:
    parametrizations.weight_norm(net.last)


def patched(net: Net) -> None:
    net.body = torch.tanh  # type: ignore[method-assign, assignment]


def tensor_set(net: Net) -> None:
    net.table = torch.zeros(WIDTH)


def tensor_written(net: Net) -> None:
    net.table[0] = 0


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (hooked, "module first got a hook on forward once the model was planned.*calls none; do that before the first"),
        (on_gradients, "module first got a hook on gradients"),
        (other_module, "last was set once the model was planned.*load values by load_state_dict"),
        (other_parameter, "last.bias was set once"),
        (pruned, "module last got a hook before forward"),
        (normed, "module last became a ParametrizedLinear once"),
        (patched, "body was set once the model was planned"),
        (tensor_set, "the tensor table was set or written .*register_buffer"),
        (tensor_written, "the tensor table was set or written"),
    ],
)
def test_other_changes_are_told_once(change: Callable[[Net], None], told: str) -> None:
    net = Net()
    watched = WatchedParts({"": net})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        net(torch.ones(2, WIDTH)).sum().backward()
        watched.warn_of_changes()
    change(net)
    with pytest.warns(UserWarning, match=told):
        watched.warn_of_changes()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        watched.warn_of_changes()


def test_a_hook_that_is_taken_away_is_told() -> None:
    net = Net()
    handle = net.first.register_forward_hook(lambda module, given, out: out * 2)
    watched = WatchedParts({"": net})
    handle.remove()
    with pytest.warns(UserWarning, match="module first lost a hook on forward"):
        watched.warn_of_changes()


def test_buffers_are_taken_once() -> None:
    net = Net()
    buffers = SetBuffers({"": net})
    assert buffers.take() == []
    net.heat.mul_(2)
    assert [name for name, _ in buffers.take()] == ["heat"]
    net.heat = torch.zeros(())
    assert [(name, value.item()) for name, value in buffers.take()] == [("heat", 0.0)]
    assert buffers.take() == []


def test_what_the_class_has_is_set_on_the_original() -> None:
    net = Net()
    model: Any = autopart.parallelize(net, verbose=False)
    model.body = torch.tanh
    assert vars(net)["body"] is torch.tanh
