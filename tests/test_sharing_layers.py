"""Layers that read tensors in several of their blocks: folded as others are, also where stages part them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import autopart.verify
from autopart.analysis import Analysis, analyze
from autopart.folding import fold_graph
from autopart.planner import make_plan
from autopart.realize import realize
from autopart.verify import Subject, compare_emitted, prepare
from clusters import ideal
from launch import run_kept_job

WIDTH = 16


class Sharing(nn.Module):
    """Two products in blocks of their own, which read the same scales."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.one, self.other = nn.Parameter(torch.rand(WIDTH)), nn.Parameter(torch.rand(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.first(x * self.one).tanh() * self.other
        return x + self.second(x * self.one).tanh() * self.other


class Net(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Sharing() for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def subject_of(count: int) -> tuple[Subject, Analysis]:
    subject = prepare(Net(count), (torch.randn(8, WIDTH),), {})
    return subject, analyze(subject.program)


def test_more_layers_are_no_more_classes() -> None:
    sizes = {len(fold_graph(subject_of(count)[1]).classes) for count in (9, 12)}
    assert len(sizes) == 1


@pytest.mark.parametrize(("count", "pp", "dp", "tp"), [(4, 1, 1, 2), (4, 1, 2, 1), (2, 4, 1, 1), (3, 2, 1, 2)], ids=str)
def test_parallel_equals_serial(
    count: int, pp: int, dp: int, tp: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two layers on four stages, and of three on two, a layer's scales lie on two stages."""
    monkeypatch.setattr(autopart.verify, "run_local_job", run_kept_job)
    subject, analysis = subject_of(count)
    plan = make_plan(
        subject.program, ideal(pp * dp * tp), batch=8, analysis=analysis, pp=pp, dp=dp, tp=tp, microbatches=min(pp, 2)
    )
    assert bool(plan.strategies) == (tp > 1)
    realize(subject.program, plan, analysis).save(tmp_path / "program")
    result = compare_emitted(tmp_path / "program", subject, plan=plan)
    assert result.equal, result
    assert all(stage.as_planned for stage in result.traffic), result.traffic
    parted = [
        stage for stage in plan.stages if analysis.layers[stage.blocks[0]] == analysis.layers[stage.blocks[0] - 1]
    ]
    assert pp == 1 or any(stage.blocks[0] for stage in parted)
