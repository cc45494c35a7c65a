"""Hooks of tensors that do not keep alive what they call, and are not called without a gradient."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any
from weakref import WeakMethod

from torch import Tensor

_WRAPPED = "passes_over_none"
"""The attribute of hooks that are not called without a gradient."""


def weakly(method: Callable[..., None], *first: object) -> Callable[..., None]:
    """Calls the method, with these arguments and then its own, as long as there is its object.

    Autograd holds a tensor's hooks where the garbage collector does not look: an object that a hook holds would never
    be freed, and neither would the tensors that it holds.
    """
    found = WeakMethod(method)

    def call(*args: Any) -> None:
        if (alive := found()) is not None:
            alive(*first, *args)

    return call


def pass_over_none(tensor: Tensor) -> None:
    """From now on the tensor's hooks are not called without a gradient.

    autograd calls them with None where a Function gives a tensor none, and not at all where torch's own ops do not
    reach it. Another part of the same backward may reach it still.
    """
    _wrap(tensor._backward_hooks or {}, _if_given)
    accumulated = tensor._post_accumulate_grad_hooks or {}
    if any(not hasattr(hook, _WRAPPED) for hook in accumulated.values()):
        arrival = _Arrival()
        tensor.register_hook(arrival)
        _wrap(accumulated, lambda hook: _if_arrived(hook, arrival))


class _Arrival:
    """Whether a gradient came last. A hook, called before those of what is accumulated."""

    passes_over_none = True

    def __init__(self) -> None:
        self.given = False

    def __call__(self, gradient: Tensor | None) -> None:
        self.given = gradient is not None


def _wrap(hooks: dict[int, Any], wrapper: Callable[[Any], Any]) -> None:
    for key, hook in [*hooks.items()]:
        if not hasattr(hook, _WRAPPED):
            hooks[key] = wrapper(hook)
            setattr(hooks[key], _WRAPPED, True)


def _if_given(hook: Callable[[Tensor], Any]) -> Callable[[Tensor | None], Any]:
    @functools.wraps(hook)
    def call(gradient: Tensor | None) -> Any:
        return None if gradient is None else hook(gradient)

    return call


def _if_arrived(hook: Callable[[Tensor], None], arrival: _Arrival) -> Callable[[Tensor], None]:
    @functools.wraps(hook)
    def call(tensor: Tensor) -> None:
        if arrival.given:
            hook(tensor)

    return call
