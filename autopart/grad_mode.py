"""Where a model's code asks whether gradients are on, so that it may compute otherwise under ``torch.no_grad()``."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch

from autopart.capture_place import own_place


@contextmanager
def grad_mode_read() -> Iterator[list[str]]:
    """Inside, the first line outside of torch that calls ``torch.is_grad_enabled`` is noted, for all threads.

    Code that imported the function itself, or that reads ``requires_grad`` of what it computes, is not.
    """
    found: list[str] = []
    ask = torch.is_grad_enabled

    def noted() -> bool:
        package = str(sys._getframe(1).f_globals.get("__name__", "")).partition(".")[0]
        if not found and package not in ("torch", "autopart"):
            found.append(own_place(traceback.extract_stack()))
        return ask()

    with mock.patch.object(torch, "is_grad_enabled", noted):
        yield found
