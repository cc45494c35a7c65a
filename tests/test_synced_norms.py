"""SyncBatchNorm, which scripts made for DistributedDataParallel keep: a program has the whole batch's statistics."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autopart
from autopart.runtime.errors import AutopartError
from clusters import ideal
from launch import launch


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3))
        self.norm, self.head = nn.BatchNorm1d(4), nn.Linear(4, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.norm(self.body(x).mean((2, 3)))), y)


def trained(limits: dict[str, Any] | None) -> tuple[list[float], dict[str, Tensor]]:
    """limits: of the plan; None: in one process."""
    torch.manual_seed(0)
    model: Any = nn.SyncBatchNorm.convert_sync_batchnorm(Images().double())
    if limits is not None:
        model = autopart.parallelize(model, cluster=ideal(2), verbose=False, **limits)
    optimizer, seen = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), []
    for step in range(3):
        made = torch.Generator().manual_seed(step)
        x = torch.randn(8, 2, 6, 6, generator=made, dtype=torch.float64)
        loss = model(x, torch.randint(3, (8,), generator=made))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        model.eval()
        with torch.no_grad():
            seen += [loss.item(), model(x, torch.zeros(8, dtype=torch.int64)).item()]
        model.train()
    return seen, model.state_dict()


def in_parallel(expected: Any, limits: dict[str, Any]) -> None:
    found = trained({"pp": 1, "dp": 1, "tp": 1, **limits})
    assert found[0] == pytest.approx(expected[0], rel=1e-11)
    torch.testing.assert_close(found[1], expected[1], rtol=1e-10, atol=1e-12)


def refused(limits: dict[str, Any]) -> None:
    with pytest.raises(AutopartError, match=r"batch_norm.default in norm|batch_norm.default in body.1") as caught:
        trained(limits)
    assert "takes statistics of the whole batch, as SyncBatchNorm does" in str(caught.value)


def test_statistics_of_the_whole_batch() -> None:
    expected = trained(None)
    for limits in ({"pp": 2}, {"tp": 2}):
        launch(in_parallel, 2, expected, limits)


def test_shares_of_the_batch_are_refused() -> None:
    launch(refused, 2, {"dp": 2})
