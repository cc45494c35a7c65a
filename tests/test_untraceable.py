"""What no trace of a model has is refused with a word on what to write instead."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from autopart.runtime.errors import CaptureError
from autopart.tracing import capture


class Within(nn.Module):
    def __init__(self, take: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.take = nn.Linear(4, 4), take

    def forward(self, x: Tensor) -> Tensor:
        return self.take(self.linear, x).sum()


@pytest.mark.parametrize(
    ("take", "match"),
    [
        (lambda linear, x: torch.func.vmap(linear)(x), r"vmap, in module 1 \(.*test_untraceable\.py:"),
        (lambda linear, x: linear(x + x.data), r"(?s)reads a tensor's \.data.*use \.detach"),
    ],
)
def test_what_no_graph_has_is_named(take: Callable[[nn.Module, Tensor], Tensor], match: str) -> None:
    with pytest.raises(CaptureError, match=match):
        capture(nn.Sequential(nn.Linear(4, 4), Within(take)), (torch.randn(4, 4),), check_eval=False)


def test_compiled_modules_are_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4), torch.jit.script(nn.Linear(4, 4)))
    with pytest.raises(CaptureError, match=r"module 1 is compiled by torch\.jit"):
        capture(model, (torch.randn(4, 4),), check_eval=False)
