"""Models of alike layers, one of which differs by what neither attributes nor calls of torch functions say; and whether
some of the layers can be copied.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from layer_models import LAYERS, Counted, Stack, in_turn

MIDDLE = LAYERS // 2


class Shifted(Counted):
    def __init__(self, index: int = 0):
        super().__init__(index)
        self.shift: Tensor
        self.register_buffer("shift", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.shift


def shift_written(model: Any, x: Tensor) -> Tensor:
    for layer in model.layers:
        layer.shift.copy_(x.detach().mean((0, 1)))
        x = layer(x)
    return x


def shift_replaced(model: Any, x: Tensor) -> Tensor:
    for layer in model.layers:
        layer.shift = x.detach().mean((0, 1))
        x = layer(x)
    return x


class Writing(Shifted):
    def forward(self, x: Tensor) -> Tensor:
        self.shift.add_(x.detach().mean((0, 1)))
        return super().forward(x)


def shared_by_two() -> nn.Module:
    """The layer that is traced to be copied writes a buffer that the one after it has too."""
    model = Stack(Writing, in_turn)
    layers: Any = model.layers
    layers[2].shift = layers[1].shift
    return model


class Valued(Shifted):
    """Numbers that are values of buffers, of which each has its own symbol."""

    def __init__(self, index: int = 0):
        super().__init__(index)
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.get_buffer("scale").item()


class Chosen(Counted):
    """Returns as many numbers as are positive."""

    def forward(self, x: Tensor) -> Any:
        y = super().forward(x)
        return y, y[y > 0]


def all_chosen(model: Any, x: Tensor) -> Tensor:
    found = []
    for layer in model.layers:
        x, chosen = layer(x)
        found.append(chosen)
    return x + torch.cat(found).sum()


class Times(Counted):
    def forward(self, x: Tensor, times: float = 1.0) -> Tensor:
        return super().forward(x) * times


def minus_zero(model: Any, x: Tensor) -> Tensor:
    for index, layer in enumerate(model.layers):
        x = x + layer(x, -0.0 if index == MIDDLE else 0.0)
    return x


class Changing(Counted):
    """An array that all layers share and each changes."""

    numbers: ClassVar[Any] = np.zeros(4, dtype=np.float32)

    def forward(self, x: Tensor) -> Tensor:
        Changing.numbers += 1
        return super().forward(x) + torch.as_tensor(Changing.numbers, device=x.device)


def changing(model: Any, x: Tensor) -> Tensor:
    Changing.numbers[:] = 0
    return in_turn(model, x)


class Doubling(TorchFunctionMode):
    def __init__(self, function: Any):
        super().__init__()
        self.function = function

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        return result * 2 if function is self.function else result


def in_a_mode(model: Any, x: Tensor) -> Tensor:
    for index, layer in enumerate(model.layers):
        with Doubling(torch.relu if index == MIDDLE else None):
            x = layer(x)
    return x


class OnDefault(Counted):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + torch.ones(4).to(x.device)


def on_devices(model: Any, x: Tensor) -> Tensor:
    for index, layer in enumerate(model.layers):
        with torch.device("cpu" if index == MIDDLE else "meta"):
            x = layer(x)
    return x


class Unseen(Counted):
    """Writes its argument where calls of torch functions are off."""

    def forward(self, x: Tensor) -> Tensor:
        with torch._C.DisableTorchFunction():
            x.mul_(2 if self.layer_idx == MIDDLE else 3)
        return super().forward(x)


def on_a_copy(model: Any, x: Tensor) -> Tensor:
    return in_turn(model, x * 1)


class Offset(Counted):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + int(x.storage_offset()))


def sliced(model: Any, x: Tensor) -> Tensor:
    for index, layer in enumerate(model.layers):
        x = layer(F.pad(x, (0, 4))[..., 0 if index == MIDDLE else 1 :][..., :4])
    return x


class Viewed(Counted):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 if x._base is None else 2)


def one_viewed(model: Any, x: Tensor) -> Tensor:
    for index, layer in enumerate(model.layers):
        x = layer(x.view(x.shape) if index == MIDDLE else x)
    return x


class Trying(Counted):
    """Does something else in the middle, and goes on without where that fails."""

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(x)
        with suppress(Exception):
            y = y.tanh_() if self.layer_idx == MIDDLE else y.relu_()
        return self.inner(y)


class Gain(Counted):
    def __init__(self, index: int = 0):
        super().__init__(index)
        self.gain = nn.Parameter(torch.ones(4))


def by_get(model: Any, x: Tensor) -> Tensor:
    for layer in model.layers:
        x = layer(x) * (1 if layer._parameters.get("gain") is None else 2)
    return x


def by_names(model: Any, x: Tensor) -> Tensor:
    for layer in model.layers:
        x = layer(x) * (1 + len(layer._parameters | {}))
    return x


class Keyed(Counted):
    def forward(self, x: Tensor) -> Any:
        return {True if self.layer_idx == MIDDLE else 1: super().forward(x)}


def by_key(model: Any, x: Tensor) -> Tensor:
    for layer in model.layers:
        ((key, x),) = layer(x).items()
        x = x * 2 if key is True else x
    return x


class Giving(Counted):
    """Returns its own weight too."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x), self.inner.weight


def by_class(model: Any, x: Tensor) -> Tensor:
    for layer in model.layers:
        x, weight = layer(x)
        x = x * 2 if isinstance(weight, nn.Parameter) else x
    return x


class Ending(Counted):
    def __init__(self, end: nn.Module, index: int = 0):
        super().__init__(index)
        self.end = end

    def forward(self, x: Tensor) -> Tensor:
        return self.end(super().forward(x))


def with_one_end() -> nn.Module:
    """One module in all layers: export says otherwise than else where ops come from."""
    end = nn.Linear(4, 4)
    return Stack(lambda index: Ending(end, index), in_turn)


HIDDEN: dict[str, tuple[Callable[[], nn.Module], bool]] = {
    "buffers written by the model": (lambda: Stack(Shifted, shift_written), False),
    "buffers replaced by the model": (lambda: Stack(Shifted, shift_replaced), False),
    "buffers written by each": (lambda: Stack(Writing, in_turn), True),
    "a buffer that two share": (shared_by_two, False),
    "values as numbers": (lambda: Stack(Valued, in_turn), False),
    "sizes by values": (lambda: Stack(Chosen, all_chosen), False),
    "minus zero": (lambda: Stack(Times, minus_zero), True),
    "an array that changes": (lambda: Stack(Changing, changing), False),
    "modes around layers": (lambda: Stack(Counted, in_a_mode), True),
    "default devices around layers": (lambda: Stack(OnDefault, on_devices), True),
    "writes that are not seen": (lambda: Stack(Unseen, on_a_copy), False),
    "offsets of arguments": (lambda: Stack(Offset, sliced), False),
    "whether an argument is a view": (lambda: Stack(Viewed, one_viewed), False),
    "another try in the middle": (lambda: Stack(Trying, in_turn), False),
    "asking for a parameter": (lambda: Stack(Gain, by_get), True),
    "asking for names": (lambda: Stack(Gain, by_names), True),
    "True for 1 as a key": (lambda: Stack(Keyed, by_key), False),
    "parameters returned": (lambda: Stack(Giving, by_class), False),
    "one module in all layers": (with_one_end, False),
}
