"""A model's buffers as they were before a capture: a forward that makes one leaves a tensor without values in it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def kept_buffers(model: nn.Module) -> Iterator[None]:
    """Buffers that are registered or replaced inside (biases by position, made when first used) are put back."""
    before = {module: (dict(module._buffers), set(module._non_persistent_buffers_set)) for module in model.modules()}
    try:
        yield
    finally:
        for module, (buffers, transient) in before.items():
            module._buffers.clear()
            module._buffers.update(buffers)
            module._non_persistent_buffers_set.clear()
            module._non_persistent_buffers_set.update(transient)
