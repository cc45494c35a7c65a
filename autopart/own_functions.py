"""Whether a ``torch.autograd.Function``'s backward is the derivative of its forward, which is what a program has.

Both are run once on drawn numbers of the shapes that the model gives it: the Function as it is, and its forward with
autograd. A straight-through estimator, or a reversed gradient, is told so; a Function that only saves memory is not. So
is a hook that changes the gradient that it is given.
"""

from __future__ import annotations

import dis
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_MOST_NUMBERS = 2**22
"""Of all inputs, beyond which nothing is run."""
_TOLERANCE = {torch.float64: 1e-7, torch.float32: 1e-3}
_COARSE = 0.05
"""Of narrower types."""
_SPEAKS = ("distributed", "dist", "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "isend")
"""Names in the code of a Function that speaks to other processes, which need not run it here."""


@dataclass(frozen=True, slots=True)
class Applied:
    """A Function with what it was applied to: of tensors shape, type and whether they have a gradient."""

    function: Any
    arguments: tuple[Any, ...]

    @staticmethod
    def of(function: Any, arguments: Sequence[Any]) -> Applied:
        def plain(item: Any) -> Any:
            return (
                _Like.of(item) if isinstance(item, Tensor) else _size(item) if isinstance(item, torch.SymInt) else item
            )

        return Applied(function, tuple(map(plain, arguments)))

    def differs(self) -> bool | None:
        """None: it cannot be run here, or is not, as it is large, speaks to other processes, or is given what it may
        change, such as modules, whose parameters a backward may add gradients to.
        """
        tensors = [item for item in self.arguments if isinstance(item, _Like)]
        large = sum(item.numbers for item in tensors) > _MOST_NUMBERS
        if large or _speaks(self.function) or not all(map(_is_plain, self.arguments)):
            return None
        try:
            with torch.random.fork_rng(devices=[]), torch.enable_grad(), torch.autocast("cpu", enabled=False):
                own = self._gradients(self.function.apply)
                derived = self._gradients(self._forward)
        except Exception:  # a kernel of another device, or indices that numbers drawn here are not
            return None
        if not all(bool(part.isfinite().all()) for part in (*own, *derived)):
            return None
        return any(_far(one, other) for one, other in zip(own, derived, strict=True))

    def _gradients(self, function: Any) -> list[Tensor]:
        """Of drawn sums of what it returns, the same at each call, by every input that has a gradient."""
        torch.manual_seed(0)
        arguments = [item.drawn() if isinstance(item, _Like) else item for item in self.arguments]
        inputs = [item for item in arguments if isinstance(item, Tensor) and item.requires_grad]
        # what is written in place is no leaf
        found = function(*(item.clone() if isinstance(item, Tensor) else item for item in arguments))
        results = [item for item in (found if isinstance(found, tuple | list) else [found]) if isinstance(item, Tensor)]
        summed = [(item * torch.randn_like(item)).sum() for item in results if item.requires_grad]
        if not summed or not inputs:
            return [torch.zeros_like(item) for item in inputs]
        made = torch.autograd.grad(sum(summed[1:], summed[0]), inputs, allow_unused=True)
        return [torch.zeros_like(item) if part is None else part for item, part in zip(inputs, made, strict=True)]

    def _forward(self, *arguments: Any) -> Any:
        """Without the Function's backward."""
        apart = self.function.setup_context is not torch.autograd.Function.setup_context
        return self.function.forward(*(() if apart else (_Context(len(arguments)),)), *arguments)


@dataclass(frozen=True, slots=True)
class Hook:
    """On a tensor's gradient. like: the tensor."""

    called: Any
    like: _Like

    @staticmethod
    def of(tensor: Tensor, hook: Any) -> Hook:
        return Hook(hook, _Like.of(tensor))

    def changes(self) -> bool:
        """Whether it surely makes another gradient of a drawn one, which is the only one that it is given."""
        if self.like.numbers > _MOST_NUMBERS:
            return False
        try:
            with torch.random.fork_rng(devices=[]), torch.no_grad():
                gradient = self.like.drawn().detach()
                given = gradient.clone()
                found = self.called(given)
        except Exception:  # what it is for is not to be had here
            return False
        made = given if found is None else found
        return not (isinstance(made, Tensor) and made.shape == gradient.shape and torch.equal(made, gradient))


@dataclass(frozen=True, slots=True)
class _Like:
    shape: tuple[int, ...]
    dtype: torch.dtype
    trained: bool

    @staticmethod
    def of(tensor: Tensor) -> _Like:
        return _Like(tuple(map(_size, tensor.shape)), tensor.dtype, tensor.requires_grad)

    @property
    def numbers(self) -> int:
        return torch.Size(self.shape).numel()

    def drawn(self) -> Tensor:
        if not (self.dtype.is_floating_point or self.dtype.is_complex):
            return torch.ones(self.shape, dtype=self.dtype)
        return torch.randn(self.shape, dtype=self.dtype).requires_grad_(self.trained)


def _size(value: int | torch.SymInt) -> int:
    """Of a symbol what it is at capture."""
    return int(value.node.hint or 1) if isinstance(value, torch.SymInt) else value


class _Context:
    """What a forward may ask of its context."""

    def __init__(self, inputs: int) -> None:
        self.needs_input_grad = (True,) * inputs

    def save_for_backward(self, *tensors: Any) -> None: ...

    def save_for_forward(self, *tensors: Any) -> None: ...

    def mark_dirty(self, *tensors: Any) -> None: ...

    def mark_non_differentiable(self, *tensors: Any) -> None: ...

    def set_materialize_grads(self, value: bool) -> None: ...


def _is_plain(argument: Any) -> bool:
    if isinstance(argument, tuple | list):
        return all(map(_is_plain, argument))
    return isinstance(argument, _Like | int | float | complex | str | torch.dtype | None)


def _far(own: Tensor, derived: Tensor) -> bool:
    tolerance = _TOLERANCE.get(own.dtype, _COARSE)
    largest = max(float(own.abs().max()), float(derived.abs().max())) if own.numel() else 0.0
    return bool((own - derived).abs().max() > tolerance * largest) if largest else False


def _speaks(function: Any) -> bool:
    parts = (function.forward, function.backward, function.setup_context)
    codes = [part.__code__ for part in parts if isinstance(part, types.FunctionType)]
    return any(name in _SPEAKS for code in codes for name in _names(code))


def _names(code: types.CodeType) -> Iterator[str]:
    for step in dis.get_instructions(code):
        if isinstance(step.argval, str):
            yield step.argval
        elif isinstance(step.argval, types.CodeType):
            yield from _names(step.argval)
