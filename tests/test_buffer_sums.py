"""Buffers that gather sums over the batch, such as a router's counts, are one process's on every replica."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopart.verify
from autopart.analysis import analyze
from autopart.passes.program import Evaluation
from autopart.passes.program_json import NotWritten, written
from autopart.planner import make_plan
from autopart.realize import realize
from autopart.verify import compare_emitted, prepare
from clusters import ideal
from launch import launch, run_kept_job

WIDTH, EXPERTS = 8, 4


class Routed(nn.Module):
    """Each token's two best experts, which a subclass counts."""

    def __init__(self, dtype: torch.dtype = torch.int64) -> None:
        super().__init__()
        self.router, self.out = nn.Linear(WIDTH, EXPERTS), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("loads", torch.ones(EXPERTS, dtype=dtype))
        self.loads: Tensor

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        scores = self.router(x).sigmoid()
        chosen = scores.topk(2, -1).indices
        with torch.no_grad():
            self.count(chosen, scores)
        x = self.out(x) * scores.gather(-1, chosen).sum(-1, keepdim=True)
        return (x - y).square().mean()

    def count(self, chosen: Tensor, scores: Tensor) -> None:
        self.loads += nn.functional.one_hot(chosen, EXPERTS).sum((0, 1))


class Histogram(Routed):
    def __init__(self) -> None:
        super().__init__(torch.float32)

    def count(self, chosen: Tensor, scores: Tensor) -> None:
        self.loads.add_(torch.histc(chosen.float().view(-1), bins=EXPERTS, min=0, max=EXPERTS))


class Scattered(Routed):
    """Added up by position, twice."""

    def count(self, chosen: Tensor, scores: Tensor) -> None:
        for index in chosen.unbind(1):
            self.loads.scatter_add_(0, index, torch.ones_like(index))


class Places(Routed):
    def count(self, chosen: Tensor, scores: Tensor) -> None:
        self.loads.index_put_((chosen,), torch.ones_like(chosen), accumulate=True)


class Moving(Routed):
    """An average that moves by the batch's mean."""

    def __init__(self) -> None:
        super().__init__(torch.float64)

    def count(self, chosen: Tensor, scores: Tensor) -> None:
        self.loads.mul_(0.9).add_(scores.mean(0), alpha=0.1)


class Seen(Routed):
    """A count of the inputs alone, which the loss reads behind it."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.loads += (y > 0).sum()
        return super().forward(x, y) * (self.loads / 10).sum()

    def count(self, chosen: Tensor, scores: Tensor) -> None:
        pass


class Pooled(Routed):
    """Rows are added to what does not depend on the batch."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        groups = self.router(x).argmax(-1)
        pooled = (self.out.bias + x.new_zeros(EXPERTS, WIDTH)).index_add(0, groups, self.out(x))
        return super().forward(x, y) + pooled.sum()


class LastLoss(Routed):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        loss = super().forward(x, y)
        with torch.no_grad():
            self.loads.copy_((loss + self.loads / 7).long())
        return loss


class Compared(Routed):
    """What is added is no sum, but made of one."""

    def count(self, chosen: Tensor, scores: Tensor) -> None:
        loads = nn.functional.one_hot(chosen, EXPERTS).sum((0, 1)).double()
        self.loads += (loads.mean() - loads).sign().long()


def inputs(samples: int = 16) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(samples)
    x = torch.randn(2, samples, WIDTH, generator=generator)
    return x[0], x[1]


class Hits(Routed):
    """Counts that are returned, and one more."""

    def forward(self, x: Tensor, y: Tensor) -> Any:
        best = self.out(x).argmax(-1) == y.argmax(-1)
        return {"loss": super().forward(x, y), "hits": best.sum(), "positive": (y > 0).sum() + 1}


def test_counts_that_are_returned_stay_whole() -> None:
    split = analyze(autopart.capture(Hits(), inputs(), check_eval=False)).split
    assert split.combine == {"loss": ("sum", 0, 1), "hits": ("sum", 0, 1), "positive": ("same", 0, 1)}
    values = split.graph.output_node().args[0]
    assert isinstance(values, tuple) and values[2].meta["val"].dtype is torch.int64  # type: ignore[union-attr]


@pytest.mark.parametrize("model", [Routed, Histogram, Scattered, Places, Moving, Seen, Pooled])
@pytest.mark.parametrize("limits", [{"dp": 2, "pp": 1, "microbatches": 2}, {"dp": 1, "pp": 2, "microbatches": 4}])
def test_replicas_equal_one_process(
    model: type[Routed], limits: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(autopart.verify, "run_local_job", run_kept_job)
    torch.manual_seed(0)
    subject = prepare(model(), inputs())
    analysis = analyze(subject.program)
    plan = make_plan(subject.program, ideal(2), analysis=analysis, batch=16, tp=1, **limits)
    realize(subject.program, plan, analysis).save(tmp_path / "program")
    result = compare_emitted(tmp_path / "program", subject, plan=plan)
    assert result.equal, result


@pytest.mark.parametrize(
    ("model", "why"),
    [(LastLoss, "depends on the parameters"), (Compared, "aten.sign.default .* depends on the parameters")],
)
def test_other_updates_are_refused(model: type[Routed], why: str) -> None:
    split = analyze(autopart.capture(model(), inputs(), check_eval=False)).split
    assert re.search(why, split.flaw)


def trained(parallel: bool) -> list[Tensor]:
    """Losses, and the counts that each step leaves; once with a batch that replicas cannot share."""
    torch.manual_seed(0)
    model: Any = Routed().double()
    if parallel:
        model = autopart.parallelize(model, dp=2, pp=1, tp=1, microbatches=2, verbose=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for samples in (8, 8, 7, 8):
        loss = model(*(value.double() for value in inputs(samples)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found += [loss.detach(), model.state_dict()["loads"].clone()]
    for training in (True, False):  # it counts in both modes
        model.train(training)
        with torch.no_grad():
            found += [model(*(value.double() for value in inputs(8))), model.state_dict()["loads"].clone()]
    return found


def test_a_script_counts_as_one_process() -> None:
    expected = trained(False)
    assert expected[-1].sum() == EXPERTS + 2 * (8 * 5 + 7)
    for found in launch(trained, 2, True):
        torch.testing.assert_close(found, expected)


class Switched(Routed):
    """Evaluation counts otherwise."""

    def count(self, chosen: Tensor, scores: Tensor) -> None:
        self.loads += nn.functional.one_hot(chosen, EXPERTS).sum((0, 1)) * (1 if self.training else 2)


def test_evaluation_that_writes_other_values_is_refused() -> None:
    assert autopart.capture(Routed(), inputs()).evaluation == Evaluation("", ("loads",))
    assert "the buffer 'loads' is written by other ops" in autopart.capture(Switched(), inputs()).eval_flaw


class Queue(Routed):
    """Keeps the newest rows, as many as there were, and compares with them."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rows", torch.zeros(20, WIDTH))
        self.rows: Tensor

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.out(x)
        loss = nn.functional.cross_entropy(torch.cat([x, x @ self.rows.clone().T], -1), y.argmax(-1))
        with torch.no_grad():
            self.rows.copy_(torch.cat([x, self.rows])[:20])
        return loss


def test_a_program_with_a_batch_size_that_is_a_number_after_all_is_not_kept() -> None:
    program = autopart.capture(Queue(), inputs())
    assert "combines different samples" in analyze(program).split.flaw
    with pytest.raises(NotWritten, match="the size"):
        written(program)
