"""Capturing a model without weights: everything that it reads has to lie on the meta device as its parameters do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn


@contextmanager
def all_on_meta(model: nn.Module, leaves: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The inputs' leaves to trace a model with; if its parameters are on meta, they are there too, and so are, inside,
    its buffers (which have values where the model was built under ``parameters_on_meta``).
    """
    parameters = list(model.parameters())
    if not parameters or not all(parameter.is_meta for parameter in parameters):
        yield dict(leaves)
        return
    kept: list[tuple[nn.Module, str, Tensor]] = []
    moved: dict[int, Tensor] = {}
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and not buffer.is_meta:
                kept.append((module, name, buffer))
                module._buffers[name] = moved.setdefault(id(buffer), buffer.to("meta"))
    try:
        yield {path: leaf.to("meta") if isinstance(leaf, Tensor) else leaf for path, leaf in leaves.items()}
    finally:
        for module, name, buffer in kept:
            module._buffers[name] = buffer
