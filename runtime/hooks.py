"""Hooks of tensors that do not keep alive what they call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakMethod


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
