"""What has a gradient in one process, and none that a call computes, is refused in the script's backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopart
from autopart.runtime.errors import InputError
from clusters import ideal
from launch import launch

WIDTH = 8


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        hidden = torch.tanh(self.first(x))
        out = self.last(hidden)
        return {"loss": (out - y).square().mean(), "size": hidden.square().mean(), "out": out, "kept": out.detach()}


def batch(step: int, rows: int = 8) -> list[Tensor]:
    generator = torch.Generator().manual_seed(step)
    return list(torch.randn(2, rows, WIDTH, generator=generator, dtype=torch.float64).unbind())


def parallel(limits: dict[str, int], **options: Any) -> nn.Module:
    torch.manual_seed(0)
    settings: dict[str, Any] = {"pp": 1, "dp": 1, "tp": 1, "microbatches": 2, **limits}
    return autopart.parallelize(Net().double(), cluster=ideal(2), verbose=False, **settings, **options)


def other_outputs(limits: dict[str, int]) -> None:
    model = parallel(limits, outputs="all")
    given = model(*batch(0))
    with pytest.raises(InputError, match=r"'size' has no gradient here: .* goes back from 'loss' alone.* detach\(\)"):
        (given["loss"] + given["size"]).backward()
    model.zero_grad()
    given = model(*batch(0))
    given["out"][:, 0] = 0  # may be written into
    assert given["out"].requires_grad and not given["kept"].requires_grad
    (given["loss"] + given["size"].detach()).backward()
    assert all((parameter.grad is not None) == (parameter.numel() > 0) for parameter in model.parameters())


@pytest.mark.parametrize("limits", [{"pp": 2}, {"dp": 2}])
def test_of_other_outputs(limits: dict[str, int]) -> None:
    launch(other_outputs, 2, limits)


def evaluated() -> None:
    model = parallel({"pp": 2})
    model.eval()
    given = model(*batch(0))
    assert not given["kept"].requires_grad
    with pytest.raises(InputError, match=r"'loss' has no gradient here: in evaluation mode.*call model.train\(\)"):
        given["loss"].backward()
    with torch.no_grad():
        assert not model(*batch(0))["loss"].requires_grad
    model.requires_grad_(False)
    assert not model(*batch(0))["loss"].requires_grad


def test_in_evaluation() -> None:
    launch(evaluated, 2)


def looked_first(limits: dict[str, int]) -> None:
    """The first call, and those of new sizes, are made under inference mode, with inputs made there."""
    results = []
    for model in (Net().double(), parallel(limits)):
        torch.manual_seed(0)
        for parameter in model.parameters():
            nn.init.normal_(parameter)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        losses = []
        for step in range(4):
            rows = 8 if step < 2 else 4
            model.eval()
            with torch.inference_mode():
                losses.append(model(*batch(10 + step, rows))["loss"].item())
            model.train()
            loss = model(*batch(step, rows))["loss"]
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        results.append(losses)
    assert results[1] == pytest.approx(results[0], rel=1e-9)


@pytest.mark.parametrize("limits", [{"pp": 2}, {"dp": 2, "zero": 1}])
def test_a_look_under_inference_mode_may_come_first(limits: dict[str, int]) -> None:
    launch(looked_first, 2, limits)


class TwoLosses(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = self.layer(x)
        return {"first": y.square().mean(), "second": y.abs().mean(), "scores": y, "seen": y.detach().mean()}


def test_losses_that_are_left_out_are_told_once() -> None:
    model = autopart.parallelize(TwoLosses(), verbose=False)
    with pytest.warns(UserWarning, match=r"goes back from 'first' .*'second' is None here.*outputs=\"all\"") as told:
        for _ in range(2):
            assert model(torch.randn(4, 4))["second"] is None
    assert len([item for item in told if "'first'" in str(item.message)]) == 1
