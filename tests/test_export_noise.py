"""What export prints of graphs and of recurrent modules stays off the screen, and nothing else does."""

from __future__ import annotations

import sys
import warnings

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


class Recurrent(nn.Module):
    """Its GRU keeps a list of its weights, which export takes for assigned, as it does what forward keeps."""

    def __init__(self, keeps: bool) -> None:
        super().__init__()
        self.gru, self.keeps, self.last = nn.GRU(4, 4, batch_first=True), keeps, torch.zeros(1)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.gru(x)[0]
        if self.keeps:
            self.last = y.detach()
        return y.sum()


def test_attributes_are_noted_and_weights_of_recurrent_modules_are_none() -> None:
    """In words of autopart's own: export says that they have to be buffers, which a part of a loss cannot be."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        programs = [capture(Recurrent(keeps), (torch.randn(3, 2, 4),), check_eval=False) for keeps in (False, True)]
    assert not [warning for warning in told if "assigned during export" in str(warning.message)]
    assert programs[0].notes == ()
    assert [note for note in programs[1].notes if note.startswith("forward sets last, ")]
