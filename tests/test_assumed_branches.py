"""Branches by the values of inputs: assumed as the example inputs take them, and checked before every step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopart
from autopart.runtime.errors import CaptureError, InputError
from autopart.runtime.inputs import BatchMode
from launch import launch


class Padded(nn.Module):
    """Checks its inputs, and masks only where something is padded, as many encoders do."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        assert torch.all(x > -9).item(), "out of range"
        if not padding.any():
            return self.second(torch.tanh(self.first(x))).square().mean()
        x = torch.tanh(self.first(x)).masked_fill(padding[..., None], 0.0)
        if (x.detach().abs().sum() if self.looks_inside else padding.sum()) > 1e9:
            x = x / 2
        return self.second(x).square().mean()

    looks_inside = False


def build() -> Padded:
    torch.manual_seed(0)
    return Padded().double()


def batch(padded: int, samples: int = 4) -> dict[str, Tensor]:
    """The first ``padded`` samples end in padding."""
    x = torch.arange(samples * 12.0, dtype=torch.float64).reshape(samples, 3, 4).sin()
    padding = torch.zeros(samples, 3, dtype=torch.bool)
    padding[:padded, 2] = True
    return {"x": x, "padding": padding}


def test_the_program_tells_what_it_assumes() -> None:
    program = autopart.capture(build(), (), batch(1))
    assert [item.value for item in program.assumptions] == [True, True, False]
    assert "test_assumed_branches.py" in program.assumptions[1].text and "padding.any()" in program.assumptions[1].text
    plan = autopart.make_plan(program, autopart.Cluster.local(1))
    assert any("padding.any()" in note and "checked before every step" in note for note in plan.notes)
    other = autopart.capture(build(), (), batch(0))
    assert [item.value for item in other.assumptions] == [True, False]
    assert other.fingerprint != program.fingerprint


class Reading(nn.Module):
    """Compares with a number that it makes a tensor of; counts where there is something, which cannot be traced."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        bound = x.new_zeros(x.shape) + torch.tensor(3.0)
        assert torch.all(x < bound).item(), "out of range"
        if padding.any().item():
            x = x[: len(padding.nonzero())]
        return self.linear(x).square().mean()


def test_constants_are_read_and_branches_that_cannot_be_traced_are_left_out() -> None:
    program = autopart.capture(Reading().double(), (), batch(0))
    assert [item.value for item in program.assumptions] == [True, False]
    assert program.conditions is not None
    with pytest.raises(CaptureError, match="nonzero"):
        autopart.capture(Reading().double(), (), batch(1))


def train(model: nn.Module, parts: slice = slice(None)) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for padded in (1, 4, 2):
        loss = model(**{name: tensor[parts] for name, tensor in batch(padded).items()})
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def checked() -> list[tuple[list[float], str]]:
    """Losses, and what each rank reads where no sample is padded any more; only one replica's samples ever are."""
    found = []
    modes: tuple[BatchMode, ...] = ("global", "local")
    for mode in modes:
        rank = torch.distributed.get_rank()
        parts = slice(2 * rank, 2 * rank + 2) if mode == "local" else slice(None)
        limits: dict[str, Any] = {"dp": 2} if mode == "local" else {"pp": 2, "microbatches": 2}
        model = autopart.parallelize(build(), verbose=False, batch=mode, **limits)
        losses = train(model, parts)
        with pytest.raises(InputError) as caught:
            model(**{name: tensor[parts] for name, tensor in batch(0).items()})
        model(**{name: tensor[parts] for name, tensor in batch(1).items()})
        found.append((losses, str(caught.value)))
    return found


def test_a_batch_that_would_branch_otherwise_is_refused_on_all_ranks() -> None:
    expected = train(build())
    for found in launch(checked, 2):
        for losses, message in found:
            assert losses == pytest.approx(expected, rel=1e-9)
            assert "condition is True, and for this batch it is False" in message and "padding.any()" in message


def test_nothing_is_assumed_of_what_is_trained() -> None:
    model = build()
    model.looks_inside = True
    with pytest.raises(CaptureError, match=r"depends on the parameter first\.(weight|bias).*\n?.*torch\.where"):
        autopart.capture(model, (), batch(1))


def test_inputs_without_values_are_asked_for() -> None:
    model = build().to("meta")
    inputs = {name: tensor.to("meta") for name, tensor in batch(1).items()}
    with pytest.raises(CaptureError, match=r"branches on values of its input 'x'.*capture it with real inputs"):
        autopart.capture(model, (), inputs)
