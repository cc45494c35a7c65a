"""Plain attributes of a model that a script sets once it is planned (``dropout.p = 0.2``, ``eval()`` of one module).

A program goes on with what its capture read. Each call looks whether that still is so, which for 10,000 attributes
takes a millisecond.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from autopart.alike_layers import IN_EVERY_MODULE

_PLAIN = (bool, int, float, complex, str, type(None), torch.dtype)
_CODE = (FunctionType, BuiltinFunctionType, MethodType)


def attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Those of its own: of all modules, hooks and the like, left out."""
    return ((name, value) for name, value in vars(module).items() if name not in IN_EVERY_MODULE)


def dotted(path: str, name: str) -> str:
    """path: of a module."""
    return f"{path}.{name}" if path else name


class Watched:
    """Plain attributes of modules, as a capture read them. roots: a model and its loss, by path."""

    def __init__(self, roots: Mapping[str, nn.Module]) -> None:
        self._known = [
            (path, vars(module), _plain(module))
            for prefix, root in roots.items()
            for path, module in root.named_modules(prefix=prefix)
        ]

    def warn_of_changes(self) -> None:
        """Warns of each attribute that is another now, once."""
        for path, now, known in self._known:
            changed = [name for name, value in known.items() if now.get(name, value) is not value]
            for name in changed:
                before = known.pop(name)
                if now[name] != before or type(now[name]) is not type(before):
                    warnings.warn(_told(path, name, before, now[name]), stacklevel=7)  # where the model is called


def _plain(module: nn.Module) -> dict[str, Any]:
    found = {name: value for name, value in attributes(module) if type(value) in _PLAIN or isinstance(value, _CODE)}
    return {"training": module.training, **found}


def _told(path: str, name: str, before: Any, now: Any) -> str:
    text = f"{dotted(path, name)} was {before!r} when the model was captured, and is {now!r} now"
    if name == "training":
        return (
            f"{text}, which its program does not see; call train() and eval() of what parallelize returned, and set "
            "the mode of single modules before its first call"
        )
    return (
        f"{text}; its program goes on with {before!r}. Set attributes before the first call, or make the number a "
        "buffer or an input of forward"
    )
