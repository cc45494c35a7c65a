"""A model that works on complex numbers: Fourier transforms, complex values between stages and in collectives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopart.verify
from autopart.planner import make_plan
from autopart.realize import realize
from autopart.verify import compare_emitted, prepare
from clusters import ideal
from launch import run_kept_job


class Spectral(nn.Module):
    """Mixes tokens in the frequency domain, where weights are complex in effect, and hands on complex values."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 8)
        self.scale, self.turn = nn.Parameter(torch.rand(7)), nn.Parameter(torch.rand(7))
        self.parts = nn.ParameterList([torch.randn(16, 16) / 8 for _ in range(8)])

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        hidden = self.first(x).tanh()
        mixed = torch.fft.rfft(hidden, dim=1) * torch.complex(self.scale, self.turn)[:, None]
        hidden = hidden + self.middle(torch.fft.irfft(mixed, n=12, dim=1)).tanh()
        whole = torch.fft.fftn(hidden, dim=(-2, -1))
        for real, imaginary in zip(self.parts[::2], self.parts[1::2], strict=True):
            whole = whole @ torch.complex(real, imaginary)
        filtered = whole * torch.fft.fft(hidden, dim=-1)
        y = self.last((filtered.real + filtered.imag.tanh()) / 16)
        return {"loss": y.square().mean() + torch.view_as_real(filtered).square().mean() / 100}


@pytest.mark.parametrize(
    "limits",
    [
        pytest.param({"pp": 3, "tp": 1, "dp": 1}, marks=pytest.mark.slow),
        {"pp": 1, "tp": 2, "dp": 1},
        {"pp": 2, "tp": 1, "dp": 2},
    ],
    ids=["pp3", "tp2", "pp2xdp2"],
)
def test_equal(limits: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autopart.verify, "run_local_job", run_kept_job)
    torch.manual_seed(0)
    subject = prepare(Spectral(), (torch.randn(8, 12, 8),))
    devices = limits["pp"] * limits["tp"] * limits["dp"]
    plan = make_plan(subject.program, ideal(devices), batch=8, microbatches=2, **limits)
    emitted = realize(subject.program, plan)
    emitted.save(tmp_path / "program")
    if limits["pp"] == 3:
        crossing = {value.dtype for value in emitted.manifest.values if value.needs_grad}
        assert "complex128" in crossing, crossing
    result = compare_emitted(tmp_path / "program", subject, plan=plan)
    assert result.equal, result
    assert all(stage.as_planned for stage in result.traffic), result.traffic
