"""Float64 throughout: the precision in which a parallel program and its original can be compared closely.

A model converted with ``.double()`` is not yet computed in float64: libraries widen their half-precision models by
asking for float32 by name (transformers' losses, RMS norms, routers and rotary tables do), which in a float64 model
narrows instead. Sums then differ in the seventh digit when they are split over microbatches or ranks.

    with float64_throughout():          # around capture
        program = capture(model, args, kwargs)
    with eager_in_float64(model):       # around the original, run in one process
        loss = model(*args, **kwargs).loss

What is captured inside holds float64 by itself: emitted code needs no context.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.meta_utils import MetaConverter
from torch.overrides import TorchFunctionMode

from autopart.lost_weights import weights_kept
from autopart.passes.default_dtype import default_dtype


class _Widen(TorchFunctionMode):
    """Every float32 that is asked for by name becomes float64, and complex numbers of two of these."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        return func(*map(_widen, args), **{name: _widen(value) for name, value in (kwargs or {}).items()})


_WIDER = {torch.float32: torch.float64, torch.complex64: torch.complex128}


def _widen(argument: object) -> object:
    return _WIDER.get(argument, argument) if isinstance(argument, torch.dtype) else argument


def in_float64(tensor: Tensor) -> Tensor:
    """The same numbers in 64 bits, each part of them if they are complex."""
    return tensor.to(torch.complex128) if tensor.is_complex() else tensor.double()


@contextlib.contextmanager
def float64_throughout() -> Iterator[None]:
    """Inside, conversions to float32 and tensors made as float32 are float64. For models whose weights are float64.

    So is torch's default type: float64's least number, by which masks are multiplied, does not fit into float32.
    """
    with default_dtype(torch.float64), _constants_as_they_are(), weights_kept(), _Widen():
        yield


@contextlib.contextmanager
def _constants_as_they_are() -> Iterator[None]:
    """Inside, export's own copies of tensors without values are of their types, as it asserts: of a float32 tensor that
    a model keeps as a plain attribute too.
    """
    convert = MetaConverter.__call__

    def as_it_is(self: MetaConverter[Any], *args: Any, **kwargs: Any) -> Any:
        with torch._C.DisableTorchFunction():
            return convert(self, *args, **kwargs)

    with mock.patch.object(MetaConverter, "__call__", as_it_is):
        yield


@contextlib.contextmanager
def eager_in_float64(model: nn.Module) -> Iterator[nn.Module]:
    """Runs a float64 model eagerly in float64 throughout; a model of another precision is left alone.

    transformers computes a mixture of experts as one grouped matrix product, which torch offers up to float32 only (a
    captured graph holds transformers' own op instead, which has no such limit). Inside the context the experts are a
    loop, which cannot be captured.
    """
    if all(parameter.dtype != torch.float64 for parameter in model.parameters()):
        yield model
        return
    chosen = getattr(getattr(model, "config", None), "_experts_implementation", None)
    select = getattr(model, "set_experts_implementation", None)
    with contextlib.ExitStack() as stack:
        if chosen == "grouped_mm" and select is not None:
            select("eager")
            stack.callback(select, chosen)
        stack.enter_context(float64_throughout())
        yield model
