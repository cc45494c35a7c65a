"""Layers that share tensors between their blocks, or with all layers: folded as others are, and parted by stages."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import autopart.verify
from autopart.analysis import Analysis, analyze
from autopart.folding import fold_graph
from autopart.passes import graph as graphs
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


class Scaled(nn.Module):
    """A product that all layers share, with scales of its own."""

    def __init__(self, product: nn.Module) -> None:
        super().__init__()
        self.product, self.scale = product, nn.Parameter(torch.rand(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.product(x).tanh() * self.scale


class Net(nn.Module):
    """reused: the layers are of one product, else they share within themselves."""

    def __init__(self, count: int, reused: bool) -> None:
        super().__init__()
        product = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Scaled(product) if reused else Sharing() for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def subject_of(count: int, reused: bool) -> tuple[Subject, Analysis]:
    subject = prepare(Net(count, reused), (torch.randn(8, WIDTH),), {})
    return subject, analyze(subject.program)


@pytest.mark.parametrize("reused", [False, True])
def test_more_layers_are_no_more_classes(reused: bool) -> None:
    folded = [fold_graph(subject_of(count, reused)[1]) for count in (18, 24)]
    assert len(folded[0].classes) == len(folded[1].classes)
    for members in (own for graph in folded for own in graph.classes):
        assert len({(member.op, str(member.meta["val"].shape)) for member in members}) == 1


@pytest.mark.parametrize("reused", [False, True])
@pytest.mark.parametrize(("count", "pp", "dp", "tp"), [(4, 1, 1, 2), (4, 1, 2, 1), (2, 4, 1, 1), (3, 2, 1, 2)], ids=str)
def test_parallel_equals_serial(
    count: int, pp: int, dp: int, tp: int, reused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two layers on four stages, and of three on two, a layer's scales lie on two stages; what all read on all."""
    monkeypatch.setattr(autopart.verify, "run_local_job", run_kept_job)
    subject, analysis = subject_of(2 * count if reused else count, reused)
    plan = make_plan(
        subject.program, ideal(pp * dp * tp), batch=8, analysis=analysis, pp=pp, dp=dp, tp=tp, microbatches=min(pp, 2)
    )
    assert bool(plan.strategies) == (tp > 1)
    realize(subject.program, plan, analysis).save(tmp_path / "program")
    result = compare_emitted(tmp_path / "program", subject, plan=plan)
    assert result.equal, result
    assert all(stage.as_planned for stage in result.traffic), result.traffic
    homes: dict[str, set[int]] = {}
    for node, block in analysis.block_of.items():
        (stage,) = (index for index, own in enumerate(plan.stages) if own.blocks[0] <= block < own.blocks[1])
        for value in graphs.inputs(node):
            homes.setdefault(value.node.name, set()).add(stage)
    shared = [own for name, own in homes.items() if name.endswith(("_one", "_other", "_product_weight"))]
    assert shared and any(len(own) > 1 for own in shared) == (pp > 1)
