"""A model that returns several losses, as detectors do, and a script that adds them up."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autopart
from autopart.tracing import capture
from clusters import ideal
from launch import launch

ROWS, WIDTH, CLASSES = 8, 6, 3


class Detector(nn.Module):
    """The number of objects, by which two of the losses are divided, is that of the whole batch."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.classes, self.boxes = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES), nn.Linear(WIDTH, 4)

    def forward(self, images: Tensor, targets: dict[str, Tensor]) -> dict[str, Tensor]:
        hidden = torch.tanh(self.body(images))
        scores, labels = self.classes(hidden), targets["labels"]
        objects = labels > 0
        count = objects.sum().clamp(min=1)
        away = F.smooth_l1_loss(self.boxes(hidden), targets["boxes"], reduction="none").sum(-1)
        return {
            "loss_classifier": F.cross_entropy(scores.flatten(0, 1), labels.flatten(), reduction="sum") / count,
            "loss_box_reg": (away * objects).sum() / count,
            "loss_objectness": F.binary_cross_entropy_with_logits(scores[..., 0], (~objects).to(scores.dtype)),
        }


def batch(step: int) -> tuple[Tensor, dict[str, Tensor]]:
    made = torch.Generator().manual_seed(step)
    images = torch.randn(ROWS, 5, WIDTH, generator=made, dtype=torch.float64)
    boxes = torch.rand(ROWS, 5, 4, generator=made, dtype=torch.float64)
    return images, {"labels": torch.randint(CLASSES, (ROWS, 5), generator=made), "boxes": boxes}


def trained(limits: dict[str, Any] | None) -> tuple[list[float], dict[str, Tensor]]:
    """What the script saw, and the parameters after some steps. limits: of the plan; None: in one process."""
    torch.manual_seed(0)
    model: Any = Detector().double()
    if limits is not None:
        model = autopart.parallelize(model, cluster=ideal(2), verbose=False, **limits)
    optimizer, seen = torch.optim.AdamW(model.parameters(), lr=0.05), []
    for step in range(4):
        losses = model(*batch(step))
        total = sum(losses.values()) if step % 2 else losses["loss_classifier"] + 3 * losses["loss_objectness"]
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
        seen += [total.item(), *(loss.item() for loss in losses.values())]
    return seen, model.state_dict()


def added_up_by_the_script(limits: dict[str, Any]) -> None:
    expected, found = trained(None), trained({"pp": 1, "dp": 1, "tp": 1, **limits})
    assert found[0] == pytest.approx(expected[0], rel=1e-12)
    torch.testing.assert_close(found[1], expected[1], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    "limits",
    [{"pp": 2, "microbatches": 2}, {"dp": 2, "zero": 2}, {"tp": 2, "microbatches": 2}],
    ids=lambda limits: "-".join(map(str, limits)),
)
def test_as_in_one_process(limits: dict[str, Any]) -> None:
    launch(added_up_by_the_script, 2, limits)


class Named(nn.Module):
    def __init__(self, *names: str) -> None:
        super().__init__()
        self.names, self.layer = names, nn.Linear(4, 4)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = self.layer(x)
        return {name: (y - place).square().mean() for place, name in enumerate(self.names)}


@pytest.mark.parametrize(
    ("names", "loss"),
    [
        (("loss_cls", "loss_box"), None),
        (("ClsLoss", "accuracy", "boxLoss"), None),
        (("loss_cls", "loss"), "loss"),
        (("total", "reconstruction", "divergence"), "total"),
        (("nll_loss", "perplexity"), "nll_loss"),
    ],
)
def test_which_is_the_loss(names: tuple[str, ...], loss: str | None) -> None:
    assert capture(Named(*names), (torch.randn(2, 4),)).loss == loss
