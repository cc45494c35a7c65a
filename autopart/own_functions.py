"""Whether a ``torch.autograd.Function``'s backward is the derivative of its forward, which is what a program has.

Both are run once on drawn numbers of the shapes that the model gives it: the Function as it is, and its forward with
autograd. A Function that only saves memory has the same. Straight-through estimators and reversed gradients scale what
they are given, which tensor ops do as well; others are refused, and hooks that change the gradient that they are given.
"""

from __future__ import annotations

import dis
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum, auto
from typing import Any

import torch
from torch import Tensor, nn

_MOST_NUMBERS = 2**22
_SMALL = 16
"""Of all inputs, beyond which large sizes are taken to be about the latter."""
_TOLERANCE = {torch.float64: 1e-7, torch.float32: 1e-3}
_COARSE = 0.05
"""Of narrower types."""
_SPEAKS = ("distributed", "dist", "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "isend")
"""Names in the code of a Function that speaks to other processes, which need not run it here."""


class Backward(StrEnum):
    """Of a Function. DERIVED: its forward's derivative. SCALED: the gradient times numbers that do not depend on it.
    OTHER: neither.
    """

    DERIVED = auto()
    SCALED = auto()
    OTHER = auto()
    UNKNOWN = auto()


@dataclass(frozen=True, slots=True)
class Applied:
    """A Function with what it was applied to: of tensors shape, type and whether they have a gradient."""

    function: Any
    arguments: tuple[Any, ...]

    @staticmethod
    def of(function: Any, arguments: Sequence[Any]) -> Applied:
        return Applied(function, tuple(map(_described, arguments)))

    def backward(self) -> Backward:
        """What is found of its backward. UNKNOWN: it cannot be run here, or is not, as it speaks to other processes, or
        is given what it may change, such as modules, whose parameters a backward may add gradients to.
        """
        if _speaks(self.function) or not all(map(_is_plain, self.arguments)):
            return Backward.UNKNOWN
        context, arguments = _Context(len(self.arguments)), _small(self.arguments)

        def forward(*given: Any) -> Any:
            return _applied(self.function, context, given)

        try:
            with torch.random.fork_rng(devices=[]), torch.enable_grad(), torch.autocast("cpu", enabled=False):
                inputs, result, given, own = _run(self.function.apply, arguments)
                derived = _run(forward, arguments)[-1]
                alike = isinstance(result, Tensor) and all(item.shape == result.shape for item in inputs)
                ones = _run(self.function.apply, arguments, ones=True)[-1] if alike else []
        except Exception:  # a kernel of another device, or indices that numbers drawn here are not
            return Backward.UNKNOWN
        if not all(bool(part.isfinite().all()) for part in (*own, *derived, *ones)):
            return Backward.UNKNOWN
        if not _far(own, derived):
            return Backward.DERIVED
        scaled = alike and not context.writes and not _far(own, [part * given[0] for part in ones])
        return Backward.SCALED if scaled else Backward.OTHER


def _run(
    function: Any, described: Sequence[Any], ones: bool = False
) -> tuple[list[Tensor], Any, list[Tensor], list[Tensor]]:
    """Inputs that have a gradient, the result, gradients that are given for what has one in it, and the inputs'.

    All is drawn, the same at each call; ones: given is 1.
    """
    torch.default_generator.manual_seed(0)  # of a GPU's nothing is drawn, nor changed
    arguments = [item.drawn() if isinstance(item, _Like) else item for item in described]
    inputs = [item for item in arguments if isinstance(item, Tensor) and item.requires_grad]
    # what is written in place is no leaf
    found = function(*(item.clone() if isinstance(item, Tensor) else item for item in arguments))
    results = [item for item in (found if isinstance(found, tuple | list) else [found]) if isinstance(item, Tensor)]
    results = [item for item in results if item.requires_grad]
    given = [torch.ones_like(item) if ones else torch.randn_like(item) for item in results]
    made = torch.autograd.grad(results, inputs, given, allow_unused=True) if results else [None] * len(inputs)
    own = [torch.zeros_like(item) if part is None else part for item, part in zip(inputs, made, strict=True)]
    return inputs, found, given, own


def with_scaled_gradient(function: Any, arguments: Sequence[Any]) -> Tensor:
    """What a Function of a scaled backward returns, as tensor ops with its gradients: where these are m times the given

    f(x) + (m x - [m x]),    m = the backward of ones, [...] without a gradient.
    """
    context = _Context(len(arguments))
    apart = [item.detach() if isinstance(item, Tensor) else item for item in arguments]
    result: Tensor = _applied(function, context, apart)
    made = function.backward(context, torch.ones_like(result))
    for item, factor in zip(arguments, made if isinstance(made, tuple) else (made,), strict=False):
        if isinstance(item, Tensor) and item.requires_grad and factor is not None:
            scaled = factor.detach() * item
            result = result + (scaled - scaled.detach())
    return result


def _applied(function: Any, context: _Context, arguments: Sequence[Any]) -> Any:
    """The forward's result, with what the backward needs in the context."""
    if function.setup_context is torch.autograd.Function.setup_context:
        return function.forward(context, *arguments)
    found = function.forward(*arguments)
    function.setup_context(context, tuple(arguments), found)
    return found


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
        (like,) = _small([self.like])
        try:
            with torch.random.fork_rng(devices=[]), torch.no_grad():
                gradient = like.drawn().detach()
                given = gradient.clone()
                found = self.called(given)
        except Exception:  # what it is for is not to be had here
            return False
        made = given if found is None else found
        return not (isinstance(made, Tensor) and made.shape == gradient.shape and torch.equal(made, gradient))


@dataclass(frozen=True, slots=True)
class ModuleHook:
    """On the gradients of a module. before: given those of its outputs alone. inputs, outputs: None for no tensor."""

    called: Any
    module: nn.Module
    before: bool
    inputs: tuple[_Like | None, ...]
    outputs: tuple[_Like | None, ...]

    @staticmethod
    def of(called: Any, module: nn.Module, before: bool, inputs: Sequence[Any], outputs: Sequence[Any]) -> ModuleHook:
        """inputs, outputs: of the module, in a tuple each."""
        given, made = (
            tuple(_Like.of(item) if isinstance(item, Tensor) else None for item in items) for items in (inputs, outputs)
        )
        return ModuleHook(called, module, before, given, made)

    def changes(self) -> bool:
        """Whether it surely gives other gradients than the drawn ones that it is given."""
        likes = _small([*self.inputs, *self.outputs])
        try:
            with torch.random.fork_rng(devices=[]), torch.no_grad():
                drawn = [like.drawn().detach() if like is not None and like.trained else None for like in likes]
                into, out = tuple(drawn[: len(self.inputs)]), tuple(drawn[len(self.inputs) :])
                given = out if self.before else into
                known = [None if item is None else item.clone() for item in given]
                found = self.called(self.module, out) if self.before else self.called(self.module, into, out)
        except Exception:  # what it is for is not to be had here
            return False
        made = given if found is None else found if isinstance(found, tuple) else (found,)
        return len(made) == len(known) and not all(
            old is None or (isinstance(new, Tensor) and new.shape == old.shape and torch.equal(new, old))
            for new, old in zip(made, known, strict=True)
        )


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


def _described(argument: Any) -> Any:
    if isinstance(argument, Tensor):
        return _Like.of(argument)
    return _size(argument) if isinstance(argument, torch.SymInt) else argument


def _small(arguments: Sequence[Any]) -> list[Any]:
    """With fewer numbers where they are many: every size that is large, the same wherever it is."""
    tensors = [item for item in arguments if isinstance(item, _Like)]
    if sum(item.numbers for item in tensors) <= _MOST_NUMBERS:
        return list(arguments)
    large = sorted({size for item in tensors for size in item.shape if size > _SMALL})
    less = {size: _SMALL + number for number, size in enumerate(large)}

    def small(item: Any) -> Any:
        return (
            replace(item, shape=tuple(less.get(size, size) for size in item.shape)) if isinstance(item, _Like) else item
        )

    return list(map(small, arguments))


def _size(value: int | torch.SymInt) -> int:
    """Of a symbol what it is at capture."""
    return int(value.node.hint or 1) if isinstance(value, torch.SymInt) else value


class _Context:
    """What a forward may ask of its context."""

    saved_tensors: tuple[Any, ...] = ()

    def __init__(self, inputs: int) -> None:
        self.needs_input_grad, self.writes = (True,) * inputs, False

    def save_for_backward(self, *tensors: Any) -> None:
        self.saved_tensors = tensors

    def save_for_forward(self, *tensors: Any) -> None: ...

    def mark_dirty(self, *tensors: Any) -> None:
        self.writes = True

    def mark_non_differentiable(self, *tensors: Any) -> None: ...

    def set_materialize_grads(self, value: bool) -> None: ...


def _is_plain(argument: Any) -> bool:
    if isinstance(argument, tuple | list):
        return all(map(_is_plain, argument))
    return isinstance(argument, _Like | int | float | complex | str | torch.dtype | None)


def _far(own: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    return any(_differs(one, other) for one, other in zip(own, others, strict=True))


def _differs(own: Tensor, other: Tensor) -> bool:
    largest = max(float(own.abs().max()), float(other.abs().max())) if own.numel() else 0.0
    return bool((own - other).abs().max() > _TOLERANCE.get(own.dtype, _COARSE) * largest) if largest else False


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
