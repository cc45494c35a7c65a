"""Numbers that a model keeps as plain attributes. A capture reads them once; the program goes on with what it read.

Of a forward that changes them itself (``self.step += 1``) a second capture tells whether the next call would compute
otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from autopart.other_draws import DRAWS
from autopart.passes.program import Program, mode_free_digests
from autopart.runtime.errors import CaptureError
from autopart.watched_attributes import attributes, dotted

_NUMBERS = (bool, int, float)
_ADVICE = (
    "keep it in a buffer (register_buffer) that forward writes in place, or give it as an input of forward; where only "
    "the first call differs, call the model once before"
)


@dataclass(frozen=True, slots=True)
class Changed:
    """A number that a forward changed. path: of its module."""

    module: nn.Module
    path: str
    name: str
    before: Any
    after: Any

    def __str__(self) -> str:
        return f"{dotted(self.path, self.name)} ({self.before!r}, then {self.after!r})"


class Numbers:
    """Those of some modules, by path, as a forward begins."""

    def __init__(self, modules: Iterable[tuple[str, nn.Module]]) -> None:
        self._before = [(path, module, _held(module)) for path, module in modules]

    def changed(self) -> list[Changed]:
        """What is another number now; not of modules that hold other tensors or buffers too, as these go with it."""
        found = []
        for path, module, before in self._before:
            own, now = [], _held(module)
            for name, value in before.items():
                if type(value) in _NUMBERS and type(now.get(name)) is type(value) and now[name] != value:
                    own.append(Changed(module, path, name, value, now[name]))
            if own and not any(
                isinstance(value, Tensor) and value is not before.get(name) for name, value in now.items()
            ):
                found += own
        return found


def _held(module: nn.Module) -> dict[str, Any]:
    """Attributes and buffers. Layers that are away have buffers which are not to be asked for."""
    return {**dict(attributes(module)), **dict(dict.items(vars(module)["_buffers"]))}


@contextmanager
def carried(changed: Sequence[Changed]) -> Iterator[None]:
    """Inside, the numbers are what a forward left."""
    for item in changed:
        setattr(item.module, item.name, item.after)
    try:
        yield
    finally:
        for item in changed:
            setattr(item.module, item.name, item.before)


def note_on_numbers(changed: Sequence[Changed], first: Program, second: Program) -> str:
    """What is said of numbers that forward changes. first, second: programs of the first call and the next.

    Raises CaptureError where these compute otherwise, unless layers are left out by chance.
    """
    ours, theirs = mode_free_digests(first), mode_free_digests(second)
    which = ", ".join(map(str, changed[:3])) + (" and others" if len(changed) > 3 else "")
    if ours != theirs and not any(note.startswith(DRAWS) for note in first.notes):
        differing = next((name for name in ours if ours[name] != theirs.get(name)), "")
        raise CaptureError(
            f"forward changes {which}, and the next call computes {differing!r} otherwise; a program is captured once. "
            f"Of a number that changes: {_ADVICE}"
        )
    return f"forward changes {which}; the program goes on as in the first call, whatever later calls would do"
