"""Models in which values decide how many entries go on: experts' tokens, labelled rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopart
from autopart.runtime.errors import PlanError
from clusters import ideal
from launch import launch


class Experts(nn.Module):
    """Each token goes through the experts that its router chose, in a loop over these."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(8, 3)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        weights, chosen = self.router(flat).softmax(-1).topk(2)
        mixed = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            token, place = torch.where(chosen == number)
            mixed.index_add_(0, token, expert(flat[token]) * weights[token, place, None])
        return x + mixed.view_as(x)


class Labelled(nn.Module):
    """Two layers of experts; the loss is that of rows that have a label, of which there may be none."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.Sequential(Experts(), Experts()), nn.Linear(8, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        labelled = y >= 0
        return nn.functional.cross_entropy(self.head(self.layers(x)[labelled]), y[labelled], reduction="sum")


def trained(limits: dict[str, Any] | None) -> list[Tensor]:
    """Losses of four steps, and the weights after them. limits: None for the model itself."""
    torch.manual_seed(0)
    model: nn.Module = Labelled().double()
    if limits is not None:
        model = autopart.parallelize(model, cluster=ideal(2), verbose=False, **limits)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses: list[Tensor] = []
    for step in range(4):
        x, y = torch.randn(4, 5, 8, dtype=torch.float64), torch.randint(-1, 3, (4, 5))
        loss = model(x, torch.full_like(y, -1) if step == 2 else y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [*losses, *model.state_dict().values()]


@pytest.mark.parametrize("limits", [{"pp": 2}, {"pp": 2, "recompute": "full"}, {"tp": 2}], ids=str)
def test_experts_in_a_loop_train_as_in_one_process(limits: dict[str, Any]) -> None:
    wanted = trained(None)
    for found in launch(trained, 2, limits):
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-9)


class Chosen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        labelled = y >= 0
        chosen = self.layer(x[labelled])
        return nn.functional.cross_entropy(chosen, y[labelled]), chosen


def returned() -> str:
    model = autopart.parallelize(Chosen(), verbose=False, tp=2)
    with pytest.raises(PlanError) as caught:
        model(torch.ones(4, 4), torch.tensor([0, -1, 2, 1]))
    return str(caught.value)


def test_chosen_entries_that_forward_returns_are_refused() -> None:
    for message in launch(returned, 2):
        assert "the output '1' has a size that is no multiple of the batch size" in message
        assert "return all entries and the mask" in message
