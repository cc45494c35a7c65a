"""Parts of a model that a script changes once it is planned: hooks, modules, parameters, tensors it keeps, buffers.

A program has the code of the modules that were captured, with what their hooks compute, and calls none. So what is set
since is told of, once. Values of buffers are the exception: the program's own take them on, whatever way they are set.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from autopart.watched_attributes import attributes, dotted

_HOOKS = {
    "_forward_pre_hooks": "a hook before forward",
    "_forward_hooks": "a hook on forward",
    "_backward_pre_hooks": "a hook on gradients",
    "_backward_hooks": "a hook on gradients",
}
_MEMBERS = ("_modules", "_parameters")
_GOES_ON = "which its program does not see"
_BEFORE = "do that before the first call"


class WatchedParts:
    """Of modules, as a capture read them. roots: a model and its loss, by path."""

    def __init__(self, roots: Mapping[str, nn.Module]) -> None:
        modules = [item for prefix, root in roots.items() for item in root.named_modules(prefix=prefix)]
        self._modules = modules
        self._own = [vars(module) for _, module in modules]
        self._names = [set(own) for own in self._own]
        self._counts = [len(own) for own in self._own]
        self._classes = [type(module) for _, module in modules]
        hooks = [(path, name, vars(module)[name]) for path, module in modules for name in _HOOKS]
        self._unhooked = [(path, name, table) for path, name, table in hooks if not table]
        self._empty = [table for *_, table in self._unhooked]
        self._hooked = [(path, name, table, tuple(table)) for path, name, table in hooks if table]
        tables = [(path, own[name]) for (path, _), own in zip(modules, self._own, strict=True) for name in _MEMBERS]
        self._members = [(path, table) for path, table in tables if table]
        self._held = [[*map(id, table.values())] for _, table in self._members]
        self._tensors = [
            (path, vars(module), name, value)
            for path, module in modules
            for name, value in attributes(module)
            if isinstance(value, Tensor)
        ]
        self._versions = [_version(tensor) for *_, tensor in self._tensors]

    def warn_of_changes(self) -> None:
        """Warns of each change, once."""
        for text in self._changes():
            warnings.warn(text, stacklevel=7)  # where the model is called

    def _changes(self) -> Iterator[str]:
        if any(self._empty):
            got = [item for item in self._unhooked if item[2]]
            self._hooked += [(*item, ()) for item in got]
            self._unhooked = [item for item in self._unhooked if not item[2]]
            self._empty = [table for *_, table in self._unhooked]
        for number, (path, kind, table, known) in enumerate(self._hooked):
            if tuple(table) != known:
                self._hooked[number] = path, kind, table, tuple(table)
                yield (
                    f"{_module(path)} {'lost' if set(table) <= set(known) else 'got'} {_HOOKS[kind]} once the model "
                    f"was planned, {_GOES_ON}: it goes on with what the captured ones compute, and calls none; "
                    f"{_BEFORE}, or give what a hook looks at as an output of forward"
                )
        for number, (path, members) in enumerate(self._members):
            if len(members) != len(self._held[number]) or [*map(id, members.values())] != self._held[number]:
                before = set(self._held[number])
                self._held[number] = [*map(id, members.values())]
                new = [dotted(path, name) for name, member in members.items() if id(member) not in before]
                yield (
                    f"{new[0] if new else f'a part of {_module(path)}'} was {'set' if new else 'taken away'} once the "
                    f"model was planned, {_GOES_ON}; {_BEFORE}, or load values by load_state_dict"
                )
        if [*map(type, (module for _, module in self._modules))] != self._classes:
            were, self._classes = self._classes, [type(module) for _, module in self._modules]
            for (path, module), was in zip(self._modules, were, strict=True):
                if type(module) is not was:
                    yield (
                        f"{_module(path)} became a {type(module).__name__} once the model was planned, as "
                        f"parametrizations make it, {_GOES_ON}; {_BEFORE}"
                    )
        if [*map(len, self._own)] != self._counts:
            self._counts = [*map(len, self._own)]
            for (path, module), own, names in zip(self._modules, self._own, self._names, strict=True):
                added = set(own) - names
                names |= added
                for name in sorted(added):
                    if hasattr(type(module), name):
                        yield f"{dotted(path, name)} was set once the model was planned, {_GOES_ON}; {_BEFORE}"
        for number, (path, own, name, tensor) in enumerate(self._tensors):
            now: Any = own.get(name)
            if now is not tensor or _version(tensor) != self._versions[number]:
                self._tensors[number] = path, own, name, now
                self._versions[number] = _version(now)
                yield (
                    f"the tensor {dotted(path, name)} was set or written once the model was planned, {_GOES_ON}; make "
                    "it a buffer (register_buffer), whose values it takes on, or an input of forward"
                )


class SetBuffers:
    """Which buffers a script has set or written since the last look, and their values. roots: by path in a program."""

    def __init__(self, roots: Mapping[str, nn.Module]) -> None:
        self._known = [
            (dotted(path, name), module._buffers, name, buffer, _version(buffer))
            for prefix, root in roots.items()
            for path, module in root.named_modules(prefix=prefix)
            for name, buffer in module._buffers.items()
            if buffer is not None and not buffer.is_meta
        ]

    def take(self) -> list[tuple[str, Tensor]]:
        """By name; the next look is from now on."""
        found = []
        for at, (name, own, key, buffer, version) in enumerate(self._known):
            now = own.get(key)
            if now is not None and (now is not buffer or _version(now) != version):
                self._known[at] = name, own, key, now, _version(now)
                found.append((name, now))
        return found


def _module(path: str) -> str:
    return f"module {path or '(root)'}"


def _version(tensor: Any) -> int:
    return tensor._version if isinstance(tensor, Tensor) and not tensor.is_inference() else -1
