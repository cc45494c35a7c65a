"""Replicas of unlike parts get batches of every size, also of fewer samples than there are replicas."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from unlike_cases import Mesh, laid_on

import autopart
from autopart.analysis import Analysis, analyze
from autopart.passes.program import Program
from autopart.planner import make_plan
from autopart.realize import realize
from autopart.runtime.errors import BatchError
from autopart.tracing import capture
from clusters import ideal
from launch import launch

WIDTH, LENGTH, CLASSES = 6, 3, 5
IGNORED = -100


class Tagger(nn.Module):
    """Rows of words with labels, of which some are ignored. The first weight is read by the last layer too; a buffer
    counts, as a router's does.
    """

    positive: Tensor

    def __init__(self, loss: str, dropout: float = 0.0) -> None:
        super().__init__()
        self.loss = loss
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("positive", torch.zeros(WIDTH))

    def forward(self, words: Tensor, labels: Tensor) -> Any:
        x = torch.tanh(self.enter(words))
        for layer in self.layers:
            x = x + self.dropout(torch.tanh(layer(x)))
        self.positive += (x > 0).sum((0, 1))
        scores = self.head(self.norm(F.linear(x, self.enter.weight)))
        if self.loss == "outside":
            return scores
        return {"loss": loss_of(scores, labels, self.loss)}


def loss_of(scores: Tensor, labels: Tensor, kind: str) -> Tensor:
    if kind == "mean of rows":
        each = F.cross_entropy(scores.flatten(0, 1), labels.flatten(), reduction="none")
        return each.unflatten(0, labels.shape).sum(1).mean() + scores.square().mean()
    return F.cross_entropy(scores.flatten(0, 1), labels.flatten(), reduction="sum" if kind == "sum" else "mean")


def batch_of(samples: int, step: int = 0) -> dict[str, Tensor]:
    """Of each sample's labels one is ignored, and of every second one another one too."""
    made = torch.Generator().manual_seed(100 * step + samples)
    labels = torch.randint(CLASSES, (samples, LENGTH), generator=made)
    labels[:, step % LENGTH] = IGNORED
    labels[::2, (step + 1) % LENGTH] = IGNORED
    words = torch.randn(samples, LENGTH, WIDTH, generator=made, dtype=torch.float64)
    return {"words": words.requires_grad_(), "labels": labels}


def tagger(loss: str, dropout: float = 0.0) -> Tagger:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Tagger(loss, dropout).double()


@functools.lru_cache(maxsize=8)
def captured(loss: str, dropout: float = 0.0) -> tuple[Program, Analysis]:
    program = capture(tagger(loss, dropout), (), batch_of(4))
    return program, analyze(program)


@dataclass(frozen=True, slots=True)
class Case:
    """Stages on these meshes with a planned batch. shares: the parts of the first rank of the pipeline, and of all that
    have as many replicas.
    """

    meshes: tuple[Mesh, ...]
    shares: tuple[int, ...] = ()
    batch: int = 12
    microbatches: int = 2
    loss: str = "mean"
    places: tuple[int, ...] = ()
    schedule: str = "1f1b"

    def save(self, folder: Path, probability: float = 0.0, **options: Any) -> int:
        """Writes the program; returns how many processes it takes. probability: of dropout."""
        program, analysis = captured(self.loss, probability)
        stages = len(self.places or self.meshes)
        given: dict[str, Any] = {"batch": self.batch, "recompute": "none", "analysis": analysis, **options}
        plan = make_plan(program, ideal(stages), pp=stages, dp=1, tp=1, microbatches=self.microbatches, **given)
        sharded = None
        if any(tp > 1 for _, tp in self.meshes):
            sharded = make_plan(program, ideal(2), pp=1, dp=1, tp=2, microbatches=1, **given)
        laid = laid_on(plan, self.meshes, self.shares, self.places, self.schedule, sharded)
        parted = [replace(s, shares=self.shares) if s.dp == len(self.shares) else s for s in laid.stages]
        realize(program, replace(laid, stages=tuple(parted)), analysis).save(folder)
        return sum(dp * tp for dp, tp in self.meshes)


CASES = {
    "3:2:1": Case(((3, 1),), (3, 2, 1), batch=24, microbatches=4),
    "dp3-1": Case(((3, 1), (1, 1)), (2, 1, 1), batch=8, loss="sum"),
    "1-dp3": Case(((1, 1), (3, 1)), loss="mean of rows"),
    "dp2-dp2": Case(((2, 1), (2, 1)), (3, 1), batch=8),
    "dp2-dp3": Case(((2, 1), (3, 1)), batch=24, microbatches=4),
    "dp3-tp2": Case(((3, 1), (1, 2))),
    "tp2-dp3": Case(((1, 2), (3, 1)), loss="mean of rows"),
    "zb-h1 dp3-1": Case(((3, 1), (1, 1)), schedule="zb-h1"),
    "interleaved dp3-1": Case(((3, 1), (1, 1)), places=(0, 1, 0, 1), schedule="interleaved"),
    "outside": Case(((1, 1), (3, 1)), loss="outside", schedule="gpipe"),
}


def sizes_of(case: Case) -> list[int]:
    """As planned, fewer than replicas, as many, around what is planned; each leaves momentum for the next."""
    most = max(dp for dp, _ in case.meshes)
    return [case.batch, *range(1, most + 2), case.batch - 1, case.batch + 1]


def steps(model: Any, loss: str, sizes: list[int]) -> tuple[list[Tensor], list[dict[str, Tensor]]]:
    """Losses and gradients of a few steps with these batches, the words' among them."""
    optimizer, losses, gradients = torch.optim.SGD(model.parameters(), 0.02, momentum=0.9), [], []
    for step, samples in enumerate(sizes):
        batch = batch_of(samples, step)
        found = model(**batch)
        value = loss_of(found, batch["labels"], loss) if loss == "outside" else found["loss"]
        value.backward()
        losses.append(value.detach())
        made = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None and p.numel()}
        gradients.append(made | {"words": batch["words"].grad})
        optimizer.step()
        optimizer.zero_grad()
    return losses, gradients


def on_ranks(directory: str, loss: str, sizes: list[int], weights: dict[str, Tensor]) -> tuple[Any, ...]:
    model = autopart.load(directory, weights).train()
    return *steps(model, loss, sizes), model.state_dict()


@pytest.mark.filterwarnings("ignore:the loss is computed outside")
@pytest.mark.parametrize("name", CASES)
def test_batches_of_all_sizes_equal_one_process(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    processes, sizes, model = case.save(tmp_path), sizes_of(case), tagger(case.loss)
    weights = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    losses, gradients = steps(model, case.loss, sizes)
    results = launch(on_ranks, processes, str(tmp_path), case.loss, sizes, weights)
    seen = set()
    for found, made, state in results:
        torch.testing.assert_close(found, losses, rtol=1e-10, atol=1e-12)
        for own, expected in zip(made, gradients, strict=True):
            seen |= own.keys()
            for key, gradient in own.items():
                if "tp2" in name and gradient.shape != expected[key].shape:
                    continue  # a share, which the parameters are held against
                torch.testing.assert_close(gradient, expected[key], rtol=1e-10, atol=1e-12, msg=key)
        for key, tensor in model.state_dict().items():
            torch.testing.assert_close(state[key], tensor, rtol=1e-10, atol=1e-12, msg=key)
    assert seen == gradients[0].keys()


def late_on_ranks(directory: str, weights: dict[str, Tensor]) -> str:
    model = autopart.load(directory, weights).train()
    with pytest.raises(BatchError) as error:
        model(**{name: tensor.detach() for name, tensor in batch_of(2).items()})
    return str(error.value)


def test_2bw_refuses_a_batch_of_fewer_samples_than_replicas(tmp_path: Path) -> None:
    """On all ranks, also on those of the stage that has one replica."""
    processes = Case(((3, 1), (1, 1)), schedule="2bw").save(tmp_path)
    for told in launch(late_on_ranks, processes, str(tmp_path), dict(tagger("mean").state_dict())):
        assert "takes batches of 2 microbatches on 3 replicas only, 2 samples do not" in told


def losses_on_ranks(directory: str, weights: dict[str, Tensor], sizes: list[int]) -> list[float]:
    model = autopart.load(directory, weights, seed=7).train()
    return [loss.item() for loss in steps(model, "mean", sizes)[0]]


@pytest.mark.parametrize("meshes", [((3, 1),), ((3, 1), (1, 1))])
def test_replicas_with_the_same_samples_drop_the_same(meshes: tuple[Mesh, ...], tmp_path: Path) -> None:
    """All ranks have one loss; where masks do not depend on the plan, that of a program for one process."""
    weights, sizes = dict(tagger("mean").state_dict()), [1, 2, 2]
    for dropout in ("torch", "invariant"):
        folder = tmp_path / dropout
        processes = Case(meshes).save(folder, 0.3, dropout=dropout)
        first, *others = launch(losses_on_ranks, processes, str(folder), weights, sizes)
        assert all(other == first for other in others), dropout
    program, analysis = captured("mean", 0.3)
    alone = make_plan(program, ideal(1), dropout="invariant", analysis=analysis)
    realize(program, alone, analysis).save(tmp_path / "alone")
    assert first == pytest.approx(losses_on_ranks(str(tmp_path / "alone"), weights, sizes), rel=1e-10)
