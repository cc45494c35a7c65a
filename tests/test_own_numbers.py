"""Numbers that a model keeps as plain attributes: none is silently that of the first call where that matters."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopart
from autopart.runtime.errors import CaptureError, PlanError
from autopart.tracing import capture
from launch import launch


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.step, self.new = 0, True
        self.layers = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.0)) for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        self.step += 1
        return torch.as_tensor(self.layers(x).square().mean() * self.factor())

    def factor(self) -> float:
        return 1.0


class Warming(Counting):
    def factor(self) -> float:
        return min(1.0, self.step / 4)


class FirstOther(Counting):
    def factor(self) -> float:
        was, self.new = self.new, False
        return 2.0 if was else 1.0


class Cached(Counting):
    """The number goes with a table, which is not made anew for it."""

    longest = 0

    def __init__(self) -> None:
        super().__init__()
        self.longest, self.table = 0, torch.zeros(0)

    def factor(self) -> float:
        if self.longest < 4:
            self.longest, self.table = 4, torch.ones(4)
        return 1.0


class CachedBuffer(Counting):
    def __init__(self) -> None:
        super().__init__()
        self.longest = 0
        self.register_buffer("table", torch.zeros(4), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.longest < 4:
            self.longest, self.table = 4, torch.ones(4)
        return super().forward(x * self.table)


class Annealed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, output: Tensor, targets: Tensor) -> Tensor:
        self.calls += 1
        return (output - targets).square().mean() * self.calls


def test_losses_too() -> None:
    given = (torch.randn(4, 4),), {"targets": torch.randn(4, 4)}
    with pytest.raises(CaptureError, match=r"loss_function\.calls \(0, then 1\)"):
        capture(nn.Linear(4, 4), *given, loss_fn=Annealed(), check_eval=False)


class Layered(nn.Module):
    def __init__(self, layer: type[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList([layer() for _ in range(6)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


def captured(model: nn.Module) -> tuple[str, ...]:
    return capture(model, (torch.randn(4, 4),), check_eval=False).notes


@pytest.mark.parametrize("model", [Counting(), Layered(Counting)])
def test_a_count_that_nothing_is_computed_by_is_noted(model: nn.Module) -> None:
    (note,) = captured(model)
    assert "step (0, then 1)" in note and "; the program goes on as in the first call" in note
    assert getattr(model, "step", 0) == 0


@pytest.mark.parametrize("model", [Warming(), FirstOther(), Layered(Warming)])
def test_what_the_next_call_computes_otherwise_is_refused(model: nn.Module) -> None:
    with pytest.raises(CaptureError, match=r"forward changes .*(0, then 1).*next call computes 'output' otherwise"):
        captured(model)
    assert getattr(model, "step", 0) == 0 and getattr(model, "new", True)


def test_after_one_call_it_is_as_ever() -> None:
    model = FirstOther()
    model(torch.randn(4, 4))
    (note,) = captured(model)
    assert "step (1, then 2)" in note and "new" not in note


def test_what_goes_with_other_tensors_is_left_out() -> None:
    assert captured(Cached()) == ()
    assert captured(CachedBuffer()) == ()


def replaced() -> tuple[bool, str]:
    net: Any = Counting()
    model: Any = autopart.parallelize(net, verbose=False)
    model.layers = nn.Sequential(nn.Linear(4, 2))
    model(torch.randn(4, 4))
    try:
        model.layers = nn.Sequential(nn.Linear(4, 4))
    except PlanError as error:
        return len(net.layers) == 1 and [*model.state_dict()] == ["layers.0.weight", "layers.0.bias"], str(error)
    return False, ""


def test_modules_are_set_on_the_original_until_it_is_planned() -> None:
    ((there, message),) = launch(replaced, 1)
    assert there and message.startswith("'layers' is a part of the model")


def told(name: str) -> list[str]:
    net: Any = Counting()
    model: Any = autopart.parallelize(net, verbose=False)
    model.step = 5
    assert net.step == 5
    model(torch.randn(4, 4))
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        model(torch.randn(4, 4))
        if name == "rate":
            net.layers[2][1].p = 0.5
        elif name == "mode":
            net.layers[2].eval()
        elif name == "step":
            model.step = 7
        else:
            model.eval().train()
            net.other = 3
        model(torch.randn(4, 4))
        model(torch.randn(4, 4))
    return [str(item.message) for item in found if "captured" in str(item.message)]


@pytest.mark.parametrize(
    ("name", "starts"),
    [
        ("rate", ["layers.2.1.p was 0.0 when the model was captured, and is 0.5 now; its program goes on with 0.0"]),
        ("mode", [f"layers.2{part}.training was True when" for part in ("", ".0", ".1")]),
        ("step", ["step was 5 when the model was captured, and is 7 now"]),
        ("nothing", []),
    ],
)
def test_what_is_set_after_the_first_call_is_warned_of_once(name: str, starts: list[str]) -> None:
    (messages,) = launch(told, 1, name)
    assert len(messages) == len(starts)
    assert all(message.startswith(start) for message, start in zip(messages, starts, strict=True)), messages
