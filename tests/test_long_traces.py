"""A capture that takes long says what it is at."""

from __future__ import annotations

import inspect
import time

import pytest
import torch
from torch import Tensor, nn

import autopart
from autopart import long_traces


class Slow(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        time.sleep(0.5)
        return x.exp()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(4, 4), Slow())

    def forward(self, x: Tensor) -> Tensor:
        return self.encoder(x).mean()


@pytest.mark.parametrize("rank", ["0", "1"])
def test_the_first_rank_names_module_and_line(
    rank: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(long_traces, "AFTER_S", 0.1)
    monkeypatch.setenv("RANK", rank)
    autopart.capture(Model(), (torch.zeros(2, 4),), check_eval=False)
    told = capfd.readouterr().err
    _, line = inspect.getsourcelines(Slow.forward)
    assert (f"now in encoder.1 at {__file__}:{line + 1};" in told) == (rank == "0")


def test_nothing_is_said_of_a_short_one(capfd: pytest.CaptureFixture[str]) -> None:
    autopart.capture(Model(), (torch.zeros(2, 4),), check_eval=False)
    assert "capturing for" not in capfd.readouterr().err
