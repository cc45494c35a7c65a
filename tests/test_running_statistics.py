"""Batch norm's running statistics on replicas, in a model whose loss the script computes after the forward."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import autopart.verify
from autopart.planner import make_plan
from autopart.realize import realize
from autopart.verify import compare_emitted, prepare
from clusters import ideal
from launch import run_kept_job


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.as_tensor(self.last(torch.relu(self.norm(self.first(x)))))


def test_backward_after_the_statistics_were_averaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autopart.verify, "run_local_job", run_kept_job)
    torch.manual_seed(0)
    subject = prepare(Normed(), (torch.randn(8, 6),))
    assert subject.program.loss is None
    plan = make_plan(subject.program, ideal(2), batch=8, dp=2, microbatches=2)
    realize(subject.program, plan).save(tmp_path / "program")
    result = compare_emitted(tmp_path / "program", subject, plan=plan)
    assert result.equal, result
