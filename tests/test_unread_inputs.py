"""Inputs that forward never reads may be anything in every call; those that it may read have to stay."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopart
from autopart.example_inputs import unread_arguments
from autopart.runtime.errors import InputError


class _Named(nn.Module):
    """Takes names of its samples, and a folder that it looks at."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4).double()

    def forward(self, x: Tensor, names: Any = None, *, folder: str = "", note: Any = None) -> Tensor:
        if folder == "other":
            x = x * 2
        return self.linear(x).square().mean()


class _Seen(_Named):
    def forward(self, x: Tensor, names: Any = None, **rest: Any) -> Tensor:
        given = locals()
        return super().forward(x, given["names"], **rest)


class _Nested(nn.Module):
    def forward(self, x: Tensor, names: Any = None, other: Any = None) -> Tensor:
        def first() -> int:
            return len(names) if names else 1

        return x.square().mean() * first()


def test_what_forward_never_reads() -> None:
    assert unread_arguments(_Named()) == {"names", "note"}
    assert unread_arguments(_Seen()) == frozenset()
    assert unread_arguments(_Nested()) == {"other"}
    hooked = _Named()
    hooked.register_forward_pre_hook(lambda module, args: None)
    assert unread_arguments(hooked) == frozenset()


def test_names_of_samples_may_change() -> None:
    plain = _Named()
    model = autopart.parallelize(plain)
    for rows in (4, 4, 6):
        x = torch.randn(rows, 4, dtype=torch.float64)
        names = [f"sample {index} of {rows}" for index in range(rows)]
        loss = model(x, names, folder="here", note={"step": object()})
        weight = dict(model.named_parameters())["linear.weight"]
        bias = dict(model.named_parameters())["linear.bias"]
        expected = nn.functional.linear(x, weight, bias).square().mean()
        torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
        loss.backward()
    model(x, folder="here")
    with pytest.raises(InputError, match=r"'folder' was 'here' .* is now 'other'"):
        model(x, names, folder="other")
