"""Graphs that export prints before it fails stay off the screen, and nothing else does."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import Tensor, nn

from autopart.tracing import capture


class Branching(nn.Module):
    """Captured in a second try, as its branch depends on values."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor, valid: Tensor) -> Tensor:
        print("in forward", file=sys.stderr)
        hidden = self.layer(x)
        return torch.as_tensor(hidden.mean() if (valid > 0).any() else hidden.sum())


@pytest.mark.parametrize("logs", ["", "export"])
def test_graphs_are_not_printed(logs: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_LOGS", logs)
    stream = sys.stderr
    capture(Branching(), (torch.randn(4, 4), torch.ones(4)), check_eval=False)
    said = capsys.readouterr().err
    assert sys.stderr is stream and "in forward" in said
    assert ("def forward(self, arg0_1" in said) == bool(logs)
    assert logs or set(said.splitlines()) == {"in forward"}
