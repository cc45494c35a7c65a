"""Which ``torch.autograd.Function`` a capture ran into: export records what its forward does, and not its backward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def own_backwards() -> Iterator[dict[str, None]]:
    """Inside, the names of Functions that are applied are collected; torch's own are left out."""
    found: dict[str, None] = {}
    original = torch.autograd.Function.__dict__["apply"]

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if not cls.__module__.startswith("torch."):
            found[cls.__qualname__] = None
        return original.__func__(cls, *args, **kwargs)

    setattr(torch.autograd.Function, "apply", classmethod(apply))  # noqa: B010
    try:
        yield found
    finally:
        setattr(torch.autograd.Function, "apply", original)  # noqa: B010


def note_on(name: str) -> str:
    """What is said of a Function."""
    return (
        f"{name} has a backward of its own, which is not used: its forward is differentiated. Where the two differ "
        "(straight-through estimators) the model trains otherwise than on one device"
    )
