"""Which layers of a model are built alike, so that a trace of a few of them says what the others compute."""

from __future__ import annotations

import functools
from collections.abc import Hashable, Iterator
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from autopart.divided_original import Refusal

# Fewer are traced as they are: two of a group are traced in any case.
AT_LEAST = 8
_PLAIN = (type(None), bool, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)
# An int, whatever its value: those of all layers are compared later.
_INT = "an int"
IN_EVERY_MODULE = frozenset(vars(nn.Module()))


def alike_layers(root: nn.Module) -> list[list[nn.Module]]:
    """Groups of at least AT_LEAST modules of one ModuleList or Sequential that are built alike, in its order.

    Alike are modules with the same tree of classes, the same names, shapes, types and ties of parameters and buffers,
    and the same plain attributes; integers may also count up with the place in the list, as ``layer_idx`` does. Other
    objects have to be the same ones. Modules without children are no layers, and groups are not looked for in groups.
    """
    found: list[list[nn.Module]] = []
    seen: set[int] = set()

    def walk(module: nn.Module) -> None:
        if id(module) in seen:
            return
        seen.add(id(module))
        taken: set[int] = set()
        if isinstance(module, nn.ModuleList | nn.Sequential):
            for group in _groups(list(module)):
                found.append(group)
                taken.update(map(id, group))
        for child in module.children():
            if id(child) not in taken:
                walk(child)

    walk(root)
    return found


def _groups(modules: list[nn.Module]) -> Iterator[list[nn.Module]]:
    by_build: dict[Hashable, list[tuple[int, nn.Module, list[int]]]] = {}
    for place, module in enumerate(modules):
        if any(True for _ in module.children()) and all(module is not other for other in modules[:place]):
            numbers: list[int] = []
            by_build.setdefault(_Build(module, numbers).key(), []).append((place, module, numbers))
    for items in by_build.values():
        columns = [
            column
            for column in range(len(items[0][2]))
            if len({numbers[column] for _, _, numbers in items}) > 1
            and len({numbers[column] - place for place, _, numbers in items}) > 1
        ]
        same: dict[tuple[int, ...], list[nn.Module]] = {}
        for _, module, numbers in items:
            same.setdefault(tuple(numbers[column] for column in columns), []).append(module)
        yield from (group for group in same.values() if len(group) >= AT_LEAST)


class _Build:
    """How a module is built, as a key; the integers among its attributes are appended to ``numbers``."""

    def __init__(self, module: nn.Module, numbers: list[int]):
        self.module = module
        self.numbers = numbers
        # Modules and tensors of the layer: what its attributes refer to is the same place in each layer.
        self.places: dict[int, str] = {}
        for name, part in module.named_modules(remove_duplicate=False):
            self.places.setdefault(id(part), f"module {name}")
        for name, tensor in self.tensors():
            self.places.setdefault(id(tensor), f"tensor {name}")

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield from self.module.named_parameters(remove_duplicate=False)
        yield from self.module.named_buffers(remove_duplicate=False)

    def key(self) -> Hashable:
        parts = [
            (name, type(part), self.places[id(part)], self.attributes(part))
            for name, part in self.module.named_modules(remove_duplicate=False)
        ]
        tensors = [
            (name, type(item), tuple(item.shape), item.stride(), item.dtype, item.device, item.requires_grad, place)
            for name, item in self.tensors()
            for place in [self.places[id(item)]]
        ]
        return tuple(parts), tuple(tensors)

    def attributes(self, part: nn.Module) -> Hashable:
        found: list[Hashable] = [part.training, frozenset(part._non_persistent_buffers_set)]
        for name, value in sorted(vars(part).items()):
            if name not in IN_EVERY_MODULE:
                found.append((name, self.value(value)))
            elif "_hooks" in name and not all(isinstance(hook, Refusal) for hook in value.values()):
                found.append(id(part))  # what a hook does may differ from layer to layer
        return tuple(found)

    def value(self, value: Any) -> Hashable:
        if type(value) is int:
            self.numbers.append(value)
            return _INT
        if isinstance(value, _PLAIN):
            return type(value), repr(value)
        if id(value) in self.places:
            return self.places[id(value)]
        if type(value) in (list, tuple):
            return type(value), tuple(self.value(item) for item in value)
        if type(value) is dict:
            return dict, tuple((repr(key), self.value(item)) for key, item in value.items())
        if type(value) in (set, frozenset):
            return type(value), tuple(sorted(map(repr, value)))
        if isinstance(value, MethodType):
            return id(value.__func__), self.value(value.__self__)
        if isinstance(value, functools.partial):
            return self.value(value.func), self.value(value.args), self.value(value.keywords)
        return id(value)
