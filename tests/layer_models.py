"""Odd models of alike layers, and whether some of the layers can be copied."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

LAYERS = 9
RAN: list[int] = []
"""One for each time that a Counted ran."""


class Counted(nn.Module):
    """A layer that says how often its forward ran."""

    def __init__(self, index: int = 0):
        super().__init__()
        self.layer_idx = index
        self.norm = nn.LayerNorm(4)
        self.inner = nn.Linear(4, 4)
        self.ran: list[int] = RAN

    def forward(self, x: Tensor) -> Tensor:
        self.ran.append(1)
        return torch.relu(self.inner(self.norm(x))) + x


class Stack(nn.Module):
    """Layers in a list, called by ``run(model, x)``."""

    def __init__(self, layer: Callable[[int], nn.Module], run: Callable[[Any, Tensor], Tensor], layers: int = LAYERS):
        super().__init__()
        self.layers = nn.ModuleList(layer(index) for index in range(layers))
        self.run = run

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


def in_turn(model: Any, x: Tensor) -> Tensor:
    for layer in model.layers:
        x = layer(x)
    return x


def every_third(model: Any, x: Tensor) -> Tensor:
    for index, layer in enumerate(model.layers):
        x = layer(x) if index % 3 == 0 else x + layer(x)
    return x


def summed(model: Any, x: Tensor) -> Tensor:
    total = x
    for layer in model.layers:
        x = layer(x)
        total = total + x
    return total


def two_widths(model: Any, x: Tensor) -> Tensor:
    for index, layer in enumerate(model.layers):
        x = torch.cat([layer(x[:, :2]), x[:, 2:]], 1) if index % 2 else layer(x)
    return x


def one_layer(model: Any, x: Tensor) -> Tensor:
    for _ in model.layers:
        x = model.layers[0](x)
    return x


def without_gradient(model: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        x = in_turn(model, x)
    return model.layers[-1](x)


def with_penalty(model: Any, x: Tensor) -> Tensor:
    return in_turn(model, x) + sum(parameter.square().sum() for parameter in model.parameters())


def by_their_number(model: Any, x: Tensor) -> Tensor:
    return in_turn(model, x) / len(list(model.parameters()))


def asking(model: Any, x: Tensor) -> Tensor:
    return in_turn(model, x) * sum(hasattr(layer, "inner") for layer in model.layers)


def reading(model: Any, x: Tensor) -> Tensor:
    return in_turn(model, x) + model.layers[5].inner.weight.sum()


class Batched(Counted):
    """Statistics, a draw, a write in place, a view and a result that is the argument."""

    def __init__(self, index: int = 0):
        super().__init__(index)
        self.statistics = nn.BatchNorm1d(3)
        self.rectified = nn.ReLU(inplace=True)
        self.dropped = nn.Dropout(0.5)
        self.register_buffer("table", torch.arange(4.0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.rectified(self.statistics(super().forward(x)) + self.table)
        return self.dropped(y).view(x.shape[0], 3, 2, 2).flatten(2)


class Odd(Counted):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y * 2 if self.layer_idx % 2 else y


class OddOne(Counted):
    """One in the middle does something else, by its number."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y * 2 if self.layer_idx == LAYERS // 2 else y


class Counting(Counted):
    """What it computes depends on how many were called before."""

    def forward(self, x: Tensor) -> Tensor:
        if self.layer_idx == 0:
            _BEFORE.clear()
        _BEFORE.append(1)
        return super().forward(x) / len(_BEFORE)


_BEFORE: list[int] = []


class Mixed(Counted):
    """One in the middle is under autocast."""

    def forward(self, x: Tensor) -> Tensor:
        if self.layer_idx != LAYERS // 2:
            return super().forward(x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return super().forward(x)


class Wider(Counted):
    """One in the middle makes its table in another type, which no argument says."""

    def forward(self, x: Tensor) -> Tensor:
        torch.set_default_dtype(torch.float64 if self.layer_idx == LAYERS // 2 else torch.float32)
        try:
            return super().forward(x) + torch.full((4,), 2.0).sum()
        finally:
            torch.set_default_dtype(torch.float32)


class Replacing(Counted):
    """A running mean that is made anew in every call."""

    def __init__(self, index: int = 0):
        super().__init__(index)
        self.mean: Tensor
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        self.mean = self.mean * 0.9 + x.detach().mean((0, 1)) * 0.1
        return super().forward(x) - self.mean


class Numbered(Counted):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + self.layer_idx)


class Making(Counted):
    """Registers its table when it is first called."""

    def forward(self, x: Tensor) -> Tensor:
        if "table" not in self._buffers:
            self.register_buffer("table", torch.arange(x.shape[-1], device=x.device) * 0.1, persistent=False)
        return super().forward(x) + self.get_buffer("table")


class Tables:
    """Keeps what was computed once."""

    def __init__(self) -> None:
        self.by_length: dict[int, Tensor] = {}


class Looking(Numbered):
    """Computes a table that all layers share when one is first called; unlike by its number."""

    def __init__(self, tables: Tables, index: int = 0):
        super().__init__(index)
        self.tables = tables

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[-1] not in self.tables.by_length:
            self.tables.by_length[x.shape[-1]] = torch.arange(x.shape[-1], device=x.device) * 0.1
        return super().forward(x) + self.tables.by_length[x.shape[-1]]


def looking() -> nn.Module:
    tables = Tables()
    return Stack(lambda index: Looking(tables, index), in_turn)


class Dropped(Counted):
    """Skips itself at random."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if random.random() < 0.5 else x


class Tallied(nn.Linear):
    """Counts its calls."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.calls = 0
        self.sizes: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.sizes.append(x.shape[1])
        return super().forward(x)


class Tallying(Counted):
    def __init__(self, index: int = 0):
        super().__init__(index)
        self.inner = Tallied()


class Keys(Counted):
    """Every second one uses the keys of the one before it instead of its own."""

    last: ClassVar[list[Tensor]] = []

    def __init__(self, index: int = 0):
        super().__init__(index)
        self.keys = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        keys = self.keys(x)
        if self.layer_idx % 2 == 0:
            Keys.last[:] = [keys]
        return super().forward(x) * Keys.last[0]


class Stateful(Counted):
    """Changes the dict that it is given."""

    def forward(self, x: Any) -> Any:
        x["x"] = super().forward(x["x"])
        return x


class Scaling(Counted):
    def forward(self, x: Any) -> Any:
        x["scale"] = 1 + self.layer_idx
        return super().forward(x["x"])


def returned_state(model: Any, x: Tensor) -> Tensor:
    state = {"x": x}
    for layer in model.layers:
        state = layer(state)
    return state["x"]


def changed_state(model: Any, x: Tensor) -> Tensor:
    state = {"x": x}
    for layer in model.layers:
        layer(state)
    return state["x"]


def scale_of_state(model: Any, x: Tensor) -> Tensor:
    for layer in model.layers:
        state: dict[str, Any] = {"x": x}
        x = layer(state)
        x = x * state["scale"]
    return x


class Marking(Counted):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        y.times = self.layer_idx  # type: ignore[attr-defined]
        return y


def by_its_mark(model: Any, x: Tensor) -> Tensor:
    for layer in model.layers:
        x = layer(x)
        x = x * getattr(x, "times", 1)
    return x


class UnlikeLast(Counted):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y if self.layer_idx < LAYERS - 1 else x


class Keeping(Counted):
    """Leaves its argument where the model picks it up."""

    def forward(self, x: Tensor) -> Tensor:
        Telling.losses.append(x)
        return super().forward(x)


class Telling(Counted):
    """Leaves a loss where the model picks it up."""

    losses: ClassVar[list[Tensor]] = []

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.losses.append((y * y).sum())
        return y


def with_losses(model: Any, x: Tensor) -> Tensor:
    Telling.losses.clear()
    return in_turn(model, x) + sum(Telling.losses)


def sharing() -> nn.Module:
    """One bias in all layers."""
    model = Stack(Counted, in_turn)
    layers: Any = model.layers
    for layer in layers[1:]:
        layer.norm.bias = layers[0].norm.bias
    return model


class Tied(Counted):
    def __init__(self, index: int = 0):
        super().__init__(index)
        self.outer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(super().forward(x))


def chained() -> nn.Module:
    """Each layer ends with the weight that the next begins with."""
    model = Stack(Tied, in_turn)
    layers: Any = model.layers
    for layer, following in pairwise(layers):
        following.inner.weight = layer.outer.weight
    return model


def in_pairs() -> nn.Module:
    model = Stack(Counted, in_turn)
    layers: Any = model.layers
    for layer, following in zip(layers[1::2], layers[2::2], strict=True):
        following.inner.weight = layer.inner.weight
    return model


class Halves(nn.Module):
    """Lists in a list, after a Sequential of Sequentials."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.GELU()) for _ in range(LAYERS)))
        self.halves = nn.ModuleList(nn.ModuleList(Counted() for _ in range(LAYERS)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        halves: Any = self.halves
        for half in halves:
            for layer in half:
                x = layer(x)
        return x


class FixedBatch(Stack):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + torch.zeros(int(x.shape[0]), 3, 4, device="meta").reshape(2, 3, 4)


TOYS: dict[str, tuple[Callable[[], nn.Module], bool]] = {
    "every third without residual": (lambda: Stack(Counted, every_third), True),
    "sum of all layers": (lambda: Stack(Counted, summed), True),
    "two sizes in turn": (lambda: Stack(Counted, two_widths, 20), True),
    "one layer again and again": (lambda: Stack(lambda index: Counted(), one_layer), True),
    "statistics": (lambda: Stack(Batched, in_turn), True),
    "lists in a list": (Halves, True),
    "fixed batch": (lambda: FixedBatch(Counted, in_turn), True),
    "shared parameters": (sharing, True),
    "parameters tied to the next layer's": (chained, True),
    "parameters tied in pairs": (in_pairs, True),
    "a penalty on all parameters": (lambda: Stack(Counted, with_penalty), True),
    "divided by the number of parameters": (lambda: Stack(Counted, by_their_number), True),
    "asking what layers have": (lambda: Stack(Counted, asking), True),
    "one layer's weight beside it": (lambda: Stack(Counted, reading), True),
    "ops that depend on the number": (lambda: Stack(Numbered, in_turn), False),
    "ops of odd layers": (lambda: Stack(Odd, in_turn), False),
    "one other op in the middle": (lambda: Stack(OddOne, in_turn), False),
    "numbers by the calls before": (lambda: Stack(Counting, in_turn), False),
    "a last layer that returns its argument": (lambda: Stack(UnlikeLast, in_turn), False),
    "arguments kept": (lambda: Stack(Keeping, with_losses), True),
    "autocast in one in the middle": (lambda: Stack(Mixed, in_turn), False),
    "another default type in one in the middle": (lambda: Stack(Wider, in_turn), False),
    "buffers replaced": (lambda: Stack(Replacing, in_turn), False),
    "buffers made": (lambda: Stack(Making, in_turn), False),
    "layers skipped at random": (lambda: Stack(Dropped, in_turn), False),
    "keys of the layer before": (lambda: Stack(Keys, in_turn), False),
    "a dict that is changed and returned": (lambda: Stack(Stateful, returned_state), True),
    "a dict that is changed": (lambda: Stack(Stateful, changed_state), False),
    "a dict that gets a number": (lambda: Stack(Scaling, scale_of_state), True),
    "attributes of tensors": (lambda: Stack(Marking, by_its_mark), False),
    "values beside the result": (lambda: Stack(Telling, with_losses), False),
    "layers without gradient": (lambda: Stack(Counted, without_gradient), False),
    "few layers": (lambda: Stack(Counted, in_turn, 7), False),
}
