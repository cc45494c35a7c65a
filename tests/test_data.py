"""Batches as loaders give them: a last one that is smaller, parts for each replica, a plan before the first batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import autopart
from autopart.runtime.errors import PlanError
from launch import launch

SIZES = [8, 6, 5, 3, 1, 8]


class Labelled(nn.Module):
    """A mean over valid labels, so that every size counts others."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.second(torch.tanh(self.first(x))), y, ignore_index=-100)


class Scores(Labelled):
    """The loss is the script's."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


def build(kind: type[nn.Module] = Labelled) -> nn.Module:
    torch.manual_seed(0)
    return kind().double()


def samples(count: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(count)
    labels = torch.randint(3, (count,), generator=generator)
    labels[1::3] = -100
    return torch.randn(count, 6, generator=generator, dtype=torch.float64), labels


def train(model: nn.Module, kind: type[nn.Module]) -> tuple[list[float], dict[str, Tensor]]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    losses = []
    for size in SIZES:
        x, y = samples(size)
        loss = model(x=x, y=y)
        if kind is Scores:
            loss = nn.functional.cross_entropy(loss, y, ignore_index=-100)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model.state_dict()


def in_parallel(plans: list[dict[str, Any]]) -> list[Any]:
    found = []
    for limits in plans:
        for kind in (Labelled, Scores):
            model = autopart.parallelize(build(kind), verbose=False, **limits)
            found.append(train(model, kind))
    return found


def test_a_smaller_batch_makes_the_step_of_one_process() -> None:
    expected = [train(build(kind), kind) for kind in (Labelled, Scores)]
    plans = [{"pp": 2, "microbatches": 4}, {"dp": 2, "microbatches": 2}]
    for results in launch(in_parallel, 2, plans):
        for (losses, state), (serial, weights) in zip(results, expected * len(plans), strict=True):
            assert losses == pytest.approx(serial, rel=1e-9)
            for name, tensor in weights.items():
                torch.testing.assert_close(state[name], tensor, rtol=1e-9, atol=1e-12)


def sampled() -> tuple[list[float], tuple[int, int], str]:
    """Each replica draws its own samples, as with DistributedDataParallel."""
    model: Any = autopart.parallelize(build(), batch="local", dp=2, verbose=False)
    try:
        asked = str(model.data_rank)
    except PlanError as error:
        asked = str(error)
    data = TensorDataset(*samples(24))
    x, y = samples(4)
    model = autopart.parallelize(build(), batch="local", dp=2, verbose=False, example={"x": x, "y": y})
    sampler: DistributedSampler[Any] = DistributedSampler(data, model.data_world_size, model.data_rank, shuffle=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    losses = []
    for x, y in DataLoader(data, 5, sampler=sampler):  # the last one has two
        loss = model(x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, (model.data_rank, model.data_world_size), asked


def test_a_distributed_sampler_feeds_the_replicas() -> None:
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    expected = []
    x, y = samples(24)
    for rows in (range(10), range(10, 20), range(20, 24)):
        loss = model(x[list(rows)], y[list(rows)])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    results = launch(sampled, 2)
    assert [place for _, place, _ in results] == [(0, 2), (1, 2)]
    for losses, _, asked in results:
        assert losses == pytest.approx(expected, rel=1e-9)
        assert "example=batch" in asked


class Nested(Labelled):
    """One argument that holds everything: a dict with a list, with a tuple, with what is no tensor."""

    def forward(self, batch: dict[str, Any]) -> Tensor:  # type: ignore[override]
        shift, (scale, power) = batch["parts"]
        x = (batch["x"] + shift) * scale**power
        return super().forward(x, batch["target"]["labels"])


def nested(size: int) -> dict[str, Any]:
    x, labels = samples(size)
    return {"x": x, "parts": [x.flip(1), (x.sum(1, keepdim=True).tanh(), 2)], "target": {"labels": labels}}


def train_nested(model: nn.Module) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    losses = []
    for size in (8, 8, 6):
        loss = model(batch=nested(size))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def nested_in_parallel() -> list[list[float]]:
    plans: list[dict[str, Any]] = [{"pp": 2, "microbatches": 2}, {"dp": 2, "microbatches": 2}]
    return [train_nested(autopart.parallelize(build(Nested), verbose=False, **limits)) for limits in plans]


def test_a_batch_may_be_nested() -> None:
    expected = train_nested(build(Nested))
    for results in launch(nested_in_parallel, 2):
        assert results == [pytest.approx(expected, rel=1e-9)] * 2
