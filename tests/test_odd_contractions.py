"""Contractions that are none of a plain product: labels that one operand alone has, kernels that each sample makes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autopart.verify
from autopart.analysis import analyze
from autopart.planner import make_plan
from autopart.realize import realize
from autopart.verify import compare_emitted, prepare
from clusters import ideal
from launch import run_kept_job

WIDTH = 4


class Scan(nn.Module):
    """State spaces write a step's width out as a label of one element, which nothing else has."""

    def __init__(self) -> None:
        super().__init__()
        self.step, self.decay, self.last = nn.Linear(WIDTH, 1), nn.Parameter(torch.rand(WIDTH, 3)), nn.Linear(3, WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        state = torch.exp(-torch.einsum("bli,dn->bldn", F.softplus(self.step(x)), self.decay))
        read = torch.einsum("bldn,bld->bln", state, x) + torch.einsum("bli,bn->bn", x, state[:, 0, 0])[:, None]
        return (self.last(read) - y).square().mean()


class OwnKernels(nn.Module):
    """One convolution for all samples, of which each has kernels of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels, self.last = nn.Linear(WIDTH, WIDTH * WIDTH * 3), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        rows = x.shape[0]
        kernels = self.kernels(x.mean(1)).view(rows * WIDTH, WIDTH, 3)
        made = F.conv1d(x.transpose(1, 2).reshape(1, rows * WIDTH, -1), kernels, padding=1, groups=rows)
        return (self.last(made.view(rows, WIDTH, -1).transpose(1, 2)) - y).square().mean()


@pytest.mark.parametrize(
    ("model", "limits"),
    [
        (Scan, {"pp": 2, "microbatches": 2}),
        (Scan, {"dp": 2, "microbatches": 1}),
        (OwnKernels, {"pp": 2, "microbatches": 1}),
        (OwnKernels, {"tp": 2, "microbatches": 1}),
    ],
)
def test_they_equal_one_process(
    model: type[nn.Module], limits: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(autopart.verify, "run_local_job", run_kept_job)
    torch.manual_seed(0)
    subject = prepare(model().double(), (torch.randn(8, 5, WIDTH), torch.randn(8, 5, WIDTH)))
    analysis = analyze(subject.program)
    plan = make_plan(subject.program, ideal(2), analysis=analysis, batch=8, **{"pp": 1, "dp": 1, "tp": 1, **limits})
    realize(subject.program, plan, analysis).save(tmp_path / "program")
    result = compare_emitted(tmp_path / "program", subject, plan=plan)
    assert result.equal, result


def test_kernels_of_each_sample_are_not_cut() -> None:
    program = prepare(OwnKernels().double(), (torch.randn(8, 5, WIDTH), torch.randn(8, 5, WIDTH))).program
    assert "aten.conv1d" in analyze(program).split.flaw
