"""What a model's forward changes beside its result, put back: copying layers may run it once more than a trace."""

from __future__ import annotations

import random
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn

from autopart.alike_layers import IN_EVERY_MODULE

_DICTS = (dict, OrderedDict, defaultdict)
# Of these the attributes are not looked at: what they hold is not the model's.
_OTHERS = (type, torch.Tensor, ModuleType, FunctionType, MethodType, BuiltinFunctionType)
_DEPTH = 4  # a dict in an object of a module's, and what it holds


@contextmanager
def kept_attributes(layers: Sequence[nn.Module]) -> Iterator[None]:
    """Attributes of the layers' modules are put back, also lists and dicts that change, as export does where it sees
    the modules.
    """
    before = [
        (module, name, value, value.copy() if type(value) in (list, dict) else None)
        for layer in layers
        for module in layer.modules()
        for name, value in vars(module).items()
        if name not in IN_EVERY_MODULE
    ]
    try:
        yield
    finally:
        for module, name, value, content in before:
            vars(module)[name] = value if content is None or _same(value, content) else content


@contextmanager
def undone_where_it_fails(root: nn.Module) -> Iterator[None]:
    """Where an exception comes out, the model is as before, and so are the generators of torch, Python and NumPy.

    Put back are tensors and attributes of its modules, and the lists, dicts and objects that these hold: a fake tensor
    that a forward kept there would be taken for a value by the next trace. What is kept elsewhere stays.
    """
    before = [(container, container.copy()) for container in _containers(root)]
    python, numpy, torch_state = random.getstate(), np.random.get_state(), torch.default_generator.get_state()
    try:
        yield
    except BaseException:
        for container, content in before:
            if not _same(container, content):
                container.clear()
                container.extend(content) if isinstance(container, list) else container.update(content)
        random.setstate(python)
        np.random.set_state(numpy)
        torch.default_generator.set_state(torch_state)
        raise


def _same(container: Any, content: Any) -> bool:
    """Whether a list or dict has these very items."""
    if len(container) != len(content):
        return False
    if isinstance(container, list):
        return all(item is other for item, other in zip(container, content, strict=True))
    return all(key in container and container[key] is item for key, item in content.items())


def _containers(root: nn.Module) -> list[Any]:
    """Lists and dicts that a model holds, attributes of its modules and of other objects among them."""
    found: list[Any] = []
    seen: set[int] = set()

    def look(value: Any, depth: int) -> None:
        if isinstance(value, nn.Module):
            depth = _DEPTH
        if depth == 0 or id(value) in seen:
            return
        inside = value
        if type(value) is not list and type(value) not in _DICTS:
            inside = None if isinstance(value, _OTHERS) else getattr(value, "__dict__", None)
        if inside is None or (type(inside) is not list and type(inside) not in _DICTS):
            return
        seen.add(id(value))
        found.append(inside)
        for item in inside if isinstance(inside, list) else inside.values():
            look(item, depth - 1)

    look(root, _DEPTH)
    return found
