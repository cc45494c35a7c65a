"""What a module's attributes hold, in forms that are equal for a deep copy of the model.

A copy has other objects where attributes lead to the model's own tensors and modules, as recurrent modules keep lists
of their weights, and where classes say nothing of when their objects are equal, as of many configurations.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from functools import partial
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

_BY_IDENTITY = (type, FunctionType, ModuleType)


@dataclass(frozen=True, slots=True)
class _Own:
    """A module, parameter or buffer of the model."""

    name: str


@dataclass(frozen=True, slots=True, eq=False)
class _Numbers:
    tensor: Tensor

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Numbers) or self.tensor.dtype != other.tensor.dtype:
            return False
        return self.tensor is other.tensor or torch.equal(self.tensor, other.tensor)

    __hash__ = None  # type: ignore[assignment]


class Forms:
    """Of the attributes of a model's modules."""

    def __init__(self, model: nn.Module) -> None:
        self._own = {id(module): _Own(path) for path, module in model.named_modules()}
        for named in (model.named_parameters(), model.named_buffers()):
            self._own.update({id(tensor): _Own(name) for name, tensor in named})

    def of(self, value: Any) -> Any:
        return self._form(value, ())

    def _form(self, value: Any, around: tuple[int, ...]) -> Any:
        """around: the objects that hold this one."""
        if id(value) in self._own:
            return self._own[id(value)]
        if id(value) in around:
            return _Own(f"{around.index(id(value))} of those around it")
        if isinstance(value, Tensor):
            return _Numbers(value)
        inside = partial(self._form, around=(*around, id(value)))
        if isinstance(value, dict):
            return type(value), {name: inside(item) for name, item in value.items()}
        if isinstance(value, list | tuple):
            return type(value), [inside(item) for item in value]
        if isinstance(value, weakref.ref):
            return weakref.ref, inside(value())
        if isinstance(value, MethodType):
            return value.__func__, inside(value.__self__)
        if isinstance(value, partial):
            return partial, inside(value.func), inside(value.args), inside(value.keywords)
        if _is_plain(value):
            return type(value), inside(value.__reduce_ex__(2)[2])
        return value


def _is_plain(value: Any) -> bool:
    """Whether it is an object of a class that says neither what is equal to it nor how it is copied."""
    own = (getattr(type(value), name) is getattr(object, name) for name in ("__eq__", "__reduce_ex__", "__reduce__"))
    return (
        not isinstance(value, _BY_IDENTITY)
        and all(own)
        and not hasattr(value, "__deepcopy__")
        and hasattr(value, "__dict__")
    )
