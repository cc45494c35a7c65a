"""Checks of arguments' values that ``torch.distributions`` makes by default: no trace has the values that they look at.

They compute nothing, so that a model is captured without them; a program does not make them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch.distributions import Distribution


@contextmanager
def unchecked_arguments() -> Iterator[None]:
    """Inside, distributions check their arguments only where they are asked to (``validate_args=True``)."""
    before = Distribution._validate_args
    Distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        Distribution.set_default_validate_args(before)
