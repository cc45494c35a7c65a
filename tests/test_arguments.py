"""Arguments of later calls go where the model's own forward would have them, whatever the first call left out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopart
from autopart.runtime.errors import InputError


class _Scaled(nn.Module):
    """Takes a mask and labels of one shape, between which no other check could tell."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4).double()

    def forward(self, x: Tensor, mask: Tensor | None = None, y: Tensor | None = None, scale: float = 1.0) -> Tensor:
        h = self.linear(x) * scale
        if mask is not None:
            h = h * mask
        return h.square().mean() if y is None else (h - y).square().mean()


def _inputs() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    x, y = torch.randn(2, 4, 4, dtype=torch.float64)
    return x, y


def test_positions_are_those_of_forward_where_the_first_call_left_arguments_out() -> None:
    plain, (x, y) = _Scaled(), _inputs()
    model = autopart.parallelize(plain, verbose=False)
    model(x, y=y)
    with pytest.raises(InputError, match=r"'mask'.*was not there.*Pass it from the first call on"):
        model(x, y)


@pytest.mark.parametrize("given_first", [False, True])
@pytest.mark.parametrize(
    ("args", "kwargs"), [((None,), {}), ((None,), {"scale": 1.0}), ((), {"mask": None}), ((), {"scale": 1.0})]
)
def test_defaults_may_be_passed_or_not(args: tuple[Any, ...], kwargs: dict[str, Any], given_first: bool) -> None:
    plain, (x, y) = _Scaled(), _inputs()
    expected = float(plain(x, y=y).detach())
    model = autopart.parallelize(plain, verbose=False)
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = [((), {}), (args, kwargs)]
    for more, named in reversed(calls) if given_first else calls:
        assert float(model(x, *more, y=y, **named).detach()) == expected


def test_other_values_than_the_default_are_refused() -> None:
    x, y = _inputs()
    model = autopart.parallelize(_Scaled(), verbose=False)
    model(x, y=y)
    with pytest.raises(InputError, match=r"'scale' \(2.0\) was not there"):
        model(x, y=y, scale=2.0)
    other = autopart.parallelize(_Scaled(), verbose=False)
    other(x, y=y, scale=2.0)
    with pytest.raises(InputError, match=r"'scale' was 2.0 when the model was captured and is now 1.0"):
        other(x, y=y)


class _Switched(nn.Module):
    """Computes what it is told to by a word."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, task: str) -> Tensor:
        y: Tensor = (self.first if task == "first" else self.second)(x).square().mean()
        return y


def test_a_word_that_chooses_among_results_says_what_to_return() -> None:
    model = autopart.parallelize(_Switched(), verbose=False)
    model(torch.randn(2, 4), "first")
    with pytest.raises(InputError, match=r"'task' was 'first' .* is now 'second'.*let forward return all of them"):
        model(torch.randn(2, 4), "second")
