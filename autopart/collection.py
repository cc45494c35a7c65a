"""Cycles of objects are looked for rarely while planning makes millions of objects that stay until it is done.

Going over all of them again and again took up to a third of the time; what it freed was next to nothing.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

_OBJECTS = 1_000_000
"""Made before new ones are gone over."""


@contextlib.contextmanager
def seldom_collected() -> Iterator[None]:
    """Collections wait for a million objects and leave alone those that are there now; afterwards all is as before.

    Where the process has frozen objects itself, which cannot be told from others later, only these are left alone.
    """
    before, freezes = gc.get_threshold(), not gc.get_freeze_count()
    if before[0]:  # else the process collects nothing
        gc.set_threshold(_OBJECTS, *before[1:])
    if freezes:
        gc.freeze()
    try:
        yield
    finally:
        gc.set_threshold(*before)
        if freezes:
            gc.unfreeze()
