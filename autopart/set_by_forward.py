"""Attributes that a model's forward sets to tensors, as layers do with their part of a loss.

A trace leaves tensors without values there, and a program sets none: what a script would read of them, it has to be
told to return.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn

from torch import SymInt, Tensor, nn

from autopart.runtime.errors import NotHereError
from autopart.runtime.not_returned import NotReturned
from autopart.watched_attributes import attributes, dotted


@contextmanager
def without_new_attributes(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Attributes that the modules get inside are taken away again."""
    before = [(vars(module), set(vars(module))) for module in modules]
    try:
        yield
    finally:
        for now, known in before:
            for name in now.keys() - known:
                del now[name]


@dataclass(frozen=True, slots=True)
class SetTensor:
    """An attribute that forward sets to a tensor, or to a list or dict with one.

    path: of its module. with_gradient: a loss can go back through it. is_table: it is of sizes that are the same for
    every batch, as what a forward makes once and keeps.
    """

    path: str
    name: str
    with_gradient: bool
    is_table: bool

    def __str__(self) -> str:
        return dotted(self.path, self.name)


class SetTensors:
    """Attributes of some modules, by path, as a forward begins."""

    def __init__(self, modules: Iterable[tuple[str, nn.Module]]) -> None:
        self._before = [
            (path, module, {name: _items(value) for name, value in attributes(module)})
            for path, module in modules
            if not isinstance(module, nn.RNNBase)  # which keep a list of their weights
        ]
        self._computed = [
            {getattr(hook, "name", "") for hook in module._forward_pre_hooks.values()} for _, module, _ in self._before
        ]

    def found(self) -> tuple[SetTensor, ...]:
        """Those that have other tensors now."""
        found = []
        for (path, module, before), computed in zip(self._before, self._computed, strict=True):
            for name, value in attributes(module):
                if name in computed:  # a weight that weight_norm or spectral_norm makes of others
                    continue
                known = {id(item) for item in before.get(name, ())}
                new = [item for item in _items(value) if isinstance(item, Tensor) and id(item) not in known]
                if new:
                    learned = any(item.requires_grad for item in new)
                    found.append(SetTensor(path, name, learned, not learned and all(map(_is_table, new))))
        return tuple(found)


def _is_table(tensor: Tensor) -> bool:
    return tensor.dim() > 0 and not any(isinstance(size, SymInt) for size in tensor.shape)


def note_on_tensors(found: Sequence[SetTensor]) -> str:
    which = ", ".join(map(str, found[:3])) + (" and others" if len(found) > 3 else "")
    return f"forward sets {which}, which a parallel program does not; what a script reads there, forward has to return"


def _items(value: Any) -> Sequence[Any]:
    return (
        list(value.values()) if isinstance(value, dict) else list(value) if isinstance(value, list | tuple) else [value]
    )


class NotSet(NotReturned):
    """Stands for what forward would have set: raises NotHereError as soon as it is looked into or computed with."""

    __slots__ = ()

    def __init__(self, attribute: str) -> None:
        super().__init__(attribute, "tensor")

    def __repr__(self) -> str:
        return (
            f"the attribute {self.output!r}, a tensor that forward sets, and a parallel program does not: let "
            "forward return it, or add it to the loss inside the model"
        )

    def _computed(self, *_: Any) -> NoReturn:
        raise NotHereError(f"a number is asked of {self!r}")

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _computed
    __neg__ = __pow__ = __float__ = __int__ = _computed

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> NoReturn:
        given = [item for value in (*args, *(kwargs or {}).values()) for item in _items(value)]
        next(item for item in given if isinstance(item, cls))._computed()
        raise AssertionError("unreachable")


class StandIns:
    """For a model's attributes with a gradient, and what was there before; others are tables, or to be looked at."""

    _ABSENT: ClassVar[Any] = object()

    def __init__(self, model: nn.Module, found: Iterable[SetTensor]) -> None:
        modules = dict(model.named_modules())
        self._places = [
            (modules[item.path].__dict__, item.name, str(item))
            for item in found
            if item.with_gradient and item.path in modules
        ]
        self._before = [now.get(name, self._ABSENT) for now, name, _ in self._places]
        self._put()

    def _put(self) -> None:
        for now, name, attribute in self._places:
            now[name] = NotSet(attribute)

    @contextmanager
    def away(self) -> Iterator[None]:
        """Inside, the attributes are as a first forward met them, also for another capture."""
        for (now, name, _), value in zip(self._places, self._before, strict=True):
            if value is self._ABSENT:
                now.pop(name, None)
            else:
                now[name] = value
        try:
            yield
        finally:
            self._put()
