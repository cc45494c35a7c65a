"""Buffers that training writes are on one stage with all that reads them or makes their value: equal to one process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopart
import autopart.verify
from autopart.analysis import analyze
from autopart.passes.partition import partition
from autopart.planner import make_plan
from autopart.realize import realize
from autopart.runtime.errors import PlanError
from autopart.verify import compare_emitted, prepare
from clusters import ideal
from launch import run_kept_job

WIDTH = 8


class Layers(nn.Module):
    def __init__(self, size: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(4)])
        self.register_buffer("kept", torch.zeros(size))
        self.kept: Tensor

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return self.ends((x - y).square().mean())

    def ends(self, loss: Tensor) -> Tensor:
        return loss


class LastLoss(Layers):
    """The new value does not read the old one."""

    def ends(self, loss: Tensor) -> Tensor:
        self.kept.copy_(loss.detach())
        return loss


class InputMean(Layers):
    """The new value is of the input alone, which every stage has."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.kept.copy_(x.mean())
        return super().forward(x, y)


class Counted(Layers):
    """Two ops read it, of which the one that makes its value comes last."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        scale = 1 + (self.kept / 10).clone()
        loss = super().forward(x * scale, y)
        self.kept += 1
        return loss


class Averages(Layers):
    """An average of a first layer's weights, read at the end."""

    def __init__(self) -> None:
        super().__init__((WIDTH, WIDTH))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        loss = super().forward(x, y) + (x @ self.kept).square().mean()
        weight = self.layers[0].weight
        assert isinstance(weight, Tensor)
        self.kept.lerp_(weight.detach(), 0.1)
        return loss


class Before(Layers):
    """One buffer becomes what another was."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("before", torch.zeros(()))
        self.before: Tensor

    def ends(self, loss: Tensor) -> Tensor:
        change = loss * (1 + self.before)
        self.before.copy_(self.kept)
        self.kept.copy_(loss.detach())
        return change


class Replaced(Layers):
    """A running mean that becomes another tensor, and is read after that."""

    def ends(self, loss: Tensor) -> Tensor:
        self.kept = self.kept * 0.9 + loss.detach() * 0.1
        return loss * (1 + self.kept)


class OneNorm(Layers):
    """Statistics that several layers write."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(self.norm(layer(x)))
        return (x - y).square().mean()


class Unread(Layers):
    """Buffers in no checkpoint that nothing reads: one written in place, one that becomes another tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("last", torch.zeros(()), persistent=False)
        self.register_buffer("anew", torch.zeros(()), persistent=False)
        self.last: Tensor

    def ends(self, loss: Tensor) -> Tensor:
        self.last.copy_(loss.detach())
        self.anew = loss.detach() * 2
        return loss


def test_unread_buffers_are_written_where_the_model_writes_them_in_place() -> None:
    program = autopart.capture(Unread(), torch.randn(2, 4, WIDTH).unbind())
    assert program.updated_buffers == ("last",)


@pytest.mark.parametrize("model", [LastLoss, InputMean, Counted, Averages, Before, Replaced, OneNorm])
def test_pipelines_equal_one_process(
    model: Callable[[], nn.Module], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(autopart.verify, "run_local_job", run_kept_job)
    torch.manual_seed(0)
    subject = prepare(model().double(), (torch.randn(8, WIDTH), torch.randn(8, WIDTH)))
    analysis = analyze(subject.program)
    limits = {"batch": 8, "pp": 2, "dp": 1, "tp": 1, "microbatches": 1}
    plan = make_plan(subject.program, ideal(2), analysis=analysis, **limits)  # type: ignore[arg-type]
    emitted = realize(subject.program, plan, analysis)
    assert all(len(item.stages) == 1 for item in emitted.manifest.parameters if item.buffer)
    emitted.save(tmp_path / "program")
    result = compare_emitted(tmp_path / "program", subject, plan=plan)
    assert result.equal, result


class Average(nn.Module):
    """A layer that reads an average of its own weights, of before or after it is written."""

    def __init__(self, first: bool) -> None:
        super().__init__()
        self.first, self.linear = first, nn.Linear(WIDTH, WIDTH)
        self.register_buffer("average", torch.ones(WIDTH, WIDTH))
        self.average: Tensor

    def forward(self, x: Tensor) -> Tensor:
        before = self.average.clone()
        with torch.no_grad():
            self.average.lerp_(self.linear.weight, 0.3)
        return torch.tanh(self.linear(x) + x @ (before if self.first else self.average))


class CountedLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("calls", torch.zeros(()))
        self.calls: Tensor

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return torch.tanh(self.linear(x) * (1 + self.calls / 10)) + x


class Anew(nn.Module):
    """Autograd keeps the tensor that was the buffer when it was read."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("scale", torch.ones(WIDTH))
        self.scale: Tensor

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.linear(x) * self.scale)
        self.scale = self.scale * 0.9 + self.linear.bias.detach()
        return x


class Normed(nn.Module):
    """The largest singular value comes by one more step of the power iteration in every forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.utils.spectral_norm(nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x)) + x


class Chain(nn.Module):
    def __init__(self, layer: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList([layer() for _ in range(4)])

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return (x - y).square().mean()


_SPLIT = {"pp": 2, "dp": 2, "microbatches": 4}


@pytest.mark.parametrize(
    ("layer", "limits"),
    [
        (partial(Average, True), {**_SPLIT, "recompute": "full"}),
        (partial(Average, False), {**_SPLIT, "recompute": "full"}),
        (CountedLayer, {"pp": 2, "dp": 1, "microbatches": 1, "recompute": "full"}),
        (CountedLayer, {**_SPLIT, "schedule": "zb-h1"}),
        (Anew, _SPLIT),
        (Normed, {**_SPLIT, "recompute": "full"}),
        (Normed, {"pp": 2, "dp": 1, "microbatches": 4, "schedule": "2bw"}),
    ],
)
def test_each_step_writes_once(
    layer: Callable[[], nn.Module], limits: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the number of microbatches, and what runs again finds what the first forward did."""
    monkeypatch.setattr(autopart.verify, "run_local_job", run_kept_job)
    torch.manual_seed(0)
    subject = prepare(Chain(layer).double(), (torch.randn(16, WIDTH), torch.randn(16, WIDTH)))
    analysis = analyze(subject.program)
    ranks = limits["pp"] * limits["dp"]
    plan = make_plan(subject.program, ideal(ranks), analysis=analysis, batch=16, tp=1, **limits)
    emitted = realize(subject.program, plan, analysis)
    assert not emitted.manifest.notes
    if "recompute" in limits:
        assert sum(text.count(" checkpoint(") for text in emitted.files.values()) >= 2
    emitted.save(tmp_path / "program")
    result = compare_emitted(tmp_path / "program", subject, plan=plan)
    assert result.equal, result


class SetAnew(Layers):
    """A table that no checkpoint has is computed in every call, and not read before."""

    def __init__(self) -> None:
        super().__init__((WIDTH,))
        self.register_buffer("kept", torch.ones(WIDTH), persistent=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.kept = torch.arange(WIDTH, device=x.device) * 0.1
        return super().forward(x * self.kept, y)


def test_what_no_one_reads_is_not_written() -> None:
    subject = prepare(SetAnew(), (torch.randn(8, WIDTH), torch.randn(8, WIDTH)))
    assert subject.program.updated_buffers == ()


def test_what_cannot_be_cut_is_said() -> None:
    inputs = torch.randn(8, WIDTH), torch.randn(8, WIDTH)
    program = prepare(OneNorm(), inputs).program
    analysis = analyze(program)
    (statistics,) = {item.places for item in analysis.written if "norm.running_mean" in item.names}
    assert len(statistics) == 4
    most = len(analysis.blocks) - (statistics[-1] - statistics[0])
    with pytest.raises(PlanError, match=rf"pp={most + 1} needs .*norm.running_mean.* leaves {most} at most"):
        make_plan(program, ideal(most + 1), analysis=analysis, batch=8, pp=most + 1, microbatches=1)
    inside = statistics[1]
    with pytest.raises(PlanError, match=r"stages 0, 1 have ops that read or write norm.running_mean.*cut elsewhere"):
        partition(program, analysis.graph, analysis.blocks, (0, inside, len(analysis.blocks)))
    plan = make_plan(program, ideal(2), analysis=analysis, batch=8, pp=2, microbatches=1)
    first, second = plan.stages
    moved = replace(first, blocks=(0, inside)), replace(second, blocks=(inside, len(analysis.blocks)))
    with pytest.raises(PlanError, match="cut elsewhere, or plan again"):
        realize(program, replace(plan, stages=moved), analysis)
