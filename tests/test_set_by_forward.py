"""Tensors that a forward keeps on its modules, as layers do with their part of a loss: no program sets these."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autopart
from autopart.runtime.errors import NotHereError
from autopart.tracing import capture
from clusters import ideal
from launch import launch

WIDTH, CLASSES = 6, 3


class Routed(nn.Module):
    """Its part of the loss is for the script to add."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.out = nn.Linear(WIDTH, 4), nn.Linear(4, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        chosen = self.gate(x).softmax(-1)
        self.penalty = chosen.square().sum(-1).mean()
        return x + self.out(chosen)


class Layers(nn.Module):
    """Keeps also a table that it makes once, and how often it was right."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Routed() for _ in range(2))
        self.head = nn.Linear(WIDTH, CLASSES)
        self.places: Tensor | None = None
        self.hidden: Tensor | None = None
        self.parts: list[Tensor] = []

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if self.places is None or len(self.places) < x.shape[1]:
            self.places = torch.linspace(0, 1, x.shape[1])
        x = x + self.places[: x.shape[1], None]
        for layer in self.layers:
            x = layer(x)
            self.parts.append(x.mean())
        self.hidden, scores = x, self.head(x.mean(1))
        self.right = (scores.argmax(-1) == y).sum()
        return F.cross_entropy(scores, y)


def batch(step: int, length: int = 5) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(step)
    return torch.randn(8, length, WIDTH, generator=made), torch.randint(CLASSES, (8,), generator=made)


def test_a_capture_leaves_attributes_as_they_were() -> None:
    model = Layers()
    program = capture(model, batch(0), check_eval=False)
    found = {str(item): item.with_gradient for item in program.set_attributes}
    assert found == {
        "places": False,
        "hidden": True,
        "right": False,
        "layers.0.penalty": True,
        "layers.1.penalty": True,
        "parts": True,
    }
    assert model.parts == []
    assert model.hidden is None and model.places is None
    assert not any(isinstance(value, Tensor) for module in model.modules() for value in vars(module).values())


USES: list[Callable[[Any, Tensor, Any], Any]] = [
    lambda model, loss, kept: loss + sum(kept),
    lambda model, loss, kept: loss + 0.1 * kept[0],
    lambda model, loss, kept: loss + torch.stack(kept).mean(),
    lambda model, loss, kept: float(kept[1]),
    lambda model, loss, kept: model.hidden.mean(),
    lambda model, loss, kept: loss + sum(model.parts),
]


def added_by_the_script() -> None:
    torch.manual_seed(0)
    model: Any = autopart.parallelize(Layers(), cluster=ideal(2), verbose=False, pp=2, dp=1, tp=1, microbatches=2)
    for step, length in enumerate((5, 5, 7)):  # of another length it is captured again
        loss = model(*batch(step, length))
        kept = [module.penalty for module in model.modules() if hasattr(module, "penalty")]
        assert len(kept) == 2
        for use in USES:
            with pytest.raises(
                NotHereError, match=r"'(layers\.[01]\.penalty|hidden|parts)', a tensor that forward sets"
            ):
                use(model, loss, kept)
        assert not hasattr(model, "right")
        loss.backward()


def test_what_a_script_reads_of_them_is_refused_on_all_ranks() -> None:
    launch(added_by_the_script, 2)


def test_those_of_layers_that_are_not_traced_are_found() -> None:
    model = Layers()
    model.layers = nn.ModuleList(Routed() for _ in range(10))
    program = capture(model, batch(0), check_eval=False)
    found = {str(item) for item in program.set_attributes if item.with_gradient}
    assert found >= {f"layers.{layer}.penalty" for layer in range(10)}
    assert not any(hasattr(layer, "penalty") for layer in model.layers)
