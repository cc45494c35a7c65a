"""What a script writes into the state of a parallel program, which gives copies, is told of where it is lost."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import autopart


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.first(x))).square().mean()


def planned() -> Any:
    model = autopart.parallelize(Net(), verbose=False)
    model(torch.ones(2, 4)).backward()
    return model


def test_an_average_kept_in_the_state_is_told_once() -> None:
    average, model = planned(), planned()
    with pytest.warns(
        UserWarning, match=r"written into 'first.weight' of state_dict\(\) is lost.*load_state_dict"
    ) as told:
        for _ in range(2):
            for mean, value in zip(average.state_dict().values(), model.state_dict().values(), strict=True):
                mean.lerp_(value, 0.1)
            del mean, value
    assert len(told) == 1


def cloned(model: Any) -> None:
    {name: value.clone() for name, value in model.state_dict().items()}["first.bias"].zero_()


def copied(model: Any) -> None:
    copy.deepcopy(model.state_dict())["first.bias"].zero_()


def loaded(model: Any) -> None:
    state = model.state_dict()
    state["first.bias"] = state["first.bias"] * 2
    model.load_state_dict(state)


def kept(model: Any) -> None:
    """An average that goes on from step to step."""
    state = model.state_dict()
    for _ in range(2):
        state["first.bias"].zero_()
        model(torch.ones(2, 4))


@pytest.mark.parametrize("use", [cloned, copied, loaded, kept])
def test_other_uses_are_not(use: Callable[[Any], None]) -> None:
    model = planned()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        use(model)
